"""The connector in the process of one rank: its endpoints, and its transfers.

vLLM's worker calls once per step, in this order: :meth:`WorkerSide.preempt`, :meth:`WorkerSide.begin`, per layer
:meth:`WorkerSide.layer_ready`, :meth:`WorkerSide.end`, :meth:`WorkerSide.results`. A request that fails here harms no
other one: the failure is logged, and reported with the next results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import inf

from attrs import define, field

from ...core import Phase
from ...endpoints import DecodeEndpoint, Delivery, Expectation, ForwardPass, PrefillEndpoint, Reception, room_id
from ...errors import EndpointBrokenError
from ...ids import LayerId, RoomId
from ...memory import Event
from .params import Origin
from .stats import Counters, code_of
from .work import Chunk, Declined, Hold, Load, StepWork, tables

log = logging.getLogger("vllm.disagg_kv")

IDLE_S = 0.002
"""The longest pause of a step that computes nothing. A new request of an idle engine waits for at most this long."""

LOAD_S = 0.01
"""The same while a decode request loads. It ends with the load, which the same step then reports: vLLM needs some
milliseconds for the next one."""

PREEMPT_S = 60.0
"""How long a step waits for peers that read blocks which vLLM has taken back. Copies of this host take milliseconds."""

ANSWER_S = 1.0
"""Seconds for which prefill looks whether a decode instance queues a request."""

ENDLESS_S = 1e8
"""Instead of a room's ``claim_s``: ``total_s`` ends it."""

WORD = b"queued"


@define
class Results:
    """What vLLM is to learn of a step.

    Args:
        sent: prefill requests whose blocks nothing reads any more.
        received: decode requests that need not wait any more.
        failed: those of ``received`` whose rows did not arrive.
    """

    sent: set[str] = field(factory=set)
    received: set[str] = field(factory=set)
    failed: set[str] = field(factory=set)


@define
class Outgoing:
    """A prefill request.

    Args:
        delivery: its room.
        transfer: its id.
        since: when the room was opened.
        begun: it has had a chunk.
        finished: it has had its last chunk.
        ended: vLLM has ended the request, so it may be reported.
        held: it is an answer's, for the next turn.
        given_up: its blocks are needed, and were when a peer had begun to read them.
        claim_by: when the room ends unless a decode instance has asked for it, or queues it.
        word: the room by which decode instances say that they queue it.
    """

    delivery: Delivery
    transfer: str
    since: float
    begun: bool = False
    finished: bool = False
    ended: bool = False
    held: bool = False
    given_up: bool = False
    claim_by: float = inf
    word: Delivery | None = None


@define
class Incoming:
    """A decode request that waits since ``began``."""

    reception: Reception
    began: float


class WorkerSide:
    """The connector's state in a rank; one thread calls.

    Args:
        sender: this rank's prefill endpoint; None: the instance decodes only.
        receiver: this rank's decode endpoint; None: the instance prefills only.
        layers: layer ids by vLLM's names of layers.
        mark: an event that fires when the engine's stream has done what is queued now; None: everything is done on
            return, as on a CPU.
        claim_s: seconds for which blocks of a finished prefill request are kept if no decode instance asks for them.
    """

    def __init__(
        self,
        sender: PrefillEndpoint | None,
        receiver: DecodeEndpoint | None,
        layers: Mapping[str, LayerId],
        mark: Callable[[], Event] | None = None,
        *,
        claim_s: float = 30.0,
    ) -> None:
        self._sender = sender
        self._receiver = receiver
        self._layers = dict(layers)
        self._mark = mark
        self._claim_s = claim_s
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}
        self._queued: dict[str, Reception] = {}
        self._closing: dict[RoomId, Delivery | Reception] = {}
        self._unopened: set[str] = set()
        self._results = Results()
        self._owed = False
        self._step: ForwardPass | None = None
        self._idle = False
        self._computing: dict[str, Chunk] = {}
        self.counters = Counters()

    # A step.

    def preempt(self, work: StepWork) -> None:
        """The engine takes pages back: return once nothing reads them.

        Raises:
            EndpointBrokenError: something may still read them, so they must not be used again.
        """
        withdrawn = [self._outgoing[name].delivery.withdraw() for name in work.preempted if name in self._outgoing]
        until = time.monotonic() + PREEMPT_S
        while self._sender is not None and not all(one.query() for one in withdrawn):
            if time.monotonic() > until:
                raise EndpointBrokenError(f"peers still read blocks of preempted requests after {PREEMPT_S:g} s")
            self._sender.wait(LOAD_S)

    def begin(self, work: StepWork) -> None:
        """Before the forward pass: prefill announces the rows, decode names the pages."""
        self._idle = work.idle
        for declined in work.declined:
            self._decline(declined)
        for transfer in work.unsent:
            self._unsent(transfer)
        for name, reason in work.refused.items():
            self._fail_load(name, reason)
        for name in work.dropped:
            self._drop(name)
        for name, load in work.loads.items():
            self._load(name, load)
        for name, hold in work.holds.items():
            self._attempt(name, partial(self._hold, name, hold))
        for name, (transfer, tag) in work.early.items():
            self._attempt(name, partial(self._room, name, transfer, tag))
        self._announce(work.chunks)
        for name in work.aborted:
            self._abort(name)
        for origin in work.queued:
            self._say_queued(origin)
        for transfer in work.left:
            if transfer in self._queued:
                self._end(self._queued.pop(transfer), "decode queues the request no more")

    def layer_ready(self, name: str) -> None:
        """A layer of the forward pass is computed."""
        if self._step is not None and name in self._layers:
            self._step.layer_ready(self._layers[name], self._mark)

    def end(self) -> None:
        """After the forward pass: the rows of all its chunks are final, or will be at the event."""
        step, self._step = self._step, None
        chunks, self._computing = self._computing, {}
        if step is None:
            return
        try:
            ready = None if self._mark is None else self._mark()
            step.close(ready)
        except Exception as exc:
            self._abort_pass(chunks, exc)
            return
        for name, chunk in chunks.items():
            if chunk.last:
                self._attempt(name, partial(self._finish, name, chunk, ready))

    def results(self, ended: set[str]) -> Results:
        """What happened since the last call. ``ended``: requests that vLLM has ended since then.

        vLLM steps without a pause while transfers run. A step that computes nothing lends its thread to an endpoint
        here. It goes on as soon as a transfer has ended. Under async scheduling vLLM takes in the tokens and reports of
        a step only once the next one is over, so that one does not wait.

        Raises:
            EndpointBrokenError: an endpoint has failed as a whole. A peer may still read or write pages of its rooms,
                so vLLM must not use them again: the rank has to end.
        """
        if self._idle and not self._owed and (self._outgoing or self._incoming or self._closing):
            self._wait()
        for name in ended & self._outgoing.keys():
            self._outgoing[name].ended = True
        self._results.sent |= ended & self._unopened
        self._unopened -= ended
        prefill_closed, decode_closed = _closed(self._sender), _closed(self._receiver)
        now = time.monotonic()
        for name, going in list(self._outgoing.items()):
            if going.finished and going.delivery.phase is Phase.CONNECTING and not prefill_closed:
                self._attempt(name, partial(self._claim, going, now))
            if going.ended and (going.delivery.released or prefill_closed):
                del self._outgoing[name]
                self._sent(name, going)
                if going.word is not None:
                    self._end(going.word, "the request has ended")
        for name, coming in list(self._incoming.items()):
            if coming.reception.released or decode_closed:
                del self._incoming[name]
                self._received(name, coming)
        for room, handle in list(self._closing.items()):
            if handle.released:
                del self._closing[room]
        results, self._results = self._results, Results()
        self._owed = not self._idle or bool(results.received or results.sent)
        return results

    def _wait(self) -> None:
        """Until a decode request need not wait any more, at most for :data:`LOAD_S` or :data:`IDLE_S`."""
        until = time.monotonic() + (LOAD_S if self._incoming else IDLE_S)
        endpoint = self._receiver if self._incoming or self._sender is None else self._sender
        while endpoint is not None and not _closed(self._sender) and not _closed(self._receiver):
            # To take changes also advances an endpoint, so only now is it known what there is to wait for.
            left = until - time.monotonic()
            released = any(one.reception.released for one in self._incoming.values())
            if released or left <= 0 or not endpoint.wait(left):
                return

    # Prefill.

    def _announce(self, chunks: Mapping[str, Chunk]) -> None:
        if self._sender is None or not chunks:
            return
        for name, chunk in chunks.items():
            self._attempt(name, partial(self._add, name, chunk))
        rooms = {
            self._outgoing[name].delivery.room: (chunk.stop, tables(chunk.pages))
            for name, chunk in self._computing.items()
        }
        if rooms:
            try:
                # As all ranks count them: a room may be missing here alone.
                tokens = [chunk.rows for chunk in chunks.values()]
                self._step = self._sender.step(rooms, tokens=tokens)
            except Exception as exc:
                self._abort_pass(chunks, exc)

    def _abort_pass(self, names: Collection[str], exc: Exception) -> None:
        """A forward pass cannot be sent: its requests fail."""
        log.error("the rows of %s cannot be sent: %s", ", ".join(names), exc)
        self._computing = {}
        for name in names:
            self._abort(name)

    def _room(self, name: str, transfer: str, tag: bytes) -> None:
        assert self._sender is not None
        self._unopened.add(name)
        delivery = self._sender.open(room_id(transfer), tag=tag, claim_s=ENDLESS_S)
        self._outgoing[name] = Outgoing(delivery, transfer, time.monotonic())
        self._unopened.remove(name)

    def _add(self, name: str, chunk: Chunk) -> None:
        """Add a chunk to the forward pass, if its room is open; the first chunk opens it."""
        if name in self._unopened:
            return
        if name not in self._outgoing:
            self._room(name, chunk.transfer, chunk.tag)
        self._outgoing[name].begun = True
        delivery = self._outgoing[name].delivery
        # All ranks have to say the same of a pass, so a room that has failed here alone has its rows, too.
        if delivery.phase is not Phase.DONE:
            # A chunk that is refused would fail the whole pass.
            delivery.check_chunk(chunk.stop, tables(chunk.pages))
            self._computing[name] = chunk

    def _finish(self, name: str, chunk: Chunk, ready: Event | None) -> None:
        going = self._outgoing[name]
        if going.delivery.phase is not Phase.FAILED and (chunk.states or not going.finished):
            # States that were withdrawn are given again.
            going.delivery.finish(chunk.stop, state=tables(chunk.states), ready=ready)
            going.finished, going.claim_by = True, time.monotonic() + self._claim_s

    def _claim(self, going: Outgoing, now: float) -> None:
        """Not all decode ranks have asked for a finished request: is it still to be expected that they do?

        After ``claim_s`` it is while a decode instance says that it queues the request. Its word is a room without
        rows, so it ends with that instance. It is not if that instance itself waits for a request which our engine
        queues: blocks of the one may be all that the other lacks.
        """
        assert self._sender is not None
        if going.word is not None and going.word.phase is Phase.READY:
            if self._blocked(now):
                going.delivery.abort("decode queues it, and waits for another request that needs its blocks")
            going.claim_by = now + self._claim_s
        elif now >= going.claim_by and going.word is None:
            going.word = self._sender.open(_word(going.transfer), tag=WORD, claim_s=ENDLESS_S)
            going.claim_by = now + ANSWER_S
        elif now >= going.claim_by:
            going.delivery.abort(f"no decode instance asked for it within {self._claim_s:g} s of its end (claim_s)")

    def _blocked(self, now: float) -> bool:
        """Whether decode waits for a request that our engine queues; True once for each, in ``claim_s``."""
        for going in self._outgoing.values():
            waits = not going.begun and going.delivery.phase is Phase.READY
            if waits and now - going.since >= self._claim_s:
                going.since = now
                return True
        return False

    def _unsent(self, transfer: str) -> None:
        """Decode may wait for a request that ended before its first rows: answer it, with any tag."""
        if (sender := self._sender) is not None:
            self._refuse(lambda: sender.open(room_id(transfer)), "prefill's engine has ended the request")

    def _drop(self, name: str) -> None:
        """A request that is not to be reported as sent, since it ended before its first row."""
        self._unopened.discard(name)
        if (going := self._outgoing.pop(name, None)) is not None:
            self._end(going.delivery, "prefill's engine has ended the request")

    def _sent(self, name: str, going: Outgoing) -> None:
        delivery = going.delivery
        self._results.sent.add(name)
        if delivery.phase is Phase.DONE:
            self.counters.add("sent", sent_bytes=delivery.report.nbytes)
        elif going.held:
            log.info("the rows of answer %s are not held any more: %s", name, delivery.error)
        else:
            self.counters.fail("sent_failed", delivery.error)
            log.warning("request %s was not sent: %s [%s]", name, delivery.error, code_of(delivery.error))

    # Decode.

    def _load(self, name: str, load: Load) -> None:
        """Await rows; a prefill request may have a room in which it is sent on, too."""
        assert self._receiver is not None
        origin = load.origin
        try:
            reception = self._receiver.open(room_id(origin.transfer), origin.source, tag=load.tag, claim_s=load.claim_s)
        except Exception as exc:
            log.exception("request %s", name)
            self._fail_load(name, exc)
            return
        self._incoming[name] = Incoming(reception, time.monotonic())
        try:
            reception.expect(Expectation(load.stop, tables(load.pages), held=load.held, state=tables(load.states)))
        except Exception as exc:
            log.exception("request %s", name)
            reception.abort(str(exc))

    def _hold(self, name: str, hold: Hold) -> None:
        """Offer the rows of an answer. The room ends by itself if no prefill instance asks for them in time."""
        assert self._sender is not None
        self._unopened.add(name)
        delivery = self._sender.open(room_id(hold.transfer), tag=hold.tag, claim_s=hold.seconds)
        self._outgoing[name] = Outgoing(delivery, hold.transfer, time.monotonic(), begun=True, ended=True, held=True)
        self._unopened.remove(name)
        # A step that was queued before the answer was complete may still write the last page.
        ready = None if self._mark is None else self._mark()
        delivery.send_chunk(hold.stop, tables(hold.pages), ready)
        delivery.finish(hold.stop)

    def _received(self, name: str, coming: Incoming) -> None:
        if coming.reception.phase is Phase.DONE:
            self._results.received.add(name)
            seconds = time.monotonic() - coming.began
            self.counters.add("loaded", loaded_bytes=coming.reception.report.nbytes, load_seconds=seconds)
        else:
            self._fail_load(name, coming.reception.error)

    def _fail_load(self, name: str, reason: object) -> None:
        self._results.received.add(name)
        self._results.failed.add(name)
        self.counters.fail("load_failed", reason)
        log.warning("request %s was not loaded: %s [%s]", name, reason, code_of(reason))

    def _say_queued(self, origin: Origin) -> None:
        """Open the room by which prefill knows that our engine queues a request."""
        if self._receiver is None:
            return
        try:
            word = self._receiver.open(_word(origin.transfer), origin.source, tag=WORD, claim_s=ENDLESS_S)
            self._queued[origin.transfer] = word
            word.expect(Expectation(0, []))
        except Exception as exc:
            log.warning("prefill does not learn that transfer %s is queued: %s", origin.transfer, exc)

    def _decline(self, declined: Declined) -> None:
        """Prefill may free the pages of a request whose rows are not needed."""
        if (receiver := self._receiver) is not None:
            origin, tag = declined.origin, declined.tag
            reason = "decode does not need the rows"
            self._refuse(lambda: receiver.open(room_id(origin.transfer), origin.source, tag=tag), reason)

    # Both.

    def _refuse(self, opened: Callable[[], Delivery | Reception], reason: str) -> None:
        try:
            handle = opened()
        except Exception as exc:
            log.warning("a transfer could not be declined: %s", exc)
        else:
            self._end(handle, reason)

    def _end(self, handle: Delivery | Reception, reason: str) -> None:
        handle.abort(reason)
        self._closing[handle.room] = handle

    def _abort(self, name: str) -> None:
        for handle in (self._outgoing.get(name), self._incoming.get(name)):
            if isinstance(handle, Outgoing):
                if handle.held and not handle.given_up and handle.delivery.phase is Phase.MOVING:
                    handle.given_up = True  # a peer reads the rows, and its request would fail for nothing
                    continue
                reason = "decode needs the blocks of its answer" if handle.held else "the engine has ended the request"
                handle.delivery.abort(reason)
            elif handle is not None:
                handle.reception.abort("the engine has ended the request")

    def _attempt(self, name: str, act: Callable[[], None]) -> None:
        """Fail one request if something about its sending cannot be done."""
        try:
            act()
        except Exception as exc:
            log.exception("request %s", name)
            if name in self._outgoing:
                self._outgoing[name].delivery.abort(str(exc))


def _word(transfer: str) -> RoomId:
    """The room by which decode says that it queues a request. Its tag differs from those of prompts."""
    return room_id(f"queued {transfer}")


def _closed(endpoint: PrefillEndpoint | DecodeEndpoint | None) -> bool:
    """Take an endpoint's changes; True: it is closed, so nothing of it moves any more."""
    if endpoint is None:
        return False
    if endpoint.closed:
        return True
    endpoint.poll()
    return False
