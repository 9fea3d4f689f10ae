"""Which rooms staging slots do not cut: what prefill ranks say of their choices, and what decode makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from disagg_kv.core import Options, Phase, Receiving
from disagg_kv.core.room.flow import room_head
from disagg_kv.core.wire.frames import Abort, Expect
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.endpoints.decode.uncut import CUT_S
from disagg_kv.errors import TransportError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Peer, RegionId
from disagg_kv.kernels import CpuKernels, PageMove
from disagg_kv.memory import Bell, Event
from disagg_kv.transports import InprocTransport
from tests.support.rig import Decodes, Member, Memory, Prefills, Request, Rig, tp_shards
from tests.unit.endpoints.test_lane_rates import SPEC as FEW
from tests.unit.endpoints.test_lane_rates import Link, Slow

SPEC = CacheSpec.kv(4, 4, 8, "float16")
SHARED = CacheSpec.kv(4, 1, 8, "float16")
"""All ranks hold the same, and one of them sends it."""

WIDER = CacheSpec.kv(4, 4, 8, "float32")
"""Decode's, of rows that are converted on the way."""

ROWS, SLOT = 64, 1 << 11


class Queueing(CpuKernels):
    """Kernels of a device that is done at once. Copies of more than ``most`` bytes of a room fail."""

    def __init__(self, most: int = 1 << 30) -> None:
        super().__init__()
        self.most = most

    def orders(self, event: Event) -> bool:
        """See :class:`~disagg_kv.kernels.SupportsStreams`."""
        return True

    def copy(self, moves: Sequence[PageMove], after: Event | None, bells: Sequence[Bell] = ()) -> None:
        """Copy, unless that is too much."""
        if max(move.copy.source.nbytes for move in moves) > self.most:
            raise RuntimeError("too much for one launch")
        super().copy(moves, after, bells)


class Refusing(InprocTransport):
    """Its ``why``, if there is one, is the reason why it maps nothing; it never maps memory of ``far``."""

    caps = attrs.evolve(InprocTransport.caps, write_s=1e-5)
    why: str | None = None
    far: Peer | None = None

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        """See :class:`~disagg_kv.transports.SupportsMapping`."""
        return "it is on another host" if peer == self.far else self.why


def ranks(
    rig: Rig,
    spec: CacheSpec = SPEC,
    kernels: Sequence[CpuKernels] = (),
    path: str = "auto",
    into: CacheSpec | None = None,
    tp: int = 1,
) -> tuple[Prefills, Decodes]:
    """Prefill ranks with these kernels, by default two that queue, and ``tp`` decode ranks with smaller pages."""
    of = kernels or (Queueing(), Queueing())
    shards, wide = tp_shards(spec, len(of)), Memory(pages=256, transport=Refusing)
    prefills: Prefills = []
    for number, one in enumerate(of):
        prefills += rig.prefill(shards, only=[number], strategy=path, kernels=one, slot_bytes=SLOT, memory=wide)
    narrow = Memory(page_size=2, pages=512, transport=Refusing)
    return prefills, rig.decode(tp_shards(into or spec, tp), strategy=path, memory=narrow)


def refuse(prefill: Member[PrefillEndpoint], decode: Member[DecodeEndpoint]) -> None:
    """Prefill's link is dropped, and the decode rank's pool cannot be mapped through the next one."""
    assert isinstance(prefill.transport, Refusing)
    prefill.transport.why = "no handle is left"
    loop, epoch = prefill.endpoint._loop, decode.endpoint._loop.me.epoch
    loop._peer_effects(loop.peers._part(epoch, loop.now, notify=False))


def segments(request: Request) -> int:
    """Of the rank that sent most."""
    return max(send.report.segments for send in request.sends)


@pytest.mark.parametrize("spec", [SPEC, SHARED])
def test_rooms_are_uncut_after_one_that_was_mapped(spec: CacheSpec) -> None:
    """Also where one rank alone sends it. What the engine gives up changes nothing."""
    rig = Rig(spec)
    prefills, decodes = ranks(rig, spec)
    assert segments(rig.request("first", prefills, decodes, ROWS).start(ROWS).landed()) > 1
    assert segments(rig.request("second", prefills, decodes, ROWS).start(ROWS).landed()) == 1
    given_up = rig.request("third", prefills, decodes, ROWS).open_decode().expect(ROWS).open_prefill()
    given_up.receives[0].abort("enough")
    given_up.failed()
    assert segments(rig.request("fourth", prefills, decodes, ROWS).start(ROWS).landed()) == 1
    rig.quiet()


def test_all_rooms_are_uncut_where_every_path_copies_from_pages_to_pages() -> None:
    """No prefill rank has to say anything first."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig, path="mapped")
    for name in ("first", "second"):
        assert segments(rig.request(name, prefills, decodes, ROWS).start(ROWS).landed()) == 1
    rig.quiet()


@pytest.mark.parametrize("path", ["auto", "mapped"])
def test_no_room_is_uncut_where_kernels_of_one_rank_do_not_queue(path: str) -> None:
    """All ranks cut alike."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig, kernels=(Queueing(), CpuKernels()), path=path)
    for name in ("first", "second", "third"):
        assert segments(rig.request(name, prefills, decodes, ROWS).start(ROWS).landed()) > 1
    rig.quiet()


def test_short_rooms_that_need_no_mapping_leave_long_ones_uncut() -> None:
    """Their few writes into pages need no staging memory either."""
    rig = Rig(SPEC)
    wide = Memory(pages=2048)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="auto", kernels=Queueing(), slot_bytes=1 << 17, memory=wide)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="auto", memory=wide, ring_bytes=1 << 22)
    found = []
    for number, rows in enumerate([1024, 8, 1024, 8, 1024]):
        report = rig.request(f"{number}", prefills, decodes, rows).start(rows).landed().sends[0].report
        found.append((report.path, report.segments))
    assert found == [("mapped", 5), ("direct", 1), ("mapped", 1), ("direct", 1), ("mapped", 1)]


def test_rooms_are_cut_for_a_while_after_an_uncut_one_has_failed() -> None:
    """Also those that were opened before."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig, kernels=(Queueing(most=SLOT),))
    rig.request("first", prefills, decodes, ROWS).start(ROWS).landed()
    opened = rig.request("opened", prefills, decodes, ROWS).open_decode()
    rig.wait(0.3)
    rig.request("uncut", prefills, decodes, ROWS).start(ROWS).failed()
    opened.expect(ROWS).open_prefill().send(ROWS).finish().landed()
    rig.request("cut", prefills, decodes, ROWS).start(ROWS).landed()
    rig.wait(CUT_S)
    rig.request("uncut again", prefills, decodes, ROWS).start(ROWS).failed()


@pytest.mark.parametrize("why", ["prefill's engine", "decode's engine", "claim_s"])
def test_a_room_that_ends_for_another_reason_leaves_the_next_ones_uncut(why: str) -> None:
    """Clients go away all the time. On decode, the word of rank 0 may come before that of the rank's own engine."""
    rig = Rig(SPEC, options=Options(claim_s=3.0))
    prefills, decodes = ranks(rig, tp=2)
    for name in ("first", "second"):
        request = rig.request(name, prefills, decodes, ROWS).start(ROWS).landed()
    assert segments(request) == 1
    gone = rig.request("gone", prefills, decodes, ROWS).open_decode().expect(ROWS)
    rig.wait(0.3)
    if why == "prefill's engine":
        gone.open_prefill()
        rig.wait(0.3)
        for send in gone.sends:
            send.abort(why)
    elif why == "decode's engine":
        gone.open_prefill()
        rig.wait(0.3)
        gone.receives[0].abort(why)
    gone.failed()
    rig.wait(2.0)
    assert segments(rig.request("next", prefills, decodes, ROWS).start(ROWS).landed()) == 1


def test_rooms_are_cut_as_soon_as_an_uncut_one_fails() -> None:
    """Its pages may wait for evidence for long."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig, kernels=(Queueing(),))
    rig.request("first", prefills, decodes, ROWS).start(ROWS).landed()
    side, loop = decodes[0].endpoint._side, decodes[0].endpoint._loop
    failing = rig.request("uncut", prefills, decodes, ROWS).open_decode().expect(ROWS).open_prefill()
    rig.wait(0.5)
    ((key, room),) = side._rooms.items()
    epoch = prefills[0].endpoint._loop.me.epoch
    head = room_head(epoch, loop.me.epoch, key.room, key.generation)
    side.on_frame(Abort(**head, reason="a copy failed", broken=True))
    assert room.machine.state is Receiving.DRAINING
    assert list(side._uncut._cut_until) == [epoch]
    failing.failed()


def test_nothing_is_kept_of_a_rank_that_is_lost_before_its_room_fails() -> None:
    """It has sent all of its rows, and the other rank fails to send its own."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig)
    rig.request("first", prefills, decodes, ROWS).start(ROWS).landed()
    side, loop = decodes[0].endpoint._side, decodes[0].endpoint._loop
    room = rig.request("room", prefills, decodes, ROWS).open_decode().expect(ROWS).open_prefill()
    rig.wait(0.3)
    pages = room.pages(0, ROWS)
    room.sends[0].send_chunk(ROWS, prefills[0].pages(pages[0]))
    room.sends[0].finish(ROWS)
    rig.wait(0.3)
    gone, there = (one.endpoint._loop.me.epoch for one in prefills)
    loop.lose(gone, TransportError("the link is down"), ended=True)
    loop._gone(gone)
    decodes[0].endpoint.driver.step(0.0)
    assert not room.receives[0].error
    (key,) = side._rooms
    side.on_frame(Abort(**room_head(there, loop.me.epoch, *key), reason="a copy failed", broken=True))
    assert "a copy failed" in str(room.receives[0].error)
    assert (list(side._uncut._cut_until), list(side._uncut._unstaged)) == ([there], [there])


def test_rooms_for_which_no_path_is_left_are_cut_as_well() -> None:
    """Rows that are converted are staged or mapped, and decode's pool cannot be mapped any more."""
    rig = Rig(SPEC, decoded=WIDER)
    prefills, decodes = ranks(rig, kernels=(Queueing(),), into=WIDER)
    first = rig.request("first", prefills, decodes, ROWS).start(ROWS).landed()
    assert first.sends[0].report.path == "mapped"
    refuse(prefills[0], decodes[0])
    failed = rig.request("uncut", prefills, decodes, ROWS).start(ROWS).failed()
    assert "the room is uncut, and staged needs staging memory" in str(failed.sends[0].error)
    last = rig.request("cut", prefills, decodes, ROWS).start(ROWS).landed()
    assert last.sends[0].report.path == "staged"


@pytest.mark.parametrize("into", [SPEC, WIDER])
def test_a_rank_that_sends_nothing_here_has_no_say(into: CacheSpec) -> None:
    """It may be on another host than this decode rank; and for rows that are converted it has no path of its own."""
    rig = Rig(SPEC, decoded=None if into is SPEC else into)
    prefills, decodes = ranks(rig, into=into, tp=2)
    for number, one in enumerate(prefills):
        assert isinstance(one.transport, Refusing)
        one.transport.far = one.transport.peer_of(decodes[1 - number].transport.local_descriptor())
    first, second = [rig.request(name, prefills, decodes, ROWS).start(ROWS).landed() for name in "12"]
    assert segments(first) > segments(second) == 1


def test_what_is_repeated_of_an_earlier_room_is_no_news() -> None:
    """That room waits for its other rank, and the first one would stage no more since it began."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig)
    chooser = prefills[0].endpoint._side._router._chooser
    with pytest.MonkeyPatch.context() as patch:
        choose = chooser.choose
        patch.setattr(chooser, "choose", lambda *args: attrs.evolve(choose(*args), unstaged=False))
        long = rig.request("long", prefills, decodes, ROWS).open_decode().expect(ROWS).open_prefill()
        rig.wait(0.3)
        pages = long.pages(0, ROWS)
        long.sends[0].send_chunk(ROWS, prefills[0].pages(pages[0]))
        long.sends[0].finish(ROWS)
        rig.wait(0.3)
    found = []
    for name in "123":
        found.append(segments(rig.request(name, prefills, decodes, ROWS).start(ROWS).released()))
        rig.wait(2.2)
    assert found[1:] == [1, 1]
    long.sends[1].send_chunk(ROWS, prefills[1].pages(pages[1]))
    long.sends[1].finish(ROWS)
    long.released()


def test_a_rank_that_would_stage_does_so_one_room_later() -> None:
    """It has measured that its copies are slow."""

    class SlowQueueing(Slow):
        def orders(self, event: Event) -> bool:
            return True

    rig = Rig(FEW)
    shards = tp_shards(FEW, 1)
    prefills = rig.prefill(shards, memory=Memory(transport=Link), strategy="auto", kernels=SlowQueueing(rig.clock))
    decodes = rig.decode(shards, memory=Memory(page_size=8, transport=Link), strategy="auto")
    reports = [rig.request(name, prefills, decodes, 9).start(9).landed().sends[0].report for name in "123"]
    assert [report.path for report in reports] == ["mapped", "slice", "staged"]
    assert reports[1].reason.startswith("the room is uncut, so slice stands in for the choice (staged takes ")


def test_a_rank_that_cannot_map_any_more_takes_another_path_without_staging() -> None:
    """Its link was dropped after decode had asked for the room."""
    rig = Rig(SPEC, options=Options(known_s=60.0))
    prefills, decodes = ranks(rig)
    rig.request("first", prefills, decodes, ROWS).start(ROWS).landed()
    late = rig.request("late", prefills, decodes, ROWS).open_decode().expect(ROWS)
    rig.wait(0.5)
    refuse(prefills[0], decodes[0])
    late.open_prefill().send(ROWS).finish().landed()
    assert [send.report.path for send in late.sends] == ["slice", "mapped"]
    rig.request("next", prefills, decodes, ROWS).start(ROWS).landed()
    rig.quiet()


def test_nothing_is_kept_of_a_rank_whose_notice_comes_after_its_loss() -> None:
    """Bells had ended its room."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig, kernels=(Queueing(),))
    side, step = decodes[0].endpoint._side, decodes[0].endpoint.driver.step
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill()
    rig.wait(0.5)
    request.send(9)
    rig.until(lambda: request.receives[0].phase is Phase.DONE, "bells")
    for _ in range(5):
        step(0.0)
    request.finish()
    for _ in range(4):
        prefills[0].endpoint.driver.step(0.0)
    loop, epoch = decodes[0].endpoint._loop, prefills[0].endpoint._loop.me.epoch
    loop._peer_effects(loop.peers.shut(epoch, TransportError("the link is down"), loop.now))
    step(0.0)
    assert not side._uncut._unstaged


def test_a_room_that_is_uncut_by_mistake_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill stages all that it sends. The next room is not concerned."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="auto")
    with monkeypatch.context() as patch:
        patch.setattr("disagg_kv.core.room.receive_room.Expect", lambda **of: Expect(**{**of, "uncut": True}))
        failed = rig.request("wrong", prefills, decodes, 9).start(9).failed()
    assert "the room is uncut, and staged needs staging memory" in str(failed.sends[0].error)
    rig.request("right", prefills, decodes, 9).start(9).landed()
