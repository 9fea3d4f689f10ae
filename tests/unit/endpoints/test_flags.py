"""Completion flags: what a raised flag does to a room, which flags count, and the page that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import attrs
import msgspec
import pytest

from disagg_kv.core import Alone, Codec, Hello, Options, Phase, Verify
from disagg_kv.core.wire.frames import Expect, WireFlags
from disagg_kv.endpoints import Reception
from disagg_kv.endpoints.decode.flags import FlagPage
from disagg_kv.endpoints.peers import mapping
from disagg_kv.endpoints.peers.mapping import BLOCK, BLOCK_BYTES
from disagg_kv.endpoints.peers.session import PeerSession
from disagg_kv.errors import PeerLostError, RemoteProtocolError, TransportError
from disagg_kv.memory import new_buffer
from disagg_kv.memory.flag import raise_flags
from disagg_kv.transports import InprocTransport, ShmTransport, Transports
from disagg_kv.transports.descriptor import pack
from disagg_kv.transports.flags import SLOT_WORDS, HostFlags, Record, raised, words_of
from disagg_kv.transports.memfd import FlagPlace
from tests.support.device_copies import SPEC, DeviceKernels
from tests.support.rig import Memory, Request, Rig, tp_shards


def scene(prefill_tp: int = 1, *, options: Options | None = None, memory: Memory | None = None) -> tuple[Rig, Request]:
    """A room that every rank has opened, whose prefill ranks have a device that copies; nothing was sent yet."""
    rig, of = Rig(SPEC, options=options, driven=True), memory or Memory()
    prefills = rig.prefill(tp_shards(SPEC, prefill_tp), memory=of, strategy="mapped", kernels=DeviceKernels())
    return rig, opened(rig, rig.request("flag", prefills, rig.decode(tp_shards(SPEC, 1), memory=of), 9))


def opened(rig: Rig, request: Request) -> Request:
    request.open_decode().expect(9).open_prefill()
    rig.until(lambda: request.receives[0].phase is Phase.MOVING, "every rank to have opened it")
    rig.wait(0.3)
    poll(request)
    return request


def copies(request: Request) -> DeviceKernels:
    """The device of the prefill ranks."""
    kernels = request.prefills[0].endpoint._side.transfers.mapped._kernels
    assert isinstance(kernels, DeviceKernels)
    return kernels


def poll(request: Request) -> Sequence[Reception]:
    """Decode's engine polls, and no other endpoint does anything."""
    return request.decodes[0].endpoint.poll()


def flags_of(request: Request) -> tuple[HostFlags, WireFlags]:
    """Decode's page as prefill has it open, and the flags of the room."""
    (room,) = request.prefills[0].endpoint.inspect().rooms.values()
    flags = next(iter(room.routes.values())).flags
    assert isinstance(flags, HostFlags)
    (there,) = request.decodes[0].endpoint.inspect().rooms.values()
    return flags, there.flags[0]


def ended(request: Request) -> bool:
    """Whether every handle is released; the device goes on, and every engine polls."""
    copies(request).finish()
    for prefill in request.prefills:
        prefill.endpoint.poll()
    for decode in request.decodes:
        decode.endpoint.poll()
    return all(handle.released for handle in request.handles)


def settle(rig: Rig, request: Request) -> None:
    """Everybody goes on, and everything ends well."""
    request.finish()
    rig.until(lambda: ended(request), "the end")
    request.landed()
    assert [handle.error for handle in request.handles] == [None] * len(request.handles)
    rig.quiet()


@pytest.mark.parametrize("transport", [InprocTransport, ShmTransport])
def test_decode_s_pages_are_released_by_the_poll_that_sees_the_flags(transport: Callable[[], InprocTransport]) -> None:
    """No frame of prefill tells of the copy: prefill does not run after its launch."""
    rig, request = scene(memory=Memory(transport=transport))
    request.send(9)
    rig.until(lambda: len(copies(request).queued) == 1, "the launch")
    (handle,) = request.receives
    assert poll(request) == []
    copies(request).finish()
    assert poll(request) == [handle]
    assert (handle.phase, handle.released, poll(request)) == (Phase.DONE, True, [])
    request.wanted(0, 9)
    rig.check()
    assert (handle.report.segments, handle.report.nbytes) == (1, 9 * 2 * 2 * 4 * 8 * 2)
    settle(rig, request)
    assert [h.report.path for h in request.handles] == ["mapped", "mapped"]


def test_flags_of_all_writers_and_segments_are_needed() -> None:
    """Two ranks write each of two segments, which end in any order."""
    rig, request = scene(2)
    request.send(4).send(9, 4)
    rig.until(lambda: sum(len(copy.moves) for copy in copies(request).queued) == 4, "the launches")
    for copy in copies(request).queued[::-1]:
        assert poll(request) == []
        copy.run()
    assert poll(request) == request.receives
    assert request.receives[0].released
    settle(rig, request)


def test_an_abort_after_the_flags_changes_nothing() -> None:
    rig, request = scene()
    request.send(9)
    rig.until(lambda: len(copies(request).queued) == 1, "the launch")
    copies(request).finish()
    assert poll(request) == request.receives
    request.receives[0].abort("too late")
    settle(rig, request)


def test_flags_after_an_abort_change_nothing() -> None:
    rig, request = scene()
    request.send(9)
    rig.until(lambda: len(copies(request).queued) == 1, "the launch")
    request.receives[0].abort("enough")
    copies(request).finish()
    poll(request)
    assert request.receives[0].phase is Phase.FAILED
    rig.until(lambda: ended(request), "the end")
    request.failed()


@pytest.mark.parametrize("first", ["flags", "end"])
def test_a_prefill_rank_may_end_once_its_flags_are_raised(first: str) -> None:
    """Also its process: all rows are in decode's pages. So it is if decode's next look finds flags and the end."""
    rig, request = scene()
    request.send(9)
    rig.until(lambda: len(copies(request).queued) == 1, "the launch")
    copies(request).finish()
    if first == "end":
        request.prefills[0].crash()
    assert poll(request) == request.receives
    if first == "flags":
        request.prefills[0].crash()
    rig.wait(0.5)
    (handle,) = request.receives
    assert (handle.phase, handle.released, handle.error) == (Phase.DONE, True, None)
    request.wanted(0, 9)
    rig.check()


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_rows_that_are_compared_raise_no_flags(side: str) -> None:
    """Frames alone bring their checksums."""
    rig, kernels = Rig(SPEC, driven=True), DeviceKernels()
    verify: dict[str, Verify] = {"decode": "off", "prefill": "off", side: "full"}
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped", kernels=kernels, verify=verify["prefill"])
    request = opened(rig, rig.request("r", prefills, rig.decode(tp_shards(SPEC, 1), verify=verify["decode"]), 9))
    request.send(9)
    rig.until(lambda: len(kernels.queued) == 1, "the launch")
    assert not kernels.queued[0].flags
    settle(rig, request)


def test_a_room_without_a_slot_is_told_by_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are blocks for one pair of a room and a writer."""
    monkeypatch.setattr(mapping, "BLOCKS", 1)
    rig, request = scene(2)
    request.send(9)
    rig.until(lambda: sum(len(copy.moves) for copy in copies(request).queued) == 2, "the launches")
    assert not any(copy.flags for copy in copies(request).queued)
    settle(rig, request)


def forge(flags: HostFlags, slot: int, value: int, record: Record) -> None:
    """Raise a flag that no copy stands behind."""
    flag = flags.arm(slot, value, record, "cpu")
    assert flag is not None
    raise_flags([flag])


@pytest.mark.parametrize("what", ["wrong value", "no record"])
def test_a_word_that_is_no_flag_is_not_seen(what: str) -> None:
    """The room ends by what comes after."""
    rig, request = scene()
    flags, (slot, _, value) = flags_of(request)
    if what == "no record":
        words_of(flags.buffer)[slot * SLOT_WORDS] = value
    else:
        forge(flags, slot, value + BLOCK, (0, 9, 0, 2, 0))
    assert poll(request) == []
    request.send(9)
    settle(rig, request)


@pytest.mark.parametrize(
    "records",
    [
        [(0, 1 << 63, 0, 2, 0)],
        [(0, 9, 7, 1 << 40, 0)],
        [(9, 9, 0, 2, 0)],
        [(0, 9, 0, 2, 5)],
        [(0, 5, 0, 2, 0), (4, 9, 0, 2, 0)],
    ],
)
def test_a_forged_flag_does_what_a_forged_frame_does(records: list[Record]) -> None:
    """Its room alone fails, and names the rank."""
    rig, request = scene()
    flags, (slot, _, value) = flags_of(request)
    for i, record in enumerate(records):
        forge(flags, slot + i, value + i, record)
    assert poll(request) == request.receives
    (handle,) = request.receives
    assert isinstance(handle.error, RemoteProtocolError)
    assert handle.error.rank == 0
    rig.until(lambda: ended(request), "the end")
    request.failed()
    assert request.decodes[0].endpoint.driver.broken is None
    rig.quiet()


def test_a_flag_that_is_raised_again_after_the_end_is_not_seen() -> None:
    """Nor does the room that has the slot next take it for its own."""
    rig, request = scene()
    flags, (slot, _, value) = flags_of(request)
    request.send(9)
    settle(rig, request)
    forge(flags, slot, value, (0, 9, 0, 2, 0))
    request.prefills[0].give(request.given[0][0])
    request.decodes[0].give(request.taken[0])
    copies(request).queued = []
    again = opened(rig, rig.request("again", request.prefills, request.decodes, 9))
    assert flags_of(again)[1] == (slot, BLOCK, value + BLOCK)
    assert poll(again) == []
    again.send(9)
    settle(rig, again)


def test_a_word_of_all_ones_fails_no_room() -> None:
    """Whoever has the page open may store it, without any room of its own."""
    rig, request = scene(memory=Memory(transport=ShmTransport))
    flags, _ = flags_of(request)
    words = words_of(flags.buffer)
    for slot in range(len(words) // SLOT_WORDS):
        words[slot * SLOT_WORDS] = 2**64 - 1
    assert poll(request) == []
    request.send(9)
    settle(rig, request)
    assert request.decodes[0].observer.counters["errors.unforeseen"] == 0


@pytest.mark.parametrize("value", [0, -1])
def test_a_frame_that_names_a_value_that_raises_nothing_is_refused(value: int) -> None:
    """An unset word is 0: decode names no such value, and prefill takes none."""

    def decoded(first: int) -> object:
        frame = Expect(
            src=b"1" * 16, dst=b"2" * 16, room=b"room", generation=1, start=0, stop=9, path="mapped", tables=None,
            tag=b"", flags=(0, BLOCK, first),
        )  # fmt: skip
        return Codec().decode(Codec().encode(frame))

    assert isinstance(decoded(1), Expect)
    with pytest.raises(RemoteProtocolError):
        decoded(value)


class Broken:
    """A flag page that is foreign code and raises whatever it likes."""

    def arm(self, *_: object) -> None:
        raise KeyError("arm")


@pytest.mark.parametrize("what", ["raises", "no such slot"])
def test_a_flag_that_cannot_be_armed_costs_nothing_but_the_flag(what: str) -> None:
    """The rooms go on, and their pages are released."""
    rig, request = scene()
    (room,) = request.prefills[0].endpoint.inspect().rooms.values()
    (peer,) = room.routes
    if what == "raises":
        room.routes[peer] = attrs.evolve(room.routes[peer], flags=Broken())
    else:
        (flow,) = room.machine.flows.values()
        assert flow.plan is not None
        flow.plan = attrs.evolve(flow.plan, flags=(1 << 40, BLOCK, 1))
    request.send(9)
    rig.until(lambda: len(copies(request).queued) == 1, "the launch")
    assert not copies(request).queued[0].flags
    settle(rig, request)
    assert request.prefills[0].observer.counters["flags.refused"] == 1


# Without ``Done``.


@pytest.mark.parametrize("strategy", ["staged", "mapped", "direct"])
@pytest.mark.parametrize("ends", ["known", "open", "aux"])
def test_nothing_waits_for_the_end_of_prefill_where_the_rows_are_known(strategy: str, ends: str) -> None:
    """Where prefill has to say at which row the room ends, or with which aux data, decode waits for that."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=strategy)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=strategy)
    request = rig.request("r", prefills, decodes, 9).open_decode()
    request.expect(None if ends == "open" else 9, aux=1 if ends == "aux" else None).open_prefill().send(9)
    (handle,) = request.receives
    rig.wait(1.0)
    assert handle.released is (ends == "known")
    assert handle.phase is (Phase.DONE if ends == "known" else Phase.MOVING)
    request.finish(aux=2 if ends == "aux" else None)
    request.landed()
    rig.quiet()


def test_a_writer_that_names_its_lane_last_ends_the_wait() -> None:
    """Each decode rank gets rows from one of the two; the other has nothing to send, and opens the room later."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy="mapped")
    decodes = rig.decode(tp_shards(SPEC, 2), strategy="mapped", verdict=Alone)
    request = rig.request("r", prefills, decodes, 9).open_decode().expect(9)
    prefills[1].frozen = True
    request.open_prefill()
    rig.wait(0.5)
    request.send(9)
    rig.wait(1.0)
    assert {handle.phase for handle in request.receives} != {Phase.DONE}
    prefills[1].frozen = False
    rig.wait(1.0)
    assert {handle.phase for handle in request.receives} == {Phase.DONE}
    request.finish().landed()
    rig.quiet()


def test_pages_of_a_room_that_had_everything_are_free_whatever_becomes_of_prefill() -> None:
    """Another rank of decode fails after that, and prefill stands still."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped")
    decodes = rig.decode(tp_shards(SPEC, 2), strategy="mapped")
    request = rig.request("r", prefills, decodes, 9).open_decode().expect(9).open_prefill()
    rig.wait(0.3)
    decodes[1].frozen = True
    request.send(9)
    rig.wait(0.5)
    prefills[0].frozen = True
    request.receives[1].abort("enough")
    decodes[1].frozen = False
    rig.wait(1.0)
    assert (request.receives[0].phase, request.receives[0].released) == (Phase.FAILED, True)
    prefills[0].frozen = False
    request.failed().forgive()
    rig.quiet()


# The page.


def two_peers() -> tuple[PeerSession, PeerSession]:
    hello = cast("Hello", None)  # a page asks for no name
    return PeerSession(hello, 0.0, True), PeerSession(hello, 0.0, True)


def test_blocks_stay_with_their_process_until_it_has_ended() -> None:
    a, b = two_peers()
    page = FlagPage(new_buffer(2 * BLOCK_BYTES, "cpu"))
    one = page.issue([a])
    two = page.issue([a])
    assert page.issue([b]) == () == page.issue([a, b])
    page.take_back(one)
    assert page.issue([b]) == (), "it may still raise a flag there"
    page.check_integrity(two, (a, b))
    page.gone(a)
    (again,) = page.issue([b])
    assert (again[0], again[2]) == (one[0][0], 1 + 2 * BLOCK), "a value was used twice"
    assert page.issue([b]) == ()
    page.take_back(two)
    assert page.issue([b]) != (), "the process that had it is gone"


def test_blocks_of_a_process_whose_link_was_dropped_are_for_others() -> None:
    """Nothing shows the end of a process that has no link. Blocks that rooms use stay."""
    a, b = two_peers()
    page = FlagPage(new_buffer(2 * BLOCK_BYTES, "cpu"))
    one, two = page.issue([a]), page.issue([a])
    page.take_back(one)
    page.forget(a)
    issued = page.issue([b])
    assert len(issued) == 1, "the slots are lost"
    again = issued[0]
    assert (again[0], again[2]) == (one[0][0], 1 + 2 * BLOCK)
    assert page.issue([b]) == ()
    page.take_back(two)
    assert page.issue([a]) != ()
    page.forget(b)
    page.check_integrity([*two, again], (a, b))


def test_a_record_does_not_change_under_its_reader() -> None:
    """A late use of a slot by an earlier room changes nothing of what a later one has stored there."""
    memory = new_buffer(BLOCK_BYTES, "cpu")
    flags, words = HostFlags(memory), words_of(memory)
    forge(flags, 3, 7, (0, 4, 0, 2, 0))
    assert raised(words, 3, 7) == (0, 4, 0, 2, 0)
    assert flags.arm(3, 6, (0, 1, 0, 1, 0), "cpu") is None
    forge(flags, 3, 7, (0, 1, 0, 1, 0))
    assert raised(words, 3, 7) == (0, 4, 0, 2, 0)
    assert raised(words, 3, 6) is None
    for slot in (-1, BLOCK):
        with pytest.raises(TransportError, match=f"slot {slot} of a page of {BLOCK} flags"):
            flags.arm(slot, 8, (0, 1, 0, 1, 0), "cpu")


def test_a_page_of_another_transport_than_the_peer_s_is_said_and_frames_announce(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Decode's page is of the first transport of its list, and prefill's own list has another one first."""
    rig = Rig(SPEC, driven=True)
    near = Memory(transport=lambda: Transports([ShmTransport(), InprocTransport()]))
    other = Memory(transport=lambda: Transports([InprocTransport(), ShmTransport()]))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=other, strategy="mapped", kernels=DeviceKernels())
    request = opened(rig, rig.request("flag", prefills, rig.decode(tp_shards(SPEC, 1), memory=near), 9))
    (room,) = request.prefills[0].endpoint.inspect().rooms.values()
    assert [route.flags for route in room.routes.values()] == [None]
    assert "frames alone announce segments: the peer's flags are of 'shm', and its transport is 'inproc'" in caplog.text
    request.send(9)
    settle(rig, request)


def test_a_page_of_a_closed_peer_is_refused() -> None:
    here, there = InprocTransport(), InprocTransport()
    peer = here.connect(there.local_descriptor(), 1.0)
    memory, place = there.flag_page(BLOCK_BYTES)
    forge(here.open_flags(peer, place), 0, 1, (0, 1, 0, 1, 0))
    assert raised(words_of(memory), 0, 1) == (0, 1, 0, 1, 0)
    with pytest.raises(TransportError, match="no peer"):
        there.open_flags(peer, place)
    there.close(0.0)
    with pytest.raises(PeerLostError, match="is closed"):
        here.open_flags(peer, place)
    here.close(0.0)


def test_a_page_whose_words_are_not_aligned_is_refused() -> None:
    """A GPU's stream stores whole words alone; its launch, not the flag alone, would fail."""
    here, there = ShmTransport(), ShmTransport()
    peer = here.connect(there.local_descriptor(), 5.0)
    _, place = there.flag_page(BLOCK_BYTES)
    found = msgspec.msgpack.decode(place, type=FlagPlace)
    shifted = attrs.evolve(found, place=attrs.evolve(found.place, offset=4), nbytes=found.nbytes - 8)
    with pytest.raises(TransportError, match="a flag page at byte 4"):
        here.open_flags(peer, pack(shifted))
    for one in (here, there):
        one.close(1.0)
