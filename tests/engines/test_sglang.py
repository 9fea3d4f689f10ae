"""Servers of SGLang serve through the plug-in: the tokens are those of one server, or there is a named error."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .sglang_servers import ROOT, Router, Server, on_cpu, sampling, serve

pytest.importorskip("sglang", reason="SGLang is not installed: nox -s engines_sglang installs it")
pytestmark = pytest.mark.timeout(900)

LENGTHS = (5, 16, 33, 150, 400)
COUNT = 12
SAMPLING = sampling(COUNT)
ROW_BYTES = 4 * 2 * 4 * 32 * 4
"""Layers, K and V, heads, head dimension, bytes of a float."""

Start = Callable[..., Server]


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, 512) for _ in range(length)]


@pytest.fixture
def servers(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a server; its log is in the test's folder."""
    with ExitStack() as ends:

        def begin(name: str, mode: str = "null", model: Path = model, **given: Any) -> Server:
            server = Server(tmp_path / f"{name}.log", model, mode, **given)
            ends.callback(server.close)
            return server

        yield begin


@pytest.fixture(scope="module")
def tokens_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[int]], list[int]]]:
    """What one server without any transfer answers; asked once for each prompt."""
    known: dict[tuple[int, ...], list[int]] = {}
    alone: list[Server] = []

    def ask(tokens: list[int]) -> list[int]:
        if tuple(tokens) not in known:
            if not alone:
                alone.append(Server(tmp_path_factory.mktemp("alone") / "alone.log", model).ready())
            known[tuple(tokens)] = alone[0].begin(tokens, COUNT).result()["output_ids"]
        return known[tuple(tokens)]

    yield ask
    for server in alone:
        server.close()


TokensOf = Callable[[list[int]], list[int]]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode server with all defaults, for tests that leave them as they are."""
    folder = tmp_path_factory.mktemp("plain")
    with ExitStack() as ends:
        both = []
        for mode in ("prefill", "decode"):
            both.append(Server(folder / f"{mode}.log", model, mode))
            ends.callback(both[-1].close)
        yield both[0].ready(), both[1].ready()


def pair(start: Start, prefill: dict[str, Any], decode: dict[str, Any]) -> tuple[Server, Server]:
    both = start("prefill", "prefill", **prefill), start("decode", "decode", **decode)
    return both[0].ready(), both[1].ready()


def all_free(*servers: Server) -> None:
    """SGLang's own count of used tokens returns to zero."""
    deadline = time.monotonic() + 60
    while any(server.used_tokens() for server in servers):
        assert time.monotonic() < deadline, [server.used_tokens() for server in servers]
        time.sleep(0.2)


def sent_bytes(server: Server) -> list[int]:
    """Bytes of each request from all ranks, from the prefill server's log."""
    found: dict[str, int] = {}
    for room, nbytes in re.findall(r"room (\d+) is sent: (\d+) bytes", server.log.read_text()):
        found[room] = found.get(room, 0) + int(nbytes)
    return list(found.values())


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(("prefill_page", "decode_page"), [(1, 1), (16, 16), (16, 1), (1, 16)])
def test_tokens_are_those_of_one_server(
    servers: Start, tokens_of: TokensOf, prefill_tp: int, decode_tp: int, prefill_page: int, decode_page: int
) -> None:
    """Chunked prefill of 64 tokens, and a checksum of every byte."""
    wanted = {length: tokens_of(prompt(length)) for length in LENGTHS}
    options = {"verify": "full"}
    prefill, decode = pair(
        servers,
        {"tp_size": prefill_tp, "page_size": prefill_page, "options": options, "chunked_prefill_size": 64},
        {"tp_size": decode_tp, "page_size": decode_page, "options": options},
    )
    for room, length in enumerate(LENGTHS, 1):
        first, second = serve(prefill, decode, room, prompt(length), COUNT)
        assert second.get("output_ids") == wanted[length], (length, first, second)
        assert first["output_ids"] == wanted[length][:1]
    all_free(decode)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1)])
def test_a_decode_server_keeps_a_float8_cache(
    servers: Start, tokens_of: TokensOf, prefill_tp: int, decode_tp: int
) -> None:
    """A quarter of float32's bytes cross, and checksums compare all of them with the conversion of prefill's.

    The first token is that of one server. The others follow from rounded rows. One server with such a cache gives
    others again: it reads rounded rows while it computes the prompt.
    """
    options = {"verify": "full"}
    prefill, decode = pair(
        servers,
        {"tp_size": prefill_tp, "page_size": 16, "options": options, "chunked_prefill_size": 64},
        {"tp_size": decode_tp, "kv_cache_dtype": "fp8_e4m3", "options": options},
    )
    for room, length in enumerate(LENGTHS, 1):
        first, second = serve(prefill, decode, room, prompt(length), COUNT)
        assert first["output_ids"] == tokens_of(prompt(length))[:1]
        assert second["output_ids"][:1] == first["output_ids"]
        assert len(second["output_ids"]) == COUNT
    assert sum(sent_bytes(prefill)) == sum(LENGTHS) * ROW_BYTES // 4
    all_free(decode)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_prefill_copies_into_decodes_pages(
    servers: Start, tokens_of: TokensOf, prefill_tp: int, decode_tp: int
) -> None:
    """Where decode's pages can be mapped: SGLang keeps those of a failed request until no copy goes there.

    A third of the requests are aborted at any time, and their pages are used again.
    """
    shared = {"SGLANG_CPU_SHARED": "1"}
    options = {"verify": "full", "total_s": 30}
    prefill, decode = pair(
        servers,
        {"tp_size": prefill_tp, "page_size": 16, "options": options, "chunked_prefill_size": 64, "environment": shared},
        {"tp_size": decode_tp, "options": options, "environment": shared, "max_total_tokens": 1024},
    )
    draw, asked = random.Random(3), []
    for room in range(1, 31):
        tokens, rid = prompt(draw.randrange(20, 300), room), f"request {room:02}."
        first, second = prefill.begin(tokens, 1, prefill, room, rid), decode.begin(tokens, COUNT, prefill, room, rid)
        gone = draw.random() < 0.33
        if gone:
            time.sleep(draw.uniform(0, 0.1))
            for server in draw.sample([prefill, decode], 2):
                server.abort(rid)
        asked.append((tokens, gone, first, second))
    for tokens, gone, first, second in asked:
        first.result()
        answer = second.result()
        if not gone:
            assert answer["output_ids"] == tokens_of(tokens)
    all_free(prefill, decode)
    assert decode.logged("over mapped")


LAYERED = {"SGLANG_CPU_LAYERS": "0.03"}


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "path", "overlap"),
    [(1, 1, "staged", True), (1, 2, "staged", False), (2, 1, "mapped", True), (2, 1, "staged", False)],
)
def test_layers_are_sent_while_others_are_computed(
    servers: Start, tokens_of: TokensOf, prefill_tp: int, decode_tp: int, path: str, overlap: bool
) -> None:
    """In one chunk and in several; without the rows that decode holds.

    With ``overlap`` a pass begins before SGLang has reported the rows of the last one.

    When SGLang reports the rows of a pass, most of its bytes have been sent. Of requests with one prompt, SGLang's
    radix cache keeps the rows of one, and frees those of the others only once they have been sent.
    """
    environment = LAYERED | ({"SGLANG_CPU_SHARED": "1"} if path == "mapped" else {})
    options = {"verify": "full"}
    prefill, decode = pair(
        servers,
        {
            "tp_size": prefill_tp, "page_size": 16, "chunked_prefill_size": 256, "environment": environment,
            "options": {**options, "strategy": "auto+each_layer"}, "disable_overlap_schedule": not overlap,
        },
        {
            "tp_size": decode_tp, "options": options, "disaggregation_decode_enable_radix_cache": True,
            "environment": environment,
        },
    )  # fmt: skip
    turns = [prompt(150), prompt(400)]
    for room in range(1, 7):
        tokens = turns[room - 1]
        first, answer = serve(prefill, decode, room, tokens, COUNT)
        assert answer.get("output_ids") == tokens_of(tokens), (room, first, answer)
        turns.append([*tokens, *answer["output_ids"], *prompt(40, seed=room)])
    twice = prompt(100, seed=9)
    asked = [
        (tokens, prefill.begin(tokens, 1, prefill, room), decode.begin(tokens, COUNT, prefill, room))
        for room, tokens in enumerate([twice] * 4 + [[*twice, *prompt(20, seed=10)]] * 4, 11)
    ]
    for tokens, first, second in asked:
        first.result()
        assert second.result()["output_ids"] == tokens_of(tokens)
    assert prefill.logged("rows that the radix cache has twice")
    assert not prefill.logged("its pages are free while it is sent")
    all_free(prefill, decode)
    early = early_bytes(prefill)
    rank = ROW_BYTES // prefill_tp
    # All layers but the last two, of which the one is announced when the pass ends, and the other may be on its way.
    assert early[1] >= 150 * rank // 2, early
    assert early[2] >= (256 + 144 // 2) * rank, early
    assert all(early[room] for room in range(1, 7)), early
    assert prefill.logged(f"over {path}")
    assert prefill.logged(f"'disable_overlap_schedule': {not overlap}")


def early_bytes(server: Server) -> dict[int, int]:
    """Bytes of each room that a rank had sent when SGLang reported the last rows."""
    found = re.findall(r"room (\d+): (\d+) bytes were sent early", server.log.read_text())
    return {int(room): int(nbytes) for room, nbytes in found}


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(2, 1), (1, 2)])
def test_data_parallel_ranks(servers: Start, tokens_of: TokensOf, of_prefill: int, of_decode: int) -> None:
    """Each request has one of prefill's data-parallel ranks, by its room, and any of decode's."""
    options = {"verify": "full"}
    sizes = [{"dp_size": count} if count > 1 else {} for count in (of_prefill, of_decode)]
    prefill, decode = pair(servers, {"options": options, **sizes[0]}, {"options": options, **sizes[1]})
    for room, length in enumerate(LENGTHS, 1):
        first, second = serve(prefill, decode, room, prompt(length), COUNT)
        assert second.get("output_ids") == tokens_of(prompt(length)), (length, first, second)
    all_free(decode)
    two = prefill if of_prefill > 1 else decode
    assert all(two.logged(f"DP{number}] room") for number in range(2))


def test_swapped_heads_give_other_tokens(servers: Start, tokens_of: TokensOf) -> None:
    """The comparison above can fail."""
    prefill, decode = pair(servers, {}, {"environment": {"SGLANG_CPU_SWAP": "1"}})
    _, answer = serve(prefill, decode, 1, prompt(150), COUNT)
    assert len(answer["output_ids"]) == COUNT
    assert answer["output_ids"] != tokens_of(prompt(150))


@pytest.mark.parametrize(("prefill_tp", "page"), [(1, 1), (2, 16)])
def test_rows_in_the_radix_cache_of_decode_are_not_sent_again(
    servers: Start, tokens_of: TokensOf, prefill_tp: int, page: int
) -> None:
    """A conversation of three turns: the bytes on the wire are those of the suffix, whatever prefill's page size."""
    prefill, decode = pair(
        servers,
        {"tp_size": prefill_tp, "page_size": page},
        {"disaggregation_decode_enable_radix_cache": True, "options": {"verify": "full"}},
    )
    turns = [prompt(100)]
    for room in range(1, 4):
        _, answer = serve(prefill, decode, room, turns[-1], COUNT)
        assert answer["output_ids"] == tokens_of(turns[-1])
        turns.append([*turns[-1], *answer["output_ids"], *prompt(20, seed=room)])
    held = [0, 100 + COUNT - 1, 132 + COUNT - 1]  # the last token of an answer has no rows
    assert sent_bytes(prefill) == [(len(turn) - known) * ROW_BYTES for turn, known in zip(turns, held, strict=False)]


@pytest.mark.parametrize("layers", [False, True])
def test_no_page_is_stranded_by_aborts(servers: Start, tokens_of: TokensOf, layers: bool) -> None:
    """50 requests, a third of which the client aborts at any time; with layers, prefill has its radix cache.

    An abort that overtakes its request is lost in SGLang. If the other side has ended, the request ends at ``total_s``.
    """
    options: dict[str, Any] = {"options": {"total_s": 20}}
    of_prefill = {**options, "disable_radix_cache": not layers, "chunked_prefill_size": 64}
    if layers:
        of_prefill |= {
            "options": {"total_s": 20, "strategy": "auto+each_layer"}, "environment": {"SGLANG_CPU_LAYERS": "0.003"},
            "disable_overlap_schedule": False,
        }  # fmt: skip
    prefill, decode = pair(servers, of_prefill, options)
    draw, asked = random.Random(5), []
    for room in range(1, 51):
        same = prompt(400, seed=3)[: draw.randrange(200)] if layers else []
        tokens, rid = [*same, *prompt(draw.randrange(20, 200 if same else 400), room)], f"request {room:02}."
        first, second = prefill.begin(tokens, 1, prefill, room, rid), decode.begin(tokens, COUNT, prefill, room, rid)
        gone = draw.random() < 0.33
        if gone:
            time.sleep(draw.uniform(0, 0.05))
            for server in draw.sample([prefill, decode], 2):
                server.abort(rid)
        elif draw.random() < 0.3:
            second.result()
        asked.append((tokens, gone, first, second))
    kept = 0
    for tokens, gone, first, second in asked:
        first.result()
        answer = second.result()
        if not gone:
            kept += 1
            assert answer["output_ids"] == tokens_of(tokens)
    assert kept > 20
    all_free(prefill, decode)
    assert not prefill.logged("its pages are free while it is sent")


def test_prefill_is_killed_and_started_again(servers: Start, tokens_of: TokensOf) -> None:
    """At the same bootstrap address. Requests in between end with an error that says who; later ones are served."""
    prefill, decode = pair(servers, {}, {})
    assert serve(prefill, decode, 1, prompt(50), COUNT)[1]["output_ids"] == tokens_of(prompt(50))
    prefill.kill()
    waiting = decode.begin(prompt(60), COUNT, prefill, 2)
    answer = waiting.result()
    assert answer["object"] == "error", answer
    assert re.search(
        rf"its process has ended|reports its end|no process listens there|127\.0\.0\.1:{prefill.bootstrap}",
        answer["message"],
    )
    again = servers("again", "prefill", bootstrap=prefill.bootstrap).ready()
    assert serve(again, decode, 3, prompt(70), COUNT)[1]["output_ids"] == tokens_of(prompt(70))
    all_free(decode)


def test_a_prefill_server_that_ends_within_a_step_is_no_question_of_ranks() -> None:
    """SGLang looks it up twice in a step. If it is there first and then not, SGLang asks which rank has a request.

    No bootstrap server of this backend answers that, so the decode server would end.
    """
    command = f"from {__name__} import look_twice; look_twice()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", command], env=on_cpu(), cwd=ROOT / "tests", check=True)


def look_twice() -> None:
    """SGLang's own step, with a prefill server that is lost after the first look."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    from disagg_kv.engines.sglang.bootstrap import _Place
    from disagg_kv.engines.sglang.plugin import DisaggKVManager
    from disagg_kv.engines.sglang.side import Side
    from disagg_kv.rendezvous import Source

    source, left = Source("sglang prefill", ("unix:///a",)), [SimpleNamespace(instance="sglang prefill", state="idle")]
    endpoint: Any = SimpleNamespace(closed=False, peers=lambda: [left.pop()] if left else [])
    manager = object.__new__(DisaggKVManager)
    manager.side = Side(endpoint, 1)
    manager.prefill_info_table = manager
    manager.side.directory._places["127.0.0.1:8998"] = _Place((source,))
    manager.side._met[source.instance] = 1
    queue: Any = object.__new__(DecodePreallocQueue)
    queue.kv_manager, queue._prefill_dp_rank_queries = manager, {}
    request = SimpleNamespace(
        bootstrap_host="127.0.0.1", bootstrap_port=8998, bootstrap_room=1, disagg_prefill_dp_rank=None
    )
    queue.pending_reqs = [SimpleNamespace(req=request)]
    queue.prefetch_prefill_dp_rank_queries()
    assert not queue._prefill_dp_rank_queries


def test_bad_requests_end_in_a_named_error(plain: tuple[Server, Server], tokens_of: TokensOf) -> None:
    """A room that was used before; another prompt on prefill, shorter or not. The next request is served."""
    prefill, decode = plain
    assert serve(prefill, decode, 1, prompt(50), COUNT)[1]["output_ids"] == tokens_of(prompt(50))
    first, second = serve(prefill, decode, 1, prompt(50), COUNT)
    assert "was used already" in str(first)
    assert "was used already" in str(second)
    for room, other in ((2, prompt(49)), (3, prompt(50, seed=1))):
        rid = f"other {room}."
        waits = prefill.begin(other, 1, prefill, room, rid)
        assert "prefill's tag" in str(decode.begin(prompt(50), COUNT, prefill, room).result())
        prefill.abort(rid)
        waits.result()
    assert serve(prefill, decode, 4, prompt(51), COUNT)[1]["output_ids"] == tokens_of(prompt(51))
    all_free(decode)


def test_the_router_of_the_example_answers_over_http(plain: tuple[Server, Server], tokens_of: TokensOf) -> None:
    """Also streamed, and with a room of the client, which the router replaces."""
    router = Router(*plain)
    try:
        for number in range(3):
            body = {"input_ids": prompt(60 + number), "sampling_params": SAMPLING, "bootstrap_room": 7}
            assert router.call("POST", "/generate", body)["output_ids"] == tokens_of(prompt(60 + number))
        streamed = router.call("POST", "/generate", {**body, "stream": True})
        parts = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert len(parts) > 1
        assert parts[-1]["output_ids"][-1] == tokens_of(prompt(62))[-1]
    finally:
        router.close()
    all_free(plain[1])


def test_sglangs_benchmark_client_is_served(model: Path, tmp_path: Path) -> None:
    """Conversations over OpenAI's API, through the router: all requests are answered."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    run = (sys.executable, "-W", "ignore", "-m", "benchmarks.engines_gpu.serving", "--cpu", "--pairs", "ours")
    given = {"model": copy, "block": 16, "tokens": 60, "answer": 8, "requests": 5, "turns": 3, "reps": 1}
    options = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    subprocess.run([*run, *options, "--out", str(tmp_path)], cwd=ROOT, env=on_cpu(), check=True)
    found = json.loads((tmp_path / "serving.json").read_text())
    assert (found["ok"], found["equal"], found["left_out"]) == (True, {"ours": 15}, [])
    assert {len(of["request_throughput"]) for of in found["rounds"]["ours"].values()} == {1}


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({"strategy": "direct"}, {}, "a network reads pages"),
        ({"stratgy": "auto"}, {}, "stratgy"),
        ({}, {"pp_size": 2}, "pipeline parallelism (a rank has some of the layers"),
        ({}, {"tp_size": 2, "attn_dp_size": 2}, "data-parallel attention (SGLang does not run it on CPUs"),
        ({}, {"allow_auto_truncate": True}, "automatic truncation (each server would cut"),
    ],
)
def test_a_wrong_option_is_named_at_the_start(
    servers: Start, options: dict[str, Any], args: dict[str, Any], message: str
) -> None:
    server = servers("wrong", "prefill", options=options, **args)
    with pytest.raises(AssertionError, match="has ended"):
        server.ready()
    assert server.logged(message)


YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
"""SGLang's CPU backend runs DeepSeek models with scaled rotation only."""


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose cache has MLA's latents."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, initializer_range=0.15, tie_word_embeddings=False,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, q_lora_rank=64,
        first_k_dense_replace=3, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=64, rope_parameters=YARN,
    )  # fmt: skip
    config.update({"moe_layer_freq": 1})  # SGLang reads it, as the released models have it
    folder = tmp_path_factory.mktemp("latents")
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


def windows(kind: str, folder: Path) -> Path:
    """A model with a window of 64 tokens, in all layers or all but every other, of which SGLang keeps all rows."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "sliding_window": 64,
        "initializer_range": 0.15, "tie_word_embeddings": kind == "gemma3",
    }  # fmt: skip
    made: Any = (
        MistralForCausalLM(MistralConfig(**common))
        if kind == "mistral"
        else Gemma3ForCausalLM(
            Gemma3TextConfig(
                **common, query_pre_attn_scalar=32, layer_types=["sliding_attention", "full_attention"] * 2
            )
        )
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "layernorm" in name and "post_" in name and kind == "gemma3":
                weight.fill_(6)  # else the last token decides alone
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_windows_of_which_all_rows_are_kept(servers: Start, tmp_path: Path, kind: str) -> None:
    """They are pages like others."""
    model = windows(kind, tmp_path / "windows")
    alone = servers("alone", model=model).ready()
    wanted = {length: alone.begin(prompt(length), COUNT).result()["output_ids"] for length in LENGTHS}
    alone.close()
    assert len({token for tokens in wanted.values() for token in tokens}) > COUNT, (
        "other rows would give the same tokens"
    )
    options = {"verify": "full"}
    prefill, decode = pair(
        servers,
        {"page_size": 16, "options": options, "chunked_prefill_size": 64, "model": model},
        {"options": options, "model": model},
    )
    for room, length in enumerate(LENGTHS, 1):
        assert serve(prefill, decode, room, prompt(length), COUNT)[1]["output_ids"] == wanted[length]
    all_free(decode)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "strategy"), [(1, 1, "auto"), (1, 2, "auto"), (2, 1, "auto+each_layer")]
)
def test_latents(servers: Start, latents: Path, prefill_tp: int, decode_tp: int, strategy: str) -> None:
    """Every rank of a server holds the same latents."""
    environment = {"SGLANG_CPU_LATENTS": "1", "SGLANG_CPU_LAYERS": "0.003"}
    common: dict[str, Any] = {"model": latents, "environment": environment}
    alone = servers("alone", **common).ready()
    wanted = {length: alone.begin(prompt(length), COUNT).result()["output_ids"] for length in LENGTHS}
    alone.close()
    options = {"verify": "full"}
    prefill, decode = pair(
        servers,
        {
            "tp_size": prefill_tp, "page_size": 16, "options": {**options, "strategy": strategy},
            "chunked_prefill_size": 64, **common,
        },
        {"tp_size": decode_tp, "options": options, **common},
    )  # fmt: skip
    for room, length in enumerate(LENGTHS, 1):
        assert serve(prefill, decode, room, prompt(length), COUNT)[1]["output_ids"] == wanted[length]
    assert prefill.logged("in 3 groups of layers") == (strategy != "auto")
