"""Bookkeeping of every transport: which memory is registered, and where a batch lies in it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import ConfigurationError, RegistrationError
from ..geometry import I32, I64
from ..ids import RegionId
from ..memory import Buffer

FEW = 8
"""Ranges that Python goes through faster than NumPy does."""


class Extents:
    """Where regions lie, for looking up whole batches at once.

    Args:
        regions: ``(id, address, nbytes)`` of each.
        whose: for error messages, for example ``"local"``.
    """

    def __init__(self, regions: Iterable[tuple[RegionId, int, int]], whose: str) -> None:
        rows = sorted(regions)
        self._ids = np.array([i for i, _, _ in rows], np.int64)
        self._bases = np.array([base for _, base, _ in rows], np.int64)
        self._sizes = np.array([size for _, _, size in rows], np.int64)
        self._whose = whose
        self._one = {i: (base, size) for i, base, size in rows}

    def has_all(self, others: Extents) -> bool:
        """Whether each region of the others lies here at the same place."""
        return others._one.items() <= self._one.items()

    def address(self, region: int, offset: int, nbytes: int) -> int | None:
        """Where one range begins; None: there is something wrong with it, and :meth:`addresses` says what.

        The staged path posts one range at a time; looking it up as an array takes ten times as long.
        """
        base, size = self._one.get(RegionId(region), (0, -1))
        return base + offset if 0 <= nbytes <= size and 0 <= offset <= size - nbytes else None

    def addresses(self, regions: I32, offsets: I64, nbytes: I64) -> I64:
        """The address at which each range begins.

        Raises:
            RegistrationError: a region that is not here, or a range that is not inside its region.
        """
        if not len(regions):
            return np.empty(0, np.int64)
        if len(regions) <= FEW:
            ranges = zip(regions.tolist(), offsets.tolist(), nbytes.tolist(), strict=True)
            few = [self.address(*one) for one in ranges]
            if None not in few:
                return np.array(few, np.int64)
        if not len(self._ids):
            raise RegistrationError(f"{self._whose} region {int(regions[0])}: none is registered")
        at = np.minimum(np.searchsorted(self._ids, regions), len(self._ids) - 1)
        unknown = self._ids[at] != regions
        if unknown.any():
            raise RegistrationError(f"{self._whose} region {int(regions[np.argmax(unknown)])} is not registered")
        sizes = self._sizes[at]
        outside = (nbytes < 0) | (nbytes > sizes) | (offsets < 0) | (offsets > sizes - nbytes)
        if outside.any():
            i = int(np.argmax(outside))
            raise RegistrationError(
                f"{self._whose} region {int(regions[i])}: {int(nbytes[i])} bytes at offset {int(offsets[i])} "
                f"are not inside its {int(sizes[i])} bytes (descriptor {i} of {len(regions)})"
            )
        return self._bases[at] + offsets


class RegionTable:
    """The regions one transport has registered.

    Args:
        devices: kinds of memory that it may hold, as in ``Capabilities.devices``.
    """

    def __init__(self, devices: frozenset[str]) -> None:
        self._devices = devices
        self._buffers: dict[RegionId, Buffer] = {}
        self.serial = 0
        self.extents = Extents((), "local")

    def items(self) -> Sequence[tuple[RegionId, Buffer]]:
        """Every live region."""
        return tuple(self._buffers.items())

    def add(self, buffers: Sequence[Buffer]) -> tuple[RegionId, ...]:
        """Number the buffers, all or none. Numbers are never used again.

        Raises:
            ConfigurationError: an overlap.
            RegistrationError: memory of another kind, or memory that cannot be read.
        """
        live = list(self._buffers.values())
        for buffer in buffers:
            self._check(buffer, live)
            live.append(buffer)
        ids = tuple(RegionId(self.serial + i) for i in range(len(buffers)))
        self._buffers.update(zip(ids, buffers, strict=True))
        self._changed(len(buffers))
        return ids

    def remove(self, regions: Sequence[RegionId]) -> None:
        """Forget regions that were added just now, and that the library has refused."""
        for region in regions:
            del self._buffers[region]
        self._changed(1)

    def clear(self) -> None:
        """Forget everything; for ``close``."""
        self._buffers.clear()
        self._changed(1)

    def get(self, region: RegionId) -> Buffer | None:
        """The buffer of a live region."""
        return self._buffers.get(region)

    def _changed(self, by: int) -> None:
        self.serial += by
        self.extents = Extents(((i, b.addr, b.nbytes) for i, b in self._buffers.items()), "local")

    def _check(self, buffer: Buffer, live: Sequence[Buffer]) -> None:
        kind = buffer.device.partition(":")[0]
        where = f"{buffer.nbytes} bytes at {buffer.addr:#x} on {buffer.device!r}"
        if kind not in self._devices:
            raise RegistrationError(f"{where}: this transport registers {', '.join(sorted(self._devices))} memory only")
        for other in live:
            if (
                buffer.device == other.device
                and buffer.addr < other.addr + other.nbytes
                and other.addr < buffer.addr + buffer.nbytes
            ):
                raise ConfigurationError(f"{where}: overlaps the region of {other.nbytes} bytes at {other.addr:#x}")
        if kind == "cpu" and not (readable(buffer.addr) and readable(buffer.addr + buffer.nbytes - 1)):
            raise RegistrationError(f"{where}: the memory cannot be read")


def readable(addr: int) -> bool:
    """Whether this process may read the byte at ``addr``; the kernel checks it, so that no read faults."""
    if addr >= 1 << 63:
        return False
    out, into = os.pipe()
    try:
        os.write(into, (ctypes.c_char * 1).from_address(addr))
    except OSError:
        return False
    finally:
        os.close(out)
        os.close(into)
    return True


def copy(target: I64, source: I64, nbytes: I64) -> None:
    """Copy ``nbytes[i]`` bytes from address ``source[i]`` to ``target[i]``, in order.

    Neighbours that follow each other on both sides are copied in one go. The GIL is released during each copy.
    """
    if len(nbytes) <= FEW:
        for to, at, size in zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(to, at, size)
        return
    some = nbytes > 0
    if not some.all():
        target, source, nbytes = target[some], source[some], nbytes[some]
    if not len(nbytes):
        return
    follows = (target[1:] == target[:-1] + nbytes[:-1]) & (source[1:] == source[:-1] + nbytes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    runs = zip(target[first].tolist(), source[first].tolist(), np.add.reduceat(nbytes, first).tolist(), strict=True)
    for to, at, size in runs:
        ctypes.memmove(to, at, size)
