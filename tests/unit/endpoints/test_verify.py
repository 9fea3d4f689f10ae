"""What arrives is compared with what was sent, across TP, page size and layout; a difference fails the room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from disagg_kv.core import Options, Phase, Verify, Wrote, verified
from disagg_kv.endpoints.prefill.movers.posts import Moved
from disagg_kv.endpoints.prefill.movers.verified import Summing
from disagg_kv.errors import IntegrityError, RemoteProtocolError, UnknownNameError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from disagg_kv.kernels import Checksums, CpuKernels, Kernels, Move
from disagg_kv.memory import Buffer, Event, MemoryPool, bytes_of
from disagg_kv.planning import Segment
from tests.support.pools import Bytes
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import CountingKernels, Damage, DamagingTransport

KV = CacheSpec.kv(4, 4, 8, "float16")
GQA = CacheSpec.kv(3, 2, 8, "float16", v_head_dim=5, v_dtype="int8")
MLA = CacheSpec.mla(5, 24, "int8")
ODD = Memory(page_size=3, layout="HND", fused=True)
FULL: Verify = "full"

PAIRS: dict[str, tuple[CacheSpec, tuple[int, int], tuple[int, int], Memory, Memory]] = {
    "4-1": (KV, (4, 1), (1, 1), Memory(), Memory()),
    "2-4, pages 3-8": (KV, (2, 1), (4, 1), ODD, Memory(page_size=8)),
    "4-1 replicated, 16-1": (GQA, (4, 1), (1, 1), Memory(page_size=16), Memory(page_size=1)),
    "1-4 replicated": (GQA, (1, 1), (4, 1), Memory(), ODD),
    "latent 2-1": (MLA, (2, 1), (1, 1), Memory(), Memory(page_size=5)),
    "stages 2-1": (KV, (1, 2), (2, 1), Memory(), Memory()),
}


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
@pytest.mark.parametrize("pair", PAIRS)
def test_whatever_the_sides_look_like_what_is_right_passes(pair: str, path: str) -> None:
    """Every segment is compared, also between different TP sizes, pages and layouts, and with replicas."""
    spec, prefill, decode, source, target = PAIRS[pair]
    rig = Rig(spec)
    kernels = CountingKernels(), CountingKernels()
    prefills = rig.prefill(tp_shards(spec, *prefill), memory=source, strategy=path, verify=FULL, kernels=kernels[0])
    decodes = rig.decode(tp_shards(spec, *decode), memory=target, strategy=path, kernels=kernels[1])
    for name in ("a", "b"):
        request = rig.request(name, prefills, decodes, 23).open_decode().expect(None).open_prefill()
        request.send(7).send(23, 7).finish().landed()
        assert all("checksum" in handle.report.seconds for handle in request.receives)
    assert kernels[0].checksums
    assert sum(kernels[1].checksums) >= sum(h.report.segments for h in request.receives)
    rig.quiet()


class SlowSums(CountingKernels):
    """As a CPU that takes 50 ms for each."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self._clock = rig.clock

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """See :class:`~disagg_kv.kernels.Kernels`."""
        self._clock.advance(0.05)
        return super().checksum(pool, moves, after)


@pytest.mark.parametrize("path", ["staged", "direct", "mapped"])
def test_to_sum_pages_is_a_piece_of_work_that_a_step_ends_after(path: str) -> None:
    """However many rooms have rows: heartbeats and deadlines come in between."""
    rig = Rig(KV, options=Options(window=64))
    memory, kernels = Memory(pages=160), SlowSums(rig)
    prefills = rig.prefill(tp_shards(KV, 1), memory=memory, strategy=path, kernels=kernels, verify=FULL)
    decodes = rig.decode(tp_shards(KV, 1), memory=memory, strategy=path)
    rooms = [rig.request(f"{i}", prefills, decodes, 9).open_decode().expect(9).open_prefill() for i in range(30)]
    for _ in range(20):
        rig.turn()
    for room in rooms:
        room.send(9).finish()
    while not all(room.all(Phase.DONE) for room in rooms):
        before = rig.clock()
        prefills[0].endpoint.driver.step(0.0)
        assert rig.clock() - before <= 2 * 0.05
        rig.clock.advance(0.005)
        decodes[0].endpoint.driver.step(0.0)
    assert len(kernels.checksums) >= len(rooms)


@pytest.mark.parametrize("wishes", [("off", "full"), ("full", "off"), ("sampled", "full"), ("full", "full")])
def test_either_side_may_ask(wishes: tuple[Verify, Verify]) -> None:
    """Whoever asks for more gets it; pages that nobody asks for are not summed."""
    rig, kernels = Rig(KV), CountingKernels()
    prefills = rig.prefill(tp_shards(KV, 1), strategy="direct", verify=wishes[0], kernels=kernels)
    decodes = rig.decode(tp_shards(KV, 1), strategy="direct", verify=wishes[1])
    request = rig.request("room", prefills, decodes, 30).start().landed()
    assert len(kernels.checksums) == request.receives[0].report.segments


def test_by_default_nothing_is_summed() -> None:
    rig, kernels = Rig(KV), CountingKernels()
    prefills = rig.prefill(tp_shards(KV, 2), kernels=kernels)
    rig.request("room", prefills, rig.decode(tp_shards(KV, 1), kernels=kernels), 30).start().landed()
    assert not kernels.checksums


def test_samples_are_about_one_in_sixteen_and_the_same_on_both_sides() -> None:
    """A stable hash of room and segment draws them, so that both sides agree without a word."""
    drawn = [
        [verified(RoomId(b"room %d" % room), Segment(8 * i, 8 * i + 8, 0, 4), "sampled") for i in range(100)]
        for room in range(40)
    ]
    assert 150 < sum(map(sum, drawn)) < 350
    assert verified(RoomId(b"room 0"), Segment(0, 8, 0, 4), "off", "sampled") == drawn[0][0]
    assert drawn[0] != drawn[1]

    rig, kernels = Rig(KV), (CountingKernels(), CountingKernels())
    prefills = rig.prefill(tp_shards(KV, 1), strategy="staged", slot_bytes=1024, slots=16, kernels=kernels[0])
    decodes = rig.decode(tp_shards(KV, 1), strategy="staged", verify="sampled", kernels=kernels[1])
    requests = [rig.request(f"{i}", prefills, decodes, 40).start() for i in range(6)]
    rig.until(lambda: all(r.all(Phase.DONE) for r in requests), "all rooms")
    segments = sum(r.receives[0].report.segments for r in requests)
    assert 0 < len(kernels[0].checksums) == len(kernels[1].checksums) < segments / 4


def flip(data: Bytes) -> None:
    """One bit."""
    data[len(data) // 2] ^= 0x10


def tear(data: Bytes) -> None:
    """The second half does not arrive: zeros."""
    data[len(data) // 2 :] = 0


def exchange(data: Bytes) -> None:
    """Two rows of a plane."""
    data[:16], data[64:80] = data[64:80].copy(), data[:16].copy()


@pytest.mark.parametrize("path", ["staged", "slice", "direct"])
@pytest.mark.parametrize("damage", [flip, tear, exchange])
def test_damage_on_the_wire_fails_the_room_closed(damage: Damage, path: str) -> None:
    """A bit, a torn write, exchanged rows: no rank reports success, and every page and lease comes back."""
    rig = Rig(KV)
    wire = Memory(transport=lambda: DamagingTransport({0: damage}))
    prefills = rig.prefill(tp_shards(KV, 2), memory=wire, strategy=path, verify=FULL, only=[0])
    prefills += rig.prefill(tp_shards(KV, 2), strategy=path, verify=FULL, only=[1])
    decodes = rig.decode(tp_shards(KV, 2), strategy=path, verify=FULL)
    request = rig.request("room", prefills, decodes, 30).start().failed()
    first, second = request.receives
    assert isinstance(first.error, IntegrityError)
    assert "written by prefill rank 0 by path " in str(first.error)
    assert (path in str(first.error)) is (second.error is not None)
    assert "another rank failed" in str(second.error)
    assert all("the sum is" in str(handle.error) for handle in request.sends)
    request.forgive()
    rig.check()
    for number in range(2):
        rig.request(f"then {number}", prefills, decodes, 30).start().landed()
    rig.quiet()


def test_the_message_names_room_layer_rows_pages_writer_and_path() -> None:
    def third_layer_of_v(data: Bytes) -> None:
        plane = len(data) // 8
        data[6 * plane + 5] += 1

    rig = Rig(KV)
    wire = Memory(page_size=4, transport=lambda: DamagingTransport({1: third_layer_of_v}))
    prefills = rig.prefill(tp_shards(KV, 1), memory=wire, strategy="staged", slot_bytes=1 << 16, verify=FULL)
    decodes = rig.decode(tp_shards(KV, 1), strategy="staged", ring_bytes=1 << 20)
    request = rig.request("room", prefills, decodes, 96).open_decode().expect(96).open_prefill()
    request.send(8).send(96, 8).finish().failed()
    pages = [str(page) for page in request.taken[0].pages[2:].tolist()]
    said = str(request.receives[0].error)
    assert said.startswith(f"room room generation 1: layer 2, rows 8-96 (pages {', '.join(pages[:16])}")
    assert "and 6 more), written by prefill rank 0 by path staged: the sum is " in said


class WrongGather(CpuKernels):
    """Gathers what ``wrong`` makes of the pages."""

    def __init__(self, wrong: Callable[[Bytes], Bytes]) -> None:
        self._wrong = wrong

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Change the staged parts."""
        super().gather(pool, moves, staging, after)
        for move in moves:
            part = bytes_of(staging)[move.base : move.base + move.layout.nbytes]
            part[:] = self._wrong(part.copy().reshape(8, -1, 2, 16)).reshape(-1)


class WrongScatter(CpuKernels):
    """Scatters one page to the place of another."""

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
        """Exchange two pages afterwards, in every layer."""
        super().scatter(pool, moves, staging)
        for number in range(len(pool.site.planes)):
            table = next(iter(moves[0].tables.values()))
            view = pool.view(number)  # type: ignore[attr-defined]
            view[table.pages[:2]] = view[table.pages[1::-1]]


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x[:, :, ::-1], lambda x: x[:, ::-1], lambda x: np.roll(x, 1, 0), lambda x: x[[4, 5, 6, 7, 0, 1, 2, 3]]],
    ids=["heads", "rows", "layers", "K and V"],
)
def test_what_gather_exchanges_shows(wrong: Callable[[Bytes], Bytes]) -> None:
    """Prefill's sums are of its pages, so that a wrong gather does not vouch for itself."""
    rig = Rig(KV)
    prefills = rig.prefill(tp_shards(KV, 2), strategy="staged", verify=FULL, kernels=WrongGather(wrong))
    request = rig.request("room", prefills, rig.decode(tp_shards(KV, 1), strategy="staged"), 8).start().failed()
    assert isinstance(request.receives[0].error, IntegrityError)
    assert "more layers of this segment" in str(request.receives[0].error)
    rig.quiet()


def test_what_scatter_exchanges_shows() -> None:
    """Decode's sums are of its pages too."""
    rig = Rig(KV)
    prefills = rig.prefill(tp_shards(KV, 2), strategy="staged")
    decodes = rig.decode(tp_shards(KV, 1), strategy="staged", verify=FULL, kernels=WrongScatter())
    request = rig.request("room", prefills, decodes, 8).start().failed()
    assert isinstance(request.receives[0].error, IntegrityError)
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_pages_and_leases_stay_until_sums_are_there(path: str) -> None:
    """Sums that take their time hold back what is said of the write, the pages and the success, not the write."""
    rig, kernels = Rig(KV), (CountingKernels(), CountingKernels())
    kernels[0].events, kernels[1].events = [], []
    prefills = rig.prefill(tp_shards(KV, 1), strategy=path, verify=FULL, kernels=kernels[0])
    decodes = rig.decode(tp_shards(KV, 1), strategy=path, kernels=kernels[1])
    request = rig.request("room", prefills, decodes, 8).start()
    rig.until(lambda: len(kernels[0].checksums) == 1, "prefill's sums")
    *moving, sums = kernels[0].events
    for event in moving:
        event.fired = True
    rig.wait(1.0)
    assert request.sends[0].report.descriptors
    assert not kernels[1].checksums
    sums.fired = True
    rig.until(lambda: len(kernels[1].checksums) == 1, "decode's sums")
    rig.wait(1.0)
    assert request.receives[0].phase.name == "MOVING"
    request.receives[0].abort("while it is compared")
    rig.wait(1.0)
    assert request.receives[0].phase.name == "FAILED"
    assert not request.receives[0].released
    for event in kernels[1].events:
        event.fired = True
    request.failed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_an_abort_while_prefill_sums_gives_everything_back(path: str) -> None:
    """What is read for a sum is not given to the engine before that has ended."""
    rig, kernels = Rig(KV), CountingKernels()
    kernels.events = []
    prefills = rig.prefill(tp_shards(KV, 1), strategy=path, verify=FULL, kernels=kernels)
    request = rig.request("room", prefills, rig.decode(tp_shards(KV, 1), strategy=path), 8).start()
    rig.until(lambda: len(kernels.checksums) == 1, "prefill's sums")
    request.sends[0].abort("meanwhile")
    rig.wait(1.0)
    assert not request.sends[0].released
    for event in kernels.events:
        event.fired = True
    request.failed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_sums_that_cannot_be_made_fail_the_room(side: str, path: str) -> None:
    class Failing(CountingKernels):
        def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
            raise OSError("no such instruction")

    rig = Rig(KV)
    kernels: dict[str, Kernels] = {"prefill": CpuKernels(), "decode": CpuKernels(), side: Failing()}
    prefills = rig.prefill(tp_shards(KV, 1), strategy=path, kernels=kernels["prefill"])
    decodes = rig.decode(tp_shards(KV, 1), strategy=path, verify=FULL, kernels=kernels["decode"])
    request = rig.request("room", prefills, decodes, 8).start().failed()
    assert "no such instruction" in request.errors()
    rig.quiet()


def test_a_scatter_that_has_begun_keeps_lease_and_pages_though_its_sums_cannot_be_made() -> None:
    """A kernel reads the ring and writes pages until its event, whatever was to follow it."""

    class Failing(CountingKernels):
        def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
            raise OSError("out of memory")

    rig, kernels = Rig(KV), Failing()
    kernels.events = []
    prefills = rig.prefill(tp_shards(KV, 1), strategy="staged")
    decodes = rig.decode(tp_shards(KV, 1), strategy="staged", verify=FULL, kernels=kernels)
    request = rig.request("room", prefills, decodes, 8).start()
    rig.until(lambda: bool(kernels.events), "the scatter")
    rig.wait(1.0)
    assert not request.receives[0].released
    assert decodes[0].endpoint.usage().ring_used_bytes
    for event in kernels.events:
        event.fired = True
    request.failed()
    assert "out of memory" in str(request.receives[0].error)
    rig.quiet()


@pytest.mark.parametrize(
    ("change", "said"),
    [(None, "sent no checksums of"), (b"", "sent checksums of 0 bytes for 4 layers of")],
)
def test_a_writer_that_does_not_say_what_it_was_asked_for_fails_the_room(
    change: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode asked: without sums of the right size nothing counts as landed."""
    rig = Rig(KV)
    prefills, decodes = rig.prefill(tp_shards(KV, 1)), rig.decode(tp_shards(KV, 1), verify=FULL)

    def changed(self: Summing, moved: Moved) -> Moved:
        return Moved(moved.room, moved.to, Wrote(moved.event.segment, change))

    monkeypatch.setattr(Summing, "outcome", changed)
    request = rig.request("room", prefills, decodes, 8).start().failed()
    assert isinstance(request.receives[0].error, RemoteProtocolError)
    assert said in str(request.receives[0].error)
    rig.quiet()


def test_unknown_wishes_are_refused() -> None:
    rig = Rig(KV)
    for side in (rig.prefill, rig.decode):
        with pytest.raises(UnknownNameError, match="unknown verify 'some'; known: full, off, sampled"):
            side(tp_shards(KV, 1), verify="some")  # type: ignore[arg-type]
