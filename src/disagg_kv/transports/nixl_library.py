"""The NIXL library: finding it, keeping it quiet, and one agent of it whose errors are ours.

Checked with NIXL 1.5.1. See ``docs/transports-nixl.md`` for the environment that is set.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NewType

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from ..errors import (
    ConfigurationError,
    MissingDependencyError,
    PeerLostError,
    RegistrationError,
    RemoteProtocolError,
    TransportError,
)
from ..memory import Buffer
from .cuda_driver import Driver, driver

U64 = npt.NDArray[np.uint64]

Place = tuple[str, int]
"""Kind and index of a device."""

Rows = U64 | Sequence[tuple[int, int, int]]
"""Address, bytes and device index of each range, ``[n, 3]``; a plain list is the faster one for a single range."""

MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
"""What the library's packages are imported as, in the order in which they are tried."""

ENVIRONMENT = {"UCX_MODULES": "^efa", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
"""Set before the import, unless the environment has a value already."""

Handle = NewType("Handle", object)
"""A write that the library knows. Never dropped while it may be in flight: the library would read freed memory."""

Registered = NewType("Registered", object)
"""Memory that the library knows."""


@frozen
class DescriptorList:
    """Descriptors of one kind of memory on either side.

    Args:
        here: where the sources are.
        local: the sources.
        there: where the targets are.
        remote: the targets.
    """

    here: Place
    local: Rows = field(eq=False)
    there: Place
    remote: Rows = field(eq=False)


@frozen
class Library:
    """An imported NIXL.

    Args:
        module: it.
        version: major and minor; agents of other ones may not understand each other.
    """

    module: Any
    version: str


def load() -> Library:
    """Import NIXL under whichever name it is installed, without its side effects on logging.

    Raises:
        MissingDependencyError: it is not installed, or a system library that it needs is not.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    problems = []
    for name in MODULES:
        raises = logging.raiseExceptions
        try:
            # It logs its first line while it is imported.
            with redirect_stdout(sys.stderr):
                module = importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
            continue
        finally:
            logging.raiseExceptions = raises
        _to_our_logging()
        try:
            major_minor = ".".join(version(name.replace("_", "-")).split(".")[:2])
        except PackageNotFoundError:
            major_minor = "unknown"
        return Library(module, major_minor)
    raise MissingDependencyError("transport 'nixl'", "; ".join(problems), "pip install nixl (or nixl-cu13, nixl-cu12)")


def _to_our_logging() -> None:
    """The library logs to stdout, which is the application's; let its records go where all others go."""
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True


def place(device: str) -> Place:
    """Of a device as in ``Buffer``: ``"cuda"`` is ``"cuda:0"``."""
    kind, _, index = device.partition(":")
    return kind, int(index or 0)


_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}


class _Mapped:
    """Turns the library's errors into ours; a class, since every write comes through three of them.

    Args:
        what: is done, and to whom.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # The library's exceptions have no common base but Exception, and live in a private module.
        if not isinstance(error, Exception):
            return
        if type(error).__name__ == "nixlRemoteDisconnectError":
            raise PeerLostError(f"nixl: {self._what}: the peer is gone") from error
        raise TransportError(f"nixl: {self._what}: {type(error).__name__}: {error}") from error


class Agent:
    """One agent of the library; one thread at a time calls.

    Args:
        library: from :func:`load`.
        name: unique; no later agent has the same.
        backend: of the library, for example ``"UCX"``.
        options: of the backend.
        device: whose CUDA context the backend finds; ``"cpu"``: none.

    Raises:
        ConfigurationError: the backend cannot be made.
        MissingDependencyError: the library is too old.
    """

    def __init__(self, library: Library, name: str, backend: str, options: Mapping[str, str], device: str) -> None:
        try:
            config = library.module.nixl_agent_config(
                enable_prog_thread=False,
                backends=[],
                sync_mode=library.module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
        except (AttributeError, TypeError) as error:
            problem = f"NIXL {library.version} is too old: {error}"
            raise MissingDependencyError("transport 'nixl'", problem, "pip install 'nixl>=1.5'") from error
        try:
            _use(place(device))
            self._agent = library.module.nixl_agent(name, config)
            self._agent.create_backend(backend, dict(options))
        except Exception as error:
            raise ConfigurationError(
                f"transport 'nixl': backend {backend!r} cannot be made with {dict(options)}: "
                f"{type(error).__name__}: {error}; UCX_TLS={os.environ.get('UCX_TLS')!r} must leave it 'tcp'"
            ) from error

    def register(self, buffer: Buffer) -> Registered:
        """Make memory known.

        Raises:
            RegistrationError: the library refuses it, or peers could reach it only at a crawl.
        """
        kind, index = place(buffer.device)
        rows = [(buffer.addr, buffer.nbytes, index, "")]
        try:
            _use((kind, index))
            if kind == "cuda":
                check_shareable(buffer)
            return Registered(self._agent.register_memory(rows, _KINDS[kind]))
        except RegistrationError:
            raise
        except Exception as error:
            raise RegistrationError(
                f"nixl: {buffer.nbytes} bytes at {buffer.addr:#x} on {buffer.device!r} cannot be registered: "
                f"{type(error).__name__}: {error}"
            ) from error

    def deregister(self, registered: Registered) -> None:
        """Forget memory."""
        with _Mapped("deregister"):
            self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        """What peers need: this agent's addresses and all its memory."""
        with _Mapped("metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes, name: str) -> None:
        """Learn the peer ``name``, or more of its memory.

        Raises:
            RemoteProtocolError: the metadata is garbage or of another agent.
        """
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            if type(error).__name__ in ("nixlMismatchError", "nixlInvalidParamError"):
                raise RemoteProtocolError(
                    f"nixl: {len(metadata)} bytes are no metadata of an agent: {error}"
                ) from error
            raise TransportError(f"nixl: peer {name} cannot be added: {type(error).__name__}: {error}") from error
        if found != name.encode():
            raise RemoteProtocolError(f"nixl: metadata of agent {found!r} instead of {name}")

    def remove(self, name: str) -> None:
        """Forget a peer."""
        with _Mapped(f"peer {name}: remove"):
            self._agent.remove_remote_agent(name)

    def prepare(self, name: str, part: DescriptorList) -> Handle:
        """Describe a write; nothing is read or written yet."""
        with _Mapped(f"peer {name}: {len(part.local)} writes"), _on(part.here):
            local = self._agent.get_xfer_descs(part.local, _KINDS[part.here[0]])
            remote = self._agent.get_xfer_descs(part.remote, _KINDS[part.there[0]])
            return Handle(self._agent.initialize_xfer("WRITE", local, remote, name))

    def post(self, name: str, handle: Handle, here: Place) -> bool:
        """Begin the write, and often finish it: copies are made in this call, unless a GPU makes them. True: done."""
        with _Mapped(f"peer {name}: post"), _on(here):
            return _is_done(self._agent.transfer(handle))

    def done(self, name: str, handle: Handle, here: Place) -> bool:
        """Whether a posted write is done; also what moves it on."""
        with _Mapped(f"peer {name}: write"), _on(here):
            return _is_done(self._agent.check_xfer_state(handle))

    def release(self, handle: Handle) -> None:
        """Forget a write that is not in flight."""
        raw: Any = handle
        with _Mapped("release"):
            raw.release()

    def probe(self, name: str) -> None:
        """Send a message that says nothing: it fails where the peer has ended."""
        with _Mapped(f"peer {name}: probe"):
            self._agent.send_notif(name, b"\0")

    def progress(self) -> None:
        """Move peers' writes on, and drop their probes."""
        with _Mapped("progress"):
            self._agent.get_new_notifs()


def _is_done(status: str) -> bool:
    if status == "ERR":
        raise TransportError("the library reports an error and no reason")
    return status == "DONE"


def _use(device: Place) -> None:
    """Make a CUDA device current in the calling thread: threads begin with device 0. Nothing for CPU memory."""
    if device[0] == "cuda":
        import torch

        torch.cuda.set_device(device[1])


_NOWHERE = nullcontext()


def _on(device: Place) -> AbstractContextManager[None]:
    """The same until the block ends, in a thread that may belong to the engine."""
    return driver().current(device[1]) if device[0] == "cuda" else _NOWHERE


def check_shareable(buffer: Buffer) -> None:
    """Memory mapped piecewise (VMM) registers well, then crosses at a hundredth of the speed, through TCP."""
    try:
        capable = _exported(driver(), buffer)
    except MissingDependencyError:
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        capable = "expandable_segments:True" not in settings
    if not capable:
        raise RegistrationError(
            f"nixl: {buffer.nbytes} bytes at {buffer.addr:#x} on {buffer.device!r} cannot be shared between processes; "
            "use cudaMalloc, not cuMemCreate (fabric handles too): no 'expandable_segments:True' (PYTORCH_ALLOC_CONF)"
        )


def _exported(cuda: Driver, buffer: Buffer) -> bool:
    """Whether another process could open the memory: tried, since the driver's attribute does not tell."""
    device = place(buffer.device)[1]
    try:
        base, _ = cuda.segment(device, buffer.addr)
        cuda.export(device, base)
    except TransportError:
        return False
    return True
