"""How endpoints find each other."""

from .base import Rendezvous, Source, SupportsWithdraw
from .etcd import EtcdRendezvous
from .request import RequestRendezvous
from .static import StaticRendezvous
from .store import StoreRendezvous

__all__ = [
    "EtcdRendezvous",
    "Rendezvous",
    "RequestRendezvous",
    "Source",
    "StaticRendezvous",
    "StoreRendezvous",
    "SupportsWithdraw",
]
