"""What is held is summed when it is kept and when it is built on: a byte that changed meanwhile fails the room."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
from attrs import define

from disagg_kv.core import Phase, Verify
from disagg_kv.endpoints import CachedPages, DecodeEndpoint, Expectation, RecoveringReceiver, Retry, page_sums
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.errors import (
    AbortedError,
    ConfigurationError,
    DisaggKVError,
    GeometryError,
    IntegrityError,
    PrefixChangedError,
)
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import GroupId, RoomId
from disagg_kv.kernels import Checksums, CpuKernels, Move
from disagg_kv.memory import Event, MemoryPool, PagedPool
from disagg_kv.prefix import CachedChecksums, Claim, HashPrefixIndex, PageAllocator, PrefixCache, namespace_of
from disagg_kv.rendezvous import Source
from tests.support.rig import KV, Member, Memory, Rig, Truth, put, tp_shards
from tests.support.rig_parts import CountingKernels, Flag

SPEC = CacheSpec.kv(3, 4, 8, "float16")
ROW_BYTES = 3 * 2 * 4 * 16
PAGE, PAGES = 4, 32
PROMPT = list(range(26))
FULL: Verify = "full"


@define
class Held:
    """Two decode ranks with prefix caches that remember sums, and one prefill rank."""

    rig: Rig
    caches: list[PrefixCache]
    kernels: CountingKernels

    @classmethod
    def make(cls, verify: Verify = FULL, path: str = "staged") -> Held:
        """Everything."""
        rig, kernels = Rig(SPEC), CountingKernels()
        strategy = f"{path}+incremental"
        rig.prefill(tp_shards(SPEC, 1), memory=Memory(page_size=3), strategy=strategy)
        memory = Memory(page_size=PAGE, pages=PAGES, layout="HND")
        rig.decode(tp_shards(SPEC, 2), memory=memory, strategy=strategy, verify=verify, kernels=kernels)
        caches = [
            PrefixCache(
                HashPrefixIndex(PAGE, PAGES, namespace_of(SPEC)),
                PageAllocator(range(PAGES)),
                m.pool.site,
                sums=CachedChecksums(m.pool),
            )
            for m in rig.decodes
        ]
        return cls(rig, caches, kernels)

    def turn(self, name: str, tokens: Sequence[int], truth: Truth) -> tuple[list[Claim], list[ReceptionHandle]]:
        """One room to its end; every claim knows how."""
        claims = [cache.claim(tokens) for cache in self.caches]
        fewest = min(claim.rows for claim in claims)
        tables = [claim.begin(fewest) for claim in claims]
        room = RoomId(name.encode())
        receives = [m.endpoint.open(room, Source("P")) for m in self.rig.decodes]
        for receive, claim, table in zip(receives, claims, tables, strict=True):
            receive.expect(Expectation(len(tokens), [table], held={KV: claim.rows}, kept=claim.kept))
        (prefill,) = self.rig.prefills
        send, pages = prefill.endpoint.open(room), prefill.take(len(tokens))
        put(prefill.pool, pages, 0, len(tokens), truth)
        put(prefill.want, pages, 0, len(tokens), truth)
        send.send_chunk(len(tokens), [pages])
        send.finish(len(tokens))
        self.rig.until(lambda: send.released and all(r.released for r in receives), name)
        prefill.give(pages)
        for claim, receive in zip(claims, receives, strict=True):
            assert claim.settle(receive)
        return claims, receives

    def first(self, truth: Truth) -> list[PageTable]:
        """A turn whose answer of six tokens, which decode computes, is kept too; the pages of each rank."""
        claims, receives = self.turn("first", PROMPT[:14], truth)
        assert all(receive.phase is Phase.DONE for receive in receives)
        tables = []
        for claim, member in zip(claims, self.rig.decodes, strict=True):
            table = claim.grow(20)
            put(member.pool, table, 14, 20, self.rig.truth(len(PROMPT)))  # not what prefill would compute
            claim.end(PROMPT[:20])
            tables.append(table)
        return tables


def flip(member: Member[DecodeEndpoint], page: int, plane: int = 3) -> None:
    """One byte of a page."""
    member.pool.view(plane)[page, 1, 1, 5] ^= 0x01


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_what_is_held_and_has_not_changed_passes(path: str) -> None:
    """Pages that arrived, and pages that decode computed otherwise than prefill would, are built on."""
    held = Held.make(path=path)
    truth = held.rig.truth(len(PROMPT))
    held.first(truth)
    held.kernels.checksums.clear()
    claims, receives = held.turn("second", PROMPT, truth)
    assert [receive.phase for receive in receives] == [Phase.DONE] * 2
    assert [receive.report.nbytes for receive in receives] == [6 * ROW_BYTES // 2] * 2
    assert all("checksum" in receive.report.seconds for receive in receives)
    assert len(held.kernels.checksums) == 2 * (1 + receives[0].report.segments), "one launch each for what is held"
    assert [claim.rows for claim in claims] == [24, 24]
    held.rig.quiet()


def test_rooms_whose_pages_are_ready_in_one_step_are_all_compared() -> None:
    """One of them has held pages, and the other has none."""
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 1), strategy="slice+incremental")
    (decode,) = rig.decode(tp_shards(SPEC, 1), strategy="slice+incremental", verify=FULL)
    table, ready = PageTable(KV, np.array([9, 2, 7], np.int32)), Flag()
    put(decode.pool, table, 0, 12, rig.truth(12))
    sums = page_sums(CpuKernels(), decode.pool, table, range(3)).read()
    held = Expectation(16, [PageTable(KV, [1], 12)], held={KV: 12}, kept=[CachedPages(table, sums)], ready=ready)
    first, second = (rig.request(name, rig.prefills, rig.decodes, 16).open_decode().receives[0] for name in "ab")
    first.expect(held)
    second.expect(Expectation(16, [PageTable(KV, [3, 4, 5, 6])], ready=ready))
    rig.wait(0.1)
    assert not any("checksum" in one.report.seconds for one in (first, second))
    ready.fired = True
    rig.wait(0.1)
    assert "checksum" in first.report.seconds
    assert not decode.observer.counters["errors.unforeseen"]
    assert [one.phase for one in (first, second)] == [Phase.WAITING] * 2


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
@pytest.mark.parametrize("place", [0, 2, 3, 4])
def test_one_changed_byte_of_a_held_page_fails_the_room_and_is_named(place: int, path: str) -> None:
    """Pages that arrived and one that decode computed; nothing is inserted, nothing crosses.

    The error names room, page, rows and layer; the same prompt works again without what is wrong.
    """
    held = Held.make(path=path)
    truth = held.rig.truth(len(PROMPT))
    table = held.first(truth)[1]
    known = [len(cache.index) for cache in held.caches]
    page = int(table.pages[place])
    flip(held.rig.decodes[1], page)
    _, receives = held.turn("second", PROMPT, truth)
    assert [receive.phase for receive in receives] == [Phase.FAILED] * 2
    error = receives[1].error
    assert isinstance(error, PrefixChangedError)
    assert error.rows == PAGE * place
    plane = held.rig.decodes[1].pool.site.planes[3]
    rows = f"held rows {PAGE * place}-{PAGE * place + PAGE}"
    for part in ("room second", f"layer {plane.layer} of page {page} of group 'kv'", rows, "the sum is"):
        assert part in str(error)
    assert all(receive.report.nbytes == 0 for receive in receives)
    assert [len(cache.index) for cache in held.caches] == known
    for cache in held.caches:
        cache.index.check_integrity()
    assert [cache.claim(PROMPT).rows for cache in held.caches] == [20, PAGE * place]
    claims, receives = held.turn("third", PROMPT, truth)
    assert [receive.phase for receive in receives] == [Phase.DONE] * 2
    assert [claim.rows for claim in claims][1] == 24
    held.rig.quiet()


@pytest.mark.parametrize(
    ("case", "words"), [("moved", "page 2 "), ("two", "page 2 "), ("back", "while the held prefix")]
)
def test_whatever_is_not_what_was_kept_is_found(case: str, words: str) -> None:
    """Pages that changed places, several wrong pages, and a page that is right again at the second look."""

    class Fickle(CpuKernels):
        """Wrong the first time."""

        launches = 0

        def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
            self.launches += 1
            sums = super().checksum(pool, moves, after).read()
            return Checksums(None, lambda: [of + np.uint64(case == "back" and self.launches == 1) for of in sums])

    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 1), strategy="staged+incremental")
    (decode,) = rig.decode(tp_shards(SPEC, 1), strategy="staged+incremental", verify=FULL, kernels=Fickle())
    table = PageTable(KV, np.array([9, 2, 7], np.int32))
    put(decode.pool, table, 0, 12, rig.truth(12))
    sums = page_sums(CpuKernels(), decode.pool, table, range(3)).read()
    built = PageTable(KV, table.pages[[1, 0, 2]]) if case == "moved" else table
    if case == "two":
        flip(decode, 2)
        flip(decode, 7)
    receive = rig.request("room", rig.prefills, rig.decodes, 16).open_decode().receives[0]
    receive.expect(Expectation(16, [PageTable(KV, [1], 12)], held={KV: 12}, kept=[CachedPages(built, sums)]))
    rig.until(lambda: receive.phase is Phase.FAILED)
    assert isinstance(receive.error, PrefixChangedError)
    assert words in str(receive.error)
    assert ("so have 1 pages after it" in str(receive.error)) is (case != "back")


@pytest.mark.parametrize(
    ("fail", "words"),
    [(None, "has changed since it was kept"), (OSError("no such instruction"), "could not be summed")],
)
def test_prefill_is_told_of_a_prefix_that_cannot_be_built_on(fail: Exception | None, words: str) -> None:
    """Also where the room's other side becomes known only afterwards; it does not wait for its deadline."""
    rig, kernels = Rig(SPEC), CountingKernels()
    (decode,) = rig.decode(tp_shards(SPEC, 1), strategy="staged+incremental", verify=FULL, kernels=kernels)
    table = PageTable(KV, np.array([9], np.int32))
    sums = page_sums(CpuKernels(), decode.pool, table, [0]).read()
    flip(decode, 9)
    kernels.fail = fail
    receive = decode.endpoint.open(RoomId(b"room"), Source("P"))
    receive.expect(Expectation(8, [PageTable(KV, [1], 4)], held={KV: 4}, kept=[CachedPages(table, sums)]))
    rig.until(lambda: receive.phase is Phase.FAILED)
    (prefill,) = rig.prefill(tp_shards(SPEC, 1), strategy="staged+incremental")
    send = prefill.endpoint.open(RoomId(b"room"))
    rig.until(lambda: send.phase is Phase.FAILED)
    assert rig.clock() < 20
    assert words in str(send.error)
    rig.quiet()


def test_nothing_is_asked_for_and_nothing_is_released_while_sums_are_under_way() -> None:
    """Section 6: pages that a kernel reads are not given back; an abort meanwhile waits for it."""
    held = Held.make()
    truth = held.rig.truth(len(PROMPT))
    held.first(truth)
    held.kernels.events = []
    claims = [cache.claim(PROMPT) for cache in held.caches]
    tables = [claim.begin() for claim in claims]
    receives = [m.endpoint.open(RoomId(b"second"), Source("P")) for m in held.rig.decodes]
    for receive, claim, table in zip(receives, claims, tables, strict=True):
        receive.expect(Expectation(len(PROMPT), [table], held={KV: claim.rows}, kept=claim.kept))
    held.rig.until(lambda: len(held.kernels.events or ()) == 2, "the sums")
    held.rig.wait(1.0)
    assert {receive.phase for receive in receives} == {Phase.READY}
    receives[0].abort("meanwhile")
    held.rig.wait(1.0)
    assert {receive.phase for receive in receives} == {Phase.FAILED}
    assert not any(receive.released for receive in receives)
    for event in held.kernels.events:
        event.fired = True
    held.kernels.events = None
    held.rig.until(lambda: all(receive.released for receive in receives), "release")
    held.rig.wait(1.0)


def test_what_a_failed_room_builds_on_is_not_looked_at() -> None:
    """Section 6: a room that failed elsewhere before its engine awaited anything is released, and stays so."""
    held = Held.make()
    held.first(held.rig.truth(len(PROMPT)))
    held.kernels.events = []
    claim = held.caches[0].claim(PROMPT)
    table = claim.begin()
    receives = [m.endpoint.open(RoomId(b"second"), Source("P")) for m in held.rig.decodes]
    receives[1].abort("elsewhere")
    held.rig.until(lambda: all(receive.released for receive in receives), "release")
    receives[0].expect(Expectation(len(PROMPT), [table], held={KV: claim.rows}, kept=claim.kept))
    held.rig.wait(1.0)
    assert receives[0].released
    assert not held.kernels.events


def test_a_changed_prefix_fails_every_attempt_alike_and_a_new_room_gets_it() -> None:
    """Ranks whose errors differ try equally often, nothing crosses, and a new claim awaits what changed."""
    held = Held.make()
    truth = held.rig.truth(len(PROMPT))
    table = held.first(truth)[1]
    flip(held.rig.decodes[1], int(table.pages[1]))
    claims = [cache.claim(PROMPT) for cache in held.caches]
    tables = [claim.begin() for claim in claims]
    ends = [
        RecoveringReceiver(m.endpoint, Retry(lambda failed: failed.source, 2), clock=held.rig.clock)
        for m in held.rig.decodes
    ]
    rooms = [end.open(RoomId(b"second"), Source("P")) for end in ends]
    for room, claim, table in zip(rooms, claims, tables, strict=True):
        room.expect(Expectation(len(PROMPT), [table], held={KV: claim.rows}, kept=claim.kept))

    def over() -> bool:
        for end in ends:
            end.poll()
        return all(room.released for room in rooms)

    held.rig.until(over, "both attempts")
    assert [(room.phase, room.attempts, room.report.nbytes) for room in rooms] == [(Phase.FAILED, 2, 0)] * 2
    assert isinstance(rooms[0].error, AbortedError)
    assert isinstance(rooms[1].error, PrefixChangedError)
    assert "has changed since it was kept" in str(rooms[0].error)
    assert all(claim.settle(room) for claim, room in zip(claims, rooms, strict=True))
    _, receives = held.turn("third", PROMPT, truth)
    assert [receive.phase for receive in receives] == [Phase.DONE] * 2


def test_sums_that_cannot_be_made_fail_the_room() -> None:
    """Fail closed: what is not known to be right is not built on; the cache keeps it, since it may be."""
    held = Held.make()
    truth = held.rig.truth(len(PROMPT))
    held.first(truth)
    held.kernels.fail = OSError("no such instruction")
    held.kernels.events = []
    _, receives = held.turn("second", PROMPT, truth)
    assert {receive.phase for receive in receives} == {Phase.FAILED}
    assert any("what is held could not be summed: no such instruction" in str(r.error) for r in receives)
    assert all(isinstance(r.error, DisaggKVError) and not isinstance(r.error, IntegrityError) for r in receives)
    assert [cache.claim(PROMPT).rows for cache in held.caches] == [20, 20]


@pytest.mark.parametrize(("verify", "share"), [("off", 0.0), ("sampled", 1 / 16)])
def test_what_is_compared_without_full(verify: Verify, share: float) -> None:
    """Off: nothing is summed. Sampled: about one room in 16, with no more said on the wire."""
    rig, kernels = Rig(SPEC), CountingKernels()
    rig.prefill(tp_shards(SPEC, 1), strategy="staged+incremental")
    (decode,) = rig.decode(tp_shards(SPEC, 1), strategy="staged+incremental", verify=verify, kernels=kernels)
    table = PageTable(KV, np.array([9], np.int32))
    sums = page_sums(CpuKernels(), decode.pool, table, [0]).read()
    for number in range(200):
        receive = decode.endpoint.open(RoomId(b"%d" % number), Source("P"))
        receive.expect(Expectation(4, [], held={KV: 4}, kept=[CachedPages(table, sums)]))
    rig.wait(0.5)
    assert share * 100 <= len(kernels.checksums) <= share * 400


def test_held_rows_without_sums_are_refused_where_everything_is_to_be_compared() -> None:
    """Verify is 'full' and a cache of one's own says nothing of its pages: an error by name, nothing is written."""
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 1), strategy="staged+incremental")
    rig.decode(tp_shards(SPEC, 1), strategy="staged+incremental", verify=FULL)
    receive = rig.request("room", rig.prefills, rig.decodes, 8).open_decode().receives[0]
    with pytest.raises(ConfigurationError, match="verify is 'full', but 4 rows are held whose pages have no sums"):
        receive.expect(Expectation(8, [PageTable(KV, [1], 4)], held={KV: 4}))
    assert receive.expect(Expectation(8, [PageTable(KV, [1, 2])])) == {KV: 0}


U64 = np.uint64


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ((GroupId("other"), [9, 8], 0, (2, 3), U64), r"of groups \['other'\]; there are \['kv'\]"),
        ((KV, [9, 8], 4, (2, 3), U64), "begin at row 4, not 0"),
        ((KV, [9, 8], 0, (1, 3), U64), r"sums uint64 \(1, 3\), not uint64 \(2, 3\)"),
        ((KV, [9, 8], 0, (2, 2), U64), r"sums uint64 \(2, 2\), not uint64 \(2, 3\)"),
        ((KV, [9, 8], 0, (2, 3), np.int64), "sums int64"),
        ((KV, [9], 0, (1, 3), U64), "rows up to 8, but 1 pages end at 4"),
        ((KV, [9, 9], 0, (2, 3), U64), "twice"),
        ((KV, [9, 64], 0, (2, 3), U64), "page 64 of 64"),
    ],
)
def test_kept_pages_that_cannot_be(
    kept: tuple[GroupId, list[int], int, tuple[int, int], type[np.generic]], words: str
) -> None:
    """Bad input: an error of ``expect`` with the numbers, before anything is asked of prefill."""
    group, pages, first, shape, kind = kept
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 1), strategy="staged+incremental")
    rig.decode(tp_shards(SPEC, 1), strategy="staged+incremental", verify=FULL)
    receive = rig.request("room", rig.prefills, rig.decodes, 12).open_decode().receives[0]
    sums = np.zeros(shape, kind)
    given = CachedPages(PageTable(group, pages, first), sums)
    with pytest.raises(GeometryError, match=words):
        receive.expect(Expectation(12, [PageTable(KV, [1], 8)], held={KV: 8}, kept=[given]))
    assert receive.expect(Expectation(12, [PageTable(KV, [1, 2, 3])])) == {KV: 0}


def test_sums_are_of_the_rows_and_not_of_where_they_lie() -> None:
    """Section 8: equal rows at one place of a prompt have equal sums in any layout; at another place others."""
    rig = Rig(SPEC)
    memories = Memory(), Memory(layout="HND", fused=True)
    pools = [rig.decode(tp_shards(SPEC, 1), name, memory)[0].pool for name, memory in zip("AB", memories, strict=True)]
    tables = [PageTable(KV, np.array(ids, np.int32)) for ids in ([5, 9], [3, 1])]
    truth = rig.truth(8)
    for pool, table in zip(pools, tables, strict=True):
        put(pool, table, 0, 8, truth)
    first, second = (
        page_sums(CpuKernels(), pool, table, [0, 1]).read() for pool, table in zip(pools, tables, strict=True)
    )
    assert np.array_equal(first, second)
    turned = page_sums(CpuKernels(), pools[0], PageTable(KV, tables[0].pages[::-1]), [0, 1]).read()
    assert not (turned == first).any()


def test_sums_of_other_pools_are_refused() -> None:
    """Bad input: several groups, and sums of another rank's pool."""
    held = Held.make()
    one, other = held.caches
    with pytest.raises(ConfigurationError, match="checksums belong to another pool"):
        PrefixCache(one.index, one.pages, held.rig.decodes[0].pool.site, sums=other.sums)
    site = held.rig.decodes[0].pool.site
    two = attrs.evolve(site, groups=(*site.groups, attrs.evolve(site.groups[0], id=GroupId("other"))))
    pool = PagedPool.adopt(two.spec, two.shard, two.groups, two.planes, held.rig.decodes[0].pool.buffers)
    with pytest.raises(ConfigurationError, match=r"exactly one group of token pages, not \['kv', 'other'\]"):
        CachedChecksums(pool)
