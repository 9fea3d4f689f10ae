"""The part of the transport suite about memory and peers: registering, connecting, leaving."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import pytest

from ..errors import (
    ConfigurationError,
    DisaggKVError,
    PeerLostError,
    RegistrationError,
    RemoteProtocolError,
    TransportError,
)
from ..ids import Peer
from ..memory import Buffer
from ..transports import SupportsAllocate
from .ends import End, plain
from .pair import POISON, Pair, batch, noise, refused, same
from .transport_cases import NBYTES, TransportCases


class MemoryCases(TransportCases):
    """Regions."""

    @pytest.mark.parametrize(("first", "nbytes"), [(0, 4096), (1, 100), (-100, 101), (4095, 2), (-100, 5000)])
    def test_memory_that_overlaps_a_region_is_refused(self, end: End, first: int, nbytes: int) -> None:
        """It is refused alone and together with good memory, of which then nothing is registered."""
        whole = self.memory().allocate(end.transport, 3 * 4096)
        middle = Buffer(whole.addr + 4096, 4096, whole.device, whole.owner)
        bad = Buffer(whole.addr + 4096 + first, nbytes, whole.device, whole.owner)
        good = self.memory().allocate(end.transport, 4096)
        end.transport.register([middle])
        for batch_of in ([bad], [good, bad]):
            with refused(ConfigurationError, "memory that overlaps a region"):
                end.transport.register(batch_of)
        end.transport.register([good])

    def test_memory_that_overlaps_within_one_call_is_refused(self, end: End) -> None:
        """And can be registered on its own afterwards."""
        whole = self.memory().allocate(end.transport, 8192)
        half = Buffer(whole.addr + 4096, 4096, whole.device, whole.owner)
        with refused(ConfigurationError, "memory that overlaps within one call"):
            end.transport.register([whole, half])
        assert len(end.transport.register([half])) == 1, "not one id for one buffer"

    def test_neighbours_are_no_overlap(self, end: End) -> None:
        """One byte after the other, in any order."""
        whole = self.memory().allocate(end.transport, 3 * 4096)
        parts = [Buffer(whole.addr + 4096 * i, 4096, whole.device, whole.owner) for i in (2, 0, 1)]
        assert len(set(end.transport.register(parts))) == 3, "not three ids for three buffers"

    def test_memory_of_another_kind_is_refused(self, end: End) -> None:
        """The kind stands before the colon of the device."""
        with refused(RegistrationError, "memory of another kind"):
            end.transport.register([Buffer(1 << 20, 4096, "abacus:0")])

    def test_memory_that_cannot_be_read_is_refused(self, end: End) -> None:
        """Address 4096 is mapped in no process."""
        if "cpu" not in end.transport.caps.devices:
            pytest.skip("not for CPU memory")
        with refused(RegistrationError, "memory that cannot be read"):
            end.transport.register([Buffer(4096, 4096)])

    def test_registered_memory_lives_although_its_owner_lets_go(self, end: End) -> None:
        """Peers may write to it."""
        region = end.add(noise(4096))
        owner = weakref.ref(end.release(region))
        gc.collect()
        assert owner() is not None, "the memory of a registered region was freed with its owner"

    def test_allocated_memory_is_zero_and_begins_at_a_page(self, end: End) -> None:
        """With SupportsAllocate."""
        if not isinstance(end.transport, SupportsAllocate):
            pytest.skip("does not allocate")
        for nbytes in (1, 4096, 100_000):
            buffer = end.transport.allocate(nbytes)
            at_page = buffer.nbytes == nbytes and buffer.addr % mmap.PAGESIZE == 0
            assert at_page, f"{buffer}: not {nbytes} bytes from the beginning of a page"
            assert not self.memory().read(buffer).any(), "not zeroed"
            assert end.transport.allocated(buffer), "allocated denies what allocate gave"
            last = Buffer(buffer.addr + nbytes - 1, 1, buffer.device, buffer.owner)
            assert end.transport.allocated(last), "a part of allocated memory is allocated, too"
        assert not end.transport.allocated(plain(noise(100))), "memory from elsewhere"

    def test_memory_from_elsewhere_is_a_source_and_no_target_where_only_own_memory_is(self, pair: Pair) -> None:
        """With ``caps.own_memory_only``."""
        if not pair.caps.own_memory_only:
            pytest.skip("any memory is a target")
        (foreign,) = pair.source.transport.register([plain(noise(NBYTES, 7))])
        pair.succeed(pair.source.submit(pair.peer, batch(foreign, pair.remote, [(0, 0, NBYTES)])))
        same(pair.target.read(pair.remote), noise(NBYTES, 7))
        back = pair.target.connect(pair.source.descriptor(), self.timeout_s)
        with refused(RegistrationError, "a write to memory from elsewhere, with caps.own_memory_only"):
            pair.target.submit(back, batch(pair.remote, foreign, [(0, 0, 1)]))


class PeerCases(TransportCases):
    """Descriptors, incarnations and ends."""

    def test_a_garbage_descriptor_is_refused(self, pair: Pair) -> None:
        """So is each truncated one."""
        good = pair.target.descriptor()
        cut = [good[:n] for n in range(0, len(good), max(1, len(good) // 40))]
        for bad in (*cut, b"\0" * 100, b"{}", noise(300).tobytes(), b"x" + good):
            with refused(RemoteProtocolError, f"connect with a damaged descriptor of {len(bad)} bytes"):
                pair.source.connect(bad, self.timeout_s)
        pair.put((0, 0, 100))
        pair.check()

    def test_a_descriptor_says_whose_it_is_before_anything_is_connected(self, pair: Pair) -> None:
        """The peer that connecting gives, also where that has more regions now; garbage names none."""
        transport = pair.source.transport
        assert transport.peer_of(pair.target.descriptor()) == pair.peer, "peer_of and connect name different peers"
        assert transport.peer_of(pair.source.descriptor()) != pair.peer, "two transports have one name"
        pair.target.add(np.full(100, POISON, np.uint8))
        assert transport.peer_of(pair.target.descriptor()) == pair.peer, "the name changes with the regions"
        transport.disconnect(pair.peer)
        names = {transport.peer_of(pair.target.descriptor()), pair.connect(), pair.peer}
        assert len(names) == 1, f"a peer that is connected again has another name: {names}"
        for bad in (b"", pair.target.descriptor()[:-3], noise(300).tobytes()):
            with refused(RemoteProtocolError, f"peer_of of a damaged descriptor of {len(bad)} bytes"):
                transport.peer_of(bad)

    def test_a_damaged_descriptor_gives_no_foreign_error(self, pair: Pair) -> None:
        """Whatever byte is wrong, the answer is one of the library's errors, or a peer."""
        good = pair.target.descriptor()
        for at in range(0, len(good), max(1, len(good) // 60)):
            try:
                pair.source.connect(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :], 1.0)
            except DisaggKVError:
                continue

    def test_connecting_again_gives_the_same_peer_and_its_new_regions(self, pair: Pair) -> None:
        """An older descriptor that comes late takes nothing away."""
        older = pair.target.descriptor()
        more = pair.target.add(np.full(100, POISON, np.uint8))
        assert pair.connect() == pair.peer, "a newer descriptor names another peer"
        assert pair.source.connect(older, self.timeout_s) == pair.peer, "an older descriptor names another peer"
        pair.succeed(pair.source.submit(pair.peer, batch(pair.local, more, [(0, 0, 100)])))
        same(pair.target.read(more), pair.data[:100])
        pair.put((0, 0, 100))
        pair.check()

    def test_regions_are_unknown_before_their_descriptor_was_seen(self, pair: Pair) -> None:
        """Nothing is guessed."""
        more = pair.target.add(np.full(100, POISON, np.uint8))
        with refused(RegistrationError, "a write to a region whose descriptor was not seen"):
            pair.source.submit(pair.peer, batch(pair.local, more, [(0, 0, 100)]))

    def test_both_ends_write_to_each_other(self, pair: Pair) -> None:
        """Connecting in one direction does not hinder the other."""
        back = pair.target.connect(pair.source.descriptor(), self.timeout_s)
        mine = pair.source.add(np.full(NBYTES, POISON, np.uint8))
        again = pair.target.connect(pair.source.descriptor(), self.timeout_s)
        assert again == back, "a newer descriptor names another peer"
        pair.put((0, 0, 1000))
        ticket = pair.target.submit(back, batch(pair.remote, mine, [(0, 5, 1000)]))
        pair.until(lambda: ticket in pair.there.ended, "the target's own ticket to end")
        assert pair.there.ended[ticket].error is None, f"{pair.there.ended[ticket]}"
        same(pair.source.read(mine)[5:1005], pair.data[:1000])
        assert not (pair.source.read(mine)[1005:] != POISON).any(), "bytes behind the written ones have changed"
        pair.check()

    def test_one_source_writes_to_several_peers(self, pair: Pair) -> None:
        """Peers are distinct, also where their regions have the same number."""
        if not self.one_process:
            pytest.skip("needs two targets in one process")
        other = End(self.factory(), self.memory())
        pair.others.append(other)
        region = other.add(np.full(NBYTES, POISON, np.uint8))
        peer = pair.source.connect(other.descriptor(), self.timeout_s)
        assert peer != pair.peer, "two transports have one name"
        pair.put((0, 0, 1000))
        ticket = pair.source.submit(peer, batch(pair.local, region, [(2000, 1, 1000)]))
        pair.succeed(ticket)
        same(other.read(region)[1:1001], pair.data[2000:3000])
        pair.check()
        other.close(0.0)

    def test_a_closed_and_restarted_peer_is_another_peer(self, pair: Pair) -> None:
        """What is written to the new one is not in the old one's memory."""
        if not self.one_process or not isinstance(pair.target, End):
            pytest.skip("once is enough")
        pair.target.close(0.0)
        fresh = End(self.factory(), self.memory())
        pair.others.append(fresh)
        region = fresh.add(np.full(NBYTES, POISON, np.uint8))
        peer = pair.source.connect(fresh.descriptor(), self.timeout_s)
        assert peer != pair.peer, "two transports have one name"
        ticket = pair.source.submit(peer, batch(pair.local, region, [(0, 0, 100)]))
        pair.succeed(ticket)
        same(fresh.read(region)[:100], pair.data[:100])
        pair.check()
        fresh.close(0.0)

    def test_a_closed_peer_is_no_peer(self, pair: Pair) -> None:
        """Its descriptor is refused as lost or unreachable, or its loss is reported later; nothing hangs."""
        descriptor = pair.target.descriptor()
        pair.target.close(0.0)
        late = End(self.factory(), self.memory())
        try:
            late.connect(descriptor, 1.0)
        except (PeerLostError, TransportError):
            pass
        finally:
            late.close(0.0)

    def test_a_disconnected_peer_is_unknown_until_it_is_connected_again(self, pair: Pair) -> None:
        """A ticket posted before still ends; unknown peers are ignored."""
        ticket = pair.submit((0, 0, 1000))
        pair.source.transport.disconnect(pair.peer)
        pair.source.transport.disconnect(pair.peer)
        pair.source.transport.disconnect(Peer(b"\0" * 16))
        pair.end(ticket)
        with refused(TransportError, "a write to a disconnected peer"):
            pair.submit((0, 0, 1))
        assert pair.connect() == pair.peer, "a peer that is connected again has another name"
        pair.put((0, 0, 2000))
        pair.check()

    def test_close_tells_which_tickets_are_not_quiet(self, pair: Pair) -> None:
        """The others have ended, and their data is there; a second close does nothing."""
        tickets = [pair.submit((100 * i, 100 * i, 100)) for i in range(20)]
        left = pair.source.close(self.timeout_s)
        assert set(left) <= set(tickets), f"close returns {left}, which are not among the tickets {tickets}"
        pair.listen()
        lost = set(tickets) - set(left) - set(pair.log.ended)
        assert not lost, f"tickets {sorted(lost)} have neither ended, nor does close name them as not quiet"
        for i, ticket in enumerate(tickets):
            if ticket not in left and pair.log.ended[ticket].error is None:
                pair.want[100 * i : 100 * i + 100] = pair.data[100 * i : 100 * i + 100]
        if not left:
            pair.check()
        assert list(pair.source.close(self.timeout_s)) == [], "a second close does something"

    def test_poll_never_raises(self, pair: Pair) -> None:
        """Not when nothing happened, not after a disconnect, not after close."""
        assert list(pair.source.transport.poll()) == [], "an event of nothing"
        pair.source.transport.disconnect(pair.peer)
        pair.source.transport.poll()
        pair.source.close(0.0)
        assert list(pair.source.transport.poll()) == [], "an event of nothing"

    def test_a_closed_transport_refuses_work(self, pair: Pair) -> None:
        """With one of the library's errors."""
        pair.source.close(0.0)
        with refused(DisaggKVError, "a write on a closed transport"):
            pair.submit((0, 0, 1))
        pair.check()
