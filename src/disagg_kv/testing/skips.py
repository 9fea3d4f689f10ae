"""What suites share: pytest's summary says in a line per class which of its tests were skipped, and why."""

from __future__ import annotations

from collections import Counter

import pytest


class Skips:
    """A plugin of pytest, which the first suite of a run registers. With pytest-xdist, workers have no summary."""

    def __init__(self) -> None:
        self.classes: list[str] = []

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line per class."""
        for name in self.classes:
            skipped = [one for one in terminalreporter.getreports("skipped") if one.nodeid.startswith(f"{name}::")]
            reasons = Counter(str(one.longrepr[2]).removeprefix("Skipped: ") for one in skipped)
            if reasons:
                why = "; ".join(f"{reason} ({times})" for reason, times in reasons.most_common())
                terminalreporter.write_line(f"{name} skipped: {why}")


class SaysSkips:
    """The base of the suites that skip tests."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _says_what_is_skipped(cls, request: pytest.FixtureRequest) -> None:
        manager = request.config.pluginmanager
        if (plugin := manager.get_plugin(__name__)) is None:
            manager.register(plugin := Skips(), __name__)
        plugin.classes.append(request.node.nodeid)
