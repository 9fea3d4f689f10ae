"""Control frames."""

from .base import (
    MAX_FRAME,
    MAX_TOGETHER,
    UNKNOWN_LINK,
    Arrived,
    Channel,
    Closed,
    Denied,
    News,
    Opened,
    Rejected,
    SupportsBatches,
    SupportsLinkCost,
    check_frame,
    check_together,
)
from .inproc import Hub, InprocChannel
from .keys import Keys, key_of, write_keys
from .unix import UnixChannel
from .zeromq import ZmqChannel

__all__ = [
    "MAX_FRAME",
    "MAX_TOGETHER",
    "UNKNOWN_LINK",
    "Arrived",
    "Channel",
    "Closed",
    "Denied",
    "Hub",
    "InprocChannel",
    "Keys",
    "News",
    "Opened",
    "Rejected",
    "SupportsBatches",
    "SupportsLinkCost",
    "UnixChannel",
    "ZmqChannel",
    "check_frame",
    "check_together",
    "key_of",
    "write_keys",
]
