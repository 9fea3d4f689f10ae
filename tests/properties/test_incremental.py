"""Random splits, page sizes, prefixes and chunks: exactly the missing rows cross, and every byte is right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.test_endpoints import edges, memories
from tests.support.oracle import cells
from tests.support.rig import Memory, Request, Rig
from tests.support.worlds import World, worlds

ROWS = 60
paths = st.sampled_from(["staged", "slice", "auto"])


def lacking(world: World, rows: int) -> list[int]:
    """Bytes that each decode rank lacks of so many rows, cell by cell."""
    sizes = {(int(layer), c.name): c.unit_bytes for layer, of in world.spec.layers.items() for c in of}
    return [rows * sum(sizes[layer, component] for component, layer, _ in cells(shard)) for shard in world.targets]


def build(world: World, source: Memory, target: Memory, path: str) -> Rig:
    """Both sides of a world, incremental."""
    rig = Rig(world.spec)
    rig.prefill(world.writers, memory=source, strategy=f"{path}+incremental", slot_bytes=1024, slots=4)
    rig.decode(world.targets, memory=target, strategy=f"{path}+incremental", ring_bytes=1 << 16)
    return rig


def send(request: Request, chunks: list[int]) -> None:
    """All rows, in these chunks."""
    start = 0
    for edge in [*dict.fromkeys(chunks), ROWS]:
        request.send(edge, start)
        start = edge
        request.rig.turn()
    request.finish()


@settings(max_examples=40)
@given(
    world=worlds(),
    source=memories,
    target=memories,
    path=paths,
    chunks=edges,
    held=st.lists(st.integers(0, ROWS), min_size=2, max_size=2),
    whole=st.booleans(),
    open_end=st.booleans(),
)
def test_whatever_is_held(
    world: World,
    source: Memory,
    target: Memory,
    path: str,
    chunks: list[int],
    held: list[int],
    whole: bool,
    open_end: bool,
) -> None:
    """C1, A6, A12: two rooms with prefixes of their own; the bytes on the wire are those of the rows not held."""
    rig = build(world, source, target, path)
    requests = [rig.request(name, rig.prefills, rig.decodes, ROWS) for name in ("a", "b")]
    for request, rows in zip(requests, held, strict=True):
        request.open_decode().expect(None if open_end else ROWS, held=rows, whole=whole).open_prefill()
        send(request, chunks)
    rig.until(lambda: all(h.released for r in requests for h in r.handles), "both rooms")
    for request, rows in zip(requests, held, strict=True):
        request.done()
        missing = ROWS - rows // target.page_size * target.page_size
        assert [h.report.nbytes for h in request.receives] == lacking(world, missing)
    rig.check()
    rig.quiet()
