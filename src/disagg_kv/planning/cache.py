"""Where plans are remembered: one bounded table, wherever an answer depends on its question alone."""

from __future__ import annotations

from typing import TypeVar

KEPT = 256
"""Answers that one table keeps. A peer may name many rooms, windows and segments; a rank uses few at a time."""

K = TypeVar("K")
V = TypeVar("V")


class PlanCache(dict[K, V]):
    """Answers by question, at most :data:`KEPT`; with one more it begins anew.

    A forgotten answer is computed again, so nothing may depend on it being here. Threads may share a table: each use of
    it is one operation of ``dict``.
    """

    def keep(self, question: K, answer: V) -> V:
        """Remember an answer, and return it."""
        if len(self) >= KEPT:
            self.clear()
        self[question] = answer
        return answer
