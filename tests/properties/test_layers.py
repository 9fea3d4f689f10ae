"""Layer groups over random caches and splits, announced in any order, with events that happen late and withdrawals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_kv.memory.paged import Layout
from disagg_kv.strategies import LayerPipelined
from tests.support.rig import Memory, Request, Rig
from tests.support.rig_parts import FiredEvent
from tests.support.worlds import World, hybrid_specs, worlds

pytestmark = pytest.mark.slow

LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")
memories = st.builds(
    Memory, page_size=st.sampled_from([1, 3, 4, 16]), pages=st.just(400), layout=st.sampled_from(LAYOUTS)
)


def forward(request: Request, start: int, stop: int, chance: random.Random, share: float = 1.0) -> list[FiredEvent]:
    """One forward pass on every rank: some of its layers are announced; if all are, the passes are closed."""
    rig, waiting = request.rig, []
    announced = []
    for m, table in zip(request.prefills, request.pages(start, stop), strict=True):
        step = m.endpoint.step({request.room: (stop, m.pages(table))})
        announced += [(step, layer) for layer in m.pool.site.shard.layers() if share == 1.0 or chance.random() < share]
    steps = list(dict.fromkeys(step for step, _ in announced))
    chance.shuffle(announced)
    for step, layer in announced:
        event = FiredEvent()
        waiting.append(event)
        step.layer_ready(layer, event)
        if chance.random() < 0.5:
            chance.choice(waiting).fired = True
        if chance.random() < 0.3:
            rig.turn()
    for step in steps if share == 1.0 else ():
        step.close()
    return waiting


@settings(max_examples=40)
@given(
    world=worlds() | worlds(of=hybrid_specs()),
    source=memories,
    target=memories,
    path=st.sampled_from(["staged", "slice", "mapped", "auto"]),
    group=st.integers(1, 4),
    edges=st.lists(st.integers(1, 39), max_size=2).map(sorted),
    withdrawn=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_layers_in_groups_arrive_whatever_the_order(
    world: World, source: Memory, target: Memory, path: str, group: int, edges: list[int], withdrawn: bool, seed: int
) -> None:
    """Any TP and PP, path, group size and order of events, with a withdrawal in between."""
    chance = random.Random(seed)
    rig = Rig(world.spec)
    schedule = LayerPipelined(fixed=group)
    rig.prefill(
        world.writers, memory=source, strategy=f"{path}+layer_pipelined", schedule=schedule, slot_bytes=1024, slots=4
    )
    rig.decode(world.targets, memory=target, strategy=path, ring_bytes=1 << 16)
    request = rig.request("room", rig.prefills, rig.decodes, 40).open_decode().expect(40).open_prefill()
    if withdrawn:
        forward(request, 0, 20, chance, share=0.5)
        fired = [handle.withdraw() for handle in request.sends]
        rig.until(lambda: all(event.query() for event in fired), "the end of reads")
    start, late = 0, []
    for edge in [*dict.fromkeys(edges), 40]:
        late += forward(request, start, edge, chance)
        start = edge
    request.finish()
    chance.shuffle(late)
    for event in late:
        event.fired = True
        rig.turn()
    request.landed()
    rig.quiet()
