"""A chunk costs the same however many there are, on both sides; and no work postpones a heartbeat for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg_kv.core import Codec, Options, PeerEffect, SendTo
from disagg_kv.core.wire.frames import Heartbeat
from disagg_kv.endpoints.loop.timing import BUDGET_S
from disagg_kv.endpoints.loop.timing import MOST as PIECES
from disagg_kv.endpoints.prefill.room import ReadyEvents
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.planning import Segment
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.transports import InprocTransport
from tests.support.calls import lines
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import FiredEvent

FEW, MANY = 250, 1000
MOST = 4.2
"""Times as much for four times as many chunks: linear, with something for logarithms."""


class Room:
    """A room of many chunks of one page each, on one rank of either side."""

    def __init__(self, chunks: int, path: str, layers: int = 1) -> None:
        self.rig = Rig(CacheSpec.kv(layers, 1, 1, "float16"), options=Options())
        memory = Memory(page_size=1, pages=2 * chunks + 4)
        self.prefills = self.rig.prefill(tp_shards(self.rig.spec, 1), memory=memory, strategy=path)
        self.decodes = self.rig.decode(tp_shards(self.rig.spec, 1), memory=memory, strategy=path)
        self.rig.request("first", self.prefills, self.decodes, 1).start().landed()
        self.chunks = chunks
        self.request = self.rig.request("long", self.prefills, self.decodes, chunks)
        self.request.open_decode().expect(chunks).open_prefill()
        self.tables = self.request.pages(0, chunks)
        for _ in range(20):
            self.turn()

    def turn(self) -> None:
        """Every endpoint makes a turn; nothing is checked, as that looks at everything."""
        for member in self.rig.members:
            member.endpoint.driver.step(0.0)
        self.rig.clock.advance(0.001)

    def send(self) -> None:
        """All chunks, one call each."""
        (handle,), (table,) = self.request.sends, self.tables
        for start in range(self.chunks):
            handle.send_chunk(start + 1, [PageTable(table.group, table.pages[start : start + 1], start)])

    def steps(self) -> None:
        """All chunks, a forward pass each."""
        (member,), (table,) = self.prefills, self.tables
        passes = []
        for start in range(self.chunks):
            page = [PageTable(table.group, table.pages[start : start + 1], start)]
            passes.append(member.endpoint.step({self.request.room: (start + 1, page)}))
            if len(passes) > 3:
                passes.pop(0).close()
        for one in passes:
            one.close()

    def again(self) -> None:
        """All chunks, all of them taken away, and all of them again."""
        self.send()
        for _ in range(self.chunks // 64 + 2):
            self.turn()
        fired = self.request.sends[0].withdraw()
        while not fired.query():
            self.turn()
        self.send()

    def finish(self) -> None:
        """Until both sides have ended."""
        self.request.finish()
        while not all(handle.released for handle in self.request.handles):
            self.turn()


def cost(chunks: int, path: str, layers: int, how: Callable[[Room], None]) -> int:
    """Lines of the library that run for a room of so many chunks."""
    room = Room(chunks, path, layers)

    def act() -> None:
        how(room)
        room.finish()

    count = lines(act)
    room.request.done()
    room.rig.check()
    return count


@pytest.mark.parametrize(
    ("path", "layers", "how"),
    [
        ("staged", 1, Room.send),
        ("direct", 1, Room.send),
        ("staged", 4, Room.steps),
        ("staged+layer_pipelined", 2, Room.steps),
        ("staged", 1, Room.again),
    ],
)
def test_a_chunk_costs_the_same_however_many_there_are(path: str, layers: int, how: Callable[[Room], None]) -> None:
    few, many = (cost(chunks, path, layers, how) for chunks in (FEW, MANY))
    assert many < MOST * few, (few, many, many / few)


def test_a_segment_is_compared_with_the_events_of_its_own_rows_alone() -> None:
    """However many chunks a GPU has not computed yet."""

    def cost(chunks: int) -> int:
        gates, events = ReadyEvents(), [FiredEvent() for _ in range(chunks)]
        for number, event in enumerate(events):
            gates.add(64 * number, 64 * number + 64, None, event)

        def act() -> None:
            for number in range(64):
                start = 64 * (chunks - 1 - number)
                assert gates.before(Segment(start, start + 64, 0, 1)) is events[chunks - 1 - number]

        return lines(act)

    few, many = cost(100), cost(3200)
    assert many < 1.5 * few, (few, many)


def test_transfers_that_wait_for_a_slot_cost_nothing_while_no_write_ends() -> None:
    """On a transport whose writes end later: neither looked at in a turn, nor searched for those of one segment."""

    def quiet(rooms: int) -> int:
        rig = Rig(CacheSpec.kv(1, 1, 2, "float16"), options=Options(total_s=1000.0, silence_s=900.0))
        memory = Memory(
            page_size=1,
            pages=8 * rooms,
            transport=lambda: FaultyTransport(InprocTransport(), lambda number: Fault.HUNG),
        )
        prefills = rig.prefill(tp_shards(rig.spec, 1), memory=memory, strategy="staged", slots=4)
        decodes = rig.decode(tp_shards(rig.spec, 1), memory=Memory(page_size=1, pages=8 * rooms), strategy="staged")
        for number in range(rooms):
            rig.request(f"{number}", prefills, decodes, 4).start()
        member = prefills[0]
        for _ in range(60):
            rig.turn()
        assert sum(map(len, member.endpoint.inspect().transfers.staged.lines.of.values())) == rooms - 1

        def act() -> None:
            for _ in range(50):
                member.endpoint.driver.loop.side.work()

        return lines(act)

    few, many = quiet(8), quiet(80)
    assert many <= 1.1 * few, (few, many)


class Beats:
    """What an endpoint did between two looks at who is due a heartbeat."""

    def __init__(self, rig: Rig) -> None:
        self.node = rig.prefills[0].endpoint.driver.loop
        self.done = 0
        self.most = 0
        self.beats = 0
        self._since = 0
        self._tick = self.node.peers.tick
        self.node.peers.tick = self._look  # type: ignore[method-assign]

    def _look(self, now: float) -> list[PeerEffect]:
        self.most = max(self.most, self.done - self._since)
        self._since = self.done
        sent = self._tick(now)
        self.beats += bool([one for one in sent if isinstance(one, SendTo)])
        return sent

    def work(self) -> None:
        """A piece of work."""
        self.done += 1


def connected() -> Rig:
    """Two endpoints that know each other."""
    rig = Rig(CacheSpec.kv(1, 1, 2, "float16"))
    prefills, decodes = rig.prefill(tp_shards(rig.spec, 1)), rig.decode(tp_shards(rig.spec, 1))
    rig.request("first", prefills, decodes, 1).start().landed()
    return rig


def test_many_commands_of_an_engine_do_not_postpone_a_heartbeat() -> None:
    """Each takes 30 us by the endpoint's clock."""
    rig = connected()
    beats = Beats(rig)

    def work() -> None:
        beats.work()
        rig.clock.advance(3e-5)

    for _ in range(20 * PIECES):
        beats.node.post(work)
    rig.until(lambda: beats.done == 20 * PIECES, "all commands", 40)
    assert 0 < beats.most <= PIECES


def test_commands_that_take_long_are_not_begun_when_a_heartbeat_may_be_due() -> None:
    """Each takes two seconds by the endpoint's clock: a peer in use is told between any two that we are still there."""
    rig = connected()
    rig.request("second", rig.prefills, rig.decodes, 1).open_decode().expect().open_prefill()
    for _ in range(10):
        rig.turn()
    beats = Beats(rig)

    def slow() -> None:
        beats.work()
        rig.clock.advance(2.0)

    for _ in range(5):
        beats.node.post(slow)
    for _ in range(5):
        beats.node.advance(BUDGET_S)
    assert (beats.done, beats.most) == (5, 1)
    assert beats.beats >= 4


def test_many_frames_do_not_postpone_a_heartbeat() -> None:
    """Each takes 30 us by the endpoint's clock."""
    rig = connected()
    beats = Beats(rig)
    node, decode = beats.node, rig.decodes[0].endpoint.driver.loop
    handle = node._on_channel

    def counted(event: object) -> None:
        beats.work()
        rig.clock.advance(3e-5)
        handle(event)  # type: ignore[arg-type]

    node._on_channel = counted  # type: ignore[method-assign]
    frame = Codec().encode(Heartbeat(src=decode.me.epoch, dst=node.me.epoch))
    for _ in range(20 * PIECES):
        rig.decodes[0].channel.send(rig.prefills[0].channel.address, frame)
    rig.until(lambda: beats.done >= 20 * PIECES, "all frames", 40)
    # What ends a nap is heard before the turn's own look at the channel.
    assert 0 < beats.most <= 2 * PIECES
