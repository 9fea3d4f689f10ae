"""A clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """Fits wherever the library takes a ``Callable[[], float]`` for the time in seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        """The time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass; time never goes back."""
        assert seconds >= 0, f"a clock cannot go back by {-seconds} s"
        self._now += seconds
