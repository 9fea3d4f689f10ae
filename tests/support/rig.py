"""Prefill and decode endpoints of one process, and an oracle for the bytes.

Endpoints are stepped by hand under a fake clock, or run by their own threads. Decode pools are compared with what the
engines meant to send by plain indexing, poison everywhere else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, TypedDict, TypeVar, Unpack, cast

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen

from disagg_kv.channels import Channel, Hub, InprocChannel
from disagg_kv.core import Alone, Elected, Options, Phase, Verify
from disagg_kv.endpoints import (
    DecodeEndpoint,
    Environment,
    Expectation,
    Incarnation,
    PrefillEndpoint,
    Receiver,
    attempt_id,
)
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.geometry import CacheSpec, PageTable, Shard, shard, stages
from disagg_kv.ids import GroupId, RoomId
from disagg_kv.kernels import Kernels
from disagg_kv.kernels.convert import reference
from disagg_kv.memory import Buffer, Event, MemoryPool, PagedPool, bytes_of
from disagg_kv.memory.paged import Layout
from disagg_kv.rendezvous import Rendezvous, Source, StaticRendezvous
from disagg_kv.staging import StagingAllocator
from disagg_kv.strategies import Feature, Schedule
from disagg_kv.testing import FakeClock
from disagg_kv.trace import Recorder
from disagg_kv.transports import InprocTransport, Transport, Transports
from sim.accounts import check_side

KV = GroupId("kv")
STATE = GroupId("state")
POISON = 0xA5
STEP_S = 0.005
AUX_BYTES = 8
Bytes = npt.NDArray[np.uint8]
Truth = Mapping[tuple[int, str], Bytes]
"""Per layer and component every byte of a room: ``[rows, units, unit_bytes]``."""
E = TypeVar("E", PrefillEndpoint, DecodeEndpoint)


def tp_shards(spec: CacheSpec, tp: int, pp: int = 1) -> list[Shard]:
    """The shards of an instance, stage by stage."""
    return [shard(spec, tp=tp, rank=r, layers=stage) for stage in stages(spec, pp) for r in range(tp)]


def _plain(channel: Channel) -> Channel:
    return channel


@frozen
class Memory:
    """What a rank's pool lies in, and what carries its bytes and frames.

    ``pool`` makes a pool of some other kind; its pages, ``pages`` of ``page_size`` rows, are looked at by its site.
    """

    page_size: int = 4
    pages: int = 64
    layout: Layout = "NHD"
    fused: bool = False
    transport: Callable[[], Transport | Transports] = InprocTransport
    channel: Callable[[Channel], Channel] = _plain
    pool: Callable[[CacheSpec, Shard, Memory], MemoryPool] | None = None
    aux_bytes: int = AUX_BYTES


class PrefillOptions(TypedDict, total=False):
    """Of :class:`PrefillEndpoint`."""

    strategy: str
    verdict: type[Elected] | type[Alone]
    verify: Verify
    schedule: Schedule
    uses: Collection[Feature]
    slot_bytes: int
    slots: int
    kernels: Kernels | None
    options: Options


class DecodeOptions(TypedDict, total=False):
    """Of :class:`DecodeEndpoint`."""

    strategy: str
    verdict: type[Elected] | type[Alone]
    verify: Verify
    ring_bytes: int
    allocator: Callable[[int], StagingAllocator]
    scatter_bytes_per_s: float | None
    kernels: Kernels | None
    options: Options


def _several(made: Transport | Transports) -> Transports:
    return made if isinstance(made, Transports) else Transports([made])


def _seen(pool: MemoryPool) -> PagedPool:
    """The same memory, for tests to look at."""
    if isinstance(pool, PagedPool):
        return pool
    site = pool.site
    return PagedPool(site, pool.buffers)


def _no_sleep(seconds: float) -> None:
    """Time is fake."""


def put(
    pool: PagedPool, table: PageTable, start: int, stop: int, truth: Truth | None, *, windows: bool = False
) -> None:
    """Write a room's rows into a pool by plain indexing; None: poison. ``windows``: of each only the last rows."""
    for number, plane in enumerate(pool.site.planes):
        component = pool.site.spec.component(plane.layer, plane.component)
        if component.rows:
            continue
        slid = stop - component.window if windows and component.window else 0
        rows = np.arange(max(0, slid) if slid else start, stop)
        view = pool.view(number)
        page = table.pages[(rows - table.first) // view.shape[1]]
        slot = (rows - table.first) % view.shape[1]
        units = [u for run in pool.site.shard.units(plane.layer, plane.component) for u in run]
        view[page, slot] = POISON if truth is None else truth[plane.layer, plane.component][rows][:, units]


def put_states(pool: PagedPool, slot: PageTable, truth: Truth) -> None:
    """Write a room's states into a pool by plain indexing."""
    for number, plane in enumerate(pool.site.planes):
        if pool.site.spec.component(plane.layer, plane.component).rows:
            units = [u for run in pool.site.shard.units(plane.layer, plane.component) for u in run]
            pool.view(number)[slot.pages[0]] = truth[plane.layer, plane.component][:, units]


def converted(truth: Truth, spec: CacheSpec, into: CacheSpec) -> Truth:
    """A room's bytes in decode's cache: the specification of conversions, applied to whole components."""
    found: dict[tuple[int, str], Bytes] = {}
    for layer, components in spec.layers.items():
        theirs = {c.name: c for c in into.layers[layer]}
        for c in components:
            cells = torch.from_numpy(truth[layer, c.name])
            wanted = theirs.get(c.name)
            if wanted is None or wanted.dtype == c.dtype:
                found[layer, c.name] = cells.numpy()
                continue
            x, scales = reference.to_float32(cells, c.dtype), None
            if wanted.scaled_by is not None:
                scales = reference.scales_of(x, wanted.dtype)
                found[layer, wanted.scaled_by] = scales.unsqueeze(-1).view(torch.uint8).numpy()
            elif wanted.scales:
                scales = torch.tensor(wanted.scales).expand(c.units)
            if scales is not None:
                x = x * (1 / scales).unsqueeze(-1)
            elif c.scaled_by is not None:
                x = x * reference.to_float32(torch.from_numpy(truth[layer, c.scaled_by]), "float32")
            elif c.scales:
                x = x * torch.tensor(c.scales).expand(c.units).unsqueeze(-1)
            found[layer, c.name] = reference.rounded(x, wanted.dtype).numpy()
    return {key: cells for key, cells in found.items() if key[1] in into.names()}


@define(eq=False)
class Member(Generic[E]):
    """One rank: its endpoint and what its engine knows."""

    endpoint: E
    pool: PagedPool
    want: PagedPool
    transport: Transport
    channel: Channel
    observer: Recorder
    free: list[int]
    slots: list[int]
    frozen: bool = False
    closed: bool = False

    def take(self, rows: int, first: int = 0) -> PageTable:
        """Pages for so many rows."""
        n = -(-rows // self.page_size)
        taken, self.free = self.free[:n], self.free[n:]
        assert len(taken) == n, "the test's pool is too small"
        return PageTable(KV, np.array(taken, np.int32), first)

    @property
    def page_size(self) -> int:
        """Tokens of a page; 1 where there are only states."""
        return next((g.rows_per_page for g in self.pool.site.token_groups), 1)

    def pages(self, table: PageTable) -> list[PageTable]:
        """What an engine says of a room's pages: nothing where there are only states."""
        return [table] if self.pool.site.token_groups else []

    def state(self) -> list[PageTable]:
        """A slot for a room's states, if there are any."""
        return [PageTable(STATE, [self.slots.pop()])] if self.pool.site.state_groups else []

    def give(self, table: PageTable) -> None:
        """Pages are free again."""
        self.free += [int(p) for p in table.pages]

    def check(self) -> None:
        """The pool holds what it should and nothing else has changed."""
        for found, want in zip(self.pool.buffers, self.want.buffers, strict=True):
            wrong = np.flatnonzero(bytes_of(found) != bytes_of(want))
            assert not len(wrong), f"{len(wrong)} bytes are wrong, the first at {wrong[0]}"

    def close(self, drain_s: float = 0.0) -> None:
        """Close the endpoint; it is not turned any more."""
        self.closed = True
        self.endpoint.close(drain_s)

    def crash(self) -> None:
        """The process ends without a word: its channel breaks and its memory is gone."""
        self.closed = True
        self.channel.close()
        self.transport.close(0.0)


Prefills = list[Member[PrefillEndpoint]]
Decodes = list[Member[DecodeEndpoint]]


class Rig:
    """A network of endpoints.

    Args:
        spec: the cache of all of them, or of prefill alone.
        decoded: decode's cache, where it is another.
        threaded: True: endpoints run by themselves and time is real. False: ``turn`` turns them.
        options: of all of them.
        driven: the calls of their engines advance them, too.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        threaded: bool = False,
        options: Options | None = None,
        decoded: CacheSpec | None = None,
        driven: bool = False,
    ) -> None:
        self.spec = spec
        self.decoded = decoded
        self.threaded = threaded
        self.driven = driven
        self.options = options or Options()
        self.clock = FakeClock(1.0)
        self.hub = Hub()
        self.rendezvous: Rendezvous = StaticRendezvous()
        self.prefills: Prefills = []
        self.decodes: Decodes = []
        self.rng = np.random.default_rng(7)

    # Building.

    @property
    def decode_spec(self) -> CacheSpec:
        """Decode's cache."""
        return self.decoded or self.spec

    def prefill(
        self,
        shards: Sequence[Shard],
        name: str = "P",
        memory: Memory | None = None,
        *,
        only: Iterable[int] | None = None,
        at: str | None = None,
        life: Incarnation | None = None,
        **more: Unpack[PrefillOptions],
    ) -> Prefills:
        """An instance of prefill ranks, or ``only`` some of them, ``at`` other addresses than those of its name."""
        of = memory or Memory()
        made: Prefills = []
        more = {"slot_bytes": 4096, "options": self.options, **more}
        for rank in range(len(shards)) if only is None else only:
            transports, observer = _several(of.transport()), Recorder()
            channel = of.channel(InprocChannel(self.hub, f"{at or name}{rank}"))
            pool = self._pool(self.spec, shards[rank], of, transports)
            endpoint = PrefillEndpoint(
                pool,
                transport=transports,
                channel=channel,
                rendezvous=self.rendezvous,
                instance=name,
                rank=rank,
                shards=shards,
                observer=observer,
                environment=self._environment(life),
                **more,
            )
            made.append(self._member(endpoint, _seen(pool), next(iter(transports)), channel, observer))
        self.prefills += made
        return made

    def decode(
        self,
        shards: Sequence[Shard],
        name: str = "D",
        memory: Memory | None = None,
        *,
        only: Iterable[int] | None = None,
        at: str | None = None,
        life: Incarnation | None = None,
        **more: Unpack[DecodeOptions],
    ) -> Decodes:
        """An instance of decode ranks, or ``only`` some of them, ``at`` other addresses than those of its name."""
        of = memory or Memory()
        made: Decodes = []
        more = {"ring_bytes": 1 << 16, "options": self.options, **more}
        for rank in range(len(shards)) if only is None else only:
            transports, observer = _several(of.transport()), Recorder()
            channel = of.channel(InprocChannel(self.hub, f"{at or name}{rank}"))
            pool = self._pool(self.decode_spec, shards[rank], of, transports)
            endpoint = DecodeEndpoint(
                pool,
                transport=transports,
                channel=channel,
                rendezvous=self.rendezvous,
                instance=name,
                rank=rank,
                shards=shards,
                observer=observer,
                environment=self._environment(life),
                **more,
            )
            made.append(self._member(endpoint, _seen(pool), next(iter(transports)), channel, observer))
        self.decodes += made
        return made

    def _environment(self, life: Incarnation | None = None) -> Environment:
        if self.threaded:
            return Environment(incarnation=life)
        return Environment(clock=self.clock, sleep=_no_sleep, thread=False, engine=self.driven, incarnation=life)

    def _pool(self, spec: CacheSpec, held: Shard, of: Memory, transports: Transports) -> MemoryPool:
        pool = of.pool(spec, held, of) if of.pool else self._paged(spec, held, of, transports)
        for buffer in pool.buffers:
            bytes_of(buffer)[:] = POISON
        return pool

    def _paged(self, spec: CacheSpec, held: Shard, of: Memory, transports: Transports) -> PagedPool:
        return PagedPool.allocate(
            spec,
            held,
            pages=of.pages,
            page_size=of.page_size,
            state_slots=8,
            layout=of.layout,
            fused=of.fused,
            aux_slots=4,
            aux_bytes=of.aux_bytes,
            allocator=transports.allocator,
        )

    def _member(
        self, endpoint: E, pool: PagedPool, transport: Transport, channel: Channel, observer: Recorder
    ) -> Member[E]:
        memories = [bytes_of(buffer).copy() for buffer in pool.buffers]
        buffers = [Buffer(m.ctypes.data, m.nbytes, owner=m) for m in memories]
        site = pool.site
        want = PagedPool(site, buffers)
        pages = site.token_groups[0].pages if site.token_groups else 512
        free = [int(p) for p in self.rng.permutation(pages)]
        slots = [int(p) for p in self.rng.permutation(8)]
        return Member(endpoint, pool, want, transport, channel, observer, free, slots)

    # Running.

    @property
    def members(self) -> list[Member[PrefillEndpoint] | Member[DecodeEndpoint]]:
        """All ranks of both sides."""
        return [*self.prefills, *self.decodes]

    def turn(self, step_s: float = STEP_S) -> None:
        """Every endpoint that is neither frozen nor closed makes one turn, then time passes."""
        for member in self.members:
            if not (member.frozen or member.closed):
                member.endpoint.driver.step(0.0)
                check_side(member.endpoint.inspect())
        self.clock.advance(step_s)

    def until(self, done: Callable[[], bool], what: str = "it", turns: int = 4000) -> None:
        """Turn, or wait, until ``done()``."""
        if self.threaded:
            limit = time.monotonic() + 120
            while not done():
                assert time.monotonic() < limit, f"waited too long for {what}"
                time.sleep(0.001)
            return
        for _ in range(turns):
            if done():
                return
            self.turn()
        raise AssertionError(f"waited {turns} turns for {what}")

    def wait(self, seconds: float, step_s: float = 0.1) -> None:
        """Let fake time pass."""
        end = self.clock() + seconds
        while self.clock() < end:
            self.turn(step_s)

    def check(self) -> None:
        """Every pool holds what it should, byte for byte."""
        for member in self.members:
            member.check()

    def quiet(self) -> None:
        """Nothing is left of any room, and every lease and slot is free."""
        self.until(lambda: all(m.closed or m.endpoint.open_rooms == 0 for m in self.members), "rest")
        if self.threaded:  # their threads may be in the middle of a turn
            self.until(lambda: not self._kept(), "leases and slots to come back")
        assert not self._kept()

    def _kept(self) -> bool:
        return any(not m.closed and m.endpoint.usage().ring_used_bytes for m in self.decodes) or any(
            not m.closed and m.endpoint.usage().slots_used for m in self.prefills
        )

    def close(self) -> None:
        """Close every endpoint."""
        for member in self.members:
            member.close(1.0 if self.threaded else 0.0)

    def truth(self, rows: int) -> Truth:
        """Random bytes, none of them poison, for a room."""
        made: dict[tuple[int, str], Bytes] = {}
        for layer, components in self.spec.layers.items():
            for c in components:
                drawn = self.rng.integers(0, 255, (c.rows or rows, c.units, c.unit_bytes), dtype=np.uint8)
                made[layer, c.name] = np.where(drawn == POISON, np.uint8(255), drawn)
        return made

    def request(
        self, name: str, prefills: Prefills, decodes: Decodes, rows: int, of: str = "P", attempt: int = 1
    ) -> Request:
        """An attempt of a request from one instance to another."""
        room = attempt_id(RoomId(name.encode()), attempt)
        return Request(self, room, prefills, decodes, rows, Source(of), self.decode_spec, self.truth(rows))


@define(eq=False)
class Request:
    """One room on all ranks of both sides, as their engines see it."""

    rig: Rig
    room: RoomId
    prefills: Prefills
    decodes: Decodes
    rows: int
    source: Source
    decode_spec: CacheSpec
    truth: Truth
    sends: list[DeliveryHandle] = field(factory=list)
    receives: list[ReceptionHandle] = field(factory=list)
    given: dict[int, list[PageTable]] = field(factory=dict)
    taken: list[PageTable] = field(factory=list)
    slots: list[list[PageTable]] = field(factory=list)
    known: bool = True

    @property
    def into(self) -> Truth:
        """The bytes that decode must have."""
        spec = self.rig.spec
        return self.truth if self.decode_spec == spec else converted(self.truth, spec, self.decode_spec)

    @property
    def handles(self) -> list[DeliveryHandle | ReceptionHandle]:
        """Of all ranks."""
        return [*self.sends, *self.receives]

    def open_prefill(self, total_s: float | None = None, tag: bytes = b"") -> Request:
        """Prefill's engines open the room."""
        self.sends = [m.endpoint.open(self.room, tag=tag, total_s=total_s) for m in self.prefills]
        return self

    def open_decode(self, total_s: float | None = None, tag: bytes = b"") -> Request:
        """Decode's engines open the room."""
        self.receives = [m.endpoint.open(self.room, self.source, tag=tag, total_s=total_s) for m in self.decodes]
        return self

    def open_through(self, receivers: Sequence[Receiver]) -> Request:
        """The same, through layers over the endpoints."""
        self.receives = [cast("ReceptionHandle", one.open(self.room, self.source)) for one in receivers]
        return self

    def expect(
        self,
        stop: int | None = None,
        aux: int | None = None,
        held: int = 0,
        whole: bool = True,
        least: int = 0,
        ready: Event | None = None,
    ) -> Request:
        """Decode's engines give their pages and await the rows.

        Args:
            stop: as for the handles.
            aux: as for the handles.
            held: rows that are in the pages already.
            whole: the tables have the pages of held rows too.
            least: as for the handles.
            ready: as for the handles.
        """
        self.known = stop is not None
        self.taken = [m.take(self.rows) for m in self.decodes]
        self.slots = [m.state() for m in self.decodes]
        for m, handle, table, state in zip(self.decodes, self.receives, self.taken, self.slots, strict=True):
            for pool in (m.pool, m.want):
                put(pool, table, 0, held, self.into)
            skip = 0 if whole else held // m.page_size
            given = m.pages(PageTable(KV, table.pages[skip:], skip * m.page_size))
            rows = {t.group: held for t in given}
            took = handle.expect(Expectation(stop, given, state=state, aux=aux, held=rows, least=least, ready=ready))
            assert took == {t.group: held // m.page_size * m.page_size for t in given}
        return self

    def pages(self, start: int, stop: int) -> list[PageTable]:
        """New pages on every prefill rank that hold these rows."""
        made = []
        for number, m in enumerate(self.prefills):
            first = start // m.page_size * m.page_size
            table = m.take(stop - first, first)
            for pool in (m.pool, m.want):
                put(pool, table, first, stop, self.truth)
            self.given.setdefault(number, []).append(table)
            made.append(table)
        return made

    def send(self, stop: int, start: int = 0, ready: Event | None = None) -> Request:
        """Prefill's engines hand over the rows ``[start, stop)`` in new pages."""
        for m, handle, table in zip(self.prefills, self.sends, self.pages(start, stop), strict=True):
            handle.send_chunk(stop, m.pages(table), ready)
        return self

    def finish(self, aux: int | None = None) -> Request:
        """Prefill's engines are done."""
        for m, handle in zip(self.prefills, self.sends, strict=True):
            state = m.state()
            for pool, slot in itertools.product((m.pool, m.want), state):
                put_states(pool, slot, self.truth)
            handle.finish(self.rows, state=state, aux=aux)
        return self

    def start(self, stop: int | None = None) -> Request:
        """Everything at once, in one chunk."""
        self.open_decode().expect(stop).open_prefill()
        if self.rows:
            self.send(self.rows)
        return self.finish()

    def all(self, phase: Phase) -> bool:
        """Every rank says so, and is released."""
        return all(h.phase is phase and h.released for h in self.handles)

    def released(self) -> Request:
        """Wait until no rank needs its pages any more."""
        self.rig.until(lambda: all(h.released for h in self.handles), f"room {self.room.decode()}")
        return self

    def landed(self, stop: int | None = None) -> Request:
        """Wait for success; decode's pools should hold the rows from now on."""
        self.released().done(stop)
        self.rig.check()
        return self

    def done(self, stop: int | None = None) -> None:
        """The room has succeeded; decode's pools should hold the rows from now on."""
        assert self.all(Phase.DONE), [(h.phase.name, h.error) for h in self.handles]
        self.wanted(0, self.rows if stop is None else stop)

    def wanted(self, start: int, stop: int) -> None:
        """Decode's pools should hold these rows."""
        slots = self.slots or [[] for _ in self.decodes]
        for member, table, state in zip(self.decodes, self.taken, slots, strict=True):
            put(member.want, table, start, stop, self.into, windows=self.known)
            for slot in state:
                put_states(member.want, slot, self.into)

    def failed(self) -> Request:
        """Wait until all ranks have failed and released their pages."""
        self.released()
        assert self.all(Phase.FAILED), [(h.phase.name, h.error) for h in self.handles]
        return self

    def ended(self) -> Request:
        """Wait until all ranks have ended; the ranks of one side agree, and prefill succeeds only if decode did."""
        self.released()
        sent, received = {h.phase for h in self.sends}, {h.phase for h in self.receives}
        assert len(sent) <= 1, self.errors()
        assert len(received) <= 1, self.errors()
        assert sent != {Phase.DONE} or received == {Phase.DONE}, self.errors()
        if received == {Phase.DONE}:
            self.wanted(0, self.rows)
        else:
            self.forgive()
        self.rig.check()
        return self

    def forgive(self) -> None:
        """The room has failed: its own pages may hold anything, all others must hold what they did."""
        slots = self.slots or [[] for _ in self.decodes]
        for member, table, state in zip(self.decodes, self.taken, slots, strict=False):
            of = {t.group: t.pages for t in (table, *state)}
            for number, plane in enumerate(member.pool.site.planes):
                member.want.view(number)[of[plane.group]] = member.pool.view(number)[of[plane.group]]

    def errors(self) -> str:
        """What all ranks say."""
        return " | ".join(str(h.error) for h in self.handles)
