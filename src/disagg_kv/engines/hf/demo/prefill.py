"""A prefill rank: chunked forward passes, each chunk's pages sent as soon as they are final."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch.distributed.distributed_c10d import Store
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from ....core import Phase
from ....endpoints import DecodeEndpoint, Delivery, Expectation, Reception
from ....geometry import PageTable
from ....memory import PagedPool
from ....rendezvous import Source
from .. import PageAllocator, PagedHFCache
from ..events import computed
from ..recording import RecordingCache
from . import wire
from .expected import ExpectedRows
from .inject import WrongGather, negate_rows, negate_states
from .lifetime import now
from .member import Member
from .model import Conversations
from .pool import dump, heads, laid_out, name_of, shuffled
from .results import Moved, PrefillResult
from .stage import Stage


class _Rank:
    """The work of a prefill rank in each turn.

    Attributes:
        rooms: what it sent, per request, turn after turn.
        returned: what it took from decode, in the same order.
        evicted: of how many conversations decode had no rows any more.
    """

    def __init__(self, member: Member, store: Store, of: wire.Ends, wrong: WrongGather | None) -> None:
        config = self.config = member.config
        assert of.sender is not None
        self._sender, self._receiver, self._pool, self._wrong = of.sender, of.receiver, of.pool, wrong
        self._member = member
        self._store = store
        self._paged = paged = PagedHFCache(of.pool, dtype="float32")
        self._conversations = Conversations(config)
        free = PageAllocator(shuffled(paged.group.pages, config.seed))
        slots = PageAllocator(shuffled(config.requests + 1, config.seed))
        pages = [free.take(paged.pages_for(rows)) for rows in config.lengths(config.turns - 1)]
        self.tables = [PageTable(paged.group.id, one) for one in pages]
        group = paged.state_group
        self._places = [[] if group is None else [PageTable(group.id, slots.take(1))] for _ in self.tables]
        self.caches = [paged.recording(table) for table in self.tables]
        self.expected = ExpectedRows(member, heads(of.pool)) if config.turns > 1 else None
        self._deliveries: list[Delivery] = []
        self.rooms: list[Moved] = []
        self.returned: list[Moved] = []
        self.evicted = 0

    def settle(self) -> None:
        """Wait until no page that was sent is read any more."""
        self.rooms += wire.released(self._sender.poll, self._deliveries, self._member, "released")
        self._deliveries.clear()

    def learn(self, turn: int) -> list[wire.Answer]:
        """Wait for the answers to the turn before; they make the prompts of this one."""
        answers = [wire.answer(self._store, request, turn - 1) for request in range(self.config.requests)]
        for request, answer in enumerate(answers):
            self._conversations.answered(request, turn - 1, answer.tokens)
        return answers

    def take_back(self, turn: int, answers: Sequence[wire.Answer], receiver: DecodeEndpoint) -> None:
        """Take the rows that decode has and this rank lacks; those that decode has evicted are left to compute."""
        self.settle()
        receptions: list[Reception] = []
        starts: list[int] = []
        for request, (answer, table, cache) in enumerate(zip(answers, self.tables, self.caches, strict=True)):
            receptions.append(receiver.open(wire.room(request, turn, back=True), Source(answer.source)))
            held = min(answer.rows, cache.get_seq_length())
            wanted = Expectation(answer.rows, [table], held={table.group: held})
            starts.append(receptions[-1].expect(wanted)[table.group])
        for reception in wire.ended(receiver.poll, receptions):
            request = receptions.index(reception)
            if reception.phase is Phase.FAILED:
                self.evicted += 1
                continue
            table, cache, rows = self.tables[request], self.caches[request], answers[request].rows
            for number, layer in enumerate(cache.layers):
                assert isinstance(layer, DynamicLayer)
                if cache.get_seq_length(number) < rows:
                    layer.update(*self._paged.read(number, table, cache.get_seq_length(number), rows))
            if self.expected is not None:
                self.expected.received(request, starts[request], rows, "decode", self.config.ranks("decode", turn))
        self.returned += map(wire.moved, receptions)

    def prefill(self, stage: Stage, turn: int) -> None:
        """Compute every prompt and send its cache. The rows that are in the pages are sent before the forward pass."""
        for request, (table, cache) in enumerate(zip(self.tables, self.caches, strict=True)):
            delivery = self._sender.open(wire.room(request, turn))
            self._deliveries.append(delivery)
            wire.awaited(delivery)
            cached, prompt = cache.get_seq_length(), self._conversations.prompts[request]
            if cached:
                delivery.send_chunk(cached, [table], computed(self._member.device))
            token = self._compute(stage, f"{request} {turn}", delivery, prompt, table, cache)
            for slot in self._places[request]:
                self._paged.write_states(cache, slot)
                if self.config.inject == "negate":
                    negate_states(self._pool, slot)
            if token is not None:  # the last stage has it
                self._pool.write_aux(request, token.to_bytes(4, "little"))
            if self.expected is not None:
                self.expected.computed(request, cached, cache)
                self.expected.publish(request)
            delivery.finish(
                len(prompt),
                state=self._places[request],
                aux=None if token is None else request,
                ready=computed(self._member.device),
            )
            self._member.notify("prefilled")

    def _compute(
        self,
        stage: Stage,
        name: str,
        delivery: Delivery,
        prompt: Sequence[int],
        table: PageTable,
        cache: RecordingCache,
    ) -> int | None:
        """The forward passes of what is not cached; returns the next token on the last stage."""
        token: int | None = None
        for start in range(cache.get_seq_length(), len(prompt), self.config.chunk_tokens):
            stop = min(start + self.config.chunk_tokens, len(prompt))
            step = self._sender.step({delivery.room: (stop, [table])})
            # What is made wrong on purpose is made so after the pass: no layer may have left by then.
            cache.layer_ready = step.layer_ready if self.config.inject is None else None
            token = stage.forward(f"prefill {name} {start}", prompt[start:stop], cache)
            if self._wrong is not None:
                self._wrong.swap_heads(self._member, self._pool, table, start, stop)
            elif self.config.inject == "negate":
                negate_rows(self._pool, table, start, stop)
            step.close(computed(self._member.device))
        return token


def run(member: Member, store: Store) -> None:
    """Prefill every prompt of the turns of this instance and send its cache, then wait until all pages are released."""
    config = member.config
    stage = Stage(member, store)
    wrong = WrongGather() if config.inject == "swap-heads" else None
    with wire.ends(member, store, wrong) as of:
        rank = _Rank(member, store, of, wrong)
        member.notify("ready")
        ready = now()
        for turn in range(config.turns):
            answers = rank.learn(turn) if turn else []
            if member.rank not in config.ranks("prefill", turn):
                continue
            if answers and of.receiver is not None:
                rank.take_back(turn, answers, of.receiver)
            rank.prefill(stage, turn)
        if rank.expected is None:
            for request, cache in enumerate(rank.caches):
                file = member.work / f"own-{request}-{member.rank}.npz"
                np.savez(file, **_own(of.pool, cache))  # type: ignore[arg-type]
        wire.publish_own(store, member.rank)
        ended = now()
        rank.settle()
        layout = None
        if config.both_ways:
            member.save("pool", dump(of.pool))
            assert rank.expected is not None
            rank.expected.publish_all()
            layout = laid_out(of.pool, rank.tables, expected=True)
        rooms, returned = tuple(rank.rooms), tuple(rank.returned)
        member.leave(PrefillResult(os.getpid(), heads(of.pool), ready, ended, rooms, returned, rank.evicted, layout))


def _own(pool: PagedPool, cache: Cache) -> dict[str, npt.NDArray[np.float32]]:
    """The model's own cache: by component and first unit ``[units, rows, elements]``."""
    site = pool.site
    found: dict[str, npt.NDArray[np.float32]] = {}
    for layer, own in zip(site.shard.layers(), cache.layers, strict=True):
        kept: dict[str, npt.NDArray[np.float32]] = {}
        components = site.spec.layers[layer]
        if isinstance(own, LinearAttentionLayer):
            states = [c for c in components if c.rows]
            conv, recurrent = own.conv_states[0], own.recurrent_states[0]
            assert conv is not None
            assert recurrent is not None
            at = 0
            for c in states[:-1]:
                channels = c.units * c.unit_bytes // conv.element_size()
                block = conv[0, at : at + channels].cpu().numpy()  # [channels, kernel]
                kept[c.name] = block.reshape(c.units, -1, c.rows).transpose(0, 2, 1)
                at += channels
            kept[states[-1].name] = recurrent[0].cpu().numpy()
        if isinstance(own, DynamicLayer):
            names = [c.name for c in components if not c.rows]
            assert own.keys is not None
            assert own.values is not None
            kept |= {name: tensor[0].cpu().numpy() for name, tensor in zip(names, (own.keys, own.values), strict=True)}
        for c in components:
            (units,) = site.shard.units(layer, c.name)
            found[f"{name_of(layer, c)}.{units.start}"] = kept[c.name]
    return found
