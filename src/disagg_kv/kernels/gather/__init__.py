"""Pages into staging."""
