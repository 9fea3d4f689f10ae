"""Connections of the transport, one per epoch of a peer: linking, linked, or failed.

``Transport.connect`` may block for seconds, so it runs on a helper thread. Until it has returned, the epoch is
*linking*: no room uses it, and its frames about rooms wait here, bounded. The endpoint's thread begins with
:meth:`Links.begin` and takes results with :meth:`Links.results`. A failure is remembered from when it happened, so that
the next frame of that epoch does not begin another attempt at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from ...errors import DisaggKVError, IncompatiblePeerError, without_frames
from ...ids import Epoch, Peer, peer_name
from ...protocol import Hello, RoomFrame
from ...protocol.machine import ours
from ...protocol.peers import Up
from ...transports import Transport
from .background import Background

CONNECT_S = 10.0
"""Seconds that a transport may take to reach a peer. A busy host's library needs seconds; no room of others waits."""

EARLY_FRAMES = 256
"""Frames of one epoch that wait until it is linked. More are dropped: their sender repeats what matters."""

REMEMBERED = 256
"""Failures that are remembered."""


@define
class _Linking:
    up: Up
    wanted: bool = True
    frames: list[RoomFrame] = field(factory=list)


@frozen
class Linked:
    """An attempt has ended. ``link`` is the transport's name of the peer, or why there is none.

    ``frames`` have come meanwhile.
    """

    up: Up
    link: Peer | DisaggKVError
    frames: Sequence[RoomFrame]


class Links:
    """The transport connections of one endpoint.

    Args:
        transport: connects.
        background: where it does so.
        wake: called on a helper thread when an attempt has ended.
        clock: time, in seconds.
        remember_s: how long a failure is remembered.
    """

    def __init__(
        self,
        transport: Transport,
        background: Background,
        wake: Callable[[], None],
        clock: Callable[[], float],
        remember_s: float,
    ) -> None:
        self._transport = transport
        self._background = background
        self._wake = wake
        self._clock = clock
        self._remember_s = remember_s
        self._linking: dict[Epoch, _Linking] = {}
        self._linked: dict[Epoch, Peer] = {}
        self._epochs: dict[Peer, Epoch] = {}
        self._claims: dict[Peer, Hello] = {}
        self._failed: OrderedDict[Epoch, tuple[float, DisaggKVError]] = OrderedDict()
        self._results: deque[tuple[Epoch, Peer | DisaggKVError, float]] = deque()

    def begin(self, up: Up) -> Linked | None:
        """Link to a peer; None: the result comes out of :meth:`results`. A remembered failure is returned at once."""
        linking = self._linking.get(up.epoch)
        if linking is not None:
            linking.up, linking.wanted = up, True
            return None
        at, error = self._failed.get(up.epoch, (0.0, None))
        if error is not None and self._clock() - at < self._remember_s:
            return Linked(up, error, ())
        self._failed.pop(up.epoch, None)
        transport, epoch, hello = self._transport, up.epoch, up.hello
        name = f"peer {peer_name(epoch, hello.instance, hello.rank)} at {hello.address}: transport {hello.transport!r}"
        try:
            self._claim(hello)
        except Exception as exc:
            self._fail(epoch, refused := ours(exc, name), self._clock())
            return Linked(up, refused, ())
        self._linking[epoch] = _Linking(up)

        def job() -> None:
            link: Peer | DisaggKVError
            try:
                link = transport.connect(hello.descriptor, CONNECT_S)
            except Exception as exc:
                link = ours(exc, name)
            self._results.append((epoch, link, self._clock()))
            self._wake()

        self._background.start(job)
        return None

    def results(self) -> Sequence[Linked]:
        """The attempts that have ended since the last call, and that are still wanted."""
        out: list[Linked] = []
        while self._results:
            epoch, link, at = self._results.popleft()
            linking = self._linking.pop(epoch)
            if isinstance(link, DisaggKVError):
                self._fail(epoch, link, at)
            elif linking.wanted:
                self._linked[epoch] = link
                self._epochs[link] = epoch
            elif epoch not in self._linked:
                self._transport.disconnect(link)
            if epoch not in self._linked:
                self._release(epoch)
            if linking.wanted:
                out.append(Linked(linking.up, link, linking.frames))
        return out

    def _fail(self, epoch: Epoch, error: DisaggKVError, at: float) -> None:
        without_frames(error)
        self._failed[epoch] = (at, error)
        self._failed.move_to_end(epoch)
        while len(self._failed) > REMEMBERED:
            self._failed.popitem(last=False)

    def _claim(self, hello: Hello) -> None:
        """The transport that an epoch names is its own, from before it is connected until it is disconnected.

        Descriptors are no secrets. Another epoch that names the same transport would receive, or divert, the bytes of
        the first one, and its end would end the first one's link.

        Raises:
            IncompatiblePeerError: another epoch has named it before.
            RemoteProtocolError: the descriptor is garbage.
        """
        owner = self._claims.setdefault(self._transport.peer_of(hello.descriptor), hello)
        if owner.src != hello.src:
            ours, theirs = (peer_name(one.src, one.instance, one.rank) for one in (owner, hello))
            raise IncompatiblePeerError("descriptor", f"that of {ours}", theirs)

    def _release(self, epoch: Epoch) -> None:
        for peer in [peer for peer, owner in self._claims.items() if owner.src == epoch]:
            del self._claims[peer]

    def hold(self, frame: RoomFrame) -> bool:
        """Keep a frame of an epoch that is linking; False: its epoch is not. Raises nothing, drops beyond a bound."""
        linking = self._linking.get(Epoch(frame.src))
        if linking is None or not linking.wanted:
            return False
        if len(linking.frames) < EARLY_FRAMES:
            linking.frames.append(frame)
        return True

    def give_up(self, epoch: Epoch) -> None:
        """The peer is lost: the result of an attempt that is under way is not wanted, nor what has come meanwhile."""
        linking = self._linking.get(epoch)
        if linking is not None:
            linking.wanted = False
            linking.frames = []

    def drop(self, epoch: Epoch) -> None:
        """Nothing is awaited of this epoch any more: disconnect."""
        self.give_up(epoch)
        link = self._linked.pop(epoch, None)
        if link is not None:
            self._epochs.pop(link, None)
            self._transport.disconnect(link)
        if epoch not in self._linking:
            self._release(epoch)

    def of(self, epoch: Epoch) -> Peer | None:
        """The transport's name of a peer; None: it is not linked."""
        return self._linked.get(epoch)

    def epoch(self, link: Peer) -> Epoch | None:
        """Which epoch the transport speaks of."""
        return self._epochs.get(link)

    def linking(self, epoch: Epoch) -> bool:
        """Whether an attempt is under way, and wanted."""
        linking = self._linking.get(epoch)
        return linking is not None and linking.wanted

    def linked(self) -> Sequence[Epoch]:
        """Every epoch that is linked, in the order of their first links."""
        return tuple(self._linked)

    def __contains__(self, epoch: object) -> bool:
        """Whether an epoch is linked; from any thread."""
        return epoch in self._linked

    def __len__(self) -> int:
        return len(self._linked) + len(self._linking)

    def close(self) -> None:
        """Wait for attempts that are under way, as long as they may take: the transport closes after this."""
        self._background.close(CONNECT_S)
