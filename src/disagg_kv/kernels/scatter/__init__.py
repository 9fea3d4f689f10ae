"""Staging into pages."""
