"""How, when and what: the three axes of a strategy, and their registry."""

from .base import Feature, Job, Path, Schedule, Tables
from .paths import DirectPath, SlicePath, StagedPath
from .registry import AUTO, PER_CHUNK, Strategy, paths, register, schedules, strategy
from .schedules import LayerPipelined, PerChunk

__all__ = [
    "AUTO",
    "PER_CHUNK",
    "DirectPath",
    "Feature",
    "Job",
    "LayerPipelined",
    "Path",
    "PerChunk",
    "Schedule",
    "SlicePath",
    "StagedPath",
    "Strategy",
    "Tables",
    "paths",
    "register",
    "schedules",
    "strategy",
]
