"""A Llama with random weights, whose greedy tokens vary and depend on the whole prompt.

    python -m benchmarks.engines_gpu.model FOLDER [--tiny]

Its cache has the size of that of Llama 3.1 8B, and the rest is smaller, so that many instances fit on a GPU. Embeddings
have a standard deviation of 1, and matrices one of 1/sqrt(columns). The default of transformers gives near-constant
tokens; much larger weights give tokens that rounding changes. ``--tiny`` is for a trial run on a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attrs import frozen

HEAD_DIM = 128


@frozen
class Shape:
    """Sizes of the model; all weights are bfloat16."""

    layers: int = 32
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 8
    intermediate: int = 5632
    vocabulary: int = 32_000

    def config(self) -> dict[str, object]:
        """As ``config.json`` has it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": 65_536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


TINY = Shape(layers=2, hidden=256, heads=2, kv_heads=2, intermediate=256)

BYTES_PER_TOKEN = Shape().layers * 2 * Shape().kv_heads * HEAD_DIM * 2
"""Of the cache, over all ranks."""


def write(folder: Path, shape: Shape) -> None:
    """Write ``config.json`` and ``model.safetensors``; the seed is fixed."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)

    def matrix(rows: int, columns: int, std: float | None = None) -> torch.Tensor:
        made = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return made.normal_(0, std or columns**-0.5, generator=generator).cpu()

    def norm() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden, 1.0),
        "lm_head.weight": matrix(shape.vocabulary, shape.hidden),
        "model.norm.weight": norm(),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": norm(),
            f"{at}post_attention_layernorm.weight": norm(),
            f"{at}self_attn.q_proj.weight": matrix(shape.heads * HEAD_DIM, shape.hidden),
            f"{at}self_attn.k_proj.weight": matrix(shape.kv_heads * HEAD_DIM, shape.hidden),
            f"{at}self_attn.v_proj.weight": matrix(shape.kv_heads * HEAD_DIM, shape.hidden),
            f"{at}self_attn.o_proj.weight": matrix(shape.hidden, shape.heads * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{at}mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{at}mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config()))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer beside a model. Each token is a word: a text has as many tokens as words."""
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(count)}, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for one in messages %}{{ one['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    """Write the model of the benchmark."""
    parser = argparse.ArgumentParser(description="a Llama with random weights")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="for a trial run on a CPU")
    given = parser.parse_args()
    write(given.folder, TINY if given.tiny else Shape())


if __name__ == "__main__":
    main()
