"""The part of the transport suite about mapped memory, where the transport has ``SupportsMapping``."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ..errors import DisaggKVError, PeerLostError, RegistrationError, TransportError
from ..ids import Peer, RegionId
from ..memory import U8, Buffer
from ..transports import SupportsMapping
from .ends import Child, End
from .pair import POISON, Pair, noise, same, wait
from .transport_cases import NBYTES, TransportCases

UNKNOWN = Peer(b"\0" * 16)


def cut(buffer: Buffer, at: int, nbytes: int) -> Buffer:
    """A part of a buffer."""
    return Buffer(buffer.addr + at, nbytes, buffer.device, buffer.owner)


class MappingCases(TransportCases):
    """A peer's memory as local memory: what is stored there, who may have it, how long it lasts."""

    @staticmethod
    def mapping(pair: Pair) -> SupportsMapping:
        """The source's transport; skips where it maps nothing."""
        transport = pair.source.transport
        if not isinstance(transport, SupportsMapping):
            pytest.skip("maps nothing")
        return transport

    def mapped(self, pair: Pair) -> Buffer:
        """The target's first region, mapped for kernels on the device of the source's memory."""
        return self.mapping(pair).map(pair.peer, pair.remote, pair.source.buffer(pair.local).device)

    def store(self, pair: Pair, buffer: Buffer, at: int, nbytes: int) -> None:
        """Store some of the pair's data through a mapping, and note that the peer must see it."""
        self.memory().write(cut(buffer, at, nbytes), pair.data[at : at + nbytes])
        pair.want[at : at + nbytes] = pair.data[at : at + nbytes]

    def test_bytes_that_are_stored_through_a_mapping_are_in_the_peers_region(self, pair: Pair) -> None:
        """From its first to its last byte, at any alignment, and nowhere else."""
        device = pair.source.buffer(pair.local).device
        assert self.mapping(pair).unmappable(pair.peer, [pair.remote], device) is None
        buffer = self.mapped(pair)
        assert (buffer.nbytes, buffer.device) == (NBYTES, device)
        for at, nbytes in ((5, 1), (4095, 4097), (0, 3), (NBYTES - 1, 1)):
            self.store(pair, buffer, at, nbytes)
            pair.check()
        self.store(pair, buffer, 0, NBYTES)
        pair.check()

    def test_a_mapping_shows_the_bytes_of_the_peer(self, pair: Pair) -> None:
        """Those that were there, and those that come later."""
        buffer = self.mapped(pair)
        same(self.memory().read(buffer), pair.want)
        pair.target.fill(pair.remote, noise(NBYTES, 4))
        same(self.memory().read(buffer), noise(NBYTES, 4))

    def test_two_regions_have_mappings_of_their_own(self, pair: Pair) -> None:
        """Of one peer; a region that was registered later is mapped with its descriptor."""
        first, more = self.mapped(pair), pair.target.add(np.full(100, POISON, np.uint8))
        device = first.device
        assert self.mapping(pair).unmappable(pair.peer, [pair.remote, more], device) is not None
        with pytest.raises(RegistrationError):
            self.mapping(pair).map(pair.peer, more, device)
        assert pair.connect() == pair.peer
        assert self.mapping(pair).unmappable(pair.peer, [pair.remote, more], device) is None
        second = self.mapping(pair).map(pair.peer, more, device)
        assert second.nbytes == 100
        self.memory().write(second, noise(100, 3))
        self.store(pair, first, 0, 1000)
        same(pair.target.read(more), noise(100, 3))
        pair.check()

    def test_a_region_that_is_mapped_again_is_at_the_same_place(self, pair: Pair) -> None:
        """Also after the peer was connected again."""
        buffer = self.mapped(pair)
        assert self.mapped(pair) == buffer
        assert pair.connect() == pair.peer
        assert self.mapped(pair) == buffer

    def test_unknown_regions_and_peers_cannot_be_mapped(self, pair: Pair) -> None:
        """The reason says so before, and the error afterwards."""
        mapping, device = self.mapping(pair), pair.source.buffer(pair.local).device
        unknown = RegionId(pair.remote + 1000)
        assert str(unknown) in (mapping.unmappable(pair.peer, [unknown], device) or "")
        assert mapping.unmappable(pair.peer, [pair.remote, unknown], device) is not None
        assert UNKNOWN.hex() in (mapping.unmappable(UNKNOWN, [pair.remote], device) or "")
        with pytest.raises(RegistrationError, match=str(unknown)):
            mapping.map(pair.peer, unknown, device)
        with pytest.raises(TransportError):
            mapping.map(UNKNOWN, pair.remote, device)

    def test_memory_is_not_mapped_for_kernels_that_cannot_write_to_it(self, pair: Pair) -> None:
        """The reason names the device."""
        mapping = self.mapping(pair)
        assert "abacus:0" in (mapping.unmappable(pair.peer, [pair.remote], "abacus:0") or "")
        with pytest.raises(RegistrationError, match="abacus:0"):
            mapping.map(pair.peer, pair.remote, "abacus:0")

    def test_a_mapping_outlives_disconnect(self, pair: Pair) -> None:
        """A kernel may still write; the peer cannot be mapped until it is connected again."""
        buffer = self.mapped(pair)
        pair.source.transport.disconnect(pair.peer)
        pair.work()
        with pytest.raises(TransportError):
            self.mapped(pair)
        self.store(pair, buffer, 0, 1000)
        assert pair.connect() == pair.peer
        self.store(pair, self.mapped(pair), 2000, 1000)
        pair.check()

    def test_a_mapping_outlives_close(self, pair: Pair) -> None:
        """The transport's own end; it maps nothing more."""
        buffer = self.mapped(pair)
        pair.source.close(self.timeout_s)
        self.store(pair, buffer, 0, 1000)
        pair.check()
        with pytest.raises(DisaggKVError):
            self.mapped(pair)

    def test_a_mapping_outlives_its_owner(self, pair: Pair) -> None:
        """A peer that closes its transport takes nothing back."""
        buffer = self.mapped(pair)
        self.store(pair, buffer, 0, 1000)
        pair.check()
        pair.target.close(0.0)
        self.store(pair, buffer, 2000, 1000)
        pair.check()

    def test_a_mapping_outlives_the_process_of_its_owner(self, apart: Pair, victim: Child) -> None:
        """Killed while this process stores; stores go on, and what was stored can be read."""
        buffer, stop, rounds, device = self.mapped(apart), threading.Event(), [0], self.memory()

        def store() -> None:
            while not stop.is_set():
                device.write(buffer, noise(NBYTES, rounds[0] % 7))
                rounds[0] += 1

        thread = threading.Thread(target=store)
        thread.start()
        try:
            wait(lambda: rounds[0] > 3, apart.work, self.timeout_s, "the first stores")
            victim.kill()
            victim.wait()
            before = rounds[0]
            wait(lambda: rounds[0] > before + 3, lambda: None, self.timeout_s, "stores after the peer's end")
        finally:
            stop.set()
            thread.join()
        last: U8 = noise(NBYTES, 99)
        device.write(buffer, last)
        same(device.read(buffer), last)

    def test_a_peer_that_has_ended_is_not_mapped_anew(self, apart: Pair, victim: Child) -> None:
        """It is lost; what comes back in its place is another peer, with mappings of its own."""
        mapping, device = self.mapping(apart), apart.source.buffer(apart.local).device
        old = self.mapped(apart)
        self._lose(apart, victim)
        with pytest.raises(PeerLostError):
            self.mapped(apart)
        fresh = Child(self.factory(), self.memory(), self.timeout_s)
        fresh.open()
        region = fresh.add(np.full(NBYTES, POISON, np.uint8))
        peer = apart.source.connect(fresh.descriptor(), self.timeout_s)
        self.memory().write(old, noise(NBYTES, 5))
        self.memory().write(mapping.map(peer, region, device), noise(NBYTES, 6))
        same(fresh.read(region), noise(NBYTES, 6))
        fresh.stop()

    def test_a_closed_peer_is_not_mapped_anew(self, pair: Pair) -> None:
        """In one process: it is lost, or its memory is still there."""
        if not isinstance(pair.target, End):
            pytest.skip("once is enough")
        self.mapping(pair)
        pair.target.close(0.0)
        try:
            buffer = self.mapped(pair)
        except (PeerLostError, TransportError, RegistrationError):
            return
        self.store(pair, buffer, 0, 100)
        pair.check()
