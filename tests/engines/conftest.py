"""A small model with random weights, and instances that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from .instances import Instance

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s engines installs it")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four KV heads; weights that give varied greedy tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=2048, initializer_range=0.15,
        tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


Start = Callable[..., Instance]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Start an instance; its log is in the test's folder."""
    with ExitStack() as ends:

        def begin(name: str, kv: Mapping[str, Any] | None, **config: object) -> Instance:
            instance = Instance(tmp_path / f"{name}.log", model, kv, **config)  # type: ignore[arg-type]
            ends.callback(instance.close)
            return instance

        yield begin


@pytest.fixture(scope="session")
def tokens_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[int], int], list[int]]]:
    """What one engine without any transfer answers; asked once for each prompt."""
    known: dict[tuple[int, ...], list[int]] = {}
    instance: list[Instance] = []

    def ask(prompt: list[int], count: int) -> list[int]:
        key = (*prompt, -count)
        if key not in known:
            if not instance:
                instance.append(Instance(tmp_path_factory.mktemp("alone") / "alone.log", model, None).ready())
            known[key] = instance[0].ask(f"r{len(known)}", prompt, count)["tokens"]
        return known[key]

    yield ask
    for one in instance:
        one.close()
