"""Senders and receivers: the only place where core, pool, kernels, transport and channel meet."""

from .base import Delivery, Handle, PeerInfo, Receiver, Reception, Report, Sender, Step
from .life import Life
from .receiver import DecodeEndpoint
from .sender import PrefillEndpoint

__all__ = [
    "DecodeEndpoint",
    "Delivery",
    "Handle",
    "Life",
    "PeerInfo",
    "PrefillEndpoint",
    "Receiver",
    "Reception",
    "Report",
    "Sender",
    "Step",
]
