"""How, when and what: the three axes of a strategy, and their registry."""

from .base import (
    Feature,
    Job,
    Schedule,
    Selection,
    Tables,
    TransferPlanner,
    copies_pages,
    maps_pages,
    pulls_pages,
    refusal,
)
from .explain import Explanation, PairCount, explain
from .paths import DirectPlanner, MappedPlanner, MappedPullPlanner, SlicePlanner, StagedPlanner
from .registry import (
    AUTO,
    PER_CHUNK,
    Strategy,
    auto_paths,
    paths,
    register,
    schedules,
    selections,
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
    "MappedPullPlanner",
    "PairCount",
    "PerChunk",
    "Schedule",
    "Selection",
    "SlicePlanner",
    "StagedPlanner",
    "Strategy",
    "Tables",
    "TransferPlanner",
    "auto_paths",
    "copies_pages",
    "explain",
    "maps_pages",
    "paths",
    "pulls_pages",
    "refusal",
    "register",
    "schedules",
    "selections",
    "strategy",
]
