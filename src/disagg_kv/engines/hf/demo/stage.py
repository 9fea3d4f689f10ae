"""One pipeline stage of the model: its own layers, its input from the previous stage, and the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import Store
from transformers.cache_utils import Cache

from .member import Member, wait_for
from .model import load_model


class Stage:
    """The layers of this process's pipeline stage, cut by tensor parallelism inside it; hidden states pass the store.

    Args:
        member: this process.
        store: the parent's.
    """

    def __init__(self, member: Member, store: Store) -> None:
        self._member = member
        self._store = store
        self._first, self._last = member.stage == 0, member.stage == member.pp - 1
        self._model: Any = load_model(member.model, member.tp, member.device)
        self._hidden = self._model.config.hidden_size
        if member.pp > 1:
            _keep(self._model, member.stage, member.pp, last=self._last)

    def forward(self, name: str, tokens: Sequence[int], cache: Cache) -> int | None:
        """Append ``tokens`` to ``cache``; returns the greedy next token on the last stage, None on the others.

        Args:
            name: name of this pass, the same on all stages and used once.
            tokens: used by the first stage; the others read the previous stage's hidden states.
            cache: the cache of this stage's layers.
        """
        if self._first:
            given = {"input_ids": torch.tensor([list(tokens)], device=self._member.device)}
        else:
            data = bytearray(wait_for(self._store, f"hidden {name} {self._member.stage - 1}"))
            hidden = torch.from_numpy(np.frombuffer(data, np.float32).reshape(1, -1, self._hidden))
            given = {"inputs_embeds": hidden.to(self._member.device)}
        if self._last:
            output = self._model(**given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return int(output.logits[0, -1].argmax())
        hidden = self._model.model(**given, past_key_values=cache, use_cache=True).last_hidden_state
        if self._member.tp_rank == 0:
            self._store.set(f"hidden {name} {self._member.stage}", hidden.cpu().numpy().tobytes())
        return None

    def learn(self, name: str, token: int | None) -> int:
        """The token that the last stage found by a pass, on every stage."""
        if token is None:
            return int(wait_for(self._store, f"token {name}"))
        if self._member.pp > 1 and self._member.tp_rank == 0:
            self._store.set(f"token {name}", str(token))
        return token


def _keep(model: Any, stage: int, pp: int, *, last: bool) -> None:
    """Leave a model nothing but one stage's layers, counted from 0."""
    body, config = model.model, model.config
    each = config.num_hidden_layers // pp
    mine = slice(stage * each, (stage + 1) * each)
    body.layers = torch.nn.ModuleList(list(body.layers)[mine])
    for number, layer in enumerate(body.layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = each
    if kinds is not None:
        config.layer_types = kinds[mine]
    if not last:
        setattr(body, "final_layernorm" if hasattr(body, "final_layernorm") else "norm", torch.nn.Identity())
