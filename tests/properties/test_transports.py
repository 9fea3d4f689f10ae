"""Whatever is written in whatever order: the right bytes, no others, and none after a ticket is quiet."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.errors import RegistrationError, RemoteProtocolError
from disagg_kv.ids import Ticket
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.testing.ends import End, HostMemory
from disagg_kv.testing.pair import POISON, Pair
from disagg_kv.transports import InprocTransport, Settled, ShmTransport, Transport, WriteEnded, decode, encode
from disagg_kv.transports.descriptor import _MAGIC, VERSION

N = 64
rows = st.tuples(st.integers(-2, N + 2), st.integers(-2, N + 2), st.integers(-2, N))
good = st.builds(
    lambda here, there, nbytes: (here, there, min(nbytes, N - here, N - there)),
    st.integers(0, N), st.integers(0, N), st.integers(0, N),
)  # fmt: skip


def fits(row: tuple[int, int, int]) -> bool:
    """By the words of the contract: a range inside its region, on both sides."""
    here, there, nbytes = row
    return nbytes >= 0 and here >= 0 and there >= 0 and here + nbytes <= N and there + nbytes <= N


@pytest.mark.parametrize("make", [InprocTransport, ShmTransport, lambda: FaultyTransport(InprocTransport())])
@given(batches=st.lists(st.lists(st.one_of(good, rows), max_size=6), max_size=4))
def test_batches_change_just_their_targets_or_are_refused_whole(
    make: Callable[[], Transport], batches: list[list[tuple[int, int, int]]]
) -> None:
    """Against a model that knows only bytes; overlapping targets are written in order by these transports."""
    pair = Pair(End(make, HostMemory()), End(make, HostMemory()), N, 5.0)
    want = bytearray([POISON] * N)
    for batch in batches:
        if all(fits(row) for row in batch):
            pair.succeed(pair.submit(*batch))
            for here, there, nbytes in batch:
                for i in range(nbytes):
                    want[there + i] = int(pair.data[here + i])
        else:
            with pytest.raises(RegistrationError):
                pair.submit(*batch)
        assert pair.target.read(pair.remote).tobytes() == bytes(want)
    pair.source.close(0.0)
    pair.target.close(0.0)


@given(st.lists(st.tuples(st.sampled_from([None, *Fault]), st.integers(0, 5)), max_size=8), st.booleans())
def test_memory_of_a_quiet_ticket_stands_still(script: list[tuple[Fault | None, int]], leave: bool) -> None:
    """Each batch has its own eight bytes: they change only before its ticket is quiet, if at all."""
    faulty = FaultyTransport(InprocTransport(), dict(enumerate(fault for fault, _ in script)).get)
    pair = Pair(End(lambda: faulty, HostMemory()), End(InprocTransport, HostMemory()), N, 5.0)
    tickets: list[Ticket] = []
    still: dict[int, bytes] = {}

    def look() -> None:
        found = pair.target.read(pair.remote).tobytes()
        for i, before in still.items():
            assert found[8 * i : 8 * i + 8] == before, f"batch {i} changed after its ticket was quiet"
        told = pair.source.events()
        pair.log.add(told)
        found = pair.target.read(pair.remote).tobytes()
        for event in told:
            if isinstance(event, Settled) or (isinstance(event, WriteEnded) and event.quiesced):
                i = tickets.index(event.ticket)
                still[i] = found[8 * i : 8 * i + 8]

    for i, (_, release) in enumerate(script):
        tickets.append(pair.submit((8 * i, 8 * i, 8)))
        look()
        if release < len(faulty.held):
            faulty.release(faulty.held[release])
            look()
    if leave:
        pair.source.transport.disconnect(pair.peer)
    faulty.release()
    look()
    left = faulty.close(0.0)
    look()
    assert {tickets.index(t) for t in left}.isdisjoint(still)
    assert len(still) + len(left) == len(script), "a ticket of which nothing is known"


@given(st.binary(max_size=200))
def test_no_bytes_make_decode_raise_anything_else(data: bytes) -> None:
    """Bare, and behind a good beginning."""
    for start in (b"", _MAGIC, _MAGIC + bytes([VERSION])):
        with pytest.raises(RemoteProtocolError):
            decode(start + data, "x")


@given(st.data())
def test_a_damaged_descriptor_is_refused_or_still_a_descriptor(data: st.DataObject) -> None:
    """Any byte may be any other, before or after compression."""
    sound = End(InprocTransport, HostMemory()).descriptor()
    head, folded = sound[: len(_MAGIC) + 1], data.draw(st.booleans())
    whole = bytearray(sound if folded else zlib.decompress(sound[len(head) :]))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 1 << 20)) % len(whole)] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(whole) if folded else head + zlib.compress(whole), "inproc")
    except RemoteProtocolError:
        return
    assert decode(encode(found), "inproc") == found
