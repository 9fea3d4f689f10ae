"""Descriptors: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import zlib

import attrs
import msgspec
import pytest

from disagg_kv.errors import RemoteProtocolError
from disagg_kv.ids import Peer, RegionId
from disagg_kv.transports import Descriptor, Region, cuda_memory, decode, encode
from disagg_kv.transports.cuda_api import Gpu
from disagg_kv.transports.cuda_memory import Owner
from disagg_kv.transports.descriptor import _MAGIC, MAX_BYTES, MOST_BYTES, MOST_REGIONS, VERSION
from disagg_kv.transports.memfd import FlagPlace, Place
from disagg_kv.transports.mooncake_flight import Address
from disagg_kv.transports.nixl import _Contact
from disagg_kv.transports.process import Process

ME = Peer(bytes(range(16)))
HEAD = _MAGIC + bytes([VERSION])
TOO_MANY = tuple(Region(RegionId(number), 1) for number in range(MOST_REGIONS + 1))


def test_what_travels_has_one_shape_per_version() -> None:
    """Who changes one of these types raises ``VERSION``, and then this test."""
    types = (Descriptor, Region, Process, Gpu, Owner, cuda_memory.Place, Place, FlagPlace, _Contact, Address)
    assert VERSION == 1
    assert [" ".join(field.name for field in attrs.fields(one)) for one in types] == [
        "transport incarnation serial regions blob",
        "id nbytes device base blob",
        "pid started host",
        "uuid partitioned",
        "process ipc gpu",
        "handle offset",
        "number fd offset",
        "process place nbytes",
        "process version checksum metadata",
        "session host port protocol process",
    ]


def test_a_descriptor_survives_the_wire() -> None:
    """With every field."""
    whole = Descriptor("x", ME, 7, (Region(RegionId(3), 10, "cuda:1", 1 << 62, b"\0"), Region(RegionId(4), 1)), b"blob")
    assert decode(encode(whole), "x") == whole


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"", "not a transport descriptor: 0 bytes"),
        (_MAGIC, "not a transport descriptor"),
        (_MAGIC + bytes([VERSION + 1]) + b"\x80", f"version {VERSION + 1}, this side speaks version {VERSION}"),
        (HEAD, "cut short, or has a tail"),
        (HEAD + zlib.compress(b"\x80")[:-1], "cut short, or has a tail"),
        (HEAD + zlib.compress(b"\x80") + b"x", "cut short, or has a tail"),
        (HEAD + zlib.compress(bytes(MAX_BYTES + 1)), "cut short, or has a tail"),
        (HEAD + b"garbage", "cannot be unfolded"),
        (HEAD + zlib.compress(b"\x80"), "cannot be read"),
        (HEAD + zlib.compress(b"\x81\xa1x" + b"\x91" * 100_000), "cannot be read"),
        (HEAD + zlib.compress(msgspec.msgpack.encode({"transport": 3})), "cannot be read"),
        (encode(Descriptor("y", ME)), "of transport 'y' given to transport 'x'"),
        (encode(Descriptor("x", Peer(b"short"))), "an incarnation of 5 bytes"),
        (encode(Descriptor("x", ME, 0, (Region(RegionId(-1), 5),))), "impossible region"),
        (encode(Descriptor("x", ME, 0, (Region(RegionId(1), 0),))), "impossible region"),
        (encode(Descriptor("x", ME, 0, (Region(RegionId(1), 5, "cpu", -1),))), "impossible region"),
        (encode(Descriptor("x", ME, 0, (Region(RegionId(1), 5), Region(RegionId(1), 6)))), "names a region twice"),
        (encode(Descriptor("x", ME, 0, TOO_MANY)), "4097 regions with 4097 bytes"),
        (encode(Descriptor("x", ME, 0, (Region(RegionId(0), MOST_BYTES), Region(RegionId(1), 1)))), "2 regions with"),
    ],
)
def test_what_is_no_descriptor_is_refused_with_the_reason(bad: bytes, says: str) -> None:
    """Garbage, other versions, other transports, values that cannot be."""
    with pytest.raises(RemoteProtocolError, match=says):
        decode(bad, "x")
