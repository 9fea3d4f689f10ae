"""The command ``disagg-kv``."""
