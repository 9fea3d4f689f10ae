"""Blanks the GPU code of other architectures in a CUDA library, so that it compresses well.

The section ``.nv_fatbin`` of a library holds fat binaries: a header, then entries of PTX or machine code, each for one
architecture. The driver takes the entry of its card and never reads the payload of others, so zeros replace those.
Offsets stay. A fat binary without machine code for the architecture keeps that of the same major version below it, or
else its highest PTX, which the driver compiles.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from attrs import frozen

MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
SECTION = b".nv_fatbin"


@frozen
class Entry:
    """Code for one architecture; ``start`` and ``size`` are those of its payload in the library."""

    kind: int
    arch: int
    start: int
    size: int


def slim(library: bytearray, arch: int) -> int:
    """Blank in place; returns how many bytes."""
    blanked = 0
    for start, stop in sections(library):
        for entries in fat_binaries(library, start, stop):
            keep = kept(entries, arch)
            for one in entries:
                if one not in keep:
                    library[one.start : one.start + one.size] = bytes(one.size)
                    blanked += one.size
    return blanked


def kept(entries: Sequence[Entry], arch: int) -> Sequence[Entry]:
    """What the driver may take on a card of this architecture."""
    code = [one for one in entries if one.kind == MACHINE_CODE and one.arch <= arch and one.arch // 10 == arch // 10]
    if exact := [one for one in code if one.arch == arch]:
        return exact
    ptx = [one for one in entries if one.kind == PTX and one.arch <= arch]
    return code or [one for one in ptx if one.arch == max(other.arch for other in ptx)]


def sections(library: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Where the fat binaries of a 64-bit little-endian ELF file begin and end."""
    table = struct.unpack_from("<Q", library, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", library, table + number * size) for number in range(count)]
    for row in rows:
        at = rows[names][4] + row[0]
        if library[at : library.index(b"\0", at)] == SECTION:
            yield row[4], row[4] + row[5]


def fat_binaries(library: bytes | bytearray, start: int, stop: int) -> Iterator[list[Entry]]:
    """The entries of each fat binary of a section."""
    at = start
    while at + 16 <= stop:
        magic, _, header, length = struct.unpack_from("<IHHQ", library, at)
        if magic != MAGIC:
            at += 8
            continue
        end = at + header + length
        yield list(_entries(library, at + header, end))
        at = end


def _entries(library: bytes | bytearray, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        yield Entry(kind, struct.unpack_from("<I", library, at + 28)[0], at + header, size)
        at += header + size
