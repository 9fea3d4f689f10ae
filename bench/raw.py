"""A library's own call for one write, without this package between it and its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from attrs import frozen

from disagg_kv.errors import ConfigurationError, TransportError
from disagg_kv.memory import Buffer


@frozen
class Target:
    """The target of raw writes.

    Args:
        handle: the library's reference to its owner.
        addr: address of the memory there.
    """

    handle: bytes
    addr: int


class Raw(Protocol):
    """One side of a library: a target, or a source of one write again and again."""

    pause_s: float | None
    """How often ``work`` has to be called on a target; None: never."""

    def target(self) -> Target:
        """Where others may write to."""
        ...

    def prepare(self, target: Target, nbytes: int) -> Callable[[], None]:
        """What writes the first ``nbytes`` of our memory there, and returns when they have landed."""
        ...

    def work(self) -> None:
        """Move on what others write."""
        ...


class RawNixl:
    """NIXL with an agent of its own, and no progress thread: such a thread takes a whole core."""

    pause_s: float | None = 0.001

    def __init__(self, memory: Buffer, name: str) -> None:
        from disagg_kv.transports.nixl_library import load

        module = load().module
        config = module.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = module.nixl_agent(name, config)
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        self._memory = memory
        self._registered = self._agent.register_memory([(memory.addr, memory.nbytes, 0, "")], "DRAM")

    def target(self) -> Target:
        """See :class:`Raw`."""
        return Target(self._agent.get_agent_metadata(), self._memory.addr)

    def prepare(self, target: Target, nbytes: int) -> Callable[[], None]:
        """See :class:`Raw`; every write has a new descriptor, as in a serving engine."""
        agent = self._agent
        name = agent.add_remote_agent(target.handle).decode()
        here, there = [(self._memory.addr, nbytes, 0)], [(target.addr, nbytes, 0)]

        def write() -> None:
            handle = agent.initialize_xfer(
                "WRITE", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), name, b""
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise TransportError(f"nixl: a raw write of {nbytes} bytes ended as {state}")
            handle.release()

        return write

    def work(self) -> None:
        """See :class:`Raw`."""
        self._agent.get_new_notifs()


class RawMooncake:
    """Mooncake's blocking call on an engine of its own."""

    pause_s: float | None = None

    def __init__(self, memory: Buffer, name: str) -> None:
        from disagg_kv.transports.mooncake_library import Engine, load

        self._engine = Engine(
            load(),
            host="127.0.0.1",
            protocol="tcp",
            device_name="",
            timeout_s=None,
            quiet=True,
        )
        self._memory = memory
        self._engine.register(memory.addr, memory.nbytes)

    def target(self) -> Target:
        """See :class:`Raw`."""
        return Target(self._engine.session.encode(), self._memory.addr)

    def prepare(self, target: Target, nbytes: int) -> Callable[[], None]:
        """See :class:`Raw`."""
        call, session = self._engine.raw.transfer_sync_write, target.handle.decode()

        def write() -> None:
            if call(session, self._memory.addr, target.addr, nbytes):
                raise TransportError(f"mooncake: a raw write of {nbytes} bytes failed")

        return write

    def work(self) -> None:
        """See :class:`Raw`: nothing to do."""


_RAW: dict[str, type[RawNixl | RawMooncake]] = {"nixl": RawNixl, "mooncake": RawMooncake}


def raw(name: str, memory: Buffer, side: str) -> Raw:
    """The library behind a transport.

    Raises:
        ConfigurationError: the transport has none.
        MissingDependencyError: it is not installed.
    """
    if name not in _RAW:
        raise ConfigurationError(f"transport {name!r} has no library behind it to compare with: {', '.join(_RAW)}")
    return _RAW[name](memory, f"raw-{side}")
