"""One process with the whole model and transformers' own ``generate``: which tokens are right."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

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
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=config.max_new_tokens
            )
            answer = tuple(out[0, len(prompt) :].tolist())
            tokens[request] += answer
            conversations.answered(request, turn, answer)
            member.notify("decoded")
    member.leave(ReferenceResult(os.getpid(), now() - began, tuple(tokens), descriptors_slice(config)))
