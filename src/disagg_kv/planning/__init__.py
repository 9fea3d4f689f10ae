"""From boxes to segments, descriptors and staged layouts. Pure."""

from .base import EVERY, UNLIMITED, Limits, PageCopy, RowRange, Segment, StagedLayout, Writes
from .descriptors import Tables, coalesce, direct_writes, slice_writes
from .grouping import Adaptive, Batch, Groups, LayerRun, Pace, exposed_s, fastest, whole
from .instance import InstancePlans
from .pair import PairPlan
from .rank_plan import RankPlan, rank_plan_of
from .site import plain_site
from .staged import PartView, check_pages, check_tables

__all__ = [
    "EVERY",
    "UNLIMITED",
    "Adaptive",
    "Batch",
    "Groups",
    "InstancePlans",
    "LayerRun",
    "Limits",
    "Pace",
    "PageCopy",
    "PairPlan",
    "PartView",
    "RankPlan",
    "RowRange",
    "Segment",
    "StagedLayout",
    "Tables",
    "Writes",
    "check_pages",
    "check_tables",
    "coalesce",
    "direct_writes",
    "exposed_s",
    "fastest",
    "plain_site",
    "rank_plan_of",
    "slice_writes",
    "whole",
]
