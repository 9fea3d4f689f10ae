"""What is read of SGLang's server, and what is refused; two servers over Unix sockets."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from disagg_kv.engines.common import CommonCache
from disagg_kv.engines.opening import Opened, open_endpoints
from disagg_kv.engines.sglang import host
from disagg_kv.engines.sglang.bootstrap import BootstrapServer
from disagg_kv.engines.sglang.host import (
    FIRST_TOKEN,
    REASONS,
    ServerFacts,
    announce,
    cache_dtype,
    common_of,
    first_token,
    open_side,
    prompt_of,
    refuse,
)
from disagg_kv.engines.sglang.options import SGLangOptions
from disagg_kv.engines.sglang.rooms import Poll, ReceiverRoom, SenderRoom
from disagg_kv.engines.sglang.side import Side
from disagg_kv.errors import RemoteProtocolError, UnsupportedError
from disagg_kv.kernels.convert import reference
from disagg_kv.rendezvous import Source
from tests.support.etcd import EtcdServer
from tests.support.needs import needs_etcd
from tests.support.processes import wait

FACTS = ServerFacts(tp=1, rank=0, heads=2, latent=False, dtype="float16", model=b"m", device="cpu")


NANOSECONDS = 1_764_338_400_123_456_789
"""A ``bootstrap_room`` as llm-d's sidecar draws it with ``--kv-connector=sglang``, and as SGLang's routers may.

llm-d-inference-scheduler 520af478, ``pkg/sidecar/proxy/connector_sglang.go``.
"""


class StateType(Enum):
    """Of SGLang."""

    MAMBA = "mamba"


class Memory:
    """``KVArgs`` over arrays of 6 pages of 4 tokens."""

    def __init__(self) -> None:
        self.kv = [np.zeros((24, 2, 8), np.uint16) for _ in range(4)]
        self.rows = np.zeros((3, 8), np.uint64)
        item = 4 * 2 * 8 * 2
        self.args: Any = SimpleNamespace(
            kv_data_ptrs=[one.ctypes.data for one in self.kv],
            kv_data_lens=[one.nbytes for one in self.kv],
            kv_item_lens=[item] * 4,
            aux_data_ptrs=[self.rows.ctypes.data],
            aux_data_lens=[self.rows.nbytes],
            aux_item_lens=[64],
            page_size=4,
            state_types=[],
            num_draft_entries=0,
            kv_layout=None,
        )

    def side(self, options: SGLangOptions, *, produces: bool, **changes: Any) -> tuple[Side, Source]:
        common = CommonCache(layers=2, heads=2, dim=8, dtype="float16", rotation="rotated", model=b"m")
        facts = attrs.evolve(FACTS, common=common if options.common else None, **changes)
        return open_side(lambda: (options, facts), self.args, tp=1, produces=produces, group=None)


@pytest.mark.parametrize(
    "given", [{}, {"channel": "zmq", "staging_bytes": 1 << 18, "verify": "full"}, {"description": "common"}]
)
def test_servers_find_each_other_through_the_bootstrap_server(given: dict[str, Any]) -> None:
    assert len(transferred(given).addresses) == 1


@needs_etcd
def test_servers_find_each_other_in_etcd(tmp_path: Path) -> None:
    """The bootstrap server gives the name of the instance alone."""
    server = EtcdServer(tmp_path / "etcd").start()
    try:
        where = f"etcd://{server.url.removeprefix('http://')}/prod"
        assert transferred({"channel": "zmq", "rendezvous": where}).addresses == ()
        assert server.keys("prod/ranks") == {}  # both have withdrawn
    finally:
        server.kill()


def transferred(given: dict[str, Any]) -> Source:
    """A request between two servers with these options; what the bootstrap server said of prefill."""
    options = SGLangOptions.read("options", given)
    p, d = Memory(), Memory()
    prefill, source = p.side(options, produces=True)
    decode, _ = d.side(options, produces=False)
    server = BootstrapServer("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    try:
        announce("0.0.0.0", server.port, source)
        wait(lambda: decode.directory.ensure(address), lambda: str(decode.directory.problem(address)))
        assert decode.directory.get(address) == (source,)
        sender, receiver = SenderRoom(prefill, NANOSECONDS), ReceiverRoom(decode, address, NANOSECONDS)
        receiver.asked(range(7), None)
        receiver.init(0)
        receiver.send_metadata(np.array([4, 2], np.int32), 2)
        wait(lambda: sender.poll() is Poll.WAITING_FOR_INPUT, lambda: "decode's request")
        for number, array in enumerate(p.kv):
            array[4:12] = np.arange(8 * 16).reshape(8, 2, 8) + number
        p.rows[1] = 77
        assert sender.pop_decode_prefix_len() == 0
        sender.init(2, 1)
        sender.send(np.array([1, 2], np.int32), None, 7)
        wait(lambda: {sender.poll(), receiver.poll()} == {Poll.SUCCESS}, lambda: f"{sender.poll()} {receiver.poll()}")
        for ours, theirs in zip(p.kv, d.kv, strict=True):
            assert np.array_equal(theirs[16:20], ours[4:8])
            assert np.array_equal(theirs[8:11], ours[8:11])
        assert (d.rows[2] == 77).all()
        assert sender.report.nbytes == receiver.report.nbytes == 7 * 4 * 2 * 16
    finally:
        server.close()
        prefill.close()
        decode.close()
    return source


def test_prefill_converts_to_decodes_float8_with_its_scales() -> None:
    """Decode's pages hold the specified conversion of prefill's rows, and nothing else changes."""
    options = SGLangOptions.read("options", {"verify": "full"})
    p, d = Memory(), Memory()
    narrow = [np.full((24, 2, 8), 0xA5, np.uint8) for _ in range(4)]
    d.args.kv_data_ptrs = [one.ctypes.data for one in narrow]
    d.args.kv_data_lens, d.args.kv_item_lens = [one.nbytes for one in narrow], [4 * 2 * 8] * 4
    scales = (((0.5,), (0.25,)), ((), (3.0,)))
    prefill, source = p.side(options, produces=True)
    decode, _ = d.side(options, produces=False, dtype="float8_e4m3fn", scales=scales)
    server = BootstrapServer("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    try:
        announce("0.0.0.0", server.port, source)
        wait(lambda: decode.directory.ensure(address), lambda: str(decode.directory.problem(address)))
        sender, receiver = SenderRoom(prefill, 1), ReceiverRoom(decode, address, 1)
        receiver.asked(range(7), None)
        receiver.init(0)
        receiver.send_metadata(np.array([4, 2], np.int32), 2)
        wait(lambda: sender.poll() is Poll.WAITING_FOR_INPUT, lambda: "decode's request")
        draw = np.random.default_rng(0)
        for array in p.kv:
            array[:] = (draw.standard_normal(array.shape) * 300).astype(np.float16).view(np.uint16)
        assert sender.pop_decode_prefix_len() == 0
        sender.init(2, 1)
        sender.send(np.array([1, 3], np.int32), None, 7)
        wait(lambda: {sender.poll(), receiver.poll()} == {Poll.SUCCESS}, lambda: f"{sender.poll()} {receiver.poll()}")
    finally:
        server.close()
        prefill.close()
        decode.close()
    for number, (ours, theirs) in enumerate(zip(p.kv, narrow, strict=True)):
        scale = scales[number % 2][number // 2] or (1.0,)
        rows = torch.from_numpy(ours.view(np.float16)).float() * (1 / torch.tensor(scale))
        wanted = np.full_like(theirs, 0xA5)
        cells = reference.rounded(rows, "float8_e4m3fn").numpy()
        wanted[16:20], wanted[8:11] = cells[4:8], cells[12:15]
        assert np.array_equal(theirs, wanted)


def test_the_bootstrap_server_of_its_own_host() -> None:
    for name in ("127.0.0.1", "::", ""):
        announce(name, 1, SimpleNamespace(instance="a", addresses=())).set()  # type: ignore[arg-type]


def test_types_of_caches() -> None:
    """By SGLang's name of the type, and by the type of its pool."""
    assert cache_dtype("auto", "bfloat16", "bfloat16") == "bfloat16"
    assert cache_dtype("fp8_e4m3", "bfloat16", "float8_e4m3fn") == "float8_e4m3fn"
    with pytest.raises(UnsupportedError, match="'mxfp8'"):
        cache_dtype("mxfp8", "bfloat16", "float8_e4m3fn")
    with pytest.raises(UnsupportedError, match="'auto'"):
        cache_dtype("auto", "int3", "int3")
    with pytest.raises(UnsupportedError, match="KV caches of float8_e4m3fnuz yet; 'fp8_e4m3' means float8_e4m3fn"):
        cache_dtype("fp8_e4m3", "bfloat16", "float8_e4m3fnuz")


@pytest.mark.parametrize("name", REASONS)
def test_what_of_sglang_is_not_supported_is_refused_by_name(name: str) -> None:
    """With the reason; the plug-in looks whether it is used."""
    args, others = Memory().args, dict.fromkeys(REASONS, False)
    refuse(args, others)
    with pytest.raises(UnsupportedError, match=re.escape(f"does not support SGLang's {name} ({REASONS[name]}) yet")):
        refuse(args, {**others, name: True})
    assert f'"{name}": ' in (Path(host.__file__).parent / "plugin.py").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_types": [StateType.MAMBA]}, "mamba states (a request has one state in place of rows)"),
        ({"state_types": ["swa"]}, "swa states (layers with a sliding window have pages of their own"),
        ({"state_types": ["dsa"]}, "dsa states (a sparse index has a buffer of its own)"),
        ({"state_types": ["of_tomorrow"]}, "of_tomorrow states (they are not described)"),
        ({"num_draft_entries": 4}, "a draft model's cache (its layers are not described)"),
        ({"kv_layout": "v4"}, "the layout v4 (its bytes are not described)"),
    ],
)
def test_caches_that_are_not_moved_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    args = Memory().args
    vars(args).update(changes)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        refuse(args, {})


@pytest.mark.parametrize(("produces", "defers", "path"), [(0, 0, "staged"), (0, 1, "auto"), (1, 0, "auto")])
def test_pages_are_exposed_where_the_server_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, produces: bool, defers: bool, path: str
) -> None:
    """Of prefill peers read none by themselves."""
    taken: list[str] = []

    def opened(*args: Any, **given: Any) -> Opened:
        taken.append(given["strategy"])
        return open_endpoints(*args, **given)

    monkeypatch.setattr(host, "open_endpoints", opened)
    side, _ = Memory().side(SGLangOptions(), produces=bool(produces), defers=bool(defers))
    side.close()
    assert taken == [f"{path}+per_chunk+incremental"]
    assert side.defers == bool(defers)


def test_the_prompt_of_a_request_is_compared_unless_tokens_do_not_say_all() -> None:
    plain = SimpleNamespace(multimodal_inputs=None, input_embeds=None, origin_input_ids=[1, 2])
    assert prompt_of(plain) == [1, 2]
    assert prompt_of(SimpleNamespace(**{**vars(plain), "multimodal_inputs": object()})) is None
    assert prompt_of(SimpleNamespace(**{**vars(plain), "input_embeds": [[0.5]]})) is None


def server(folder: Path, **changes: Any) -> Any:
    """``ServerArgs`` of a model that is in ``folder``."""
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    given = {"device": "cpu", "json_model_override_args": "{}", "model_path": str(folder), "revision": None}
    return SimpleNamespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "quantization", "dtype", "message"),
    [
        ({"device": "cuda"}, None, "float16", "device cuda"),
        ({"json_model_override_args": '{"rope_theta": 1}'}, "fp8", "float16", "quantization fp8, json-model-override"),
        ({}, None, "float8_e4m3fn", "a quantized cache, float8_e4m3fn"),
    ],
)
def test_what_has_no_common_description_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], quantization: str | None, dtype: str, message: str
) -> None:
    found = common_of(server(tmp_path), None, "float16")
    assert (found.layers, found.heads, found.dim, found.dtype) == (2, 2, 8, "float16")
    with pytest.raises(UnsupportedError, match=f"description 'common' does not support SGLang's {message}"):
        common_of(server(tmp_path, **changes), quantization, dtype)


def request(params: Any, **asked: bool) -> Any:
    """A request of SGLang's, with its ``custom_params``."""
    extras = {"return_logprob": False, "return_hidden_states": False, "return_sampling_mask": False, **asked}
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params), **extras)


def test_the_first_token_of_a_request_that_another_engine_has_prefilled() -> None:
    assert first_token(request({FIRST_TOKEN: 345})) == 345
    for none in (None, {}, {"other": 1}, {FIRST_TOKEN: None}):
        assert first_token(request(none, return_logprob=True)) is None
    for wrong in (True, -1, 1 << 31, 1.0, "345", [3]):
        with pytest.raises(RemoteProtocolError, match=f"{FIRST_TOKEN} .* is no token"):
            first_token(request({FIRST_TOKEN: wrong}))
    with pytest.raises(UnsupportedError, match="return_logprob, return_hidden_states of a token"):
        first_token(request({FIRST_TOKEN: 345}, return_logprob=True, return_hidden_states=True))
