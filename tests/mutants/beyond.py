"""Bugs that no simulated world shows, or hardly one of thousands: a test finds each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from disagg_kv.core.wire.frames import WireTable
from disagg_kv.transports import ShmTransport
from tests.unit.core import test_elected as elected
from tests.unit.core import test_page_runs as runs
from tests.unit.endpoints import test_both_ways as both_ways
from tests.unit.endpoints import test_device_copies as device_copies
from tests.unit.endpoints import test_driver as driver
from tests.unit.endpoints import test_edges as edges
from tests.unit.endpoints import test_flags as flags
from tests.unit.endpoints import test_last_words as last_words
from tests.unit.endpoints import test_page_copies as page_copies
from tests.unit.endpoints import test_path_choice as choice
from tests.unit.endpoints import test_unsaid as unsaid
from tests.unit.engines.sglang import test_options as sglang_options
from tests.unit.engines.sglang import test_rooms as sglang_rooms

from .bugs import CHOICE, FLAGS, FLOW, LOOP, MAPPED, ROOM, TABLES
from .planting import Mutant

DRIVER = "endpoints.loop.driver:Driver."
ELECTED = "core.verdict.elected:Elected."


def _refused(table: WireTable, why: str) -> Callable[[], object]:
    return partial(runs.test_a_page_table_that_cannot_be_is_the_peers_error, (table,), why)


SOON_S = 8.0


def _stops_polling() -> None:
    with TemporaryDirectory() as folder:
        driver.stops_polling("unix", Path(folder), range(60), SOON_S)


def _polls_alone() -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as changes:
        driver.polls_alone("unix", Path(folder), changes, SOON_S)


BEYOND: Sequence[tuple[Mutant, Callable[[], object]]] = (
    (Mutant("ids of rooms are remembered by the process, not by each endpoint",
            "endpoints.loop.endpoint:UsedIds.__init__", "self._used: OrderedDict[RoomId, None] = OrderedDict()",
            "self._used = self.__class__.__dict__.get('all', OrderedDict())\n    self.__class__.all = self._used"),
     both_ways.test_both_directions_of_one_room_id_are_two_rooms),
    (Mutant("a peer that only receives is taken for a sender",
            "endpoints.peers.handshake:EndpointInfo._admit_sibling", "if hello.instance != self.instance:",
            "if False:"), both_ways.test_a_peer_that_only_receives_is_refused_by_name_at_the_handshake),
    (Mutant("a call wakes no thread for what it leaves",
            DRIVER + "_plan", "loop.channel.wake()", "pass"), _stops_polling),
    (Mutant("a command is left lying",
            DRIVER + "post", "self.drive(PATIENCE_S)", "pass"), _stops_polling),
    (Mutant("the thread stays away although no engine drives",
            DRIVER + "_serve", "left = self._engine_until - loop.clock()",
            "left = max(0.001, self._engine_until - loop.clock())"), _stops_polling),
    (Mutant("the turn is held across a wait",
            DRIVER + "advance", "self._advance(budget_s, engine=engine)",
            "self._advance(budget_s, engine=engine)\n            engine or self.loop.wait(self._rest)"), _polls_alone),
    (Mutant("a request exposes more pages than one frame names",
            TABLES + "excess", "sum(map(size_of, tables))) > MAX_TABLE", "sum(map(size_of, tables))) > 2 * MAX_TABLE"),
     partial(runs.test_as_many_pages_as_one_frame_names_may_be_exposed, [range(0, 2 * runs.FULL + 2, 2)], "one frame")),
    (Mutant("more aux data are taken than one frame carries",
            "endpoints.loop.construction:check_aux", "if nbytes > MAX_AUX:", "if nbytes > 2 * MAX_AUX:"),
     edges.test_a_pool_of_longer_aux_rows_is_refused),
    (Mutant("runs that name fewer pages than announced are taken",
            TABLES + "_unfolded", "int(lengths.sum()) != table.count", "int(lengths.sum()) > table.count"),
     _refused(runs.runs((0, 9), count=10), "runs of 9 pages, of which none may be empty, for 10")),
    (Mutant("page tables with fewer bytes than announced are taken",
            TABLES + "check_tables", "if len(table.pages) != (size", "if len(table.pages) > (size"),
     _refused(WireTable("all", 0, 2, 0, bytes(4)), "'all': 4 bytes of 8")),
    (Mutant("a page that comes again is taken for a run",
            TABLES + "_runs_of", "np.where(again, -lengths, lengths)", "lengths"),
     partial(runs.test_page_tables_come_back_as_they_went_in_the_shorter_form, (9, 9, 9, 9, 4, 5, 6), 2, 16)),
    (Mutant("the last run may overlap the first",
            TABLES + "_unfolded", "np.maximum.accumulate(ends_there)[:-1]", "ends_there[:-1]"),
     runs.test_a_run_may_not_lie_in_one_that_is_not_its_neighbour),
    (Mutant("an interrupt of a launch counts as an error of it",
            MAPPED + "_launch", "except Exception as exc:", "except BaseException as exc:"),
     partial(device_copies.interrupted_launch, "end")),
    (Mutant("what an interrupted launch reads and writes is unmapped",
            MAPPED + "_launch", "except Exception as exc:\n        error = exc",
            "except Exception as exc:\n        error = exc\n    except BaseException:\n"
            "        del _RUNNING[one]\n        raise"),
     partial(device_copies.interrupted_launch, "end")),
    (Mutant("rows that are compared raise flags",
            ROOM + "arm_flag", " or route.verifies(self.key.room, one)", ""),
     partial(flags.test_rows_that_are_compared_raise_no_flags, "prefill")),
    (Mutant("blocks of flags of a process without a link are never used again",
            FLAGS + "FlagPage.forget", "self._free += session.flag_blocks", "pass"),
     flags.test_blocks_of_a_process_whose_link_was_dropped_are_for_others),
    (Mutant("pages are exposed of an engine that waits for no peer",
            "engines.sglang.options:SGLangOptions.names", "chosen.path == AUTO and not exposes", "False"),
     partial(sglang_options.no_pages_are_exposed, "auto")),
    (Mutant("pages of a failed request are used again while a peer may write to them",
            "engines.sglang.side:Side.free", "room is None or not room.exposed", "True"),
     sglang_rooms.test_a_failed_room_keeps_its_pages_until_nothing_writes_to_them),
    (Mutant("pages are exposed although a rank has not said that it mapped them",
            "endpoints.decode.path_choice:PendingExpectations._choose", "UNSAID if", "\"\" if"),
     partial(choice.test_auto_copies_into_mapped_pages_once_prefill_has_said_that_it_mapped_them, choice.SPEC)),
    (Mutant("what a lost rank has said is kept", "endpoints.peers.session:PeerSession.depart",
            "self.remote = self.unmapped = None", "self.remote = None"),
     choice.test_what_a_lost_rank_has_said_is_forgotten),
    (Mutant("a rank that sends nothing has a say",
            CHOICE + "choose", "if rank_plan.parts[rank]", "if True"),
     partial(choice.test_a_rank_that_sends_nothing_here_has_no_say, choice.SPEC)),
    (Mutant("an endpoint closes without a word", LOOP + "stop", "self.peers.epochs()", "()"),
     partial(last_words.closes_everywhere, "decode", "mapped", ShmTransport)),
    (Mutant("that prefill has closed is no evidence", LOOP + "_on_closed", "self._gone(session)", "pass"),
     partial(last_words.closes_everywhere, "prefill", "mapped", ShmTransport)),
    (Mutant("a copy that is in flight when its endpoint closes counts as ended",
            LOOP + "stop", "not self.sessions.holding", "True"),
     last_words.test_a_copy_in_flight_is_no_end),
    (Mutant("an endpoint that broke says that it has closed",
            LOOP + "stop", "self.failures.broken is None and ", ""),
     last_words.test_what_an_interrupt_left_open_is_no_end),
    (Mutant("a decode rank that has all rows is needed until its flags' copies have ended",
            FLOW + "_on_lost", "if self._placed is not None:", "if False:"),
     partial(unsaid.ends_early, "flags", unsaid.close)),
    (Mutant("a copy that failed is never asked again",
            MAPPED + "look_at_failed", "if not one.over():", "if True:"),
     partial(page_copies.test_an_event_that_raises_fails_the_room_and_frees_nothing, True)),
    (Mutant("another use of an id gets the outcome of the first",
            ELECTED + "_refusal", "elif room is not None and rank in room.uses:",
            "elif room is not None and room.decided is not None:\n        return room.decided\n"
            "    elif room is not None and rank in room.uses:"),
     elected.test_what_is_remembered_is_bounded_and_late_votes_on_forgotten_rooms_begin_nothing),
    (Mutant("another use of an id takes the place of the first",
            ELECTED + "_refusal", "elif room is not None and rank in room.uses:",
            "elif room is not None and rank in room.uses:\n        room.uses[rank] = use\n        return None\n"
            "    elif False:"),
     elected.test_an_id_that_another_life_of_a_rank_has_used_is_used),
    (Mutant("a forgotten room begins again with a late vote",
            ELECTED + "_forget", "for use in room.uses.values():", "for use in ():"),
     elected.test_a_forgotten_id_that_is_used_again_is_another_room),
)  # fmt: skip
"""Each with the test that finds it, which needs no fixture."""
