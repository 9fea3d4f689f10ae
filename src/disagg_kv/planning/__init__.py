"""From boxes to segments, descriptors and staged layouts. Pure."""

from .base import Segment, StagedLayout, Writes
from .intake import Intake

__all__ = ["Intake", "Segment", "StagedLayout", "Writes"]
