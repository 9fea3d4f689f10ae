"""What a rig's endpoints may be built of, besides the real parts: wrappers that count, fail or lose on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import evolve

from disagg_kv.channels import Channel, News
from disagg_kv.core import RoomFrame
from disagg_kv.core.wire.frames import Codec, Decision, Vote
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.kernels import Checksums, Kernels, Move, PageMove, kernels_for
from disagg_kv.memory import Buffer, Event, Flag, MemoryPool, bytes_of
from disagg_kv.planning import Writes
from disagg_kv.transports import InprocTransport, PeerLost, Settled, Transport, WriteEnded
from tests.support.pools import Bytes


class FiredEvent:
    """An engine's event that the test fires."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        """True once fired."""
        return self.fired

    def synchronize(self) -> None:
        """Nobody in these tests may have to wait."""
        assert self.fired, "an endpoint blocked on an event"


class CountingKernels:
    """Kernels that note every launch, and may be told to fail."""

    def __init__(self) -> None:
        self._inner: Kernels = kernels_for("cpu")
        self.name = self._inner.name
        self.gathers: list[int] = []
        self.checksums: list[int] = []
        self.copies: list[int] = []
        self.scatters: list[int] = []
        self.fail: Exception | None = None
        self.events: list[FiredEvent] | None = None

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> Event | None:
        """Count and pass on."""
        self.gathers.append(len(moves))
        return self._done(self._inner.gather(pool, moves, staging, after))

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Count and pass on."""
        self.scatters.append(len(moves))
        return self._done(self._inner.scatter(pool, moves, staging))

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> Event | None:
        """Count and pass on."""
        self.copies.append(len(moves))
        return self._done(self._inner.copy(moves, after, flags))

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """Count and pass on."""
        self.checksums.append(len(moves))
        # Without a GPU nothing happens later: what an event of ours stands for is done.
        sums = self._inner.checksum(pool, moves, after if self.events is None else None)
        return Checksums(self._done(sums.event), sums.read)

    def _done(self, event: Event | None) -> Event | None:
        if self.fail is not None:
            raise self.fail
        if self.events is None:
            return event
        self.events.append(FiredEvent())
        return self.events[-1]


class PreparingKernels(CountingKernels):
    """Kernels that prepare ``most`` launches at a time, and may be told to fail at any of it."""

    def __init__(self, most: int = 99) -> None:
        super().__init__()
        self.most = most
        self.held: list[Held] = []
        self.launched: list[int] = []
        self.fail_to_prepare: Exception | None = None
        self.fail_to_drop: Exception | None = None

    def orders(self, event: Event) -> bool:
        """As on a GPU, what has come together is one launch; events are still waited for by the thread."""
        return False

    def prepare_scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Held | None:
        """Keep the moves."""
        return self._held(moves, lambda base, after: self._inner.scatter(pool, moves, staging))

    def prepare_gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Held | None:
        """Keep the moves."""

        def gather(base: int, after: Event | None) -> Event | None:
            return self._inner.gather(pool, [evolve(move, base=move.base + base) for move in moves], staging, after)

        return self._held(moves, gather)

    def _held(self, moves: Sequence[Move], work: Callable[[int, Event | None], Event | None]) -> Held | None:
        if self.fail_to_prepare is not None:
            raise self.fail_to_prepare
        if len(self.held) >= self.most:
            return None
        self.held.append(Held(self, len(moves), work))
        return self.held[-1]

    def run(self, moves: int, work: Callable[[], Event | None]) -> Event | None:
        """What a launch does."""
        self.launched.append(moves)
        return self._done(work())


class Held:
    """A prepared launch: it is launched or dropped, once."""

    def __init__(
        self, kernels: PreparingKernels, moves: int, work: Callable[[int, Event | None], Event | None]
    ) -> None:
        self._kernels = kernels
        self._moves = moves
        self._work = work

    def launch(self, base: int = 0, after: Event | None = None) -> Event | None:
        """Once, and not after ``drop``."""
        self._kernels.held.remove(self)
        return self._kernels.run(self._moves, lambda: self._work(base, after))

    def drop(self) -> None:
        """Once, and not after ``launch``."""
        self._kernels.held.remove(self)
        if self._kernels.fail_to_drop is not None:
            raise self._kernels.fail_to_drop


Damage = Callable[[Bytes], None]
"""What becomes of a write's bytes on their way."""


class DamagingTransport(InprocTransport):
    """Damages the bytes of chosen batches on the wire: the source, and what is told of the write, stay as they were."""

    def __init__(self, damage: Mapping[int, Damage]) -> None:
        super().__init__()
        self._damage = damage
        self._buffers: dict[int, Buffer] = {}
        self.number = 0

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Note and pass on."""
        regions = super().register(buffers)
        self._buffers.update(zip(regions, buffers, strict=True))
        return regions

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Change the source for as long as the copy lasts."""
        damage = self._damage.get(self.number)
        self.number += 1
        if damage is None:
            return super().submit(peer, writes, after=after)
        where = [
            bytes_of(self._buffers[region])[at : at + n]
            for region, at, n in zip(
                writes.local.tolist(), writes.local_off.tolist(), writes.nbytes.tolist(), strict=True
            )
        ]
        kept = np.concatenate(where)
        wrong = kept.copy()
        damage(wrong)
        assert not np.array_equal(kept, wrong), "the damage changes nothing"
        ends = np.cumsum([len(part) for part in where])[:-1]
        try:
            for part, of in zip(where, np.split(wrong, ends), strict=True):
                part[:] = of
            return super().submit(peer, writes, after=after)
        finally:
            for part, of in zip(where, np.split(kept, ends), strict=True):
                part[:] = of


class RecordingTransport:
    """Notes every batch; the work is the inner one's."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name
        self.caps = inner.caps
        self.batches: list[tuple[Peer, Writes]] = []
        self.fail: Exception | None = None

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Pass on."""
        return self._inner.register(buffers)

    def peer_of(self, descriptor: bytes) -> Peer:
        """Pass on."""
        return self._inner.peer_of(descriptor)

    def local_descriptor(self) -> bytes:
        """Pass on."""
        return self._inner.local_descriptor()

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Pass on."""
        return self._inner.connect(descriptor, timeout_s)

    def disconnect(self, peer: Peer) -> None:
        """Pass on."""
        self._inner.disconnect(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Note and pass on."""
        if self.fail is not None:
            raise self.fail
        self.batches.append((peer, writes))
        return self._inner.submit(peer, writes, after=after)

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Pass on."""
        return self._inner.poll()

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Pass on."""
        return self._inner.close(drain_s)


class Over:
    """A channel over another one; all that a subclass does not say is the inner one's."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner

    @property
    def address(self) -> str:
        """The inner one's."""
        return self._inner.address

    @property
    def eager(self) -> bool:
        """The inner one's."""
        return self._inner.eager

    def send(self, address: str, frame: bytes) -> bool:
        """Pass on."""
        return self._inner.send(address, frame)

    def poll(self) -> Sequence[News]:
        """Pass on."""
        return self._inner.poll()

    def wait(self, timeout_s: float) -> None:
        """Pass on."""
        self._inner.wait(timeout_s)

    def wake(self) -> None:
        """Pass on."""
        self._inner.wake()

    def forget(self, address: str) -> None:
        """Pass on."""
        self._inner.forget(address)

    def close(self) -> None:
        """Pass on."""
        self._inner.close()


class Listening(Over):
    """Notes the frames about rooms that go to the other side; the work is the inner one's."""

    def __init__(self, inner: Channel, raised: list[RoomFrame]) -> None:
        super().__init__(inner)
        self._heard = raised
        self._codec = Codec()

    def send(self, address: str, frame: bytes) -> bool:
        """Note and pass on."""
        decoded = self._codec.decode(frame)
        if isinstance(decoded, RoomFrame) and not isinstance(decoded, Vote | Decision):
            self._heard.append(decoded)
        return self._inner.send(address, frame)


Fate = Callable[[int, str], Sequence[int]]
"""What becomes of the n-th frame to an address: a copy after each so many later sends; () drops it."""


class Unreliable(Over):
    """A channel whose frames are dropped, doubled or late, as ``fate`` says."""

    def __init__(self, inner: Channel, fate: Fate) -> None:
        super().__init__(inner)
        self._fate = fate
        self._late: list[tuple[int, str, bytes]] = []
        self.sent = 0

    def send(self, address: str, frame: bytes) -> bool:
        """As fate wills; the sender does not learn it."""
        self._late += [(self.sent + later, address, frame) for later in self._fate(self.sent, address)]
        self._flush()
        self.sent += 1
        return True

    def _flush(self) -> None:
        due = [one for one in self._late if one[0] <= self.sent]
        self._late = [one for one in self._late if one[0] > self.sent]
        for _, address, frame in due:
            self._inner.send(address, frame)


class Later:
    """Runs jobs when a test says so; satisfies :class:`Background`."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def start(self, job: Callable[[], None]) -> None:
        """Keep it."""
        self.jobs.append(job)

    def close(self, timeout_s: float, then: Callable[[], None]) -> bool:
        """Nothing runs."""
        then()
        return True
