"""Recurrent states and sliding windows between endpoints: what is asked for, sent, waited for and taken back."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from disagg_kv.core import Phase, RoomFrame
from disagg_kv.core.wire.frames import ChunkReady, StagingRequest
from disagg_kv.endpoints import Expectation
from disagg_kv.errors import GeometryError, LocalProtocolError, OversizeError
from disagg_kv.geometry import CacheSpec, Component, PageTable, shard
from disagg_kv.ids import LayerId, Rank
from disagg_kv.planning import Limits, RankPlan, Segment
from disagg_kv.strategies import LayerPipelined
from disagg_kv.transports import InprocTransport, ShmTransport, Transport
from tests.support.rig import KV, STATE, Memory, Rig, put_states, tp_shards
from tests.support.rig_parts import FiredEvent, Listening

ATTENTION = (Component("k", "int8", 4, 8), Component("v", "float16", 4, 8))
CONV = tuple(Component(f"conv.{block}", "int8", 4, 6, tokens_per_row=0, rows=3) for block in "qkv")
NET = (*CONV, Component("delta", "float32", 4, 64, tokens_per_row=0, rows=2))
SLIDING = tuple(evolve(c, window=6) for c in ATTENTION)
HYBRID = CacheSpec({LayerId(0): NET, LayerId(1): ATTENTION, LayerId(2): NET, LayerId(3): SLIDING})
STATE_BYTES = 2 * 4 * (3 * 3 * 6 + 2 * 64)
"""Of a room, in all layers and heads."""


@pytest.mark.parametrize("transport", [InprocTransport, ShmTransport])
@pytest.mark.parametrize("path", ["staged", "slice", "direct", "mapped", "auto"])
@pytest.mark.parametrize(
    ("prefill", "decode"), [((2, 1), (1, 1)), ((1, 2), (2, 1)), ((4, 1), (2, 2)), ((1, 1), (1, 1))]
)
def test_a_hybrid_room_crosses_by_every_path_between_any_splits(
    prefill: tuple[int, int], decode: tuple[int, int], path: str, transport: type[Transport]
) -> None:
    """In chunks, sliced by TP, from stage to stage; the rows before the window stay as they were."""
    if path == "direct" and prefill != decode:
        return
    rig = Rig(HYBRID)
    memory = Memory(transport=transport)
    prefills = rig.prefill(tp_shards(HYBRID, *prefill), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(HYBRID, *decode), memory=memory, strategy=path)
    request = rig.request("room", prefills, decodes, 21).open_decode().expect(21).open_prefill()
    request.send(9).send(21, 9).finish().landed()
    rig.quiet()
    rig.close()
    tokens = 21 * 4 * (8 + 8) + 6 * 4 * (8 + 8)
    assert sum(h.report.nbytes for h in request.receives) == STATE_BYTES + tokens


@pytest.mark.parametrize("prefill", [(2, 1), (1, 2)])
@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_a_hybrid_room_crosses_in_layer_groups_and_every_segment_is_compared(
    path: str, prefill: tuple[int, int]
) -> None:
    """Attention as its layers become final, states with the last group; sums agree whatever TP cuts."""
    rig = Rig(HYBRID)
    strategy = f"{path}+layer_pipelined"
    prefills = rig.prefill(tp_shards(HYBRID, *prefill), strategy=strategy, verify="full")
    decodes = rig.decode(tp_shards(HYBRID, 1), strategy=strategy, verify="full")
    request = rig.request("room", prefills, decodes, 16).open_decode().expect(16).open_prefill()
    rig.turn()
    for start, stop in ((0, 7), (7, 16)):
        tables = request.pages(start, stop)
        steps = [
            m.endpoint.step({request.room: (stop, m.pages(table))}) for m, table in zip(prefills, tables, strict=True)
        ]
        for layer in range(4):
            for member, step in zip(prefills, steps, strict=True):
                if layer in member.pool.site.shard.layers():
                    step.layer_ready(LayerId(layer))
            rig.turn()
        for step in steps:
            step.close()
    request.finish().landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_a_full_hit_sends_states_the_window_s_tail_and_nothing_else(path: str) -> None:
    """States and windows are always fresh."""
    rig = Rig(HYBRID)
    strategy = f"{path}+incremental"
    prefills = rig.prefill(tp_shards(HYBRID, 2), strategy=strategy)
    decodes = rig.decode(tp_shards(HYBRID, 1), strategy=strategy)
    request = rig.request("room", prefills, decodes, 20).open_decode().expect(20, held=20, aux=0).open_prefill()
    request.send(20).finish(aux=1).landed()
    assert request.receives[0].report.nbytes == STATE_BYTES + 6 * 4 * (8 + 8)
    rig.quiet()


def test_a_room_without_rows_still_sends_its_states() -> None:
    """Stop 0."""
    rig = Rig(HYBRID)
    prefills, decodes = rig.prefill(tp_shards(HYBRID, 1)), rig.decode(tp_shards(HYBRID, 2))
    request = rig.request("room", prefills, decodes, 0).start(0).landed()
    assert sum(h.report.nbytes for h in request.receives) == STATE_BYTES
    rig.quiet()


def test_where_nobody_knows_the_end_all_rows_of_a_window_are_sent() -> None:
    """A window is a lower bound on rows, which the end of the room decides."""
    rig = Rig(HYBRID)
    prefills, decodes = rig.prefill(tp_shards(HYBRID, 2)), rig.decode(tp_shards(HYBRID, 1))
    request = rig.request("room", prefills, decodes, 21).start(None).landed()
    assert request.receives[0].report.nbytes == STATE_BYTES + 2 * 21 * 4 * (8 + 8)


def test_two_decode_ranks_of_one_shard_that_know_different_ends_get_their_own_windows() -> None:
    """What is gathered once for several destinations must be what each of them needs."""
    rig = Rig(HYBRID)
    shards = tp_shards(HYBRID, 1) * 2
    prefills, decodes = rig.prefill(tp_shards(HYBRID, 1)), rig.decode(shards)
    request = rig.request("room", prefills, decodes, 12).open_decode()
    request.taken = [m.take(12) for m in decodes]
    request.slots = [m.state() for m in decodes]
    for stop, handle, table, state in zip((12, None), request.receives, request.taken, request.slots, strict=True):
        handle.expect(Expectation(stop, [table], state=state))
    request.open_prefill().send(12).finish().released()
    assert request.all(Phase.DONE), request.errors()
    full = 12 * 4 * (8 + 8)
    assert [h.report.nbytes - STATE_BYTES for h in request.receives] == [full + full // 2, 2 * full]


def test_a_window_s_table_may_begin_where_the_window_does() -> None:
    """Engines free the pages that slid out; a table that begins too late is refused with the rows."""
    spec = CacheSpec.uniform(2, SLIDING)
    rig = Rig(spec)
    prefills, decodes = rig.prefill(tp_shards(spec, 1)), rig.decode(tp_shards(spec, 1))
    request = rig.request("room", prefills, decodes, 22).open_decode().open_prefill()
    (handle,) = request.receives
    table = decodes[0].take(6, 16)
    with pytest.raises(GeometryError, match="rows from 16 on, but the table begins at 20"):
        handle.expect(Expectation(22, [PageTable(KV, table.pages[1:], 20)]))
    assert handle.expect(Expectation(22, [table])) == {KV: 0}
    request.taken = [table]
    request.send(22).finish().landed()
    assert handle.report.nbytes == 2 * 6 * 4 * (8 + 8)


def test_slots_are_checked_before_anything_happens() -> None:
    """One slot of each group of states, on both sides; neither for tokens nor tokens' pages for states."""
    rig = Rig(HYBRID)
    prefills, decodes = rig.prefill(tp_shards(HYBRID, 1)), rig.decode(tp_shards(HYBRID, 1))
    request = rig.request("room", prefills, decodes, 0).open_decode().open_prefill()
    (send,), (receive,) = request.sends, request.receives
    table, slot = decodes[0].take(0), PageTable(STATE, [3])
    wrong: list[tuple[Any, str]] = [
        ([], r"slots of groups \[\]; of states there are \['state'\]"),
        ([slot, slot], "slots of groups"),
        ([PageTable(KV, [3])], "slots of groups"),
        ([PageTable(STATE, [1, 2])], "group 'state': one slot from row 0 on, not 2 pages"),
        ([PageTable(STATE, [3], 3)], "one slot from row 0 on"),
        ([PageTable(STATE, [8])], "group 'state': page 8 of 8"),
    ]
    for state, message in wrong:
        with pytest.raises(GeometryError, match=message):
            receive.expect(Expectation(0, [table], state=state))
        with pytest.raises(GeometryError, match=message):
            send.finish(0, state=state)
    with pytest.raises(GeometryError, match="group 'state' has slots of states, not pages of tokens"):
        receive.expect(Expectation(0, [table, slot], state=[slot]))
    assert receive.expect(Expectation(0, [table], state=[slot])) == {KV: 0}
    put_states(prefills[0].pool, slot, request.truth)
    put_states(prefills[0].want, slot, request.truth)
    send.finish(0, state=[slot])
    with pytest.raises(LocalProtocolError, match="which is the second"):
        send.finish(0, state=[slot])
    request.taken, request.slots = [table], [[slot]]
    request.landed(0)


def test_states_are_read_at_their_event_and_from_the_slot_given_last() -> None:
    """Preemption between ``finish`` and its event: the old slot is never read, and the room is finished again."""
    rig = Rig(HYBRID)
    prefills, decodes = rig.prefill(tp_shards(HYBRID, 1)), rig.decode(tp_shards(HYBRID, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill().send(8)
    (send,), (member,) = request.sends, prefills
    event = FiredEvent()
    old, new = member.state(), member.state()
    send.finish(8, state=old, ready=event)
    rig.wait(1.0)
    assert request.receives[0].phase is Phase.MOVING
    fired = send.withdraw()
    rig.until(fired.query, "the end of all reads")
    event.fired = True
    rig.wait(1.0)
    request.send(8)
    for pool in (member.pool, member.want):
        put_states(pool, new[0], request.truth)
    send.finish(8, state=new)
    request.landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_states_that_were_withdrawn_after_finish_are_given_again(path: str) -> None:
    """A frozen decode rank cannot take them before; what it has by then is not sent twice."""
    rig = Rig(HYBRID)
    prefills = rig.prefill(tp_shards(HYBRID, 2), strategy=path)
    decodes = rig.decode(tp_shards(HYBRID, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 8).open_prefill().send(8).finish()
    fired = [handle.withdraw() for handle in request.sends]
    rig.until(lambda: all(e.query() for e in fired), "the end of all reads")
    request.open_decode().expect(8)
    rig.wait(1.0)
    assert request.receives[0].phase is Phase.MOVING
    request.send(8).finish().landed()
    rig.quiet()


def test_rows_after_the_end_are_refused_also_when_a_room_is_to_be_finished_again() -> None:
    """The caller hears of it, and no other room does."""
    rig = Rig(HYBRID)
    prefills, decodes = rig.prefill(tp_shards(HYBRID, 1)), rig.decode(tp_shards(HYBRID, 1))
    other = rig.request("other", prefills, decodes, 8).open_prefill().send(8)
    request = rig.request("room", prefills, decodes, 8).open_prefill().send(8).finish()
    request.sends[0].withdraw()
    with pytest.raises(LocalProtocolError, match="rows up to 12 after finish at 8"):
        request.sends[0].send_chunk(12, [prefills[0].take(12)])
    request.send(8).finish().open_decode().expect(8).landed()
    other.finish().open_decode().expect(8).landed()
    rig.quiet()


def test_a_state_that_fits_no_slot_fails_the_room_with_both_sizes() -> None:
    """On both sides, not a hang; the fallback is a path without staging."""
    rig = Rig(HYBRID)
    prefills = rig.prefill(tp_shards(HYBRID, 1), strategy="auto", slot_bytes=256)
    decodes = rig.decode(tp_shards(HYBRID, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 4).start(4).failed()
    assert "staging slot, for one row of layer 0" in request.errors()
    rig.quiet()


def test_a_row_of_states_is_cut_by_layers_before_it_is_refused() -> None:
    """And what does not fit even so names the layer."""
    shards = tp_shards(HYBRID, 1)
    rank_plan = RankPlan.build(HYBRID, shards, shards[0])
    cut = rank_plan.cut_states(range(4), Limits(4 * (64 + 18), 1 << 20))
    rows = [Segment(row, row + 1, first, first + 2, True) for first in (0, 2) for row in range(2)]
    assert cut == [*rows, Segment(2, 3, 0, 4, True)], "only the conv states have a third row"
    assert sum(rank_plan.part_bytes(one, Rank(0)) for one in cut) == STATE_BYTES
    with pytest.raises(OversizeError, match="for one row of layer 0"):
        rank_plan.cut_states(range(4), Limits(4 * (64 + 18) - 1, 1 << 20))


def test_each_request_of_an_instance_with_attention_data_parallelism_goes_to_one_of_its_groups() -> None:
    """TP 4 with DP 2 is two groups of attention TP 2; the source's TP size is another."""
    spec = CacheSpec.kv(2, 4, 8, "int8")
    rig = Rig(spec)
    prefills = rig.prefill(tp_shards(spec, 4))
    groups = [rig.decode(tp_shards(spec, 4 // 2), name=f"D{dp}") for dp in range(2)]
    requests = [rig.request(f"room {i}", prefills, groups[i % 2], 10) for i in range(4)]
    for request in requests:
        request.start(10)
    for request in requests:
        request.released().done()
    rig.check()
    rig.quiet()


def test_layers_of_a_draft_model_are_layers_like_others() -> None:
    """They follow the model's own, with other heads, and go to whoever holds them."""
    draft = (Component("k", "int8", 2, 4), Component("v", "int8", 2, 4))
    spec = CacheSpec({**{LayerId(i): ATTENTION for i in range(3)}, LayerId(3): draft})
    rig = Rig(spec)
    prefills, decodes = rig.prefill(tp_shards(spec, 2, 2)), rig.decode(tp_shards(spec, 4))
    rig.request("room", prefills, decodes, 13).start(13).landed()
    rig.quiet()


def test_a_state_that_ranks_do_not_divide_is_refused_by_name() -> None:
    """6 channel groups over 4 ranks: never truncated."""
    spec = CacheSpec.uniform(1, [Component("ssm", "int8", 6, 4, tokens_per_row=0, rows=1)])
    with pytest.raises(GeometryError, match="6 units do not divide over 4 ranks"):
        tp_shards(spec, 4)


def test_a_state_changed_on_the_way_is_found() -> None:
    """The negative control of this page."""
    rig = Rig(HYBRID)
    prefills, decodes = rig.prefill(tp_shards(HYBRID, 1)), rig.decode(tp_shards(HYBRID, 1))
    request = rig.request("room", prefills, decodes, 4).start(4).landed()
    number = next(i for i, p in enumerate(decodes[0].pool.site.planes) if p.component == "delta")
    cells = decodes[0].pool.view(number)[request.slots[0][0].pages[0]]
    cells[0, 0, 0] ^= 1
    with pytest.raises(AssertionError, match="1 bytes are wrong"):
        decodes[0].check()


def watching(heard: list[RoomFrame]) -> Memory:
    """Ranks whose frames about rooms are noted."""
    return Memory(channel=lambda inner: Listening(inner, heard))


@pytest.mark.parametrize("stop", [16, None])
def test_leases_of_states_are_there_before_the_last_layers_are_computed(stop: int | None) -> None:
    """After the last group nothing is asked for; only where decode knows no end, states wait for ``finish``."""
    heard: list[RoomFrame] = []
    rig = Rig(HYBRID)
    prefills = rig.prefill(tp_shards(HYBRID, 2), memory=watching(heard), strategy="staged+layer_pipelined")
    decodes = rig.decode(tp_shards(HYBRID, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 16).open_decode().expect(stop).open_prefill()
    rig.turn()
    for start, end in ((0, 7), (7, 16)):
        tables = request.pages(start, end)
        steps = [m.endpoint.step({request.room: (end, [table])}) for m, table in zip(prefills, tables, strict=True)]
        rig.wait(0.5)
        asked = {f.segment[4] for f in heard if isinstance(f, StagingRequest)}
        assert (True in asked) == (end == stop), "states are asked for with the last rows"
        for step in steps:
            step.close()
        rig.wait(0.5)
    heard.clear()
    request.finish().landed()
    asked_late = [f for f in heard if isinstance(f, StagingRequest)]
    assert bool(asked_late) == (stop is None)
    written = [f for f in heard if isinstance(f, ChunkReady)]
    assert {f.segment[4] for f in written} == {True}, "nothing but states is left after the last group"
    rig.quiet()


@pytest.mark.parametrize("ready", [False, True])
def test_a_preempted_room_gives_back_the_leases_of_states_that_are_to_come(ready: bool) -> None:
    """They are asked for early, and must not keep bytes of the ring from others meanwhile."""
    rig = Rig(HYBRID)
    prefills, decodes = rig.prefill(tp_shards(HYBRID, 2)), rig.decode(tp_shards(HYBRID, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    event = FiredEvent()
    event.fired = ready
    request.send(8, ready=event)
    rig.wait(0.5)
    assert decodes[0].endpoint.usage().ring_used_bytes > 0
    fired = [handle.withdraw() for handle in request.sends]
    rig.until(lambda: all(e.query() for e in fired), "the end of all reads")
    rig.until(lambda: decodes[0].endpoint.usage().ring_used_bytes == 0, "the return of all leases")
    request.send(8)
    rig.until(lambda: decodes[0].endpoint.usage().ring_used_bytes > 0, "leases for what is given again")
    request.finish().landed()
    rig.quiet()


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_does_not_wait_for_layers_that_keep_a_state_alone(size: int) -> None:
    """No hook tells of them, and none needs to: attention's rows leave before the pass is closed."""
    rig = Rig(HYBRID)
    prefills = rig.prefill(tp_shards(HYBRID, 1), strategy="staged+layer_pipelined", schedule=LayerPipelined(fixed=size))
    decodes = rig.decode(tp_shards(HYBRID, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 16).open_decode().expect(16).open_prefill()
    step = prefills[0].endpoint.step({request.room: (16, request.pages(0, 16))})
    rig.wait(0.5)
    assert request.receives[0].report.segments == 0
    for number, layer in enumerate((1, 3), 1):
        step.layer_ready(LayerId(layer))
        rig.wait(0.5)
        assert request.receives[0].report.segments == number
    step.close()
    request.finish().landed()
    rig.quiet()


def test_a_state_that_tensor_parallelism_does_not_divide_is_refused_with_its_numbers() -> None:
    """Or each rank says what it holds, and then it crosses like any other."""
    odd = CacheSpec.uniform(2, (*ATTENTION, Component("ssm", "float32", 3, 64, tokens_per_row=0, rows=2)))
    with pytest.raises(GeometryError, match="3 units do not divide over 2 ranks"):
        tp_shards(odd, 2)
    uneven = [shard(odd, tp=2, rank=r, units={"ssm": units}) for r, units in enumerate((range(2), range(2, 3)))]
    rig = Rig(odd)
    prefills, decodes = rig.prefill(uneven), rig.decode(tp_shards(odd, 1))
    rig.request("room", prefills, decodes, 9).start(9).landed()
    rig.quiet()


INDEX = (
    Component("latent", "bfloat16", 1, 16),
    Component("index", "float8_e4m3fn", 1, 12),
    Component("index.scale", "float32", 1, 4),
)
"""Sparse attention over latents: every token has a key of the index and its scale."""


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_a_sparse_attention_index_has_rows_like_any_other_component(path: str) -> None:
    """Replicas divide it; it crosses in layer groups and between page sizes."""
    spec = CacheSpec.uniform(3, INDEX)
    rig = Rig(spec)
    prefills = rig.prefill(
        tp_shards(spec, 2), strategy=f"{path}+layer_pipelined", schedule=LayerPipelined(fixed=1), verify="full"
    )
    decodes = rig.decode(tp_shards(spec, 1), memory=Memory(page_size=16), strategy=path)
    request = rig.request("room", prefills, decodes, 21).open_decode().expect(21).open_prefill()
    for start, stop in ((0, 10), (10, 21)):
        tables = request.pages(start, stop)
        steps = [m.endpoint.step({request.room: (stop, [table])}) for m, table in zip(prefills, tables, strict=True)]
        for step in steps:
            for layer in range(3):
                step.layer_ready(LayerId(layer))
            step.close()
        rig.turn()
    request.finish().landed()
    assert request.receives[0].report.nbytes == 3 * 21 * (16 + 12 + 4)
    rig.quiet()
