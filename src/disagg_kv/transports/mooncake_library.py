"""The Mooncake library: finding it, keeping it quiet, and one engine of it.

Checked with mooncake-transfer-engine 0.3.13 and 0.3.14. ``docs/transports-mooncake.md`` gives the settings and reasons.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from ..errors import ConfigurationError, MissingDependencyError, RegistrationError, TransportError

U64 = npt.NDArray[np.uint64]

NOTHING: U64 = np.empty(0, np.uint64)
"""A write of it makes the library get to know a peer, and writes nothing."""

PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libmlx5.so.1": "ibverbs-providers",
}
"""System libraries that the wheels leave out, and the Debian packages that have them."""

NEEDED = ("TransferEngine", "SUPPORT_CUDA", "SUPPORT_INTRA_NVLINK")
"""Names in the module; 0.3.10 has only the first."""

SWITCHES: Mapping[str, Mapping[str, str]] = {
    "tcp": {"MC_FORCE_TCP": "1"},
    "rdma": {},
    "nvlink_intra": {"MC_INTRANODE_NVLINK": "1"},
}
"""The protocols, and the variables that really select them: the library ignores most arguments of ``initialize``."""

_ERROR, _FATAL = 2, 3
"""Severities of glog. Writes that fail come back as return codes, and this package reports them."""

_ACCEPT_US = 5000
"""How long the engine's listener may block once it is to end; 1 s by default, during which nothing in Python runs."""

_HARMFUL = {
    "MC_LOG_DIR": "the library would abort the process",
    "MC_TCP_PROTO": "writes might end before their bytes are at the target",
}

_RDMA_DEVICES = Path("/sys/class/infiniband")

_REFUSALS = {-7: "it overlaps memory that the library has registered"}

_LOG_BYTES = 4096

_process = threading.Lock()
"""Held while something of the whole process is changed for a moment: the environment, file descriptors 1 and 2."""


class _Engine(Protocol):
    """The part of ``mooncake.engine.TransferEngine`` that is used."""

    def initialize(self, host: str, metadata: str, protocol: str, device_name: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, addr: int, nbytes: int, /) -> int: ...

    def unregister_memory(self, addr: int, /) -> int: ...

    def transfer_sync_write(self, session: str, source: int, target: int, nbytes: int, /) -> int: ...

    def batch_transfer_sync_write(
        self, session: str, source: list[int], target: list[int], nbytes: list[int], /
    ) -> int: ...

    def transfer_submit_write(self, session: str, source: int, target: int, nbytes: int, /) -> int: ...

    def transfer_check_status(self, batch: int, /) -> int: ...


class _ArrayEngine(_Engine, Protocol):
    """What 0.3.14 adds."""

    def batch_transfer_sync_write_arrays(self, session: str, source: U64, target: U64, nbytes: U64, /) -> int: ...


def load() -> ModuleType:
    """Import ``mooncake.engine``.

    Raises:
        MissingDependencyError: it is not installed, is too old, or a system library that it needs is not there.
    """
    try:
        module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "transport 'mooncake'",
            f"Python package {error.name!r} is missing",
            "pip install mooncake-transfer-engine-non-cuda (for GPU memory: mooncake-transfer-engine-cuda13)",
        ) from error
    except ImportError as error:
        for library, package in PACKAGES.items():
            if library in str(error):
                raise MissingDependencyError(
                    "transport 'mooncake'",
                    f"system library {library} is missing (Debian package {package})",
                    f"apt-get install --no-install-recommends {package}",
                ) from error
        raise MissingDependencyError(
            "transport 'mooncake'",
            f"mooncake.engine cannot be loaded: {error}",
            "install the libraries it names; without CUDA, pip install mooncake-transfer-engine-non-cuda",
        ) from error
    lacking = [name for name in NEEDED if not hasattr(module, name)]
    if lacking:
        raise MissingDependencyError(
            "transport 'mooncake'",
            f"the library is too old: mooncake.engine has no {', '.join(lacking)}",
            "upgrade its package to 0.3.13 or later: pip install 'mooncake-transfer-engine-non-cuda>=0.3.13'",
        )
    return module


class Engine:
    """One engine. Its destructor ends all its connections and threads: from then on it reads and writes nothing.

    Args:
        module: from :func:`load`.
        host: how peers reach this host.
        protocol: one of :data:`SWITCHES`.
        device_name: RDMA devices to use, comma-separated; empty: all.
        timeout_s: of a write, at least 5; None: the environment's or the library's.
        quiet: the library writes nothing to stdout and stderr.

    Raises:
        ConfigurationError: the protocol or device cannot be used here, or the engine cannot be made.
    """

    def __init__(
        self,
        module: ModuleType,
        *,
        host: str,
        protocol: str,
        device_name: str,
        timeout_s: int | None,
        quiet: bool,
    ) -> None:
        what = f"mooncake: engine at {host!r}, protocol {protocol!r}, device {device_name!r}"
        if protocol == "rdma" and not _RDMA_DEVICES.is_dir():
            raise ConfigurationError(f"{what}: this host has no RDMA device, and the library would use tcp in silence")
        for variable, harm in _HARMFUL.items():
            if variable in os.environ:
                raise ConfigurationError(f"{what}: unset the environment variable {variable}: {harm}")
        switches: dict[str, str | None] = dict.fromkeys(s for each in SWITCHES.values() for s in each)
        switches |= SWITCHES[protocol]
        if timeout_s is not None:
            switches["MC_TRANSFER_TIMEOUT"] = str(timeout_s)
        if quiet:
            switches["MC_LOG_LEVEL"] = os.environ.get("MC_LOG_LEVEL", "ERROR")
        with _process, _environment(switches), _muted(quiet) as said:
            _level(module, _ERROR if quiet else None)
            engine = cast("_Engine", module.TransferEngine())
            try:
                code = engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)
            except RuntimeError as error:
                raise ConfigurationError(f"{what}: {error}") from error
            _level(module, _FATAL if quiet else None)
        if code:
            raise ConfigurationError(f"{what}: initialize returned {code}; {said() or 'the reason is on stderr'}")
        self.raw = engine
        self._write_arrays = (
            cast("_ArrayEngine", engine).batch_transfer_sync_write_arrays
            if hasattr(engine, "batch_transfer_sync_write_arrays")
            else None
        )
        # Without its pool of connections the library makes one for each write, and waits for it; without its cache, it
        # fetches what it knows of a peer while it begins a write.
        pooled = os.environ.get("MC_TCP_ENABLE_CONNECTION_POOL", "1").lower() not in ("0", "false", "no")
        self.begins = protocol == "tcp" and pooled and "MC_DISABLE_METACACHE" not in os.environ
        self.port = engine.get_rpc_port()
        self.session = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def register(self, addr: int, nbytes: int) -> None:
        """Let peers write to memory.

        Raises:
            RegistrationError: the library refuses it.
        """
        code = self.raw.register_memory(addr, nbytes)
        if code:
            reason = _REFUSALS.get(code, "memory of this kind cannot be registered with this protocol")
            raise RegistrationError(f"mooncake: {nbytes} bytes at {addr:#x}: {reason} (register_memory: {code})")

    def unregister(self, addr: int) -> None:
        """Let peers no longer write to memory; one that is not registered is ignored."""
        self.raw.unregister_memory(addr)

    def write_one(self, session: str, source: int, target: int, nbytes: int) -> int:
        """As :meth:`write`, of one range."""
        return self.raw.transfer_sync_write(session, source, target, nbytes)

    def begin(self, session: str, source: int, target: int, nbytes: int) -> int:
        """Begin a write of one range, without blocking if :attr:`begins`; 0: it has failed, else for :meth:`status`."""
        return self.raw.transfer_submit_write(session, source, target, nbytes)

    def status(self, batch: int) -> int:
        """The state of a write from :meth:`begin`: 1, done; -1, failed; any other value, in flight.

        After 1 or -1 the library forgets the write; do not ask for its state again. Of a batch of several ranges, the
        library would check the first only.
        """
        return self.raw.transfer_check_status(batch)

    def write(self, session: str, source: U64, target: U64, nbytes: U64) -> int:
        """Blocks, without the GIL, until everything is written (0) or the library gives up, for whatever reason (-1).

        After -1 the data may still be written, and read.
        """
        if self._write_arrays is not None:
            return self._write_arrays(session, source, target, nbytes)
        return self.raw.batch_transfer_sync_write(session, source.tolist(), target.tolist(), nbytes.tolist())

    def hurry(self) -> None:
        """Let the destructor, which comes next and holds the GIL, end in milliseconds instead of a second."""
        listener = _listener(self.port)
        if listener is None:
            return
        with listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, _ACCEPT_US))
            host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
        try:
            # Its listening thread is in an accept of the old length; a guest ends that.
            reach(host, self.port, 1.0)
        except (TransportError, OSError):
            return


def reach(host: str, port: int, timeout_s: float) -> None:
    """Connect to an engine's port: a live engine closes the connection. A call of the library could block for 61 s.

    Raises:
        ConnectionRefusedError: no process listens there: the engine is gone.
        TransportError: no answer in time, or no way to get there.
    """
    for again in (True, True, True, True, False):
        try:
            with socket.create_connection((host, port), timeout_s) as guest:
                guest.shutdown(socket.SHUT_WR)
                guest.recv(1)
            return
        except ConnectionRefusedError:
            raise
        except OSError as error:
            # An engine that ends cuts off connections that wait to be accepted; later ones are refused.
            if again and error.errno in (errno.ECONNRESET, errno.ENOTCONN):
                continue
            raise TransportError(f"mooncake: {host}:{port} does not answer: {error}", retryable=True) from error


def _listener(port: int) -> socket.socket | None:
    """This process's socket that listens on ``port``."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            fd = os.dup(int(link.name))
        except OSError:
            continue  # the one that lists the directory
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            continue
        found = socket.socket(fileno=fd)
        inet = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        if inet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
            return found
        found.close()
    return None


def _level(module: ModuleType, level: int | None) -> None:
    """Set the least severity that the library logs."""
    if level is None or module.__file__ is None:
        return
    try:
        ctypes.c_int.in_dll(ctypes.CDLL(module.__file__), "_ZN3fLI17FLAGS_minloglevelE").value = level
    except (OSError, ValueError):
        # A build that hides it continues to log its errors on stderr, which is harmless.
        return


@contextmanager
def _environment(switches: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables of this process, for a moment; None: not set."""
    before = {name: os.environ.get(name) for name in switches}
    _set(switches)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _muted(wanted: bool) -> Iterator[_Said]:
    """Send what is written to file descriptors 1 and 2 elsewhere; what is yielded returns it.

    C++ code cannot be muted in another way. It is the whole process: what other threads write meanwhile is lost, too.
    """
    said = _Said()
    if not wanted:
        yield said
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    kept = {fd: os.dup(fd) for fd in (1, 2) if _is_open(fd)}
    log = os.memfd_create("mooncake-log", os.MFD_CLOEXEC)
    try:
        for fd in kept:
            os.dup2(log, fd)
        yield said
    finally:
        for fd, old in kept.items():
            os.dup2(old, fd)
            os.close(old)
        said.text = os.pread(log, _LOG_BYTES, 0).decode(errors="replace").strip()
        os.close(log)


class _Said:
    """What a library wrote while it was muted."""

    text = ""

    def __call__(self) -> str:
        return self.text


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
