"""Which peers there are, and what memory here waits for evidence about each of them.

The endpoint's thread writes, any thread reads: an operator asks from the engine's thread. A life that holds memory here
is listed for as long as it does, also when the peer table has forgotten it. There is no lock: a signal handler that
interrupts a reader may close the endpoint, whose thread must be able to write.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from attrs import define, field, frozen

from ...core import Hello, KnownPeer, Options, PeerTable, RoomKey
from ...errors import About, UnknownNameError
from ...ids import Epoch, Rank, RoomId, peer_name, room_text
from ...transports import Lane
from ..status import PeerInfo, PeerState


@frozen
class HeldMemory:
    """What one room keeps until there is evidence about one peer, in bytes; see :class:`PeerInfo`."""

    ring_bytes: int = 0
    page_bytes: int = 0
    slot_bytes: int = 0


@define
class _Sum:
    """The same of all rooms."""

    peer: KnownPeer
    ring_bytes: int = 0
    page_bytes: int = 0
    slot_bytes: int = 0
    rooms: dict[RoomId, None] = field(factory=dict)

    def add(self, room: RoomId, held: HeldMemory) -> None:
        self.ring_bytes += held.ring_bytes
        self.page_bytes += held.page_bytes
        self.slot_bytes += held.slot_bytes
        self.rooms[room] = None


class PeerRegistry:
    """The peers of one endpoint.

    Args:
        table: the endpoint's peer table.
        linked: the lives that the transport is connected to.
        lane: what carries writes to one of them.
        options: when a peer counts as silent.
        clock: time.
    """

    def __init__(
        self,
        table: PeerTable,
        linked: Container[Epoch],
        lane: Callable[[Epoch], Lane | None],
        options: Options,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._linked = linked
        self._lane = lane
        self._silent_s = options.missed * options.heartbeat_s
        self._clock = clock
        self._present: dict[Epoch, KnownPeer] = {}
        self._waiting: dict[RoomKey, dict[Epoch, tuple[KnownPeer, HeldMemory]]] = {}

    # On the endpoint's thread.

    def up(self, epoch: Epoch) -> None:
        """A peer is there."""
        peer = self._table.known(epoch)
        if peer is not None:
            self._present[epoch] = peer

    def lost(self, epoch: Epoch) -> None:
        """A peer was lost."""
        self._present.pop(epoch, None)

    def hold(self, key: RoomKey, held: Mapping[Epoch, HeldMemory], hellos: Iterable[Hello]) -> None:
        """A room that failed waits for evidence about these lives, and for no other; ``hellos``: what they are."""
        before = self._waiting.get(key, {})
        if not held and not before:
            return
        said = {Epoch(hello.src): hello for hello in hellos}
        now = {epoch: (self._known(epoch, before, said[epoch]), of) for epoch, of in held.items()}
        if now:
            self._waiting[key] = now
        else:
            del self._waiting[key]

    def _known(self, epoch: Epoch, before: Mapping[Epoch, tuple[KnownPeer, HeldMemory]], hello: Hello) -> KnownPeer:
        peer = self._table.known(epoch) or self._present.get(epoch)
        if peer is None:
            # It was forgotten before the room failed: the time of its last frame is not known any more.
            peer = before[epoch][0] if epoch in before else KnownPeer(hello, float("-inf"), True, lost=True)
        return peer

    def ended(self, epoch: Epoch) -> None:
        """The end of a process was seen or confirmed: the peer table may have forgotten it."""
        for waiting in self._waiting.values():
            if epoch in waiting:
                waiting[epoch][0].ended = True

    @property
    def holding(self) -> bool:
        """Whether a room waits for evidence."""
        return bool(self._waiting)

    # From any thread.

    def listed(self) -> tuple[PeerInfo, ...]:
        """Every life that is connected, in the order in which they came, and then every other that holds memory."""
        sums = {epoch: _Sum(peer) for epoch, peer in list(self._present.items())}  # one step, as below
        for key, waiting in list(self._waiting.items()):  # one step; what a room waits for is replaced as a whole
            for epoch, (peer, held) in waiting.items():
                sums.setdefault(epoch, _Sum(self._table.known(epoch) or peer)).add(key.room, held)
        return tuple(self._info(epoch, of) for epoch, of in sums.items())

    def _info(self, epoch: Epoch, of: _Sum) -> PeerInfo:
        hello, now = of.peer.hello, self._clock()
        silent_s = max(0.0, now - of.peer.last_frame_at)
        state: PeerState = "connected"
        if of.peer.used_since is not None and now - of.peer.heard > self._silent_s:
            state = "silent"
        elif of.peer.used_since is None and silent_s > self._silent_s:
            state = "idle"
        if of.peer.parted:
            state = "parted"
        if of.peer.lost or of.peer.ended:
            state = "ended" if of.peer.ended else "lost"
        lane = self._lane(epoch)
        return PeerInfo(
            hello.instance,
            Rank(hello.rank),
            hello.address,
            epoch,
            hello.host,
            hello.pid,
            state,
            silent_s,
            of.ring_bytes,
            of.page_bytes,
            of.slot_bytes,
            tuple(of.rooms),
            "" if lane is None else lane.name,
            "" if lane is None else lane.reason,
        )

    def name(self, epoch: Epoch) -> str:
        """A life for messages."""
        known = self._find(epoch) or self._table.refused(epoch)
        return f"peer {peer_name(epoch)}" if known is None else known.name

    def who(self, epoch: Epoch) -> About:
        """What is known of a life, for attributes of errors."""
        known = self._find(epoch) or self._table.refused(epoch)
        return {"epoch": epoch} if known is None else known.who

    def _find(self, epoch: Epoch) -> KnownPeer | None:
        found = (waiting[epoch][0] for waiting in list(self._waiting.values()) if epoch in waiting)
        return self._table.known(epoch) or self._present.get(epoch) or next(found, None)

    def find(self, named: Epoch | str) -> Epoch:
        """The life that an operator names, by its epoch or the 32 hex digits of it.

        One that is lost and holds nothing is found too, for as long as anything is known of it.

        Raises:
            UnknownNameError: there is none; says which hold memory here.
        """
        try:
            epoch = Epoch(bytes.fromhex(named)) if isinstance(named, str) else named
        except ValueError:
            epoch = Epoch(b"")
        if self._table.known(epoch) is not None or epoch in self._linked:
            return epoch
        peers = self.listed()
        if any(peer.epoch == epoch for peer in peers):
            return epoch
        holding = (peer_name(p.epoch, p.instance, p.rank) for p in peers if p.rooms)
        raise UnknownNameError("epoch", named if isinstance(named, str) else named.hex(), holding)


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
