"""Models with states: Mamba 2 layers and gated delta nets beside attention, in the same blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

from disagg_kv.core import Options
from disagg_kv.engines.vllm.host import facts
from disagg_kv.engines.vllm.states import state_shape
from disagg_kv.errors import UnsupportedError
from tests.support.vllm_like import HYBRID, Engine, Model, Pair, configs, prefilled, prompt, run
from tests.support.vllm_states import MambaSpec, States

LENGTHS = (2, 8, 9, 23)


def served(pair: Pair, states: States, tps: tuple[int, int], **both: Any) -> tuple[Engine, Engine]:
    """Prompts through two instances, of which decode has all states and rows."""
    p, d = pair(tps, evolve(HYBRID, states=states), **both)
    for number, count in enumerate(LENGTHS):
        d.decode(f"r{number}", prompt(count, number), prefilled(p, f"r{number}", prompt(count, number)))
    run(p, d)
    assert sorted(d.loaded) == ["r0", "r1", "r2", "r3"]
    assert d.not_loaded == []
    p.check_quiet()
    d.check_quiet()
    return p, d


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("kind", ["MAMBA2", "GDN_ATTN"])
@pytest.mark.parametrize("tps", [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_states_arrive_whatever_the_tp_sizes(pair: Pair, tps: tuple[int, int], kind: str, channels_first: bool) -> None:
    served(pair, States(kind, channels_first=channels_first), tps, verify="full")


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("strategy", ["staged", "mapped", "staged+layer_pipelined", "slice"])
def test_states_on_every_path_and_in_chunks(pair: Pair, strategy: str, tiles: bool) -> None:
    served(pair, States(), (2, 1), strategy=strategy, tiles=tiles, prefill={"budget": 6}, decode={"interleaved": True})


@pytest.mark.parametrize("tps", [(1, 2), (2, 1), (2, 2)])
def test_groups_that_every_rank_has(pair: Pair, tps: tuple[int, int]) -> None:
    """Fewer groups of B and C than ranks: vLLM gives each rank the only one."""
    served(pair, States(groups=1), tps)


def test_prefill_leaves_the_last_token_to_decode(pair: Pair) -> None:
    """A state that has it could not give the token that follows. A first token would be another's."""
    p, _ = pair(model=HYBRID)
    request = p.prefill("r", prompt(9))
    assert (request.num_prompt_tokens, request.prompt_token_ids) == (8, prompt(9)[:8])
    run(p, until=lambda: "r" in p.params)
    assert p.params["r"] is not None
    assert "first_token" not in p.params["r"]


def test_a_prompt_of_one_token_is_not_sent(pair: Pair) -> None:
    p, d = pair(model=HYBRID)
    p.prefill("r", prompt(1), "named")
    d.decode("r", prompt(1), {**p_origin(p), "transfer_id": "named"})
    run(p, d)
    assert p.params["r"] is None
    assert d.loaded == d.not_loaded == []
    assert p.requests == d.requests == {}


def p_origin(engine: Engine) -> dict[str, Any]:
    """A router that knows the prefill instance."""
    return {"do_remote_prefill": True, "instance": "P", "addresses": engine.addresses}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_preempted_request_is_sent_from_its_new_blocks(pair: Pair, steps: int) -> None:
    """Its states lie elsewhere then."""
    p, d = pair((2, 1), HYBRID, prefill={"budget": 8, "max_tokens": 1})
    p.prefill("r", prompt(20))
    for _ in range(steps):
        p.step()
        if p.requests["r"] in p.running:
            p.preempt("r")
    run(p, until=lambda: "r" in p.params)
    d.decode("r", prompt(20), p.params["r"])
    run(p, d)
    assert d.loaded == ["r"]


def test_states_given_again_after_the_last_token(pair: Pair) -> None:
    """VLLM may preempt a request that has computed its prompt, before it knows the first token."""
    p, d = pair(model=HYBRID, prefill={"max_tokens": 2})
    request = p.prefill("r", prompt(20))
    p.step()
    p.preempt("r")
    request.outputs, p.max_tokens = 0, 1
    run(p, until=lambda: "r" in p.params)
    assert p.chunks == [("r", 19, True)] * 2
    d.decode("r", prompt(20), p.params["r"])
    run(p, d)
    assert d.loaded == ["r"]
    p.check_quiet()


@pytest.mark.parametrize("preempted", [False, True])
def test_a_request_that_goes_on_over_its_states_is_not_sent(pair: Pair, preempted: bool) -> None:
    """Preempted, it computes its prompt and its first token in one step."""
    p, _ = pair(model=HYBRID, prefill={"max_tokens": 3})
    p.prefill("r", prompt(9))
    p.step()
    if preempted:
        p.preempt("r")
    run(p, until=lambda: "r" in p.params)
    assert p.params["r"] is None
    run(p)
    p.check_quiet()


def test_another_prompt_gets_no_states(pair: Pair) -> None:
    p, d = pair(model=HYBRID, options=Options(claim_s=0.5))
    d.decode("r", prompt(9, 1), prefilled(p, "r", prompt(9)))
    run(p, d)
    assert d.not_loaded == ["r"]


def test_layouts_of_conv_states_have_other_formats() -> None:
    """So two sides with different ones are refused."""
    formats = set()
    for channels_first in (False, True):
        states = States(channels_first=channels_first)
        shape = shaped(states.spec(1), channels_first=channels_first)
        parts = shape.parts(torch.zeros(3, 1, 1, 128, dtype=torch.int8), 1, 0)
        formats.add(tuple(one.format for one, _ in parts))
    assert len(formats) == 2


def shaped(spec: Any = None, *, tp: int = 1, config: Any = None, channels_first: bool = False, **changes: Any) -> Any:
    """The shape of a spec with some changes."""
    made = evolve(spec or States().spec(tp), **changes)
    config = config or SimpleNamespace(mamba_n_groups=2)
    return state_shape("model.0.mixer", made, config, tp=tp, channels_first=channels_first)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_specs_that_vllm_makes_of_falcon_h1(tp: int) -> None:
    """Seen on vLLM's CPU backend: two attention heads, four heads of states, and one group, which each rank has."""
    spec = MambaSpec(((3, 128 // tp + 32), (4 // tp, 32, 16)), SimpleNamespace(name="MAMBA2"))
    found = shaped(spec, tp=tp, config=SimpleNamespace(mamba_n_groups=1))
    assert found.blocks == (("x", 4, 32), ("b", 1, 16), ("c", 1, 16))
    assert (found.rows, found.heads, found.size) == (3, 4, 512)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_specs_that_vllm_makes_of_qwen3_next(tp: int) -> None:
    """Seen on vLLM's CPU backend: two heads of keys and four of values, of 128 channels each."""
    spec = MambaSpec(((3, 1024 // tp), (4 // tp, 128, 128)), SimpleNamespace(name="GDN_ATTN"))
    found = shaped(spec, tp=tp, config=SimpleNamespace())
    assert found.blocks == (("q", 2, 128), ("k", 2, 128), ("v", 4, 128))
    assert (found.rows, found.heads, found.size) == (3, 4, 1 << 14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_type": SimpleNamespace(name="SHORT_CONV")}, "states of the kind SHORT_CONV in 2 tensors"),
        ({"mamba_type": "odd"}, "states of the kind odd"),
        ({"shapes": ((2, 20),)}, "MAMBA2 in 1 tensors"),
        ({"mamba_cache_mode": "align"}, "--no-enable-prefix-caching"),
        ({"num_speculative_blocks": 1}, "speculative states"),
        ({"tp_replicated": True}, "states that every rank holds"),
    ],
)
def test_states_that_are_not_moved_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"layer model.0.mixer: .*{message}"):
        shaped(**changes)


def test_groups_that_the_configuration_does_not_say() -> None:
    """One rank has all of them; of several, each may have the same."""
    assert shaped(config=SimpleNamespace()).blocks[1] == ("b", 2, 3)
    with pytest.raises(UnsupportedError, match="does not say its groups"):
        shaped(tp=2, config=SimpleNamespace())
    with pytest.raises(UnsupportedError, match="1 groups of states on a rank of 2, of 5 in all"):
        shaped(tp=2, config=SimpleNamespace(n_groups=5))


def test_bytes_that_cannot_be_states_are_refused() -> None:
    """Too few of them, elements of another size, or other axes."""
    shape, pages = shaped(), torch.zeros(3, 1, 1, 128, dtype=torch.int8)
    assert [one.name for one, _ in shape.parts(pages, 1, 0)] == ["conv.x", "conv.b", "conv.c", "state"]
    for wrong in (pages[..., 1:], pages.view(torch.float16), pages[:, 0], pages.expand(3, 2, 1, 128), pages.mT):
        with pytest.raises(UnsupportedError, match=r"\[blocks, 1, 1, 128 bytes\] is needed"):
            list(shape.parts(wrong, 1, 0))


def test_a_model_of_states_alone_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="no KV cache of tokens"):
        facts(*configs(Model(groups=((MambaSpec, (0, 1), None),)), "P"), tiles=False)
