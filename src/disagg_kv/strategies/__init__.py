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
from .paths import SlicePlanner
from .registry import (
    AUTO,
    PER_CHUNK,
    Strategy,
    in_auto_order,
    paths,
    register,
    strategy,
)
from .schedules import LayerPipelined
from .selections import Incremental

__all__ = [
    "AUTO",
    "PER_CHUNK",
    "Explanation",
    "Feature",
    "Incremental",
    "Job",
    "LayerPipelined",
    "MoverName",
    "PairCount",
    "Schedule",
    "Selection",
    "SlicePlanner",
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
