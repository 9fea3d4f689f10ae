"""What the environment variable may hold, and the names of SGLang that must exist."""

from __future__ import annotations

import json
import logging
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from disagg_kv.engines import sglang
from disagg_kv.engines.sglang import names
from disagg_kv.engines.sglang.options import VARIABLE, SGLangOptions
from disagg_kv.errors import ConfigurationError, UnknownNameError, UnsupportedError
from disagg_kv.strategies import AUTO, exposes_pages, paths, strategy

ROOT = Path(__file__).parents[4]


def read(given: object) -> SGLangOptions:
    return SGLangOptions.from_environment({VARIABLE: json.dumps(given)})


def test_the_defaults_need_no_variable() -> None:
    options = SGLangOptions.from_environment({})
    assert options == SGLangOptions.from_environment({VARIABLE: ""}) == read({}) == SGLangOptions()
    assert options.names(exposes=True) == "auto+per_chunk+incremental"


@pytest.mark.parametrize("taken", ["auto", "per_chunk", "auto+incremental", "incremental+per_chunk", "staged"])
def test_no_strategy_exposes_pages_that_sglang_frees_without_waiting(taken: str) -> None:
    """The endpoint takes one path by its name."""
    no_pages_are_exposed(taken)


def no_pages_are_exposed(taken: str = "auto") -> None:
    chosen = strategy(read({"strategy": taken}).names(exposes=False))
    exposing = {AUTO, *(name for name, path in paths().items() if exposes_pages(path))}
    assert chosen.path not in exposing
    assert (chosen.schedule.name, chosen.selection.name) == ("per_chunk", "incremental")


def test_data_parallel_instances_have_metrics_at_ports_of_their_own() -> None:
    options = read({"metrics": "127.0.0.1:9100"})
    assert [options.of_instance(number, 2).metrics for number in (0, 1, 3)] == [
        f"127.0.0.1:{port}" for port in (9100, 9102, 9106)
    ]
    for none in ({}, {"metrics": "localhost:0"}):
        assert read(none).of_instance(3, 2) == read(none)


def test_mapped_needs_a_server_that_waits() -> None:
    options = read({"strategy": "mapped"})
    assert options.names(exposes=True) == "mapped+per_chunk+incremental"
    with pytest.raises(ConfigurationError, match="DEFERRED_DECODE_KV_RELEASE=0, or --enable-memory-saver"):
        options.names(exposes=False)


def test_every_option_is_taken() -> None:
    given = {"strategy": "auto+per_chunk", "channel": "zmq", "staging_bytes": 1 << 20, "silence_s": 5}
    given |= {"metrics": "[::1]:9100", "status_socket": True}
    options = read(given)
    assert {name: getattr(options, name) for name in given} == given
    assert options.names(exposes=True) == "auto+per_chunk+incremental"
    options = read({"strategy": "layer_pipelined"})
    assert options.layered
    assert options.names(exposes=True) == "auto+layer_pipelined+incremental"
    options = read({"strategy": "per_chunk"})
    assert not options.layered
    assert options.names(exposes=False) == "staged+per_chunk+incremental"
    assert read({"strategy": "staged"}).names(exposes=True) == "staged+per_chunk+incremental"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", f"{VARIABLE}: no JSON"),
        ("[]", f"{VARIABLE}: no JSON object"),
        ('{"strategy": "direct"}', "'direct' a network reads pages"),
        ('{"strategy": "slice+incremental"}', "'slice' a network reads pages"),
        ('{"channel": "pigeon"}', "channel 'pigeon'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SGLangOptions.from_environment({VARIABLE: text})


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=f"{VARIABLE}.*silence_s"):
        read({"silence": 3})


def test_names_that_are_not_there_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("engine_of_tests")
    module.Kind = SimpleNamespace(A=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine_of_tests", module)
    names.check({"engine_of_tests": ("Kind", "Kind.A")}, {})
    wanted = {"engine_of_tests": ("Kind.A", "Kind.B", "moved"), "engine_of_tests.gone": ("name",)}
    missing = "engine_of_tests.Kind.B, engine_of_tests.moved, engine_of_tests.gone.name$"
    with pytest.raises(UnsupportedError, match=missing):
        names.check(wanted, {})


def test_fields_that_a_class_only_annotates_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        size: int

    class Args(Base):
        rank: int

    module = ModuleType("engine_of_tests")
    module.Args = Args  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine_of_tests", module)
    names.check({"engine_of_tests": ("Args.size", "Args.rank")}, {})
    with pytest.raises(UnsupportedError, match=r"engine_of_tests\.Args\.dtype$"):
        names.check({"engine_of_tests": ("Args.rank", "Args.dtype")}, {})


def test_attributes_are_looked_for_in_the_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without importing it. A part of a word is another name."""
    folder = tmp_path_factory.mktemp("engine")
    source = "raise RuntimeError\ndef send(sender):\n    sender.wait_event = 1\n"
    (folder / "engine_of_tests_3.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    names.check({}, {"engine_of_tests_3": ("wait_event", "sender")})
    wanted = {"engine_of_tests_3": ("wait", "sender"), "engine_of_tests_4": ("a",), "engine_of_tests_5.b": ("c",)}
    with pytest.raises(UnsupportedError, match="wait in engine_of_tests_3, a in engine_of_tests_4, c in engine_of"):
        names.check({}, wanted)


def test_a_module_that_cannot_be_imported_is_no_missing_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The error of what the engine itself lacks is more useful."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "engine_of_tests_2.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        names.check({"engine_of_tests_2": ("name",)}, {})


def test_modules_are_those_of_sglang() -> None:
    assert all(module.startswith("sglang.srt.") for module in (*names.NAMES, *names.WORDS))


def test_sglang_calls_install_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version and the names are checked before SGLang is imported."""
    calls: list[str] = []
    plugin = ModuleType("disagg_kv.engines.sglang.plugin")
    plugin.register_backend = lambda: calls.append("register")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    monkeypatch.setattr("disagg_kv.engines.versions.require", lambda name: calls.append(name))
    monkeypatch.setattr(names, "check", lambda: calls.append("names"))
    level = logging.getLogger("disagg_kv").level
    try:
        sglang.install()
    finally:
        logging.getLogger("disagg_kv").setLevel(level)
    assert calls == ["sglang", "names", "register"]


def test_the_entry_point_is_the_function_that_sglang_calls() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["disagg_kv"].partition(":")
    assert getattr(import_module(module), name) is sglang.install
