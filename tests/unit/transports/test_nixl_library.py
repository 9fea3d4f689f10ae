"""Finding NIXL, keeping it quiet, and what it says when it cannot be used."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from disagg_kv.errors import ConfigurationError, MissingDependencyError, RegistrationError
from disagg_kv.memory import Buffer
from disagg_kv.transports import nixl_library, transport
from disagg_kv.transports.nixl import NixlTransport
from disagg_kv.transports.nixl_library import ENVIRONMENT, MODULES, check_shareable, load
from tests.support.fake_cuda import Allocation, FakeCuda
from tests.support.needs import needs_nixl
from tests.support.nixl import run


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no package of NIXL were installed."""
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def fake(empty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in which a test can put packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def put(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, text: str = "") -> None:
    """A package that can be imported once."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("empty")
def test_a_library_that_is_not_installed_is_named_with_its_command() -> None:
    """Each name that was tried, and what to install."""
    with pytest.raises(MissingDependencyError, match=r"nixl_cu13.*pip install nixl") as caught:
        NixlTransport()
    assert all(name in caught.value.reason for name in MODULES)


def test_the_names_are_tried_in_order(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``nixl`` first: it knows which of the others fits the CUDA of this host."""
    for number, name in enumerate(reversed(MODULES)):
        put(fake, name, monkeypatch, f"number = {number}")
        assert load().module.__name__ == name
        assert load().module.number == number


def test_one_that_lacks_a_system_library_is_passed_over(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And named if none works."""
    put(fake, "nixl", monkeypatch, "raise ImportError('libmlx5.so.1: cannot open shared object file')")
    with pytest.raises(MissingDependencyError, match=r"libmlx5\.so\.1"):
        load()
    put(fake, "nixl_cu12", monkeypatch)
    assert load().module.__name__ == "nixl_cu12"


def test_one_that_is_too_old_is_named_with_its_command(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be told to be safe for threads."""
    put(fake, "nixl_cu12", monkeypatch, "class nixl_agent_config: pass")
    with pytest.raises(MissingDependencyError, match=r"too old.*pip install"):
        NixlTransport()


def test_the_import_leaves_logging_alone(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL switches off the errors of all logging, and logs to stdout."""
    noisy = "import logging, sys; logging.raiseExceptions = False\n"
    noisy += "logging.getLogger('nixl').addHandler(logging.StreamHandler(sys.stdout))"
    put(fake, "nixl", monkeypatch, noisy)
    load()
    assert logging.raiseExceptions
    assert logging.getLogger("nixl").handlers == []
    assert logging.getLogger("nixl").propagate


def test_the_environment_is_set_where_it_is_not(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set stays."""
    put(fake, "nixl", monkeypatch, "import os; seen = dict(os.environ)")
    first, *others = ENVIRONMENT
    monkeypatch.setenv(first, "theirs")
    for name in others:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    seen = load().module.seen
    assert {name: seen[name] for name in ENVIRONMENT} == {**ENVIRONMENT, first: "theirs"}


@pytest.mark.parametrize("bad", [{"num_threads": -1}, {"idle_s": 0.0}, {"drain_s": -1.0}])
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    """With their values."""
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        transport("nixl", **bad)


@needs_nixl
@pytest.mark.parametrize("bad", [{"backend": "NOTHING"}, {"backend_options": {"ucx_error_handling_mode": "maybe"}}])
def test_a_backend_that_cannot_be_made_is_an_error(bad: dict[str, object]) -> None:
    """With NIXL's own attached."""
    with pytest.raises(ConfigurationError, match="backend") as caught:
        transport("nixl", **bad)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_cuda_memory_that_cannot_be_shared_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would register, and then crawl."""
    buffer = Buffer(1 << 40, 4096, "cuda:0")
    check_shareable(buffer)
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(RegistrationError, match="expandable_segments"):
        check_shareable(buffer)


def test_what_the_driver_exports_can_be_shared() -> None:
    """It is asked to, on a host that has one."""
    one = Allocation(4096)
    cuda = FakeCuda()
    assert nixl_library._exported(cuda, Buffer(one.addr, 4096, "cuda:0", one))
    cuda.broken = {"export"}
    assert not nixl_library._exported(cuda, Buffer(one.addr, 4096, "cuda:0", one))


LIVE = """
import numpy as np
from disagg_kv.memory import Buffer
from disagg_kv.planning import Writes
from disagg_kv.transports import nixl_library, transport

a, b = transport("nixl"), transport("nixl")
source, target = np.ones(1 << 22, np.uint8), np.zeros(1 << 22, np.uint8)
(here,) = a.register([Buffer(source.ctypes.data, source.nbytes, "cpu", source)])
(there,) = b.register([Buffer(target.ctypes.data, target.nbytes, "cpu", target)])
peer = a.connect(b.local_descriptor(), 120.0)
ticket = a.submit(peer, Writes.one(here, 0, there, 0, 1 << 22))
"""

ENDS = {
    "closed": "while not a.poll(): pass\na.close(1.0), b.close(1.0)",
    "in flight": "",
    "closed in flight": "a.close(0.0)",
    "collected": "del a, b",
    "the peer closed": "b.close(0.0)\nwhile a.poll() == []: pass",
}


@needs_nixl
@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_well_and_says_nothing(end: str) -> None:
    """Whatever its transports were doing; neither the library's logs nor UCX's appear."""
    done = run(LIVE + ENDS[end])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_nixl
def test_the_logs_of_the_library_can_be_switched_on() -> None:
    """By its own variable; they come through ``logging``, not on stdout."""
    code = "import logging; logging.basicConfig(level=20)" + LIVE + ENDS["closed"]
    done = run(code, NIXL_LOG_LEVEL="INFO")
    assert (done.returncode, done.stdout) == (0, "")
    assert "NIXL agent" in done.stderr
