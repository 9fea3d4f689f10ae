"""How, when and what: the three axes of a strategy, and their registry."""

from .base import Job, Path, Tables
from .paths import DirectPath, SlicePath, StagedPath
from .registry import AUTO, Strategy, paths, register, strategy

__all__ = [
    "AUTO",
    "DirectPath",
    "Job",
    "Path",
    "SlicePath",
    "StagedPath",
    "Strategy",
    "Tables",
    "paths",
    "register",
    "strategy",
]
