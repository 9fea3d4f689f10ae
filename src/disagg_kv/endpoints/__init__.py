"""Senders and receivers: the only place where core, pool, kernels, transport and channel meet."""

from .base import Delivery, Handle, PeerInfo, PeerState, Receiver, Reception, Report, Sender, Step
from .keeping import KeptPages, PageSums, page_sums
from .life import Life
from .receiver import DecodeEndpoint
from .recovery import Attempt, Fail, Recovering, RecoveringReceiver, Recovery, Retry
from .roster import format_peers
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
    "PeerState",
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
    "format_peers",
    "page_sums",
]
