"""Rows go both ways: each rank has an endpoint of either side over one pool, and sends what the other side lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import define, field

from disagg_kv import CacheSpec, DecodeEndpoint, Expectation, Options, PagedPool, PageTable, Phase, PrefillEndpoint
from disagg_kv.endpoints.handle import RoomHandle
from disagg_kv.errors import AbortedError, DeadlineError, IncompatiblePeerError, IntegrityError
from disagg_kv.geometry import Shard
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import Source
from tests.support.rig import KV, Member, Memory, Rig, Truth, tp_shards

SPEC = CacheSpec.kv(2, 6, 8, "float16")
ROW_BYTES = 2 * 2 * 6 * 16
PAGES = 64
SOON = Options(claim_s=2.0, silence_s=4.0)


@define
class Both:
    """An instance whose ranks send and receive. Its one conversation has the same pages on every rank.

    Args:
        name: of the instance.
        senders, receivers: of each rank, over one pool.
        rows: of the conversation that it has.
    """

    name: str
    senders: Sequence[Member[PrefillEndpoint]]
    receivers: Sequence[Member[DecodeEndpoint]]
    rows: int = 0
    pages: list[int] = field(factory=list)

    @property
    def tables(self) -> list[PageTable]:
        """Of the conversation."""
        return [PageTable(self.pages)]

    def grow(self, rows: int) -> None:
        """Take pages for more rows."""
        size = self.senders[0].page_size
        free = [page for page in reversed(range(PAGES)) if page not in self.pages]
        self.pages += free[: -(-rows // size) - len(self.pages)]

    def compute(self, rows: int, truth: Truth) -> None:
        """The model makes all rows after those that are there."""
        self.grow(rows)
        for number, unit, where, key in self._places(self.rows, rows):
            self.senders[number].pool.view(where[0])[where[1], where[2], unit[0]] = truth[key][
                self.rows : rows, unit[1]
            ]
        self.rows = rows

    def wrong(self, truth: Truth) -> int:
        """Bytes of the conversation that are not as its models made them."""
        found = 0
        for number, unit, where, key in self._places(0, self.rows):
            cells = self.senders[number].pool.view(where[0])[where[1], where[2], unit[0]]
            found += int(np.count_nonzero(cells != truth[key][: self.rows, unit[1]]))
        return found

    def _places(
        self, start: int, stop: int
    ) -> list[tuple[int, tuple[int, int], tuple[int, Any, Any], tuple[int, str]]]:
        """Rank, unit there and in the whole cache, plane with page and slot of each row, and layer with component."""
        size, rows = self.senders[0].page_size, np.arange(start, stop)
        page, slot = np.array(self.pages)[rows // size], rows % size
        found = []
        for number, member in enumerate(self.senders):
            site = member.pool.site
            for at, plane in enumerate(site.planes):
                units = [u for run in site.shard.units(plane.layer, plane.component) for u in run]
                key = int(plane.layer), plane.component
                found += [(number, (here, unit), (at, page, slot), key) for here, unit in enumerate(units)]
        return found


def both(rig: Rig, name: str, tp: int, page_size: int, path: str) -> Both:
    """Such an instance; the names of its two sets of endpoints end with ``out`` and ``in``."""
    pools: dict[Shard, PagedPool] = {}

    def shared(spec: CacheSpec, held: Shard, of: Memory) -> PagedPool:
        if held not in pools:
            pools[held] = PagedPool.allocate(spec, held, pages=PAGES, page_size=of.page_size)
        return pools[held]

    memory = Memory(page_size=page_size, pool=shared)
    strategy = f"{path}+incremental"
    senders = rig.prefill(tp_shards(SPEC, tp), f"{name} out", memory, strategy=strategy)
    return Both(name, senders, rig.decode(tp_shards(SPEC, tp), f"{name} in", memory, strategy=strategy))


def pull(rig: Rig, source: Both, target: Both, room: str) -> int:
    """The target takes the rows that it lacks, and has them then; how many crossed at best."""
    rows = source.rows
    target.grow(rows)
    receives = [m.endpoint.open(RoomId(room.encode()), Source(f"{source.name} out")) for m in target.receivers]
    held = [one.expect(Expectation(rows, target.tables, held={KV: min(target.rows, rows)}))[KV] for one in receives]
    sends = [m.endpoint.open(RoomId(room.encode())) for m in source.senders]
    for one in sends:
        one.send_chunk(rows, source.tables)
        one.finish(rows)
    end(rig, [*receives, *sends], Phase.DONE)
    assert sum(one.report.nbytes for one in receives) == (rows - held[0]) * ROW_BYTES
    target.rows = rows
    return rows - held[0]


def end(rig: Rig, handles: Sequence[RoomHandle], phase: Phase) -> None:
    """Wait for the end of a room on some ranks."""
    rig.until(lambda: all(one.released for one in handles), "the end of the room")
    assert {one.phase for one in handles} == {phase}, [str(one.error) for one in handles]


@pytest.mark.parametrize("path", ["staged", "slice", "mapped", "auto"])
@pytest.mark.parametrize("tp", [(2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (5, 8)])
def test_four_turns_move_only_what_each_side_lacks(path: str, tp: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Two instances compute prompts in turns, a third one the answers; bytes at best in both directions."""
    rig = Rig(SPEC)
    prompts = [both(rig, name, tp[0], sizes[0], path) for name in ("A", "B")]
    answers = both(rig, "D", tp[1], sizes[1], path)
    truth = rig.truth(200)
    for turn in range(4):
        prompt = prompts[turn % 2]
        if turn:
            lacked = answers.rows - prompt.rows // sizes[0] * sizes[0]
            assert pull(rig, answers, prompt, f"back {turn}") == lacked
            assert prompt.wrong(truth) == 0
        prompt.compute(prompt.rows + 23, truth)
        lacked = prompt.rows - answers.rows // sizes[1] * sizes[1]
        assert pull(rig, prompt, answers, f"there {turn}") == lacked
        assert answers.wrong(truth) == 0
        answers.compute(answers.rows + 13, truth)
    rig.quiet()
    rig.close()


def world() -> tuple[Rig, Both, Both]:
    """Two such instances; the first one has 20 rows."""
    rig = Rig(SPEC, options=SOON)
    first, second = both(rig, "A", 2, 4, "auto"), both(rig, "B", 1, 8, "auto")
    first.compute(20, rig.truth(20))
    return rig, first, second


def test_both_directions_of_one_room_id_are_two_rooms() -> None:
    """At once, each into other pages than those that are read; nothing waits for the other direction."""
    rig, first, second = world()
    truth = rig.truth(20)
    second.compute(20, truth)
    room, into = RoomId(b"room"), [PageTable(range(8))]
    handles: list[RoomHandle] = []
    for source, target in ((first, second), (second, first)):
        receives = [m.endpoint.open(room, Source(f"{source.name} out")) for m in target.receivers]
        sends = [m.endpoint.open(room) for m in source.senders]
        for one in receives:
            one.expect(Expectation(20, into))
        for sent in sends:
            sent.send_chunk(20, source.tables)
            sent.finish(20)
        handles += [*receives, *sends]
    end(rig, handles, Phase.DONE)
    assert second.wrong(truth) == 0, "what is sent is not written to"
    first.pages, first.rows = list(range(8)), 20
    assert first.wrong(truth) == 0
    rig.quiet()


def test_rows_that_were_evicted_are_told_as_such() -> None:
    """By the engine that had them; before or after the other one asks, in whichever order."""
    for early in (False, True):
        rig, first, second = world()
        before = second.senders[0].pool.view(0).copy()
        second.grow(20)
        sends = [m.endpoint.open(RoomId(b"room")) for m in first.senders] if early else []
        for one in sends:
            one.abort("the rows were evicted")
        receives = [m.endpoint.open(RoomId(b"room"), Source("A out")) for m in second.receivers]
        for receive in receives:
            receive.expect(Expectation(20, second.tables))
        if not early:
            rig.turn()
            sends = [m.endpoint.open(RoomId(b"room")) for m in first.senders]
            for one in sends:
                one.abort("the rows were evicted")
        end(rig, [*receives, *sends], Phase.FAILED)
        assert isinstance(receives[0].error, AbortedError)
        assert "the rows were evicted" in str(receives[0].error)
        assert np.array_equal(second.senders[0].pool.view(0), before)
        assert pull(rig, first, second, "again") == 20
        rig.quiet()


def test_the_reference_of_another_conversation_is_refused_by_its_tag() -> None:
    """Before a byte is written; the next room is served."""
    rig, first, second = world()
    second.grow(20)
    before = second.senders[0].pool.view(0).copy()
    receives = [m.endpoint.open(RoomId(b"room"), Source("A out"), tag=b"mine") for m in second.receivers]
    for one in receives:
        one.expect(Expectation(20, second.tables))
    sends = [m.endpoint.open(RoomId(b"room"), tag=b"another") for m in first.senders]
    for sent in sends:
        sent.send_chunk(20, first.tables)
        sent.finish(20)
    end(rig, receives, Phase.FAILED)
    assert isinstance(receives[0].error, IntegrityError)
    assert np.array_equal(second.senders[0].pool.view(0), before)
    for sent in sends:
        sent.abort("its reader has failed")
    end(rig, sends, Phase.FAILED)
    assert pull(rig, first, second, "again") == 20
    rig.quiet()


def test_a_stale_reference_to_more_rows_than_there_are_fails_by_name() -> None:
    """The end that the sender gives is not the one that was promised."""
    rig, first, second = world()
    second.grow(40)
    receives = [m.endpoint.open(RoomId(b"room"), Source("A out")) for m in second.receivers]
    for one in receives:
        one.expect(Expectation(40, second.tables))
    sends = [m.endpoint.open(RoomId(b"room")) for m in first.senders]
    for sent in sends:
        sent.send_chunk(20, first.tables)
        sent.finish(20)
    end(rig, [*receives, *sends], Phase.FAILED)
    assert "20" in str(receives[0].error)
    assert "40" in str(receives[0].error)
    rig.quiet()


def test_two_sides_that_each_wait_for_the_other_both_fail_in_time() -> None:
    """They await the same rows of each other, and no engine sends any; the endpoints serve the next room."""
    rig, first, second = world()
    second.grow(20)
    receives = [m.endpoint.open(RoomId(b"room"), Source("A out")) for m in second.receivers]
    for one in receives:
        one.expect(Expectation(20, second.tables))
    others = [m.endpoint.open(RoomId(b"room"), Source("B out")) for m in first.receivers]
    for other in others:
        other.expect(Expectation(20, [PageTable(range(5))]))
    rig.wait(SOON.claim_s + 1.0)
    end(rig, [*receives, *others], Phase.FAILED)
    assert isinstance(receives[0].error, DeadlineError)
    assert any(isinstance(one.error, DeadlineError) for one in others)
    assert pull(rig, first, second, "again") == 20
    rig.quiet()


def test_a_peer_that_only_receives_is_refused_by_name_at_the_handshake() -> None:
    """Its name leads to no sender, and both stay fit for other rooms."""
    rig, first, second = world()
    second.grow(20)
    receives = [m.endpoint.open(RoomId(b"room"), Source("A in")) for m in second.receivers]
    for one in receives:
        one.expect(Expectation(20, second.tables))
    end(rig, receives, Phase.FAILED)
    error = receives[0].error
    assert isinstance(error, IncompatiblePeerError)
    assert error.field == "role"
    assert "decode of A in" in str(error)
    assert pull(rig, first, second, "again") == 20
    rig.quiet()
