"""The processes of ``gpu_pipeline``: one computes prompts with a real model and sends their caches, one waits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import frozen

from bench.emulated import emulate
from bench.engine import between_polls, wait_until
from bench.rank import GRANTED_S, Served, attend
from disagg_kv.channels import ZmqChannel
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import DecodeEndpoint, Expectation, PrefillEndpoint
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.engines.hf import PagedHFCache, spec_from_config
from disagg_kv.engines.hf.demo.pool import shuffled
from disagg_kv.engines.hf.events import computed
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import GroupId, Role, RoomId
from disagg_kv.kernels.tensors import plane_of
from disagg_kv.memory import PagedPool
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.strategies import LayerPipelined
from disagg_kv.transports import between_processes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
"""Sizes of the architectures; ``llama-8b`` has those of Llama 3 8B."""

Kind = Literal["per chunk", "pipelined", "all layers together", "layer by layer"]
"""Ways to cross: the two that are compared, and two that differ in nothing but the number of groups."""

COMPARED: tuple[Kind, ...] = ("per chunk", "pipelined")
COUNTED: tuple[Kind, ...] = ("all layers together", "layer by layer")
FIXED: Mapping[Kind, int] = {"all layers together": 0, "layer by layer": 1}
"""Layers of a group, where the schedule does not choose; 0: all."""

PAGE = 64
SPARE = 2
AUX = 8
KV = GroupId("kv")
POISON = 0xA5


@frozen
class Way:
    """How rows cross.

    Args:
        path: the strategy's.
        kind: and when its parts are ready.
    """

    path: str
    kind: Kind

    @property
    def strategy(self) -> str:
        """Of prefill."""
        return self.path if self.kind == "per chunk" else f"{self.path}+layer_pipelined"


@frozen
class Staging:
    """Sizes of an endpoint's staging: slots of a prefill rank and a decode rank's ring."""

    slots: int
    slot_bytes: int
    ring_bytes: int

    def of(self, way: Way) -> Staging:
        """Less where few rows cross."""
        if way.kind in COMPARED:
            return self
        return Staging(self.slots, min(self.slot_bytes, 16 << 20), min(self.ring_bytes, 256 << 20))


@frozen
class Case:
    """What is measured with one set of endpoints.

    Args:
        number: of the case; no two have the same.
        wire_bytes_per_s: of an emulated wire; None: the transport as it is.
        tokens: of the prompt.
        paths: that are measured in turns.
    """

    number: int
    wire_bytes_per_s: float | None
    tokens: int
    paths: tuple[str, ...]

    def rows(self, way: Way) -> int:
        """How many of them cross: few where only groups count."""
        return self.tokens if way.kind in COMPARED else min(self.tokens, PAGE)

    @property
    def ways(self) -> Sequence[Way]:
        """All of them."""
        return [Way(path, kind) for path in self.paths for kind in (*COMPARED, *COUNTED)]


@frozen
class Setup:
    """Who a rank is.

    Args:
        role: which side.
        device: where its cache lies, and prefill's model.
        folder: where the channels' sockets are.
        model: a key of :data:`MODELS`.
        transport: a registered transport's name.
        tokens: of the longest prompt.
        staging: of the endpoints.
        timeout_s: what takes longer than this is a failure.
    """

    role: Role
    device: str
    folder: str
    model: str
    transport: str
    tokens: int
    staging: Staging
    timeout_s: float

    def address(self, role: Role, way: Way, case: Case) -> str:
        """Where an endpoint is reached."""
        return f"ipc://{self.folder}/{role}-{case.number}-{case.ways.index(way)}"

    def both(self, way: Way, case: Case) -> StaticRendezvous:
        """The addresses of a way's two endpoints."""
        return StaticRendezvous({role: [self.address(role, way, case)] for role in ("prefill", "decode")})


@frozen
class Sent:
    """What a prefill rank did.

    Args:
        began: when, by the clock that all processes of a host share.
        token: the first token, which is the room's aux.
        model_s: seconds until the first token was computed.
        groups: into how many the layers were cut.
        reason: why so.
    """

    began: float
    token: int
    model_s: float
    groups: int
    reason: str


@frozen
class Came:
    """When everything was on the decode rank, and the first token."""

    ended: float
    token: int


def model_config(name: str, tokens: int) -> PreTrainedConfig:
    """The configuration of a model that takes prompts of so many tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(**MODELS[name], max_position_embeddings=tokens, dtype="bfloat16")


def model_spec(name: str) -> CacheSpec:
    """What the model caches."""
    return spec_from_config(model_config(name, PAGE), "bfloat16")


def random_model(name: str, tokens: int, device: str) -> Any:
    """The model with random weights, made where they stay."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM
    with torch.device(device):
        made = make.from_config(model_config(name, tokens), dtype=torch.bfloat16, attn_implementation="sdpa")
    return made.eval()


def settle(device: str) -> None:
    """Wait until what was asked of a GPU is done."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def keep() -> None:
    """Let Python's collector look at nothing that is there now, as engines do once they are warm."""
    gc.collect()
    gc.freeze()


def digests(pool: PagedPool, table: PageTable, rows: int) -> tuple[int, ...]:
    """A number for each plane, which depends on every element of the rows and on its place among them."""
    row = torch.arange(rows)
    found = []
    for number in range(len(pool.site.planes)):
        cells = plane_of(pool, number)
        page, slot = torch.from_numpy(table.pages).long()[row // PAGE].to(cells.device), (row % PAGE).to(cells.device)
        elements = cells[page, slot].flatten().view(torch.int16).long()
        places = torch.arange(1, elements.numel() + 1, device=cells.device)
        found.append(int((elements * places).sum()))
    return tuple(found)


class Prefill:
    """Computes and sends."""

    polls = False

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = random_model(setup.model, setup.tokens, setup.device)
        spec = model_spec(setup.model)
        pages = -(-setup.tokens // PAGE) + SPARE
        self._pool = PagedPool.allocate(
            spec, shard(spec), pages=pages, page_size=PAGE, aux_slots=1, aux_bytes=AUX, device=setup.device
        )
        self._paged = PagedHFCache(self._pool)
        self._ids = shuffled(pages, 1)
        self._ends: dict[Way, PrefillEndpoint] = {}
        self._room: list[DeliveryHandle] = []
        self._way = Way("staged", "per chunk")
        self._rows = 0

    def open(self, case: Case) -> None:
        """Make endpoints for a case."""
        setup = self._setup
        layers = len(self._pool.site.shard.layers())
        for way in case.ways:
            carrier = between_processes(setup.transport, setup.device)
            speed = case.wire_bytes_per_s
            self._ends[way] = PrefillEndpoint(
                self._pool,
                transport=carrier if speed is None else [emulate(one, speed) for one in carrier],
                channel=ZmqChannel(setup.address("prefill", way, case)),
                rendezvous=setup.both(way, case),
                instance="prefill",
                strategy=way.strategy,
                schedule=LayerPipelined(fixed=FIXED[way.kind] or layers) if way.kind in FIXED else None,
                slots=setup.staging.slots,
                slot_bytes=setup.staging.of(way).slot_bytes,
                options=Options(total_s=setup.timeout_s),
            )
        keep()

    def end(self, way: Way) -> None:
        """End the endpoint of one way: idle ones, too, take the interpreter from the model now and then."""
        self._room.clear()
        self._ends.pop(way).close(1.0)

    def shut(self) -> None:
        """End the endpoints of a case."""
        for way in list(self._ends):
            self.end(way)
        gc.unfreeze()
        gc.collect()

    def prepare(self, way: Way, room: bytes, rows: int) -> None:
        """Open a room, and wait until decode has said that it awaits it."""
        self._way, self._rows = way, rows
        delivery = self._ends[way].open(RoomId(room))
        self._room = [delivery]
        self._until(lambda: delivery.held is not None or delivery.phase is Phase.FAILED)

    def compute(self, rows: int, seed: int) -> float:
        """Seconds of a forward pass whose cache goes to the pages and nowhere else."""
        tokens, cache = self._prompt(rows, seed), self._paged.recording(self._table(rows))
        settle(self._setup.device)
        began = time.monotonic()
        self._forward(tokens, cache, lambda: None)
        return time.monotonic() - began

    def forward(self, seed: int) -> Sent:
        """A forward pass, whose layers are announced as they are computed where the schedule wants that."""
        rows, table = self._rows, self._table(self._rows)
        tokens, cache = self._prompt(rows, seed), self._paged.recording(table)
        settle(self._setup.device)
        began = time.monotonic()
        step = self._ends[self._way].step({self._room[0].room: (rows, [table])})

        if self._way.kind != "per chunk":
            cache.layer_ready = step.layer_ready
        token = self._forward(tokens, cache, lambda: step.close(computed(self._setup.device)))
        return self._finish(began, token, time.monotonic() - began)

    def transfer(self, _seed: int) -> Sent:
        """Hand over rows that are there already, all at once, their grants too."""
        step = self._announced()
        began = time.monotonic()
        step.close(computed(self._setup.device))
        return self._finish(began, 0, 0.0)

    def layers(self, _seed: int) -> Sent:
        """The same layer by layer, each with an event, as a model would."""
        step = self._announced()
        began = time.monotonic()
        for layer in self._pool.site.shard.layers():
            step.layer_ready(layer, computed(self._setup.device))
        step.close(computed(self._setup.device))
        return self._finish(began, 0, 0.0)

    def digest(self, rows: int) -> tuple[int, ...]:
        """See :func:`digests`."""
        return digests(self._pool, self._table(rows), rows)

    def idle(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End everything."""
        self.shut()

    def _announced(self) -> Any:
        step = self._ends[self._way].step({self._room[0].room: (self._rows, [self._table(self._rows)])})
        time.sleep(GRANTED_S)
        settle(self._setup.device)
        return step

    def _until(self, good: Callable[[], bool]) -> None:
        poll = self._ends[self._way].poll
        wait_until(poll, good, self._room[0], self._setup.timeout_s, between_polls(busy=False))

    def _finish(self, began: float, token: int, model_s: float) -> Sent:
        (delivery,) = self._room
        self._pool.write_aux(0, token.to_bytes(AUX, "little"))
        delivery.finish(self._rows, aux=0)
        self._until(lambda: delivery.released)
        if delivery.error is not None:
            raise delivery.error
        report = delivery.report
        return Sent(began, token, model_s, max(1, report.groups), report.schedule)

    def _forward(self, tokens: torch.Tensor, cache: Any, queued: Callable[[], None]) -> int:
        """The first token; ``queued`` is called when the whole pass was asked of the device, before it is awaited."""
        with torch.inference_mode():
            found = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            first = found.logits[0, -1].argmax()
            queued()
            return int(first)

    def _prompt(self, rows: int, seed: int) -> torch.Tensor:
        device = self._setup.device
        draw = torch.Generator(device).manual_seed(seed)
        return torch.randint(MODELS[self._setup.model]["vocab_size"], (1, rows), device=device, generator=draw)

    def _table(self, rows: int) -> PageTable:
        return PageTable(KV, self._ids[: -(-rows // PAGE)])


class Decode:
    """Waits for caches; runs no model."""

    polls = False

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._ends: dict[Way, DecodeEndpoint] = {}
        self._room: list[ReceptionHandle] = []
        self._pools: dict[Way, PagedPool] = {}
        self._tables: dict[Way, PageTable] = {}

    def open(self, case: Case) -> None:
        """Make pools and endpoints for a case."""
        setup, spec = self._setup, model_spec(self._setup.model)
        for way in case.ways:
            carrier = between_processes(setup.transport, setup.device)
            used = -(-case.rows(way) // PAGE)
            pool = self._pools[way] = PagedPool.allocate(
                spec,
                shard(spec),
                pages=used + SPARE,
                page_size=PAGE,
                aux_slots=1,
                aux_bytes=AUX,
                allocator=carrier.allocator,
                device=setup.device,
            )
            self._tables[way] = PageTable(KV, shuffled(used + SPARE, 2)[:used])
            self._ends[way] = DecodeEndpoint(
                pool,
                transport=carrier,
                channel=ZmqChannel(setup.address("decode", way, case)),
                rendezvous=setup.both(way, case),
                instance="decode",
                strategy=way.path,
                ring_bytes=setup.staging.of(way).ring_bytes,
                options=Options(total_s=setup.timeout_s),
            )
        keep()

    def end(self, way: Way) -> None:
        """End the endpoint of one way."""
        self._room.clear()
        self._ends.pop(way).close(1.0)

    def shut(self) -> None:
        """End the endpoints of a case."""
        for way in list(self._ends):
            self.end(way)
        self._pools.clear()
        gc.unfreeze()
        gc.collect()

    def poison(self, way: Way) -> None:
        """Let nothing that lies there be taken for what arrived."""
        for number in range(len(self._pools[way].site.planes)):
            plane_of(self._pools[way], number).fill_(POISON)
        settle(self._setup.device)

    def prepare(self, way: Way, room: bytes, rows: int) -> None:
        """Await a room."""
        self._way = way
        reception = self._ends[way].open(RoomId(room), Source("prefill"))
        reception.expect(Expectation(rows, [self._tables[way]], aux=0))
        self._room = [reception]

    def arrive(self) -> Came:
        """Wait until everything is there."""
        (reception,), setup = self._room, self._setup
        poll, between = self._ends[self._way].poll, between_polls(busy=False)
        wait_until(poll, lambda: reception.released, reception, setup.timeout_s, between)
        ended = reception.report.ended
        assert ended is not None
        return Came(ended, int.from_bytes(self._pools[self._way].read_aux(0), "little"))

    def digest(self, way: Way, rows: int) -> tuple[int, ...]:
        """See :func:`digests`."""
        return digests(self._pools[way], self._tables[way], rows)

    def idle(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End everything."""
        self.shut()


def serve(pipe: Connection, setup: Setup) -> None:
    """Be a rank until the pipe is closed."""
    make: Callable[[], Served] = partial(Prefill if setup.role == "prefill" else Decode, setup)
    attend(pipe, setup.device, make)
