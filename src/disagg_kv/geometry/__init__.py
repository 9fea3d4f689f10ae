"""Boxes: the contents of a cache, the part that each rank owns, and its place in memory."""

from .coverage import Coverage
from .election import Share, elect, rotations
from .layout import I32, I64, Group, PageTable, Plane, Site, places
from .overlap import check_planes
from .shard import Holding, Shard, attention_tp, even_units, shard, stages
from .spec import ENDLESS, ITEM_BYTES, CacheSpec, Component, Extent, item_bytes, window_rows

__all__ = [
    "ENDLESS",
    "I32",
    "I64",
    "ITEM_BYTES",
    "CacheSpec",
    "Component",
    "Coverage",
    "Extent",
    "Group",
    "Holding",
    "PageTable",
    "Plane",
    "Shard",
    "Share",
    "Site",
    "attention_tp",
    "check_planes",
    "elect",
    "even_units",
    "item_bytes",
    "places",
    "rotations",
    "shard",
    "stages",
    "window_rows",
]
