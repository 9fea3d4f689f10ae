"""Gather, scatter and copy: pages into staging, staging into pages, and pages into pages of another pool."""
