"""A flag that whatever copies raises itself: a word of host memory, stored behind the bytes that it stands for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

from attrs import field, frozen

from .. import arguments


@frozen
class Flag:
    """A word that another process reads; see :mod:`disagg_kv.transports.flags`.

    Args:
        addr: its address, for the device of the memory that is copied.
        value: what is stored there, 8 bytes at once.
        owner: any object that keeps the word mapped; never read.
    """

    addr: int
    value: int
    owner: object = field(default=None, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("addr", "value"):
            known = arguments.count(getattr(self, name), f"flag: {name}", least=1, most=(1 << 64) - 1)
            object.__setattr__(self, name, known)


def raise_flags(flags: Iterable[Flag]) -> None:
    """Store words of host memory. All that this thread stored before is visible with each of them."""
    for flag in flags:
        fence()
        ctypes.c_uint64.from_address(flag.addr).value = flag.value


def fence() -> None:
    """What this thread has stored is visible before what it stores next, and it reads nothing next before now.

    A lock is released, then acquired again. That orders memory on every processor; on x86-64 both are in order.
    """
    order = threading.Lock()
    for _ in range(2):
        with order:
            pass
