"""A request on one rank, as SGLang's scheduler drives it: a sender on prefill, a receiver on decode.

SGLang polls every request in each step of its scheduler, takes the lowest state of all ranks, and frees pages when it
sees ``FAILED``, or right after it has called ``abort`` or ``failure_exception``. So on prefill ``FAILED`` is reported
once nothing touches the pages any more, and those two calls return only then. That is soon: only copies on this host
read pages.

On decode SGLang's deferred release keeps the pages of a failed request until :meth:`Side.free` says that nothing
touches them (``DecodeTransferQueue.resolve_deferred_releases`` of SGLang 0.5.23), so peers may write into pages.
Where it is switched off, decode does as prefill, and no peer writes into pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core import Phase
from ...endpoints import DecodeEndpoint, Delivery, Expectation, PrefillEndpoint, Reception, Report, room_id
from ...errors import (
    AbortedError,
    DisaggKVError,
    IncompatiblePeerError,
    PeerLostError,
    RemoteProtocolError,
    UnsupportedError,
)
from ...geometry import PageTable
from ...ids import KV, RoomId
from ...memory import Event
from ...rendezvous import Source
from ..model import prompt_tag
from .side import Side

log = logging.getLogger("disagg_kv.sglang")

I32 = npt.NDArray[np.int32]

SETTLE_S = 0.01
"""How long the endpoint has the thread of an engine that waits for pages, until the room is asked again."""
SLOW_S = 5.0
"""Seconds after which a wait for copies on this host is logged."""


class Poll(IntEnum):
    """States of a request; the numbers are those of SGLang's ``KVPoll``."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


def room_of(number: int | None) -> RoomId:
    """The room of SGLang's ``bootstrap_room``. It is used once: a router that sends a request again takes another."""
    return room_id(f"sglang {number}")


def _tag(prompt: Sequence[int] | None) -> bytes:
    return b"" if prompt is None else prompt_tag(prompt)


class Room:
    """What both sides have in common.

    Args:
        side: of this rank.
        number: SGLang's ``bootstrap_room``.
    """

    _ended = ""

    def __init__(self, side: Side, number: int | None) -> None:
        self._side = side
        self._number = number
        self._handle: Delivery | Reception | None = None
        self._told = False
        self._error: DisaggKVError | None = None
        self._polled = -1
        if number == 0:
            # SGLang takes it for that of a metadata row that has not come yet.
            self.refuse(UnsupportedError("bootstrap_room 0: a room needs another number"))

    @property
    def report(self) -> Report:
        """What it cost so far."""
        return Report() if self._handle is None else self._handle.report

    def _attempt(self, act: Callable[[], Any]) -> None:
        """What cannot be done fails the request, and harms no other."""
        try:
            act()
        except DisaggKVError as exc:
            self.refuse(exc)

    def refuse(self, error: DisaggKVError) -> None:
        """The request cannot be served: it fails, and harms no other."""
        if self._error is None:
            self._error = error
        if self._handle is not None:
            self._handle.abort(str(error))

    def _outcome(self) -> Poll | None:
        """``SUCCESS`` or ``FAILED`` once nothing touches the pages any more; else None."""
        closed = self._side.closed_at(self._polled)
        self._polled = self._side.turn
        if self._handle is None:
            return None if self._error is None else Poll.FAILED
        phase, released = self._handle.phase, self._handle.released
        if phase is Phase.DONE and released and self._error is None:
            if not self._told:
                report = self._handle.report
                groups = f" in {report.groups} groups of layers: {report.schedule}" if report.groups > 1 else ""
                log.info(
                    "room %s is %s: %s bytes over %s%s", self._number, self._ended, report.nbytes, report.path, groups
                )
                self._told = True
            return Poll.SUCCESS
        if phase not in (Phase.DONE, Phase.FAILED):
            return None
        at_once = self._side.defers and (phase is Phase.FAILED or self._error is not None)
        return Poll.FAILED if released or closed or at_once else None

    def _settle(self) -> None:
        """Wait until nothing touches the pages any more, unless SGLang does."""
        if self._side.defers:
            return
        handle, began, told = self._handle, time.monotonic(), False
        while handle is not None and not self._side.closed and not handle.released:
            self._side.endpoint.wait(SETTLE_S)
            if not told and time.monotonic() - began > SLOW_S:
                log.warning("room %s: copies of its pages have not ended after %s s", self._number, SLOW_S)
                told = True

    def abort(self) -> None:
        """SGLang has ended the request; its pages are free on return, unless SGLang keeps them."""
        self.refuse(AbortedError(f"room {self._number}: SGLang has ended the request"))
        self._settle()

    def failure_exception(self) -> None:
        """Raise why the request failed; its pages are free then, unless SGLang keeps them.

        Another rank may have failed, and this one not yet.
        """
        error = self._error or (None if self._handle is None else self._handle.error)
        if error is None:
            elsewhere = AbortedError(f"room {self._number}: the request failed on another rank")
            elsewhere.is_from_another_rank = True  # type: ignore[attr-defined]  # SGLang logs the other one
            self.refuse(elsewhere)
            error = self._error
        self._settle()
        if isinstance(error, PeerLostError | IncompatiblePeerError):
            self._lost()
        assert error is not None
        raise error

    def clear(self) -> None:
        """SGLang forgets the request."""
        if self._handle is not None and self._handle.phase not in (Phase.DONE, Phase.FAILED):
            self.abort()

    def _lost(self) -> None:
        """The other side was lost, or another process is at its address."""


class SenderRoom(Room):
    """A request of a prefill rank.

    Args:
        side: of this rank.
        number: SGLang's ``bootstrap_room``.
        prompt: its tokens; None: they are not compared with decode's.
    """

    _ended = "sent"
    _handle: Delivery | None
    _early_send_wait_event: Event | None = None
    """SGLang sets this before it sends rows of its prefix cache that an earlier pass may still write."""

    def __init__(self, side: Side, number: int | None, prompt: Sequence[int] | None = None) -> None:
        super().__init__(side, number)
        self._prompt = prompt
        self._first = 0
        self._pages: int | None = None
        self._sent = 0
        self._stop = 0
        self._aux: int | None = None
        if self._error is None:
            self._attempt(self._open)

    def _open(self) -> None:
        assert isinstance(self._side.endpoint, PrefillEndpoint)
        self._handle = self._side.endpoint.open(room_of(self._number), tag=_tag(self._prompt))

    def poll(self) -> Poll:
        """The request's state on this rank."""
        found = self._outcome()
        if found is not None:
            return found
        if self._stop:
            return Poll.TRANSFERRING
        assert self._handle is not None
        ready = self._handle.phase in (Phase.READY, Phase.MOVING) and self._handle.held is not None
        return Poll.WAITING_FOR_INPUT if self._pages is not None or ready else Poll.BOOTSTRAPPING

    def pop_decode_prefix_len(self) -> int:
        """Leading tokens that prefill need not send: those that decode holds, in whole pages of prefill."""
        held = {} if self._handle is None else self._handle.held or {}
        self._first = held.get(KV, 0) // self._side.page * self._side.page
        return self._first

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """How many pages will follow, and the metadata row that goes with the last one.

        A second call: SGLang has retracted the request, and computes it again in other pages.
        """
        if self._stop and self._handle is not None:
            handle = self._handle
            self._attempt(lambda: handle.withdraw().synchronize())
        self._pages, self._aux, self._sent, self._stop = num_kv_indices, aux_index, 0, 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Whether there is anything to send: the last chunk has the metadata row, even without pages."""
        return num_pages > 0 or last_chunk

    @property
    def id(self) -> RoomId:
        """The room's."""
        return room_of(self._number)

    @property
    def next_row(self) -> int:
        """The first row that is not sent."""
        return max(self._first, self._stop)

    def upcoming(self, stop: int, pages: I32) -> tuple[int, list[PageTable]] | None:
        """The rows up to ``stop`` that a forward pass will compute, checked; None: there are none to send, or not yet.

        All ranks have to say the same of a pass, so a room that has ended here alone has its rows, too.

        Args:
            stop: one past the last row.
            pages: of the rows from :attr:`next_row` on.
        """
        if self._pages is None or stop <= self.next_row or self._handle is None or self._error is not None:
            return None
        chunk = stop, [PageTable(KV, pages, self.next_row)]
        try:
            self._handle.check_chunk(*chunk)
        except DisaggKVError as exc:
            self.refuse(exc)
            return None
        return chunk

    def announced(self, stop: int) -> None:
        """The rows up to ``stop`` are sent as their layers are computed; :meth:`send` need not send them again."""
        self._stop = stop

    def send(
        self, kv_indices: I32, state_indices: Sequence[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        """Send the rows of some pages; they follow those of the last call."""
        self._attempt(lambda: self._send(kv_indices, num_kv_tokens))

    def _send(self, pages: I32, tokens: int | None) -> None:
        handle, side = self._handle, self._side
        if handle is None or handle.phase in (Phase.DONE, Phase.FAILED) or self._error is not None:
            return
        first = self._first + self._sent * side.page
        stop = first + (len(pages) * side.page if tokens is None else tokens)
        ready, self._early_send_wait_event = self._early_send_wait_event, None
        if ready is None and side.mark is not None:
            ready = side.mark()
        if stop > self._stop:
            handle.send_chunk(stop, [PageTable(KV, pages, first)], ready)
        self._sent, self._stop = self._sent + len(pages), max(stop, self._stop)
        if self._sent == self._pages:
            handle.finish(stop, aux=self._aux, ready=ready)


class ReceiverRoom(Room):
    """A request of a decode rank.

    Args:
        side: of this rank.
        address: host and port of prefill's bootstrap server.
        number: SGLang's ``bootstrap_room``.
    """

    _ended = "loaded"
    _handle: Reception | None
    abort_notified = False
    """Of SGLang: whether it has to keep the pages of this failed request; see :meth:`ensure_abort_notified`."""
    bootstrap_infos = (None,)
    """SGLang counts them: this rank's endpoint has evidence about all of prefill, so it stands for one."""

    def __init__(self, side: Side, address: str, number: int | None) -> None:
        super().__init__(side, number)
        side.forget_doubtful(address)
        self._address = address
        self._source: Source | None = None
        self._expects = False
        self._prompt: Sequence[int] | None = None
        self._busy: Callable[[], Event] | None = None
        self._first: int | None = None

    def asked(self, prompt: Sequence[int], busy: Callable[[], Event] | None, first: int | None = None) -> None:
        """What SGLang does not tell its receivers.

        Args:
            prompt: its tokens.
            busy: an event that fires once the forward passes in flight have ended, which may still write to pages that
                this request gets; None: there are none.
            first: the first token of the output, if prefill is another engine, which has no metadata row; None: it
                comes with prefill's row.
        """
        self._prompt, self._busy, self._first = prompt, busy, first

    def init(self, prefill_dp_rank: int) -> None:
        """The prefill instance is known: that of a data-parallel rank."""
        if self._number != 0:
            self._attempt(lambda: self._open(prefill_dp_rank))

    def _open(self, rank: int) -> None:
        sources = self._side.directory.get(self._address)
        if not sources:
            raise PeerLostError(f"room {self._number}: no prefill instance at bootstrap server {self._address}")
        if not 0 <= rank < len(sources):
            raise RemoteProtocolError(
                f"room {self._number}: bootstrap server {self._address} has {len(sources)} data-parallel ranks, "
                f"not rank {rank}"
            )
        self._source = sources[rank]
        assert isinstance(self._side.endpoint, DecodeEndpoint)
        self._handle = self._side.endpoint.open(room_of(self._number), self._source, tag=_tag(self._prompt))
        if self._error is not None:  # SGLang ended it before the instance was known, and prefill waits
            self._handle.abort(str(self._error))

    def poll(self) -> Poll:
        """The request's state on this rank."""
        found = self._outcome()
        if found is not None:
            return found
        if self._expects:
            return Poll.TRANSFERRING
        return Poll.BOOTSTRAPPING if self._handle is None else Poll.WAITING_FOR_INPUT

    def send_metadata(
        self,
        kv_indices: I32,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        **others: Any,
    ) -> None:
        """Name the pages of the rows after the prefix that decode holds, and the metadata row."""
        self._expects = True
        self._attempt(lambda: self._expect(kv_indices, aux_index, decode_prefix_len or 0))

    def _expect(self, pages: I32, aux: int | None, prefix: int) -> None:
        assert self._handle is not None
        if self._prompt is None:
            raise UnsupportedError(f"room {self._number}: SGLang has not told which prompt it has")
        if self._first is not None:
            self._write_row(aux, self._first)
            aux = None
        held = {KV: prefix} if prefix else {}
        ready = None if self._busy is None else self._busy()
        table = PageTable(KV, pages, prefix)
        self._handle.expect(Expectation(None, [table], held=held, aux=aux, least=len(self._prompt), ready=ready))

    def _write_row(self, row: int | None, token: int) -> None:
        """The metadata row that prefill would send. SGLang reads it once the request has succeeded."""
        if self._side.pool is None:
            raise UnsupportedError(
                f"room {self._number}: prefill is another engine, which needs description 'common' in this server"
            )
        assert row is not None
        self._side.pool.write_first(row, token, self._number or 0)

    def abort(self) -> None:
        """SGLang has ended the request, or found no bootstrap server; its pages are free on return."""
        problem = self._side.directory.problem(self._address)
        if self._handle is None and problem is not None:
            self.refuse(PeerLostError(f"room {self._number}: {problem}"))
        super().abort()

    @property
    def exposed(self) -> bool:
        """Whether something may still write into the pages."""
        return self._handle is not None and not self._handle.released and not self._side.closed

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """SGLang has seen the failure, here or on another rank, and asks whether it has to keep the pages."""
        self.abort_notified = self.exposed
        if self.abort_notified:
            self._side.kept[self._number] = self

    def clear(self) -> None:
        """SGLang forgets the request."""
        if self._source is not None and self._told:
            self._side.met(self._source)
        super().clear()

    def _lost(self) -> None:
        if self._source is not None:
            self._side.lost(self._source)
