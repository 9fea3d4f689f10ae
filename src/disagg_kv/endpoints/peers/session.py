"""All that an endpoint knows of its peers: a session for each incarnation.

The thread that advances writes, any thread reads: an operator asks from the engine's. A peer that holds memory here
is listed for as long as it does: a room uses it. There is no lock: a signal handler that interrupts a reader may close
the endpoint, whose thread must be able to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import define, field, frozen

from ...core import KnownPeer, Options, PeerTable, RoomKey
from ...core.wire.frames import Done, Expected, WirePace
from ...errors import About, DisaggKVError, UnknownNameError
from ...ids import Epoch, Peer, Rank, peer_name
from ...planning import InstancePlans
from ...transports import Carrier
from ...transports.several import Shared
from ..status import PeerInfo, PeerState
from .handshake import RemoteEndpoint
from .mapping import UNMAPPED, Mapping


@frozen
class HeldMemory:
    """What one room keeps until there is evidence about one peer, in bytes; see :class:`PeerInfo`."""

    ring_bytes: int = 0
    page_bytes: int = 0
    slot_bytes: int = 0


@define(eq=False)
class Link:
    """What there is between the transports and one incarnation.

    Args:
        session: of the incarnation.
        shared: the transports that both sides have.
        until, late: when an attempt that has not returned is overdue, and what to say then.
        linked: the attempt has succeeded.
        mapping: of the peer's pool.
        carrier: what carries writes to it; None: it is not connected yet.
        wanted: the result of the attempt is awaited.
        error: why it cannot be used although it is there.
        frames: calls that take in what has come meanwhile, and how many bytes that is.
    """

    session: PeerSession
    shared: Shared
    until: float
    late: str
    linked: bool = False
    mapping: Mapping = UNMAPPED
    carrier: Carrier | None = None
    wanted: bool = True
    error: DisaggKVError | None = None
    frames: list[Callable[[], None]] = field(factory=list)
    nbytes: int = 0

    @property
    def claims(self) -> Sequence[tuple[str, Peer]]:
        """The peer's names in transports, which no other peer may have."""
        return tuple(self.shared.names.items())


@define(eq=False)
class PeerSession(KnownPeer):
    """One incarnation, for as long as the table of peers knows it: at least while a room uses it.

    Args:
        remote: of a peer of the other side: what it announced, while rooms may be bound to it.
        link: between the transport and it; None: there is none.
        failed_at, failed: when and why an attempt to connect it has failed last.
        held: memory of failed rooms that waits for evidence about it.
        plans: between the two instances, once a room has needed them.
        pace: on decode, how fast it has written, by its last word.
        unmapped: on decode, why our pool is not mapped there, as it announced; empty: it is; None: it has not said.
        flag_blocks: on decode, blocks of flags that were named to it, and that no room uses.
        gone: on decode, it stores nothing any more.
    """

    remote: RemoteEndpoint | None = None
    link: Link | None = None
    failed_at: float = 0.0
    failed: DisaggKVError | None = None
    held: dict[RoomKey, HeldMemory] = field(factory=dict)
    plans: InstancePlans | None = None
    pace: WirePace | None = None
    unmapped: str | None = None
    flag_blocks: list[int] = field(factory=list)
    gone: bool = False

    @property
    def linked(self) -> bool:
        """Whether the transport is connected to it."""
        return self.link is not None and self.link.linked

    @property
    def carrier(self) -> Carrier | None:
        """What carries writes to it; None: it is not connected. From any thread."""
        return None if self.link is None else self.link.carrier

    @property
    def mapping(self) -> Mapping:
        """Its pool, as it is mapped here."""
        return UNMAPPED if self.link is None else self.link.mapping

    def learn(self, frame: Done | Expected) -> None:
        """What later rooms ask a prefill rank for; the frame's own room may have ended already."""
        if isinstance(frame, Done):
            self.pace = frame.pace or self.pace
        elif frame.unmapped is not None:
            self.unmapped = frame.unmapped

    def depart(self) -> None:
        """No room may be bound to it any more."""
        self.remote = self.unmapped = None


class Sessions:
    """What operators and messages say of the peers of one endpoint, and the memory that waits for evidence about each.

    Args:
        table: the endpoint's peer table.
        options: when a peer counts as silent.
        clock: time.
    """

    def __init__(self, table: PeerTable[PeerSession], options: Options, clock: Callable[[], float]) -> None:
        self._table = table
        self._silent_s = options.missed * options.heartbeat_s
        self._clock = clock

    # On the thread that advances.

    def hold(self, key: RoomKey, held: dict[Epoch, HeldMemory], peers: Iterable[Epoch]) -> None:
        """A room that failed waits for evidence about these of its peers, and for no other."""
        for epoch in peers:
            session = self._table.known(epoch)
            if session is not None and epoch in held:
                session.held[key] = held[epoch]
            elif session is not None:
                session.held.pop(key, None)

    @property
    def holding(self) -> bool:
        """Whether a room waits for evidence."""
        return any(session.held for session in self._table.all())

    # From any thread.

    def listed(self) -> tuple[PeerInfo, ...]:
        """Every peer that is connected, in the order in which they came, and then every other that holds memory."""
        sessions = self._table.all()
        there = [self._info(session) for session in sessions if not session.lost]
        return (*there, *(self._info(session) for session in sessions if session.lost and session.held))

    def _info(self, session: PeerSession) -> PeerInfo:
        hello, carrier = session.hello, session.carrier
        held = list(session.held.items())  # one step
        now = self._clock()
        silent_s = max(0.0, now - session.last_frame_at)
        state: PeerState = "connected"
        if session.used_since is not None and now - session.heard > self._silent_s:
            state = "silent"
        elif session.used_since is None and silent_s > self._silent_s:
            state = "idle"
        if session.lost:
            state = "ended" if session.ended else "lost"
        return PeerInfo(
            hello.instance,
            Rank(hello.rank),
            hello.address,
            session.epoch,
            hello.host,
            hello.pid,
            state,
            silent_s,
            sum(one.ring_bytes for _, one in held),
            sum(one.page_bytes for _, one in held),
            sum(one.slot_bytes for _, one in held),
            tuple(dict.fromkeys(key.room for key, _ in held)),
            "" if carrier is None else carrier.name,
            "" if carrier is None else carrier.reason,
        )

    def name(self, epoch: Epoch) -> str:
        """A peer for messages."""
        known = self._table.known(epoch) or self._table.refused(epoch)
        return f"peer {peer_name(epoch)}" if known is None else known.name

    def who(self, epoch: Epoch) -> About:
        """What is known of a peer, for attributes of errors."""
        known = self._table.known(epoch) or self._table.refused(epoch)
        return {"epoch": epoch} if known is None else known.who

    def find(self, named: Epoch | str) -> Epoch:
        """The incarnation that an operator names, by its epoch or the 32 hex digits of it.

        One that is lost and holds nothing is found too, for as long as anything is known of it.

        Raises:
            UnknownNameError: there is none; says which hold memory here.
        """
        try:
            epoch = Epoch(bytes.fromhex(named)) if isinstance(named, str) else named
        except ValueError:
            epoch = Epoch(b"")
        if self._table.known(epoch) is not None:
            return epoch
        holding = (peer_name(p.epoch, p.instance, p.rank) for p in self.listed() if p.rooms)
        raise UnknownNameError("epoch", named if isinstance(named, str) else named.hex(), holding)
