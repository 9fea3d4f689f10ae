"""``kv_transfer_params`` cross routers and clients: they come back as they were, or are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.engines.model import prompt_tag
from disagg_kv.engines.vllm.params import Origin, transfer_id
from disagg_kv.errors import RemoteProtocolError
from disagg_kv.rendezvous import Source

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)


@given(TEXT, TEXT, st.lists(TEXT, max_size=4))
def test_they_come_back_through_json(transfer: str, instance: str, addresses: list[str]) -> None:
    origin = Origin(transfer, Source(instance, tuple(addresses)))
    params = json.loads(json.dumps(origin.params()))
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert Origin.of(params) == origin


WHOLE: dict[str, Any] = Origin("t", Source("P", ("unix://a", "unix://b"))).params()


@pytest.mark.parametrize("addresses", [None, []])
def test_addresses_may_be_left_to_the_rendezvous(addresses: list[str] | None) -> None:
    assert Origin.of({**WHOLE, "addresses": addresses}).source.addresses == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"transfer_id": None},
        {"transfer_id": ""},
        {"transfer_id": 7},
        {"transfer_id": "x" * 257},
        {"transfer_id": ["t"]},
        {"transfer_id": "half a pair \ud800"},
        {"instance": ""},
        {"instance": None},
        {"instance": 3},
        {"instance": "\ud800"},
        {"instance": "x" * 257},
        {"addresses": "unix://a"},
        {"addresses": 3},
        {"addresses": {"a": 1}},
        {"addresses": [3]},
        {"addresses": [None]},
        {"addresses": [""]},
        {"addresses": ["x" * 1025]},
        {"addresses": ["x"] * 129},
        {"addresses": ["x"] * 100_000},
    ],
    ids=str,
)
def test_what_was_changed_on_the_way_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="kv_transfer_params"):
        Origin.of({**WHOLE, **wrong})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=4
)


@given(st.dictionaries(st.sampled_from(["transfer_id", "instance", "addresses"]), JSON))
def test_anything_else_is_refused_by_one_error(params: dict[str, Any]) -> None:
    try:
        origin = Origin.of(params)
    except RemoteProtocolError:
        return
    assert 0 < len(origin.transfer) <= 256


def test_a_transfer_may_have_no_id_yet() -> None:
    assert transfer_id({}) is None
    assert transfer_id({"transfer_id": "t"}) == "t"


def test_a_tag_names_a_prompt() -> None:
    """Equal for equal tokens, in whatever container."""
    tag = prompt_tag([1, 2, 3])
    assert len(tag) == 16
    assert tag == prompt_tag((1, 2, 3)) == prompt_tag(list(np.array([1, 2, 3], np.int32)))
    others = [prompt_tag([1, 2]), prompt_tag([1, 3, 2]), prompt_tag([]), prompt_tag([1, 2, 3], "image a at 1")]
    assert len({tag, *others, prompt_tag([1, 2, 3], "image b at 1"), prompt_tag([1, 2, 3], "\ud800")}) == 7
