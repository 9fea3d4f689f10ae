"""The part of the transport suite about completion flags, where the transport has ``SupportsFlags``."""

from __future__ import annotations

import pytest

from ..errors import DisaggKVError, PeerLostError, RemoteProtocolError, TransportError
from ..ids import Peer
from ..transports import Flags, SupportsFlags
from ..transports.flags import SLOT_WORDS, WORD, Record, raised
from .ends import Child, End
from .pair import Pair
from .transport_cases import TransportCases

SLOTS = 256
NBYTES = SLOTS * SLOT_WORDS * WORD


class FlagCases(TransportCases):
    """Words that both sides see: what is stored there, who may open them, how long they last."""

    @staticmethod
    def raising(pair: Pair) -> SupportsFlags:
        """The source's transport; skips where it has no flags."""
        transport = pair.source.transport
        if not isinstance(transport, SupportsFlags):
            pytest.skip("has no flags")
        return transport

    def opened(self, pair: Pair) -> Flags:
        """A new page of the target, which is all zero."""
        raising = self.raising(pair)
        page = pair.target.flag_page(NBYTES)
        assert pair.target.words() == [0] * SLOTS * SLOT_WORDS
        return raising.open_flags(pair.peer, page)

    def raise_one(self, pair: Pair, flags: Flags, slot: int, value: int, record: Record) -> bool:
        """Raise a flag as kernels of the source's memory do; False: the slot has a later one."""
        device = pair.source.buffer(pair.local).device
        flag = flags.arm(slot, value, record, device)
        if flag is not None:
            assert raised(pair.target.words(), slot, value) is None, "the record is no flag"
            self.memory().raise_flag(flag)
        return flag is not None

    def test_a_flag_is_raised_with_its_record(self, pair: Pair) -> None:
        """In its slot, the first and the last one too, and in no other."""
        flags = self.opened(pair)
        for slot, value in ((0, 1), (7, (1 << 62) - 1), (SLOTS - 1, 3)):
            assert self.raise_one(pair, flags, slot, value, (slot, 1 << 40, 2, 3, 0))
            words = pair.target.words()
            assert raised(words, slot, value) == (slot, 1 << 40, 2, 3, 0)
            assert raised(words, slot, value - 1) is None
        assert {at // SLOT_WORDS for at, word in enumerate(words) if word} == {0, 7, SLOTS - 1}
        assert flags.arm(0, 7, (0, 4, 1, 2, 0), "another device") is None

    def test_a_later_value_takes_the_slot_and_an_earlier_one_does_not(self, pair: Pair) -> None:
        """Nor does it change the record of the later one."""
        flags = self.opened(pair)
        for value, taken in ((5, True), (9, True), (4, False)):
            assert self.raise_one(pair, flags, 3, value, (0, value, 0, 1, 0)) is taken
        assert raised(pair.target.words(), 3, 9) == (0, 9, 0, 1, 0)

    def test_a_flag_that_is_raised_twice_is_the_same_flag(self, pair: Pair) -> None:
        """With its record."""
        flags, device = self.opened(pair), pair.source.buffer(pair.local).device
        flag = flags.arm(2, 5, (0, 4, 1, 2, 1), device)
        assert flag is not None, f"kernels of {device} raise no flags"
        for _ in range(2):
            self.memory().raise_flag(flag)
            assert raised(pair.target.words(), 2, 5) == (0, 4, 1, 2, 1)

    def test_a_page_opened_anew_keeps_what_was_stored(self, pair: Pair) -> None:
        """As after a connection that was lost: earlier values do not take the slot back."""
        raising, page = self.raising(pair), pair.target.flag_page(NBYTES)
        assert self.raise_one(pair, raising.open_flags(pair.peer, page), 3, 9, (0, 9, 0, 1, 0))
        assert not self.raise_one(pair, raising.open_flags(pair.peer, page), 3, 8, (0, 1, 0, 1, 0))
        assert raised(pair.target.words(), 3, 9) == (0, 9, 0, 1, 0)

    def test_a_slot_outside_the_page_is_refused(self, pair: Pair) -> None:
        """Before anything is stored."""
        flags = self.opened(pair)
        for slot in (-1, SLOTS, 1 << 40):
            with pytest.raises(TransportError):
                flags.arm(slot, 1, (0, 1, 0, 1, 0), pair.source.buffer(pair.local).device)
        assert not any(pair.target.words())

    def test_a_page_that_cannot_be_is_refused(self, pair: Pair) -> None:
        """What is no page's place, and a peer that is not known."""
        raising = self.raising(pair)
        page = pair.target.flag_page(NBYTES)
        for junk in (b"", b"\xff", page[:-1], b"\x81\xa1x\x01"):
            with pytest.raises(RemoteProtocolError):
                raising.open_flags(pair.peer, junk)
        with pytest.raises(DisaggKVError):
            raising.open_flags(Peer(b"\0" * 16), page)

    def test_flags_outlive_their_page_s_owner(self, apart: Pair, victim: Child) -> None:
        """Who raises one does not learn of the owner's end by a crash; a new page is not opened."""
        raising, flags = self.raising(apart), self.opened(apart)
        page = victim.flag_page(NBYTES)
        device = apart.source.buffer(apart.local).device
        self._lose(apart, victim)
        flag = flags.arm(0, 1, (0, 1, 0, 1, 0), device)
        assert flag is not None
        self.memory().raise_flag(flag)
        with pytest.raises(PeerLostError):
            raising.open_flags(apart.peer, page)

    def test_a_closed_peer_s_page_is_not_opened_anew(self, pair: Pair) -> None:
        """In one process: it is lost, or its memory is still there."""
        if not isinstance(pair.target, End):
            pytest.skip("once is enough")
        raising = self.raising(pair)
        page = pair.target.flag_page(NBYTES)
        pair.target.close(0.0)
        try:
            flags = raising.open_flags(pair.peer, page)
        except (PeerLostError, TransportError):
            return
        assert self.raise_one(pair, flags, 0, 1, (0, 1, 0, 1, 0))
        assert raised(pair.target.words(), 0, 1) == (0, 1, 0, 1, 0)
