"""The part of the transport suite about bells, where the transport has ``SupportsBells``."""

from __future__ import annotations

from array import array

import pytest

from ..errors import DisaggKVError, PeerLostError, RemoteProtocolError, TransportError
from ..ids import Peer
from ..transports import Bells, SupportsBells
from ..transports.bells import AUX_BYTES, FINAL_SLOTS, SLOT_WORDS, WORD, Final, heard, heard_final
from .ends import Child, End
from .pair import Pair, wait
from .transport_cases import TransportCases

SLOTS = 256
NBYTES = SLOTS * SLOT_WORDS * WORD


class BellCases(TransportCases):
    """Words that both sides see: what is stored there, who may open them, how long they last."""

    @staticmethod
    def ringing(pair: Pair) -> SupportsBells:
        """The source's transport; skips where it has no bells."""
        transport = pair.source.transport
        if not isinstance(transport, SupportsBells):
            pytest.skip("has no bells")
        return transport

    def opened(self, pair: Pair) -> Bells:
        """A new board of the target, which is all zero."""
        ringing = self.ringing(pair)
        board = pair.target.board(NBYTES)
        assert pair.target.words() == [0] * SLOTS * SLOT_WORDS
        return ringing.open_bells(pair.peer, board)

    def test_a_bell_is_heard_with_its_record(self, pair: Pair) -> None:
        """In its slot, the first and the last one too, and in no other."""
        bells = self.opened(pair)
        for slot, value in ((0, 1), (7, (1 << 62) - 1), (SLOTS - 1, 3)):
            bells.ring(slot, value, (slot, 1 << 40, 2, 3, 0))
            words = pair.target.words()
            assert heard(words, slot, value) == (slot, 1 << 40, 2, 3, 0)
            assert heard(words, slot, value - 1) is None
        rung = {at // SLOT_WORDS for at, word in enumerate(words) if word}
        assert rung == {0, 7, SLOTS - 1}

    def test_a_later_value_takes_the_slot_and_an_earlier_one_does_not(self, pair: Pair) -> None:
        """Nor does it change the record of the later one."""
        bells = self.opened(pair)
        for value in (5, 9, 4, 9):
            bells.ring(3, value, (0, value, 0, 1, 0))
        assert heard(pair.target.words(), 3, 9) == (0, 9, 0, 1, 0)

    def test_a_final_record_is_heard_with_its_aux_data(self, pair: Pair) -> None:
        """In the last slots that it fits, too. Earlier values change nothing of a later one."""
        bells = self.opened(pair)
        finals: list[Final] = [(1 << 40, None), (0, b""), (9, b"\x01"), (9, bytes(range(256)) * (AUX_BYTES // 256))]
        for value, final in enumerate(finals, 1):
            for slot in (0, SLOTS - FINAL_SLOTS):
                assert heard_final(_view(pair.target.words()), slot, value) is None
                bells.ring_final(slot, value, final)
                bells.ring_final(slot, value - 1, (3, b"earlier"))
                assert heard_final(_view(pair.target.words()), slot, value) == final
        before = pair.target.words()
        for slot, aux in ((-1, b""), (SLOTS - FINAL_SLOTS + 1, b""), (0, bytes(AUX_BYTES + 1))):
            with pytest.raises(TransportError):
                bells.ring_final(slot, 9, (1, aux))
        assert pair.target.words() == before

    def test_a_device_rings_by_the_word_alone(self, pair: Pair) -> None:
        """The record is there before, and is no bell. Rung again by the process, it is the same bell."""
        bells, device, record = self.opened(pair), pair.source.buffer(pair.local).device, (0, 4, 1, 2, 0)
        for slot, value in ((0, 5), (SLOTS - 1, 6)):
            bell = bells.arm(slot, value, record, device)
            assert bell is not None, f"kernels of {device} ring no bells"
            assert heard(pair.target.words(), slot, value) is None
            self.memory().ring(bell)
            assert heard(pair.target.words(), slot, value) == record
            bells.ring(slot, value, record)
            assert heard(pair.target.words(), slot, value) == record
        assert bells.arm(0, 4, record, device) is None, "the slot has a later bell"
        assert bells.arm(0, 7, record, "another device") is None
        assert heard(pair.target.words(), 0, 5) == record

    def test_a_board_opened_anew_keeps_what_was_stored(self, pair: Pair) -> None:
        """As after a connection that was lost: earlier values do not take the slot back."""
        ringing, board = self.ringing(pair), pair.target.board(NBYTES)
        ringing.open_bells(pair.peer, board).ring(3, 9, (0, 9, 0, 1, 0))
        ringing.open_bells(pair.peer, board).ring(3, 8, (0, 1, 0, 1, 0))
        assert heard(pair.target.words(), 3, 9) == (0, 9, 0, 1, 0)

    def test_a_slot_outside_the_board_is_refused(self, pair: Pair) -> None:
        """Before anything is stored."""
        bells = self.opened(pair)
        for slot in (-1, SLOTS, 1 << 40):
            with pytest.raises(TransportError):
                bells.ring(slot, 1, (0, 1, 0, 1, 0))
            with pytest.raises(TransportError):
                bells.arm(slot, 1, (0, 1, 0, 1, 0), pair.source.buffer(pair.local).device)
        assert not any(pair.target.words())

    def test_a_board_that_cannot_be_is_refused(self, pair: Pair) -> None:
        """What is no board's place, and a peer that is not known."""
        ringing = self.ringing(pair)
        board = pair.target.board(NBYTES)
        for junk in (b"", b"\xff", board[:-1], b"\x81\xa1x\x01"):
            with pytest.raises(RemoteProtocolError):
                ringing.open_bells(pair.peer, junk)
        with pytest.raises(DisaggKVError):
            ringing.open_bells(Peer(b"\0" * 16), board)

    def test_bells_outlive_their_board_s_owner(self, apart: Pair, victim: Child) -> None:
        """Who rings does not learn of its end by a crash; a new one opens nothing."""
        ringing, bells = self.ringing(apart), self.opened(apart)
        board = victim.board(NBYTES)
        victim.kill()
        victim.wait()
        log = apart.log
        wait(lambda: log.lost(apart.peer), lambda: log.add(apart.source.events()), self.timeout_s, "the loss")
        bells.ring(0, 1, (0, 1, 0, 1, 0))
        with pytest.raises(PeerLostError):
            ringing.open_bells(apart.peer, board)

    def test_a_closed_peer_s_board_is_not_opened_anew(self, pair: Pair) -> None:
        """In one process: it is lost, or its memory is still there."""
        if not isinstance(pair.target, End):
            pytest.skip("once is enough")
        ringing = self.ringing(pair)
        board = pair.target.board(NBYTES)
        pair.target.close(0.0)
        try:
            ringing.open_bells(pair.peer, board).ring(0, 1, (0, 1, 0, 1, 0))
        except (PeerLostError, TransportError):
            return
        assert heard(pair.target.words(), 0, 1) == (0, 1, 0, 1, 0)


def _view(words: list[int]) -> memoryview:
    return memoryview(array("Q", words))
