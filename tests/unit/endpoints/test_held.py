"""Held prefixes: only the rest crosses, nothing that is held is touched, and sides that do not fit say so."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from disagg_kv.channels import Channel, InprocChannel
from disagg_kv.core import Phase
from disagg_kv.core.wire.frames import Codec, Expect, RoomFrame
from disagg_kv.endpoints import Expectation
from disagg_kv.errors import AbortedError, ConfigurationError, GeometryError, RemoteProtocolError
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import GroupId
from disagg_kv.transports import InprocTransport
from tests.support.rig import KV, Memory, Rig, tp_shards
from tests.support.rig_parts import FiredEvent, Listening, RecordingTransport

SPEC = CacheSpec.kv(4, 4, 8, "float16")
ROW_BYTES = 4 * 2 * 4 * 16


def world(path: str = "staged", prefill_tp: int = 2, decode_tp: int = 1, page: int = 8) -> Rig:
    """Prefill with pages of 4 rows, decode with pages of ``page``; both incremental."""
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, prefill_tp), memory=Memory(page_size=4, pages=200), strategy=f"{path}+incremental")
    rig.decode(tp_shards(SPEC, decode_tp), memory=Memory(page_size=page, pages=100), strategy=f"{path}+incremental")
    return rig


@pytest.mark.parametrize("path", ["staged", "slice", "mapped", "auto"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("edges", [(60,), (10, 16, 20, 60), (16, 60), (3, 60)])
def test_only_the_rows_after_the_held_prefix_cross(path: str, whole: bool, edges: tuple[int, ...]) -> None:
    """21 rows held with pages of 8: rows 16 to 60 move, whatever the chunks; what is held keeps its bytes."""
    rig = world(path)
    request = rig.request("room", rig.prefills, rig.decodes, 60).open_decode().expect(60, held=21, whole=whole)
    request.open_prefill()
    start = 0
    for edge in edges:
        request.send(edge, start)
        start = edge
    request.finish().landed()
    assert request.receives[0].report.nbytes == 44 * ROW_BYTES
    assert [dict(h.held or {}) for h in request.sends] == [{KV: 16}] * 2
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_prefill_gives_no_pages_of_rows_that_decode_holds(path: str) -> None:
    """Once decode has reported them; fewer rows than decode lacks are refused, as before."""
    rig = world(path)
    request = rig.request("room", rig.prefills, rig.decodes, 60).open_decode().expect(60, held=21).open_prefill()
    with pytest.raises(GeometryError, match="begins at 16"):
        request.send(60, 16)
    rig.until(lambda: all(handle.held is not None for handle in request.sends), "what decode holds")
    with pytest.raises(GeometryError, match="begins at 20"):
        request.send(60, 20)
    request.send(30, 16).send(60, 30).finish().landed()
    assert request.receives[0].report.nbytes == 44 * ROW_BYTES
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_what_is_held_is_not_compared(path: str) -> None:
    """Its bytes are not those that prefill computes; all that is sent is compared."""
    rig = world(path)
    memory = Memory(page_size=8, pages=100)
    decodes = rig.decode(tp_shards(SPEC, 1), "V", memory, strategy=f"{path}+incremental", verify="full")
    request = rig.request("room", rig.prefills, decodes, 60).open_decode().expect(60, held=21).open_prefill()
    request.send(60).finish().landed()
    assert request.receives[0].report.nbytes == 44 * ROW_BYTES
    assert "checksum" in request.receives[0].report.seconds
    rig.quiet()


def test_direct_writes_only_the_pages_that_are_missing() -> None:
    """Page runs after the prefix; with equal layouts."""
    rig = world("direct", 1, 1, page=4)
    request = rig.request("room", rig.prefills, rig.decodes, 32).open_decode().expect(32, held=20).open_prefill()
    request.send(32).finish().landed()
    assert request.sends[0].report.path == "direct"
    assert request.receives[0].report.nbytes == 12 * ROW_BYTES


def test_pages_of_a_held_prefix_are_never_exposed() -> None:
    """Other requests read them: no frame names them, even if the engine gives the whole table."""
    heard: list[RoomFrame] = []
    rig = Rig(SPEC)
    memory = Memory(page_size=8, channel=lambda inner: Listening(inner, heard))
    rig.prefill(tp_shards(SPEC, 2), strategy="slice+incremental")
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="slice+incremental")
    request = rig.request("room", rig.prefills, rig.decodes, 32).open_decode().expect(32, held=17).open_prefill()
    request.send(32).finish().landed()
    expects = [frame for frame in heard if isinstance(frame, Expect)]
    assert expects
    for frame in expects:
        assert frame.tables is not None
        (table,) = frame.tables
        assert table.first == 16
        assert np.frombuffer(table.pages, "<i4").tolist() == request.taken[0].pages[2:].tolist()


def frames(rows: int, held: int) -> Counter[str]:
    """What two sides say to each other about one room."""
    heard: list[RoomFrame] = []

    def channel(inner: Channel) -> Listening:
        return Listening(inner, heard)

    rig = Rig(SPEC)
    sent: list[RecordingTransport] = []

    def transport() -> RecordingTransport:
        sent.append(RecordingTransport(InprocTransport()))
        return sent[-1]

    prefill, decode = (Memory(page_size=4, channel=channel, transport=transport) for _ in range(2))
    rig.prefill(tp_shards(SPEC, 2), memory=prefill, strategy="staged+incremental")
    rig.decode(tp_shards(SPEC, 1), memory=decode, strategy="staged+incremental")
    rig.prefills[0].pool.write_aux(1, b"token")
    request = rig.request("room", rig.prefills, rig.decodes, rows).open_decode().expect(rows, aux=2, held=held)
    request.open_prefill()
    if rows:
        request.send(rows)
    request.finish(aux=1).landed()
    assert rig.decodes[0].pool.read_aux(2).startswith(b"token")
    assert rows == held
    assert not any(transport.batches for transport in sent)
    assert rig.decodes[0].endpoint.usage().ring_used_bytes == 0
    return Counter(type(frame).__name__ for frame in heard)


def test_a_full_hit_costs_what_a_room_without_rows_costs() -> None:
    """Aux data only; no request, lease, descriptor or notice, and not one frame more than for no rows."""
    hit = frames(32, 32)
    nothing = frames(0, 0)
    assert hit == nothing
    assert hit == {"Expect": 2, "Expected": 2, "Done": 2, "Complete": 2}


def test_prefill_sends_its_own_cached_prefix_before_the_forward_pass() -> None:
    """Rows that prefill has cached cross while the rest is being computed, ordered by the engine's event."""
    rig = world()
    request = rig.request("room", rig.prefills, rig.decodes, 48).open_decode().expect(48, held=8).open_prefill()
    cached, computed = FiredEvent(), FiredEvent()
    request.send(24, ready=cached)
    rig.wait(0.5)
    assert request.receives[0].report.nbytes == 0, "the copy that restores the cached rows has not happened yet"
    cached.fired = True
    rig.wait(0.5)
    assert request.receives[0].report.nbytes == 16 * ROW_BYTES
    request.send(48, 24, ready=computed)
    rig.wait(0.5)
    assert request.receives[0].report.nbytes == 16 * ROW_BYTES
    computed.fired = True
    request.finish().landed()


@pytest.mark.parametrize(
    ("held", "stop", "words"),
    [
        ({KV: -1}, 32, "held rows of group 'kv' must be at least 0, not -1"),
        ({KV: 33}, 32, r"a held prefix \{'kv': 33\} of 32 rows"),
        ({KV: 48}, None, "a held prefix 48 of 32 rows"),
        ({GroupId("other"): 8}, 32, "no group 'other'"),
    ],
)
def test_prefixes_that_cannot_be(held: dict[GroupId, int], stop: int | None, words: str) -> None:
    """Bad input: an error at ``expect``, before anything is written; the room may still be expected rightly."""
    rig = world()
    request = rig.request("room", rig.prefills, rig.decodes, 32).open_decode()
    table = PageTable(KV, np.arange(4))
    with pytest.raises(GeometryError, match=words):
        request.receives[0].expect(Expectation(stop, [table], held=held))
    assert request.receives[0].expect(Expectation(32, [table], held={KV: 31})) == {KV: 24}


def test_tables_must_begin_at_or_before_the_end_of_what_is_held() -> None:
    """Otherwise rows would have no page."""
    rig = world()
    receive = rig.request("room", rig.prefills, rig.decodes, 32).open_decode().receives[0]
    with pytest.raises(GeometryError, match="rows from 16 on, but the table begins at 24"):
        receive.expect(Expectation(32, [PageTable(KV, np.arange(1), 24)], held={KV: 17}))
    assert receive.expect(Expectation(None, [], held={KV: 24})) == {KV: 24}


def test_ranks_that_disagree_fail_the_room_with_the_numbers() -> None:
    """Nothing is generated from a cache that one rank has and the other has not."""
    rig = world(decode_tp=2)
    request = rig.request("room", rig.prefills, rig.decodes, 32).open_decode()
    request.taken = [m.take(32) for m in rig.decodes]
    for rows, receive, table in zip((16, 24), request.receives, request.taken, strict=True):
        receive.expect(Expectation(32, [table], held={KV: rows}))
    request.open_prefill().send(32).finish().failed()
    for handle in request.sends:
        assert isinstance(handle.error, RemoteProtocolError | AbortedError)
    assert any(isinstance(handle.error, RemoteProtocolError) for handle in request.sends)
    for part in ("disagree on the held prefix", "rank 0", "16", "rank 1", "24"):
        assert part in request.errors()
    rig.quiet()


@pytest.mark.parametrize(
    ("start", "stop", "words"), [(4, 32, "4 rows, which is no multiple of 8"), (40, 32, "holds 40 rows of 32")]
)
def test_prefixes_on_the_wire_that_cannot_be(start: int, stop: int, words: str) -> None:
    """Prefill never rounds; what decode's own page size does not allow is the peer's mistake."""
    rig = world(decode_tp=1)
    request = rig.request("room", rig.prefills, rig.decodes, 32).open_prefill()
    warm = rig.request("warm", rig.prefills, rig.decodes, 0).start().landed()
    decode, prefill = rig.decodes[0], rig.prefills[0]
    epochs = {p.instance + str(p.rank): p.epoch for m in (decode, prefill) for p in m.endpoint.peers()}
    expect = Expect(
        src=epochs["D0"],
        dst=epochs["P0"],
        room=b"room",
        generation=99,
        start=start,
        stop=stop,
        path="staged",
        tables=None,
        tag=b"",
    )
    InprocChannel(rig.hub, "forger").send(prefill.channel.address, Codec().encode(expect))
    rig.until(lambda: request.sends[0].phase is Phase.FAILED)
    assert isinstance(request.sends[0].error, RemoteProtocolError)
    assert words in str(request.sends[0].error)
    assert warm.all(Phase.DONE)


def test_a_selection_of_everything_takes_no_prefix() -> None:
    """Either side: the error names the selection."""
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    rig.decode(tp_shards(SPEC, 1), strategy="staged+incremental")
    request = rig.request("room", rig.prefills, rig.decodes, 16).open_decode().expect(16, held=8).open_prefill()
    request.send(16).finish().failed()
    assert isinstance(request.sends[0].error, ConfigurationError)
    assert "prefill's selection 'full' sends them" in request.errors()


def test_a_failed_suffix_leaves_the_prefix_alone() -> None:
    """An abort half way; every page of the held prefix has its bytes, and the same request works again."""
    rig = world()
    request = rig.request("room", rig.prefills, rig.decodes, 48).open_decode().expect(48, held=16).open_prefill()
    request.send(24)
    rig.wait(0.3)
    request.receives[0].abort("changed its mind")
    request.failed()
    request.taken = [PageTable(KV, t.pages[2:], 16) for t in request.taken]
    request.forgive()
    rig.check()
    rig.quiet()
    again = rig.request("again", rig.prefills, rig.decodes, 48).open_decode().expect(48, held=16).open_prefill()
    again.send(48).finish().landed()
