"""Both sides of the connector with real endpoints, in the order of vLLM's hooks: what arrives, and what is reported."""

from __future__ import annotations

import pytest

from disagg_kv.channels import Hub
from tests.support.processes import wait
from tests.support.vllm_like import (
    MLA,
    THREE_GROUPS,
    TWO_GROUPS,
    Engine,
    Model,
    Pair,
    SlidingWindowSpec,
    prefilled,
    prompt,
    run,
)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 8)])
def test_rows_arrive_whatever_the_tp_sizes(pair: Pair, tps: tuple[int, int], tiles: bool) -> None:
    p, d = pair(tps, tiles=tiles)
    for number, count in enumerate((1, 8, 23)):
        d.decode(f"r{number}", prompt(count, number), prefilled(p, f"r{number}", prompt(count, number)))
    run(p, d)
    assert sorted(d.loaded) == ["r0", "r1", "r2"]
    assert set(p.reports) == {("sent", name) for name in d.loaded}
    assert set(d.reports) == {("received", name) for name in d.loaded}
    p.check_quiet()
    d.check_quiet()


@pytest.mark.parametrize("budget", [6, 1 << 20])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_prefill_copies_into_the_blocks_of_decode(pair: Pair, tps: tuple[int, int], budget: int) -> None:
    """Prefill keeps its own until it has; vLLM frees and overwrites them right after that."""
    p, d = pair(tps, strategy="mapped", verify="full", prefill={"budget": budget})
    for number, count in enumerate((1, 8, 23)):
        d.decode(f"r{number}", prompt(count, number), prefilled(p, f"r{number}", prompt(count, number)))
    run(p, d)
    assert sorted(d.loaded) == ["r0", "r1", "r2"]
    assert set(p.reports) == {("sent", name) for name in d.loaded}
    p.check_quiet()
    d.check_quiet()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("steps", range(6))
def test_blocks_that_are_copied_are_free_after_an_abort(pair: Pair, side: str, steps: int) -> None:
    """Whenever a client goes away; other requests go on."""
    p, d = pair((2, 1), strategy="mapped", prefill={"budget": 6})
    d.decode("r", prompt(21), prefilled(p, "r", prompt(21)))
    for _ in range(steps):
        p.step()
        d.step()
    (p if side == "prefill" else d).abort("r")
    run(p, d)
    d.decode("s", prompt(21, 1), prefilled(p, "s", prompt(21, 1)))
    run(p, d)
    assert "s" in d.loaded
    p.check_quiet()
    d.check_quiet()


@pytest.mark.parametrize("tiles", [False, True])
def test_rows_of_a_prompt_that_several_steps_compute(pair: Pair, tiles: bool) -> None:
    """A row that is a block is sent only once all its tokens are computed."""
    p, d = pair((2, 1), tiles=tiles, prefill={"budget": 6})
    d.decode("r", prompt(21), prefilled(p, "r", prompt(21)))
    run(p, d)
    stops = [1, 3, 4, 6] if tiles else [6, 12, 18, 21]
    assert p.chunks == [("r", stop, stop == stops[-1]) for stop in stops]
    assert d.loaded == ["r"]
    d.check_quiet()


def test_a_latent_cache_which_every_rank_holds_whole(pair: Pair) -> None:
    p, d = pair((2, 1), MLA, tiles=True)
    assert p.facts.row == 1
    d.decode("r", prompt(9), prefilled(p, "r", prompt(9)))
    run(p, d)
    assert d.loaded == ["r"]
    d.check_quiet()


SLIDING = [TWO_GROUPS, THREE_GROUPS, Model(groups=((SlidingWindowSpec, (0, 1), 6),))]


def outrun(count: int, block: int, window: int = 6) -> bool:
    """Whether vLLM frees the block of the first row to which the last of ``count`` tokens attends."""
    return count >= window and (count - window + 1) % block == 0


@pytest.mark.parametrize("model", SLIDING)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("blocks", [(4, 4), (4, 8), (8, 4), (2, 4)])
def test_sliding_windows_whatever_the_block_sizes(
    pair: Pair, model: Model, interleaved: bool, blocks: tuple[int, int]
) -> None:
    """Prefill frees blocks behind the window while a prompt is computed, and once more as the request ends.

    A prompt is not sent if prefill frees a row then to which the last token attends, and decode computes a prompt
    itself if vLLM frees such a row there.
    """
    each = [{"block": block, "blocks": 65} for block in blocks]
    p, d = pair((1, 2), model, interleaved=interleaved, verify="full", prefill={**each[0], "budget": 8}, decode=each[1])
    for count in range(1, 30):
        sends(p, d, count)
        assert (p.params[f"p{count}"] is None) == outrun(count, blocks[0])
        assert (f"d{count}" not in d.loaded) == (outrun(count, blocks[0]) or outrun(count, blocks[1]))
    assert d.not_loaded == []
    p.check_quiet()
    d.check_quiet()


def sends(p: Engine, d: Engine, count: int) -> None:
    """A prompt of ``count`` tokens, prefilled and then decoded; prefill may have nothing for decode."""
    p.prefill(f"p{count}", prompt(count, count))
    run(p, until=lambda: f"p{count}" in p.params)
    d.decode(f"d{count}", prompt(count, count), p.params[f"p{count}"])
    run(p, d)


@pytest.mark.parametrize("model", SLIDING)
@pytest.mark.parametrize(("window", "kept"), [(4, 2), (8, 2), (5, 3), (6, 0)])
def test_sliding_windows_over_rows_of_a_block(pair: Pair, model: Model, window: int, kept: int) -> None:
    """A window is rounded outwards to blocks. A prompt is computed by decode if vLLM frees such a block.

    ``kept``: of four consecutive lengths, the number that cross.
    """
    groups = tuple((kind, layers, window if old else None) for kind, layers, old in model.groups)
    p, d = pair((2, 1), Model(groups=groups), tiles=True, verify="full", prefill={"budget": 8, "blocks": 65})
    for count in range(1, 33):
        sends(p, d, count)
    long = [count for count in range(17, 33) if f"d{count}" in d.loaded]
    assert len(long) == 4 * kept
    assert d.not_loaded == []
    p.check_quiet()
    d.check_quiet()


def test_decode_that_waits_for_a_prompt_that_is_not_sent_is_answered(pair: Pair) -> None:
    """Prefill frees a row of its window as the request ends; decode has blocks of another size and would load it."""
    p, d = pair((1, 1), TWO_GROUPS, decode={"block": 8})
    origin = {"do_remote_prefill": True, "transfer_id": "t", "instance": "P", "addresses": p.addresses}
    d.decode("d", prompt(9), origin)
    d.step()
    assert not d.not_loaded
    p.prefill("p", prompt(9), "t")
    run(p, d)
    assert p.params["p"] is None
    assert p.reports == {}
    assert d.not_loaded == ["d"]
    p.check_quiet()
    d.check_quiet()


def test_rows_of_a_window_in_the_prefix_cache_of_decode_are_not_written_again(pair: Pair) -> None:
    """Other requests may read those blocks: decode computes the rest of such a prompt itself."""
    p, d = pair((1, 1), TWO_GROUPS)
    for name, cached in (("before", 12), ("within", 20)):
        d.decode(name, prompt(22), prefilled(p, name, prompt(22)), cached=cached)
    run(p, d)
    assert d.loaded == ["before"]
    assert d.not_loaded == []
    p.check_quiet()
    d.check_quiet()


def test_a_request_that_goes_on_over_a_sliding_window_is_not_sent(pair: Pair) -> None:
    """VLLM frees blocks whose rows decode needs, as the window of prefill's own tokens moves on."""
    p, d = pair((2, 1), TWO_GROUPS, prefill={"max_tokens": 4})
    origin = {"do_remote_prefill": True, "transfer_id": "t", "instance": "P", "addresses": p.addresses}
    p.prefill("p", prompt(20), "t")
    p.step()
    p.step()
    d.decode("d", prompt(20), origin)
    run(p, d)
    assert p.params["p"] is None
    assert d.not_loaded == ["d"]
    p.check_quiet()
    d.check_quiet()


@pytest.mark.parametrize("tps", [(2, 1), (1, 2)])
def test_layers_are_sent_while_others_are_computed(pair: Pair, tps: tuple[int, int]) -> None:
    p, d = pair(tps, Model(groups=((*Model().groups[0][:1], tuple(range(8)), None),)), strategy="auto+layer_pipelined")
    origin = {"do_remote_prefill": True, "transfer_id": "t", "instance": "P", "addresses": p.addresses}
    d.decode("d", prompt(30), origin)
    d.step()  # decode awaits the rows before prefill begins
    p.prefill("p", prompt(30), "t")
    run(p, d)
    assert d.loaded == ["d"]
    d.check_quiet()


def test_a_layer_that_is_not_transferred_is_ignored(pair: Pair) -> None:
    p, _ = pair()
    p.ranks[0].layer_ready("no layer of the cache")
    p.prefill("r", prompt(5), "t")
    p.ranks[0].begin(p.build(p.schedule()))
    p.ranks[0].layer_ready("no layer of the cache")
    p.ranks[0].end()
    assert p.chunks == [("r", 5, True)]


def test_prefix_caches_of_both_instances(pair: Pair) -> None:
    """Prefill sends the rows of its cached blocks too, as decode may lack them; decode awaits only those it lacks."""
    p, d = pair((2, 1))
    origin = prefilled(p, "r", prompt(22), cached=12)
    assert p.chunks == [("r", 22, True)]
    d.decode("all", prompt(22), origin)
    run(p, d)
    d.decode("part", prompt(22), prefilled(p, "s", prompt(22), cached=20), cached=8)
    run(p, d)
    assert d.loaded == ["all", "part"]
    counts = d.ranks[0].counters.take()
    heads = 3 * 4 * 8 * 2
    assert [seconds > 0 for seconds in counts.pop("load_seconds")] == [True, True]
    assert counts == {"loaded": 2, "loaded_bytes": [22 * heads, 14 * heads]}
    half = [22 * heads // 2, 14 * heads // 2]
    assert [rank.counters.take() for rank in p.ranks] == [{"sent": 2, "sent_bytes": half}] * 2
    d.check_quiet()


def test_decode_that_has_all_rows_lets_prefill_free_its_blocks(pair: Pair) -> None:
    """VLLM computes the last token itself, as if it were no transfer at all."""
    p, d = pair((1, 2))
    d.decode("r", prompt(8), prefilled(p, "r", prompt(8)), cached=8)
    run(p, d)
    assert d.reports == {}
    assert d.loaded == []
    p.check_quiet()


def test_a_preempted_request_is_sent_from_its_new_blocks(pair: Pair) -> None:
    """Its first blocks belong to another request before decode has asked for a row."""
    p, d = pair((2, 1), prefill={"budget": 8, "blocks": 12})
    p.prefill("r", prompt(21))
    p.step()
    p.step()
    before = p.tables["r"]
    p.preempt("r")
    p.prefill("other", prompt(16, 1))
    p.waiting.reverse()  # it takes the blocks
    run(p, until=lambda: "r" in p.params and "other" in p.params)
    assert set(before[0]) & set(p.tables["other"][0])
    assert before != p.tables["r"]
    d.decode("d", prompt(21), p.params["r"])
    d.decode("e", prompt(16, 1), p.params["other"])
    run(p, d)
    assert sorted(d.loaded) == ["d", "e"]
    p.check_quiet()


def test_a_request_preempted_after_its_last_row(pair: Pair) -> None:
    """An instance that also decodes a few tokens: prompt and output are computed anew, and the prompt sent anew."""
    p, d = pair(prefill={"max_tokens": 3})
    p.prefill("r", prompt(9))
    p.step()
    p.preempt("r")
    run(p, until=lambda: "r" in p.params)
    assert p.chunks == [("r", 9, True)] * 2
    d.decode("r", prompt(9), p.params["r"])
    run(p, d)
    assert d.loaded == ["r"]
    p.check_quiet()


def test_blocks_are_reported_only_once_vllm_has_ended_the_request(pair: Pair) -> None:
    """VLLM asserts that a request which it is to free has ended."""
    p, d = pair(prefill={"max_tokens": 4})
    origin = {"do_remote_prefill": True, "transfer_id": "t", "instance": "P", "addresses": p.addresses}
    d.decode("d", prompt(9), origin)
    p.prefill("p", prompt(9), "t")
    p.step()
    run(d, until=lambda: d.loaded == ["d"])
    wait(lambda: p.senders[0].open_rooms == 0, lambda: "prefill to release the room")
    assert p.reports == {}
    run(p)
    assert p.reports == {("sent", "p"): 1}


def test_one_instance_for_both() -> None:
    """It prefills for itself, and its two endpoints find each other."""
    engine = Engine(Hub(), "B", model=Model(), tp=2)
    try:
        engine.decode("d", prompt(13), prefilled(engine, "p", prompt(13)))
        run(engine)
        assert engine.loaded == ["d"]
        engine.check_quiet()
    finally:
        engine.close()


def test_rows_cross_shared_memory_and_are_compared(pair: Pair) -> None:
    p, d = pair((2, 1), carrier="shm", verify="full", tiles=True)
    d.decode("r", prompt(30), prefilled(p, "r", prompt(30)))
    run(p, d)
    assert d.loaded == ["r"]
    d.check_quiet()
