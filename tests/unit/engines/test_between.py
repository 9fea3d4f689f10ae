"""A cache of SGLang and one of vLLM's CPU backend: rows cross bit by bit, and what differs is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch

from disagg_kv import DecodeEndpoint, Expectation, PageTable, Phase, PrefillEndpoint, Source, room_id, transport
from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.engines.common import CommonCache, common_cache
from disagg_kv.engines.model import prompt_tag
from disagg_kv.engines.sglang import cache as sglang
from disagg_kv.engines.sglang.bootstrap import _Place
from disagg_kv.engines.sglang.rooms import Poll, ReceiverRoom, SenderRoom
from disagg_kv.engines.sglang.side import Side
from disagg_kv.engines.vllm import cache as vllm
from disagg_kv.engines.vllm.params import Origin
from disagg_kv.engines.vllm.work import Chunk, Load, StepWork
from disagg_kv.engines.vllm.worker import WorkerSide
from disagg_kv.errors import DisaggKVError, IncompatiblePeerError
from disagg_kv.ids import KV, LayerId
from disagg_kv.memory import PagedPool
from disagg_kv.rendezvous import RequestRendezvous, StaticRendezvous
from tests.support.processes import wait
from tests.support.sglang_like import described

HEADS, DIM, BLOCK, LAYERS, TOKENS = 4, 8, 32, 2, 70
ROOM, FIRST, AT = 7, 345, "127.0.0.1:8998"
PROMPT = [*range(TOKENS)]
ADDRESSES = {"P": ["inproc://P0", "inproc://P1"], "D": ["inproc://D0", "inproc://D1"]}
CACHE = common_cache(
    {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "num_attention_heads": 8,
        "num_key_value_heads": HEADS, "head_dim": DIM, "rope_theta": 10000.0,
    },
    "a model", None, "float32",
)  # fmt: skip

F32 = npt.NDArray[np.float32]


@pytest.mark.parametrize("tiles", [True, False])
def test_own_descriptions_are_refused_by_name(tiles: bool) -> None:
    """``tiles``: the CPU backend, whose blocks are never cut; else K and V of a token and head are one piece."""
    hub, where = Hub(), StaticRendezvous()
    arrays = [np.zeros((256, HEADS, DIM), np.float32) for _ in range(4)]
    rows = [np.zeros((4, 16), np.int32)]
    ours, _ = sglang.pool_of(
        described(arrays, HEADS * DIM * 4), described(rows), page=1, heads=HEADS, latent=False, dtype="float32", tp=1,
        rank=0, model=b"m", device="cpu",
    )  # fmt: skip
    shapes = [vllm.LayerShape(str(n), KV, HEADS, None, "vllm kv of a block none") for n in range(2)]
    tensors = {str(n): torch.zeros(8, HEADS, BLOCK, 2 * DIM) for n in range(2)}
    theirs, _ = vllm.pool_of(
        shapes, tensors, blocks=8, block=BLOCK, row=BLOCK if tiles else 1, tp=1, rank=0, model=b"m"
    )  # fmt: skip
    assert "spec.layers[0]: ours is ['kv'], theirs is ['k', 'v']" in str(refusal(hub, where, ours, theirs))


def refusal(hub: Hub, where: StaticRendezvous, ours: PagedPool, theirs: PagedPool) -> DisaggKVError | None:
    """Why a room between two pools fails."""
    prefill = PrefillEndpoint(
        ours, transport=transport("inproc"), channel=InprocChannel(hub, "p"), rendezvous=where, instance="P"
    )
    decode = DecodeEndpoint(
        theirs, transport=transport("inproc"), channel=InprocChannel(hub, "d"), rendezvous=where, instance="D"
    )
    try:
        prefill.open(room_id("room"))
        reception = decode.open(room_id("room"), Source("P"))
        reception.expect(Expectation(None, [PageTable(KV, [1], 0)]))
        wait(lambda: reception.phase is Phase.FAILED, lambda: str(reception.phase))
        return reception.error
    finally:
        decode.close()
        prefill.close()


class Rank:
    """A rank of either engine: its memory, and the right rows of its heads ``[layers, 2, tokens, heads, DIM]``."""

    def __init__(self, cache: CommonCache, tp: int, rank: int) -> None:
        local = HEADS // tp
        self.heads = slice(rank * local, (rank + 1) * local)
        self.cache, self.tp, self.rank, self.local = cache, tp, rank, local

    def cells(self) -> list[F32]:
        """All memory."""
        raise NotImplementedError

    def written(self, rows: F32) -> list[F32]:
        """What the memory is with these rows, and zeros elsewhere."""
        raise NotImplementedError

    def compute(self, rows: F32) -> None:
        """The engine writes the rows."""
        for mine, right in zip(self.cells(), self.written(rows[:, :, :, self.heads]), strict=True):
            mine[:] = right

    def right(self, rows: F32) -> bool:
        """Whether these rows have arrived, and nothing else."""
        both = zip(self.cells(), self.written(rows[:, :, :, self.heads]), strict=True)
        return all(np.array_equal(mine, right) for mine, right in both)


class OfSGLang(Rank):
    """K, then V, of each layer, ``[tokens, heads, DIM]``."""

    def __init__(self, cache: CommonCache, tp: int, rank: int, page: int = 1) -> None:
        super().__init__(cache, tp, rank)
        self.page, draw = page, np.random.default_rng(3)
        self.pages = (draw.permutation(200 // page - 1) + 1)[: -(-TOKENS // page)].astype(np.int32)
        self.slots = (self.pages[:, None] * page + np.arange(page)).reshape(-1)[:TOKENS]
        self.arrays = [np.zeros((200 // page * page, self.local, DIM), np.float32) for _ in range(2 * LAYERS)]
        self.tokens, self.room = np.ones((4, 16), np.int32), np.ones((4, 8), np.uint64)
        self.pool, self.shards = sglang.common_pool_of(
            cache, described(self.arrays, page * self.local * DIM * 4), described([self.tokens, self.room]),
            page=page, tp=tp, rank=rank, device="cpu",
        )  # fmt: skip

    def cells(self) -> list[F32]:
        return self.arrays

    def written(self, rows: F32) -> list[F32]:
        out = [np.zeros_like(one) for one in self.arrays]
        for layer, half in itertools.product(range(LAYERS), range(2)):
            out[half * LAYERS + layer][self.slots] = rows[layer, half]
        return out


class OfVLLM(Rank):
    """Of each layer ``[blocks, heads, 2, BLOCK * DIM]``: K as ``[DIM, BLOCK]``, V as ``[BLOCK, DIM]``."""

    def __init__(self, cache: CommonCache, tp: int, rank: int) -> None:
        super().__init__(cache, tp, rank)
        self.blocks = [5, 2, 7]
        dtype: torch.dtype = getattr(torch, cache.dtype)
        self.tensors = {str(n): torch.zeros(8, self.local, BLOCK, 2 * DIM, dtype=dtype) for n in range(LAYERS)}
        shapes = [vllm.LayerShape(name, KV, HEADS, None, "") for name in self.tensors]
        self.pool, self.shards = vllm.common_pool_of(
            cache, shapes, self.tensors, blocks=8, block=BLOCK, tp=tp, rank=rank
        )

    def cells(self) -> list[F32]:
        return [one.float().numpy() for one in self.tensors.values()]

    def written(self, rows: F32) -> list[F32]:
        out = [np.zeros_like(one).reshape(8, self.local, 2, -1) for one in self.cells()]
        for layer, at, head in itertools.product(range(LAYERS), range(TOKENS), range(self.local)):
            k, v = out[layer][self.blocks[at // BLOCK], head]
            k.reshape(DIM, BLOCK)[:, at % BLOCK] = rows[layer, 0, at, head]
            v.reshape(BLOCK, DIM)[at % BLOCK] = rows[layer, 1, at, head]
        return [one.reshape(8, self.local, BLOCK, 2 * DIM) for one in out]


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as found:
        yield found


def endpoints(ends: ExitStack, hub: Hub, ranks: Sequence[Any], name: str) -> list[Any]:
    """The endpoints of an instance, prefill's ``P`` or decode's ``D``."""
    made = []
    for rank, one in enumerate(ranks):
        meeting = RequestRendezvous()
        kind: Any = PrefillEndpoint if name == "P" else DecodeEndpoint
        common: dict[str, Any] = {"instance": name, "rank": rank, "shards": one.shards, "rendezvous": meeting}
        common |= {"transport": transport("inproc"), "channel": InprocChannel(hub, f"{name}{rank}")}
        made.append(kind(one.pool, strategy="staged+incremental", verify="full", **common))
        meeting.learn(name, ADDRESSES[name][: len(ranks)])
        ends.callback(made[-1].close)
    return made


PREFILL = pytest.mark.parametrize(("tps", "page"), [((1, 1), 1), ((2, 1), 16), ((1, 2), 16)])


@PREFILL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sglang_prefills_and_vllm_decodes(ends: ExitStack, tps: tuple[int, int], page: int, dtype: str) -> None:
    """A router names the room to vLLM as the plug-in does. The first token travels too; vLLM computes it anew.

    ``dtype``: of vLLM's cache; SGLang's is float32, and converted on the way.
    """
    hub, rows = Hub(), np.random.default_rng(3).random((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)
    ours = [OfSGLang(CACHE, tps[0], rank, page) for rank in range(tps[0])]
    theirs = [OfVLLM(attrs.evolve(CACHE, dtype=dtype), tps[1], rank) for rank in range(tps[1])]
    senders = [
        SenderRoom(Side(one, page), ROOM) for one in endpoints(ends, hub, ours, "P")
    ]  # fmt: skip
    workers = [WorkerSide(None, one, {}) for one in endpoints(ends, hub, theirs, "D")]
    origin = Origin(f"sglang {ROOM}", Source("P", ADDRESSES["P"][: tps[0]]))
    load = Load(origin, TOKENS, ((KV, tuple(theirs[0].blocks), 0),), {}, prompt_tag(PROMPT))
    for worker in workers:
        worker.begin(StepWork(loads={"r": load}, idle=True))
    wait(lambda: {one.poll() for one in senders} == {Poll.WAITING_FOR_INPUT}, lambda: "vLLM's request")
    for one, sender in zip(ours, senders, strict=True):
        one.compute(rows)
        assert sender.pop_decode_prefix_len() == 0
        sender.init(len(one.pages), 1)
        sender.send(one.pages, None, TOKENS)
    received = [set[str]() for _ in workers]

    def arrived() -> bool:
        for worker, found in zip(workers, received, strict=True):
            results = worker.results(set())
            assert not results.failed
            found |= results.received
        return all(received)

    wait(arrived, lambda: str(received))
    wait(lambda: {one.poll() for one in senders} == {Poll.SUCCESS}, lambda: "SGLang's end")
    rows = torch.from_numpy(rows).to(getattr(torch, dtype)).float().numpy()
    assert all(one.right(rows) for one in theirs)


@PREFILL
def test_vllm_prefills_and_sglang_decodes(ends: ExitStack, tps: tuple[int, int], page: int) -> None:
    """A router takes the first token from vLLM's answer; the plug-in writes it where SGLang reads it."""
    hub, rows = Hub(), np.random.default_rng(3).random((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)
    ours = [OfVLLM(CACHE, tps[0], rank) for rank in range(tps[0])]
    theirs = [OfSGLang(CACHE, tps[1], rank, page) for rank in range(tps[1])]
    workers = [WorkerSide(one, None, {}) for one in endpoints(ends, hub, ours, "P")]
    decodes = endpoints(ends, hub, theirs, "D")
    receivers = [receiver(end, one, tps[0], FIRST) for end, one in zip(decodes, theirs, strict=True)]
    for one in ours:
        one.compute(rows)
    for start, stop in ((0, 40), (40, TOKENS)):
        first = start // BLOCK
        pages = ((KV, tuple(ours[0].blocks[first : -(-stop // BLOCK)]), first * BLOCK),)
        for worker in workers:
            chunk = Chunk(f"sglang {ROOM}", stop, stop - start, pages, stop == TOKENS, prompt_tag(PROMPT))
            worker.begin(StepWork(chunks={"r": chunk}))
            worker.end()
    wait(lambda: {one.poll() for one in receivers} == {Poll.SUCCESS}, lambda: str([one.poll() for one in receivers]))
    for end, rank in zip(receivers, theirs, strict=True):
        assert rank.right(rows)
        assert (rank.tokens[2].tolist(), rank.room[2].tolist()) == ([FIRST, *[0] * 15], [ROOM, *[0] * 7])
        assert (rank.tokens[1] == 1).all()
        end.clear()


def receiver(
    end: DecodeEndpoint, rank: OfSGLang, tp: int, first: int | None, prompt: Sequence[int] = PROMPT, rows: bool = True
) -> ReceiverRoom:
    """A request that SGLang's decode server has, with its pages."""
    side = Side(end, rank.page, pool=rank.pool if rows else None)
    side.directory._places[AT] = _Place((Source("P", ADDRESSES["P"][:tp]),))
    room = ReceiverRoom(side, AT, ROOM)
    room.asked(prompt, None, first)
    room.init(0)
    room.send_metadata(rank.pages, 2)
    return room


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"first": None}, "an aux row is awaited, and prefill gave none"),
        ({"first": FIRST, "rows": False}, "needs description 'common' in this server"),
        ({"first": 1 << 40}, "token 1099511627776 is no int32"),
        ({"first": FIRST, "prompt": PROMPT[::-1]}, "prefill's tag"),
    ],
)
def test_a_request_that_cannot_be_right_fails_by_name(ends: ExitStack, given: dict[str, Any], message: str) -> None:
    """No first token; a server that describes its cache as its own; no token; another prompt of equal length."""
    hub, ours, theirs = Hub(), OfVLLM(CACHE, 1, 0), OfSGLang(CACHE, 1, 0)
    (sender,), (end,) = endpoints(ends, hub, [ours], "P"), endpoints(ends, hub, [theirs], "D")
    worker = WorkerSide(sender, None, {})
    room = receiver(end, theirs, 1, **given)
    chunk = Chunk(f"sglang {ROOM}", TOKENS, TOKENS, ((KV, tuple(ours.blocks), 0),), True, prompt_tag(PROMPT))
    worker.begin(StepWork(chunks={"r": chunk}))
    worker.end()
    wait(lambda: room.poll() is Poll.FAILED, lambda: str(room.poll()))
    with pytest.raises(DisaggKVError, match=message):
        room.failure_exception()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rotation": "rotated by halves: default, rope_theta 500000.0"}, "spec.layers[0].k of head 0.format"),
        ({"dim": 16}, "spec.layers[0].k of head 0.units"),
        ({"dtype": "int32"}, "spec.layers[0].k of head 0.dtype"),
        ({"heads": 2}, "spec.layers[0]"),
        ({"layers": 1}, "spec.layers"),
        ({"model": b"other weights"}, "spec.model"),
    ],
)
def test_caches_of_other_numbers_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    """Even where the model's digest differs, too: it says less."""
    other = attrs.evolve(CACHE, **{"model": b"other weights", **changes})
    ours = OfSGLang(CACHE, 1, 0).pool
    dtype = getattr(torch, other.dtype)
    tensors = {str(n): torch.zeros(8, other.heads, BLOCK, 2 * other.dim, dtype=dtype) for n in range(other.layers)}
    shapes = [vllm.LayerShape(name, KV, other.heads, None, "") for name in tensors]
    theirs, _ = vllm.common_pool_of(other, shapes, tensors, blocks=8, block=BLOCK, tp=1, rank=0)
    error = refusal(Hub(), StaticRendezvous(), ours, theirs)
    assert isinstance(error, IncompatiblePeerError)
    assert error.field == field
    assert LayerId(0) in other.spec.layers
