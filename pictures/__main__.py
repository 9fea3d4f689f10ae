"""Writes every picture into docs/images."""

from __future__ import annotations

from .all import IMAGES, PICTURES

for name, make in PICTURES.items():
    (IMAGES / f"{name}.svg").write_text(make().svg())
