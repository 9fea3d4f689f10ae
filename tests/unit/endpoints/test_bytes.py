"""Whatever the two sides look like, decode's pages hold prefill's bytes and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from disagg_kv.core import Phase
from disagg_kv.geometry import CacheSpec, Shard, shard
from disagg_kv.transports import InprocTransport, ShmTransport, Transport
from tests.support.rig import AUX_BYTES, Memory, Rig, tp_shards

KV = CacheSpec.kv(4, 4, 8, "float16")
WIDE = CacheSpec.kv(3, 12, 4, "float16", v_head_dim=6, v_dtype="int8")
UNEVEN = CacheSpec.kv(2, 7, 4, "float16")
GQA = CacheSpec.kv(3, 2, 8, "float16")
MLA = CacheSpec.mla(5, 24, "int8")
Split = Callable[[CacheSpec], Sequence[Shard]]


def tp(ways: int, pp: int = 1) -> Split:
    """An even split."""
    return lambda spec: tp_shards(spec, ways, pp)


def heads(*runs: range) -> Split:
    """Each rank's heads, said one by one."""
    return lambda spec: [shard(spec, units={"k": run, "v": run}) for run in runs]


PAIRS = {
    "1-1": (KV, tp(1), tp(1)),
    "4-1": (KV, tp(4), tp(1)),
    "1-4": (KV, tp(1), tp(4)),
    "2-4": (KV, tp(2), tp(4)),
    "3-2": (WIDE, tp(3), tp(2)),
    "3-2 of 7 heads": (UNEVEN, heads(range(3), range(3, 5), range(5, 7)), heads(range(4), range(4, 7))),
    "4-1 replicated": (GQA, tp(4), tp(1)),
    "1-4 replicated": (GQA, tp(1), tp(4)),
    "4-8 replicated": (GQA, tp(4), tp(8)),
    "mla 2-1": (MLA, tp(2), tp(1)),
    "mla 1-2": (MLA, tp(1), tp(2)),
    "pp 2-1": (KV, tp(1, 2), tp(1)),
    "pp 1-2": (KV, tp(1), tp(1, 2)),
    "pp 2 tp 2 - pp 3 tp 1": (WIDE, tp(2, 2), tp(1, 3)),
}


@pytest.mark.parametrize("path", ["staged", "slice", "mapped", "auto"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_of_splits(pair: str, path: str) -> None:
    """Whichever way the ranks of the two sides split the cache, every cell arrives, K and V alike."""
    spec, prefill, decode = PAIRS[pair]
    rig = Rig(spec)
    prefills = rig.prefill(prefill(spec), strategy=path)
    decodes = rig.decode(decode(spec), strategy=path)
    for name in ("a", "b"):
        rig.request(name, prefills, decodes, 23).start(23).landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped", "auto"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Memory(page_size=16), Memory(page_size=64, pages=8)),
        (Memory(page_size=64, pages=8), Memory(page_size=16)),
        (Memory(layout="NHD"), Memory(layout="HND")),
        (Memory(layout="HND", fused=True), Memory(layout="NHD", page_size=8)),
    ],
    ids=["16-64", "64-16", "NHD-HND", "fused"],
)
def test_every_pair_of_memories(source: Memory, target: Memory, path: str) -> None:
    """Page sizes and layouts of the two sides may differ."""
    rig = Rig(WIDE)
    prefills = rig.prefill(tp_shards(WIDE, 2), memory=source, strategy=path)
    decodes = rig.decode(tp_shards(WIDE, 3), memory=target, strategy=path)
    rig.request("room", prefills, decodes, 133).start(133).landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["direct", "auto"])
@pytest.mark.parametrize("split", [tp(1), tp(2), tp(2, 2)], ids=["tp 1", "tp 2", "tp 2 pp 2"])
def test_equal_layouts_go_direct(split: Split, path: str) -> None:
    """Equal pools may take whole pages."""
    rig = Rig(KV)
    prefills = rig.prefill(split(KV), strategy=path)
    decodes = rig.decode(split(KV), strategy=path)
    rig.request("room", prefills, decodes, 30).start(30).landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "direct", "mapped"])
def test_chunks_arrive_as_they_are_computed(path: str) -> None:
    """A request is sent in chunks whose edges are no page edges."""
    rig = Rig(KV)
    prefills, decodes = rig.prefill(tp_shards(KV, 2), strategy=path), rig.decode(tp_shards(KV, 2), strategy=path)
    request = rig.request("room", prefills, decodes, 40).open_decode().expect(None).open_prefill()
    request.send(7)
    rig.until(lambda: all(h.report.segments for h in request.receives), "the first chunk")
    assert request.receives[0].phase is Phase.MOVING
    request.send(8, 7).send(33, 8).send(40, 33).finish().landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "direct", "mapped", "auto"])
@pytest.mark.parametrize("stop", [None, 0])
def test_no_rows(stop: int | None, path: str) -> None:
    """A room without rows still ends well and brings its aux row."""
    rig = Rig(KV)
    prefills, decodes = rig.prefill(tp_shards(KV, 2), strategy=path), rig.decode(tp_shards(KV, 2), strategy=path)
    prefills[0].pool.write_aux(1, b"first")
    request = rig.request("room", prefills, decodes, 0)
    request.open_decode().expect(stop, aux=2).open_prefill().finish(aux=1).landed()
    assert decodes[0].pool.read_aux(2) == b"first".ljust(AUX_BYTES, b"\0")
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_fewer_rows_than_prefill_has(path: str) -> None:
    """Decode may ask for less: nothing beyond that is written."""
    rig = Rig(KV)
    prefills, decodes = rig.prefill(tp_shards(KV, 2), strategy=path), rig.decode(tp_shards(KV, 1), strategy=path)
    rig.request("room", prefills, decodes, 40).start(13).landed(13)
    rig.quiet()


def test_prefill_says_where_it_ends() -> None:
    """Decode need not know how long the prompt is, if its pages suffice."""
    rig = Rig(KV)
    prefills, decodes = rig.prefill(tp_shards(KV, 1)), rig.decode(tp_shards(KV, 1))
    request = rig.request("room", prefills, decodes, 40).open_decode().expect(None)
    request.rows = 21
    request.open_prefill().send(21).finish().landed()
    assert request.receives[0].report.nbytes == 21 * 4 * 2 * 4 * 16


def test_lowest_rank_s_aux_counts() -> None:
    """Several ranks may give an aux row; the lowest rank's arrives, on every decode rank."""
    rig = Rig(KV)
    prefills, decodes = rig.prefill(tp_shards(KV, 4)), rig.decode(tp_shards(KV, 2))
    for rank, member in enumerate(prefills):
        member.pool.write_aux(0, b"rank %d" % rank)
    request = rig.request("room", prefills, decodes, 5).open_decode().expect(5, aux=3).open_prefill().send(5)
    for rank, handle in enumerate(request.sends):
        handle.finish(5, aux=0 if rank in (1, 3) else None)
    request.landed()
    assert [m.pool.read_aux(3) for m in decodes] == [b"rank 1\0\0"] * 2


@pytest.mark.parametrize("transport", [InprocTransport, ShmTransport])
@pytest.mark.parametrize(
    ("ways", "path"), [((2, 1), "staged"), ((1, 2), "slice"), ((2, 2), "direct"), ((2, 1), "mapped"), ((4, 2), "auto")]
)
def test_with_threads(ways: tuple[int, int], path: str, transport: Callable[[], Transport]) -> None:
    """The same with each endpoint's own thread, real time, and many rooms at once."""
    rig = Rig(KV, threaded=True)
    memory = Memory(transport=transport)
    prefills = rig.prefill(tp_shards(KV, ways[0]), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(KV, ways[1]), memory=memory, strategy=path)
    requests = [rig.request(f"room {i}", prefills, decodes, 17) for i in range(8)]
    for request in requests:
        request.start(17 if request is requests[0] else None)
    rig.until(lambda: all(r.all(Phase.DONE) for r in requests), "all rooms")
    for request in requests:
        request.wanted(0, 17)
    rig.check()
    rig.quiet()
    rig.close()


def test_two_prefill_instances_at_once() -> None:
    """Instances of different sizes serve one decode instance at the same time."""
    rig = Rig(KV)
    small = rig.prefill(tp_shards(KV, 1), "small", strategy="slice")
    large = rig.prefill(tp_shards(KV, 2, 2), "large", memory=Memory(layout="HND", page_size=8), strategy="staged")
    decodes = rig.decode(tp_shards(KV, 4))
    requests = [
        rig.request(f"{i}", small if i % 2 else large, decodes, 19, "small" if i % 2 else "large") for i in range(8)
    ]
    for request in requests:
        request.start(19)
    rig.until(lambda: all(r.all(Phase.DONE) for r in requests), "all rooms")
    for request in requests:
        request.wanted(0, 19)
    rig.check()
    rig.quiet()
