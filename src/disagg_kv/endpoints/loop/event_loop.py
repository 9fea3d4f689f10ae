"""What both kinds of endpoint do alike: introduce themselves, beat, notice ends, pass frames on, and keep going.

:meth:`EventLoop.advance` is one step. A ``Driver`` says which thread makes it; the simulator makes it itself.

What happens without a message or a command has a time: a deadline, a repeat, a heartbeat. A step that takes nothing in
before the earliest of those times only looks whether a copy has ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf

from ...channels import Arrived, Channel, Closed, Denied, News, Opened, Rejected
from ...core import AnyFrame, Hello, Options, Outcome, RoomKey, RoomOutcome, Send, Tombstones, Verdict
from ...core.wire.frames import Decision, Disconnected, Refused, RoomFrame, Vote
from ...errors import DisaggKVError, RemoteProtocolError, TransportError, text_of
from ...ids import Epoch
from ...memory import Event
from ...rendezvous import Rendezvous, Source
from ...trace import Observer, Silent, wants_layers
from ...transports import Failed, Home, PeerLost
from ..peers.background import Background
from ..peers.directory import Directory, LookupResult
from ..peers.handshake import EndpointInfo, check_key
from ..peers.session import Link
from .buffers import ReceiveBuffer
from .peering import Peering
from .ranks import InstanceRanks
from .side import Side
from .timing import BUDGET_S, IDLE_S, MOST, TARGET_S, Budget, IdlePolicy, Pauses

log = logging.getLogger("disagg_kv")

LOOKUPS = 4
"""Look-ups that run at a time, apart from those that take long."""


SOON_S = 0.005
"""Seconds after an event in which deadlines and repeats are checked again: all that begins then takes longer."""


class EventLoop(Peering):
    """Time, messages and commands. One thread at a time calls; any: ``post``, ``wait``, ``behind``, ``pending``."""

    def __init__(
        self,
        me: EndpointInfo,
        channel: Channel,
        rendezvous: Rendezvous,
        options: Options,
        observer: Observer,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        background: Callable[[str, int], Background],
        side: Callable[[EventLoop], Side],
    ) -> None:
        super().__init__(me, channel, options, observer, clock, background, self._end_rooms)
        self.observed = not isinstance(observer, Silent)
        self.traced = wants_layers(observer)
        # Where no thread has to wake for a message, what a peer waits for leaves before the rest of the step.
        self._prompt = channel.eager
        self.verdict: Verdict = me.verdict(me.rank, len(me.shards), me.epoch, options, me.instance)
        self.tombstones = Tombstones(peers=2 * options.peers)
        self.sleep = sleep
        self._must_poll = any(one.caps.needs_target_polling for one in me.transports)
        self.idle = IdlePolicy(max((one.caps for one in me.transports), key=lambda caps: caps.bytes_per_s))
        self._busy = self._stale = self.left = self.makes_copies = False
        self._copies = True
        self._deaf_until = self._due_at = self._ticked_at = -inf
        self.pauses = Pauses(options.missed * options.heartbeat_s, options.silence_s, self.peers.ended)
        name = f"disagg_kv {me.instance}/{me.rank}"
        self.home = Home(f"the endpoint {name!r}")
        helpers = background(f"{name} look-ups", LOOKUPS)
        self.directory = Directory(rendezvous, helpers, self._on_help, clock, options)
        self.commands: deque[Callable[[], None]] = deque()
        self.received = ReceiveBuffer(channel, self._deaf, clock)
        self.most = MOST
        self.budget_s = BUDGET_S
        self._last_words: Budget | None = None
        self._later: list[tuple[Event, Callable[[], None], Callable[[Exception], None]]] = []
        self.ranks = InstanceRanks(self)
        self.side = side(self)
        rendezvous.publish(me.instance, me.rank, len(me.shards), me.address)
        self.now = clock()  # a store that was slow to publish is no pause of this thread

    # From any thread.

    def post(self, command: Callable[[], None]) -> None:
        """Do something in the next advance, in order.

        Raises:
            EndpointBrokenError: the endpoint has failed. What was posted before fails with it.
        """
        self.commands.append(command)
        if self.failures.broken is not None:
            raise self.failures.broken

    @property
    def behind(self) -> bool:
        """Whether commands or frames wait that the last advance has not taken. From any thread."""
        return bool(self.commands or self.received.left)

    @property
    def pending(self) -> bool:
        """Whether something goes on that must not wait for long. From any thread."""
        return self._busy or self.side.open_rooms > 0 or self.behind

    def wait(self, seconds: float) -> None:
        """Wait for messages, or for what is due. Safe beside an advance on another thread."""
        if (deaf_s := self._deaf_until - self.clock()) > 0:
            self.sleep(deaf_s)
        elif seconds > 0:
            self.channel.wait(seconds)

    # A step.

    def advance(self, budget_s: float, *, copies: bool = True) -> None:
        """Take in what there is, and act on it. Begins no further piece of work after ``budget_s``; never blocks.

        Without ``copies`` it leaves those that run in the call, and ``left`` says so until an advance makes them.
        """
        self._copies = copies
        if copies:
            self.left = False
        now = self.clock()
        if now - self.now >= self.pauses.least_s and (paused := self.pauses.over(self.now, self.next_at(), now)):
            log.warning("endpoint %s/%d: %s", self.me.instance, self.me.rank, paused)
        self.now = now
        self.budget_s = budget_s
        self._last_words = None
        changed, commanded = self._busy, bool(self.commands)
        # Frames go before what is less urgent, as bytes may wait for them, but not before what the engine has said.
        if commanded:
            changed |= self._act(commands=True)
        if self._hear():
            changed = True
            self._act(commands=not commanded)
        elif not commanded:
            changed |= self._act(commands=True)
        if changed or self._busy:
            self._stale, self._due_at = True, min(self._due_at, self.now + SOON_S)
        if self._send_buffer.unsent:
            self.flush()

    def _hear(self, budget: Budget | None = None) -> bool:
        """Take in what has come, as far as a new budget or this one allows; False: nothing."""
        if not self.received.fetch():
            return False
        self.now = self.clock()
        left, budget = self.received.left, budget or Budget(self.clock, self.now + self.budget_s, self.most)
        while left and budget.take():
            self._on_channel(left.popleft())
        return True

    def _hear_last(self) -> None:
        """Take in what peers sent before they ended: all ends of a step share a budget."""
        if self._last_words is None:
            self._last_words = self.budget()
        self._hear(self._last_words)

    def _act(self, *, commands: bool) -> bool:
        """Act on all but frames; False: nothing has come."""
        due, helped = self.now >= self._due_at, self._helped
        if helped:
            self._helped = False  # before the results are taken: another one may come meanwhile
        acted = helped or bool(self.commands)
        # Ends come first: a room that is opened after a peer's end must not be bound to the incarnation that ended.
        try:
            if self.poll_transport():
                acted = True
                if self._prompt:
                    self.flush()
        except Exception as exc:
            self.failures.met(exc)
        if due or helped:
            self._all(self._take_links, self.take_answers)
        if due or self.commands or self.landing:
            self._all(self._notice_exits)
        if due:
            self._ticked_at = self.now
            self._all(self._tick_peers, self._tick_verdict, self.ranks.tick, self.side.tick)
            self.next_at()
        if commands and self.commands:
            budget = self.budget()
            while self.commands and budget.take():
                try:
                    self.commands.popleft()()
                except Exception as exc:
                    self.failures.met(exc)
        if self._later:
            waiting, self._later = self._later, []
            for event, command, failed in waiting:
                self.failures.guard(self.when, event, command, failed)
        if self.failures.deferred:
            self.failures.handle_deferred()
        try:
            self._busy = self.side.work() or bool(self._later)
        except Exception as exc:
            self.failures.met(exc)
            self._busy = bool(self._later)
        return acted

    def _all(self, *acts: Callable[[], None]) -> None:
        for act in acts:
            try:
                act()
            except Exception as exc:
                self.failures.met(exc)

    def _tick_peers(self) -> None:
        if (at := self.received.caught_up) is not None:
            self.peers.caught_up(at)
        self._peer_effects(self.peers.tick(self.now))

    def _tick_verdict(self) -> None:
        self.agree(self.verdict.tick(self.now))

    def when(self, event: Event | None, command: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Do it once an event has happened, or ``failed`` if the event raises; on the thread that advances."""
        try:
            occurred = event is None or bool(event.query())
        except Exception as exc:
            failed(exc)
            return
        if occurred or event is None:
            command()
        else:
            self._later.append((event, command, failed))

    def budget(self) -> Budget:
        """For one kind of work in this advance."""
        return Budget(self.clock, self.clock() + self.budget_s, self.most)

    def may_copy(self, queues: bool) -> bool:
        """Whether copies may begin in this advance; ``queues``: a device makes them, and the call returns at once."""
        if queues:
            return True
        self.makes_copies = True
        self.left = self.left or not self._copies
        return self._copies

    # Between two steps.

    def rest(self, timeout_s: float) -> float:
        """Seconds to wait after an advance, at most ``timeout_s``; above SOON_S, call it with the turn."""
        if self._must_poll and self.side.open_rooms:
            timeout_s = min(timeout_s, TARGET_S)
        if self._stale and timeout_s > SOON_S:
            self.next_at()
        wait_s = max(0.0, min(timeout_s, self._due_at - self.now))
        return self.idle.rest(self.now, wait_s, busy=self._busy, in_pass_s=self.side.patience_s)

    def next_at(self) -> float | None:
        """When something is due although nothing comes in."""
        times = self.peers.next_at(), self.verdict.next_at(), self.side.next_at(), self.ranks.look_at
        due = min((t for t in times if t is not None), default=None)
        last = self._ticked_at + IDLE_S
        self._stale, self._due_at = False, last if due is None else min(due, last)
        return due

    def _end_rooms(self, error: DisaggKVError) -> None:
        self._due_at = -inf
        self.side.integrity_failure(error)

    def _deaf(self, exc: Exception) -> None:
        """Perhaps the channel works again later; if not, this thread must be there to end rooms, without spinning."""
        self.failures.unforeseen(exc)
        self._deaf_until = self.clock() + IDLE_S

    def look_up(self, source: Source) -> None:
        """Ask the rendezvous for an instance; the answer comes now or in a later step."""
        self.directory.ask(source)
        self.take_answers()

    def take_answers(self) -> None:
        """Act on what the rendezvous has answered."""
        for answer in self.directory.answers():
            self.failures.guard(self._on_answer, answer)

    def _on_answer(self, answer: LookupResult) -> None:
        """Where an instance is, or why that is not known: only rooms that wait for it can suffer from that."""
        if answer.error is not None:
            self.observer.count("lookups.failed")
            self.failures.warn(f"instance {answer.source.instance!r} could not be looked up: {text_of(answer.error)}")
        if answer.source == Source(self.me.instance):
            self.ranks.on_answer(answer)
        self.side.on_answer(answer)

    # What comes in.

    def poll_transport(self) -> bool:
        """Take in the transports' reports; False: there were none."""
        reports = self.me.transports.poll()
        for transport, report in reports:
            try:
                if isinstance(report, Failed):
                    for link in self.connections.carried(transport):
                        self.failures.guard(partial(self._on_peer_lost, link, report.reason, fenced=False))
                elif not isinstance(report, PeerLost):
                    self.side.on_ticket(transport.name, report)
                elif links := self.connections.carried(transport, report.peer):
                    self._on_peer_lost(links[0], f"{transport.name} reports its end", fenced=report.fenced)
                else:
                    self.observer.count("transport.unexpected")
            except Exception as exc:
                self.failures.met(exc)
        return bool(reports)

    def take_in(self, event: News) -> None:
        """Handle one event of the channel, and nothing else; what it leads to leaves with the next step."""
        self._due_at = -inf
        self._on_channel(event)

    def _on_channel(self, event: News) -> None:
        sender: Epoch | None = None
        try:
            match event:
                case Arrived():
                    frame = self.codec.decode(event.frame)
                    sender = Epoch(frame.src)
                    self._on_frame(frame, event.key, len(event.frame))
                case Closed(address):
                    self.peers.on_closed(address, self.now)
                case Opened(address):
                    self.peers.on_opened(address)
                case Denied(address, reason):
                    self._peer_effects(self.peers.on_denied(address, reason))
                case Rejected(connections, messages):
                    self.observer.count("connections.refused", connections)
                    self.observer.count("frames.refused", messages)
                    self.failures.warn(
                        f"{connections} connections and {messages} messages were refused at {self.me.address}"
                    )
        except RemoteProtocolError as exc:
            self.failures.met(exc)
        except Exception as exc:
            self.failures.guard(self._blame, sender, exc)

    def _on_frame(self, frame: AnyFrame, key: str, nbytes: int) -> None:
        if key:
            check_key(frame, key, self.peers, self.observer)
        if not isinstance(frame, RoomFrame):
            if isinstance(frame, Hello):
                self._peer_effects(self.peers.on_hello(frame, self.now))
                return
            if isinstance(frame, Refused):
                self._peer_effects(self.peers.on_refused(frame, self.now))
                return
        good, effects = self.peers.on_frame(frame, self.now)
        if effects:
            self._peer_effects(effects)
        if not good:
            self.observer.count("frames.stale")
        elif isinstance(frame, Vote | Decision):
            self.agree(self.verdict.on_frame(frame, self.now))
        elif isinstance(frame, RoomFrame):
            session = self.peers.known(Epoch(frame.src))
            if session is not None and session.hello.role == self.me.role:
                raise RemoteProtocolError(f"{type(frame).__name__} from a rank of our own instance")
            linked = session is None or session.link is None or session.link.linked
            if linked or not self.connections.hold(session, frame, nbytes, self.side.on_frame):
                self.side.on_frame(frame)
        elif isinstance(frame, Disconnected) and frame.closed:
            held = self.connections.hold(self.peers.known(Epoch(frame.src)), frame, nbytes, self._on_closed)
            if not held:
                self._on_closed(frame)

    def _on_peer_lost(self, link: Link, why: str, *, fenced: bool) -> None:
        """What carries the writes to a peer reports its end, or has failed."""
        session = link.session
        epoch = session.epoch
        error = self._lost(epoch, why)
        self._hear_last()  # it may have said before its end that it has all rows
        link.error = error
        self._peer_effects(self.peers.shut(epoch, error, self.now))
        if fenced and link.carrier is not None and link.carrier.alone:
            self._gone(session)

    def _notice_exits(self) -> None:
        for session in self.exited(at_once=bool(self.commands)):
            self._hear_last()
            self.lose(session.epoch, self._lost(session.epoch, "its process has ended"), ended=True)
        for session in self.drained() if self.landing else ():
            self._gone(session)

    def _on_closed(self, frame: Disconnected) -> None:
        """A peer has closed. What it wrote has landed; what is written to it ends by the reports of our transport."""
        epoch = Epoch(frame.src)
        self.lose(epoch, self._lost(epoch, "it has closed"), ended=True)
        if self.me.role == "decode" and (session := self.peers.known(epoch)) is not None:
            self._gone(session)

    # What goes out.

    def vote(self, key: RoomKey, ok: bool | None, reason: str) -> None:
        """Vote on the outcome of a room of this rank."""
        self.agree(self.verdict.vote(key, ok, reason, self.now))

    def agree(self, effects: Sequence[Send | Outcome]) -> None:
        """Act on the effects of the agreement; frames first, since other ranks wait for them."""
        sent = False
        for effect in effects:
            if not isinstance(effect, Outcome):
                self.send(effect)
                sent = True
        if sent and self._prompt:
            self.flush()
        for effect in effects:
            if isinstance(effect, Outcome):
                self.side.on_decided(effect.key, effect.decided)

    def remember(self, epochs: Iterable[Epoch], key: RoomKey, ended: RoomOutcome) -> None:
        """A room has ended."""
        for epoch in epochs:
            self.tombstones.remember(epoch, key.generation, ended)

    def stop(self, drain_s: float) -> None:
        """Close channel, transport and watches within ``drain_s``; each is closed whatever the others raise.

        Peers learn that first, unless a write or copy of ours may still be in flight: nothing begins any more.
        """
        until = self.clock() + drain_s
        with ExitStack() as last:
            last.callback(self.directory.close, until)
            last.callback(self.channel.close)
            last.callback(self._exits.clear)
            last.callback(self.connections.close, until, partial(self._close_transport, until))
            # An endpoint that broke may have been interrupted in a write that it does not know of.
            if self.failures.broken is None and (self.me.role == "decode" or not self.sessions.holding):
                for epoch in self.peers.epochs():
                    self.send(Send(epoch, Disconnected(src=self.me.epoch, dst=epoch, closed=True)))
            self.flush()

    def _close_transport(self, until: float) -> None:
        try:
            left = self.me.transports.close(max(0.0, until - self.clock()))
        except Exception as exc:
            where = f"endpoint {self.me.instance}/{self.me.rank}: transport {self.me.transports.name!r}"
            raise TransportError(f"{where} could not be closed: {text_of(exc)}") from exc
        if left:
            log.warning("%d writes were still in flight when the endpoint closed", left)
