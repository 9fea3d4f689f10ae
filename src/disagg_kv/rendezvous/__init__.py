"""Who is where."""

from .base import Rendezvous, Source
from .static import StaticRendezvous
from .store import StoreRendezvous

__all__ = ["Rendezvous", "Source", "StaticRendezvous", "StoreRendezvous"]
