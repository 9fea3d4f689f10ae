"""Random splits, page sizes, prefixes and chunks: exactly the missing rows cross, and every byte is right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_kv.strategies import LayerPipelined, Schedule
from disagg_kv.strategies.schedules import PerChunk
from tests.properties.test_endpoints import edges, memories
from tests.support.oracle import cells, needed
from tests.support.rig import Memory, Request, Rig
from tests.support.worlds import World, hybrid_specs, worlds

ROWS = 60
paths = st.sampled_from(["staged", "slice", "mapped", "auto"])
schedules: st.SearchStrategy[Schedule] = st.sampled_from(
    [PerChunk(), LayerPipelined(fixed=1), LayerPipelined(fixed=2)]  # so few rows have no groups by themselves
)


def lacking(world: World, rows: int) -> list[int]:
    """Bytes that each decode rank lacks of so many rows, cell by cell."""
    sizes = {(int(layer), c.name): c.unit_bytes for layer, of in world.spec.layers.items() for c in of}
    return [rows * sum(sizes[layer, component] for component, layer, _ in cells(shard)) for shard in world.targets]


def build(world: World, source: Memory, target: Memory, path: str, schedule: Schedule) -> Rig:
    """Both sides of a world, incremental."""
    rig, strategy = Rig(world.spec), f"{path}+{schedule.name}+incremental"
    rig.prefill(world.writers, memory=source, strategy=strategy, schedule=schedule, slot_bytes=1024, slots=4)
    rig.decode(world.targets, memory=target, strategy=f"{path}+incremental", ring_bytes=1 << 16)
    return rig


def send(request: Request, chunks: list[int], early: bool) -> None:
    """All rows, in these chunks: each a forward pass whose layers become final one by one, but for an early first."""
    start = 0
    for edge in [*dict.fromkeys(chunks), ROWS]:
        if early and start == 0:
            request.send(edge)
        else:
            tables = request.pages(start, edge)
            for member, table in zip(request.prefills, tables, strict=True):
                step = member.endpoint.step({request.room: (edge, member.pages(table))})
                for layer in reversed(member.pool.site.shard.layers()):
                    step.layer_ready(layer)
                    request.rig.turn()
                step.close()
        start = edge
        request.rig.turn()
    request.finish()


@settings(max_examples=40)
@given(
    world=worlds(),
    source=memories,
    target=memories,
    path=paths,
    schedule=schedules,
    chunks=edges,
    early=st.booleans(),
    held=st.lists(st.integers(0, ROWS), min_size=2, max_size=2),
    whole=st.booleans(),
    open_end=st.booleans(),
)
def test_whatever_is_held(
    world: World,
    source: Memory,
    target: Memory,
    path: str,
    schedule: Schedule,
    chunks: list[int],
    early: bool,
    held: list[int],
    whole: bool,
    open_end: bool,
) -> None:
    """Two rooms, each with a prefix; the bytes on the wire are those of the rows not held."""
    rig = build(world, source, target, path, schedule)
    requests = [rig.request(name, rig.prefills, rig.decodes, ROWS) for name in ("a", "b")]
    for request, rows in zip(requests, held, strict=True):
        request.open_decode().expect(None if open_end else ROWS, held=rows, whole=whole).open_prefill()
        send(request, chunks, early)
    rig.until(lambda: all(h.released for r in requests for h in r.handles), "both rooms")
    for request, rows in zip(requests, held, strict=True):
        request.done()
        missing = ROWS - rows // target.page_size * target.page_size
        assert [h.report.nbytes for h in request.receives] == lacking(world, missing)
    rig.check()
    rig.quiet()


@settings(max_examples=25)
@given(
    world=worlds(of=hybrid_specs()),
    source=memories,
    target=memories,
    path=paths,
    schedule=schedules,
    chunks=edges,
    held=st.integers(0, ROWS),
    open_end=st.booleans(),
)
def test_states_and_windows_are_always_fresh(
    world: World,
    source: Memory,
    target: Memory,
    path: str,
    schedule: Schedule,
    chunks: list[int],
    held: int,
    open_end: bool,
) -> None:
    """Whatever is held, states and the tails of windows cross whole; of other tokens only what is missing."""
    rig = build(world, source, target, path, schedule)
    request = rig.request("a", rig.prefills, rig.decodes, ROWS)
    request.open_decode().expect(None if open_end else ROWS, held=held).open_prefill()
    send(request, chunks, False)
    request.released().done()
    taken = held // target.page_size * target.page_size
    sizes = {(int(layer), c.name): c.unit_bytes for layer, of in world.spec.layers.items() for c in of}
    for handle, shard in zip(request.receives, world.targets, strict=True):
        cells = needed(world.spec, shard, taken, ROWS, known=not open_end)
        assert handle.report.nbytes == sum(sizes[layer, component] for component, layer, _, _ in cells)
    rig.check()
    rig.quiet()
