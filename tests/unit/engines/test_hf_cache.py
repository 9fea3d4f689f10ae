"""A model's cache goes into pages and comes out of them bit for bit, without the model's knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer, LinearAttentionLayer

from disagg_kv.engines.hf import PageAllocator, PagedHFCache, spec_from_config
from disagg_kv.errors import GeometryError, UnsupportedError
from disagg_kv.geometry import CacheSpec, Component, Group, PageTable, Plane, shard
from disagg_kv.ids import GroupId, LayerId
from disagg_kv.memory import Buffer, Layout, Mark, PagedPool
from tests.support.pools import adopted

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.15,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SLIDING: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "mlp_only_layers": [0, 1],
}
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
INDEX: dict[str, Any] = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
PROMPT = [7, 1, 33, 62, 5, 5, 18, 40, 2, 63, 11]


def llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Grouped-query attention: 2 layers, 2 KV heads."""
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    model: PreTrainedModel = made.to(dtype)
    return model


def models() -> list[tuple[str, type[PreTrainedModel], PreTrainedConfig]]:
    """One of each kind."""
    latent = DeepseekV3Config(**SIZES, **LATENT, num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=2)
    sparse = DeepseekV32Config(
        **SIZES, **LATENT, **INDEX, num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=2
    )
    return [
        ("llama", LlamaForCausalLM, LlamaConfig(**SIZES, **HEADS)),
        ("qwen3", Qwen3ForCausalLM, Qwen3Config(**SIZES, **HEADS)),
        ("deepseek_v3", DeepseekV3ForCausalLM, latent),
        ("sparse_index", DeepseekV32ForCausalLM, sparse),
        ("sliding", Qwen3ForCausalLM, Qwen3Config(**SIZES, **HEADS, **SLIDING)),
        ("gated_delta_net", Qwen3NextForCausalLM, Qwen3NextConfig(**SIZES, **HEADS, **DELTA)),
        ("mamba_beside_attention", FalconH1ForCausalLM, FalconH1Config(**SIZES, **HEADS, **MAMBA)),
    ]


def pool_for(model: PreTrainedModel, page_size: int = 4, layout: Layout = "NHD", fused: bool = False) -> PagedPool:
    """Eight pages of what the model caches."""
    spec = spec_from_config(model.config, str(model.dtype).removeprefix("torch."))
    return PagedPool.allocate(
        spec, shard(spec), pages=16, page_size=page_size, layout=layout, fused=fused, state_slots=3
    )


def run(model: PreTrainedModel, tokens: Sequence[int], cache: Cache) -> torch.Tensor:
    """Logits of the last token."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0, -1]


def kept(cache: Cache) -> list[list[torch.Tensor]]:
    """Keys, values and states per layer."""
    layers = []
    for layer in cache.layers:
        found: list[torch.Tensor | None] = []
        if isinstance(layer, DynamicLayer):
            found += [layer.keys, layer.values]
        if isinstance(layer, DynamicIndexedLayer):
            found.append(layer.indexer_keys)
        if isinstance(layer, LinearAttentionLayer):
            found += [layer.conv_states[0], layer.recurrent_states[0]]
        layers.append([one.clone() for one in found if one is not None])
        assert len(layers[-1]) == len(found) > 0
    return layers


def table_for(paged: PagedHFCache, rows: int) -> PageTable:
    """Pages in no order."""
    order = np.random.default_rng(0).permutation(paged.group.pages)
    return PageTable(paged.group.id, PageAllocator(order).take(paged.pages_for(rows)))


@pytest.mark.parametrize(("make", "config"), [m[1:] for m in models()], ids=[m[0] for m in models()])
def test_a_recorded_cache_is_loaded_bit_for_bit_and_generation_goes_on_from_it(
    make: type[PreTrainedModel], config: PreTrainedConfig
) -> None:
    """In chunks that are not whole pages, for keys and values of other dims, latents, windows, states.

    Generation goes on with the bits that the model's own cache gives, for several tokens, from another slot too.
    """
    torch.manual_seed(0)
    model: Any = make(config)
    paged = PagedHFCache(pool_for(model))
    table = table_for(paged, len(PROMPT))
    slot = None if paged.state_group is None else PageTable(paged.state_group.id, [2])
    own = paged.recording(table)
    run(model, PROMPT[:6], own)
    last = run(model, PROMPT[6:], own)
    if slot is not None:
        paged.write_states(own, slot)
    loaded = paged.load(table, len(PROMPT), slot)
    for ours, theirs in zip(kept(own), kept(loaded), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=7, do_sample=False, eos_token_id=None)
    tokens = [int(last.argmax())]
    for _ in range(6):
        tokens.append(int(run(model, tokens[-1:], loaded).argmax()))
    assert tokens == plain[0, len(PROMPT) :].tolist()


def test_a_layer_is_announced_when_its_rows_are_in_the_pages() -> None:
    """Once per layer and forward pass, in the model's order, without a line in the model."""
    model = llama(torch.bfloat16)
    paged = PagedHFCache(pool_for(model))
    table = table_for(paged, len(PROMPT))
    own = paged.recording(table)
    seen: list[int] = []

    def ready(layer: LayerId, mark: Mark | None) -> None:
        assert mark is None
        keys, _ = paged.read(layer, table, 0, len(PROMPT))
        assert keys.any()
        seen.append(layer)

    own.layer_ready = ready
    run(model, PROMPT, own)
    assert seen == list(range(model.config.num_hidden_layers))


def test_layers_are_announced_until_the_answer_is_that_none_matters() -> None:
    """What is not asked for costs nothing."""
    model = llama(torch.bfloat16)
    paged = PagedHFCache(pool_for(model))
    own = paged.recording(table_for(paged, len(PROMPT)))
    seen: list[int] = []

    def ready(layer: LayerId, mark: Mark | None) -> bool:
        seen.append(layer)
        return False

    own.layer_ready = ready
    run(model, PROMPT, own)
    assert seen == [0]
    assert own.layer_ready is None


def indexed() -> tuple[Any, PagedPool, PagedHFCache, PageTable]:
    """A model whose layers keep an index beside their rows, and pages for a prompt."""
    torch.manual_seed(0)
    _, make, config = next(m for m in models() if m[0] == "sparse_index")
    model = make(config)
    pool = pool_for(model)
    paged = PagedHFCache(pool)
    return model, pool, paged, table_for(paged, len(PROMPT))


def test_a_layer_with_an_index_is_announced_when_both_are_in_the_pages() -> None:
    """A model asks for the two apart, and nothing may leave between."""
    model, pool, paged, table = indexed()
    own = paged.recording(table)
    seen: list[int] = []

    def ready(layer: LayerId, mark: Mark | None) -> None:
        assert mark is None
        keys, _ = paged.read(layer, table, 0, len(PROMPT))
        index = next(n for n, p in enumerate(pool.site.planes) if (p.layer, p.component) == (layer, "index"))
        assert keys.any()
        assert pool.view(index).any()
        seen.append(layer)

    own.layer_ready = ready
    for tokens in (PROMPT[:6], PROMPT[6:]):
        run(model, tokens, own)
    assert seen == [0, 1] * 2
    where = paged.places(table, 0, 1)
    with pytest.raises(GeometryError, match="layer 0 has no index"):
        PagedHFCache(pool_for(llama())).write_index_at(where, 0, torch.zeros(1, 1, 16))
    with pytest.raises(GeometryError, match=r"layer 1, 'index': the model caches .*shard has"):
        paged.write_index_at(where, 1, torch.zeros(1, 1, 15))


@pytest.mark.parametrize("anew", [True, False])
def test_a_pass_that_raises_between_rows_and_index_leaves_nothing_to_the_next(anew: bool) -> None:
    """Whether the engine begins anew or takes back the half, no layer is final before both are in the pages."""
    model, pool, paged, table = indexed()
    own = paged.recording(table)
    if not anew:
        run(model, PROMPT[:6], own)

    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    hook = model.model.layers[1].self_attn.indexer.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="no memory"):
        run(model, PROMPT[6:], own)
    hook.remove()
    for layer in own.layers:
        if anew:
            layer.reset()
        else:
            assert isinstance(layer, DynamicIndexedLayer)
            layer.keys, layer.values = (of[:, :, :6] for of in (layer.keys, layer.values) if of is not None)
            assert layer.indexer_keys is not None
            layer.indexer_keys = layer.indexer_keys[:, :6]
    seen: list[int] = []
    for number in range(len(pool.site.planes)):
        pool.view(number)[:] = 0

    def ready(layer: LayerId, mark: Mark | None) -> None:
        assert mark is None
        for number, plane in enumerate(pool.site.planes):
            if plane.layer == layer:
                assert pool.view(number).any(), plane.component
        seen.append(layer)

    own.layer_ready = ready
    run(model, PROMPT if anew else PROMPT[6:], own)
    assert seen == [0, 1]


def test_what_comes_after_a_reset_goes_where_the_table_says_now() -> None:
    """An engine may write other pages into its own table before it begins anew."""
    pool = pool_for(llama())
    for number in range(len(pool.site.planes)):
        pool.view(number)[:] = 0
    pages = np.array([0], np.int32)
    own = PagedHFCache(pool).recording(PageTable(GroupId("kv"), pages))
    unit = pool.site.spec.component(pool.site.planes[0].layer, pool.site.planes[0].component)
    rows = torch.ones(1, unit.units, 2, unit.unit_bytes // 4)
    own.update(rows, rows, 0)
    own.reset()
    pages[0] = 1
    own.update(rows, rows, 0)
    assert pool.view(0)[1].any()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_hold_what_the_model_caches_in_every_layout(page_size: int, layout: Layout, fused: bool) -> None:
    """Cell by cell, read from the pool's own view; cells of other rows stay as they were."""
    model = llama(torch.bfloat16)
    pool = pool_for(model, page_size, layout, fused)
    paged = PagedHFCache(pool)
    table = table_for(paged, len(PROMPT))
    own = paged.recording(table)
    run(model, PROMPT, own)
    for number, plane in enumerate(pool.site.planes):
        cells = pool.view(number).copy()
        cached = kept(own)[plane.layer]["kv".index(plane.component)]
        for row in range(len(PROMPT)):
            cell = cells[table.pages[row // page_size], row % page_size]
            assert cell.tobytes() == cached[0, :, row].contiguous().view(torch.uint8).numpy().tobytes()
            cell[:] = 0
        assert not cells.any()


def test_a_rank_that_caches_other_heads_than_its_shard_is_refused_before_anything_is_written() -> None:
    """A model without a tensor-parallel plan keeps all heads on every rank; that must not go unnoticed."""
    model = llama()
    spec = spec_from_config(model.config, "float32")
    pool = PagedPool.allocate(spec, shard(spec, tp=2, rank=1), pages=4, page_size=4)
    paged = PagedHFCache(pool)
    table = table_for(paged, 4)
    message = r"layer 0, 'k': the model caches torch.float32 \(1, 2, 4, 8\), this rank's shard has .*\(1, 1, 4, 8\)"
    with pytest.raises(GeometryError, match=message):
        run(model, PROMPT[:4], paged.recording(table))
    assert not any(pool.view(i).any() for i in range(len(pool.site.planes)))


def test_values_of_another_shape_are_refused_before_the_keys_are_written() -> None:
    """Both or none."""
    pool = pool_for(llama())
    paged = PagedHFCache(pool)
    with pytest.raises(GeometryError, match="layer 1, 'v'"):
        paged.write(1, table_for(paged, 4), 0, torch.ones(1, 2, 4, 8), torch.ones(1, 2, 3, 8))
    with pytest.raises(GeometryError, match="layer 1, 'k'"):
        paged.write(1, table_for(paged, 4), 0, torch.ones(2, 2, 4, 8), torch.ones(2, 2, 4, 8))
    with pytest.raises(GeometryError, match=r"torch.float64"):
        paged.write(1, table_for(paged, 4), 0, torch.ones(1, 2, 4, 8).double(), torch.ones(1, 2, 4, 8).double())
    assert not any(pool.view(i).any() for i in range(len(pool.site.planes)))


def test_rows_beyond_the_table_are_refused() -> None:
    """With the numbers."""
    model = llama()
    paged = PagedHFCache(pool_for(model))
    table = table_for(paged, 8)
    with pytest.raises(GeometryError, match="rows up to 11, but 2 pages end at 8"):
        run(model, PROMPT, paged.recording(table))
    with pytest.raises(GeometryError, match="rows up to 9, but 2 pages end at 8"):
        paged.load(table, 9)


def test_a_table_may_begin_behind_a_held_prefix() -> None:
    """Rows are the room's, not the table's."""
    paged = PagedHFCache(pool_for(llama()))
    whole = table_for(paged, 12)
    tail = PageTable(whole.group, whole.pages[1:], first=4)
    keys, values = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    paged.write(0, tail, 5, keys, values)
    found = paged.read(0, whole, 5, 12)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


def test_a_pool_of_one_stage_counts_its_own_layers() -> None:
    """A model that consists of a stage's layers numbers them from 0."""
    spec = CacheSpec.kv(2, 2, 8, "float32")
    paged = PagedHFCache(PagedPool.allocate(spec, shard(spec, layers=[LayerId(1)]), pages=4, page_size=4))
    keys, values = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    paged.write(0, table_for(paged, 4), 0, keys, values)
    assert torch.equal(paged.read(0, table_for(paged, 4), 0, 4)[0], keys)
    with pytest.raises(GeometryError, match="layer 1, 'k'"):
        paged.write(0, table_for(paged, 4), 0, keys.double(), values)


def test_states_that_are_not_there_or_of_another_size_are_refused() -> None:
    """With the layer's name; nothing is written, and generation never goes on without them."""
    _, make, config = models()[-2]
    model = make(config)
    pool = pool_for(model)
    paged = PagedHFCache(pool)
    assert paged.state_group is not None
    table, slot = table_for(paged, len(PROMPT)), PageTable(paged.state_group.id, [1])
    own = paged.recording(table)
    with pytest.raises(GeometryError, match="layer 0: the model has no states of it yet"):
        paged.write_states(own, slot)
    run(model, PROMPT, own)
    layer = own.layers[0]
    assert isinstance(layer, LinearAttentionLayer)
    conv = layer.conv_states[0]
    assert conv is not None
    layer.conv_states[0] = conv[:, 1:]
    with pytest.raises(GeometryError, match=r"layer 0, 'conv.q': the model caches .*47, 4.*shard has .*48, 4"):
        paged.write_states(own, slot)
    states = [i for i, p in enumerate(pool.site.planes) if p.group == slot.group]
    assert not any(pool.view(i).any() for i in states)
    with pytest.raises(GeometryError, match="layer 0 keeps states, but no slot was given"):
        paged.load(table, len(PROMPT))


def test_a_pool_that_is_not_as_a_model_keeps_it_is_refused() -> None:
    """Missing components, a state alone, two groups of tokens."""
    mla = CacheSpec.mla(1, 16, "float32")
    one = PagedPool.allocate(mla, shard(mla), pages=1, page_size=1)
    with pytest.raises(UnsupportedError, match=r"layer 0 holds \('latent',\)"):
        PagedHFCache(one)
    states = CacheSpec.uniform(1, [Component("ssm", "float32", 2, 8, tokens_per_row=0, rows=1)])
    alone = PagedPool.allocate(states, shard(states), pages=1, page_size=1, state_slots=1)
    with pytest.raises(UnsupportedError, match=r"a pool of groups \['state'\]"):
        PagedHFCache(alone)


def test_memory_whose_strides_do_not_suit_the_dtype_is_refused() -> None:
    """An engine's own memory can be laid out so that no tensor of the dtype describes it."""
    spec = CacheSpec.kv(1, 1, 8, "float32")
    memory = np.zeros(256, np.uint8)
    group = Group(GroupId("kv"), 1, 2)
    planes = [Plane(LayerId(0), name, group.id, 0, at, 66, 66, 33) for name, at in (("k", 0), ("v", 132))]
    buffer = Buffer(memory.ctypes.data, memory.nbytes, "cpu", memory)
    pool = adopted(spec, shard(spec), [group], planes, [buffer])
    with pytest.raises(GeometryError, match=r"layer 0, 'k': strides \(66, 66, 33\) do not align float32"):
        PagedHFCache(pool)


def test_pages_of_a_pass_are_looked_up_once_for_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each look-up is a copy to it, which a hook must not add to every layer."""
    model = llama()
    paged = PagedHFCache(pool_for(model))
    own = paged.recording(table_for(paged, len(PROMPT)))
    asked: list[tuple[int, int]] = []
    places = paged.places

    def counted(table: PageTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((start, stop))
        return places(table, start, stop)

    monkeypatch.setattr(paged, "places", counted)
    run(model, PROMPT[:6], own)
    run(model, PROMPT[6:], own)
    assert asked == [(0, 6), (6, len(PROMPT))]


def test_rows_of_another_dtype_are_read_in_the_models() -> None:
    """As after a conversion: 0x38 is 1.0 in float8_e4m3fn."""
    spec = CacheSpec.kv(1, 2, 4, "float8_e4m3fn")
    pool = PagedPool.allocate(spec, shard(spec), pages=2, page_size=4)
    for number in range(2):
        pool.view(number)[:] = 0x38
    table = PageTable(pool.site.groups[0].id, [1])
    for given in PagedHFCache(pool, dtype="float32").read(0, table, 0, 3):
        assert torch.equal(given, torch.ones(1, 2, 3, 4))
    assert PagedHFCache(pool).read(0, table, 0, 3)[0].dtype is torch.float8_e4m3fn
    with pytest.raises(GeometryError, match="unknown dtype"):
        PagedHFCache(pool, dtype="float4")


def test_a_model_reads_the_rows_that_its_pages_keep_in_another_dtype() -> None:
    """450 saturates to 448 as the specification says, and the model attends to what the pages hold."""
    spec = CacheSpec.kv(1, 2, 4, "float8_e4m3fn")
    pool = PagedPool.allocate(spec, shard(spec), pages=2, page_size=4)
    paged = PagedHFCache(pool, dtype="float32")
    table = PageTable(pool.site.groups[0].id, [1])
    keys, values = torch.full((1, 2, 3, 4), 450.0), torch.full((1, 2, 3, 4), 0.3)
    for given in (paged.recording(table).update(keys, values, 0), paged.read(0, table, 0, 3)):
        assert torch.equal(given[0], torch.full((1, 2, 3, 4), 448.0))
        assert torch.equal(given[1], torch.full((1, 2, 3, 4), 0.3125))
    with pytest.raises(GeometryError, match=r"the model caches torch\.float16"):
        paged.write(0, table, 0, keys.half(), values.half())


def test_index_keys_are_kept_in_the_dtype_of_the_pages() -> None:
    _, make, config = next(m for m in models() if m[0] == "sparse_index")
    model, spec = make(config), spec_from_config(config, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=4)
    paged = PagedHFCache(pool, dtype="float32")
    table = PageTable(paged.group.id, [2, 0, 3])
    own = paged.recording(table)
    run(model, PROMPT, own)
    for mine, read in zip(kept(own), kept(paged.load(table, len(PROMPT))), strict=True):
        assert len(mine) == 3
        for one, other in zip(mine, read, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, one.bfloat16().float())
