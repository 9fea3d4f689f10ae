"""What a demo refuses before it starts a process, and what its prompts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import disagg_kv
from disagg_kv.engines.hf.demo import DemoConfig, run_demo
from disagg_kv.engines.hf.demo.model import BOS, Conversations
from disagg_kv.errors import ConfigurationError, UnknownNameError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill_tp": 3}, "prefill_tp 3: .* 8 KV heads"),
        ({"decode_tp": 16}, "decode_tp 16: .* 8 KV heads"),
        ({"decode_tp": 0}, "decode_tp 0"),
        ({"requests": 0}, "requests must be positive, not 0"),
        ({"turns": 0}, "turns must be positive, not 0"),
        ({"turns": 100}, "turns 100: the last prompt has 8415 tokens"),
        ({"timeout_s": 0.0}, "timeout_s must be positive"),
        ({"chunk_tokens": 384}, "prompt_tokens 384 must be more than chunk_tokens 384"),
        ({"prompt_tokens": 5000}, "prompt_tokens 5000 must be .* at most 4096"),
        ({"inject": "swap-heads", "max_new_tokens": 1}, "'swap-heads' needs 2 KV heads and 2 new tokens"),
        ({"inject": "swap-heads", "model": "mla"}, "'swap-heads' is for the model 'llama' without a pipeline"),
        ({"model": "hybrid", "layers": 3}, "layers 3: the model 'hybrid' alternates 2 kinds"),
        ({"model": "window", "prefill_pp": 4}, "prefill_pp 4 does not divide 2 times 2 layers"),
        ({"decode_pp": 0}, "decode_pp 0 does not divide 4 times 1 layers"),
        ({"both_ways": True}, "both_ways needs a second turn"),
        ({"prefill_instances": 2, "turns": 2}, "prefill_instances and evict need both_ways"),
        ({"evict": 1, "turns": 2}, "prefill_instances and evict need both_ways"),
        ({"prefill_instances": 0}, "prefill_instances must be positive, not 0"),
        ({"evict": 0, "turns": 2, "both_ways": True}, "evict 0: a turn after turn 0, and below 2, is needed"),
        ({"evict": 2, "turns": 2, "both_ways": True}, "evict 2: a turn after turn 0, and below 2, is needed"),
        ({"turns": 2, "decode_pp": 2}, "turns 2: only the model 'llama' without a pipeline"),
        ({"inject": "swap-heads", "strategy": "slice"}, "is a wrong gather: it needs path staged, not 'slice'"),
        ({"verify": "some"}, "unknown verify 'some'"),
        ({"decode_dtype": "int8"}, "decode_dtype 'int8': there is no conversion from float32"),
        ({"decode_dtype": "float16", "dtype": "bfloat16"}, "'float16': there is no conversion from bfloat16"),
        ({"dtype": "float8_e5m2"}, "dtype 'float8_e5m2': prefill's cache has one of float32, bfloat16, float16"),
        ({"dtype": "bfloat16", "turns": 2}, "dtype and decode_dtype support the models"),
        ({"decode_dtype": "bfloat16", "turns": 2}, "decode_dtype support the models"),
        ({"decode_dtype": "bfloat16", "model": "mamba"}, "decode_dtype support the models"),
        ({"decode_dtype": "bfloat16", "inject": "negate"}, "decode_dtype support the models"),
        ({"inject": "swap-heads", "kv_heads": 1, "prefill_tp": 1}, "needs 2 KV heads .*, not 1 and 32"),
    ],
)
def test_numbers_that_cannot_work_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    """A head count that ranks do not divide is refused, never truncated."""
    with pytest.raises(ConfigurationError, match=message):
        DemoConfig(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"strategy": "teleport"}, UnknownNameError, "unknown strategy 'teleport'; known: .*staged"),
        ({"transport": "pigeon"}, UnknownNameError, "unknown transport 'pigeon'; known: .*shm"),
        ({"transport": "inproc"}, ConfigurationError, "'inproc' works only within one process"),
        ({"transport_module": "no_such_module"}, ConfigurationError, "'no_such_module' cannot be imported"),
    ],
)
def test_names_that_cannot_work_are_refused_before_a_process_starts(
    given: dict[str, Any], error: type[ConfigurationError], message: str
) -> None:
    """With the names that would have."""
    with pytest.raises(error, match=message):
        run_demo(DemoConfig(**given))


def test_prompts_are_text_of_this_library_in_lengths_that_differ() -> None:
    """Bytes after a beginning; no two requests are alike, and all take at least two chunks."""
    config = DemoConfig(requests=5)
    texts = Conversations(config).prompts
    assert tuple(len(text) for text in texts) == config.prompt_lengths == (384, 421, 458, 495, 404)
    assert len(set(texts)) == 5
    assert min(config.prompt_lengths) > config.chunk_tokens
    package = Path(disagg_kv.__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    for text in texts:
        assert text[0] == BOS
        assert bytes(text[1:]) in sources


def test_a_later_prompt_is_all_that_was_said_before_and_more() -> None:
    """And decode can lack all of it but the whole pages of prompt and answer."""
    config = DemoConfig(requests=2, turns=3, max_new_tokens=5, turn_tokens=10)
    conversations = Conversations(config)
    first, other = conversations.prompts
    conversations.answered(0, 0, [1, 2, 3, 4, 5])
    second = conversations.prompts[0]
    assert second[:389] == (*first, 1, 2, 3, 4, 5)
    conversations.answered(0, 1, [6, 7, 8, 9, 10])
    assert conversations.prompts[1] == other
    assert (len(second), len(conversations.prompts[0])) == (config.lengths(1)[0], config.lengths(2)[0]) == (399, 414)
    assert (config.lacking(0), config.lacking(1)) == ((384, 421), (399 - 384, 436 - 416))
    assert config.passes == 3 + 1 + 1 + 3 + 1 + 1


def test_what_decode_sends_back_follows_from_what_each_side_has() -> None:
    """Two prefill instances in turns; pages of 16 rows there, of 32 on decode, which evicts before the last turn."""
    config = DemoConfig(
        requests=1, turns=4, max_new_tokens=32, turn_tokens=48, decode_page_size=32, both_ways=True,
        prefill_instances=2, evict=3,
    )  # fmt: skip
    assert [config.lengths(turn) for turn in range(4)] == [(384,), (464,), (544,), (624,)]
    assert [config.kept(turn) for turn in range(4)] == [(0,), (384,), (480,), (544,)]
    assert [config.computed(turn) for turn in range(4)] == [(0,), (0,), (384,), (464,)]
    assert [config.returned(turn) for turn in range(4)] == [(0,), (384,), (480 - 384,), (0,)]
    assert [config.lacking(turn) for turn in range(4)] == [(384,), (80,), (64,), (624,)]
    assert config.passes == 3 + 1 + 1 + 2
    assert (config.prefills, config.ranks("prefill", 1), config.ranks("decode", 1)) == (8, range(4, 8), range(1))


def test_both_directions_leave_out_what_is_held() -> None:
    """Whether or not the strategy says so; one way it has to."""
    assert DemoConfig(strategy="slice").selected == "slice"
    assert DemoConfig(strategy="slice", turns=2, both_ways=True).selected == "slice+incremental"
    assert DemoConfig(strategy="auto+incremental", turns=2, both_ways=True).selected == "auto+incremental"
