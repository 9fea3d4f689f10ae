"""From boxes to segments, descriptors and staged layouts. Pure."""

from .base import EVERY, UNLIMITED, Limits, RowRange, Segment, StagedLayout, Writes
from .cost import Choice, CostModel, Estimate, choose
from .descriptors import (
    Run,
    Tables,
    coalesce,
    direct_count,
    direct_writes,
    refuse_direct,
    runs,
    slice_count,
    slice_writes,
)
from .explain import Explanation, OtherPath, PairParts, PairPlan, explain, plain_site
from .grouping import Adaptive, Batch, Groups, LayerRun, Pace, exposed_s, fastest, whole
from .intake import Intake, intake_of
from .staged import PartView, part_view

__all__ = [
    "EVERY",
    "UNLIMITED",
    "Adaptive",
    "Batch",
    "Choice",
    "CostModel",
    "Estimate",
    "Explanation",
    "Groups",
    "Intake",
    "LayerRun",
    "Limits",
    "OtherPath",
    "Pace",
    "PairParts",
    "PairPlan",
    "PartView",
    "RowRange",
    "Run",
    "Segment",
    "StagedLayout",
    "Tables",
    "Writes",
    "choose",
    "coalesce",
    "direct_count",
    "direct_writes",
    "explain",
    "exposed_s",
    "fastest",
    "intake_of",
    "part_view",
    "plain_site",
    "refuse_direct",
    "runs",
    "slice_count",
    "slice_writes",
    "whole",
]
