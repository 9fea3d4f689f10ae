"""Control frames."""

from .base import MAX_FRAME, Arrived, Channel, Closed, Denied, News, Opened, Rejected
from .inproc import Hub, InprocChannel
from .keys import Keys, key_of, write_keys
from .zeromq import ZmqChannel

__all__ = [
    "MAX_FRAME",
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
    "ZmqChannel",
    "key_of",
    "write_keys",
]
