"""One-sided writes."""

from .base import Capabilities, Ended, Heard, Settled, SupportsAllocate, Transport

__all__ = ["Capabilities", "Ended", "Heard", "Settled", "SupportsAllocate", "Transport"]
