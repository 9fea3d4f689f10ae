"""Plausible mistakes in a transport, one a class. A child process can import each of them by name."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakSet

import attrs
import numpy as np

from disagg_kv.errors import RemoteProtocolError, TransportError
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import Buffer, Event
from disagg_kv.planning import Writes
from disagg_kv.transports import Descriptor, PeerLost, Settled, WriteEnded, copy
from disagg_kv.transports.descriptor import VERSION
from tests.support.model_transport import Flight, ModelTransport, Place, Remote, stopped

SOON_S = 0.05
"""How late the late ones are."""


# Tickets


class EndsTwice(ModelTransport):
    """It reports each end by a completion queue and by a callback."""

    def end(self, flight: Flight, error: Exception | None) -> None:
        super().end(flight, error)
        self._events.append(WriteEnded(flight.ticket, error))


class EndsLaterAgain(ModelTransport):
    """It keeps the tickets that ended, and reports them once more with the next batch."""

    _last: WriteEnded | None = None

    def end(self, flight: Flight, error: Exception | None) -> None:
        super().end(flight, error)
        if self._last is not None:
            self._events.append(self._last)
        self._last = WriteEnded(flight.ticket, error)


class NeverEnds(ModelTransport):
    """Nothing ends a ticket."""

    def end(self, flight: Flight, error: Exception | None) -> None:
        self._flights.remove(flight)


class ForgetsWithThePeer(ModelTransport):
    """Disconnecting a peer drops its tickets."""

    def disconnect(self, peer: Peer) -> None:
        self._flights = [flight for flight in self._flights if flight.peer != peer]
        super().disconnect(peer)


class EmptyNeverEnds(ModelTransport):
    """A batch without writes has no completion."""

    def progress(self, flight: Flight) -> None:
        if len(flight.nbytes):
            super().progress(flight)


class OneNumberForAll(ModelTransport):
    """Tickets are numbers modulo the depth of a queue."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        super().submit(peer, writes, after=after)
        self._flights[-1].ticket = Ticket(self._flights[-1].ticket % 16)
        return self._flights[-1].ticket


class EventsOfAll(ModelTransport):
    """One completion queue of the library serves all transports of a process."""

    everyone: ClassVar[WeakSet[ModelTransport]] = WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.everyone.add(self)

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        return [event for one in tuple(self.everyone) for event in ModelTransport.poll(one)]


class SubmitRaisesLate(ModelTransport):
    """It finds a lost peer after it has numbered the ticket, and raises."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        ticket = super().submit(peer, writes, after=after)
        if peer in self._lost:
            raise TransportError(f"ticket {ticket}: broken pipe")
        return ticket


class PollRaises(ModelTransport):
    """It polls a file that ``close`` has closed."""

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return super().poll()


class CloseForgets(ModelTransport):
    """``close`` forgets what waits; no event ever ends it."""

    def close(self, drain_s: float) -> Sequence[Ticket]:
        self._flights.clear()
        return super().close(drain_s)


class NoMessage(ModelTransport):
    """Its errors say nothing."""

    def progress(self, flight: Flight) -> None:
        if flight.remote.watch.ended():
            self.end(flight, TransportError(""))
            return
        super().progress(flight)


class ForeignError(ModelTransport):
    """Its errors are the library's own."""

    def end(self, flight: Flight, error: Exception | None) -> None:
        super().end(flight, error and ConnectionError(str(error)))


class NoCause(ModelTransport):
    """Its errors have lost the exception that they come from."""

    def end(self, flight: Flight, error: Exception | None) -> None:
        if error is not None:
            error.__cause__ = None
        super().end(flight, error)


# Bytes


class Late(ModelTransport):
    """What the late ones share; no mutant itself."""

    def copy_later(self, flight: Flight) -> None:
        """On a thread, which keeps the memory of both sides alive."""
        keep = flight.remote, self._table.items()
        threading.Timer(SOON_S, lambda *_: copy(flight.target, flight.source, flight.nbytes), keep).start()


class EndsEarly(Late):
    """It reports the end once the batch is on its way."""

    def move(self, flight: Flight) -> None:
        self.end(flight, None)
        self.copy_later(flight)


class SendsAgain(Late):
    """It repeats a write whose acknowledgement was late."""

    def move(self, flight: Flight) -> None:
        super().move(flight)
        self.copy_later(flight)


class ClosesEarly(Late):
    """``close`` does not wait for the thread that copies."""

    def close(self, drain_s: float) -> Sequence[Ticket]:
        for flight in self._flights:
            self.copy_later(flight)
        return super().close(drain_s)


class Short(ModelTransport):
    """One call of the kernel copies no more than this, and reports no error."""

    def move(self, flight: Flight) -> None:
        flight.nbytes = np.minimum(flight.nbytes, 1 << 20)
        super().move(flight)


class FirstOnes(ModelTransport):
    """One call of the kernel takes no more than 512 descriptors."""

    def move(self, flight: Flight) -> None:
        flight.target, flight.source, flight.nbytes = flight.target[:512], flight.source[:512], flight.nbytes[:512]
        super().move(flight)


class OffsetOfTheAllocation(ModelTransport):
    """Peers count from the beginning of the allocation."""

    def place(self, buffer: Buffer) -> Place | None:
        found = super().place(buffer)
        return found and attrs.evolve(found, offset=0)


class OffsetOfThePage(ModelTransport):
    """It maps whole pages, and forgets where in its page a region begins."""

    def place(self, buffer: Buffer) -> Place | None:
        found = super().place(buffer)
        return found and attrs.evolve(found, offset=found.offset & ~4095)


# Regions and peers


class FirstDescriptorCounts(ModelTransport):
    """It never reads a second descriptor of a peer."""

    def newer(self, known: Remote, found: Descriptor) -> bool:
        return False


class AnyVersion(ModelTransport):
    """It reads descriptors of versions that it does not know."""

    def peer_of(self, descriptor: bytes) -> Peer:
        return self.decode(descriptor).incarnation

    def decode(self, descriptor: bytes) -> Descriptor:
        try:
            return super().decode(descriptor)
        except RemoteProtocolError:
            older = bytearray(descriptor)
            older[19:20] = bytes([VERSION])
            return super().decode(bytes(older))


class AlwaysTheSame(ModelTransport):
    """A peer is its host and port: one that is started again is taken for the one before."""

    def __init__(self) -> None:
        super().__init__()
        self._me = Peer(b"%-16d" % os.getpid())


class LosesItsOwner(ModelTransport):
    """It keeps addresses, and not the objects that keep their memory alive."""

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        return super().register([attrs.evolve(buffer, owner=None) for buffer in buffers])


class RegistersSome(ModelTransport):
    """A refused call leaves some of its buffers registered."""

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        return [super(RegistersSome, self).register([buffer])[0] for buffer in buffers]


class Dirty(ModelTransport):
    """It gives memory out again as it came back."""

    def allocate(self, nbytes: int) -> Buffer:
        buffer = super().allocate(nbytes)
        os.pwrite(buffer.owner.fd, b"old", 0)  # type: ignore[attr-defined]
        return buffer


class TakesAnyForItsOwn(ModelTransport):
    """It calls any memory its own."""

    def allocated(self, buffer: Buffer) -> bool:
        return True


# What stays


class KeepsFiles(ModelTransport):
    """It keeps a descriptor for each connect."""

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        os.open("/dev/null", os.O_RDONLY)
        return super().connect(descriptor, timeout_s)


class KeepsThreads(ModelTransport):
    """Its thread ends with the process."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class KeepsASocket(ModelTransport):
    """``close`` leaves a socket open."""

    def __init__(self) -> None:
        super().__init__()
        socket.socket().detach()


class LeavesFiles(ModelTransport):
    """Its memory is a file with a name, which stays behind."""

    def allocate(self, nbytes: int) -> Buffer:
        tempfile.mkstemp(prefix="model-")
        return super().allocate(nbytes)


# Losses


class LostAtEveryPoll(ModelTransport):
    """It reports a loss for as long as the peer is known."""

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        self._lost.clear()
        return super().poll()


class NeverLost(ModelTransport):
    """It claims to detect a killed peer, and copies into memory that no process has."""

    def lose(self, peer: Peer) -> None:
        """Nothing is reported."""

    def progress(self, flight: Flight) -> None:
        self.move(flight)


class DoneAfterDeath(ModelTransport):
    """It reports the loss, and then that writes to the lost peer are done."""

    def progress(self, flight: Flight) -> None:
        self.move(flight)


class FrozenIsLost(ModelTransport):
    """It takes a peer for lost that does not answer for a moment."""

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        for peer, remote in self._peers.all.items():
            if peer not in self._lost and stopped(remote):
                self._lost.add(peer)
                self.lose(peer)
        return super().poll()
