"""Mooncake's library: found or named, silent, and gone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from disagg_kv.errors import ConfigurationError
from disagg_kv.transports import transport
from disagg_kv.transports.mooncake import MooncakeTransport
from disagg_kv.transports.mooncake_library import PACKAGES, load
from tests.support.needs import needs_mooncake

BLOCKER = """
import sys
from disagg_kv.errors import MissingDependencyError
from disagg_kv.transports import transport

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mooncake":
            raise error

sys.meta_path.insert(0, Blocker())
for error in [ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), *map(ImportError, {errors})]:
    try:
        transport("mooncake")
    except MissingDependencyError as missing:
        print(missing.reason, missing.remedy, sep=" | ")
"""

TRANSFER = """
import numpy as np
from disagg_kv.memory import Buffer
from disagg_kv.planning import Writes
from disagg_kv.transports.mooncake import MooncakeTransport
from disagg_kv.transports import WriteEnded

sides = [MooncakeTransport({options}) for _ in range(2)]
memory = [np.full(1 << 20, i, np.uint8) for i in range(2)]
for side, m in zip(sides, memory):
    side.register([Buffer(m.ctypes.data, m.nbytes, owner=m)])
peer = sides[0].connect(sides[1].local_descriptor(), 120.0)

def write():
    ticket = sides[0].submit(peer, Writes.one(0, 0, 0, 0, 1 << 20))
    while True:
        for event in sides[0].poll():
            if isinstance(event, WriteEnded) and event.ticket == ticket:
                return event.error

assert write() is None
assert (memory[1] == 0).all()
"""

FAILURE = """
sides[1]._engine().unregister(memory[1].ctypes.data)
assert "may be gone there" in str(write())
for side in sides:
    side.close(1.0)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    # What the developer has set for the library shall not decide.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=False)


def test_what_is_missing_is_named_with_the_command() -> None:
    """The package, a system library by its Debian package, or whatever the dynamic linker says."""
    errors = [f"{library}: cannot open shared object file: No such file" for library in (*PACKAGES, "libcudart.so.12")]
    done = run(BLOCKER.format(errors=errors))
    package, *libraries, other = done.stdout.splitlines()
    assert package.startswith("Python package 'mooncake' is missing | pip install mooncake-transfer-engine-non-cuda")
    assert libraries == [
        f"system library {library} is missing (Debian package {debian}) | "
        f"apt-get install --no-install-recommends {debian}"
        for library, debian in PACKAGES.items()
    ]
    assert "libcudart.so.12: cannot open" in other


ARRAYS = """
import numpy as np, sys, types
import mooncake.engine as real

class WithArrays(real.TransferEngine):
    calls = 0

    def batch_transfer_sync_write_arrays(self, session, source, target, nbytes):
        assert all(a.dtype == np.uint64 and a.flags.c_contiguous for a in (source, target, nbytes))
        type(self).calls += 1
        return super().batch_transfer_sync_write(session, source.tolist(), target.tolist(), nbytes.tolist())

    def batch_transfer_sync_write(self, session, source, target, nbytes):
        raise AssertionError("there is a call for arrays")

module = types.ModuleType("mooncake.engine")
module.__dict__.update(vars(real), TransferEngine=WithArrays)
sys.modules["mooncake.engine"] = module
"""

SCATTERED = """
where = np.arange(0, 1 << 20, 1 << 16)
ones, many = np.zeros(len(where), np.int32), np.full(len(where), 100)
memory[0][:] = 7
ticket = sides[0].submit(peer, Writes(ones, where, ones, where, many))
while not any(isinstance(e, WriteEnded) and e.ticket == ticket and e.error is None for e in sides[0].poll()):
    pass
assert all((memory[1][at : at + 100] == 7).all() and memory[1][at + 100] == 0 for at in where)
"""


@needs_mooncake
@pytest.mark.parametrize("arrays", [True, False])
def test_writes_of_whole_arrays_are_used_where_the_build_has_them(arrays: bool) -> None:
    """Asked of the engine, not of its version: 0.3.14 has them, 0.3.13 not. The bytes cross for real either way."""
    checked = "assert WithArrays.calls > 0, WithArrays.calls\n" if arrays else ""
    done = run((ARRAYS if arrays else "") + TRANSFER.format(options="") + SCATTERED + checked)
    assert (done.returncode, done.stderr) == (0, "")


@needs_mooncake
@pytest.mark.slow
def test_nothing_is_written_to_stdout_and_stderr() -> None:
    """Neither when it works nor when it fails."""
    done = run(TRANSFER.format(options="") + FAILURE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_mooncake
def test_the_library_can_be_let_speak() -> None:
    """With ``quiet=False``, on stderr."""
    done = run(TRANSFER.format(options="quiet=False"))
    assert (done.returncode, done.stdout) == (0, "")
    assert "transfer_engine_impl.cpp" in done.stderr


@needs_mooncake
@pytest.mark.slow
def test_a_process_without_standard_streams_can_use_it() -> None:
    """As a daemon."""
    done = run("import os\nfor fd in (0, 1, 2): os.close(fd)\n" + TRANSFER.format(options=""))
    assert done.returncode == 0


@needs_mooncake
@pytest.mark.slow
def test_a_process_that_never_closes_ends_well() -> None:
    """With a write queued at its very end, too."""
    done = run(TRANSFER.format(options="") + "sides[0].submit(peer, Writes.one(0, 0, 0, 0, 1 << 20))\n")
    assert (done.returncode, done.stderr) == (0, "")


@needs_mooncake
def test_close_gives_back_threads_and_descriptors() -> None:
    """And the environment is as before."""
    code = """
import os, time
def count():
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
first = None
for _ in range(4):
    exec(TRANSFER)
    for side in sides:
        side.close(1.0)
    del side
    first = first or count()
# The kernel shows a thread for a while after it was joined.
until = time.monotonic() + 60
while not all(now <= then for now, then in zip(count(), first)):
    assert time.monotonic() < until, (first, count())
assert not [name for name in os.environ if name.startswith("MC_")]
"""
    done = run(f"TRANSFER = {TRANSFER.format(options='')!r}\n{code}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"protocol": "pigeon"}, "'pigeon'; known: tcp, rdma, nvlink_intra"),
        ({"host": ""}, "host ''"),
        ({"host": "127.0.0.1:80"}, "without a port"),
        ({"workers": 0}, "0 workers"),
        ({"timeout_s": 4}, "timeout_s of 4"),
    ],
)
def test_an_option_that_cannot_work_is_refused(option: dict[str, str | int], says: str) -> None:
    """Before the library is imported."""
    with pytest.raises(ConfigurationError, match=says):
        transport("mooncake", **option)


@needs_mooncake
@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this host may have RDMA")
def test_rdma_without_an_adapter_is_refused() -> None:
    """The library would use tcp."""
    with pytest.raises(ConfigurationError, match="no RDMA device"):
        MooncakeTransport(protocol="rdma")


@needs_mooncake
def test_a_protocol_that_the_build_lacks_is_refused() -> None:
    """The library would use tcp."""
    if load().SUPPORT_INTRA_NVLINK:
        pytest.skip("this build has it")
    with pytest.raises(ConfigurationError, match="no nvlink_intra in this build"):
        MooncakeTransport(protocol="nvlink_intra")


@needs_mooncake
@pytest.mark.parametrize("variable", ["MC_LOG_DIR", "MC_TCP_PROTO"])
def test_a_variable_that_does_harm_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the library reads it."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigurationError, match=f"unset the environment variable {variable}"):
        MooncakeTransport()
