"""A bounded table of plans, for answers that depend on their question alone."""

from __future__ import annotations

from typing import TypeVar

KEPT = 256
"""The most answers in a table: a peer may name many rooms, windows and segments, but a rank uses few at a time."""

K = TypeVar("K")
V = TypeVar("V")


class PlanCache(dict[K, V]):
    """Answers by question, at most :data:`KEPT`: the table is emptied before it would exceed them.

    A forgotten answer is computed again, so nothing may depend on it being here. Threads may share a table: each use of
    it is one operation of ``dict``.
    """

    def keep(self, question: K, answer: V) -> V:
        """Remember an answer, and return it."""
        if len(self) >= KEPT:
            self.clear()
        self[question] = answer
        return answer
