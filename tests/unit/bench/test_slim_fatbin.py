"""GPU code that the driver of one card may load stays as it is; all other code is blank, at the same offsets."""

from __future__ import annotations

import struct

import pytest

from benchmarks.engines_gpu.slim_fatbin import MACHINE_CODE, MAGIC, PTX, slim

CODE = b"\xab" * 24


def entry(kind: int, arch: int) -> bytes:
    head = struct.pack("<HHIQ", kind, 0, 64, len(CODE)).ljust(28, b"\0") + struct.pack("<I", arch)
    return head.ljust(64, b"\0") + CODE


def fat_binary(*entries: tuple[int, int]) -> bytes:
    body = b"".join(entry(*one) for one in entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


def library(*fat_binaries: bytes) -> bytearray:
    """An ELF file with the sections .nv_fatbin and .other, both with these bytes, and the table of names."""
    names, content = b"\0.nv_fatbin\0.other\0.names\0", b"\0" * 8 + b"".join(fat_binaries)
    bodies = (content, content, names)
    rows, at = [], 64
    for name, body in zip((b".nv_fatbin", b".other", b".names"), bodies, strict=True):
        rows.append(struct.pack("<IIQQQQIIQQ", names.index(name), 0, 0, 0, at, len(body), 0, 0, 0, 0))
        at += len(body)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, at)
    struct.pack_into("<HHH", head, 0x3A, len(rows[0]), len(rows), 2)
    return bytearray(bytes(head) + b"".join(bodies) + b"".join(rows))


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([(MACHINE_CODE, 80), (MACHINE_CODE, 90), (PTX, 90), (MACHINE_CODE, 100)], [1]),
        ([(MACHINE_CODE, 86), (PTX, 80), (PTX, 75), (PTX, 100)], [1]),
        ([(MACHINE_CODE, 100), (PTX, 100)], []),
    ],
)
def test_only_what_the_driver_may_take_stays(entries: list[tuple[int, int]], kept: list[int]) -> None:
    before = library(fat_binary(*entries), fat_binary((MACHINE_CODE, 90)))
    after = bytearray(before)
    assert slim(after, 90) == (len(entries) - len(kept)) * len(CODE)
    assert len(after) == len(before)
    expected = bytearray(before)
    for number in range(len(entries)):
        if number not in kept:
            start = 64 + 8 + 16 + number * (64 + len(CODE)) + 64
            expected[start : start + len(CODE)] = bytes(len(CODE))
    assert after == expected


def test_an_older_card_of_the_same_generation_lends_its_code() -> None:
    changed = library(fat_binary((MACHINE_CODE, 80), (MACHINE_CODE, 75), (PTX, 75)))
    assert slim(changed, 86) == 2 * len(CODE)
