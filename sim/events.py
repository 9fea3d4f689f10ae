"""Events of a simulated device."""

from __future__ import annotations

from collections.abc import Callable


class SimEvent:
    """Something that happens when the world says so; a failed one raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.happened = False
        self._error = error
        self._next: list[Callable[[], None]] = []

    def happen(self) -> None:
        """Now."""
        self.happened = True
        for act in self._next:
            act()

    def then(self, act: Callable[[], None]) -> None:
        """What comes as soon as it has happened."""
        self._next.append(act)

    def query(self) -> bool:
        """True once it has happened."""
        if self.happened and self._error is not None:
            raise self._error
        return self.happened

    def synchronize(self) -> None:
        """A simulation never waits."""
        assert self.happened, "a simulation never waits"
