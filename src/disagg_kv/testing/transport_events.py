"""The part of the transport suite about batches that wait for an event, where ``caps.waits_events``."""

from __future__ import annotations

import pytest

from ..errors import DisaggKVError, TransportError
from ..ids import Ticket
from .limits import at_most
from .pair import Pair, Row, batch, refused
from .transport_cases import NBYTES, TransportCases

FEW: list[Row] = [(0, 0, 100)]
MANY: list[Row] = [(2 * i, 2 * i, 1) for i in range(20000)]
"""More than a transport does in passing."""


class FiredEvent:
    """An event that happens, or fails, when the test sets it."""

    happened = False
    error: Exception | None = None

    def query(self) -> bool:
        """Whether it has happened."""
        if self.error is not None:
            raise self.error
        return self.happened

    def synchronize(self) -> None:
        """Fail unless the event has happened: a transport must not wait for it."""
        assert self.happened, "a transport that waits for events must not block in submit"


def submit_after(pair: Pair, rows: list[Row], after: FiredEvent) -> Ticket:
    """As many of the writes as one batch may have, behind an event."""
    writes = batch(pair.local, pair.remote, rows[: pair.caps.max_batch])
    return pair.source.transport.submit(pair.peer, writes, after=after)


class EventCases(TransportCases):
    """Nothing of a batch is read or written before its event."""

    @pytest.fixture
    def waiting(self, pair: Pair) -> Pair:
        """A pair whose source waits for events."""
        if not pair.caps.waits_events:
            pytest.skip("refuses events")
        return pair

    @staticmethod
    def _ends_quiet(pair: Pair, ticket: Ticket) -> None:
        """A ticket ends with an error, and nothing of it was posted."""
        ended = pair.end(ticket)
        assert ended.quiesced, f"{ended}: nothing of it was posted, so it is quiet"
        assert isinstance(ended.error, TransportError), f"{ended}: wanted a TransportError"
        pair.check()

    def test_an_event_is_refused_where_it_would_not_be_waited_for(self, pair: Pair) -> None:
        """Nothing is written before it, or without it."""
        if pair.caps.waits_events:
            pytest.skip("waits for events")
        with refused(TransportError, "an event without caps.waits_events"):
            submit_after(pair, FEW, FiredEvent())
        pair.check()

    @pytest.mark.parametrize("rows", [FEW, MANY], ids=["few", "many"])
    def test_a_batch_waits_for_its_event_and_others_do_not(self, waiting: Pair, rows: list[Row]) -> None:
        """Its source may change until then; a batch that waits for nothing passes it."""
        pair, flag = waiting, FiredEvent()
        ticket = submit_after(pair, rows, flag)
        pair.put((NBYTES - 10, NBYTES - 10, 10))
        assert ticket not in pair.log.ended, "a ticket ended before its event"
        pair.check()
        flag.happened = True
        pair.land(ticket, *rows[: pair.caps.max_batch])

    def test_an_event_that_has_happened_delays_nothing(self, waiting: Pair) -> None:
        """As if there were none."""
        flag = FiredEvent()
        flag.happened = True
        pair = waiting
        pair.land(submit_after(pair, FEW, flag), *FEW)

    @pytest.mark.parametrize("error", [RuntimeError("the engine's own"), DisaggKVError("the engine's own")])
    @pytest.mark.parametrize("rows", [FEW, MANY], ids=["few", "many"])
    def test_an_event_that_fails_ends_its_batch_of_which_nothing_moves(
        self, waiting: Pair, rows: list[Row], error: Exception
    ) -> None:
        """Quiet at once."""
        pair, flag = waiting, FiredEvent()
        ticket = submit_after(pair, rows, flag)
        pair.work()
        flag.error = error
        self._ends_quiet(pair, ticket)
        ended = pair.log.ended[ticket]
        assert "the engine's own" in str(ended.error), f"{ended}: the error does not name that of the event"

    @pytest.mark.parametrize("rows", [FEW, MANY], ids=["few", "many"])
    def test_close_ends_what_still_waits(self, waiting: Pair, rows: list[Row]) -> None:
        """Nothing of it was read or written, nor will be."""
        pair, flag = waiting, FiredEvent()
        ticket = submit_after(pair, rows, flag)
        pair.work()
        assert ticket not in pair.source.close(0.0), "close calls a ticket unquiet of which nothing was posted"
        flag.happened = True
        self._ends_quiet(pair, ticket)

    @pytest.mark.parametrize("rows", [FEW, MANY], ids=["few", "many"])
    def test_neither_submit_nor_poll_waits_for_an_event(self, waiting: Pair, rows: list[Row]) -> None:
        """The event happens only after both have returned."""
        pair, flag = waiting, FiredEvent()
        with at_most(pair.timeout_s, "submit or poll, while an event has not happened,"):
            ticket = submit_after(pair, rows, flag)
            for _ in range(20):
                pair.listen()
        assert ticket not in pair.log.ended, "a ticket ended before its event"
        flag.happened = True
        pair.succeed(ticket)

    def test_an_event_that_fails_is_the_cause_of_the_error(self, waiting: Pair) -> None:
        """The error names it, and a program finds it as ``__cause__``."""
        pair, flag = waiting, FiredEvent()
        ticket = submit_after(pair, FEW, flag)
        flag.error = RuntimeError("the engine's own")
        error: BaseException | None = pair.end(ticket).error
        causes: list[BaseException | None] = []
        while error is not None and len(causes) < 10:
            causes.append(error := error.__cause__)
        assert flag.error in causes, f"{pair.log.ended[ticket].error!r} has not the event's exception as its cause"
