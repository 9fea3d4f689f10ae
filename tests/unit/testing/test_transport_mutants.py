"""The conformance suite passes a model transport, and notices each plausible mistake in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from disagg_kv.errors import DisaggKVError
from disagg_kv.testing import transport_leaks
from disagg_kv.testing.ends import Child, End, HostMemory
from disagg_kv.testing.pair import Pair
from disagg_kv.testing.transport import TransportSuite
from disagg_kv.testing.transport_cases import NBYTES
from disagg_kv.testing.transport_events import FEW
from disagg_kv.transports import Transport
from tests.support import transport_mutants as bad
from tests.support import transport_mutants_claims as false
from tests.support.model_transport import ModelTransport

LITTLE_S = 1.0
"""How long a mutant may take for what it never does."""


class TestModel(TransportSuite):
    """The model makes no mistake."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        return ModelTransport


ENDS = "each_ticket_ends_exactly_once_and_is_never_used_twice"
EMPTY = "an_empty_batch_ends_well"
ONCE = "a_loss_is_reported_once_and_ends_tickets_without_raising"
LATER = "nothing_is_read_or_written_after_a_ticket_has_ended"
FENCE = "a_killed_peer_writes_nothing_after_its_fence"
PART = "a_region_may_begin_and_end_anywhere_in_an_allocation"
FORKED = "a_forked_child_can_call_nothing_and_changes_nothing"
FAILS = "an_event_that_fails_is_the_cause_of_the_error"
AGAIN = "connecting_and_disconnecting_leaves_nothing_open"
CLOSED = "closed_transports_leave_nothing_open"

HERE: list[tuple[type[ModelTransport], str, str, dict[str, object]]] = [
    (bad.EndsTwice, ENDS, "WriteEnded.* after WriteEnded", {}),
    (bad.EndsLaterAgain, ENDS, "WriteEnded.* after WriteEnded", {}),
    (bad.NeverEnds, EMPTY, "waited 1.0 s for ticket 1 to end", {}),
    (bad.ForgetsWithThePeer, "a_disconnected_peer_is_unknown_until_it_is_connected_again", "ticket 1 to end", {}),
    (bad.EmptyNeverEnds, EMPTY, "ticket 1 to end", {}),
    (bad.OneNumberForAll, ENDS, "tickets are used twice|after WriteEnded", {}),
    (bad.EventsOfAll, "a_transport_reports_its_own_tickets_only", "of another transport's ticket", {}),
    (bad.PollRaises, "poll_never_raises", "Bad file descriptor", {}),
    (bad.CloseForgets, "close_tells_which_tickets_are_not_quiet", "have neither ended", {}),
    (bad.ForeignError, FAILS, "ConnectionError", {}),
    (bad.NoCause, FAILS, "has not the event's exception as its cause", {}),
    (false.UnsaidUnquiet, FAILS, "without caps.late_writes", {}),
    (bad.EndsEarly, "a_whole_region_is_written", "bytes are wrong", {}),
    (bad.SendsAgain, LATER, "bytes are wrong", {}),
    (bad.ClosesEarly, "nothing_is_written_by_tickets_that_close_calls_quiet", "bytes are wrong", {}),
    (bad.Short, "one_large_write_lands_whole", "bytes are wrong", {}),
    (bad.FirstOnes, "a_batch_of_30000_small_writes_lands_whole", "bytes are wrong", {}),
    (bad.OffsetOfTheAllocation, PART, "bytes are wrong", {}),
    (bad.OffsetOfThePage, PART, "bytes are wrong", {}),
    (bad.FirstDescriptorCounts, "connecting_again_gives_the_same_peer_and_its_new_regions", "region", {}),
    (bad.AnyVersion, "a_descriptor_of_another_version_is_refused", "not refused", {}),
    (bad.AlwaysTheSame, "one_source_writes_to_several_peers", "", {}),
    (bad.LosesItsOwner, "registered_memory_lives_although_its_owner_lets_go", "was freed with its owner", {}),
    (bad.RegistersSome, "memory_that_overlaps_within_one_call_is_refused", "overlaps", {}),
    (bad.Dirty, "allocated_memory_is_zero_and_begins_at_a_page", "not zeroed", {}),
    (bad.TakesAnyForItsOwn, "allocated_memory_is_zero_and_begins_at_a_page", "memory from elsewhere", {}),
    (bad.KeepsFiles, AGAIN, "open files and threads", {}),
    (bad.KeepsThreads, CLOSED, "open files and threads", {}),
    (bad.KeepsASocket, CLOSED, "open files and threads", {}),
    (bad.LeavesFiles, "closed_transports_leave_no_files_behind", "left behind by closed transports.*model-", {}),
    (false.PollsByTheTarget, "writes_progress_while_their_target_does_not_poll", "without caps.needs_target", {}),
    (false.BlocksForTheTarget, "submit_does_not_wait_for_a_target_that_does_not_poll", "submit blocks", {}),
    (false.IgnoresEvents, "a_batch_waits_for_its_event_and_others_do_not", "", {"rows": FEW}),
    (false.BlocksForEvents, "neither_submit_nor_poll_waits_for_an_event", "blocks", {"rows": FEW}),
    (false.PollBlocksForEvents, "neither_submit_nor_poll_waits_for_an_event", "blocks", {"rows": FEW}),
    (false.UnclaimedEvents, "an_event_is_refused_where_it_would_not_be_waited_for", "not refused", {}),
    (false.NotOnlyOwnMemory, "memory_from_elsewhere_is_a_target", "region", {}),
    (false.NoMemoryOfItsOwn, "own_memory_only_comes_with_memory_of_its_own", "there is no allocate", {}),
    (
        false.OwnAndOtherMemory,
        "memory_from_elsewhere_is_a_source_and_no_target_where_only_own_memory_is",
        "not refused",
        {},
    ),
    (false.SmallerBatches, "a_batch_of_max_batch_descriptors_is_taken", "do not fit", {}),
    (false.UnlimitedBatches, "a_batch_of_30000_small_writes_lands_whole", "do not fit", {}),
    (false.LargerBatches, "too_many_descriptors_are_refused", "not refused", {}),
    (false.CrossesProcesses, "another_process_is_out_of_reach_where_both_sides_must_be_in_one", "process succeeds", {}),
    (false.FenceOfALivingPeer, "a_closed_peer_writes_nothing_after_its_fence", "bytes are wrong", {}),
    (false.Forks, FORKED, "in a forked child: .*poll", {}),
    (false.PollsInChildren, FORKED, "in a forked child: .*poll", {}),
]
"""Mutants that a test notices in this process: the test, what it says, and its parameters."""

APART: list[tuple[type[ModelTransport], str, str]] = [
    (bad.SubmitRaisesLate, ONCE, "raises instead of ending its ticket"),
    (bad.NoMessage, ONCE, "an error without a message"),
    (bad.LostAtEveryPoll, ONCE, "the loss was reported before"),
    (bad.NeverLost, ONCE, "the loss, as caps.detects_peer_death says"),
    (bad.DoneAfterDeath, ONCE, "a write to a lost peer is reported as done"),
    (bad.FrozenIsLost, "a_peer_that_froze_and_woke_has_every_byte", "a frozen peer was called lost"),
    (
        false.HelperLands,
        "writes_of_a_killed_process_have_landed_after_drain_s",
        "more than drain_s = 0 s after its end",
    ),
    (false.LateFence, FENCE, "bytes are wrong"),
    (false.FenceAfterTickets, FENCE, "bytes are wrong"),
    (false.FenceBeforeItsInbox, FENCE, "bytes are wrong"),
    (false.BlocksForPeer, "nothing_waits_for_a_frozen_peer", "submit blocks"),
    (false.ConnectBlocks, "nothing_waits_for_a_frozen_peer", "connect to a frozen peer.* blocks"),
    (false.OneProcess, "one_source_writes_to_several_peers", "in this process"),
]
"""Mutants that show themselves only to a process of its own."""

NOTICED = AssertionError, DisaggKVError, OSError, pytest.fail.Exception


class Run:
    """One test of the suite on one transport, with what its fixtures would give."""

    def __init__(self, kind: type[ModelTransport], stack: ExitStack, more: dict[str, object]) -> None:
        class Suite(TransportSuite):
            @classmethod
            def factory(cls) -> Callable[[], Transport]:
                return kind

        self._suite, self._kind, self._stack, self._more = Suite(), kind, stack, more

    def child(self) -> Child:
        """A process with a transport of this kind."""
        child = Child(self._kind, HostMemory(), self._suite.timeout_s)
        self._stack.callback(child.stop)
        child.open()
        return child

    def __call__(self, test: str, *, apart: bool) -> None:
        """Make the ends that the test asks for, and call it."""
        call: Callable[..., None] = getattr(self._suite, f"test_{test}")
        wanted = inspect.signature(call).parameters
        given: dict[str, Any] = dict(self._more)
        given["end"] = end = End(self._kind, HostMemory())
        if apart or "child" in wanted:
            given["victim"] = given["child"] = self.child()
        if {"pair", "waiting", "apart"} & set(wanted):
            target = given["child"] if apart else End(self._kind, HostMemory())
            given["pair"] = given["waiting"] = given["apart"] = Pair(end, target, NBYTES, LITTLE_S)
        call(**{name: given[name] for name in wanted})


def noticed(run: Run, test: str, says: str, apart: bool) -> None:
    """The test fails, and says why."""
    with pytest.raises(NOTICED, match=f"(?s){says}"):
        run(test, apart=apart)


@pytest.mark.parametrize(("kind", "test", "says", "more"), HERE, ids=[one[0].__name__ for one in HERE])
def test_a_mistake_is_noticed(
    kind: type[ModelTransport], test: str, says: str, more: dict[str, object],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By a test that says what is wrong."""
    monkeypatch.setattr(transport_leaks, "SETTLED_S", 0.2)
    with ExitStack() as stack:
        noticed(Run(kind, stack, {**more, "tmp_path": tmp_path, "monkeypatch": monkeypatch}), test, says, apart=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "test", "says"), APART, ids=[one[0].__name__ for one in APART])
def test_a_mistake_that_needs_two_processes_is_noticed(kind: type[ModelTransport], test: str, says: str) -> None:
    """By a test that kills or freezes one of them."""
    with ExitStack() as stack:
        noticed(Run(kind, stack, {}), test, says, apart=True)


def test_every_mutant_is_run() -> None:
    """None is made and forgotten."""
    classes = [one for module in (bad, false) for _, one in inspect.getmembers(module, inspect.isclass)]
    made = {one for one in classes if issubclass(one, ModelTransport)}
    run = {one[0] for one in HERE} | {one[0] for one in APART}
    assert made - {ModelTransport, bad.Late} == run
