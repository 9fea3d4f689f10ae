"""Conversations: prompts that begin like earlier ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from .scenario import Request

MOST = 200
"""Rows of a prompt."""


@frozen
class Conversation:
    """A conversation: up to row ``fork`` it is the one with number ``parent``, and different from all others after."""

    parent: int
    fork: int


@frozen
class Prompt:
    """Which prompt a request has.

    Args:
        conversation: its number; its rows say how far that has come.
        waits: until the earlier requests of the conversation are over.
        answer: rows that decode computes after it, which stay in its pages.
    """

    conversation: int
    waits: bool
    answer: int


def converse(
    rng: random.Random, requests: Sequence[Request], space: int, page: int
) -> tuple[tuple[Conversation, ...], tuple[Request, ...]]:
    """Make requests turns of conversations, of which some begin like others (a system prompt, or an edited message).

    Args:
        rng: of the scenario.
        requests: as drawn; their rows become those of the first turns.
        space: rows of the smallest pool: all prompts together must fit.
        page: rows of a page of decode.
    """
    most = min(MOST, space // len(requests) - 16)
    conversations: list[Conversation] = []
    reached: list[int] = []
    asked: list[Request] = []
    for request in requests:
        if not conversations or rng.random() < 0.35:
            parent = rng.randrange(len(conversations)) if conversations else 0
            fork = rng.randint(0, reached[parent]) if conversations else 0
            conversations.append(Conversation(parent, fork))
            reached.append(fork)
            number, more = len(conversations) - 1, max(1, request.rows * rng.choice((1, 1, 2)) // 2)
        else:
            number = rng.randrange(len(conversations))
            more = rng.choice((0, 1, page, rng.randint(1, 3 * page), 1 + request.rows // 3))
        reached[number] = rows = max(1, min(most, reached[number] + more))
        cuts = rng.randint(0, len(request.edges))
        edges = sorted({rng.randint(1, rows) for _ in range(cuts)} | {rows})
        prompt = Prompt(number, waits=rng.random() < 0.75, answer=rng.choice((0, 0, 1, page, 2 * page + 1)))
        asked.append(evolve(request, rows=rows, edges=tuple(edges), prompt=prompt))
    return tuple(conversations), tuple(asked)
