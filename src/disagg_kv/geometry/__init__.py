"""Boxes: the contents of a cache, the part that each rank owns, and its place in memory."""

from .conversion import conversions, difference, read_as, shards_as
from .coverage import Coverage
from .election import Share, elect
from .formats import CONVERSION_NAMES, CONVERSIONS
from .layout import I32, I64, Group, PageTable, Plane, PlaneConversion, Site, places
from .overlap import check_planes
from .shard import Holding, Shard, even_units, shard, stages
from .spec import ENDLESS, CacheSpec, Component, Extent, item_bytes, window_rows

__all__ = [
    "CONVERSIONS",
    "CONVERSION_NAMES",
    "ENDLESS",
    "I32",
    "I64",
    "CacheSpec",
    "Component",
    "Coverage",
    "Extent",
    "Group",
    "Holding",
    "PageTable",
    "Plane",
    "PlaneConversion",
    "Shard",
    "Share",
    "Site",
    "check_planes",
    "conversions",
    "difference",
    "elect",
    "even_units",
    "item_bytes",
    "places",
    "read_as",
    "shard",
    "shards_as",
    "stages",
    "window_rows",
]
