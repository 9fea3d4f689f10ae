"""What both kinds of endpoint do alike: introduce themselves, beat, notice ends, pass frames on, and keep going.

:meth:`EventLoop.advance` is one step. A ``Driver`` says which thread makes it; the simulator makes it itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf

from ...channels import Arrived, Channel, Closed, Denied, News, Opened, Rejected
from ...core import (
    AnyFrame,
    Codec,
    Forget,
    Greeted,
    Hello,
    Lost,
    Options,
    Outcome,
    PeerEffect,
    PeerTable,
    RoomKey,
    RoomOutcome,
    Send,
    SendTo,
    Tombstones,
    Unlink,
    Unreachable,
    Up,
    Verdict,
)
from ...core.wire.frames import Decision, Expect, Parted, Refused, RoomFrame, Superseded, Vote
from ...errors import (
    DisaggKVError,
    PeerLostError,
    RemoteProtocolError,
    TransportError,
    text_of,
)
from ...ids import Epoch, Peer
from ...memory import Event
from ...rendezvous import Rendezvous, Source
from ...trace import Guarded, Observer, Silent, wants_layers
from ...transports import Home, Lane, PeerEvent, Settled, WriteEnded
from ...transports.combining import lane_of
from ..peers.background import Background
from ..peers.connections import Connections, ConnectResult
from ..peers.directory import Directory, LookupResult
from ..peers.handshake import EndpointInfo, RemoteEndpoint, check_key
from ..peers.limited_log import LimitedLog
from ..peers.link_budget import links_of
from ..peers.mapping import open_decode
from ..peers.peer_registry import PeerRegistry
from ..peers.process_monitor import ProcessMonitor
from ..peers.succession import Succession, found_before
from .budget import BUDGET_S, MOST, Budget
from .failures import Failures
from .idle import IDLE_S, TARGET_S, IdlePolicy, Rest
from .inspection import LoopInspection
from .pauses import Pauses
from .receive_buffer import ReceiveBuffer
from .send_buffer import SendBuffer
from .siblings import Siblings
from .side import Side

log = logging.getLogger("disagg_kv")

LOOKUPS, LINKS = 4, 32
"""Look-ups, and connections of the transport, that run at a time, apart from those that take long."""


class EventLoop:
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
        self.me = me
        self.channel = channel
        self.options = options
        self.observer: Observer = observer if isinstance(observer, Silent) else Guarded(observer)
        self.observed = not isinstance(observer, Silent)
        self.traced = wants_layers(observer)
        self.clock = clock
        self.now = clock()
        self.codec = Codec()
        self.failures = Failures(f"{me.instance}/{me.rank}", self.observer, clock, self._end_rooms)
        self._guard = self.failures.guard
        self._send_buffer = SendBuffer(channel, self.observer, LimitedLog(clock), self.failures.defer)
        # Where no thread has to wake for a message, what a peer waits for leaves before the rest of the step.
        self._prompt = channel.eager
        links = links_of(channel, me.transport, options)
        self.peers = PeerTable(me.epoch, me.address, me.hello(), me.admit, options, links)
        self.verdict: Verdict = me.verdict(me.rank, len(me.shards), me.epoch, options, me.instance)
        self.tombstones = Tombstones(peers=2 * options.peers)
        self.remotes: dict[Epoch, RemoteEndpoint] = {}
        self.sleep = sleep
        self.idle = IdlePolicy(me.transport.caps)
        self._busy = self.left = self.makes_copies = False
        self._copies = True
        self._deaf_until = -inf
        self.pauses = Pauses(options.missed * options.heartbeat_s, options.silence_s, self.peers.ended)
        name = f"disagg_kv {me.instance}/{me.rank}"
        self.home = Home(f"the endpoint {name!r}")
        helpers = background(f"{name} links", LINKS)
        ready = partial(open_decode, me) if me.role == "prefill" else None
        self.connections = Connections(me.transport, helpers, channel.wake, clock, self.observer, options, ready)
        self.peer_registry = PeerRegistry(self.peers, self.connections, self.connections.lane, options, clock)
        helpers = background(f"{name} look-ups", LOOKUPS)
        self.directory = Directory(rendezvous, helpers, channel.wake, clock, options)
        self._commands: deque[Callable[[], None]] = deque()
        self._receive_buffer = ReceiveBuffer(channel, self._deaf, clock)
        self.most = MOST
        self.budget_s = BUDGET_S
        self._later: list[tuple[Event, Callable[[], None], Callable[[Exception], None]]] = []
        self._process_monitor = ProcessMonitor(clock, me.life.process, me.life.watch)
        before = found_before(rendezvous, me.instance, me.rank, me.address)
        self.succession = Succession(me.hello()(b""), before)
        self.siblings = Siblings(self, self.succession)
        self.side = side(self)
        rendezvous.publish(me.instance, me.rank, len(me.shards), me.address)
        if before is not None:
            self.post(partial(self.dial, before))
        self.now = clock()  # a store that was slow to publish is no pause of this thread

    # From any thread.

    def post(self, command: Callable[[], None]) -> None:
        """Do something in the next advance, in order.

        Raises:
            EndpointBrokenError: the endpoint has failed. What was posted before fails with it.
            LocalProtocolError: this is a forked child of the process that has the endpoint.
        """
        self.home.check()
        self._commands.append(command)
        if self.failures.broken is not None:
            raise self.failures.broken

    @property
    def behind(self) -> bool:
        """Whether commands or frames wait that the last advance has not taken. From any thread."""
        return bool(self._commands) or bool(self._receive_buffer)

    def inspect(self) -> LoopInspection:
        """See :mod:`~disagg_kv.endpoints.loop.inspection`."""
        return LoopInspection(
            self._commands,
            self._receive_buffer,
            self.peers,
            self.remotes,
            self.peer_registry,
            self.verdict,
            self.succession,
        )

    def when(self, event: Event | None, command: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Do it once an event has happened, or ``failed`` if the event raises; on the endpoint's thread."""
        try:
            occurred = event is None or bool(event.query())
        except Exception as exc:
            failed(exc)
            return
        if occurred or event is None:
            command()
        else:
            self._later.append((event, command, failed))

    def advance(self, budget_s: float, *, copies: bool = True) -> None:
        """Take in what there is, and act on it. Begins no further piece of work after ``budget_s``; never blocks.

        Without ``copies`` it leaves those that run in the call, and ``left`` says so until an advance makes them.
        """
        self._copies = copies
        if copies:
            self.left = False
        before, self.now = self.now, self.clock()
        if self.now - before >= self.pauses.least_s and (paused := self.pauses.over(before, self.next_at(), self.now)):
            log.warning("endpoint %s/%d: %s", self.me.instance, self.me.rank, paused)
        self.budget_s = budget_s
        commanded = bool(self._commands)
        # Frames go before what is less urgent, as bytes may wait for them, but not before what the engine has said.
        if commanded:
            self._proceed()
        if self._hear():
            self._guard(self.poll_transport)
            self._guard(self.side.work)
            if self._prompt:
                self._guard(self.flush)
        if not commanded:
            self._proceed()
        if self._send_buffer.unsent:
            self._guard(self.flush)

    def _proceed(self) -> None:
        try:
            self._busy = self._progress()
        except Exception as exc:
            self.failures.met(exc)
            self._busy = True

    def may_copy(self, queues: bool) -> bool:
        """Whether copies may begin in this advance; ``queues``: a device makes them, and the call returns at once."""
        if queues:
            return True
        self.makes_copies = True
        self.left = self.left or not self._copies
        return self._copies

    @property
    def pending(self) -> bool:
        """Whether something goes on that must not wait for long. From any thread."""
        return self._busy or self.side.open_rooms > 0 or self.behind

    def rest(self, timeout_s: float) -> Rest:
        """How to wait after an advance, at most for ``timeout_s``."""
        rest = self.idle.rest(self.now, timeout_s, busy=self._busy, in_pass_s=self.side.patience_s)
        return Rest(self._wait(rest.block_s), rest.pause_s) if rest.block_s else rest

    def wait(self, rest: Rest) -> None:
        """Wait for messages, or for what is due. Safe beside an advance on another thread."""
        if (deaf_s := self._deaf_until - self.clock()) > 0:
            self.sleep(deaf_s)
        elif rest.seconds > 0:
            self.channel.wait(rest.seconds)

    def budget(self) -> Budget:
        """For one kind of work in this advance."""
        return Budget(self.clock, self.most, self.budget_s)

    def _hear(self) -> bool:
        """Take in what has come; False: nothing."""
        arrived = self._receive_buffer.fetch()
        if arrived:
            self.now = self.clock()
            for event in self._receive_buffer.take(self.budget()):
                self.take_in(event)
        if (at := self._receive_buffer.caught_up) is not None:
            self.peers.caught_up(at)
        return arrived

    def take_in(self, event: News) -> None:
        """Handle one event of the channel, and nothing else; what it leads to leaves with the next step."""
        self._guard(self._on_channel, event)

    def _progress(self) -> bool:
        # Ends come first: a room that is opened after a peer's end must not be bound to the life that ended.
        if self._guard(self.poll_transport) and self._prompt:
            self._guard(self.flush)
        self._guard(self._take_links)
        self.take_answers()
        if self._process_monitor.awaited:
            self._guard(self._notice_exits)
        if self._commands:
            budget = self.budget()
            while self._commands and budget.take():
                self._guard(self._commands.popleft())
        if self._later:
            waiting, self._later = self._later, []
            for event, command, failed in waiting:
                self._guard(self.when, event, command, failed)
        self.failures.handle_deferred()
        for tick in (self._tick_peers, self._tick_verdict, self.siblings.tick, self.side.tick):
            self._guard(tick)
        busy = bool(self._guard(self.side.work))
        return busy or bool(self._later)

    def poll_transport(self) -> bool:
        """Take in the transport's reports; False: there were none."""
        reports = self.me.transport.poll()
        for report in reports:
            try:
                self._on_transport(report)
            except Exception as exc:
                self.failures.met(exc)
        return bool(reports)

    def _end_rooms(self, error: DisaggKVError) -> None:
        self.side.integrity_failure(error)

    def drop_commands(self) -> None:
        """The endpoint has broken, and every room has ended: nothing of what was posted is done any more."""
        self._commands.clear()

    def _deaf(self, exc: Exception) -> None:
        """Perhaps the channel works again later; if not, this thread must be there to end rooms, without spinning."""
        self.failures.unforeseen(exc)
        self._deaf_until = self.clock() + IDLE_S

    def next_at(self) -> float | None:
        """When a step is due although nothing comes in."""
        times = self.peers.next_at(), self.verdict.next_at(), self.side.next_at(), self.siblings.look_at
        return min((t for t in times if t is not None), default=None)

    def _wait(self, timeout_s: float) -> float:
        most = TARGET_S if self.me.transport.caps.needs_target_polling and self.side.open_rooms else IDLE_S
        due = self.next_at()
        wait_s = min(timeout_s, most)
        return wait_s if due is None else max(0.0, min(wait_s, due - self.now))

    def _notice_exits(self) -> None:
        for epoch in self._process_monitor.ended(at_once=bool(self._commands)):
            self._hear()
            self.lose(epoch, self._lost(epoch, "its process has ended"), ended=True)
        for epoch in self._process_monitor.drained(self.connections.drain_s):
            self._gone(epoch)

    def _tick_peers(self) -> None:
        if effects := self.peers.tick(self.now):
            self._peer_effects(effects)

    def _tick_verdict(self) -> None:
        if effects := self.verdict.tick(self.now):
            self.agree(effects)

    def look_up(self, source: Source) -> None:
        """Ask the rendezvous for an instance; the answer comes now or in a later step."""
        self.directory.ask(source)
        self.take_answers()

    def take_answers(self) -> None:
        """Act on what the rendezvous has answered."""
        for answer in self.directory.answers():
            self._guard(self._on_answer, answer)

    def _on_answer(self, answer: LookupResult) -> None:
        """Where an instance is, or why that is not known: only rooms that wait for it can suffer from that."""
        if answer.error is not None:
            self.observer.count("lookups.failed")
            self.failures.warn(f"instance {answer.source.instance!r} could not be looked up: {text_of(answer.error)}")
        if answer.source == Source(self.me.instance):
            self.siblings.on_answer(answer)
        self.side.on_answer(answer)

    # What comes in.

    def _on_channel(self, event: News) -> None:
        match event:
            case Arrived():
                frame = self.codec.decode(event.frame)
                self.of_peer(Epoch(frame.src), partial(self._on_frame, frame, event.key, len(event.frame)))
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

    def of_peer(self, epoch: Epoch, act: Callable[[], None]) -> None:
        """Act on a frame of a peer, or on its link. An error ends this peer, and concerns no room of another one."""
        try:
            act()
        except RemoteProtocolError:
            raise
        except Exception as exc:
            name, address = self.peer_registry.name(epoch), self.peers.address(epoch) or ""
            error = self.failures.note(exc, f"rooms with {name}").about(name, **self.peer_registry.who(epoch))
            self._peer_effects(self.peers.shut(epoch, error, self.now))
            self.side.on_unreachable(address, error)

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
        elif isinstance(frame, Superseded):
            self.siblings.on_superseded(frame)
        elif isinstance(frame, RoomFrame):
            if frame.src in self.siblings:
                raise RemoteProtocolError(f"{type(frame).__name__} from a rank of our own instance")
            if not self.connections.hold(frame, nbytes, self.side.on_frame):
                self.side.on_frame(frame)
        elif isinstance(frame, Parted) and frame.closed:
            if not self.connections.hold(frame, nbytes, self._on_closed):
                self._on_closed(frame)
        else:
            self.siblings.beat(Epoch(frame.src))

    def _on_closed(self, frame: Parted) -> None:
        """A peer has closed. What it wrote has landed; what is written to it ends by the reports of our transport."""
        epoch = Epoch(frame.src)
        self.lose(epoch, self._lost(epoch, "it has closed"), ended=True)
        if self.me.role == "decode":
            self._gone(epoch)

    def _on_transport(self, event: WriteEnded | Settled | PeerEvent) -> None:
        if not isinstance(event, PeerEvent):
            self.side.on_ticket(event)
            return
        epoch = self.connections.epoch(event.peer)
        if epoch is None:
            self.observer.count("transport.unexpected")
            return
        lane = lane_of(self.me.transport, event.peer)
        error = self._lost(epoch, f"{lane.name}: {lane.lost}" if lane.lost else f"{lane.name} reports its end")
        self._hear()  # it may have said before its end that it has all rows
        self.connections.lose(epoch, error)
        self._peer_effects(self.peers.shut(epoch, error, self.now))
        if event.fenced:
            self._gone(epoch)

    def _peer_effects(self, effects: Sequence[PeerEffect]) -> None:
        if not effects:
            return
        for effect in effects:
            match effect:
                case SendTo(address, frame):
                    self._send_buffer.put(address, self.codec.encode(frame))
                case Up():
                    self.peer_registry.up(effect.epoch)
                    self._up(effect)
                case Greeted(epoch):
                    if epoch not in self.siblings:
                        self.side.on_greeted(epoch)
                case Lost():
                    self._on_lost(effect)
                    self.peer_registry.lost(effect.peer)
                case Unlink(epoch):
                    self._on_unlink(epoch)
                case Unreachable(address, error):
                    self.side.on_unreachable(address, error)
                case Forget(address):
                    self._send_buffer.unsent.pop(address, None)
                    self.channel.forget(address)

    def _up(self, up: Up) -> None:
        hello = up.hello
        if hello.role == self.me.role:
            self.siblings.up(hello)
            return
        if (linked := self.connections.begin(up)) is not None:
            self._on_linked(linked)
        self._take_links()

    def _take_links(self) -> None:
        for linked in self.connections.results():
            self._guard(self.of_peer, linked.up.epoch, partial(self._on_linked, linked))

    def _on_linked(self, linked: ConnectResult) -> None:
        """The transport has reached a peer, or has not; the frames that waited for that come next."""
        up, link = linked.up, linked.link
        error = link if isinstance(link, DisaggKVError) else self._unwatched(up)
        if error is not None:
            self._peer_effects(self.peers.shut(up.epoch, error, self.now))
            self.side.on_unreachable(up.hello.address, error)
        else:
            self.remotes[up.epoch] = RemoteEndpoint.of(up.hello)
            self.side.on_up(self.remotes[up.epoch])
        for take_in in linked.frames:
            self._guard(self.of_peer, up.epoch, take_in)

    def _unwatched(self, up: Up) -> DisaggKVError | None:
        """Watch the process of a peer that was reached; why that cannot be now, and its link is dropped then.

        Not before it is reached: until then it writes nothing here. An end meanwhile is noticed now.
        """
        try:
            self._process_monitor.watch(up.epoch, up.hello)
        except TransportError as exc:
            return self.connections.refuse(up, exc)
        return None

    def dial(self, address: str) -> None:
        """Learn which endpoint is at an address."""
        self._peer_effects(self.peers.dial(address, self.now))

    def lose(self, epoch: Epoch, error: DisaggKVError, *, ended: bool = False) -> None:
        """A peer is lost for a reason that the peer table does not see by itself; ``ended``: for good."""
        if ended:
            self.peer_registry.ended(epoch)
        self._peer_effects(self.peers.lose(epoch, error, ended=ended))

    def _on_lost(self, lost: Lost) -> None:
        self.observer.count("peers.lost")
        log.info("%s", lost.error)
        if lost.peer in self.siblings:
            self.siblings.lost(lost.peer)
        else:
            self.connections.give_up(lost.peer)
            self.side.on_lost(lost)
            self.remotes.pop(lost.peer, None)

    def _on_unlink(self, epoch: Epoch) -> None:
        """No room uses a life: drop what there is for it but its entry in the table, if it has one still."""
        if epoch in self.connections:
            self.observer.count("links.dropped")
        self.side.on_parted(epoch)
        self.remotes.pop(epoch, None)
        self._unlink(epoch)
        if self.peers.known(epoch) is None:
            self.peer_registry.lost(epoch)

    def link_again(self, frame: Expect, then: Callable[[Expect], None]) -> bool:
        """Keep a frame of a parted life until its link is there again; False: it is no such frame.

        The frame was taken when the life had a link, and is used only now, by ``then``.
        """
        self._peer_effects(self.peers.bring_back(Epoch(frame.src), self.now))
        return self.connections.hold(frame, 0, then)

    def confirm_terminated(self, epoch: Epoch) -> None:
        """The operator has confirmed that a process ended: that is evidence once its last writes must have landed."""
        self.lose(epoch, self._lost(epoch, "its end was confirmed"), ended=True)
        self._process_monitor.confirm(epoch)

    def _lost(self, epoch: Epoch, reason: str) -> PeerLostError:
        return PeerLostError(f"{self.peer_registry.name(epoch)}: {reason}", **self.peer_registry.who(epoch))

    def _gone(self, epoch: Epoch) -> None:
        self.side.on_gone(epoch)
        self.remotes.pop(epoch, None)
        self._unlink(epoch)

    def _unlink(self, epoch: Epoch) -> None:
        """No evidence about this life is awaited any more."""
        self._process_monitor.forget(epoch)
        self.connections.drop(epoch)

    # What goes out.

    def send(self, send: Send) -> None:
        """To a life, wherever it is; dropped if it is not known any more."""
        address = self.peers.route(send.to)
        if address is None:
            self.observer.count("frames.unroutable")
            return
        self._send_buffer.put(address, self.codec.encode(send.frame))

    def reach(self, epoch: Epoch) -> Peer:
        """The transport's name of a peer to which bytes go now.

        Raises:
            TransportError: it is lost. Evidence counts from the moment when a peer's end was seen: nothing may begin
                to read or write after it.
        """
        link = self.connections.of(epoch)
        if link is None or epoch not in self.remotes:
            raise TransportError(f"{self.peer_registry.name(epoch)} is lost", **self.peer_registry.who(epoch))
        return link

    def lane(self, epoch: Epoch) -> Lane:
        """What carries writes to a peer; of one that is not linked, what holds for every peer."""
        found = self.connections.lane(epoch)
        return Lane(self.me.transport.name, self.me.transport.caps, "it is not connected") if found is None else found

    def flush(self) -> None:
        """Hand over what was said: when a step ends, and before this thread does something that may take long."""
        self._send_buffer.flush()

    def vote(self, key: RoomKey, ok: bool | None, reason: str) -> None:
        """Vote on the outcome of a room of this rank."""
        self.agree(self.verdict.vote(key, ok, reason, self.now))

    def agree(self, effects: Sequence[Send | Outcome]) -> None:
        """Act on the effects of the agreement; frames first, since other ranks wait for them."""
        sends = [effect for effect in effects if not isinstance(effect, Outcome)]
        for send in sends:
            self.send(send)
        if sends and self._prompt:
            self.flush()
        for effect in effects:
            if isinstance(effect, Outcome):
                self.side.on_decided(effect.key, effect.decided)

    def remember(self, epochs: Sequence[Epoch], key: RoomKey, ended: RoomOutcome) -> None:
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
            last.callback(self._process_monitor.close)
            last.callback(self.connections.close, until, partial(self._close_transport, until))
            # An endpoint that broke may have been interrupted in a write that it does not know of.
            if self.failures.broken is None and (self.me.role == "decode" or not self.peer_registry.holding):
                for epoch in self.peers.epochs():
                    self.send(Send(epoch, Parted(src=self.me.epoch, dst=epoch, closed=True)))
            self.flush()

    def _close_transport(self, until: float) -> None:
        try:
            left = self.me.transport.close(max(0.0, until - self.clock()))
        except Exception as exc:
            where = f"endpoint {self.me.instance}/{self.me.rank}: transport {self.me.transport.name!r}"
            raise TransportError(f"{where} could not be closed: {text_of(exc)}") from exc
        if left:
            log.warning("%d writes were still in flight when the endpoint closed", len(left))
