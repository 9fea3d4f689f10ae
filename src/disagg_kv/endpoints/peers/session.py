"""All that an endpoint knows of its peers: a session for each incarnation, and which rooms use it.

The thread that advances writes, any thread reads: an operator asks from the engine's. A peer that holds memory here
is listed for as long as it does: a room uses it. There is no lock: a signal handler that interrupts a reader may close
the endpoint, whose thread must be able to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import define, field, frozen

from ...core import KnownPeer, Options, PeerTable, RoomKey
from ...core.wire.frames import WirePace
from ...errors import About, DisaggKVError, UnknownNameError
from ...ids import Epoch, Peer, Rank, peer_name, room_text
from ...transports import Carrier
from ...transports.several import Shared
from ..status import PeerInfo, PeerState
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
class PeerSession:
    """One incarnation, for as long as the table of peers knows it: at least while a room uses it.

    Args:
        known: what the table says of it.
        link: between the transport and it; None: there is none.
        failed_at, failed: when and why an attempt to connect it has failed last.
        ended_at: when the end of its process was seen or confirmed; None: it was not, or its evidence was used.
        held: memory of failed rooms that waits for evidence about it.
        pace: on decode, how fast it has written, by its last word.
    """

    known: KnownPeer
    link: Link | None = None
    failed_at: float = 0.0
    failed: DisaggKVError | None = None
    ended_at: float | None = None
    held: dict[RoomKey, HeldMemory] = field(factory=dict)
    pace: WirePace | None = None

    @property
    def linked(self) -> bool:
        """Whether the transport is connected to it."""
        return self.link is not None and self.link.linked

    @property
    def carrier(self) -> Carrier | None:
        """What carries writes to it; None: it is not connected. From any thread."""
        return None if self.link is None else self.link.carrier


class Sessions:
    """The peers of one endpoint: one session for each incarnation that the table of peers knows.

    Args:
        table: the endpoint's peer table.
        options: when a peer counts as silent.
        clock: time.
    """

    def __init__(self, table: PeerTable, options: Options, clock: Callable[[], float]) -> None:
        self._table = table
        self._silent_s = options.missed * options.heartbeat_s
        self._clock = clock
        self._sessions: dict[Epoch, PeerSession] = {}

    # On the thread that advances.

    def up(self, known: KnownPeer) -> PeerSession:
        """A peer is there, perhaps again."""
        return self._sessions.setdefault(known.epoch, PeerSession(known))

    def get(self, epoch: Epoch) -> PeerSession | None:
        """The session of an incarnation; None: the table does not know it. From any thread."""
        return self._sessions.get(epoch)

    def pop(self, epoch: Epoch) -> PeerSession | None:
        """The table has forgotten an incarnation."""
        return self._sessions.pop(epoch, None)

    def hold(self, key: RoomKey, held: dict[Epoch, HeldMemory], peers: Iterable[Epoch]) -> None:
        """A room that failed waits for evidence about these of its peers, and for no other."""
        for epoch in peers:
            session = self._sessions.get(epoch)
            if session is not None and epoch in held:
                session.held[key] = held[epoch]
            elif session is not None:
                session.held.pop(key, None)

    @property
    def holding(self) -> bool:
        """Whether a room waits for evidence."""
        return any(session.held for session in self._sessions.values())

    # From any thread.

    def listed(self) -> tuple[PeerInfo, ...]:
        """Every peer that is connected, in the order in which they came, and then every other that holds memory."""
        sessions = list(self._sessions.values())  # one step
        there = [self._info(session) for session in sessions if not session.known.lost]
        return (*there, *(self._info(session) for session in sessions if session.known.lost and session.held))

    def _info(self, session: PeerSession) -> PeerInfo:
        known, hello, carrier = session.known, session.known.hello, session.carrier
        held = list(session.held.items())  # one step
        now = self._clock()
        silent_s = max(0.0, now - known.last_frame_at)
        state: PeerState = "connected"
        if known.used_since is not None and now - known.heard > self._silent_s:
            state = "silent"
        elif known.used_since is None and silent_s > self._silent_s:
            state = "idle"
        if known.lost:
            state = "ended" if known.ended else "lost"
        return PeerInfo(
            hello.instance,
            Rank(hello.rank),
            hello.address,
            known.epoch,
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


class UsedPeers:
    """Says to the table of peers which of them rooms use, each room once.

    Args:
        peers: counts the rooms.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._of: dict[RoomKey, list[KnownPeer]] = {}

    def use(self, peer: Epoch, room: RoomKey, now: float) -> None:
        """The room uses the peer until it is over."""
        used = self._of.setdefault(room, [])
        if all(one.epoch != peer for one in used) and (known := self._peers.use(peer, now)) is not None:
            used.append(known)

    def forget(self, room: RoomKey) -> None:
        """The room is over."""
        for peer in self._of.pop(room, ()):
            self._peers.release(peer)


def format_peers(peers: Sequence[PeerInfo]) -> str:
    """A table of what ``peers()`` says, a line for each, those that hold most first; for a log or a terminal.

    The last column is what ``confirm_terminated`` takes.
    """
    if not peers:
        return "no peer is connected, and none holds memory"
    head = (
        "peer",
        "state",
        "transport",
        "silent s",
        "ring B",
        "pages B",
        "slots B",
        "rooms",
        "address",
        "host",
        "pid",
        "epoch",
    )
    lines = [head, *(_cells(peer) for peer in sorted(peers, key=lambda peer: -peer.held_bytes))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cells(peer: PeerInfo) -> tuple[str, ...]:
    name, _, _ = peer_name(peer.epoch, peer.instance, peer.rank).rpartition(" (")
    address, host = (
        "".join(c if c.isprintable() else "?" for c in text.replace(" ", "_")) for text in (peer.address, peer.host)
    )
    return (
        name,
        peer.state,
        peer.transport or "-",
        f"{peer.silent_s:.1f}",
        str(peer.ring_bytes),
        str(peer.page_bytes),
        str(peer.slot_bytes),
        ",".join(map(room_text, peer.rooms)) or "-",
        address,
        host,
        str(peer.pid),
        peer.epoch.hex(),
    )
