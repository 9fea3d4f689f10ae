"""What shows a rank's endpoints to an operator: metrics over HTTP, and status sockets."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..endpoints import DecodeEndpoint, PrefillEndpoint
from ..ids import Role
from ..observe.status_socket import StatusSocket
from ..trace import Observer, Silent

if TYPE_CHECKING:
    from ..observe.prometheus import MetricsServer, PrometheusObserver


class Shown:
    """The metrics and status sockets of a rank's endpoints.

    Args:
        metrics: ``HOST:PORT`` of rank 0's metrics; "": they are not counted.
        status_socket: whether each endpoint has a status socket.
        rank: this one. Its port is that of rank 0 plus this number; port 0 takes a free one.

    Raises:
        ConfigurationError: the port cannot be served.
        MissingDependencyError: metrics need a package that is not installed.
    """

    def __init__(self, metrics: str, status_socket: bool, rank: int) -> None:
        self._rank = rank
        self._sockets = status_socket
        self._undo = ExitStack()
        self._observers: dict[Role, PrometheusObserver] = {}
        self.server: MetricsServer | None = None
        if metrics:
            from ..observe.prometheus import MetricsServer

            host, _, port = metrics.rpartition(":")
            self.server = MetricsServer(f"{host}:{int(port) + rank if int(port) else 0}")
            self._undo.callback(self.server.close)

    def observer(self, side: Role, instance: str) -> Observer:
        """For the endpoint of a side, which is created next."""
        if self.server is None:
            return Silent()
        made = self.server.metrics.observer(side, instance, self._rank)
        self._observers[side] = self._undo.enter_context(made)
        return made

    def show(self, side: Role, endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
        """The endpoint of a side has been created.

        Raises:
            ConfigurationError: others may enter the folder of status sockets.
        """
        if side in self._observers:
            self._observers[side].watch(endpoint)
        if self._sockets:
            self._undo.enter_context(StatusSocket(endpoint))

    def close(self) -> None:
        """End all of it. May be repeated."""
        self._undo.close()
