"""Who is where."""

from .base import Rendezvous, Source

__all__ = ["Rendezvous", "Source"]
