"""A small engine that drives the connector for vLLM as vLLM 0.32 does, in one process and without vLLM.

Its requests, configurations and specs have the attributes that the connector reads. The order of hooks, the states of a
request and the rules of freeing blocks are those of ``vllm/v1/core/sched/scheduler.py``. Blocks that the engine frees
are overwritten at once, so a transfer that still reads them gives wrong bytes, and one that still writes them is found.

The cache groups lie in the same bytes, as ``get_kv_cache_config_from_groups`` and ``allocate_kv_cache`` of vLLM 0.32
allocate them: layer ``i`` of every group is layer ``i`` of one allocation.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from attrs import define, field

from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.core import Options, Verify
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.engines.opening import decode_name, selecting
from disagg_kv.engines.vllm.cache import pool_of
from disagg_kv.engines.vllm.host import EngineFacts, facts
from disagg_kv.engines.vllm.scheduler import SchedulerSide
from disagg_kv.engines.vllm.work import StepWork
from disagg_kv.engines.vllm.worker import WorkerSide
from disagg_kv.ids import LayerId
from disagg_kv.rendezvous import RequestRendezvous
from disagg_kv.transports import between_processes
from tests.support.vllm_requests import BlockTables, Request, Status
from tests.support.vllm_states import MambaSpec, States

POISON = -1.0
BYTES = 1 << 18
LIMIT_S = 20.0


@define
class FullAttentionSpec:
    """A spec known by its class name."""

    block_size: int
    num_heads: int
    sliding_window: int | None = None
    kv_quant_mode: Any = None
    head_size: int = 5
    head_size_v: int = 3
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1


class SlidingWindowSpec(FullAttentionSpec):
    """A spec known by its class name."""


class MLAAttentionSpec(FullAttentionSpec):
    """A spec known by its class name."""


class CrossAttentionSpec(FullAttentionSpec):
    """A spec that the connector does not know."""


@define
class Model:
    """What both instances share. ``groups``: per cache group the spec class, layer numbers and window."""

    heads: int = 4
    dim: int = 8
    groups: Sequence[tuple[type[FullAttentionSpec | MambaSpec], Sequence[int], int | None]] = (
        (FullAttentionSpec, (0, 1, 2), None),
    )
    states: States = field(factory=States)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(len(layers) for _, layers, _ in self.groups)


MLA = Model(heads=1, dim=12, groups=((MLAAttentionSpec, (0, 1), None),))
TWO_GROUPS = Model(groups=((FullAttentionSpec, (0, 2), None), (SlidingWindowSpec, (1, 3), 6)))
HYBRID = Model(groups=((MambaSpec, (0, 2), None), (FullAttentionSpec, (1, 4), None), (MambaSpec, (3,), None)))
THREE_GROUPS = Model(
    groups=((SlidingWindowSpec, (0, 3), 6), (SlidingWindowSpec, (1, 4), 6), (FullAttentionSpec, (2,), None))
)


def layer_name(number: int) -> str:
    """As vLLM names layers."""
    return f"model.layers.{number}.self_attn.attn"


def local_heads(model: Model, tp: int) -> int:
    """Of a rank."""
    return max(1, model.heads // tp)


def configs(model: Model, instance: str, *, tp: int = 1, block: int = 4, blocks: int = 33) -> Any:
    """``VllmConfig`` and ``KVCacheConfig``."""
    vllm = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=1, decode_context_parallel_size=1, use_ubatching=False
        ),
        model_config=SimpleNamespace(
            model="some/model",
            hf_config=SimpleNamespace(to_dict=lambda: {"layers": model.layers, "_name_or_path": instance}),
            hf_text_config=SimpleNamespace(mamba_n_groups=model.states.groups),
            dtype=torch.float16,
            quantization=None,
            revision=None,
            hf_overrides={},
            enable_sleep_mode=False,
            get_total_num_kv_heads=lambda: model.heads,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_transfer_config=SimpleNamespace(engine_id=instance),
        speculative_config=None,
    )
    groups = [
        SimpleNamespace(
            layer_names=[layer_name(number) for number in layers],
            kv_cache_spec=kind(block, local_heads(model, tp), window)
            if issubclass(kind, FullAttentionSpec)
            else model.states.spec(tp),
        )
        for kind, layers, window in model.groups
    ]
    cache = SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=groups,
        transfer_group_ids=list(range(len(groups))),
        has_mixed_precision_kv_cache=False,
    )
    return vllm, cache


def truth(layer: int, heads: Sequence[int], tokens: Sequence[int], start: int, dim: int) -> torch.Tensor:
    """``[tokens, heads, dim]`` of the tokens from ``start`` on; each value depends on all of them."""
    ids = torch.tensor(tokens[start:])[:, None, None]
    at = torch.arange(start, len(tokens))[:, None, None]
    head = torch.tensor(list(heads))[None, :, None]
    return ((ids * 7 + at * 13 + layer * 29 + head * 5 + torch.arange(dim) * 3) % 1999).to(torch.float16)


class Engine:
    """One instance: a scheduler and its ranks.

    Args:
        hub: the network.
        instance: its name.
        tp: number of ranks.
        tiles: a row is a block, as on a CPU.
        blocks: of the cache; block 0 is the null block.
        budget: most tokens of a step.
        max_tokens: of an output.
        interleaved: the layers of a group lie side by side in each block, else one after the other.
    """

    def __init__(
        self,
        hub: Hub,
        instance: str,
        *,
        model: Model,
        tp: int = 1,
        tiles: bool = False,
        produces: bool = True,
        consumes: bool = True,
        block: int = 4,
        blocks: int = 33,
        budget: int = 1 << 20,
        max_tokens: int = 1,
        interleaved: bool = False,
        strategy: str = "auto",
        carrier: str = "inproc",
        verify: Verify = "off",
        options: Options | None = None,
    ) -> None:
        vllm, cache = configs(model, instance, tp=tp, block=block, blocks=blocks)
        self.model, self.tp, self.budget, self.max_tokens = model, tp, budget, max_tokens
        self.facts: EngineFacts = facts(vllm, cache, tiles=tiles, channels_first=model.states.channels_first)
        self.side = SchedulerSide(
            instance, self.facts.groups, produces=produces, consumes=consumes, total_s=(options or Options()).total_s
        )
        self.layered = "layer_pipelined" in strategy
        self.ranks: list[WorkerSide] = []
        self.senders: list[PrefillEndpoint] = []
        self.receivers: list[DecodeEndpoint] = []
        self.tensors: list[dict[str, Any]] = []
        meetings = [RequestRendezvous() for _ in range(tp)]
        names = {layer.name: LayerId(number) for number, layer in enumerate(self.facts.layers)}
        for rank in range(tp):
            tensors = self._allocation(blocks, block, interleaved=interleaved)
            pool, shards = pool_of(
                self.facts.layers, tensors, blocks=blocks, block=block, row=self.facts.row, tp=tp, rank=rank,
                model=self.facts.model,
            )  # fmt: skip
            common: dict[str, Any] = {
                "rank": rank, "shards": shards, "rendezvous": meetings[rank], "verify": verify, "options": options,
            }  # fmt: skip
            sender = receiver = None
            if produces:
                sender = PrefillEndpoint(
                    pool, instance=instance, strategy=selecting(strategy), slot_bytes=BYTES // 8,
                    transport=between_processes(carrier), channel=InprocChannel(hub, f"{instance}-p{rank}"), **common,
                )  # fmt: skip
                self.senders.append(sender)
            if consumes:
                receiver = DecodeEndpoint(
                    pool, instance=decode_name(instance), strategy=selecting(strategy),
                    ring_bytes=BYTES, transport=between_processes(carrier),
                    channel=InprocChannel(hub, f"{instance}-d{rank}"), **common,
                )  # fmt: skip
                self.receivers.append(receiver)
            self.tensors.append({
                name: self.model.states.views(of, tp) if of.dtype is torch.int8 else of for name, of in tensors.items()
            })  # fmt: skip
            self.ranks.append(WorkerSide(sender, receiver, names, claim_s=(options or Options()).claim_s))
        for meeting in meetings:
            if produces:
                meeting.learn(instance, [f"inproc://{instance}-p{rank}" for rank in range(tp)])
            if consumes:
                meeting.learn(decode_name(instance), [f"inproc://{instance}-d{rank}" for rank in range(tp)])
        self.addresses = [f"inproc://{instance}-p{rank}" for rank in range(tp)] if produces else []
        self.side.meet(self.addresses)
        self.free = list(range(blocks - 1, 0, -1))
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.ended: set[str] = set()
        self.reports: Counter[tuple[str, str]] = Counter()
        self.loaded: list[str] = []
        self.not_loaded: list[str] = []
        self.params: dict[str, dict[str, Any] | None] = {}
        self.chunks: list[tuple[str, int, bool]] = []
        self._poison_later: list[int] = []

    def _allocation(self, blocks: int, block: int, *, interleaved: bool) -> dict[str, torch.Tensor]:
        """The tensor of each layer; groups share the memory."""
        shape = [local_heads(self.model, self.tp), block, self.model.dim]
        if self.model.groups[0][0] is MLAAttentionSpec:
            shape = shape[1:]
        deepest = max(len(layers) for _, layers, _ in self.model.groups)
        outer = [blocks, deepest] if interleaved else [deepest, blocks]
        memory = torch.full((*outer, *shape), POISON, dtype=torch.float16)
        cells = {
            layer_name(layer): (kind, memory.select(1 if interleaved else 0, place))
            for kind, layers, _ in self.model.groups
            for place, layer in enumerate(layers)
        }
        return {
            name: of.view(torch.int8).flatten(1)[:, None, None] if kind is MambaSpec else of
            for name, (kind, of) in cells.items()
        }

    def _has_states(self, group: int) -> bool:
        return self.model.groups[group][0] is MambaSpec

    # The rows in the tensors.

    def _heads(self, rank: int) -> range:
        local = local_heads(self.model, self.tp)
        first = rank * local if self.model.heads >= self.tp else rank * self.model.heads // self.tp
        return range(1) if self.model.heads == 1 else range(first, first + local)

    def _layers(self) -> list[tuple[int, int, int | None]]:
        """Number, group and window of each layer, in the order of the model."""
        every = [(n, group, window) for group, (_, layers, window) in enumerate(self.model.groups) for n in layers]
        return sorted(every)

    def _cells(self, rank: int, layer: int, ids: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, Any]:
        """The tensor ``[blocks, heads, tokens, content]``, and the index of the tokens."""
        tensor, block = self.tensors[rank][layer_name(layer)], self.facts.block
        if tensor.dim() == 3:
            tensor = tensor.unsqueeze(1)
        at = torch.arange(start, stop)
        return tensor, (torch.tensor(ids)[at // block], slice(None), at % block)

    def write(self, rank: int, layer: int, group: int, request: Request, start: int, stop: int) -> None:
        """Compute rows."""
        if self._has_states(group):
            slot = self.tables[request.request_id][group][0]
            both = self.model.states.truth(request.tokens[:stop], self.tp, rank)
            for tensor, value in zip(self.tensors[rank][layer_name(layer)], both, strict=True):
                tensor[slot] = value
            return
        tensor, where = self._cells(rank, layer, self.tables[request.request_id][group], start, stop)
        tensor[where] = truth(layer, self._heads(rank), request.tokens[:stop], start, self.model.dim)

    def wrong(self, request: Request) -> list[tuple[int, int]]:
        """Ranks and layers in which the rows of a prompt that were loaded are not right."""
        out = []
        for rank, (layer, group, window) in itertools.product(range(self.tp), self._layers()):
            stop = request.num_prompt_tokens - (1 if any(map(self._has_states, range(len(self.model.groups)))) else 0)
            stop = min(stop, request.num_computed_tokens)
            if self._has_states(group):
                slot = self.tables[request.request_id][group][0]
                both = self.model.states.truth(request.tokens[:stop], self.tp, rank)
                pairs = zip(self.tensors[rank][layer_name(layer)], both, strict=True)
                out += [] if all(torch.equal(tensor[slot], value) for tensor, value in pairs) else [(rank, layer)]
                continue
            start = 0 if window is None else max(0, stop - window)  # to which the last token attends
            tensor, where = self._cells(rank, layer, self.tables[request.request_id][group], start, stop)
            wanted = truth(layer, self._heads(rank), request.tokens[:stop], start, self.model.dim)
            if not torch.equal(tensor[where], wanted):
                out.append((rank, layer))
        return out

    # Blocks.

    def _poison(self, ids: Sequence[int]) -> None:
        for tensors in self.tensors:
            for tensor in _each(tensors):
                tensor[list(ids)] = POISON

    def _take_back(self, name: str, *, poison: bool = True) -> None:
        ids = [one for table in self.tables.pop(name, ()) for one in table if one]
        self._free_ids(ids, poison=poison)

    def _free_ids(self, ids: list[int], *, poison: bool) -> None:
        assert not set(ids) & set(self.free), "a block is freed twice"
        if poison:
            self._poison(ids)
        else:
            self._poison_later += ids
        self.free += ids

    def _allocate(self, request: Request, tokens: int, computed: int) -> bool:
        """Blocks for so many tokens; those before a window are the null block."""
        name, block = request.request_id, self.facts.block
        tables = self.tables.setdefault(name, tuple([] for _ in self.model.groups))
        skipped = self._skipped(computed)
        lacking = 0
        counts = [1 if self._has_states(group) else -(-tokens // block) for group in range(len(tables))]
        for table, skip, count in zip(tables, skipped, counts, strict=True):
            lacking += max(0, count - max(len(table), skip))
        if lacking > len(self.free):
            return False
        self._free_skipped(name, computed, poison=False)
        for table, skip, count in zip(tables, skipped, counts, strict=True):
            while len(table) < count:
                table.append(0 if len(table) < skip else self.free.pop())
        return True

    def _skipped(self, computed: int) -> list[int]:
        """Blocks per group behind the window of the next token."""
        return [0 if w is None else max(0, computed - w + 1) // self.facts.block for _, _, w in self.model.groups]

    def _free_skipped(self, name: str, computed: int, *, poison: bool) -> None:
        """``remove_skipped_blocks``: the null block takes their place."""
        for table, skip in zip(self.tables[name], self._skipped(computed), strict=True):
            gone = [one for one in table[:skip] if one]
            table[:skip] = [0] * min(skip, len(table))
            self._free_ids(gone, poison=poison)

    # The scheduler.

    def submit(
        self, name: str, tokens: Sequence[int], params: dict[str, Any] | None = None, cached: int = 0
    ) -> Request:
        """A request comes."""
        request = Request(name, list(tokens), params, cached)
        self.requests[name] = request
        self.waiting.append(request)
        self.side.on_new_request(request)
        return request

    def prefill(self, name: str, tokens: Sequence[int], transfer: str | None = None, cached: int = 0) -> Request:
        """A request that another instance decodes."""
        given = {} if transfer is None else {"transfer_id": transfer}
        return self.submit(name, tokens, {"do_remote_decode": True, "do_remote_prefill": False, **given}, cached)

    def decode(self, name: str, tokens: Sequence[int], origin: Mapping[str, Any] | None, cached: int = 0) -> Request:
        """A request that another instance has prefilled."""
        return self.submit(name, tokens, dict(origin or {}), cached)

    def abort(self, name: str) -> None:
        """The client has gone."""
        request = self.requests.get(name)
        if request is not None and not request.over:
            self._end(request, Status.FINISHED_ABORTED)

    def preempt(self, name: str) -> None:
        """A running request gives its blocks back, within the schedule of the next step."""
        request = self.requests[name]
        self.running.remove(request)
        self._take_back(name, poison=False)
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def _end(self, request: Request, status: Status) -> None:
        name = request.request_id
        waits = request.status is Status.WAITING_FOR_REMOTE_KVS and name not in self.received
        self.received.discard(name)
        self.failed.discard(name)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = status
        if name in self.tables:  # ``_connector_finished``
            self._free_skipped(name, request.num_computed_tokens, poison=True)
        keep, self.params[name] = self.side.finished(request, self.tables.get(name, ()))
        self.ended.add(name)
        if not waits and not keep:
            self._take_back(name)
            del self.requests[name]

    def schedule(self) -> dict[str, int]:
        """Tokens of each request in the next step."""
        scheduled: dict[str, int] = {}
        left = self.budget
        for request in list(self.running):
            if request not in self.running:
                continue
            new = min(left, len(request.tokens) - request.num_computed_tokens)
            while new and not self._allocate(request, request.num_computed_tokens + new, request.num_computed_tokens):
                last = self.running[-1]
                scheduled.pop(last.request_id, None)
                self.preempt(last.request_id)
                if last is request:
                    break
            if new and request in self.running:
                scheduled[request.request_id] = new
                left -= new
        for request in list(self.waiting):
            if not self._admit(request, left, scheduled):
                break
            left = self.budget - sum(scheduled.values())
        return scheduled

    def _admit(self, request: Request, left: int, scheduled: dict[str, int]) -> bool:
        """Schedule a waiting request, if it can be; False: there is no room for others either."""
        name = request.request_id
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            if name not in self.received:
                return True
            self.received.remove(name)
            request.status = Status.WAITING
            if name in self.failed:
                self.failed.remove(name)
                request.num_computed_tokens = 0
                self._take_back(name)
            else:
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_prompt_tokens - 1)
        if not left:
            return False
        local = lacking = 0
        waits = False
        if request.num_computed_tokens == 0:
            local = request.cached if not request.num_preemptions else 0
            lacking, waits = self.side.matched_tokens(request, local)
            assert waits == (lacking > 0)
        computed = request.num_computed_tokens or local + lacking
        new = 0 if waits else min(left, len(request.tokens) - computed)
        if not self._allocate(request, computed + new, computed):
            if request.num_computed_tokens == 0:
                self._take_back(name)
            return False
        if local:
            for rank, (layer, group, window) in itertools.product(range(self.tp), self._layers()):
                if window is None:
                    self.write(rank, layer, group, request, 0, local)
        self.side.on_allocated(request, self.tables[name], lacking)
        request.num_computed_tokens = computed
        if waits:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            return True
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        scheduled[name] = new
        return True

    # A step.

    def build(self, scheduled: Mapping[str, int]) -> StepWork:
        """The work of a step."""
        work = self.side.build(scheduled, BlockTables(set(scheduled), self.tables))
        self.chunks += [(name, chunk.stop, chunk.last) for name, chunk in work.chunks.items()]
        return work

    def step(self) -> None:
        """Schedule, compute, and take the results."""
        scheduled = self.schedule()
        pickled = pickle.dumps(self.build(scheduled))
        self.execute([pickle.loads(pickled) for _ in self.ranks], scheduled)

    def execute(self, every: Sequence[StepWork], scheduled: Mapping[str, int]) -> None:
        """A step of every rank, and its results."""
        ended, self.ended = self.ended, set()
        for rank, one in zip(self.ranks, every, strict=True):
            rank.preempt(one)
        reused = {one for tables in self.tables.values() for table in tables for one in table}
        self._poison([one for one in self._poison_later if one not in reused])
        self._poison_later = []
        for rank, one in zip(self.ranks, every, strict=True):
            rank.begin(one)
        for number, rank in enumerate(self.ranks):
            for layer, group, _ in self._layers():
                for name, count in scheduled.items():
                    request = self.requests[name]
                    start = request.num_computed_tokens
                    self.write(number, layer, group, request, start, start + count)
                if self.layered:
                    rank.layer_ready(layer_name(layer))
            rank.end()
        sent, received = set(), set()
        for rank in self.ranks:
            results = rank.results(set(ended))
            assert results.failed <= results.received
            self.failed |= results.failed
            sent |= {name for name in results.sent if self._all("sent", name)}
            received |= {name for name in results.received if self._all("received", name)}
        for name, count in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens == len(request.tokens):
                request.outputs += 1
                if request.outputs == self.max_tokens:
                    self._end(request, Status.FINISHED_LENGTH_CAPPED)
        self._take(sent, received)

    def _all(self, kind: str, name: str) -> bool:
        """Whether this report of a request is the last rank's."""
        self.reports[kind, name] += 1
        assert self.reports[kind, name] <= self.tp, f"{name} is reported twice as {kind}"
        return self.reports[kind, name] == self.tp

    def _take(self, sent: set[str], received: set[str]) -> None:
        self.side.on_results(sent, received)
        for name in received:
            request = self.requests[name]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self.received.add(name)
                if name in self.failed:
                    self.not_loaded.append(name)
                else:
                    assert self.wrong(request) == [], f"the rows of {name} are wrong"
                    self.loaded.append(name)
            else:
                assert request.over
                self.failed.discard(name)
                self._take_back(name)
                del self.requests[name]
        for name in sent:
            assert self.requests[name].over
            self._take_back(name)
            del self.requests[name]

    @property
    def idle(self) -> bool:
        """Whether vLLM would stop to step."""
        return not self.requests and not self.ended and not self.side.pending

    def check_quiet(self) -> None:
        """After the last request: no block is lost, and no free one was written."""
        assert self.idle
        assert sorted(self.free) == list(range(1, self.facts.blocks))
        for tensors in self.tensors:
            for tensor in _each(tensors):
                assert bool((tensor[1:] == POISON).all()), "a free block was written"

    def close(self) -> None:
        """End the endpoints."""
        for sender in self.senders:
            sender.close()
        for receiver in self.receivers:
            receiver.close()


def _each(tensors: Mapping[str, Any]) -> list[torch.Tensor]:
    """All tensors of a rank."""
    return [one for of in tensors.values() for one in (of if isinstance(of, list) else [of])]


Pair = Callable[..., tuple[Engine, Engine]]
"""Makes a prefill and a decode instance; see the fixture ``pair``."""


def prefilled(engine: Engine, name: str, tokens: Sequence[int], **given: Any) -> dict[str, Any]:
    """Prefill a request; what its response carries."""
    engine.prefill(name, tokens, **given)
    run(engine, until=lambda: name in engine.params)
    params = engine.params[name]
    assert params is not None
    return params


def run(*engines: Engine, until: Callable[[], bool] | None = None, within_s: float = LIMIT_S) -> None:
    """Step all engines until a condition holds, or until all of them are idle."""
    deadline = time.monotonic() + within_s
    while not (all(one.idle for one in engines) if until is None else until()):
        assert time.monotonic() < deadline, {name: r for one in engines for name, r in one.requests.items()}
        for one in engines:
            one.step()


def prompt(count: int, seed: int = 0) -> list[int]:
    """Tokens; another seed, other tokens."""
    return [(seed * 101 + at * 17) % 97 + seed for at in range(count)]
