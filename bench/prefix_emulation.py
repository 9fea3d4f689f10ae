"""Prefill, wire and decode on an event-driven clock, around the real planner, index, page accounts and pace."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import msgspec
from attrs import define, frozen

from disagg_kv.core import Phase
from disagg_kv.endpoints.decode.scatter import RateLimiter
from disagg_kv.errors import CapacityError, ConfigurationError
from disagg_kv.geometry import I32, CacheSpec, item_bytes, shard
from disagg_kv.planning import Limits, RankPlan, plain_site
from disagg_kv.prefix import HashPrefixIndex, PageAllocator, PrefixCache, PrefixLease, namespace_of

from .prefix_workload import Prompt

PARAMETERS = Path(__file__).with_name("prefix_parameters.json")
"""The emulation that comes with the library."""


@frozen
class Emulation:
    """Speeds and sizes of the emulated machines; ``about`` names the source of the numbers.

    Args:
        about: the source, in words.
        layers, kv_heads, head_dim, dtype, prefill_tp, decode_tp, prefill_page, decode_page: model and instances.
        prefill_tokens_per_s: speed of a prefill instance.
        pass_s: additional seconds per forward pass of prefill.
        step_s, step_s_per_request: seconds of a decode step, and in addition per running request.
        prefill_kv_tokens, decode_kv_tokens: rows of the instances' pools.
        wire_bytes_per_s: between the two instances, over all ranks.
        round_trip_s: round trip of control frames.
        scatter_bytes_per_s: speed of one decode rank; decoding pauses in that time.
        pace_bytes_per_s: the decode endpoint's option.
        arrivals_per_step: most requests that the engine lets join one step.
        slot_bytes, lease_bytes: limits of a segment.
    """

    about: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    prefill_tp: int
    decode_tp: int
    prefill_page: int
    decode_page: int
    prefill_tokens_per_s: float
    pass_s: float
    step_s: float
    step_s_per_request: float
    prefill_kv_tokens: int
    decode_kv_tokens: int
    wire_bytes_per_s: float
    round_trip_s: float
    scatter_bytes_per_s: float
    pace_bytes_per_s: float
    arrivals_per_step: int
    slot_bytes: int
    lease_bytes: int

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if not isinstance(value, str) and value <= 0:
                raise ConfigurationError(f"{name} must be positive, not {value}")

    @classmethod
    def read(cls, file: Path) -> Emulation:
        """The emulation in a JSON file.

        Raises:
            ConfigurationError: it cannot be read, or has other contents.
        """
        try:
            return _EMULATION.decode(file.read_bytes())
        except (OSError, msgspec.MsgspecError) as exc:
            raise ConfigurationError(f"parameters {str(file)!r}: {exc}") from exc


_EMULATION = msgspec.json.Decoder(Emulation)


@frozen
class Landed:
    """A lease's room that has ended well."""

    phase: Phase = Phase.DONE
    released: bool = True
    error: None = None


@define(eq=False)
class _Request:
    """One request, with the times of its events."""

    prompt: Prompt
    began: float
    there: PrefixLease | None = None
    here: PrefixLease | None = None
    held: int = 0
    first_token: float = 0.0
    ended: float = 0.0


@frozen
class Run:
    """The log of one run. Times in seconds.

    Args:
        seconds: duration of the run.
        ttft: per request, in the order of their ends: from sending it until decode has the first token.
        steps: per decode step with running requests: their number, its time, and its time without arrivals.
        prompt_tokens, held_tokens: of all requests; held by decode at ``expect``. A request that begins again, because
            decode lacks pages, counts each time, here and in the bytes.
        kv_bytes: bytes on the wire.
        kv_bytes_ideal: bytes of the rows after the whole pages that had arrived for an earlier prompt of the group.
        evicted: pages that decode's index evicted.
        host_s: CPU time of index and planner, over all requests. It is part of ``ttft``; the share of decode's engine
            thread is part of its steps.
    """

    seconds: float
    ttft: Sequence[float]
    steps: Sequence[tuple[int, float, float]]
    prompt_tokens: int
    held_tokens: int
    kv_bytes: int
    kv_bytes_ideal: int
    evicted: int
    host_s: float


class Emulator:
    """One workload from its first request to its last token.

    Args:
        emulation: the machines.
        prompts: all requests, in order.
        concurrency: requests at once.
        incremental: decode's index is used.
        ideal: everything but compute, wire and decode steps takes no time and no memory ever runs out; what decode
            holds is known to the token.
        clock: this process's CPU time, for what index and planner take.
    """

    def __init__(
        self,
        emulation: Emulation,
        prompts: Sequence[Prompt],
        concurrency: int,
        *,
        incremental: bool,
        ideal: bool = False,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        most = max(len(p.tokens) + p.answer for p in prompts)
        for side, room in (("prefill", emulation.prefill_kv_tokens), ("decode", emulation.decode_kv_tokens)):
            if most + 2 * max(emulation.prefill_page, emulation.decode_page) > room:
                raise CapacityError(f"a request of {most} tokens does not fit {side}'s {room}")
        self._e = e = emulation
        self._ideal = ideal
        self._incremental = incremental
        self._clock = clock
        self._waiting = deque(prompts)
        self._concurrency = concurrency
        spec = CacheSpec.kv(e.layers, e.kv_heads, e.head_dim, e.dtype)
        self._token_bytes = 2 * e.layers * e.kv_heads * item_bytes(e.dtype) * e.head_dim
        writers = [shard(spec, tp=e.prefill_tp, rank=rank) for rank in range(e.prefill_tp)]
        targets = [shard(spec, tp=e.decode_tp, rank=rank) for rank in range(e.decode_tp)]
        self._rank_plans = [RankPlan.build(spec, writers, target) for target in targets]
        scale = sum(len(p.tokens) + p.answer for p in prompts) + e.decode_page * len(prompts) if ideal else 0
        self._prefill, _ = _cache(spec, e.prefill_kv_tokens + scale, e.prefill_page)
        self._decode, self._index = _cache(spec, e.decode_kv_tokens + scale, e.decode_page)
        self._pace = RateLimiter(e.pace_bytes_per_s)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._admission: deque[_Request] = deque()
        self._computing: deque[_Request] = deque()
        self._reserved = 0
        self._busy = False
        self._host_free = 0.0
        self._wire_free = 0.0
        self._arrived: dict[int, int] = {}
        self._landed: deque[tuple[int, _Request | None]] = deque()
        self._ready: deque[_Request] = deque()
        self._running: list[tuple[int, int, _Request]] = []
        self._stall = 0.0
        self._step = 0
        self._stepping = False
        self._steps: list[tuple[int, float, float]] = []
        self._done: list[_Request] = []
        self._held = self._sent = self._lacking = self._tokens = 0
        self._host_s = 0.0

    def run(self) -> Run:
        """Run the whole workload."""
        for _ in range(min(self._concurrency, len(self._waiting))):
            self._send()
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        assert not self._waiting
        assert not self._admission
        for cache in (self._prefill, self._decode):
            cache.index.check_integrity()
            assert cache.pages.free + len(cache.index) == cache.group.pages
        ttft = [request.first_token - request.began for request in self._done]
        return Run(
            self._now,
            ttft,
            self._steps,
            self._tokens,
            self._held,
            self._sent,
            self._lacking,
            self._index.evicted,
            self._host_s,
        )

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self._now + seconds, self._order, act))

    # Decode takes a request in: it needs pages for prompt and answer, and says what it holds.

    def _send(self) -> None:
        if self._waiting:
            self._admission.append(_Request(self._waiting.popleft(), self._now))
            self._admit()

    def _admit(self) -> None:
        while self._admission:
            request = self._admission[0]
            host = self._clock()
            if not self._claim(request):
                return
            self._admission.popleft()
            host = self._worked(host)
            # One engine thread takes requests in, one after another.
            self._host_free = max(self._host_free, self._now) + host
            trip = 0.0 if self._ideal else self._e.round_trip_s
            self._after(self._host_free - self._now + trip, partial(self._queue, request))

    def _worked(self, since: float) -> float:
        """Delay decode's next step by the time for which its engine thread was busy."""
        host = 0.0 if self._ideal else self._clock() - since
        self._host_s += host
        self._stall += host
        return host

    def _claim(self, request: _Request) -> bool:
        prompt, cache = request.prompt, self._decode
        rows = len(prompt.tokens) + prompt.answer
        # Without prefixes every request is a namespace of its own: nothing is ever found.
        lease = cache.lease(prompt.tokens, b"" if self._incremental else str(self._order).encode())
        need = -(-rows // self._e.decode_page) - lease.rows // self._e.decode_page
        if need > cache.pages.free + cache.index.evictable - self._reserved:
            lease.end()
            return False
        known = self._arrived.get(prompt.group, 0)
        lease.begin()
        request.there = lease
        request.held = lease.rows
        if self._ideal and self._incremental:
            request.held = known
        self._reserved += -(-rows // self._e.decode_page) - len(lease.table.pages)
        self._tokens += len(prompt.tokens)
        self._held += request.held
        whole = known // self._e.decode_page * self._e.decode_page
        self._lacking += (len(prompt.tokens) - whole) * self._token_bytes
        return True

    # Prefill computes one request after another; what it has cached leaves beforehand.

    def _queue(self, request: _Request) -> None:
        self._computing.append(request)
        self._compute()

    def _compute(self) -> None:
        if self._busy or not self._computing:
            return
        request = self._computing[0]
        lease = self._prefill.lease(request.prompt.tokens)
        cached = lease.rows
        try:
            lease.begin()
        except CapacityError:
            return
        self._computing.popleft()
        request.here = lease
        self._busy = True
        if cached > request.held:
            self._transfer(request, request.held, cached, last=False)
        new = len(request.prompt.tokens) - cached
        seconds = self._e.pass_s + new / self._e.prefill_tokens_per_s
        self._after(seconds, partial(self._computed, request, max(cached, request.held)))

    def _computed(self, request: _Request, start: int) -> None:
        assert request.here is not None
        request.here.settle(Landed())
        self._busy = False
        self._transfer(request, start, len(request.prompt.tokens), last=True)
        self._compute()

    # The wire carries segment after segment, as the planner cuts them.

    def _transfer(self, request: _Request, start: int, stop: int, *, last: bool) -> None:
        e, host = self._e, self._clock()
        limits = Limits(e.slot_bytes, e.lease_bytes, e.decode_page)
        pieces: list[tuple[int, int]] = []
        for target, rank_plan in enumerate(self._rank_plans):
            for layers in rank_plan.stages:
                for segment in rank_plan.cut(start, stop, layers, limits):
                    nbytes = sum(of_writer for _, of_writer in rank_plan.lease(segment)[0].values())
                    pieces.append((target, nbytes))
        host = 0.0 if self._ideal else self._clock() - host
        self._host_s += host
        began = max(self._wire_free, self._now + host)
        for _, nbytes in pieces:
            self._sent += nbytes
            began += nbytes / e.wire_bytes_per_s
        self._wire_free = began
        # Ranks scatter side by side: the first one's pieces stand for all of them.
        mine = [nbytes for target, nbytes in pieces if target == 0]
        extra = 0.0 if self._ideal else e.round_trip_s
        self._after(began - self._now + extra, partial(self._land, request if last else None, mine))

    def _land(self, request: _Request | None, pieces: Sequence[int]) -> None:
        if self._ideal:
            pieces = []
        self._landed += [(nbytes, None) for nbytes in pieces]
        if request is not None:
            self._landed.append((0, request))
            assert request.here is not None
            request.here.end()
            self._compute()
        self._decode_step()

    # Decode: a step takes what it takes for the batch, and the scatters that begin with it.

    def _decode_step(self) -> None:
        if self._stepping or not (self._landed or self._ready or self._running):
            return
        scattered = 0
        while self._landed and self._pace.ready(self._now):
            nbytes, request = self._landed.popleft()
            self._pace.begin(nbytes, self._now)
            scattered += nbytes
            if request is not None:
                self._ready.append(request)
        most = len(self._ready) if self._ideal else min(self._e.arrivals_per_step, len(self._ready))
        joined = [self._ready.popleft() for _ in range(most)]
        batch = len(self._running)
        plain = self._e.step_s + self._e.step_s_per_request * batch if batch else 0.0
        seconds = plain + scattered / self._e.scatter_bytes_per_s
        if not batch and not scattered and not joined:
            seconds = max(self._pace.ready_at - self._now, 1e-9)
        seconds += self._stall
        self._stall = 0.0
        if batch:
            self._steps.append((batch, seconds, plain))
        self._stepping = True
        self._after(seconds, partial(self._stepped, joined, bool(batch)))

    def _stepped(self, joined: Sequence[_Request], decoded: bool) -> None:
        self._stepping = False
        self._step += decoded
        while self._running and self._running[0][0] <= self._step:
            self._finish(heapq.heappop(self._running)[2])
        for request in joined:
            self._join(request)
        self._admit()
        self._decode_step()

    def _join(self, request: _Request) -> None:
        """The first token came with the cache; each step adds one."""
        assert request.there is not None
        prompt, lease, host = request.prompt, request.there, self._clock()
        lease.settle(Landed())
        self._arrived[prompt.group] = prompt.shared
        rows = len(prompt.tokens) + prompt.answer
        self._reserved -= -(-rows // self._e.decode_page) - len(lease.table.pages)
        try:
            lease.grow(rows)
        except CapacityError:
            # Leases of one group that were open together brought equal pages. Each keeps its own, and locks those in
            # the index too, which the reservation took for evictable. The request begins again, and finds its rows.
            lease.end()
            self._admission.appendleft(request)
            return
        finally:
            self._worked(host)
        request.first_token = self._now
        self._order += 1
        heapq.heappush(self._running, (self._step + prompt.answer - 1, self._order, request))

    def _finish(self, request: _Request) -> None:
        assert request.there is not None
        request.there.end()
        request.ended = self._now
        self._done.append(request)
        self._send()


class CountingIndex(HashPrefixIndex):
    """Counts evicted pages."""

    evicted = 0

    def evict(self, pages: int) -> I32:
        """See :meth:`HashPrefixIndex.evict`."""
        gone = super().evict(pages)
        self.evicted += len(gone)
        return gone


def _cache(spec: CacheSpec, tokens: int, page: int) -> tuple[PrefixCache, CountingIndex]:
    """An index over a pool of this number of tokens, without its memory."""
    site = plain_site(spec, shard(spec), tokens, page)
    pages = site.groups[0].pages
    index = CountingIndex(page, pages, namespace_of(spec))
    return PrefixCache(index, PageAllocator(range(pages)), site), index
