"""What is compiled, and when: everything before an endpoint's constructor returns, nothing when a peer connects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import define

from disagg_kv.core import Verify
from disagg_kv.geometry import CacheSpec, Component
from disagg_kv.kernels import gpu_kernels
from disagg_kv.kernels.triton_kernels import OPS
from disagg_kv.kernels.triton_launch import Host
from disagg_kv.kernels.triton_shapes import shapes
from disagg_kv.kernels.triton_tables import Planes, Shape
from disagg_kv.memory import Layout, PagedMemory
from tests.support.rig import Memory, Rig, tp_shards

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs natively here: see tests/gpu")

KV = CacheSpec.kv(4, 4, 4, "bfloat16")
"""Heads of 8 bytes: one allows less than the widest access, and two allow it."""

MIXED = CacheSpec.uniform(4, [Component("k", "uint8", 4, 24), Component("scale", "uint8", 2, 4)])
"""Two widths, and not as many units of one as of the other."""


@define
class Compiler:
    """Stands in for Triton's: ``compiled`` are the kernels, ``used`` those that were launched."""

    compiled: set[tuple[object, ...]]
    used: set[tuple[object, ...]]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler(set(), set())
    constants = Host._constants

    def compile_all(host: Host, pool: PagedMemory, *targets: PagedMemory, other: int | None = None, **how: Any) -> None:
        cut = shapes(Planes(pool), pool, host._op.tuning.tile_bytes, host._op.cells, other, **how)
        found.compiled |= {(host._op, shape.constants) for shape in cut}

    def launched(self: Host, shape: Shape) -> tuple[object, ...]:
        found.used.add((self._op, shape.constants))
        return constants(self, shape)

    monkeypatch.setattr(Host, "_compile_all", compile_all)
    monkeypatch.setattr(Host, "_constants", launched)
    return found


LAYOUTS: list[tuple[tuple[int, int], tuple[int, int], int, Layout, bool]] = [
    ((1, 1), (1, 1), 4, "NHD", False),
    ((1, 1), (2, 1), 4, "NHD", False),
    ((2, 1), (1, 1), 4, "NHD", False),
    ((1, 1), (4, 1), 1, "NHD", True),
    ((1, 1), (1, 1), 3, "HND", False),
    ((1, 1), (1, 2), 16, "NHD", False),
    ((2, 2), (1, 1), 2, "HND", True),
]
"""Ranks and stages of prefill, then of decode; and the page size and layout of decode's pools."""


@pytest.mark.parametrize("spec", [KV, MIXED], ids=["kv", "mixed"])
@pytest.mark.parametrize(("path", "verify"), [("mapped", "off"), ("staged", "full")])
@pytest.mark.parametrize(("ours", "theirs", "page_size", "layout", "fused"), LAYOUTS, ids=str)
def test_no_kernel_is_compiled_for_a_peer_with_the_same_cache(
    compiler: Compiler,
    spec: CacheSpec,
    path: str,
    verify: Verify,
    ours: tuple[int, int],
    theirs: tuple[int, int],
    page_size: int,
    layout: Layout,
    fused: bool,
) -> None:
    """Each side knows its own pool alone when it compiles; whatever the peer holds and however, the rest are values."""
    rig, memory = Rig(spec), Memory(page_size=page_size, pages=32, layout=layout, fused=fused)
    prefills = rig.prefill(tp_shards(spec, *ours), strategy=path, verify=verify, kernels=gpu_kernels())
    by_prefill, compiler.compiled = compiler.compiled, set()
    decodes = rig.decode(tp_shards(spec, *theirs), memory=memory, strategy=path, verify=verify, kernels=gpu_kernels())
    by_decode, compiler.compiled = compiler.compiled, set()
    rig.request("room", prefills, decodes, 9).start(9).landed()
    assert compiler.compiled <= by_prefill
    assert compiler.used
    for one in compiler.used:
        assert one in (by_decode if one[0] is OPS["scatter"] else by_prefill)
        assert one in by_decode or one[0] is not OPS["checksum"]
    rig.quiet()


def test_a_conversion_is_compiled_when_the_peer_that_wants_it_is_connected(compiler: Compiler) -> None:
    """Which dtype that has, our pool does not say; the request finds it compiled."""
    rig = Rig(KV, decoded=KV.cast("float32"))
    prefills = rig.prefill(tp_shards(KV, 1), strategy="mapped", kernels=gpu_kernels())
    decodes = rig.decode(tp_shards(rig.decode_spec, 2), strategy="mapped", kernels=gpu_kernels())
    before = set(compiler.compiled)
    rig.request("room", prefills, decodes, 9).start(9).landed()
    assert compiler.compiled > before
    assert compiler.used <= compiler.compiled
    rig.quiet()
