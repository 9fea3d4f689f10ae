"""A small model with random weights, and instances that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .instances import Instance, small_model

if find_spec("vllm") is None and find_spec("sglang") is None:
    pytest.skip("neither vLLM nor SGLang is installed: nox -s engines installs them", allow_module_level=True)

collect_ignore_glob = [f"test_{name}*.py" for name in ("vllm", "sglang") if find_spec(name) is None]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See :func:`small_model`."""
    return small_model(tmp_path_factory.mktemp("model"))


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
