"""The simulated network: frames that are lost, doubled, late, held back and cut short."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from disagg_kv.channels import Arrived, Closed, Opened, check_together
from disagg_kv.core import Codec
from disagg_kv.core.wire.frames import ChunkReady
from disagg_kv.transports import LinkCost

from .fault import FaultClass
from .kind import Kind
from .simulation import SimProcess, Simulation

LINGER = 12
"""Messages of one process that may arrive, once more, after its end."""

KEPT = 64
"""Messages that are kept to be sent again later."""

LATENCY_S = (0.001, 0.001, 0.002)

FAR_S = (0.01, 0.03, 0.08)
"""How much longer the frames of a rank that is far away take."""

LINK = LinkCost(0, 0)

Message = Sequence[bytes]
"""Frames that arrive together, or not at all."""


class SimChannel:
    """One life's inbox; satisfies :class:`~disagg_kv.channels.Channel`. Whatever it sends, the network has."""

    eager = False
    link_cost = LINK
    """Nothing; the endpoint's own part counts."""

    def __init__(self, network: Network, process: SimProcess) -> None:
        self.process = process
        self.address = process.address
        self._network = network
        self.inbox: list[Arrived | Closed | Opened] = []
        self.closed = False

    def send(self, address: str, frame: bytes) -> bool:
        """Hand a frame to the network."""
        self._check()
        if not self.closed:
            self._network.send(self, address, (frame,))
        return not self.closed

    def _check(self) -> None:
        if self.process.send_raises:
            raise RuntimeError("sim: the channel's send failed")

    def poll(self) -> Sequence[Arrived | Closed | Opened]:
        """What came in."""
        if not self.inbox:
            return ()
        came, self.inbox = self.inbox, []
        return came

    def wait(self, timeout_s: float) -> None:
        """Time passes between the steps of endpoints, not in them."""

    def wake(self) -> None:
        """The endpoint has something to do."""
        self.process.touch()

    def forget(self, address: str) -> None:
        """Drop the connection."""
        self._network.forget(self, address)

    def close(self) -> None:
        """Nothing is received or sent any more."""
        self.closed = True
        self.inbox = []


class SimBatchChannel(SimChannel):
    """One that satisfies :class:`~disagg_kv.channels.SupportsBatches` too."""

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """Hand frames to the network as one message, of which no channel takes more."""
        check_together(address, frames)
        self._check()
        if not self.closed:
            self._network.send(self, address, tuple(frames))
        return not self.closed


class Network:
    """Links between addresses, each in order unless a fault reorders it."""

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._random = world.random
        self._codec = Codec()
        faults = world.scenario.faults
        self._noisy = any(
            f in faults
            for f in (
                FaultClass.DROP, FaultClass.DUPLICATE, FaultClass.REORDER, FaultClass.DELAY, FaultClass.STALE,
                FaultClass.CLOG, FaultClass.PARTITION, FaultClass.TRUNCATED,
            )
        )  # fmt: skip
        self._rates = tuple(
            faults.get(f)
            for f in (
                FaultClass.PARTITION, FaultClass.CLOG, FaultClass.DROP, FaultClass.TRUNCATED, FaultClass.STALE,
                FaultClass.DELAY, FaultClass.DUPLICATE, FaultClass.REORDER,
            )
        )  # fmt: skip
        self._last: dict[tuple[str, str], float] = {}
        self._shut: dict[tuple[str, str], float] = {}
        self._lost: dict[tuple[str, str], float] = {}
        self._muted: dict[str, float] = {}
        self._kept: list[tuple[str, Message]] = []
        self.stale_at: dict[str, float] = {}
        """When an address last got a frame of long ago: its sender seems to be alive."""
        self._channels: dict[str, SimChannel] = {}
        self._watchers: dict[str, dict[SimChannel, None]] = {}
        self._recent: dict[str, deque[tuple[str, Message]]] = {}

    def send(self, source: SimChannel, address: str, message: Message) -> None:
        """A message leaves."""
        world = self._world
        for frame in message:
            world.note("sent", source.address, address, frame)
        if len(message) > 1:
            world.saw(Kind.TOGETHER)
        recent = self._recent.get(source.address)
        if recent is None:
            recent = self._recent[source.address] = deque(maxlen=LINGER)
        recent.append((address, message))
        if self._muted and self._muted.get(source.address, 0.0) > world.now and world.faulty:
            message = self._without_notices(message)
            if not message:
                return
        watchers = self._watchers.get(address)
        if watchers is None:
            watchers = self._watchers[address] = {}
        if source not in watchers:
            watchers[source] = None
            if address in self._channels:
                self._tell(source, Opened(address))
            elif world.scenario.resets:
                self._tell(source, Closed(address))
        link = (source.address, address)
        latency = self._random.choice(LATENCY_S)
        if (source.process.side, source.process.index) == world.scenario.far:
            latency += self._random.choice(FAR_S)
        if self._noisy and world.faulty:
            self._send_badly(link, message, latency)
        else:
            self._deliver(link, message, latency)

    def _send_badly(self, link: tuple[str, str], message: Message, latency: float) -> None:
        world, now, rng = self._world, self._world.now, self._random
        random = rng.random
        partition, clog, drop, truncated, stale, delay, duplicate, reorder = self._rates
        if partition is not None and random() < partition:
            world.hit(FaultClass.PARTITION)
            self._lost[link] = now + rng.choice((0.1, 0.5, 1.0, 2.5))
        if clog is not None and random() < clog:
            world.hit(FaultClass.CLOG)
            self._shut[link] = now + rng.choice((0.05, 0.3, 1.0))
        if self._lost.get(link, 0.0) > now:
            return
        if drop is not None and random() < drop:
            world.hit(FaultClass.DROP)
            return
        if truncated is not None and random() < truncated:
            world.hit(FaultClass.TRUNCATED)
            message = self._cut(message, rng.randrange(sum(map(len, message))))
        if stale is not None and random() < stale:
            self._send_stale(link, message)
        if delay is not None and random() < delay:
            world.hit(FaultClass.DELAY)
            latency += rng.choice((0.02, 0.2, 1.0))
        if duplicate is not None and random() < duplicate:
            world.hit(FaultClass.DUPLICATE)
            self._deliver(link, message, latency + rng.randrange(10) / 1000, ordered=False)
        if reorder is not None and random() < reorder:
            world.hit(FaultClass.REORDER)
            self._deliver(link, message, latency + rng.randrange(10) / 1000, ordered=False)
        else:
            self._deliver(link, message, latency)

    def mute(self, channel: SimChannel, seconds: float) -> None:
        """The notices of a process are lost for a while, and nothing else: its ``Done`` arrives."""
        self._muted[channel.address] = self._world.now + seconds

    def _without_notices(self, message: Message) -> Message:
        left = [frame for frame in message if not isinstance(self._codec.decode(frame), ChunkReady)]
        if len(left) < len(message):
            self._world.hit(FaultClass.DROP)
        return left

    def _cut(self, message: Message, left: int) -> Message:
        """The first bytes of a message: whole frames, and what is left of the next one."""
        cut: list[bytes] = []
        for frame in message:
            if left < len(frame):
                if cut:
                    self._world.saw(Kind.TOGETHER_CUT)
                return [*cut, frame[:left]]
            cut.append(frame)
            left -= len(frame)
        return cut

    def _send_stale(self, link: tuple[str, str], message: Message) -> None:
        """Keep some messages, and send some of those kept once more."""
        self._kept.append((link[1], message))
        if len(self._kept) > KEPT:
            self._kept.pop(0)
        world = self._world
        world.hit(FaultClass.STALE)
        address, old = self._random.choice(self._kept)
        after = self._random.choice((0.005, 0.05, 0.5))
        self.stale_at[address] = max(world.now + after, self.stale_at.get(address, 0.0))
        world.later(after, lambda: self._arrive(address, old))

    def _deliver(self, link: tuple[str, str], message: Message, latency: float, ordered: bool = True) -> None:
        at = self._world.now + latency
        if self._shut:
            at = max(at, self._shut.get(link, 0.0))
        if ordered:
            at = self._last[link] = max(at, self._last.get(link, 0.0))
        self._world.at(at, partial(self._arrive, link[1], message))

    def _arrive(self, address: str, message: Message) -> None:
        channel = self._channels.get(address)
        if channel is not None:
            channel.inbox.extend(map(Arrived, message))
            channel.process.touch()

    def opened(self, channel: SimChannel) -> None:
        """A process listens at its address."""
        self._channels[channel.address] = channel
        for watcher in self._watchers.get(channel.address, {}):
            self._tell(watcher, Opened(channel.address))

    def closed(self, channel: SimChannel) -> None:
        """A process has ended: others may get an event for their connections, or nothing."""
        for watchers in self._watchers.values():
            watchers.pop(channel, None)
        if self._world.scenario.resets:
            for watcher in self._watchers.get(channel.address, {}):
                self._tell(watcher, Closed(channel.address))
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]

    def linger(self, channel: SimChannel) -> None:
        """Deliver some recent frames of a process after its end."""
        for address, message in self._recent.pop(channel.address, ()):
            if self._random.random() < 0.5:
                self._world.later(
                    self._random.choice((0.002, 0.05, 0.2)),
                    partial(self._arrive, address, message),
                )

    def _tell(self, channel: SimChannel, event: Closed | Opened) -> None:
        def arrive() -> None:
            if channel.process.alive:
                channel.inbox.append(event)
                channel.process.touch()

        self._world.later(0.001, arrive)

    def forget(self, channel: SimChannel, address: str) -> None:
        """A life gets no more events of an address."""
        self._watchers.get(address, {}).pop(channel, None)

    def heal(self) -> None:
        """Every link carries again."""
        self._shut.clear()
        self._lost.clear()
