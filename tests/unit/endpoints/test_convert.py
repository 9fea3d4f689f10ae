"""A cache changes its dtype on the way; decode's pages hold the specified conversion of prefill's, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, nan

import pytest
import torch
from attrs import evolve
from msgspec.structs import replace

from disagg_kv.channels import Channel
from disagg_kv.core import Codec, Phase, Verify
from disagg_kv.core.wire.frames import Hello
from disagg_kv.errors import IncompatiblePeerError
from disagg_kv.geometry import CacheSpec, Component, item_bytes
from disagg_kv.ids import LayerId, RoomId
from disagg_kv.kernels import KERNELS, CpuKernels, Move, PageMove
from disagg_kv.memory import Buffer, ConvertedPool, Event, Flag, MemoryPool, PagedMemory
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import CountingKernels, Over

ODD = Memory(page_size=3, layout="HND", fused=True)
HEADS, DIM, LAYERS = 4, 8, 4
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def kv(dtype: str, scales: str = "none") -> CacheSpec:
    """K and V of four heads; ``scales``: none, per ``layer``, per ``head``, or ``computed`` per row and head."""
    layers: dict[LayerId, list[Component]] = {}
    for layer in range(LAYERS):
        of: list[Component] = []
        for name in ("k", "v"):
            one = Component(name, dtype, HEADS, DIM * item_bytes(dtype))
            if scales == "layer":
                one = evolve(one, scales=[0.01 * (layer + 1)])
            elif scales == "head":
                one = evolve(one, scales=[0.02 * (layer + 1), 0.5, 3.0, 1e-4])
            elif scales == "computed":
                one = evolve(one, scaled_by=f"{name}_scale")
                of.append(Component(f"{name}_scale", "float32", HEADS, 4))
            of.append(one)
        layers[LayerId(layer)] = of
    return CacheSpec(layers)


def mla(dtype: str, scaled: bool = False) -> CacheSpec:
    latent = Component("latent", dtype, 1, 24 * item_bytes(dtype), scaled_by="scale" if scaled else None)
    rope = Component("rope", "float16", 1, 8)
    return CacheSpec.uniform(5, [latent, rope, *([Component("scale", "float32", 1, 4)] if scaled else [])])


PAIRS: dict[str, tuple[CacheSpec, CacheSpec, tuple[int, int], tuple[int, int], Memory, Memory]] = {
    "4-1": (kv("bfloat16"), kv(E4M3), (4, 1), (1, 1), Memory(), Memory()),
    "2-4, pages 3-8, per layer": (kv("float16"), kv(E5M2, "layer"), (2, 1), (4, 1), ODD, Memory(page_size=8)),
    "4-2, per head": (kv("float32"), kv(E4M3, "head"), (4, 1), (2, 1), Memory(page_size=16), ODD),
    "4-1, computed": (kv("bfloat16"), kv(E4M3, "computed"), (4, 1), (1, 1), Memory(), Memory(page_size=8)),
    "1-8 replicated, computed": (kv("bfloat16"), kv(E5M2, "computed"), (1, 1), (8, 1), Memory(), ODD),
    "8-1 elected, computed": (kv("float16"), kv(E4M3, "computed"), (8, 1), (1, 1), ODD, Memory()),
    "stages 2-1": (kv("bfloat16"), kv(E4M3, "computed"), (1, 2), (2, 1), Memory(), Memory()),
    "latent 2-1": (mla("bfloat16"), mla(E4M3, scaled=True), (2, 1), (1, 1), Memory(), Memory(page_size=5)),
    "back": (kv(E4M3), kv("bfloat16"), (2, 1), (1, 1), Memory(), Memory()),
    "back, per head": (kv(E5M2, "head"), kv("float16"), (2, 1), (1, 1), ODD, Memory()),
    "back, computed": (kv(E4M3, "computed"), kv("bfloat16"), (2, 1), (1, 1), Memory(), ODD),
    "wider": (kv("bfloat16"), kv("float32"), (2, 1), (1, 1), Memory(), Memory()),
    "narrower": (kv("float32"), kv("float16"), (2, 1), (1, 1), Memory(), Memory()),
}


@pytest.mark.parametrize("path", ["staged", "mapped", "staged+layer_pipelined"])
@pytest.mark.parametrize("pair", PAIRS)
def test_decode_holds_the_conversion_of_what_prefill_holds(pair: str, path: str) -> None:
    """Any split, page size, layout and scales; every segment's sums are those of decode's bytes."""
    spec, decoded, prefill, decode, source, target = PAIRS[pair]
    rig = Rig(spec, decoded=decoded)
    prefills = rig.prefill(tp_shards(spec, *prefill), memory=source, strategy=path, verify="full", slot_bytes=1024)
    decodes = rig.decode(tp_shards(decoded, *decode), memory=target, strategy=path)
    for name in ("a", "b"):
        request = rig.request(name, prefills, decodes, 23).open_decode().expect(None).open_prefill()
        request.send(7).send(23, 7).finish().landed()
        assert all("checksum" in handle.report.seconds for handle in request.receives)
    rig.quiet()


MIXED = CacheSpec.kv(3, 2, 8, "bfloat16", v_dtype="int8")
WINDOWED = [Component("k", "bfloat16", 2, 16, window=9), Component("v", "bfloat16", 2, 16)]
WITH_STATE = [*WINDOWED, Component("ssm", "float32", 2, 16, tokens_per_row=0, rows=3)]


def narrow(components: list[Component], *names: str) -> CacheSpec:
    """Some components in float8, with computed scales."""
    changed: list[Component] = []
    for c in components:
        if c.name in names:
            changed.append(evolve(c, dtype=E4M3, unit_bytes=c.unit_bytes // 2, scaled_by=f"{c.name}s"))
            changed.append(Component(f"{c.name}s", "float32", c.units, 4, window=c.window))
        else:
            changed.append(c)
    return CacheSpec.uniform(3, changed)


@pytest.mark.parametrize("path", ["staged", "mapped"])
@pytest.mark.parametrize(
    ("spec", "decoded"),
    [
        (MIXED, CacheSpec.kv(3, 2, 8, E5M2, v_dtype="int8")),
        (CacheSpec.uniform(3, WITH_STATE), narrow(WITH_STATE, "k")),
        (CacheSpec.uniform(3, WITH_STATE), narrow(WITH_STATE, "k", "v")),
    ],
    ids=["v as it is", "a window", "a window and rows without"],
)
def test_what_has_the_dtype_already_crosses_as_it_is_beside_what_is_converted(
    spec: CacheSpec, decoded: CacheSpec, path: str
) -> None:
    """Other components, states among them, keep their bytes; a window's scales are those of its rows."""
    rig = Rig(spec, decoded=decoded)
    prefills = rig.prefill(tp_shards(spec, 2), strategy=path, verify="full")
    decodes = rig.decode(tp_shards(decoded, 1), memory=ODD, strategy=path)
    rig.request("room", prefills, decodes, 23).start(23).landed(23)
    rig.quiet()


def test_a_held_prefix_is_in_decodes_dtype_and_only_the_rest_crosses() -> None:
    spec, decoded = kv("bfloat16"), kv(E4M3, "computed")
    rig = Rig(spec, decoded=decoded)
    prefills = rig.prefill(tp_shards(spec, 2), strategy="staged+incremental", verify="full")
    decodes = rig.decode(tp_shards(decoded, 1), strategy="staged+incremental")
    request = rig.request("room", prefills, decodes, 23).open_decode().expect(23, held=12).open_prefill()
    rig.until(lambda: all(handle.held is not None for handle in request.sends), "what decode holds")
    request.send(23, 12).finish().landed(23)
    sent = sum(handle.report.nbytes for handle in request.sends)
    assert sent == 11 * LAYERS * 2 * HEADS * (DIM + 4)


def test_half_the_bytes_cross() -> None:
    sent: dict[str, int] = {}
    for dtype in ("bfloat16", E4M3):
        rig = Rig(kv("bfloat16"), decoded=kv(dtype))
        request = rig.request(
            "room", rig.prefill(tp_shards(rig.spec, 2)), rig.decode(tp_shards(rig.decode_spec, 1)), 23
        )
        request.start().landed()
        sent[dtype] = sum(handle.report.nbytes for handle in request.sends)
    assert sent["bfloat16"] == 2 * sent[E4M3]


def test_ranks_of_two_decode_instances_may_want_other_dtypes_of_one_prefill() -> None:
    """Requests of both, at once: each gets its own bytes."""
    spec = kv("bfloat16")
    rig = Rig(spec)
    prefills = rig.prefill(tp_shards(spec, 2), verify="full")
    same = rig.request("a", prefills, rig.decode(tp_shards(spec, 1)), 23)
    rig.decoded = kv(E4M3, "computed")
    other = rig.request("b", prefills, rig.decode(tp_shards(rig.decode_spec, 2), name="E"), 23)
    for request in (same, other):
        request.open_decode().expect(None).open_prefill().send(23).finish()
    for request in (same, other):
        request.released().done()
    rig.check()


@pytest.mark.parametrize("path", ["direct", "slice"])
def test_a_path_without_a_kernel_is_refused_by_name(path: str) -> None:
    rig = Rig(kv("bfloat16"), decoded=kv(E4M3))
    prefills, decodes = rig.prefill(tp_shards(rig.spec, 1), strategy=path), rig.decode(tp_shards(rig.decode_spec, 1))
    request = rig.request("room", prefills, decodes, 5).open_decode().expect(None).open_prefill().send(5).finish()
    request.failed()
    assert "bfloat16 to float8_e4m3fn" in str(request.sends[0].error)
    assert "no kernel is on this path" in str(request.sends[0].error)


def test_auto_takes_a_path_that_converts() -> None:
    rig = Rig(kv("bfloat16"), decoded=kv(E4M3))
    prefills, decodes = rig.prefill(tp_shards(rig.spec, 1)), rig.decode(tp_shards(rig.decode_spec, 1))
    found = [rig.request(name, prefills, decodes, 23).start().landed().sends[0].report.path for name in "12"]
    assert found == ["staged", "mapped"]


def refused(spec: CacheSpec, decoded: CacheSpec, kernels: CountingKernels | CpuKernels | None = None) -> str:
    """The field that a request's error names on both sides, which change no byte."""
    rig = Rig(spec, decoded=spec)
    rig.decoded = decoded
    prefills = rig.prefill(tp_shards(spec, 1), kernels=kernels or CpuKernels())
    decodes = rig.decode(tp_shards(decoded, 1))
    rig.decoded = spec
    receive = decodes[0].endpoint.open(RoomId(b"room"), rig.request("x", prefills, decodes, 1).source)
    rig.until(lambda: receive.phase is Phase.FAILED, "a refusal")
    rig.check()
    assert isinstance(receive.error, IncompatiblePeerError)
    return receive.error.field


@pytest.mark.parametrize(
    ("spec", "decoded", "field"),
    [
        (kv("bfloat16"), kv("float16"), "spec.layers[0].k.dtype"),
        (kv("bfloat16"), kv("int8"), "spec.layers[0].k.dtype"),
        (kv(E4M3), kv(E5M2), "spec.layers[0].k.dtype"),
        (kv(E4M3), kv(E4M3, "layer"), "spec.layers[0].k.scales"),
        (kv(E4M3), kv(E4M3, "computed"), "spec.layers[0].k.scaled_by"),
        (kv("bfloat16"), CacheSpec.kv(LAYERS, HEADS, DIM + 1, E4M3), "spec.layers[0].k, elements of a unit"),
        (kv("bfloat16"), CacheSpec.kv(LAYERS, HEADS + 1, DIM, E4M3), "spec.layers[0].k.units"),
        (kv("bfloat16"), CacheSpec.kv(LAYERS, HEADS, DIM, E4M3, model=b"other"), "spec.model"),
        (
            CacheSpec.uniform(2, [Component("ssm", "float32", 2, 16, tokens_per_row=0, rows=3)]),
            CacheSpec.uniform(2, [Component("ssm", "float16", 2, 8, tokens_per_row=0, rows=3)]),
            "spec.layers[0].ssm.dtype",
        ),
        (
            CacheSpec.uniform(2, [Component("k", "bfloat16", 2, 16, format="tiled")]),
            CacheSpec.uniform(2, [Component("k", E4M3, 2, 8, format="tiled")]),
            "spec.layers[0].k.dtype",
        ),
    ],
)
def test_what_is_not_converted_is_refused_by_name(spec: CacheSpec, decoded: CacheSpec, field: str) -> None:
    assert refused(spec, decoded) == field


class Compiled(CpuKernels):
    """Kernels that have to be compiled, and say when they were."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.said: list[tuple[str, PagedMemory]] = []

    def warm(self, pool: MemoryPool) -> None:
        if self.error and isinstance(pool, ConvertedPool):
            raise OSError(self.error)
        self.said.append(("warm", pool))

    def warm_checksum(self, pool: MemoryPool) -> None:
        self.said.append(("warm_checksum", pool))

    def warm_copy(self, source: PagedMemory, target: PagedMemory) -> None:
        self.said.append(("warm_copy", source))

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        self.said.append(("gather", pool))
        super().gather(pool, moves, staging, after)

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> None:
        self.said.append(("copy", moves[0].source.pool))
        super().copy(moves, after, flags)


@pytest.mark.parametrize("path", ["staged", "mapped"])
def test_conversions_are_compiled_when_a_peer_is_connected(path: str) -> None:
    """No request waits for that; what is compiled for is what the requests of all peers with this cache read."""
    rig, kernels = Rig(kv("bfloat16"), decoded=kv(E4M3, "computed")), Compiled()
    prefills = rig.prefill(tp_shards(rig.spec, 1), strategy=path, kernels=kernels)
    decodes = rig.decode(tp_shards(rig.decode_spec, 2), strategy=path)
    rig.request("room", prefills, decodes, 9).start(9).landed()
    used, warmed = ("gather", "warm") if path == "staged" else ("copy", "warm_copy")
    own = [("warm", prefills[0].pool), ("warm_copy", prefills[0].pool)][: 1 if path == "staged" else 2]
    assert kernels.said[: len(own)] == own
    what, pools = zip(*kernels.said[len(own) :], strict=True)
    assert what[:2] == (warmed, warmed)
    assert set(what[2:]) == {used}
    assert isinstance(pools[0], ConvertedPool)
    assert all(pool is pools[0] for pool in pools)


@pytest.mark.parametrize("verify", ["sampled", "full"])
@pytest.mark.parametrize("path", ["staged", "mapped"])
def test_checksums_are_compiled_where_an_endpoint_wants_segments_compared(path: str, verify: Verify) -> None:
    """When it starts, for its own pool; when a peer is connected, for the cache that this peer reads."""
    rig, kernels, theirs = Rig(kv("bfloat16"), decoded=kv(E4M3, "computed")), Compiled(), Compiled()
    prefills = rig.prefill(tp_shards(rig.spec, 1), strategy=path, kernels=kernels, verify=verify)
    decodes = rig.decode(tp_shards(rig.decode_spec, 1), strategy=path, kernels=theirs, verify=verify)
    copies = [("warm_copy", prefills[0].pool)] if path == "mapped" else []
    assert kernels.said == [("warm", prefills[0].pool), *copies, ("warm_checksum", prefills[0].pool)]
    assert theirs.said == [("warm", decodes[0].pool), ("warm_checksum", decodes[0].pool)]
    rig.request("room", prefills, decodes, 9).start(9).landed()
    (what, pool), (then, same) = kernels.said[2 + len(copies) :][:2]
    assert (what, then) == ("warm" if path == "staged" else "warm_copy", "warm_checksum")
    assert isinstance(pool, ConvertedPool)
    assert same is pool


def test_nothing_more_is_compiled_for_a_peer_with_the_same_cache() -> None:
    rig, kernels = Rig(kv("bfloat16")), Compiled()
    prefills = rig.prefill(tp_shards(rig.spec, 1), strategy="staged", kernels=kernels)
    rig.request("room", prefills, rig.decode(tp_shards(rig.spec, 1), strategy="staged"), 9).start(9).landed()
    assert [what for what, _ in kernels.said].count("warm") == 1


def test_a_peer_for_which_the_kernels_cannot_be_compiled_is_refused_with_the_reason() -> None:
    """At once, and on both sides; no byte changes."""
    rig = Rig(kv("bfloat16"), decoded=kv(E4M3))
    prefills = rig.prefill(tp_shards(rig.spec, 1), strategy="staged", kernels=Compiled("no compiler"))
    request = rig.request("room", prefills, rig.decode(tp_shards(rig.decode_spec, 1), strategy="staged"), 9)
    request.open_decode().expect(None).open_prefill()
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the failure")
    assert "no compiler" in str(request.receives[0].error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs natively here: see tests/gpu")
@pytest.mark.parametrize("path", ["staged", "mapped"])
def test_kernels_of_gpus_convert_on_every_path(path: str) -> None:
    """Interpreted, from the first frame to the last sum."""
    spec, decoded = (CacheSpec({LayerId(0): of.layers[LayerId(0)]}) for of in (kv("bfloat16"), kv(E4M3, "computed")))
    rig = Rig(spec, decoded=decoded)
    prefills = rig.prefill(tp_shards(spec, 1), strategy=path, verify="full", kernels=KERNELS["triton"]())
    decodes = rig.decode(tp_shards(decoded, 2), memory=ODD, strategy=path)
    request = rig.request("room", prefills, decodes, 5).start(5).landed()
    assert request.sends[0].report.path == path
    rig.quiet()


def test_kernels_that_do_not_convert_are_refused_by_name() -> None:
    """A prefill of another version, or with kernels of its own, may lack what decode asks for."""
    assert refused(kv("bfloat16"), kv(E4M3), CountingKernels()) == "conversions"


class Fewer(CpuKernels):
    """Kernels of a version that knows one conversion."""

    conversions = ("bfloat16 to float8_e5m2",)


def test_a_conversion_that_prefills_version_lacks_is_refused_by_name() -> None:
    """What it has serves others: a decode of that dtype gets its rows."""
    assert refused(kv("bfloat16"), kv(E4M3), Fewer()) == "conversions"
    rig = Rig(kv("bfloat16"), decoded=kv(E5M2))
    prefills = rig.prefill(tp_shards(rig.spec, 1), kernels=Fewer())
    rig.request("room", prefills, rig.decode(tp_shards(rig.decode_spec, 1)), 5).start().landed()


class Forging(Over):
    """A channel whose ``Hello`` says other things of K than the endpoint's spec."""

    def __init__(self, said: dict[str, object], inner: Channel) -> None:
        super().__init__(inner)
        self._said, self._codec = said, Codec()

    def send(self, address: str, frame: bytes) -> bool:
        """Change what K is said to be."""
        given = self._codec.decode(frame)
        if isinstance(given, Hello):
            kinds = tuple((replace(k, **self._said), *others) for k, *others in given.spec.kinds)
            frame = self._codec.encode(replace(given, spec=replace(given.spec, kinds=kinds)))
        return super().send(address, frame)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"scales": (0.0,)}, "component 'k': scale 0 is 0.0"),
        ({"scales": (-1.0,)}, "component 'k': scale 0 is -1.0"),
        ({"scales": (nan,)}, "component 'k': scale 0 is nan"),
        ({"scales": (1.0, 1.0, inf, 1.0)}, "component 'k': scale 2 is inf"),
        ({"scales": (1.0, 1.0)}, "component 'k': 2 scales for 4 units"),
        ({"scales": (), "scaled_by": "k_scale"}, "scaled_by 'k_scale': there is no such component"),
        ({"scales": (), "scaled_by": "v"}, "scaled_by 'v' must be"),
        ({"scales": (1.0,), "scaled_by": "v"}, "one or the other"),
        ({"dtype": "bfloat16", "unit_bytes": 2 * DIM}, "bfloat16 has no scales"),
        ({"dtype": "float4"}, "unknown dtype 'float4'"),
    ],
)
def test_scales_that_cannot_be_are_refused_when_decode_says_hello(said: dict[str, object], words: str) -> None:
    """Decode's request ends with what is wrong, and no byte of any page is written."""
    spec, decoded = kv("bfloat16"), kv(E4M3, "layer")
    rig = Rig(spec, decoded=decoded)
    prefills = rig.prefill(tp_shards(spec, 1))
    decodes = rig.decode(tp_shards(decoded, 1), memory=Memory(channel=partial(Forging, said)))
    request = rig.request("room", prefills, decodes, 5)
    request.open_prefill().send(5).finish().open_decode().expect(None)
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "a refusal")
    error = request.receives[0].error
    assert isinstance(error, IncompatiblePeerError)
    assert error.field == "hello"
    assert words in str(error)
    rig.check()
