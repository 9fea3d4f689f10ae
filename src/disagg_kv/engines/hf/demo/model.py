"""The demo's model and prompts: random weights made on the spot, text of this library's own sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .config import DemoConfig

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import Cache

BOS = 256
VOCABULARY = 288
"""256 bytes, the beginning, and padding to a number that 2, 3, 4, 6 and 8 ranks divide."""


def llama_config(config: DemoConfig) -> LlamaConfig:
    """A Llama with grouped-query attention: two query heads per KV head.

    Its weights are spread wider than usual: with transformers' default it would repeat one token for ever, and
    equal tokens would prove little.
    """
    from transformers import LlamaConfig

    heads = 2 * config.kv_heads
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16 * heads,
        intermediate_size=32 * heads,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        initializer_range=0.15,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )


def save_model(config: DemoConfig, folder: Path) -> None:
    """Write the model, with random weights, as safetensors."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(config.seed)
    LlamaForCausalLM(llama_config(config)).save_pretrained(folder)


def load_model(folder: Path, tp: int) -> LlamaForCausalLM:
    """The model on this process, one of ``tp`` of the default process group; the whole model with ``tp`` 1."""
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = DistributedConfig(tp_plan="auto", tp_size=tp) if tp > 1 else None
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=plan)
    return model


class Talks:
    """What is said in each conversation: byte tokens of this library's sources, each from another place."""

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


def forward(model: LlamaForCausalLM, tokens: Sequence[int], cache: Cache) -> int:
    """Append ``tokens`` to ``cache`` and return the greedy next one."""
    output = model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return int(output.logits[0, -1].argmax())
