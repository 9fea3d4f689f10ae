"""Where the ranks of instances are: asked of the rendezvous on a helper thread, and remembered.

The endpoint's thread asks with :meth:`Directory.ask` and takes results with :meth:`Directory.answers`. Whatever a
rendezvous does (it blocks, raises, or returns what cannot be) becomes an :class:`Answer`.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from attrs import frozen

from ...errors import DisaggKVError, PeerLostError, RemoteProtocolError, text_of, without_frames
from ...ids import Rank
from ...protocol import MAX_RANKS
from ...rendezvous import Rendezvous, Source, SupportsWithdraw
from .background import Background

log = logging.getLogger("disagg_kv")

WITHDRAW_S = 1.0
"""How long an endpoint that closes waits for the rendezvous to take its address back."""

REMEMBERED = 1024
"""Instances whose addresses are remembered."""

FRESH_S = 1.0
"""An answer is used for good while its ranks live; one that is older than this is asked for again meanwhile."""


@frozen
class Answer:
    """What the rendezvous said of an instance.

    Args:
        source: which instance.
        addresses: of all its ranks, in order; None: not all are known yet, or ``error`` says why it is not known.
        error: the rendezvous could not be asked, or what it holds cannot be.
    """

    source: Source
    addresses: tuple[str, ...] | None
    error: DisaggKVError | None = None


class Directory:
    """Look-ups of one endpoint. At most one runs per instance.

    Args:
        rendezvous: who is asked.
        background: where it is asked.
        wake: called on a helper thread when there is an answer.
        clock: time, in seconds.
    """

    def __init__(
        self, rendezvous: Rendezvous, background: Background, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._rendezvous = rendezvous
        self._background = background
        self._wake = wake
        self._clock = clock
        self._asked: set[Source] = set()
        self._answers: deque[Answer] = deque()
        self._known: OrderedDict[Source, tuple[float, tuple[str, ...]]] = OrderedDict()

    def known(self, source: Source) -> tuple[str, ...] | None:
        """The addresses that were last answered; None: none were."""
        found = self._known.get(source)
        return None if found is None else found[1]

    def fresh(self, source: Source) -> bool:
        """Whether they were answered a moment ago."""
        found = self._known.get(source)
        return found is not None and self._clock() - found[0] < FRESH_S

    def ask(self, source: Source) -> None:
        """Look an instance up; the answer comes out of :meth:`answers`."""
        if source in self._asked:
            return
        self._asked.add(source)

        def job() -> None:
            self._answers.append(look_up(self._rendezvous, source))
            self._wake()

        self._background.start(job)

    def answers(self) -> Sequence[Answer]:
        """The answers that have come since the last call."""
        if not self._answers:
            return ()
        came = [self._answers.popleft() for _ in range(len(self._answers))]
        for answer in came:
            self._asked.discard(answer.source)
            if answer.addresses is not None:
                self._known[answer.source] = self._clock(), answer.addresses
                self._known.move_to_end(answer.source)
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        return came

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Take back what was published of a rank, where the rendezvous can; a store that does not answer is left."""
        rendezvous = self._rendezvous
        if not isinstance(rendezvous, SupportsWithdraw):
            return

        def job() -> None:
            try:
                rendezvous.withdraw(instance, rank)
            except Exception as exc:
                log.warning("instance %r: rank %d stays in the rendezvous: %s", instance, rank, text_of(exc))

        asking = threading.Thread(target=job, name="disagg_kv-withdraw", daemon=True)
        asking.start()
        asking.join(WITHDRAW_S)


def look_up(rendezvous: Rendezvous, source: Source) -> Answer:
    """Ask, and check what was answered; never raises."""
    try:
        found = rendezvous.lookup(source)
        if found is not None:
            _check(source, found)
    except DisaggKVError as exc:
        without_frames(exc)
        return Answer(source, None, exc)
    except Exception as exc:
        error = PeerLostError(f"instance {source.instance!r}: the rendezvous failed: {text_of(exc)}")
        return Answer(source, None, error)
    return Answer(source, None if found is None else tuple(found))


def _check(source: Source, found: Sequence[object]) -> None:
    """A rendezvous is open to others, and may be a user's class."""
    name = f"instance {source.instance!r}: the rendezvous holds"
    if isinstance(found, str) or not all(isinstance(address, str) and address for address in found):
        raise RemoteProtocolError(f"{name} {str(found)[:200]!r}, which is no list of addresses")
    if not 1 <= len(found) <= MAX_RANKS:
        raise RemoteProtocolError(f"{name} {len(found)} addresses; 1 to {MAX_RANKS} are allowed")
