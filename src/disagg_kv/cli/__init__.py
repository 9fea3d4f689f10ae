"""The command ``disagg-kv``."""

from .main import main

__all__ = ["main"]
