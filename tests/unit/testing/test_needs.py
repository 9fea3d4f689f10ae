"""Where a library was promised its tests are not skipped."""

from __future__ import annotations

import pytest

from tests.support.needs import VARIABLE, needs


@pytest.mark.parametrize(
    ("promised", "module", "skipped"),
    [
        ("", "json", False),
        ("", "no_such_module", True),
        ("b,a", "no_such_module", False),
        ("b", "no_such_module", True),
    ],
)
def test_a_promised_library_is_never_skipped(
    monkeypatch: pytest.MonkeyPatch, promised: str, module: str, skipped: bool
) -> None:
    """Without the promise, only where it is not installed."""
    monkeypatch.setenv(VARIABLE, promised)
    mark = needs("a", (module,), "pip install package-a").mark
    assert mark.args == (skipped,)
    assert mark.kwargs == {"reason": "a is not installed: pip install package-a"}


@pytest.mark.parametrize(("promised", "skipped"), [("", True), ("a", False)])
def test_a_program_is_needed_too(monkeypatch: pytest.MonkeyPatch, promised: str, skipped: bool) -> None:
    """The module is there."""
    monkeypatch.setenv(VARIABLE, promised)
    assert needs("a", ("json",), "install", ("sh", "no-such-program")).mark.args == (skipped,)
    assert needs("a", ("json",), "install", ("sh",)).mark.args == (False,)
