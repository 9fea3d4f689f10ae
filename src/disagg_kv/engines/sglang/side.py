"""What the requests of a rank have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...endpoints import DecodeEndpoint, PrefillEndpoint
from ...memory import Event
from ...rendezvous import Source
from ..opening import Opened
from .bootstrap import Directory
from .cache import SGLangPool

if TYPE_CHECKING:
    from .passes import Passes
    from .rooms import ReceiverRoom


class Side:
    """A rank's endpoint, and what its rooms need of the host.

    Args:
        endpoint: prefill's or decode's.
        page: tokens of a page.
        mark: of prefill: an event that fires once the rows that are computed now are final; None: they are final.
        opened: what else ends with the endpoint; None: nothing.
        pool: of decode: has the metadata rows, where prefill may be another engine, which has none; None: it is not.
        defers: of decode: SGLang keeps the pages of a request that has failed until :meth:`free` is true.
    """

    def __init__(
        self,
        endpoint: PrefillEndpoint | DecodeEndpoint,
        page: int,
        mark: Callable[[], Event] | None = None,
        opened: Opened | None = None,
        pool: SGLangPool | None = None,
        defers: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.page = page
        self.mark = mark
        self.pool = pool
        self.defers = defers
        self.kept: dict[int | None, ReceiverRoom] = {}
        """Failed rooms whose pages SGLang keeps, by SGLang's numbers."""
        self._opened = opened
        self.passes: Passes | None = None
        """Of prefill: sends layers while others are computed; None: SGLang reports the rows after each pass."""
        self.turn = 0
        """Of SGLang's scheduler, about: each turn polls every request, and the first poll advances the endpoint."""
        self.directory = Directory()
        self._met: dict[str, int] = {}

    @property
    def closed(self) -> bool:
        """Whether the endpoint moves nothing any more.

        Raises:
            EndpointBrokenError: it has failed as a whole, and may still read or write pages that SGLang would use
                again: the server has to end.
        """
        if self.endpoint.closed:
            return True
        self.endpoint.poll()
        return False

    def closed_at(self, turn: int) -> bool:
        """The same for a request that was polled in ``turn``: the endpoint has advanced if a new one has begun."""
        if turn != self.turn:
            return self.endpoint.closed
        self.turn += 1
        return self.closed

    def free(self, number: int | None) -> bool:
        """Whether nothing touches the pages of a failed room any more."""
        room = self.kept.get(number)
        return room is None or not room.exposed

    def forget_doubtful(self, address: str) -> None:
        """Forget the prefill instances at a bootstrap address if one of them has lost a process: another may be there.

        Only here, in :meth:`ensure` and in :meth:`lost` an address that is known becomes unknown: between two of its
        questions SGLang's scheduler relies on the first answer.
        """
        for source in filter(self._doubts, self.directory.get(address)):
            self.lost(source)

    def ensure(self, address: str) -> bool:
        """Ask the bootstrap server for instances that are not known, or in doubt; False: call again later.

        What it answers is believed until a request has failed or succeeded.
        """
        self.forget_doubtful(address)
        return self.directory.ensure(address)

    def _doubts(self, source: Source) -> bool:
        return self._connected(source) < self._met.get(source.instance, 0)

    def met(self, source: Source) -> None:
        """A request of this instance has succeeded: its ranks are connected now."""
        self._met[source.instance] = self._connected(source)

    def lost(self, source: Source) -> None:
        """A request of this instance has failed because it is lost, or it is in doubt: it is asked for again."""
        self._met.pop(source.instance, None)
        self.directory.forget(source.instance)

    def _connected(self, source: Source) -> int:
        """Ranks of an instance that are connected."""
        here = ("connected", "idle", "silent")
        return sum(peer.instance == source.instance and peer.state in here for peer in self.endpoint.peers())

    def close(self) -> None:
        """End the endpoint."""
        (self.endpoint if self._opened is None else self._opened).close()
