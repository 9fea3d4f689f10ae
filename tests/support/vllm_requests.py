"""VLLM's requests and their blocks, with the attributes that the connector reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from attrs import define


class Status(Enum):
    """``RequestStatus``."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    PREEMPTED = 3
    RUNNING = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7


@define(eq=False)
class Request:
    """``Request``; ``cached`` tokens of the prompt are in the prefix cache when it is scheduled."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    cached: int = 0
    num_prompt_tokens: int = -1
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    prompt_embeds: Any = None
    mm_features: Sequence[Any] = ()
    lora_request: Any = None
    outputs: int = 0
    status: Status = Status.WAITING

    def __attrs_post_init__(self) -> None:
        if self.prompt_token_ids is not None:
            self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def tokens(self) -> list[int]:
        """Of the prompt and the output."""
        assert self.prompt_token_ids is not None
        return [*self.prompt_token_ids, *([1] * self.outputs)]

    @property
    def _all_token_ids(self) -> list[int]:
        """A list of its own, which a connector shortens as it shortens the prompt's."""
        return self.tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Of the output."""
        return [1] * self.outputs

    @property
    def over(self) -> bool:
        """Whether the engine has ended it."""
        return self.status.name.startswith("FINISHED")


@define
class BlockTables:
    """``KVConnectorBlockState``."""

    scheduled: set[str]
    tables: Mapping[str, tuple[list[int], ...]]

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """All blocks of a request that the step schedules."""
        return self.tables[req_id] if req_id in self.scheduled else None
