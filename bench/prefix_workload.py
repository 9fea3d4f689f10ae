"""Prompts in groups that share their beginning, as SGLang's ``generated-shared-prefix`` benchmark makes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

from disagg_kv.errors import ConfigurationError

VOCABULARY = 128_000


@frozen
class PrefixShape:
    """The sizes of a workload. Lengths are drawn evenly from ``range_ratio`` of the given number up to all of it.

    Args:
        groups: number of shared prefixes.
        prompts: prompts per group.
        shared_tokens: tokens of a shared prefix.
        own_tokens: tokens that follow.
        answer_tokens: tokens that decode generates.
        range_ratio: the shortest length, as a share of the longest.
        concurrency: requests at once; the next begins when one ends.
        seed: seed of lengths, tokens and order.
    """

    groups: int = 80
    prompts: int = 8
    shared_tokens: int = 7000
    own_tokens: int = 1000
    answer_tokens: int = 1067
    range_ratio: float = 0.5
    concurrency: int = 128
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("groups", "prompts", "shared_tokens", "own_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be positive, not {getattr(self, name)}")
        if self.answer_tokens < 2:
            raise ConfigurationError(
                f"answer_tokens must be at least 2, not {self.answer_tokens}: prefill makes the first"
            )
        if not 0 < self.range_ratio <= 1:
            raise ConfigurationError(f"range_ratio must be above 0 and at most 1, not {self.range_ratio}")


@frozen(eq=False)
class Prompt:
    """One request.

    Args:
        group: its group.
        shared: number of tokens of the shared prefix.
        tokens: all tokens, int32 ``[n]``.
        answer: tokens to generate.
    """

    group: int
    shared: int
    tokens: npt.NDArray[np.int32]
    answer: int


def prompts_of(shape: PrefixShape) -> list[Prompt]:
    """All requests, in the order in which they are sent: shuffled over the groups."""
    rng = np.random.default_rng(shape.seed)

    def length(most: int) -> int:
        return int(rng.integers(max(1, int(most * shape.range_ratio)), most + 1))

    def text(tokens: int) -> npt.NDArray[np.int32]:
        return rng.integers(0, VOCABULARY, tokens, np.int32)

    made: list[Prompt] = []
    for group in range(shape.groups):
        shared = text(length(shape.shared_tokens))
        for _ in range(shape.prompts):
            tokens = np.concatenate([shared, text(length(shape.own_tokens))])
            made.append(Prompt(group, len(shared), tokens, max(2, length(shape.answer_tokens))))
    return [made[i] for i in rng.permutation(len(made))]
