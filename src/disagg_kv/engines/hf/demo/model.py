"""The demo's model and prompts: random weights created on the spot, text of this library's own sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .config import DemoConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BOS = 256
VOCABULARY = 288
"""256 bytes, the beginning, and padding to a number that 2, 3, 4, 6 and 8 ranks divide."""


WINDOW = 128
"""Tokens that a sliding layer sees, the one that is computed included: less than any prompt has."""


def model_config(config: DemoConfig) -> PreTrainedConfig:
    """The model's configuration: two query heads per KV head, sizes that let two CPU cores run it.

    Its weights are spread wider than usual. With transformers' default it would repeat one token endlessly, and equal
    tokens would prove little.
    """
    import transformers as hf

    heads = 2 * config.kv_heads
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16 * heads,
        "intermediate_size": 32 * heads,
        "num_hidden_layers": config.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "initializer_range": 0.15,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }
    every_other = config.layers // 2
    match config.model:
        case "llama":
            return hf.LlamaConfig(**sizes)
        case "mla":
            del sizes["head_dim"]
            latent = {"q_lora_rank": 32, "kv_lora_rank": 2 * config.head_dim, "qk_rope_head_dim": config.head_dim}
            dense = {"qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": config.layers}
            return hf.DeepseekV3Config(**{**sizes, "num_key_value_heads": heads, **latent, **dense})
        case "hybrid":
            return hf.Qwen3NextConfig(
                **sizes,
                layer_types=["linear_attention", "full_attention"] * every_other,
                linear_num_key_heads=4,
                linear_num_value_heads=8,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                linear_conv_kernel_dim=4,
                num_experts=0,
                mlp_only_layers=list(range(config.layers)),
            )
        case "mamba":
            return hf.FalconH1Config(
                **sizes,
                mamba_d_ssm=128,
                mamba_n_heads=8,
                mamba_d_head=16,
                mamba_n_groups=1,
                mamba_d_state=16,
                mamba_chunk_size=64,
            )
        case "window":
            kinds = ["sliding_attention", "full_attention"] * every_other
            return hf.Qwen3Config(**sizes, use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds)


def save_model(config: DemoConfig, folder: Path) -> None:
    """Write the model, with random weights, as safetensors."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    make: Any = AutoModelForCausalLM
    make.from_config(model_config(config)).save_pretrained(folder)


def load_model(folder: Path, tp: int, device: str) -> Any:
    """The model on this process, one of ``tp`` of the default process group; the whole model with ``tp`` 1."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    if tp == 1:
        whole: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return whole.to(device)
    plan: dict[str, str] | Literal["auto"] = "auto"
    if device != "cpu":
        # Gloo, which ranks that share a GPU need, reduces there but does not gather: every rank has such layers whole.
        rules = AutoConfig.from_pretrained(folder).base_model_tp_plan or {}
        gathered = [f"model.{name}" for name, rule in rules.items() if rule.endswith("gather_output")]
        plan = dict.fromkeys(["lm_head", *gathered], "replicate")
    split = DistributedConfig(tp_plan=plan, tp_size=tp)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=split)


class Conversations:
    """The prompts of each conversation: byte tokens of this library's sources, each from another place."""

    def __init__(self, config: DemoConfig) -> None:
        package = Path(__file__).parents[3]
        sources = [path for path in sorted(package.rglob("*.py")) if path.stat().st_size]
        text = b"".join(path.read_bytes() for path in sources)
        most = max(config.prompt_lengths) + config.turns * config.turn_tokens
        text += text[:most]
        step = (len(text) - most) // config.requests
        self._texts = [text[i * step :][:most] for i in range(config.requests)]
        self._config = config
        self.prompts = [(BOS, *self._texts[i][: n - 1]) for i, n in enumerate(config.prompt_lengths)]

    def answered(self, request: int, turn: int, answer: Sequence[int]) -> None:
        """Make the prompt of the turn after ``turn``."""
        size = self._config.turn_tokens
        start = self._config.prompt_lengths[request] - 1 + turn * size
        self.prompts[request] = (*self.prompts[request], *answer, *self._texts[request][start : start + size])
