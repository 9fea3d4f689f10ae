"""Layer groups that cross while others are computed: with every path, split and cache, and whatever goes wrong."""

from __future__ import annotations

from typing import Unpack

import pytest
from msgspec import structs

from bench.emulated import emulate
from disagg_kv.core import Codec, Phase, RoomFrame
from disagg_kv.endpoints.prefill.handle import ForwardPass
from disagg_kv.errors import ConfigurationError, DeadlineError, GeometryError, LocalProtocolError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import LayerId
from disagg_kv.planning import Groups, LayerRun, Pace
from disagg_kv.strategies import Feature, LayerPipelined
from disagg_kv.trace import chrome_trace
from disagg_kv.transports import InprocTransport
from tests.support.rig import Memory, PrefillOptions, Request, Rig, put, tp_shards
from tests.support.rig_parts import CountingKernels, FiredEvent, Listening

SPEC = CacheSpec.kv(6, 4, 8, "float16")
LAYER_ROW_BYTES = 2 * 4 * 16
MLA = CacheSpec.mla(6, 24, "int8")
PAIRS = LayerPipelined(fixed=2)
PIPELINED = "staged+layer_pipelined"


def begin(request: Request, start: int, stop: int) -> list[ForwardPass]:
    """A forward pass on every prefill rank; its pages hold poison until the layers are computed."""
    steps = []
    for m, table in zip(request.prefills, request.pages(start, stop), strict=True):
        put(m.pool, table, start // 4 * 4, stop, None)
        steps.append(m.endpoint.step({request.room: (stop, [table])}))
    return steps


def compute(request: Request, steps: list[ForwardPass], layer: int, start: int, stop: int) -> None:
    """One layer of the rows becomes final on every rank that has it."""
    for number, (m, step) in enumerate(zip(request.prefills, steps, strict=True)):
        if LayerId(layer) not in m.pool.site.shard.layers():
            continue
        table = request.given[number][-1]
        first = start // 4 * 4
        for index, plane in enumerate(m.pool.site.planes):
            if plane.layer == layer:
                units = [u for run in m.pool.site.shard.units(plane.layer, plane.component) for u in run]
                for row in range(first, stop):
                    page, slot = table.pages[(row - first) // 4], (row - first) % 4
                    m.pool.view(index)[page, slot] = request.truth[plane.layer, plane.component][row][units]
        step.layer_ready(LayerId(layer))


def arrived(request: Request) -> None:
    """Every rank has succeeded, and decode's pools hold what they should; prefill's first pages were never computed."""
    request.released().done()
    for member in request.decodes:
        member.check()


SPLITS = {
    "P>D": (SPEC, (2, 1), (1, 1)),
    "P<D": (SPEC, (1, 1), (4, 1)),
    "equal": (SPEC, (2, 1), (2, 1)),
    "replicated": (CacheSpec.kv(6, 2, 8, "float16"), (4, 1), (1, 1)),
    "mla": (MLA, (2, 1), (1, 1)),
    "pp 2": (SPEC, (2, 2), (1, 1)),
    "pp 3-2": (SPEC, (1, 3), (2, 2)),
}


@pytest.mark.parametrize(
    ("split", "path"),
    [*((split, path) for split in SPLITS for path in ("staged", "slice", "mapped")), ("equal", "direct")],
)
def test_groups_cross_before_the_pass_ends(split: str, path: str) -> None:
    """Each group of layers lands while later ones hold poison; chunks are grouped one by one. Frames end the room."""
    spec, source, target = SPLITS[split]
    rig = Rig(spec)
    prefills = rig.prefill(
        tp_shards(spec, *source), strategy=f"{path}+layer_pipelined", schedule=LayerPipelined(fixed=1)
    )
    decodes = rig.decode(tp_shards(spec, *target), strategy=path)
    request = rig.request("room", prefills, decodes, 12).open_decode().expect(12).open_prefill()
    landed = 0
    for start, stop in ((0, 8), (8, 12)):
        steps = begin(request, start, stop)
        for layer in range(6):
            compute(request, steps, layer, start, stop)
            before = landed
            rig.until(lambda: sum(h.report.segments for h in request.receives) > before, "the layer's segment")  # noqa: B023
            rig.wait(0.5)
            landed = sum(h.report.segments for h in request.receives)
        for step in steps:
            step.close()
    assert request.receives[0].phase is Phase.DONE, "all that it awaits has landed"
    assert all(h.report.groups == 6 // source[1] for h in request.sends) or source[1] == 3
    request.finish().landed()
    rig.quiet()


@pytest.mark.parametrize("split", ["P>D", "P<D", "pp 3-2"])
def test_groups_of_the_rows_after_a_held_prefix_cross_before_the_pass_ends(split: str) -> None:
    """13 rows held with pages of 8; of the passes below and across row 8 only what lacks crosses."""
    _, source, target = SPLITS[split]
    rig = Rig(SPEC)
    prefills = rig.prefill(
        tp_shards(SPEC, *source), strategy=f"{PIPELINED}+incremental", schedule=LayerPipelined(fixed=1)
    )
    decodes = rig.decode(tp_shards(SPEC, *target), memory=Memory(page_size=8), strategy="staged+incremental")
    request = rig.request("room", prefills, decodes, 28).open_decode().expect(28, held=13).open_prefill()
    expected = 0
    for start, stop in ((0, 4), (4, 12), (12, 28)):
        steps = begin(request, start, stop)
        for layer in range(6):
            compute(request, steps, layer, start, stop)
            expected += (max(stop, 8) - max(start, 8)) * LAYER_ROW_BYTES
            rig.until(lambda: sum(h.report.nbytes for h in request.receives) == expected, "the layer's rows")  # noqa: B023
        for step in steps:
            step.close()
    request.finish().landed()
    assert sum(h.report.nbytes for h in request.receives) == 20 * 6 * LAYER_ROW_BYTES
    rig.quiet()


@pytest.mark.parametrize("order", [(5, 4, 3, 2, 1, 0), (1, 0, 4, 2, 5, 3)])
def test_layers_may_come_in_any_order(order: tuple[int, ...]) -> None:
    """A group moves when all its layers are final, whatever came before."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy=PIPELINED, schedule=PAIRS)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    steps = begin(request, 0, 8)
    seen: set[int] = set()
    for layer in order:
        compute(request, steps, layer, 0, 8)
        seen.add(layer)
        rig.wait(0.5)
        whole = sum({2 * g, 2 * g + 1} <= seen for g in range(3))
        assert request.receives[0].report.segments == whole
    for step in steps:
        step.close()
    request.finish().landed()
    rig.quiet()


def test_a_group_waits_for_the_events_of_its_layers() -> None:
    """An announced layer is final at its event; ``close`` covers layers without a hook."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=PIPELINED, schedule=PAIRS, kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    step = prefills[0].endpoint.step({request.room: (8, request.pages(0, 8))})
    events = [FiredEvent() for _ in range(3)]
    for layer, event in enumerate(events):
        step.layer_ready(LayerId(layer), event)
    for fired, gathers in ((1, 0), (0, 1), (2, 1)):
        events[fired].fired = True
        rig.wait(0.5)
        assert len(kernels.gathers) == gathers
    step.close()
    request.finish().landed()
    assert len(kernels.gathers) == 3
    rig.quiet()


def test_look_ahead_asks_for_the_groups_of_a_pass_and_leaves_the_ring_to_others() -> None:
    """Groups that are not computed hold at most a quarter of the ring, however long the pass takes."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged+layer_pipelined", schedule=LayerPipelined(fixed=1))
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=16 << 10)
    request = rig.request("room", prefills, decodes, 16).open_decode().expect(16).open_prefill()
    steps = begin(request, 0, 16)
    rig.wait(1.0)
    assert 0 < decodes[0].endpoint.usage().ring_used_bytes <= 4 << 10
    rig.request("ready", prefills, decodes, 40).start(40).released().done()
    for layer in range(6):
        compute(request, steps, layer, 0, 16)
    steps[0].close()
    request.finish().landed()
    rig.quiet()


@pytest.mark.parametrize("ready", [0, 1, 3, 5])
@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_a_withdrawal_at_any_group(ready: int, path: str) -> None:
    """Groups that have landed stay, the others come again from other pages; the old pass says nothing of them."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy=f"{path}+layer_pipelined", schedule=PAIRS)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    steps = begin(request, 0, 8)
    for layer in range(ready):
        compute(request, steps, layer, 0, 8)
    rig.wait(0.5)
    fired = [handle.withdraw() for handle in request.sends]
    rig.until(lambda: all(event.query() for event in fired), "the end of reads")
    rig.wait(0.5)
    assert path != "staged" or decodes[0].endpoint.usage().ring_used_bytes == 0
    again = begin(request, 0, 8)
    for step in steps:
        step.close()
    rig.wait(0.5)
    assert request.receives[0].report.segments == ready // 2
    for layer in range(6):
        compute(request, again, layer, 0, 8)
    for step in again:
        step.close()
    arrived(request.finish())
    rig.quiet()


@pytest.mark.parametrize("ready", [0, 1, 4])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_at_any_group(ready: int, side: str) -> None:
    """An early abort drops the groups that wait; what is announced afterwards is harmless."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy=PIPELINED, schedule=PAIRS)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    steps = begin(request, 0, 8)
    for layer in range(ready):
        compute(request, steps, layer, 0, 8)
    (request.sends if side == "prefill" else request.receives)[0].abort("enough")
    request.failed()
    for step in steps:
        step.layer_ready(LayerId(5))
        step.close()
    rig.quiet()


def test_a_layer_that_never_comes_is_named_by_the_deadline() -> None:
    """Never ready for one layer: the error says which."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=PIPELINED, schedule=PAIRS)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill(total_s=5.0)
    steps = begin(request, 0, 8)
    for layer in (0, 1, 2, 4, 5):
        compute(request, steps, layer, 0, 8)
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the deadline")
    assert isinstance(request.sends[0].error, DeadlineError)
    assert "rows 0-8 never became final in layers [3]" in str(request.sends[0].error)
    request.failed()
    with pytest.raises(GeometryError, match="layer 6 is not on this rank"):
        steps[0].layer_ready(LayerId(6))
    with pytest.raises(LocalProtocolError, match="layer 5 announced twice"):
        steps[0].layer_ready(LayerId(5))
    rig.quiet()


@pytest.mark.parametrize("ended", [True, False])
def test_what_is_announced_wrongly_is_an_error_and_changes_nothing(ended: bool) -> None:
    """Twice, unknown, after ``close`` or after an abort: the engine's mistakes are errors, an abort is not one."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=PIPELINED, schedule=PAIRS)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    (step,) = begin(request, 0, 8)
    for layer in (3, 2):  # out of order is none
        compute(request, [step], layer, 0, 8)
    with pytest.raises(LocalProtocolError, match="layer 3 announced twice"):
        step.layer_ready(LayerId(3))
    for unknown in (-1, 6):
        with pytest.raises(GeometryError, match=f"layer {unknown} is not on this rank, which has"):
            step.layer_ready(LayerId(unknown))
    if ended:
        request.sends[0].abort("enough")
        request.failed()
    for layer in (0, 1, 4, 5):
        compute(request, [step], layer, 0, 8)
    step.close()
    with pytest.raises(LocalProtocolError, match="layer 0 announced after close"):
        step.layer_ready(LayerId(0))
    with pytest.raises(LocalProtocolError, match="closed already"):
        step.close()
    if not ended:
        request.finish().landed()
    rig.quiet()


@pytest.mark.parametrize("size", [0, -3])
def test_a_group_of_no_layers_is_refused_wherever_it_is_asked_for(size: int) -> None:
    """A fixed size when it is given; a schedule's own answer when it comes, for its room alone."""
    with pytest.raises(ConfigurationError, match=f"a fixed size must be at least 1, not {size}"):
        LayerPipelined(fixed=size)

    class Wrong(LayerPipelined):
        def groups(self, run: LayerRun) -> Groups:
            return Groups(run.layers, size, "none")

    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=PIPELINED, schedule=Wrong())
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).start().failed()
    assert f"groups of {size} layers out of 6" in str(request.sends[0].error)
    rig.quiet()


def test_layers_that_cache_nothing_are_in_no_segment_and_named_when_announced() -> None:
    """A model whose layers do not all cache: a spec has those that do; a model of which none does is refused."""
    with pytest.raises(GeometryError, match="at least one layer"):
        CacheSpec({})
    every = SPEC.layers[LayerId(0)]
    gaps = CacheSpec({LayerId(n): every for n in (0, 1, 4)})
    rig = Rig(gaps)
    prefills = rig.prefill(tp_shards(gaps, 2), strategy=PIPELINED, schedule=PAIRS)
    decodes = rig.decode(tp_shards(gaps, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    steps = begin(request, 0, 8)
    with pytest.raises(GeometryError, match=r"layer 2 is not on this rank, which has \[0, 1, 4\]"):
        steps[0].layer_ready(LayerId(2))
    for layer in (0, 1, 4):
        compute(request, steps, layer, 0, 8)
        rig.wait(0.5)
    for step in steps:
        step.close()
    request.finish().landed()
    assert request.sends[0].report.segments == 2, "layers 0 and 1 together, layer 4 alone"
    rig.quiet()


def frames_of(**more: Unpack[PrefillOptions]) -> tuple[list[bytes], str]:
    """Every frame about one room and its chunks that either side sends, in order, and why they are cut so."""
    heard: list[RoomFrame] = []
    rig = Rig(SPEC)
    memory = Memory(channel=lambda inner: Listening(inner, heard))
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=memory, **more)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    request = rig.request("room", prefills, decodes, 40).open_decode().expect(40, aux=1).open_prefill()
    for start, stop in ((0, 30), (30, 40)):
        steps = begin(request, start, stop)
        for layer in range(6):
            compute(request, steps, layer, start, stop)
            rig.wait(0.1)
        for step in steps:
            step.close()
        rig.wait(0.5)
    request.finish(aux=0).landed()
    rig.quiet()
    epochs = {e: bytes([n] * 16) for n, e in enumerate(dict.fromkeys(f.src for f in heard))}
    codec = Codec()
    said = [codec.encode(structs.replace(f, src=epochs[f.src], dst=epochs[f.dst])) for f in heard]
    return said, request.sends[0].report.schedule


def test_where_one_group_is_chosen_the_path_is_that_of_whole_chunks_frame_by_frame() -> None:
    """Never slower than per chunk, because it is the same: the same frames and segments, in the same order."""
    slow = Pace(layer_token_s=1e-9, bytes_per_s=1e12, group_s=1.0)
    per_chunk, _ = frames_of(strategy="staged+per_chunk")
    for schedule in (LayerPipelined(), LayerPipelined(pace=slow)):
        grouped, why = frames_of(strategy=PIPELINED, schedule=schedule)
        assert grouped == per_chunk, why
    several, _ = frames_of(strategy=PIPELINED, schedule=PAIRS)
    assert several != per_chunk


def peak(rows: int) -> tuple[int, int, int]:
    """The most bytes of the ring, and the most slots, that a request takes at a time; and its segments."""
    rig = Rig(SPEC)
    memory = Memory(pages=400)
    prefills = rig.prefill(
        tp_shards(SPEC, 1), memory=memory, strategy=PIPELINED, schedule=PAIRS, slot_bytes=2048, slots=2
    )
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=32 << 10)
    request = rig.request("room", prefills, decodes, rows).open_decode().expect(rows).open_prefill()
    leased = pinned = 0

    def look() -> None:
        nonlocal leased, pinned
        rig.turn()
        leased = max(leased, decodes[0].endpoint.usage().ring_used_bytes)
        pinned = max(pinned, prefills[0].endpoint.usage().slots_used)

    for start in range(0, rows, 100):
        steps = begin(request, start, start + 100)
        for layer in range(6):
            compute(request, steps, layer, start, start + 100)
            for _ in range(3):
                look()
        steps[0].close()
    request.finish()
    while not all(h.released for h in request.handles):
        look()
    request.landed()
    rig.quiet()
    return leased, pinned, request.receives[0].report.segments


def test_staging_of_a_long_prompt_is_that_of_a_short_one() -> None:
    """Extra memory: two slots and a ring, whatever the prompt's length; the segments of a pass go through them."""
    short, long = peak(100), peak(400)
    assert short[:2] == long[:2]
    assert short[0] <= 32 << 10
    assert short[1] <= 2
    assert long[2] == 4 * short[2] > 50


@pytest.mark.parametrize("declared", ["endpoint", "pass"])
def test_a_declared_conflict_sends_per_chunk(declared: str) -> None:
    """The engine may say so for good, or for one pass; the report has the reason."""
    rig = Rig(SPEC)
    always = [Feature.DRAFT_MODEL] if declared == "endpoint" else []
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy=PIPELINED, schedule=PAIRS, uses=always, slot_bytes=1 << 14)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=1 << 18)
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    (table,) = request.pages(0, 8)
    now = () if always else (Feature.DRAFT_MODEL,)
    step = prefills[0].endpoint.step({request.room: (8, [table])}, uses=now)
    for layer in range(5):
        step.layer_ready(LayerId(layer))
    rig.wait(1.0)
    assert request.receives[0].report.segments == 0
    step.close()
    request.finish().landed()
    report = request.sends[0].report
    assert (report.groups, report.segments) == (1, 1)
    assert report.schedule.startswith("the engine uses draft_model: ")
    spans = [s for s in prefills[0].observer.spans if s.name == "groups"]
    assert [s.labels["groups"] for s in spans] == ["1"]
    assert prefills[0].observer.counters["groups"] == 1


def test_ranks_that_share_segments_go_by_the_pace_that_decode_tells_all_of_them() -> None:
    """They must cut alike, so what one of them measured counts from the next room on, and for all."""
    seen: list[LayerRun] = []

    class Watching(LayerPipelined):
        def groups(self, run: LayerRun) -> Groups:
            seen.append(run)
            return Groups(run.layers, 2, "two")

    for tp in (1, 2):
        rig = Rig(SPEC)
        seen.clear()
        memory = Memory(transport=lambda: emulate(InprocTransport(), bytes_per_s=1e5, clock=rig.clock))  # noqa: B023
        watching: PrefillOptions = {"strategy": "staged+layer_pipelined", "schedule": Watching()}
        prefills = rig.prefill(tp_shards(SPEC, tp), memory=memory, **watching)
        decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
        for name in "ab":
            request = rig.request(name, prefills, decodes, 8).open_decode().expect(8).open_prefill()
            rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")  # noqa: B023
            steps = begin(request, 0, 8)
            for layer in range(6):
                rig.wait(0.1, 0.01)
                compute(request, steps, layer, 0, 8)
            for step in steps:
                step.close()
            request.finish().landed()
        assert (seen[0].layers, seen[0].rows, seen[0].batch.tokens, seen[0].pace) == (6, 8, (8,), None)
        assert seen[0].nbytes == 6 * 8 * 2 * (4 // tp) * 16
        pace = seen[-1].pace
        assert pace is not None
        assert pace.layer_token_s == pytest.approx(0.1 / 8, rel=0.2)
        assert 0.4e5 < pace.bytes_per_s < 1.3e5, "the rig's clock goes in steps as long as a small group's wire"
        assert [run.pace for run in seen[-tp:]] == [pace] * tp


def test_a_schedule_that_raises_costs_its_room_alone() -> None:
    """A schedule may be somebody else's code."""

    class Broken(LayerPipelined):
        def groups(self, run: LayerRun) -> Groups:
            raise ValueError("no idea")

    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged+layer_pipelined", schedule=Broken())
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).start().failed()
    assert "no idea" in str(request.sends[0].error)
    assert not prefills[0].observer.counters["errors.unforeseen"]
    rig.quiet()


def test_memory_does_not_grow_with_the_prompt() -> None:
    """Extra memory: a long prompt goes through a few slots and a small ring, group by group."""
    rig = Rig(SPEC)
    memory = Memory(pages=400)
    prefills = rig.prefill(
        tp_shards(SPEC, 1), memory=memory, strategy=PIPELINED, schedule=PAIRS, slot_bytes=2048, slots=2
    )
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=32 << 10)
    request = rig.request("room", prefills, decodes, 400).open_decode().expect(400).open_prefill()
    for start in range(0, 400, 100):
        steps = begin(request, start, start + 100)
        for layer in range(6):
            compute(request, steps, layer, start, start + 100)
        steps[0].close()
    request.finish().landed()
    assert request.receives[0].report.segments > 50
    rig.quiet()


def test_a_group_crosses_inside_the_computation_of_the_next_and_the_trace_shows_it() -> None:
    """In the trace, the wire of group n lies inside the computing of group n + 1, and scatters follow the wire."""
    rig = Rig(SPEC)
    memory = Memory(transport=lambda: emulate(InprocTransport(), bytes_per_s=6 * 8 * 128 / 0.3, clock=rig.clock))
    single = LayerPipelined(fixed=1)
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=memory, strategy=PIPELINED, schedule=single)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    rig.until(lambda: all(h.phase is Phase.READY for h in request.sends), "the expectation")
    steps = begin(request, 0, 8)
    for layer in range(6):
        rig.wait(0.2, 0.005)
        compute(request, steps, layer, 0, 8)
    for step in steps:
        step.close()
    request.finish().landed()
    scatters = {s.labels["layers"]: s for s in decodes[0].observer.spans if s.name == "scatter"}
    for member in prefills:
        spans = [s for s in member.observer.spans if s.room == request.room]
        computed = {s.labels["layers"]: s for s in spans if s.name == "compute"}
        wires = {s.labels["layers"]: s for s in spans if s.name == "wire"}
        gathers = {s.labels["layers"]: s for s in spans if s.name == "gather"}
        assert len(computed) == len(wires) == len(gathers) == len(scatters) == 6
        for layer in range(5):
            wire, during = wires[f"{layer}-{layer + 1}"], computed[f"{layer + 1}-{layer + 2}"]
            assert during.start <= gathers[f"{layer}-{layer + 1}"].start <= wire.start < wire.stop <= during.stop
            assert scatters[f"{layer}-{layer + 1}"].start >= wire.stop
            assert wire.labels["rows"] == "0-8"
    trace = chrome_trace({"prefill 0": prefills[0].observer.spans})
    assert isinstance(trace["traceEvents"], list)
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"} == {
        "compute",
        "gather",
        "groups",
        "pass",
        "room",
        "wire",
    }
    rig.quiet()
