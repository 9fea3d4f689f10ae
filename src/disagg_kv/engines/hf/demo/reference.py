"""One process with the whole model: which tokens are right."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import Store
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ....kernels.convert import reference
from . import wire
from .check import own_cache
from .config import DemoConfig
from .lifetime import now
from .member import Member
from .model import Conversations, load_model
from .pool import descriptors_slice, name_of, spec_of
from .results import ReferenceResult


def run(member: Member, store: Store) -> None:
    """Generate every request's tokens."""
    config = member.config
    model: Any = load_model(member.model, 1, member.device)
    member.notify("ready")
    began = now()
    conversations = Conversations(config)
    answers = _rounded if config.rounds else _whole
    tokens = answers(member, store, model, conversations)
    member.leave(ReferenceResult(os.getpid(), now() - began, tokens, descriptors_slice(config)))


def _whole(member: Member, _: Store, model: Any, conversations: Conversations) -> tuple[tuple[int, ...], ...]:
    """By transformers' own ``generate``; the cache never leaves the model."""
    config = member.config
    tokens: list[tuple[int, ...]] = [()] * config.requests
    for turn in range(config.turns):
        for request, prompt in enumerate(conversations.prompts):
            ids = torch.tensor([prompt], device=member.device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=config.max_new_tokens
            )
            answer = tuple(out[0, len(prompt) :].tolist())
            tokens[request] += answer
            conversations.answered(request, turn, answer)
            member.notify("decoded")
    return tuple(tokens)


def _rounded(member: Member, store: Store, model: Any, conversations: Conversations) -> tuple[tuple[int, ...], ...]:
    """The first token of each answer from the prompt alone, with a cache that rounds to the dtype of prefill's.

    The others from the specified conversion of prefill's own cache, as its model computed it. Sums of several ranks
    differ from those of one process in their last bits. A number that lies between two of float8 then becomes the one
    or the other, which may change a token; so both sides begin with the same numbers.
    """
    config, firsts = member.config, list[int]()
    with torch.inference_mode():
        for prompt in conversations.prompts:
            firsts.append(_next(model, prompt, _Rounding(config.kept_dtype, model.config)))
        wire.await_own(store, config.prefills)
        tokens: list[tuple[int, ...]] = []
        for request, (prompt, first) in enumerate(zip(conversations.prompts, firsts, strict=True)):
            cache = _converted(member, request, len(prompt), model)
            answer = [first]
            while len(answer) < config.max_new_tokens:
                answer.append(_next(model, answer[-1:], cache))
            tokens.append(tuple(answer))
            member.notify("decoded")
    return tuple(tokens)


def _next(model: Any, tokens: Sequence[int], cache: Cache) -> int:
    """The greedy token after ``tokens``, which are appended to a cache."""
    given = torch.tensor([list(tokens)], device=model.device)
    return int(model(given, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())


class _Rounding(DynamicCache):
    """A cache whose rows are rounded to a dtype as they come."""

    def __init__(self, dtype: str, config: Any) -> None:
        super().__init__(config=config)
        self._dtype = dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (_as_kept(one, self._dtype) for one in (key_states, value_states))
        return super().update(keys, values, layer_idx, *args, **kwargs)


def _as_kept(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """Float32 rows, rounded to a dtype and back."""
    return reference.to_float32(reference.rounded(rows, dtype), dtype)


def _converted(member: Member, request: int, tokens: int, model: Any) -> Cache:
    """The cache of a request's prompt: prefill's own, in the dtype of decode's."""
    config: DemoConfig = member.config
    own = own_cache(member.work, request, config.prefills)
    cache = DynamicCache(config=model.config)
    for (number, components), layer in zip(spec_of(config).layers.items(), cache.layers, strict=True):
        assert isinstance(layer, DynamicLayer)
        rows: list[torch.Tensor] = []
        for component in components:
            cells = np.stack([own[name_of(number, component), unit] for unit in range(component.units)])
            given = torch.from_numpy(cells).unsqueeze(0).to(member.device)  # [1, units, rows, elements]
            rows.append(_as_kept(given, config.decoded_dtype))
        layer.update(*rows)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = tokens
    return cache
