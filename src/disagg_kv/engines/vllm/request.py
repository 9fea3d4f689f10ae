"""VLLM's requests, and its groups of cache blocks: what the side in the scheduler reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from attrs import frozen

from ...geometry import window_rows
from ...ids import GroupId
from ..model import prompt_tag

ANSWERED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Of vLLM's ``RequestStatus``: the response goes to the router. It does not once the client has gone."""


class EngineRequest(Protocol):
    """The part of vLLM's ``Request`` that is read here."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    mm_features: Sequence[Any]
    lora_request: Any
    kv_transfer_params: dict[str, Any] | None
    status: Any

    @property
    def _all_token_ids(self) -> list[int]:
        """Those of the prompt, and the tokens that were generated."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens that were generated."""
        ...


class BlockState(Protocol):
    """vLLM's ``KVConnectorBlockState``."""

    def get_block_ids(self, req_id: str, /) -> tuple[list[int], ...] | None:
        """All blocks of a request that this step schedules."""
        ...


@frozen
class BlockGroup:
    """One of vLLM's KV cache groups.

    Args:
        id: its name on the wire.
        index: its place among vLLM's groups.
        block: tokens of a block.
        row: tokens of a row: 1, or those of a block where the memory never separates them.
        window: tokens of a sliding window, behind which vLLM frees blocks; None: none.
        states: a request has one block, with its states; the numbers of tokens mean nothing.
    """

    id: GroupId
    index: int
    block: int
    row: int
    window: int | None = None
    states: bool = False

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return self.block // self.row

    def first_needed(self, prompt: int) -> int:
        """The first row that decode awaits of a prompt."""
        stop = rows(prompt, self, whole=True)
        return 0 if self.window is None else max(0, stop - window_rows(self.window, self.row))

    def freed(self, prompt: int) -> int:
        """Leading rows whose blocks vLLM has freed once a prompt is computed."""
        behind = 0 if self.window is None else max(0, prompt - self.window + 1)
        return behind // self.block * self.page_rows


def tag_of(request: EngineRequest, tokens: int | None = None) -> bytes | None:
    """A digest of what the rows of a prompt depend on; None: it has embeddings, of which there is none.

    ``tokens``: the number of leading tokens, of the prompt and what was generated; None: the prompt's.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    ids = request.prompt_token_ids if tokens is None else request._all_token_ids[:tokens]
    adapter = [] if request.lora_request is None else [f"adapter {request.lora_request.lora_name}"]
    inputs = [
        f"{one.modality} {one.mm_hash or one.identifier} at {one.mm_position.offset}"
        for one in request.mm_features
        if tokens is None or one.mm_position.offset < tokens
    ]
    return prompt_tag(ids, *adapter, *inputs)


def rows(tokens: int, group: BlockGroup, *, whole: bool) -> int:
    """Rows of ``tokens`` tokens; a last row that is partly filled counts only if no token follows (``whole``)."""
    return -(-tokens // group.row) if whole else tokens // group.row
