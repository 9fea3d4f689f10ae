"""A batch on its way through Mooncake: cut into calls, made one by one, by a worker thread where they may block."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from attrs import Factory, define, frozen

from ..errors import PeerLostError, TransportError
from ..geometry import I64
from ..ids import Peer, Ticket
from ..planning import Writes, coalesce
from .base import Settled, WriteEnded
from .mooncake_library import U64, Engine, reach
from .process import Process, Watch
from .regions import Extents

MOST = 1000
"""Descriptors of one call; the library's tcp fails from 2,049 on, having written some of them."""

PIECE = 1 << 28
"""Bytes of one call, and of one descriptor: peers take turns between calls, and a call's own deadline stays near."""

ANSWER_S = 2.0
"""How long an engine that may be gone is given to show that it is not."""


@frozen
class Address:
    """Where an engine is to be found.

    Args:
        session: what the library calls it.
        host, port: where it listens for handshakes.
        protocol: that it was made with.
        process: that it lives in.
    """

    session: str
    host: str
    port: int
    protocol: str
    process: Process


ADDRESS = msgspec.msgpack.Decoder(Address)


@define(eq=False)
class Remote:
    """A connected peer.

    Args:
        peer: its incarnation.
        address: where it is.
        serial: of the newest descriptor.
        extents: of its regions.
        watch: reports the end of its process; None: the peer is on another host.
        gone: a worker found that no process listens at its address any more.
        suspect: a write failed, and none has succeeded since.
        lost: ``gone`` or the end of its process was seen and reported.
        turn: between GPUs, which of its two workers has the next batch.
        exited_at: when the end of its process was seen.
    """

    peer: Peer
    address: Address
    serial: int
    extents: Extents
    watch: Watch | None
    gone: bool = False
    suspect: bool = False
    lost: bool = False
    turn: int = 0
    exited_at: float | None = None

    def __str__(self) -> str:
        return f"mooncake peer {self.peer.hex()[:8]} at {self.address.host}:{self.address.port}"

    def error(self) -> Exception | None:
        """Why a write to it would fail, as far as it takes :data:`ANSWER_S` to find out."""
        if self.gone or self.lost:
            return PeerLostError(f"{self} is gone: no process listens there")
        try:
            reach(self.address.host, self.address.port, ANSWER_S)
        except ConnectionRefusedError as error:
            self.gone = True
            lost = PeerLostError(f"{self} is gone: no process listens there")
            lost.__cause__ = error
            return lost
        except TransportError as error:
            return error
        return None


@define
class Shared:
    """What a transport and its flights have in common.

    Args:
        engine: None once the transport is closed; then nothing is posted any more.
        timeout_s: after which the library gives a call up.
        results: flights that have ended, with the result; or that are quiet after an earlier end.
        gate: held while a worker reads ``engine`` in order to post, and while the transport removes it.
        greeting: peers that threads meet; until they are through, the library may hold what the begin of a write takes.
    """

    engine: Engine | None
    timeout_s: float
    results: deque[tuple[Flight, WriteEnded | Settled]] = Factory(deque)
    gate: threading.Lock = Factory(threading.Lock)
    greeting: set[Peer] = Factory(set)


@frozen
class Call:
    """One call of the library.

    Args:
        device: index of the GPU of the sources; None: CPU memory.
        source, target: addresses; nbytes: lengths.
    """

    device: int | None
    source: U64
    target: U64
    nbytes: U64

    def post(self, engine: Engine, session: str) -> int:
        """Make it; see :meth:`Engine.write`."""
        return engine.write(session, self.source, self.target, self.nbytes)

    def __str__(self) -> str:
        return f"{len(self.nbytes)} writes of {int(self.nbytes.sum())} bytes"


@frozen
class One:
    """A call for one range, in plain numbers: making arrays of them takes longer than the post. See :class:`Call`."""

    device: int | None
    source: int
    target: int
    nbytes: int

    def post(self, engine: Engine, session: str) -> int:
        """Make it; see :meth:`Engine.write`."""
        return engine.write_one(session, self.source, self.target, self.nbytes)

    def __str__(self) -> str:
        return f"1 writes of {self.nbytes} bytes"


@define(eq=False)
class Flight:
    """One ticket.

    Args:
        ticket: its.
        remote: where to.
        calls: what is left to do.
        shared: with the transport.
        posting: a call is in the library, or has failed there.
        keep: what that call may read; set when the transport forgets it.
    """

    ticket: Ticket
    remote: Remote
    calls: deque[Call | One]
    shared: Shared
    posting: bool = False
    keep: object = None

    def step(self) -> bool:
        """Make the next call; a ``Step`` of :class:`WorkerPool`, so it must not raise, whatever a library does."""
        try:
            return self._step()
        except Exception as error:
            failed = TransportError(f"{self.remote}: ticket {self.ticket}: {error}")
            failed.__cause__ = error
            return self._end(failed, quiesced=not self.posting)

    def _step(self) -> bool:
        if self.remote.lost or self.remote.gone or self.remote.suspect:
            error = self.remote.error()
            if error is not None:
                return self._end(error)
        call = self.calls.popleft()
        if call.device is not None:
            torch.cuda.set_device(call.device)
        with self.shared.gate:
            engine = self.shared.engine
            if engine is None:
                return False
            self.posting = True
        began = time.monotonic()
        code = call.post(engine, self.remote.address.session)
        if code:
            return self.failed(call, code, time.monotonic() - began)
        self.posting = False
        self.remote.suspect = False
        return True if self.calls else self._end(None)

    def failed(self, call: Call | One, code: int, elapsed_s: float) -> bool:
        """End, since the library has given a call up; a ``Step`` of :class:`WorkerPool`."""
        return self._end(self._failed(call, code, elapsed_s), quiesced=False)

    def _end(self, error: Exception | None, *, quiesced: bool = True) -> bool:
        self.shared.results.append((self, WriteEnded(self.ticket, error, quiesced)))
        return False

    def _failed(self, call: Call | One, code: int, elapsed_s: float) -> Exception:
        """The library gives no reason; time and the peer's listener do."""
        self.remote.suspect = True
        what = f"{self.remote}: {call} failed after {elapsed_s:.3f} s (code {code})"
        if elapsed_s >= self.shared.timeout_s:
            return TransportError(f"{what}: no end within {self.shared.timeout_s:g} s", retryable=True)
        error = self.remote.error()
        if isinstance(error, PeerLostError):
            lost = PeerLostError(f"{what}: no process listens there any more")
            lost.__cause__ = error.__cause__
            return lost
        reason = "it does not answer" if error is not None else "refused; the region may be gone there"
        failed = TransportError(f"{what}: {reason}", retryable=error is not None)
        failed.__cause__ = error
        return failed


def cut(writes: Writes, local: Extents, remote: Extents, devices: Sequence[tuple[int, str]]) -> deque[Call | One]:
    """The calls that a batch takes, with as few descriptors as possible.

    Args:
        writes: what to write.
        local: where the regions of this side are.
        remote: where those of the peer are.
        devices: of each local region, where some may not be CPU memory.

    Raises:
        RegistrationError: a range outside its region.
    """
    gpus = {region: int(device.partition(":")[2] or 0) for region, device in devices if device != "cpu"}
    if len(writes) == 1 and 0 < (nbytes := int(writes.nbytes[0])) <= PIECE:
        # What the staged path posts: there is nothing to do, and the rest of this function takes longer than the post.
        region = int(writes.local[0])
        here = local.address(region, int(writes.local_off[0]), nbytes)
        there = remote.address(int(writes.remote[0]), int(writes.remote_off[0]), nbytes)
        if here is not None and there is not None:
            return deque([One(gpus.get(region), here, there, nbytes)])
    # All are looked up before anything is left out.
    local.addresses(writes.local, writes.local_off, writes.nbytes)
    remote.addresses(writes.remote, writes.remote_off, writes.nbytes)
    some = writes.nbytes > 0
    if not some.all():
        writes = _at(writes, np.flatnonzero(some))
    writes = coalesce(writes)
    if len(writes) and int(writes.nbytes.max()) > PIECE:
        writes = _pieces(writes)
    source = local.addresses(writes.local, writes.local_off, writes.nbytes)
    target = remote.addresses(writes.remote, writes.remote_off, writes.nbytes)
    calls: deque[Call | One] = deque()
    begin, sums = 0, np.cumsum(writes.nbytes)
    while begin < len(writes):
        before = int(sums[begin - 1]) if begin else 0
        end = min(begin + MOST, max(int(np.searchsorted(sums, before + PIECE, side="right")), begin + 1))
        gpu = None
        if gpus:
            # The source's device is the one that copies.
            gpu = gpus.get(int(writes.local[begin]))
            others = [gpus.get(region) != gpu for region in writes.local[begin:end].tolist()]
            end = begin + others.index(True) if True in others else end
        part = slice(begin, end)
        calls.append(Call(gpu, _u64(source[part]), _u64(target[part]), _u64(writes.nbytes[part])))
        begin = end
    return calls


def _u64(numbers: I64) -> U64:
    return numbers.astype(np.uint64)


def _at(writes: Writes, index: np.typing.NDArray[np.intp]) -> Writes:
    return Writes(
        writes.local[index],
        writes.local_off[index],
        writes.remote[index],
        writes.remote_off[index],
        writes.nbytes[index],
    )


def _pieces(writes: Writes) -> Writes:
    """The same bytes with no descriptor above :data:`PIECE`."""
    number = -(-writes.nbytes // PIECE)
    index = np.repeat(np.arange(len(writes)), number)
    skip = PIECE * (np.arange(len(index)) - np.repeat(np.cumsum(number) - number, number))
    whole = _at(writes, index)
    return Writes(
        whole.local,
        whole.local_off + skip,
        whole.remote,
        whole.remote_off + skip,
        np.minimum(whole.nbytes - skip, PIECE),
    )
