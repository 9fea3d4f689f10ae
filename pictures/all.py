"""Every picture by the name of its file in docs/images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from .architecture import architecture
from .boxes import boxes
from .drawing import Picture
from .overview import overview
from .paths import paths
from .prefix import prefix
from .request import request
from .ring import ring

IMAGES = Path(__file__).parents[1] / "docs" / "images"

PICTURES: Mapping[str, Callable[[], Picture]] = {
    "architecture": architecture,
    "boxes": boxes,
    "overview": overview,
    "paths": paths,
    "prefix": prefix,
    "request": request,
    "ring": ring,
}
