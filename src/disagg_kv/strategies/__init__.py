"""How, when and what: the three axes of a strategy, and their registry."""

from .base import Feature, Job, Schedule, Tables, TransferPlanner
from .paths import DirectPlanner, SlicePlanner, StagedPlanner
from .registry import AUTO, PER_CHUNK, Strategy, auto_paths, other_paths, paths, register, schedules, strategy
from .schedules import LayerPipelined, PerChunk

__all__ = [
    "AUTO",
    "PER_CHUNK",
    "DirectPlanner",
    "Feature",
    "Job",
    "LayerPipelined",
    "PerChunk",
    "Schedule",
    "SlicePlanner",
    "StagedPlanner",
    "Strategy",
    "Tables",
    "TransferPlanner",
    "auto_paths",
    "other_paths",
    "paths",
    "register",
    "schedules",
    "strategy",
]
