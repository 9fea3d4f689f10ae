"""From boxes to segments, descriptors and staged layouts. Pure."""

from .base import Segment, StagedLayout, Writes
from .cost import Choice, CostModel, Estimate, choose
from .descriptors import coalesce, direct_writes, refuse_direct, slice_writes
from .explain import Explanation, PairPlan, explain, plain_site
from .intake import Intake
from .staged import PartView

__all__ = [
    "Choice",
    "CostModel",
    "Estimate",
    "Explanation",
    "Intake",
    "PairPlan",
    "PartView",
    "Segment",
    "StagedLayout",
    "Writes",
    "choose",
    "coalesce",
    "direct_writes",
    "explain",
    "plain_site",
    "refuse_direct",
    "slice_writes",
]
