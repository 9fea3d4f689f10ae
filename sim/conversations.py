"""Conversations: prompts that begin like earlier ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import frozen

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


@frozen
class Turn:
    """What a request of a conversation asks: its rows, where its chunks end, and its prompt."""

    rows: int
    edges: tuple[int, ...]
    prompt: Prompt


def converse(
    rng: random.Random, drawn: Sequence[tuple[int, int]], space: int, page: int
) -> tuple[tuple[Conversation, ...], tuple[Turn, ...]]:
    """Make requests turns of conversations, of which some begin like others (a system prompt, or an edited message).

    Args:
        rng: of the scenario.
        drawn: of each request how many rows it adds, and into how many chunks it is cut at most.
        space: rows of the smallest pool: all prompts together must fit.
        page: rows of a page of decode.
    """
    most = min(MOST, space // len(drawn) - 16)
    conversations: list[Conversation] = []
    reached: list[int] = []
    turns: list[Turn] = []
    for fresh, chunks in drawn:
        if not conversations or rng.random() < 0.35:
            parent = rng.randrange(len(conversations)) if conversations else 0
            fork = rng.randint(0, reached[parent]) if conversations else 0
            conversations.append(Conversation(parent, fork))
            reached.append(fork)
            number, more = len(conversations) - 1, max(1, fresh * rng.choice((1, 1, 2)) // 2)
        else:
            number = rng.randrange(len(conversations))
            more = rng.choice((0, 1, page, rng.randint(1, 3 * page), 1 + fresh // 3))
        reached[number] = rows = max(1, min(most, reached[number] + more))
        cuts = rng.randint(0, chunks)
        edges = sorted({rng.randint(1, rows) for _ in range(cuts)} | {rows})
        prompt = Prompt(number, waits=rng.random() < 0.75, answer=rng.choice((0, 0, 1, page, 2 * page + 1)))
        turns.append(Turn(rows, tuple(edges), prompt))
    return tuple(conversations), tuple(turns)
