"""How, when and what: the three axes of a strategy, and their registry."""

from ..planning import Tables
from .base import (
    Feature,
    Job,
    MoverName,
    Schedule,
    Selection,
    TransferPlanner,
    exposes_pages,
    refusal,
)
from .explain import Explanation, PairCount, explain
from .paths import DirectPlanner, MappedPlanner, SlicePlanner, StagedPlanner
from .registry import (
    AUTO,
    PER_CHUNK,
    Strategy,
    in_auto_order,
    paths,
    register,
    strategy,
)
from .schedules import LayerPipelined, PerChunk
from .selections import Full, Incremental

__all__ = [
    "AUTO",
    "PER_CHUNK",
    "DirectPlanner",
    "Explanation",
    "Feature",
    "Full",
    "Incremental",
    "Job",
    "LayerPipelined",
    "MappedPlanner",
    "MoverName",
    "PairCount",
    "PerChunk",
    "Schedule",
    "Selection",
    "SlicePlanner",
    "StagedPlanner",
    "Strategy",
    "Tables",
    "TransferPlanner",
    "explain",
    "exposes_pages",
    "in_auto_order",
    "paths",
    "refusal",
    "register",
    "strategy",
]
