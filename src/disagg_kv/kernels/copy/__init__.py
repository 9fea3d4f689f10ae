"""Pages into pages of another pool."""
