"""Senders and receivers: the only place where core, pool, kernels, transport and channel meet."""

from .base import Delivery, Handle, PeerInfo, Receiver, Reception, Report, Sender, Step
from .keeping import KeptPages, PageSums, page_sums
from .life import Life
from .receiver import DecodeEndpoint
from .recovery import Attempt, Fail, Recovering, RecoveringReceiver, Recovery, Retry
from .sender import PrefillEndpoint

__all__ = [
    "Attempt",
    "DecodeEndpoint",
    "Delivery",
    "Fail",
    "Handle",
    "KeptPages",
    "Life",
    "PageSums",
    "PeerInfo",
    "PrefillEndpoint",
    "Receiver",
    "Reception",
    "Recovering",
    "RecoveringReceiver",
    "Recovery",
    "Report",
    "Retry",
    "Sender",
    "Step",
    "page_sums",
]
