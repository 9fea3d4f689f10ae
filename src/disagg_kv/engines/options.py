"""Options that the adapters of all engines have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs
from attrs import field, frozen

from .. import arguments
from ..core import Verify, check_verify
from ..errors import ConfigurationError, UnknownNameError
from ..strategies import strategy
from .common import COMMON, DESCRIPTIONS, OWN
from .meeting import meeting_place

CHANNELS = ("unix", "zmq")


def _by_transport(given: Mapping[str, Mapping[str, object]]) -> Mapping[str, Mapping[str, object]]:
    every = arguments.mapping(given, "transport_options")
    return {
        arguments.text(name, "transport_options: name"): {
            arguments.text(option, f"transport_options of {name!r}: name"): value
            for option, value in arguments.mapping(of, f"transport_options of {name!r}").items()
        }
        for name, of in every.items()
    }


@frozen(kw_only=True)
class EngineOptions:
    """Options of an adapter; each default works between instances on one host.

    Args:
        strategy: path and schedule, as for :func:`~disagg_kv.strategies.strategy`; the selection is ``incremental``.
        transport: name of a transport, of several as ``"cuda_ipc+nixl"``, or ``"auto"``: ``shm`` for CPU memory,
            ``cuda_ipc`` for GPUs, and a network if ``listen`` is an address that other hosts can reach.
        transport_options: of some of these transports, by name: ``{"nixl": {"drain_s": 120}}``. Without them, each has
            what its place needs: the GPU, and of ``listen`` the address at which other hosts reach it.
        channel: ``unix`` (processes of one user on one host) or ``zmq``.
        listen: where the channel listens: a directory of socket files for ``unix``, an address such as
            ``tcp://10.0.0.1:0`` for ``zmq``; "": a fresh directory, ``tcp://127.0.0.1:0``.
        rendezvous: "": addresses travel in the engine's own messages; ``tcp://HOST:PORT``: a torch ``TCPStore`` there;
            ``etcd://HOST:PORT[,HOST:PORT]/PREFIX``: an etcd cluster without TLS and users.
        keys: for ``zmq`` beyond one host: ``SECRET_FILE,ALLOWED_DIRECTORY``, as ``disagg-kv keys`` writes them.
        staging_bytes: bytes of the staging ring of a decode rank, and of all staging slots of a prefill rank; None: 64
            MiB for CPU memory, the endpoints' own sizes for GPUs.
        description: of the cache: ``own``, as this engine stores it, for the same engine on both sides; ``common``, in
            terms that the adapters of several engines share.
        verify: which segments decode compares with checksums: ``off``, ``sampled`` or ``full``.
        silence_s: seconds without a frame after which a peer is lost.
        claim_s: seconds for which prefill keeps the pages of a request that no decode instance has asked for. With
            vLLM, prefill keeps them for longer while a decode instance queues the request; otherwise a request that
            waits in decode's queue for longer is not loaded.
        total_s: seconds after which a transfer fails.
        metrics: where Prometheus gets the metrics of the endpoints: ``HOST:PORT`` of rank 0, and the next port for each
            further rank; "": nowhere.
        status_socket: ``disagg-kv top`` shows the endpoints; see
            :class:`~disagg_kv.observe.status_socket.StatusSocket`.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    strategy: str = "auto"
    transport: str = "auto"
    transport_options: Mapping[str, Mapping[str, object]] = field(factory=dict, converter=_by_transport, hash=False)
    channel: str = "unix"
    listen: str = ""
    rendezvous: str = ""
    keys: str = ""
    staging_bytes: int | None = None
    description: str = OWN
    verify: Verify = "off"
    silence_s: float = 30.0
    claim_s: float = 30.0
    total_s: float = 300.0
    metrics: str = ""
    status_socket: bool = False

    def __attrs_post_init__(self) -> None:
        for name in ("strategy", "transport", "channel", "listen", "rendezvous", "keys", "description", "metrics"):
            arguments.text(getattr(self, name), name)
        for name in ("silence_s", "claim_s", "total_s"):
            arguments.seconds(getattr(self, name), name)
        arguments.flag(self.status_socket, "status_socket")
        host, _, port = self.metrics.rpartition(":")
        if self.metrics and not (host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
            raise ConfigurationError(f"metrics {self.metrics!r}: not HOST:PORT")
        strategy(self.strategy)
        check_verify(self.verify)
        if self.channel not in CHANNELS:
            raise UnknownNameError("channel", self.channel, CHANNELS)
        if self.description not in DESCRIPTIONS:
            raise UnknownNameError("description", self.description, DESCRIPTIONS)
        if self.keys and (self.channel != "zmq" or self.keys.count(",") != 1):
            raise ConfigurationError(f"keys {self.keys!r}: needs channel 'zmq' and SECRET_FILE,ALLOWED_DIRECTORY")
        if self.rendezvous:
            meeting_place(self.rendezvous)
        if self.staging_bytes is not None:
            arguments.count(self.staging_bytes, "staging_bytes", least=1 << 16)

    @classmethod
    def read(cls, where: str, given: Mapping[str, object]) -> Self:
        """From what a user has set at ``where``.

        Raises:
            UnknownNameError: an option of another name; lists those that there are.
            ConfigurationError: a value that cannot be.
        """
        known = [one.name for one in attrs.fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownNameError(f"option of {where}", str(name), known)
        return cls(**given)  # type: ignore[arg-type]

    @property
    def common(self) -> bool:
        """Whether the cache is described in the terms that engines share."""
        return self.description == COMMON

    @property
    def layered(self) -> bool:
        """Whether layers are sent while others are computed."""
        return strategy(self.strategy).schedule.name != "per_chunk"
