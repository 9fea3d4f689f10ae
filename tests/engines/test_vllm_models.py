"""Models whose caches are not one group of full attention: instances serve them, or refuse them by name at start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from .instances import ON_GPUS, PREFILL, Instance, nixl, transfer

pytestmark = pytest.mark.timeout(900)

COUNT = 12
WINDOW = 64
LENGTHS = (33, 64, 65, 95, 96, 150, 191, 400)
"""Shorter and longer than the window."""

OUTRUN = {95, 96, 191}
"""Lengths of which decode computes the whole prompt: vLLM has freed a block of 32 tokens that decode would need."""

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 2048, "initializer_range": 0.15, "tie_word_embeddings": False,
}  # fmt: skip


def gemma() -> Any:
    """Two groups of sliding layers and one of full attention, in the same bytes."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **SIZES, num_hidden_layers=6, layer_types=kinds, sliding_window=WINDOW, query_pre_attn_scalar=32
    )
    return Gemma3ForCausalLM(config)


def mistral() -> Any:
    """Sliding layers alone."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, num_hidden_layers=4, sliding_window=WINDOW))


def deepseek() -> Any:
    """MLA; vLLM's kernels for CPUs have latents of 512 and 64 elements only, those for GPUs heads of 128."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    head = 128 if ON_GPUS else 32

    latent: dict[str, Any] = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": head,
        "v_head_dim": head,
        "q_lora_rank": 64,
    }
    experts: dict[str, Any] = {
        "first_k_dense_replace": 3, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }  # fmt: skip
    sizes: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4}
    del sizes["head_dim"]
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **latent, **experts, num_hidden_layers=3))


def qwen_next() -> Any:
    """Gated delta nets beside full attention; vLLM's kernels for CPUs have heads of 128 elements, and bfloat16 only."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear: dict[str, Any] = {
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }  # fmt: skip
    experts: dict[str, Any] = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    }  # fmt: skip
    kinds = ["linear_attention", "full_attention"] * 2
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **linear, **experts, num_hidden_layers=4, layer_types=kinds))


def falcon() -> Any:
    """Attention and Mamba in every layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    mamba: dict[str, Any] = {
        "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    }  # fmt: skip
    sizes: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
    return FalconH1ForCausalLM(FalconH1Config(**sizes, **mamba, num_hidden_layers=2))


MODELS: Mapping[str, Callable[[], Any]] = {
    "gemma": gemma, "mistral": mistral, "deepseek": deepseek, "falcon": falcon, "qwen next": qwen_next,
}  # fmt: skip

Begin = Callable[..., Instance]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models with random weights, each made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(0)
            made[kind] = tmp_path_factory.mktemp(kind)
            MODELS[kind]().save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.fixture
def begin(folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start an instance of a model; its log is in the test's folder."""
    with ExitStack() as ends:

        def of(kind: str, name: str, kv: Mapping[str, Any] | None, **config: Any) -> Instance:
            if kind in ("falcon", "qwen next"):  # on GPUs, see vllm-options.md
                monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
            instance = Instance(tmp_path / f"{name}.log", folders(kind), kv, **config)
            ends.callback(instance.close)
            return instance

        yield of


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, 512) for _ in range(length)]


def answers(
    prefill: Instance, decode: Instance, prompts: Sequence[list[int]], params: Mapping[str, Any] = PREFILL
) -> list[list[int]]:
    """The tokens after each prompt."""
    found = []
    for tokens in prompts:
        first = prefill.ask(f"p-{len(tokens)}", tokens, 1, params)
        answer = decode.ask(f"d-{len(tokens)}", tokens, COUNT, first["params"])
        assert answer["reason"] == "length", len(tokens)
        found.append(answer["tokens"])
    return found


def alone(begin: Begin, kind: str, prompts: Sequence[list[int]], **config: Any) -> list[list[int]]:
    """The tokens of one instance without any transfer."""
    instance = begin(kind, "alone", None, **config).ready()
    found: list[list[int]] = [instance.ask(str(len(tokens)), tokens, COUNT)["tokens"] for tokens in prompts]
    instance.close()
    return found


def by_nixl(
    begin: Begin,
    kind: str,
    tps: tuple[int, int],
    prompts: Sequence[list[int]],
    patch: pytest.MonkeyPatch,
    **config: Any,
) -> list[list[int]]:
    """The tokens of two instances with vLLM's own ``NixlConnector``."""
    instances = []
    patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    ports = random.SystemRandom().sample(range(12_000, 32_000), 2)  # below those that other listeners are given
    for role, tp, port in zip(("kv_producer", "kv_consumer"), tps, ports, strict=True):
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        instances.append(begin(kind, f"nixl {role}", nixl(role), tp=tp, **config))
    names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    found = answers(instances[0].ready(), instances[1].ready(), prompts, {**PREFILL, **dict.fromkeys(names)})
    assert instances[1].prompt_tokens("local_compute") <= len(prompts)  # the last token of each: the rest is loaded
    for one in instances:
        one.close()
    return found


def transferred(
    begin: Begin, kind: str, tps: tuple[int, int], prompts: Sequence[list[int]], loaded: int, **config: Any
) -> list[list[int]]:
    """The tokens of two instances, with a checksum of every byte.

    ``loaded``: the number of prompts that are transferred, not computed by decode. ``config``: of both instances.
    """
    prefill, decode = (
        begin(kind, role, transfer(role, verify="full"), tp=tp, **config)
        for role, tp in zip(("kv_producer", "kv_consumer"), tps, strict=True)
    )
    found = answers(prefill.ready(), decode.ready(), prompts)
    # On GPUs vLLM schedules a step ahead, and frees blocks behind a window a step later.
    most = len(prompts) if ON_GPUS else loaded
    assert loaded <= decode.metric("vllm:disagg_kv_loaded_total") / tps[1] <= most
    assert decode.metric("vllm:disagg_kv_load_failed_total") == 0
    if loaded == len(prompts):
        assert decode.prompt_tokens("local_compute") <= loaded  # the last token of each
    return found


CHUNKED = {"max_num_batched_tokens": 64}
"""Prompts are computed in steps of 64 tokens."""


@pytest.mark.parametrize("kind", ["gemma", "mistral"])
@pytest.mark.parametrize("tps", [(1, 1), (1, 2), (2, 1)])
def test_tokens_of_models_with_sliding_windows(begin: Begin, kind: str, tps: tuple[int, int]) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    wanted = alone(begin, kind, prompts)
    assert transferred(begin, kind, tps, prompts, len(LENGTHS) - len(OUTRUN), args=CHUNKED) == wanted


LATENTS: dict[str, Any] = {"dtype": "bfloat16", "args": {"attention_backend": "TRITON_MLA"} if ON_GPUS else {}}
"""The kernels for GPUs, and those for CPUs with AMX, have no float32."""


@pytest.mark.parametrize("tps", [(1, 1), (1, 2)])
def test_tokens_of_a_model_with_latents(begin: Begin, tps: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with vLLM's ``NixlConnector``; neither decode instance computes the prompt.

    One instance is no oracle: vLLM's backend for CPUs gives other tokens after a prompt that it computes at once than
    after one whose last token it computes alone, as decode does whatever carries the rows.
    """
    prompts = [prompt(150)]
    wanted = by_nixl(begin, "deepseek", tps, prompts, monkeypatch, **LATENTS)
    assert transferred(begin, "deepseek", tps, prompts, len(prompts), **LATENTS) == wanted


STATES = (2, 33, 64, 65, 66, 150, 400)
"""Lengths of prompts for models with states."""


@pytest.mark.parametrize("tps", [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_tokens_of_a_model_with_mamba_layers(begin: Begin, tps: tuple[int, int]) -> None:
    prompts = [prompt(length) for length in STATES]
    wanted = alone(begin, "falcon", prompts)
    assert transferred(begin, "falcon", tps, prompts, len(prompts), args=CHUNKED) == wanted


NETS: dict[str, Any] = {"dtype": "bfloat16", "args": {"max_num_batched_tokens": 32, "max_num_seqs": 8}}
"""The last token of each prompt is a step of its own in every instance: other steps would round otherwise."""

Steady = list[tuple[list[int], list[int]]]
"""Prompts, and the tokens after each, which one rank gives and two give: rounding does not decide them."""


@pytest.fixture(scope="module")
def steady(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Steady:
    """For gated delta nets, in bfloat16."""
    prompts = [prompt(32 * steps + 1) for steps in range(1, 11)]
    found = []
    for tp in (1, 2):
        log = tmp_path_factory.mktemp("steady") / "alone.log"
        with closing(Instance(log, folders("qwen next"), None, tp=tp, **NETS)) as instance:
            instance.ready()
            found.append([instance.ask(str(len(tokens)), tokens, COUNT)["tokens"] for tokens in prompts])
    same = [(tokens, one) for tokens, one, other in zip(prompts, *found, strict=True) if one == other]
    assert len(same) >= 3, found
    return same


@pytest.mark.parametrize("tps", [(1, 1), (1, 2), (2, 1)])
def test_tokens_of_a_model_with_gated_delta_nets(begin: Begin, tps: tuple[int, int], steady: Steady) -> None:
    """At unequal TP the first four: states of one TP go on at another one, which rounds as neither instance alone."""
    count = COUNT if tps == (1, 1) else 4
    found = transferred(begin, "qwen next", tps, [tokens for tokens, _ in steady], len(steady), **NETS)
    assert [tokens[:count] for tokens in found] == [after[:count] for _, after in steady]


def test_swapped_states_give_other_tokens(begin: Begin) -> None:
    """The comparisons above can fail."""
    wrong = {"kv_connector": "SwappedStates", "kv_connector_module_path": "tests.engines.swapped"}
    prefill = begin("falcon", "prefill", transfer("kv_producer")).ready()
    decode = begin("falcon", "decode", {**transfer("kv_consumer"), **wrong}).ready()
    assert answers(prefill, decode, [prompt(150)]) != alone(begin, "falcon", [prompt(150)])


def test_states_in_the_prefix_cache_are_refused_by_name_at_start(begin: Begin) -> None:
    instance = begin("falcon", "prefill", transfer("kv_producer"), prefix_caching=True)
    with pytest.raises(AssertionError, match="the instance has ended"):
        instance.ready()
    assert "start it with --no-enable-prefix-caching" in instance.log.read_text()
