"""From boxes to segments, descriptors and staged layouts. Pure."""

from .base import Segment, StagedLayout, Writes

__all__ = ["Segment", "StagedLayout", "Writes"]
