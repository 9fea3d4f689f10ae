"""Control frames."""

from .base import MAX_FRAME, Arrived, Channel, Closed, Opened

__all__ = ["MAX_FRAME", "Arrived", "Channel", "Closed", "Opened"]
