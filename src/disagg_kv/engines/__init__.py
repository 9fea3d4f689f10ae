"""Adapters: how one engine's cache becomes pools, page tables and calls of the endpoints."""
