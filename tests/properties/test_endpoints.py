"""Random caches, splits, memories, chunks and networks: the bytes arrive, and all memory comes back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_kv.channels import Channel
from disagg_kv.core import Options, Phase, Verify
from disagg_kv.memory.paged import Layout
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.transports import InprocTransport
from tests.support.drawn_faults import seeded
from tests.support.rig import Memory, Rig
from tests.support.rig_parts import Unreliable
from tests.support.worlds import World, hybrid_specs, worlds

LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")
memories = st.builds(
    Memory,
    page_size=st.sampled_from([1, 3, 4, 16]),
    pages=st.just(300),
    layout=st.sampled_from(LAYOUTS),
    fused=st.booleans(),
)
paths = st.sampled_from(["staged", "slice", "mapped", "auto"])
wires = st.sampled_from(["staged", "slice", "auto"])
"""Paths over a transport with faults, which maps no memory."""
wishes: st.SearchStrategy[Verify] = st.sampled_from(["off", "sampled", "full"])
edges = st.lists(st.integers(1, 59), max_size=3).map(sorted)


def build(
    world: World, source: Memory, target: Memory, path: str, verify: Verify, options: Options | None = None
) -> Rig:
    """A rig of both sides of a world."""
    rig = Rig(world.spec, options=options)
    rig.prefill(world.writers, memory=source, strategy=path, slot_bytes=1024, slots=4)
    rig.decode(world.targets, memory=target, strategy=path, ring_bytes=1 << 16, verify=verify)
    return rig


either = worlds() | worlds(of=hybrid_specs())


@settings(max_examples=40)
@given(world=either, source=memories, target=memories, path=paths, edges=edges, open_end=st.booleans(), verify=wishes)
def test_whatever_the_sides_look_like(
    world: World, source: Memory, target: Memory, path: str, edges: list[int], open_end: bool, verify: Verify
) -> None:
    """Two rooms in random chunks over any two splits and memories arrive, and sums agree."""
    rig = build(world, source, target, path, verify)
    requests = [rig.request(name, rig.prefills, rig.decodes, 60) for name in ("a", "b")]
    for request in requests:
        request.open_decode().expect(None if open_end else 60).open_prefill()
        start = 0
        for edge in [*dict.fromkeys(edges), 60]:
            request.send(edge, start)
            start = edge
            rig.turn()
        request.finish()
    rig.until(lambda: all(h.released for r in requests for h in r.handles), "both rooms")
    for request in requests:
        request.done()
    rig.check()
    rig.quiet()


def network(seed: int, drop: float, double: float) -> Memory:
    """Memory whose frames get lost, doubled and late."""

    def fate(number: int, address: str) -> Sequence[int]:
        at = hash((seed, number)) % 1000 / 1000
        if at < drop:
            return ()
        return (0, 1 + number % 9) if at < drop + double else (number % 3,)

    def channel(inner: Channel) -> Unreliable:
        return Unreliable(inner, fate)

    shares = dict.fromkeys([Fault.REFUSED, Fault.PARTIAL, Fault.LATE, Fault.DELAYED, Fault.UNACKNOWLEDGED], 0.04)
    return Memory(
        pages=300, channel=channel, transport=lambda: FaultyTransport(InprocTransport(), seeded(seed, shares))
    )


@settings(max_examples=20)
@given(
    world=either,
    path=wires,
    seed=st.integers(0, 10**6),
    drop=st.sampled_from([0.0, 0.05, 0.2]),
    aborts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 50)), max_size=2),
    verify=wishes,
)
def test_whatever_goes_wrong(
    world: World, path: str, seed: int, drop: float, aborts: list[tuple[int, int]], verify: Verify
) -> None:
    """With lost frames, failing writes and aborts, sides end as one and give all memory back."""
    memory = network(seed, drop, 0.1)
    rig = build(world, memory, memory, path, verify, Options(total_s=60.0))
    requests = [rig.request(name, rig.prefills, rig.decodes, 30).start() for name in ("a", "b", "c")]
    for turn in range(61):
        rig.turn()
        for at, who in aborts:
            if at == turn:
                request = requests[who % 3]
                request.handles[who % len(request.handles)].abort("at random")
    rig.wait(100.0, 0.2)
    for member in rig.members:
        assert isinstance(member.transport, FaultyTransport)
        member.transport.release()
    rig.until(lambda: all(h.released for r in requests for h in r.handles), "evidence", 20_000)
    for request in requests:
        if all(h.phase is Phase.DONE for h in request.receives):
            request.wanted(0, 30)
        else:
            request.forgive()
        assert len({h.phase for h in request.sends}) == len({h.phase for h in request.receives}) == 1
    rig.check()
    rig.quiet()
