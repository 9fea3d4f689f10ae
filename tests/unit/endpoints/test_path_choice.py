"""The path of a room: the rule of ``auto``, what prefill ranks say of their mappings, and rooms without segments."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg_kv.core import Options
from disagg_kv.core.wire.frames import Expect
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.endpoints.decode.path_choice import UNSAID
from disagg_kv.errors import PeerLostError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Peer, RegionId
from disagg_kv.kernels import CpuKernels
from disagg_kv.memory import Event
from disagg_kv.transports import InprocTransport
from tests.support.held_links import forget
from tests.support.rig import Decodes, Member, Memory, Prefills, Request, Rig, tp_shards

SPEC = CacheSpec.kv(4, 4, 8, "float16")
SHARED = CacheSpec.kv(4, 1, 8, "float16")
"""All ranks hold the same, and one of them sends it."""

WIDER = CacheSpec.kv(4, 4, 8, "float32")
"""Decode's, of rows that are converted on the way."""

LARGE, LARGER = (CacheSpec.kv(2, 2, 128, dtype) for dtype in ("float16", "float32"))
"""A row of a layer is larger than the smallest slot."""

ROWS, SLOT, LEAST_SLOT = 64, 1 << 11, 256


class Queueing(CpuKernels):
    """Kernels of a device that is done at once."""

    def orders(self, event: Event) -> bool:
        """See :class:`~disagg_kv.kernels.SupportsStreams`."""
        return True


class Refusing(InprocTransport):
    """Its ``why``, if there is one, is the reason why it maps nothing; it never maps memory of ``far``."""

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
    """Prefill forgets the decode rank, and its pool cannot be mapped when they meet again."""
    assert isinstance(prefill.transport, Refusing)
    prefill.transport.why = "no handle is left"
    forget(prefill.endpoint._loop, decode.endpoint._loop.me.epoch)


def segments(request: Request) -> int:
    """Of the rank that sent most."""
    return max(send.report.segments for send in request.sends)


def taken(rig: Rig, prefills: Prefills, decodes: Decodes, name: str) -> Request:
    """A request that has landed; both sides name the same path."""
    request = rig.request(name, prefills, decodes, ROWS).start(ROWS).landed()
    assert len({handle.report.path for handle in request.handles}) == 1
    return request


@pytest.mark.parametrize("spec", [SPEC, SHARED])
def test_auto_copies_into_mapped_pages_once_prefill_has_said_that_it_mapped_them(spec: CacheSpec) -> None:
    """Also where one rank alone sends rows. Decode's report says why the first room is staged."""
    rig = Rig(spec)
    prefills, decodes = ranks(rig, spec)
    first, second = (taken(rig, prefills, decodes, name) for name in ("first", "second"))
    reports = [request.receives[0].report for request in (first, second)]
    assert [report.path for report in reports] == ["staged", "mapped"]
    assert reports[0].reason.startswith("auto takes staged; mapped cannot: prefill rank ")
    assert reports[0].reason.endswith(UNSAID)
    assert reports[1].reason == "auto takes mapped"
    assert segments(first) > segments(second) == 1
    rig.quiet()


def test_pages_are_exposed_only_where_they_are_mapped() -> None:
    """A room of pages that cannot be mapped waits for no evidence about writes into them."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig)
    for one in prefills:
        assert isinstance(one.transport, Refusing)
        one.transport.why = "it is on another host"
    for name in ("first", "second"):
        request = rig.request(name, prefills, decodes, ROWS).open_decode().expect(ROWS).open_prefill()
        rig.wait(0.3)
        (room,) = decodes[0].endpoint._side.rooms.values()
        assert not room.machine.exposed
        request.send(ROWS).finish().landed()
    assert "mapped cannot: prefill rank 0: it is on another host" in request.receives[0].report.reason


def test_a_path_that_a_side_asks_for_is_taken_at_once() -> None:
    """No prefill rank has to say anything first."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig, path="mapped")
    request = taken(rig, prefills, decodes, "first")
    assert request.receives[0].report.reason == "both sides allow only mapped"
    assert segments(request) == 1


@pytest.mark.parametrize(("prefill", "decode"), [("direct", "auto"), ("auto", "slice"), ("staged", "auto")])
def test_the_other_side_takes_part_with_auto(prefill: str, decode: str) -> None:
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=prefill)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=decode)
    name = prefill if decode == "auto" else decode
    for number in range(2):
        report = rig.request(f"{number}", prefills, decodes, 9).start(9).landed().receives[0].report
        assert (report.path, report.reason) == (name, f"both sides allow only {name}")


def test_where_a_row_is_larger_than_a_slot_auto_writes_single_slices() -> None:
    """One answer for all writers, with the reason."""
    rig = Rig(LARGE)
    prefills = rig.prefill(tp_shards(LARGE, 2), strategy="auto", slot_bytes=LEAST_SLOT)
    decodes = rig.decode(tp_shards(LARGE, 1), strategy="auto")
    reports = [rig.request(name, prefills, decodes, 9).start(9).landed().receives[0].report for name in "12"]
    assert [report.path for report in reports] == ["slice", "mapped"]
    assert "staged cannot: prefill rank 0: " in reports[0].reason


@pytest.mark.parametrize("path", ["auto", "mapped"])
def test_slots_cut_rooms_where_kernels_of_one_rank_do_not_queue(path: str) -> None:
    """All ranks cut alike: a copy that keeps a thread shall not keep it for long."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig, kernels=(Queueing(), CpuKernels()), path=path)
    taken(rig, prefills, decodes, "first")
    second = taken(rig, prefills, decodes, "second")
    assert second.receives[0].report.path == "mapped"
    assert segments(second) > 1
    rig.quiet()


def test_a_rank_that_cannot_map_any_more_fails_its_room_and_the_next_one_is_staged() -> None:
    """Its link was dropped after decode had asked for the room."""
    rig = Rig(SPEC, options=Options(silence_s=180.0))
    prefills, decodes = ranks(rig)
    taken(rig, prefills, decodes, "first")
    late = rig.request("late", prefills, decodes, ROWS).open_decode().expect(ROWS)
    rig.wait(0.5)
    refuse(prefills[0], decodes[0])
    late.open_prefill().failed()
    assert "path 'mapped' cannot: no handle is left" in str(late.sends[0].error)
    later = taken(rig, prefills, decodes, "next").receives[0].report
    assert (later.path, "no handle is left" in later.reason) == ("staged", True)
    rig.quiet()


@pytest.mark.parametrize("into", [SPEC, WIDER])
def test_a_rank_that_sends_nothing_here_has_no_say(into: CacheSpec) -> None:
    """It may be on another host than this decode rank; and for rows that are converted it has no path of its own."""
    rig = Rig(SPEC, decoded=None if into is SPEC else into)
    prefills, decodes = ranks(rig, into=into, tp=2)
    for number, one in enumerate(prefills):
        assert isinstance(one.transport, Refusing)
        one.transport.far = one.transport.peer_of(decodes[1 - number].transport.local_descriptor())
    first, second = (taken(rig, prefills, decodes, name) for name in "12")
    assert (first.receives[0].report.path, second.receives[0].report.path) == ("staged", "mapped")


def test_rows_that_are_converted_go_where_kernels_are() -> None:
    """Single writes convert nothing: where neither is left, the room fails with all reasons."""
    rig = Rig(LARGE, decoded=LARGER)
    prefills = rig.prefill(tp_shards(LARGE, 1), strategy="auto", slot_bytes=LEAST_SLOT)
    decodes = rig.decode(tp_shards(LARGER, 1), strategy="auto")
    error = str(rig.request("room", prefills, decodes, 9).start(9).failed().receives[0].error)
    for path in ("mapped", "staged", "slice"):
        assert f"{path} cannot: prefill rank 0: " in error


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"path": "nowhere"}, "path 'nowhere' is not known on both sides"),
        ({"path": "slice"}, "path 'slice' without page tables"),
        ({"path": "direct"}, "path 'direct' without page tables"),
    ],
)
def test_a_path_that_prefill_cannot_take_ends_the_room_by_name(
    changed: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next room is not concerned."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="auto")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="auto")
    with monkeypatch.context() as patch:
        patch.setattr("disagg_kv.core.room.receive_room.Expect", lambda **of: Expect(**{**of, **changed}))
        failed = rig.request("wrong", prefills, decodes, 9).start(9).failed()
    assert says in str(failed.sends[0].error)
    rig.request("right", prefills, decodes, 9).start(9).landed()


def test_what_a_lost_rank_has_said_is_forgotten() -> None:
    """Its next life says so anew."""
    rig = Rig(SPEC)
    prefills, decodes = ranks(rig, kernels=(Queueing(),))
    taken(rig, prefills, decodes, "first")
    loop, epoch = decodes[0].endpoint.driver.loop, prefills[0].endpoint.driver.loop.me.epoch
    session = loop.peers.known(epoch)
    assert session is not None
    assert session.unmapped == ""
    loop.lose(epoch, PeerLostError("said"))
    assert session.unmapped is None
