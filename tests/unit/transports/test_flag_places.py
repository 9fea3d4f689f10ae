"""Where a flag page or words is, as a peer says it: nothing that it says is an error that was not foreseen."""

from __future__ import annotations

import os

import attrs
import pytest

from disagg_kv.errors import DisaggKVError, RemoteProtocolError
from disagg_kv.ids import Peer
from disagg_kv.transports.descriptor import pack, unpack
from disagg_kv.transports.memfd import FLAG_PLACE, FlagPlace, Place, new_flag_page, open_flag_page
from disagg_kv.transports.process import Process

PEER = Peer(b"p" * 16)
NUMBERS = (-(2**63), -(2**31), -8, -1, 0, 1, 7, 8, 12, 2**31, 2**32 + 8, 2**62, 2**63 - 1, 2**64 - 1)
FIELDS = ("pid", "started", "number", "fd", "offset", "nbytes")


def changed(place: FlagPlace, name: str, value: int) -> FlagPlace:
    """The same place with another number, wherever it is nested."""
    if name == "nbytes":
        return attrs.evolve(place, nbytes=value)
    process, inside = place.process, place.place
    pid, started = (value if one == name else getattr(process, one) for one in ("pid", "started"))
    number, fd, offset = (value if one == name else getattr(inside, one) for one in ("number", "fd", "offset"))
    return FlagPlace(Process(pid, started, process.host), Place(number, fd, offset), place.nbytes)


@pytest.mark.parametrize("name", FIELDS)
def test_a_number_that_a_peer_makes_up_is_its_error_alone(name: str) -> None:
    """Each is read as the place of a board that is there, or refused by name; no descriptor is left."""
    board, there = new_flag_page(PEER, 0, 4096)
    place = unpack(there, FLAG_PLACE)
    before = len(os.listdir("/proc/self/fd"))
    for value in NUMBERS:
        try:
            opened = open_flag_page(PEER, pack(changed(place, name, value)))
        except DisaggKVError:
            continue
        assert opened.nbytes > 0
        assert opened.nbytes % 8 == 0
        del opened
    assert len(os.listdir("/proc/self/fd")) == before
    assert board.nbytes == open_flag_page(PEER, there).nbytes


def test_a_place_that_is_cut_short_or_of_other_types_is_refused_by_name() -> None:
    _, there = new_flag_page(PEER, 1, 4096)
    for stop in range(len(there)):
        with pytest.raises(RemoteProtocolError):
            open_flag_page(PEER, there[:stop])
    values: tuple[object, ...] = (1, "a", None, [], {})
    for junk in (b"\xc0", b"\x90", b"\x80", b"\xff" * 9, *map(pack, values)):
        with pytest.raises(RemoteProtocolError):
            open_flag_page(PEER, junk)
