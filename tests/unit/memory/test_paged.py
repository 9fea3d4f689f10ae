"""Where a pool's planes lie, and what a pool refuses."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import cast

import numpy as np
import pytest
import torch

from disagg_kv.errors import CapacityError, ConfigurationError, GeometryError, RegistrationError
from disagg_kv.geometry import CacheSpec, Component, Group, Plane, Shard, Site, shard
from disagg_kv.ids import GroupId, LayerId
from disagg_kv.memory import Buffer, Layout, PagedPool, bytes_of
from tests.support.pools import KV, adopted, buffer_over, noise

GQA = CacheSpec.kv(2, 4, 8, "bfloat16", v_head_dim=5, v_dtype="float32")
LAYERS = (LayerId(0), LayerId(1))


def _tensors(
    pages: int = 3, page_size: int = 4, heads: int = 4, layout: Layout = "NHD"
) -> dict[LayerId, dict[str, torch.Tensor]]:
    rows, units = (page_size, heads) if layout == "NHD" else (heads, page_size)
    return {
        layer: {
            "k": torch.zeros(pages, rows, units, 8, dtype=torch.bfloat16),
            "v": torch.zeros(pages, rows, units, 5, dtype=torch.float32),
        }
        for layer in LAYERS
    }


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_own_memory_is_one_buffer_in_which_every_cell_has_its_own_bytes(layout: Layout, fused: bool) -> None:
    """Each plane is filled with its number; what is left over is only alignment."""
    pool = PagedPool.allocate(GQA, shard(GQA), pages=5, page_size=3, layout=layout, fused=fused)
    assert len(pool.buffers) == 1
    for number in range(4):
        pool.view(number)[...] = number + 1
    for number, dim_bytes in enumerate((16, 20, 16, 20)):
        assert pool.view(number).shape == (5, 3, 4, dim_bytes)
        assert (pool.view(number) == number + 1).all()
    assert int((bytes_of(pool.buffers[0]) == 0).sum()) < 4 * 256
    assert pool.buffers[0].addr % 256 == 0


@pytest.mark.parametrize(("layout", "strides"), [("NHD", (64, 16)), ("HND", (16, 48))])
def test_a_page_is_packed_in_the_order_of_the_layout(layout: Layout, strides: tuple[int, int]) -> None:
    pool = PagedPool.allocate(GQA, shard(GQA), pages=5, page_size=3, layout=layout)
    k, v = pool.site.planes[:2]
    assert (k.offset, k.page_stride, k.row_stride, k.unit_stride) == (0, 192, *strides)
    assert (v.offset, v.page_stride) == (1024, 240)


def test_a_fused_page_holds_all_of_k_then_all_of_v() -> None:
    pool = PagedPool.allocate(GQA, shard(GQA), pages=5, page_size=3, fused=True)
    k, v = pool.site.planes[:2]
    assert (k.offset, v.offset) == (0, 192)
    assert k.page_stride == v.page_stride == 192 + 240


def test_elements_of_a_fused_page_are_aligned_whatever_lies_before_them() -> None:
    spec = CacheSpec.kv(1, 1, 3, "int8", v_dtype="float32")
    k, v = PagedPool.allocate(spec, shard(spec), pages=2, page_size=1, fused=True).site.planes
    assert (k.offset, v.offset, v.page_stride) == (0, 4, 16)


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_has_planes_only_for_what_its_shard_holds(fused: bool) -> None:
    """Layers of one pipeline stage, heads of one tensor-parallel rank, one component of two."""
    k_only = Shard(tuple(h for h in shard(GQA, tp=2, rank=1, layers=LAYERS[1:]) if h.component == "k"))
    pool = PagedPool.allocate(GQA, k_only, pages=5, page_size=3, fused=fused)
    assert [(p.layer, p.component) for p in pool.site.planes] == [(1, "k")]
    assert pool.view(0).shape == (5, 3, 2, 16)


def test_a_latent_is_a_plane_of_one_unit() -> None:
    spec = CacheSpec.mla(1, 72, "bfloat16")
    assert PagedPool.allocate(spec, shard(spec, tp=4, rank=3), pages=2, page_size=4).view(0).shape == (2, 4, 1, 144)


def test_an_allocator_gives_the_memory_and_may_give_more() -> None:
    asked: list[int] = []
    memory = noise(1 << 16, 1)

    def give(nbytes: int) -> Buffer:
        asked.append(nbytes)
        return buffer_over(memory)

    pool = PagedPool.allocate(GQA, shard(GQA), pages=5, page_size=3, allocator=give)
    assert pool.site.buffers == (1 << 16,)
    assert len(asked) == 1
    pool.view(0)[0, 0, 0, 0] ^= 255
    assert memory[0] == noise(1, 1)[0] ^ 255
    with pytest.raises(GeometryError, match="gave 65536 bytes of"):
        PagedPool.allocate(GQA, shard(GQA), pages=5000, page_size=3, allocator=give)


def test_memory_that_is_not_there_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match=r"no \d+ bytes"):
        PagedPool.allocate(GQA, shard(GQA), pages=1 << 48, page_size=64)


def test_a_device_of_torch_gives_the_memory_if_it_is_there() -> None:
    pool = PagedPool.allocate(GQA, shard(GQA), pages=2, page_size=3, device="cpu:0")
    assert pool.buffers[0].device == "cpu"
    with pytest.raises(ConfigurationError, match="on device 'nonsense'"):
        PagedPool.allocate(GQA, shard(GQA), pages=2, page_size=3, device="nonsense")


def test_memory_is_pinned_only_where_the_pool_allocates_it_on_the_host() -> None:
    """Refused before anything is allocated."""

    def never(nbytes: int) -> Buffer:
        raise AssertionError

    with pytest.raises(ConfigurationError, match="pinned is for memory on 'cpu' that the pool allocates"):
        PagedPool.allocate(GQA, shard(GQA), pages=2, page_size=3, allocator=never, pinned=True)
    with pytest.raises(ConfigurationError, match="pinned is for memory on 'cpu' that the pool allocates"):
        PagedPool.allocate(GQA, shard(GQA), pages=2, page_size=3, device="cuda", pinned=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned for a GPU")
def test_without_a_gpu_no_memory_is_pinned() -> None:
    """The error says what was asked for."""
    with pytest.raises(ConfigurationError, match=r"no pool of \d+ bytes on device 'cpu' \(pinned\)"):
        PagedPool.allocate(GQA, shard(GQA), pages=2, page_size=3, pinned=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_adopted_tensors_are_used_in_place(layout: Layout) -> None:
    """Writing through the pool is writing the tensor."""
    tensors = _tensors(layout=layout)
    pool = PagedPool.from_tensors(GQA, shard(GQA), tensors, layout=layout)
    assert len(pool.buffers) == 4
    for number, (layer, name) in enumerate(itertools.product(LAYERS, ("k", "v"))):
        dtype, dim = (torch.bfloat16, 8) if name == "k" else (torch.float32, 5)
        pool.view(number)[2, 1, 3] = torch.full((dim,), number + 1, dtype=dtype).view(torch.uint8).numpy()
        expected = torch.zeros_like(tensors[layer][name])
        expected[(2, 1, 3) if layout == "NHD" else (2, 3, 1)] = number + 1
        assert torch.equal(tensors[layer][name], expected)


def test_tensors_of_one_storage_are_one_buffer_whatever_their_strides() -> None:
    """The shape of vLLM's caches: K and V in one tensor, here behind an odd number of elements."""
    whole = torch.zeros(7 + 3 * 2 * 4 * 4 * 8, dtype=torch.bfloat16)
    both = whole[7:].view(3, 2, 4, 4, 8)
    spec = CacheSpec.kv(1, 4, 8, "bfloat16")
    pool = PagedPool.from_tensors(spec, shard(spec), {LayerId(0): {"k": both[:, 0], "v": both[:, 1]}})
    assert pool.site.buffers == (whole.nbytes,)
    assert [(p.buffer, p.offset, p.page_stride) for p in pool.site.planes] == [(0, 14, 512), (0, 14 + 256, 512)]
    pool.view(1)[2, 3, 3] = 1
    assert int((whole.view(torch.uint8) == 1).sum()) == 16
    assert int((both[2, 1, 3, 3].view(torch.uint8) == 1).sum()) == 16


def test_a_pool_keeps_the_memory_of_its_tensors_alive() -> None:
    spec = CacheSpec.kv(1, 4, 1 << 20, "float32")
    pool = PagedPool.from_tensors(
        spec, shard(spec), {LayerId(0): {n: torch.full((1, 1, 4, 1 << 20), 1.0) for n in ("k", "v")}}
    )
    view = pool.view(1)
    del pool
    assert (view.reshape(-1).view(np.float32) == 1.0).all()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("k", torch.zeros(3, 4, 4, 8), "layer 1, 'k': a tensor of float32, but the spec says bfloat16"),
        (
            "v",
            torch.zeros(3, 4, 3, 5),
            r"layer 1, 'v': a tensor of shape \(3, 4, 3, 5\); needed are 4 units on axis 2.* HND would fit",
        ),
        ("v", torch.zeros(3, 4, 4, 6), r"shape \(3, 4, 4, 6\); needed .* 5 elements on axis 3$"),
        ("v", torch.zeros(3, 4, 4), r"shape \(3, 4, 4\); needed are"),
        ("v", torch.zeros(3, 4, 5, 4).transpose(2, 3), "elements of a unit are 4 apart"),
        ("v", torch.zeros(3, 2, 4, 5), r"of \(pages, page_size\) \[\(3, 2\), \(3, 4\)\]"),
        ("v", torch.zeros(2, 4, 4, 5), r"of \(pages, page_size\) \[\(2, 4\), \(3, 4\)\]"),
        ("v", torch.zeros(1, 4, 4, 5).expand(3, 4, 4, 5), "strides must be positive"),
        ("v", torch.zeros(3, 4, 4, 5, device="meta"), "at address 0"),
        ("w", torch.zeros(3, 4, 4, 5), r"layer 1 has no component 'w'; it has \['k', 'v'\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_with_names_and_numbers(
    name: str, tensor: torch.Tensor, message: str
) -> None:
    tensors = _tensors()
    tensors[LayerId(1)][name] = tensor
    with pytest.raises(GeometryError, match=message):
        PagedPool.from_tensors(GQA, shard(GQA), tensors)


def test_tensors_must_be_the_shards() -> None:
    tensors = _tensors()
    del tensors[LayerId(1)]["v"]
    with pytest.raises(GeometryError, match=r"\(1, 'v'\).* do not match the shard"):
        PagedPool.from_tensors(GQA, shard(GQA), tensors)
    with pytest.raises(GeometryError, match="no tensors are given"):
        PagedPool.from_tensors(GQA, shard(GQA), {})


HYBRID = CacheSpec.uniform(2, [*GQA.layers[LayerId(0)], Component("ssm", "float32", 2, 32, tokens_per_row=0, rows=3)])


def test_states_of_an_engine_s_tensors_are_adopted_in_place() -> None:
    """Slots for pages, the state's own rows; both groups by their names, and nothing is copied."""
    tensors = _tensors()
    for layer in LAYERS:
        tensors[layer]["ssm"] = torch.zeros(5, 3, 2, 8)
    pool = PagedPool.from_tensors(HYBRID, shard(HYBRID), tensors)
    assert [(g.id, g.rows_per_page, g.pages) for g in pool.site.groups] == [("kv", 4, 3), ("state", 3, 5)]
    number = next(i for i, p in enumerate(pool.site.planes) if (p.layer, p.component) == (1, "ssm"))
    assert pool.view(number).shape == (5, 3, 2, 32)
    pool.view(number)[4, 2, 1] = 1
    assert tensors[LayerId(1)]["ssm"][4, 2, 1].view(torch.uint8).eq(1).all()
    tensors[LayerId(0)]["ssm"] = torch.zeros(5, 2, 2, 8)
    with pytest.raises(
        GeometryError, match=r"layer 0, 'ssm': a tensor of shape \(5, 2, 2, 8\), but the state has 3 rows"
    ):
        PagedPool.from_tensors(HYBRID, shard(HYBRID), tensors)


def test_an_engine_s_tensors_may_have_a_page_space_for_each_layer() -> None:
    """With sizes of their own and a null page in each; a layer without a space is refused by name."""
    tensors = {LayerId(0): _tensors()[LayerId(0)], LayerId(1): _tensors(5, 2)[LayerId(1)]}
    for layer in LAYERS:
        tensors[layer]["ssm"] = torch.zeros(5, 3, 2, 8)
    names = {LayerId(0): GroupId("full"), LayerId(1): GroupId("slide")}
    pool = PagedPool.from_tensors(HYBRID, shard(HYBRID), tensors, group=names, null_page=0)
    assert set(pool.site.groups) == {
        Group(GroupId("full"), 4, 3, 0),
        Group(GroupId("slide"), 2, 5, 0),
        Group(GroupId("state"), 3, 5, 0),
    }
    spaces = {(plane.layer, plane.component): plane.group for plane in pool.site.planes}
    assert [spaces[LayerId(1), name] for name in ("k", "v", "ssm")] == ["slide", "slide", "state"]
    pool = PagedPool.from_tensors(HYBRID, shard(HYBRID), tensors, group=names, state_group={0: "one", 1: "other"})
    assert pool.site.state_groups == {"one", "other"}
    del names[LayerId(1)]
    with pytest.raises(GeometryError, match=r"group: layer 1 has no name; those of \[0\] are given"):
        PagedPool.from_tensors(HYBRID, shard(HYBRID), tensors, group=names)
    with pytest.raises(ConfigurationError, match="group: name"):
        PagedPool.from_tensors(HYBRID, shard(HYBRID), tensors, group=cast("dict[LayerId, GroupId]", {0: 7}))


@pytest.mark.parametrize("fused", [False, True])
def test_a_pool_of_its_own_has_slots_beside_pages(fused: bool) -> None:
    """As many as it is told; a cache with states and no slots is refused."""
    pool = PagedPool.allocate(HYBRID, shard(HYBRID, tp=2), pages=3, page_size=4, state_slots=5, fused=fused)
    assert [(g.id, g.rows_per_page, g.pages) for g in pool.site.groups] == [("kv", 4, 3), ("state", 3, 5)]
    assert [pool.view(i).shape[:3] for i in range(3)] == [(3, 4, 2), (3, 4, 2), (5, 3, 1)]
    with pytest.raises(GeometryError, match="group 'state': 0 pages of 3 rows"):
        PagedPool.allocate(HYBRID, shard(HYBRID), pages=3, page_size=4, fused=fused)


def test_an_unknown_layout_is_refused() -> None:
    wrong = cast("Layout", "DHN")
    with pytest.raises(GeometryError, match="'DHN'; known: HND, NHD"):
        PagedPool.allocate(GQA, shard(GQA), pages=1, page_size=1, layout=wrong)
    with pytest.raises(GeometryError, match="'DHN'; known: HND, NHD"):
        PagedPool.from_tensors(GQA, shard(GQA), _tensors(), layout=wrong)


def test_raw_pointers_are_adopted_in_place_and_checked_first() -> None:
    spec = CacheSpec.mla(1, 4, "float16")
    memory = noise(64, 3)
    plane = Plane(LayerId(0), "latent", KV, 0, 3, 16, 8, 8)
    groups = [Group(KV, 2, 3)]
    pool = adopted(spec, shard(spec), groups, [plane], [buffer_over(memory)])
    assert np.array_equal(pool.view(0)[2, 1, 0], memory[3 + 40 : 3 + 48])
    with pytest.raises(GeometryError, match="ends at byte 51 of a buffer of 50"):
        adopted(spec, shard(spec), groups, [plane], [Buffer(memory.ctypes.data, 50)])


def test_buffers_must_be_those_of_the_site_and_on_one_device() -> None:
    spec = CacheSpec.mla(1, 4, "float16")
    memory = noise(64, 3)
    plane = Plane(LayerId(0), "latent", KV, 0, 0, 16, 8, 8)
    site = Site(spec, shard(spec), (Group(KV, 2, 3),), (plane,), (64,))
    with pytest.raises(GeometryError, match=r"of \[63\] bytes, but the site says \(64,\)"):
        PagedPool(site, [Buffer(memory.ctypes.data, 63)])
    two = [buffer_over(memory), Buffer(1 << 20, 64, "cuda:0")]
    with pytest.raises(GeometryError, match=r"\['cpu', 'cuda:0'\]"):
        adopted(spec, shard(spec), site.groups, [plane], two)


def test_memory_of_another_device_is_not_read_by_the_cpu() -> None:
    with pytest.raises(RegistrationError, match="64 bytes of a buffer on 'cuda:0'"):
        bytes_of(Buffer(1 << 20, 64, "cuda:0"))


def test_aux_rows_are_apart_from_each_other_and_from_the_pages() -> None:
    spec = CacheSpec.mla(1, 4, "float16")
    pool = PagedPool.allocate(spec, shard(spec), pages=1, page_size=2, aux_slots=3, aux_bytes=4)
    pool.write_aux(1, b"abcd")
    pool.write_aux(2, b"xyz!")
    pool.write_aux(2, b"z")
    assert [pool.read_aux(i) for i in range(3)] == [bytes(4), b"abcd", b"z\0\0\0"]
    assert pool.aux_bytes == 4
    assert not pool.view(0).any()


def test_aux_slots_and_lengths_are_checked() -> None:
    spec = CacheSpec.mla(1, 4, "float16")
    pool = PagedPool.allocate(spec, shard(spec), pages=1, page_size=2, aux_slots=3, aux_bytes=4)
    for slot in (-1, 3):
        with pytest.raises(GeometryError, match=f"aux slot {slot}: the pool has 3"):
            pool.read_aux(slot)
        with pytest.raises(GeometryError, match=f"aux slot {slot}: the pool has 3"):
            pool.write_aux(slot, b"")
    with pytest.raises(GeometryError, match="aux slot 0: 5 bytes for a row of 4"):
        pool.write_aux(0, b"12345")
    none = PagedPool.allocate(spec, shard(spec), pages=1, page_size=2)
    assert none.aux_bytes == 0
    with pytest.raises(GeometryError, match="aux slot 0: the pool has 0"):
        none.read_aux(0)
    for slots, nbytes in ((1, 0), (0, 1), (-1, 4), (1, -4)):
        with pytest.raises(GeometryError, match=f"{slots} aux slots of {nbytes} bytes"):
            PagedPool.allocate(spec, shard(spec), pages=1, page_size=2, aux_slots=slots, aux_bytes=nbytes)


def test_two_page_spaces_can_share_a_pool() -> None:
    """Layers whose pages are numbered apart, as raw pointers."""
    spec = CacheSpec.mla(2, 4, "float16")
    memory = noise(200, 3)
    groups = [Group(GroupId("a"), 2, 3), Group(GroupId("b"), 5, 2)]
    planes = [
        Plane(LayerId(0), "latent", GroupId("a"), 0, 0, 16, 8, 8),
        Plane(LayerId(1), "latent", GroupId("b"), 0, 48, 40, 8, 8),
    ]
    pool = adopted(spec, shard(spec), groups, planes, [buffer_over(memory)])
    assert [pool.view(i).shape for i in range(2)] == [(3, 2, 1, 8), (2, 5, 1, 8)]


def test_pools_over_raw_memory_do_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from disagg_kv.geometry import CacheSpec, shard\n"
        "from disagg_kv.memory import PagedPool\n"
        "spec = CacheSpec.mla(1, 4, 'float16')\n"
        "own = PagedPool.allocate(spec, shard(spec), pages=1, page_size=2)\n"
        "PagedPool(own.site, own.buffers).view(0)[...] = 1\n"
        "assert own.view(0).all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
