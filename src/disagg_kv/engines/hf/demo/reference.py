"""One process with the whole model and transformers' own ``generate``: which tokens are right."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store
from transformers.cache_utils import DynamicCache, DynamicLayer

from ....kernels.convert import reference
from .lifetime import now
from .member import Member
from .model import Conversations, load_model
from .pool import descriptors_slice
from .results import ReferenceResult


def run(member: Member, _: Store) -> None:
    """Generate every request's tokens; the cache never leaves the model."""
    config = member.config
    model: Any = load_model(member.model, 1, member.device)
    member.notify("ready")
    began = now()
    conversations = Conversations(config)
    tokens: list[tuple[int, ...]] = [()] * config.requests
    for turn in range(config.turns):
        for request, prompt in enumerate(conversations.prompts):
            ids = torch.tensor([prompt], device=member.device)
            if config.decode_dtype is None:
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=config.max_new_tokens
                )
                answer = tuple(out[0, len(prompt) :].tolist())
            else:
                answer = _rounded(model, ids, config.max_new_tokens, config.decode_dtype)
            tokens[request] += answer
            conversations.answered(request, turn, answer)
            member.notify("decoded")
    member.leave(ReferenceResult(os.getpid(), now() - began, tuple(tokens), descriptors_slice(config)))


def _rounded(model: Any, ids: torch.Tensor, tokens: int, dtype: str) -> tuple[int, ...]:
    """Greedy tokens of a model whose cache of the prompt is rounded to another dtype, and back, after the prompt."""
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        answer = [int(model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())]
        for layer in cache.layers:
            assert isinstance(layer, DynamicLayer)
            for kept in (layer.keys, layer.values):
                assert kept is not None
                kept.copy_(reference.to_float32(reference.rounded(kept, dtype), dtype))
        while len(answer) < tokens:
            given = torch.tensor([answer[-1:]], device=ids.device)
            answer.append(int(model(given, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax()))
    return tuple(answer)
