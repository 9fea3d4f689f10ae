"""Control frames."""

from .base import MAX_FRAME, Arrived, Channel, Closed, Opened
from .inproc import Hub, InprocChannel
from .zeromq import ZmqChannel

__all__ = ["MAX_FRAME", "Arrived", "Channel", "Closed", "Hub", "InprocChannel", "Opened", "ZmqChannel"]
