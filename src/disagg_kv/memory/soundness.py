"""Checks of the memory of any pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from ..errors import GeometryError
from ..geometry import Site, check_planes
from .base import Buffer

SITES = 64
"""Number of sites that are remembered as sound, by value. Equal pools are checked once."""


def check_memory(site: Site, buffers: Sequence[Buffer]) -> None:
    """Raise a :class:`GeometryError` unless ``buffers`` match ``site``, and cells share no byte that they may not.

    The buffers must lie on one device and have the lengths in the site. Each plane must lie inside its buffer.
    """
    if site.buffers != tuple(b.nbytes for b in buffers):
        raise GeometryError(f"buffers of {[b.nbytes for b in buffers]} bytes, but the site says {site.buffers}")
    if len({b.device for b in buffers}) != 1:
        raise GeometryError(f"a pool's buffers lie on one device, not on {[b.device for b in buffers]}")
    _check_site(site)
    _check_apart(buffers)


@lru_cache(SITES)
def _check_site(site: Site) -> None:
    site.check()
    check_planes(site)


def _check_apart(buffers: Sequence[Buffer]) -> None:
    """Raise a :class:`GeometryError` if two buffers of one device share memory: planes in them may overlap."""
    by_start = sorted((b.addr, b.addr + b.nbytes, number) for number, b in enumerate(buffers))
    for (_, end, number), (start, _, after) in itertools.pairwise(by_start):
        if start < end:
            first, second = sorted((number, after))
            raise GeometryError(f"buffers {first} and {second} share memory: give them as one buffer")
