"""How rooms end: aborts at any time from any side, deadlines, silence, agreement, second uses, close."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from disagg_kv.channels import News
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import Expectation
from disagg_kv.errors import (
    AbortedError,
    ConfigurationError,
    DeadlineError,
    DisaggKVError,
    GeometryError,
    LocalProtocolError,
    RemoteProtocolError,
)
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import Source
from disagg_kv.transports import InprocTransport
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import CountingKernels, RecordingTransport, Unreliable

SPEC = CacheSpec.kv(2, 4, 8, "float16")
QUICK = Options(silence_s=5.0, total_s=20.0)


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_at_any_time(side: str, path: str) -> None:
    """Whenever and wherever a rank gives up, all ranks of a side end alike and all memory comes back."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy=path, slot_bytes=512)
    decodes = rig.decode(tp_shards(SPEC, 2), strategy=path)
    ends: set[Phase] = set()
    for turns in range(26):
        request = rig.request(f"{turns}", prefills, decodes, 24).start()
        for _ in range(turns):
            rig.turn(0.001)
        request.handles[turns % 2 + 2 * (side == "decode")].abort("changed my mind")
        request.ended()
        ends.add(request.receives[0].phase)
        assert request.receives[0].phase is Phase.DONE or "changed my mind" in request.errors()
        for decode, table in zip(decodes, request.taken, strict=True):
            decode.give(table)
        for prefill, tables in zip(prefills, request.given.values(), strict=True):
            prefill.give(tables[0])
    assert ends == {Phase.DONE, Phase.FAILED}
    rig.quiet()


def test_an_abort_after_the_end_is_harmless() -> None:
    """``abort`` is idempotent and changes no outcome."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).start().landed()
    for handle in request.handles:
        handle.abort("too late")
        handle.abort("too late")
    rig.wait(1.0)
    assert request.all(Phase.DONE)


@pytest.mark.parametrize("opened", [False, True], ids=["before prefill opens", "after"])
def test_decode_declines(opened: bool) -> None:
    """An abort before ``expect`` declines the room, whether prefill has opened it or not."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    request = rig.request("room", prefills, decodes, 8)
    if opened:
        request.open_prefill().send(8)
    request.open_decode()
    request.receives[1].abort("no room here")
    if not opened:
        rig.until(lambda: all(h.released for h in request.receives), "decode's end")
        rig.wait(1.0)
        request.open_prefill()
    request.failed()
    assert "no room here" in str(request.sends[0].error)
    assert isinstance(request.sends[0].error, AbortedError)
    rig.quiet()


def test_prefill_gives_up_before_decode_asks() -> None:
    """A room that prefill aborted while nobody knew of it fails on decode as soon as it asks."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_prefill().send(8)
    request.sends[1].abort("preempted for good")
    rig.until(lambda: all(h.released for h in request.sends), "prefill's end")
    request.open_decode().expect().failed()
    assert "preempted for good" in str(request.receives[0].error)
    rig.quiet()


def test_an_expectation_waits_for_the_room() -> None:
    """What decode awaits before prefill has opened the room is parked, and served later."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8)
    rig.wait(20.0)
    assert {receive.phase for receive in request.receives} == {Phase.WAITING}
    request.open_prefill().send(8).finish().landed()
    assert request.sends[0].held == {"kv": 0}


@pytest.mark.parametrize("place", [16_384, 8], ids=["number", "bytes"])
def test_parked_expectations_are_bounded(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither too many expectations nor too large ones are kept; they are repeated until there is room."""
    monkeypatch.setattr("disagg_kv.endpoints.arrivals.PLACE", place)
    rig = Rig(SPEC, options=Options(parked=2))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1), strategy="slice")
    requests = [rig.request(f"{i}", prefills, decodes, 8).open_decode().expect() for i in range(5)]
    rig.wait(3.0)
    assert prefills[0].observer.counters["frames.not_parked"] > 0
    for request in requests:
        request.open_prefill().send(8).finish()
    rig.until(lambda: all(r.all(Phase.DONE) for r in requests), "all rooms")


def test_a_peer_does_not_take_the_places_of_others() -> None:
    """One parks at most a quarter of what may be parked while others are known."""
    rig = Rig(SPEC, options=Options(parked=8))
    prefills, greedy = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    other = rig.decode(tp_shards(SPEC, 1), "E")
    rig.request("first", prefills, other, 8).start().landed()
    taken = [rig.request(f"{i}", prefills, greedy, 8).open_decode().expect() for i in range(12)]
    rig.wait(1.0)
    before = prefills[0].observer.counters["frames.not_parked"]
    assert before
    for member in greedy:
        member.frozen = True
    modest = [rig.request(f"of another {i}", prefills, other, 8).open_decode().expect() for i in range(2)]
    rig.wait(1.0)
    assert prefills[0].observer.counters["frames.not_parked"] == before
    for member in greedy:
        member.frozen = False
    for request in taken + modest:
        request.open_prefill().send(8).finish()
    rig.until(lambda: all(r.all(Phase.DONE) for r in taken + modest), "all rooms")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_room_that_decode_gave_up_before_it_was_opened_fails_and_its_retry_succeeds(ranks: int) -> None:
    """Whether prefill opens the first attempt late, or never."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, ranks))
    for name in ("late", "never"):
        first = rig.request(name, prefills, decodes, 8).open_decode().expect(8)
        rig.wait(1.0)
        for handle in first.receives:
            handle.abort("not yet")
        rig.until(lambda first=first: all(h.released for h in first.receives), "the first attempt's end")  # type: ignore[misc]
        second = rig.request(name, prefills, decodes, 8, attempt=2).open_decode().expect(8)
        rig.wait(1.0)
        if name == "late":
            first.open_prefill()
            rig.until(lambda first=first: first.sends[0].released, "prefill's end")  # type: ignore[misc]
            assert "decode gave up: " in str(first.sends[0].error)
        second.open_prefill().send(8).finish().landed()
    rig.quiet()


def test_a_retry_begins_at_once() -> None:
    """An attempt begins as soon as the last one is released, whatever became of that."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    for attempt in range(1, 9):
        request = rig.request("same", prefills, decodes, 8, attempt=attempt)
        if attempt % 4 == 2:
            request.open_decode().open_prefill().receives[0].abort("declined")
            request.released()
        elif attempt % 4 == 0:
            request.start().sends[0].abort("aborted")
            request.released()
            request.forgive()
        else:
            request.start().landed()
        if attempt % 2 == 0:
            assert request.all(Phase.FAILED)
    rig.quiet()


@pytest.mark.parametrize("aborted", [False, True])
def test_a_room_id_is_used_once(aborted: bool) -> None:
    """While its room is open, and after its end; the message says what to do, and the ids are checked."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_prefill().open_decode()

    def refused(match: str) -> None:
        with pytest.raises(LocalProtocolError, match=match):
            prefills[0].endpoint.open(request.room)
        with pytest.raises(LocalProtocolError, match=match):
            decodes[0].endpoint.open(request.room, Source("P"))

    refused("open already")
    if aborted:
        request.receives[0].abort("no more")
        request.released()
    else:
        request.expect().send(8).finish().landed()
    refused("used already; a retry has its own id, see disagg_kv.endpoints.attempt_id")
    for name in (b"", b"x" * 65):
        with pytest.raises(ConfigurationError, match="room id"):
            prefills[0].endpoint.open(RoomId(name))
    rig.quiet()


USES = [(side, ranks) for side in ("prefill", "decode", "both") for ranks in ((0,), (1,), (0, 1))]


@pytest.mark.parametrize(("side", "ranks"), USES, ids=str)
@pytest.mark.parametrize("done", [True, False])
def test_an_id_that_is_used_again_when_it_was_forgotten_ends(side: str, ranks: tuple[int, ...], done: bool) -> None:
    """On some ranks or all of them: by name or by the deadline, and a success has the right bytes on every rank."""
    rig = Rig(SPEC, options=Options(tombstones=1, total_s=20.0))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    first = rig.request("room", prefills, decodes, 8).start()
    if done:
        first.landed()
    else:
        first.sends[1].abort("the user went away")
        first.released()
        first.forgive()
    rig.request("other", prefills, decodes, 8).start().landed()
    again = rig.request(
        "room",
        [prefills[r] for r in ranks if side != "decode"],
        [decodes[r] for r in ranks if side != "prefill"],
        8,
    )
    again.open_decode().expect().open_prefill().send(8).finish()
    whole = side == "both" and len(ranks) == 2
    began = rig.clock()
    rig.until(lambda: all(h.released for h in again.handles), "the end", 8000)
    phases = {handle.phase for handle in again.handles}
    assert phases == {Phase.DONE} if whole and done else phases == {Phase.FAILED}, again.errors()
    assert rig.clock() - began < 22.0
    if phases == {Phase.DONE}:
        again.done()
    else:
        again.forgive()
    rig.check()
    rig.quiet()


def test_another_use_of_an_id_that_prefill_still_has_fails_by_name() -> None:
    """Decode has forgotten it, and prefill waits for the last word about its room."""
    rig = Rig(SPEC, options=Options(tombstones=1))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1), strategy="staged")
    first = rig.request("room", prefills, decodes, 8).open_decode().expect().open_prefill()
    rig.until(lambda: first.sends[0].phase is Phase.READY, "the expectation")
    first.receives[0].abort("changed my mind")
    prefills[0].frozen = True
    rig.until(lambda: first.receives[0].released, "decode's end")
    rig.request("other", [], decodes, 8).open_decode().receives[0].abort("another id")
    again = rig.request("room", [], decodes, 8).open_decode().expect()
    rig.wait(0.5)
    prefills[0].frozen = False
    rig.until(lambda: again.receives[0].released, "the end")
    assert again.receives[0].phase is Phase.FAILED
    assert rig.clock() < 20.0


def test_another_decode_instance_does_not_disturb_a_room() -> None:
    """A room belongs to the decode instance that asked first; the other one is refused and the room goes on."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2))
    mine, other = rig.decode(tp_shards(SPEC, 2), "mine"), rig.decode(tp_shards(SPEC, 1), "other")
    request = rig.request("room", prefills, mine, 8).open_decode().expect().open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")
    intruder = rig.request("room", prefills, other, 8).open_decode().expect()
    rig.until(lambda: intruder.receives[0].released, "the refusal")
    assert intruder.receives[0].phase is Phase.FAILED
    assert "has this room" in str(intruder.receives[0].error)
    rig.wait(2.0)
    request.send(8).finish().landed()
    rig.quiet()


def test_prefill_ends_too_early() -> None:
    """Fewer rows than decode asked for are a failure that names both numbers."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8)
    request.rows = 6
    request.open_prefill().send(6).finish().failed()
    assert isinstance(request.receives[0].error, RemoteProtocolError)
    assert "row 6, not at 8" in str(request.receives[0].error)
    rig.quiet()


def test_more_rows_than_decode_has_pages_for() -> None:
    """With ``stop=None`` prefill's end must fit the pages."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect()
    request.rows, request.truth = 20, rig.truth(20)
    request.open_prefill().send(20).finish().failed()
    request.forgive()
    rig.check()
    rig.quiet()


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_fewer_rows_than_the_least_fail(tps: tuple[int, int]) -> None:
    """Also where prefill's end is left open: decode would read rows that were not written."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, tps[0])), rig.decode(tp_shards(SPEC, tps[1]))
    request = rig.request("room", prefills, decodes, 12).open_decode().expect(least=7)
    request.rows = 6
    request.open_prefill().send(6).finish().failed()
    assert "ends at row 6; decode needs 7 or more" in str(request.receives[0].error)
    request.forgive()
    enough = rig.request("enough", prefills, decodes, 7)
    enough.open_decode().expect(least=7).open_prefill().send(7).finish().landed()
    rig.quiet()


def test_a_least_row_without_a_page_is_refused() -> None:
    rig = Rig(SPEC)
    decodes = rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", rig.prefill(tp_shards(SPEC, 1)), decodes, 8).open_decode()
    with pytest.raises(GeometryError, match="least 9, but there are pages for 8 rows"):
        request.receives[0].expect(Expectation(None, [decodes[0].take(8)], least=9))
    with pytest.raises(GeometryError, match="least 8 beside stop 8"):
        Expectation(8, [], least=8)


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_one_decode_rank_fails(path: str) -> None:
    """What one rank of an instance cannot do, none has done."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy=path)
    shards = tp_shards(SPEC, 2)
    decodes = rig.decode(shards, strategy=path, only=[0]) + rig.decode(shards, strategy=path, only=[1], kernels=kernels)
    kernels.fail = RuntimeError("no such kernel")
    request = rig.request("room", prefills, decodes, 8).start()
    if path == "staged":
        request.failed()
        assert "no such kernel" in str(request.receives[1].error)
        assert "another rank failed" in str(request.receives[0].error)
    request.ended()
    kernels.fail = None
    rig.request("next", prefills, decodes, 8).start().landed()
    rig.quiet()


def test_an_unforeseen_error_ends_rooms_but_not_the_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    """Kernels, transports and events that raise what they should not cost rooms; the next room works."""
    rig = Rig(SPEC)
    kernels, transport = CountingKernels(), RecordingTransport(InprocTransport())
    memory = Memory(transport=lambda: transport)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    kernels.fail = RuntimeError("illegal memory access")
    request = rig.request("room", prefills, decodes, 8).start().failed()
    assert "illegal memory access" in str(request.sends[0].error)
    kernels.fail = None
    transport.fail = ValueError("no such endpoint")
    request = rig.request("room", prefills, decodes, 8, attempt=2).start().failed()
    assert "no such endpoint" in str(request.sends[0].error)
    transport.fail = None

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("device lost")

        def synchronize(self) -> None:
            raise AssertionError("never")

    with caplog.at_level(logging.ERROR):
        for late in (False, True):
            request = rig.request(f"late {late}", prefills, decodes, 8).open_decode().expect().open_prefill()
            if late:
                request.send(8).sends[0].finish(8, ready=Broken())
            else:
                request.send(8, ready=Broken()).finish()
            request.failed()
            assert "device lost" in request.errors()
    rig.request("next", prefills, decodes, 8).start().landed()
    rig.quiet()


@pytest.mark.parametrize("what", ["poll", "send"])
def test_a_channel_that_raises_does_not_end_the_endpoint(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """An inbox that cannot be read fails the open rooms; a frame that cannot be sent is a lost frame."""
    rig = Rig(SPEC)
    broken: list[str] = []

    class Broken(Unreliable):
        def send(self, address: str, frame: bytes) -> bool:
            if "send" in broken:
                raise OSError("no route")
            return super().send(address, frame)

        def poll(self) -> Sequence[News]:
            if "poll" in broken:
                raise OSError("no inbox")
            return super().poll()

    memory = Memory(channel=lambda inner: Broken(inner, lambda number, address: (0,)))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory)
    decodes = rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect().open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")
    with caplog.at_level(logging.CRITICAL):
        broken.append(what)
        if what == "send":
            request.sends[0].abort("enough")
        rig.wait(0.5)
        broken.clear()
    assert request.sends[0].phase is Phase.FAILED
    assert ("no inbox" if what == "poll" else "enough") in str(request.failed().sends[0].error)
    assert bool(prefills[0].observer.counters["errors.unforeseen"]) is (what == "poll")
    rig.request("next", prefills, decodes, 8).start().landed()
    rig.quiet()


@pytest.mark.parametrize("when", ["never there", "lost"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_silence_ends_rooms(side: str, when: str) -> None:
    """A peer that says nothing for ``silence_s`` fails its rooms, and nobody else's."""
    rig = Rig(SPEC, options=QUICK)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect().open_prefill()
    dead = prefills[1] if side == "prefill" else decodes[0]
    if when == "lost":
        rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")
    dead.frozen = True
    rig.wait(30.0)
    alive = [h for h, m in zip(request.handles, [*prefills, *decodes], strict=True) if m is not dead]
    assert all(h.phase is Phase.FAILED for h in alive)
    assert all(isinstance(h.error, DisaggKVError) for h in alive)
    if side == "prefill":
        assert "rank 1 of instance 'P'" in str(request.receives[0].error)  # as decode saw it, or rank 0 did


def test_a_rooms_own_deadlines() -> None:
    """``total_s`` of one room overrides the endpoint's; the error names who is missing."""
    rig = Rig(SPEC, options=Options(silence_s=2.0))
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    request = rig.request("room", prefills, decodes, 8).open_decode(4.0).expect().open_prefill(4.0).send(8)
    request.sends[1].finish(8)
    rig.until(lambda: all(h.phase is Phase.FAILED for h in request.handles), "the deadline", 2000)
    errors = [h.error for h in request.handles]
    assert any(isinstance(e, DeadlineError) for e in errors)
    assert "within 4 s" in request.errors()
    assert "ranks [0] are not done" in request.errors() or "is moving" in request.errors()
    lonely = decodes[0].endpoint.open(RoomId(b"lonely"), Source("nobody"))
    rig.until(lambda: lonely.released, "the silence", 600)
    assert "'nobody' was not found in 2 s" in str(lonely.error)
    late = prefills[0].endpoint.open(RoomId(b"late"), total_s=3.0)
    rig.until(lambda: late.released, "the deadline", 800)
    assert "0 of unknown decode ranks asked" in str(late.error)


def test_a_declined_room_of_an_unknown_instance_ends() -> None:
    """One that is declined or out of time, and whose prefill never appears, does not stay for ever."""
    rig = Rig(SPEC, options=QUICK)
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    declined = decode.endpoint.open(RoomId(b"declined"), Source("nobody"))
    late = decode.endpoint.open(RoomId(b"late"), Source("nobody"), total_s=1.0)
    declined.abort("not needed")
    rig.until(lambda: declined.released and late.released, "their ends")
    assert len(decode.endpoint.inspect().rooms) == 2
    rig.wait(6.0)
    assert not decode.endpoint.inspect().rooms


def test_prefill_is_told_of_a_deadline_that_passed_before_it_was_there() -> None:
    """It gives its pages back at once, not at its own deadline."""
    rig = Rig(SPEC)
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    receive = decode.endpoint.open(RoomId(b"room"), Source("P"), total_s=3.0)
    rig.until(lambda: receive.released, "the deadline")
    assert isinstance(receive.error, DeadlineError)
    (prefill,) = rig.prefill(tp_shards(SPEC, 1))
    send = prefill.endpoint.open(RoomId(b"room"))
    rig.until(lambda: send.released, "prefill's end")
    assert rig.clock() < 20
    assert isinstance(send.error, AbortedError)
    assert "the prefill ranks were not found" in str(send.error)
    rig.quiet()


def test_a_frozen_prefill_rank_does_not_stop_others() -> None:
    """Rooms of another prefill instance go on while one rank's leases wait for it."""
    rig = Rig(SPEC, options=QUICK)
    ring = 16 << 10
    bad = rig.prefill(tp_shards(SPEC, 2), "bad", strategy="staged")
    good = rig.prefill(tp_shards(SPEC, 2), "good", strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=ring)
    stuck = [rig.request(f"{i}", bad, decodes, 16, "bad").open_decode().expect().open_prefill() for i in range(4)]
    for request in stuck:
        step = bad[0].endpoint.step({request.room: (16, [request.pages(0, 16)[0]])})
        assert step is not None
    rig.wait(1.0)
    bad[1].frozen = True
    for i in range(3):
        rig.request(f"good {i}", good, decodes, 16, "good").start().landed()
    rig.wait(10.0)
    assert all(r.receives[0].phase is Phase.FAILED for r in stuck)
    rig.request("good at last", good, decodes, 16, "good").start().landed()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_closing_ends_open_rooms(side: str) -> None:
    """``close`` aborts what is open and tells the peers; calls after it are refused or harmless."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect().open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")
    closed = rig.members[side == "decode"]
    closed.close()
    rig.wait(10.0)
    assert all(h.phase is Phase.FAILED for h in request.handles)
    assert "the endpoint closes" in request.errors()
    closed.close()
    for handle in request.handles:
        handle.abort("again")
    other = rig.request("other", prefills, decodes, 8)
    with pytest.raises(LocalProtocolError, match="closed"):
        (other.open_prefill if side == "prefill" else other.open_decode)()


def test_closing_with_threads() -> None:
    """The same with the endpoints' own threads: rooms of both sides end, and ``close`` returns."""
    rig = Rig(SPEC, threaded=True)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 2)), rig.decode(tp_shards(SPEC, 2))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect().open_prefill()
    rig.until(lambda: all(h.phase is Phase.READY for h in request.sends), "the expectation")
    for member in decodes:
        member.close(5.0)
    rig.until(lambda: all(h.phase is Phase.FAILED for h in request.handles), "the end")
    rig.close()


def test_poll_reports_each_change() -> None:
    """``poll`` lists every handle whose phase or release changed, once per call."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().open_prefill()
    seen: dict[str, list[tuple[Phase, bool]]] = {"send": [], "receive": []}

    def look() -> bool:
        for handle in prefills[0].endpoint.poll():
            assert handle is request.sends[0]
            seen["send"].append((handle.phase, handle.released))
        for reception in decodes[0].endpoint.poll():
            assert reception is request.receives[0]
            seen["receive"].append((reception.phase, reception.released))
        return all(h.released for h in request.handles)

    rig.until(lambda: look() or request.receives[0].phase is Phase.READY, "the introduction")
    request.expect(8)
    rig.until(lambda: look() or request.sends[0].phase is Phase.READY, "the expectation")
    request.send(8).finish()
    rig.until(look, "the end")
    moved = [(Phase.MOVING, False), (Phase.DONE, True)]
    assert seen["receive"] == [(Phase.READY, False), (Phase.WAITING, False), *moved]
    assert seen["send"] == [(Phase.READY, False), *moved]
    assert not prefills[0].endpoint.poll()
    assert not decodes[0].endpoint.poll()
