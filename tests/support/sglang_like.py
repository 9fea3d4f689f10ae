"""Small prefill and decode servers that drive the plug-in for SGLang as SGLang 0.5.23 does, without SGLang.

The order of calls, the states that each queue accepts, and the moments at which pages are freed are those of
``sglang/srt/disaggregation/prefill.py`` and ``decode.py``. All ranks take the lowest state of any rank. Pages that a
server frees are overwritten at once, so a transfer that still reads them gives wrong bytes, and one that still writes
them is found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, field

from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.core import Options, Verify
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.engines.sglang.bootstrap import _Place
from disagg_kv.engines.sglang.cache import Buffers, pool_of
from disagg_kv.engines.sglang.passes import Chunk, Passes
from disagg_kv.engines.sglang.rooms import Poll, ReceiverRoom, SenderRoom
from disagg_kv.engines.sglang.side import Side
from disagg_kv.memory import Event
from disagg_kv.rendezvous import RequestRendezvous, Source
from disagg_kv.strategies import Schedule
from disagg_kv.transports import transport

I32 = npt.NDArray[np.int32]
LAYERS, DIM, ROWS = 3, 8, 6
POISON = 0xEEEE
BYTES = 1 << 18
BOOTSTRAP = "127.0.0.1:8998"


def truth(layer: int, plane: int, heads: Sequence[int], tokens: Sequence[int], start: int) -> npt.NDArray[np.uint16]:
    """``[tokens, heads, DIM]`` of the tokens from ``start`` on; each value depends on all of them."""
    ids = np.array(tokens[start:], np.int64)[:, None, None]
    at = np.arange(start, len(tokens))[:, None, None]
    head = np.array(heads)[None, :, None]
    values = ids * 7 + at * 13 + layer * 29 + head * 5 + plane * 17 + np.arange(DIM) * 3
    return np.asarray(values % 1999, np.uint16)


@define(eq=False)
class Request:
    """A request on a server."""

    name: int
    tokens: list[int]
    rooms: list[Any] = field(factory=list)
    pages: list[int] = field(factory=list)
    computed: int = 0
    prefix: int = 0
    sent: int = 0
    row: int = -1
    ready: bool = False
    results: int = 0
    gone: bool = False


class Server:
    """Ranks with their memory, and the page allocator; page 0 has no data."""

    def __init__(
        self, hub: Hub, name: str, *, prefill: bool, tp: int = 1, heads: int = 4, page: int = 4, pages: int = 40,
        latent: bool = False, budget: int = 1 << 20, strategy: str = "staged+incremental", verify: Verify = "off",
        options: Options | None = None, model: bytes = b"model", defers: bool = False,
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        self.name, self.tp, self.page, self.budget = name, tp, page, budget
        self.local = 1 if latent else max(1, heads // tp)
        self.total, self.latent = 1 if latent else heads, latent
        self.planes = 1 if latent else 2
        self.free = list(range(pages - 1, 0, -1))
        self.rows = list(range(ROWS))
        self.sides: list[Side] = []
        self.caches: list[list[npt.NDArray[np.uint16]]] = []
        self.metadata: list[dict[str, npt.NDArray[Any]]] = []
        self.ended: dict[int, str] = {}
        meetings = [RequestRendezvous() for _ in range(tp)]
        for rank in range(tp):
            shape = (pages * page, self.local, DIM)
            cache = [np.full(shape, POISON, np.uint16) for _ in range(LAYERS * self.planes)]
            rows: dict[str, npt.NDArray[Any]] = {
                "token": np.zeros((ROWS, 16), np.int32),
                "room": np.zeros((ROWS, 8), np.uint64),
            }
            pool, shards = pool_of(
                described(cache, page * self.local * DIM * 2), described(list(rows.values())),
                page=page, heads=heads, latent=latent, dtype="float16", tp=tp, rank=rank, model=model, device="cpu",
            )  # fmt: skip
            common: dict[str, Any] = {
                "instance": name, "rank": rank, "shards": shards, "rendezvous": meetings[rank], "strategy": strategy,
                "transport": transport("inproc"), "channel": InprocChannel(hub, f"{name}-{rank}"), "verify": verify,
                "options": options,
            }  # fmt: skip
            endpoint = (
                PrefillEndpoint(pool, slot_bytes=BYTES // 8, schedule=schedule, **common)
                if prefill
                else DecodeEndpoint(pool, ring_bytes=BYTES, **common)
            )
            self.sides.append(Side(endpoint, page, defers=defers and not prefill))
            self.caches.append(cache)
            self.metadata.append(rows)
        self.source = Source(name, [f"inproc://{name}-{rank}" for rank in range(tp)])
        for meeting in meetings:
            meeting.learn(name, self.source.addresses)

    def heads_of(self, rank: int) -> range:
        """Heads that a rank holds."""
        first = rank * self.local if self.total >= self.tp else rank * self.total // self.tp
        return range(first, first + self.local)

    def slots(self, request: Request, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where the tokens' rows are."""
        at = np.arange(start, stop)
        return np.array(request.pages, np.int64)[at // self.page] * self.page + at % self.page

    def each(self, request: Request, start: int, stop: int) -> Any:
        """Of every rank, layer and plane: the array, the slots and the right rows."""
        where = self.slots(request, start, stop)
        for rank, plane, layer in itertools.product(range(self.tp), range(self.planes), range(LAYERS)):
            array = self.caches[rank][plane * LAYERS + layer]
            yield array, where, truth(layer, plane, self.heads_of(rank), request.tokens[:stop], start)

    def give_back(self, request: Request, keep: int = 0) -> None:
        """Free the pages after the first ``keep``, and overwrite them."""
        pages, request.pages = request.pages[keep:], request.pages[:keep]
        assert not set(pages) & set(self.free), "a page is freed twice"
        for cache in self.caches:
            for array in cache:
                for page in pages:
                    array[page * self.page : (page + 1) * self.page] = POISON
        self.free += pages
        if request.row >= 0:
            self.rows.append(request.row)
            for rows in self.metadata:
                rows["room"][request.row] = 0
            request.row = -1

    def allocate(self, request: Request, tokens: int) -> bool:
        """Pages for the tokens."""
        lacking = -(-tokens // self.page) - len(request.pages)
        if lacking > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(lacking)]
        return True

    def indices(self, request: Request, start: int, stop: int) -> I32:
        """SGLang's ``kv_to_page_indices`` of the tokens' slots."""
        return (self.slots(request, start, stop)[:: self.page] // self.page).astype(np.int32)

    def state(self, request: Request) -> Poll:
        """The lowest of all ranks."""
        return Poll(min(int(room.poll()) for room in request.rooms))

    def fail(self, request: Request) -> None:
        """As SGLang reports a failure, and frees the pages right after it."""
        messages = []
        for room in request.rooms:
            try:
                room.failure_exception()
            except Exception as exc:
                messages.append(str(exc))
        assert len(messages) == self.tp
        self.ended[request.name] = "failed: " + " | ".join(messages)
        if not self.holds(request):
            self.give_back(request)

    def holds(self, request: Request) -> bool:
        """Whether a rank has to keep the pages of a request that has failed."""
        return False

    def step(self) -> None:
        """One turn of the scheduler."""
        raise NotImplementedError

    def abort(self, name: int) -> None:
        """The client has gone."""
        raise NotImplementedError

    def over(self, name: int) -> bool:
        """One turn; whether the request has ended here."""
        self.step()
        return name in self.ended

    def close(self) -> None:
        """End all ranks."""
        for side in self.sides:
            side.close()


def described(arrays: Sequence[npt.NDArray[Any]], item: int = 0) -> Buffers:
    """As SGLang describes its buffers."""
    items = [item or array.nbytes // len(array) for array in arrays]
    return Buffers([array.ctypes.data for array in arrays], [array.nbytes for array in arrays], items)


class Prefill(Server):
    """A prefill server: bootstrap queue, waiting queue, inflight queue.

    Args:
        overlap: a pass is run before the results of the last one are processed.
        schedule: layers are sent while others are computed, by this schedule; None: rows are sent after each pass.
    """

    def __init__(self, hub: Hub, name: str = "P", *, overlap: bool = False, **given: Any) -> None:
        super().__init__(hub, name, prefill=True, **given)
        self.compares = True
        self.overlap = overlap
        self.passes: list[Passes] = []
        if given.get("schedule") is not None:
            self.passes = [Passes(side.endpoint) for side in self.sides if isinstance(side.endpoint, PrefillEndpoint)]
        self.bootstrap: list[Request] = []
        self.waiting: list[Request] = []
        self.inflight: list[Request] = []
        self.results: list[tuple[Request, int, bool]] = []
        self.before_layer: Callable[[int], None] = lambda layer: None

    def add(self, room: int, tokens: Sequence[int], computed: int = 0) -> Request:
        """A request; ``computed`` leading tokens are in the radix cache of this server."""
        said = tokens if self.compares else None
        request = Request(room, list(tokens), [SenderRoom(side, room, said) for side in self.sides], computed=computed)
        self.bootstrap.append(request)
        return request

    def step(self) -> None:
        """One turn of ``event_loop_normal_disagg_prefill``, or of ``event_loop_overlap_disagg_prefill``."""
        for request in list(self.bootstrap):
            state = self.state(request)
            assert state in (Poll.FAILED, Poll.BOOTSTRAPPING, Poll.WAITING_FOR_INPUT), state
            if state is Poll.FAILED:
                self.bootstrap.remove(request)
                self.fail(request)
            elif state is Poll.WAITING_FOR_INPUT and self.rows:
                self._finalize(request)
        batch = [one for one in self.waiting if self.allocate(one, len(one.tokens))]
        results, self.results = self.results, self._run(batch) if batch else []
        if not self.overlap:
            results, self.results = self.results, []
        for request, stop, last in results:
            self._process(request, stop, last=last)
        for request in list(self.inflight):
            state = self.state(request)
            assert state is not Poll.BOOTSTRAPPING
            if state is Poll.SUCCESS:
                self.give_back(request)
                for room in request.rooms:
                    room.clear()
                self.ended[request.name] = "done"
            elif state is Poll.FAILED:
                self.fail(request)
            else:
                continue
            self.inflight.remove(request)

    def _finalize(self, request: Request) -> None:
        prefixes = {room.pop_decode_prefix_len() for room in request.rooms}
        assert len(prefixes) == 1
        request.row = self.rows.pop()
        request.prefix = request.sent = prefixes.pop()
        for room in request.rooms:
            room.init(-(-(len(request.tokens) - request.prefix) // self.page), request.row)
        self.bootstrap.remove(request)
        self.waiting.append(request)

    def _run(self, batch: Sequence[Request]) -> list[tuple[Request, int, bool]]:
        """``run_batch``: of each request the row at which the pass ends, and whether it is the last one."""
        made: list[tuple[Request, int, bool]] = []
        spans: list[tuple[Request, int, int]] = []
        for request in batch:
            if request.computed and not request.results:
                for layer in range(LAYERS):
                    self._write(request, layer, 0, request.computed)
                self.send(request, request.computed // self.page * self.page, last=False)
            stop = min(request.computed + self.budget, len(request.tokens))
            spans.append((request, request.computed, stop))
            request.computed, request.results = stop, request.results + 1
            made.append((request, stop, stop == len(request.tokens)))
        with ExitStack() as ends:
            for rank, passes in enumerate(self.passes):
                chunks = [
                    self.chunk(one, rank, stop if last else stop // self.page * self.page) for one, stop, last in made
                ]
                ends.enter_context(passes.computing(chunks, None))
            for layer in range(LAYERS):
                for passes in self.passes:
                    passes.layer_begins(layer)
                self.before_layer(layer)
                for request, start, stop in spans:
                    self._write(request, layer, start, stop)
        for request, _, last in made:
            if last:
                self.waiting.remove(request)
        return made

    def chunk(self, request: Request, rank: int, stop: int) -> Chunk:
        """The rows of a request that a pass is to announce."""
        room: SenderRoom = request.rooms[rank]
        return room, stop, self.indices(request, room.next_row, max(stop, room.next_row))

    def _process(self, request: Request, stop: int, *, last: bool) -> None:
        """``process_batch_result_disagg_prefill``: what was aborted meanwhile ends with its last result."""
        request.results -= 1
        if request.gone:
            if not request.results:
                self._drop(request)
            return
        if last:
            for rows in self.metadata:
                rows["token"][request.row, 0] = sum(request.tokens) % 1000
                rows["room"][request.row, 0] = request.name
            self.inflight.append(request)
        self.send(request, stop, last=last)

    def _write(self, request: Request, layer: int, start: int, stop: int) -> None:
        for number, (array, where, rows) in enumerate(self.each(request, start, stop)):
            if number % LAYERS == layer:
                array[where] = rows

    def _drop(self, request: Request) -> None:
        for room in request.rooms:
            room.abort()
        self.give_back(request)
        self.ended[request.name] = "aborted"

    def send(self, request: Request, stop: int, *, last: bool) -> None:
        """``send_kv_chunk``."""
        if not last:
            stop -= stop % self.page
        if stop < request.sent:
            return
        pages = self.indices(request, request.sent, stop)
        for room in request.rooms:
            if room.should_send_kv_chunk(len(pages), last):
                room.send(pages, None, num_kv_tokens=stop - request.sent)
        request.sent = stop

    def abort(self, name: int) -> None:
        """``abort_request``: pages of a waiting request are freed at once, those of a pass after its result."""
        for request in {id(one): one for one, _, _ in self.results if one.name == name}.values():
            request.gone = True
            self.waiting = [one for one in self.waiting if one is not request]
            return
        for queue in (self.bootstrap, self.waiting, self.inflight):
            for request in [one for one in queue if one.name == name]:
                if queue is self.waiting:
                    queue.remove(request)
                    self._drop(request)
                    continue
                for room in request.rooms:
                    room.abort()


class Decode(Server):
    """A decode server: preallocation queue, transfer queue; with a radix cache if ``radix``."""

    def __init__(self, hub: Hub, name: str = "D", *, radix: bool = False, **given: Any) -> None:
        super().__init__(hub, name, prefill=False, **given)
        self.radix, self.kept = radix, list[Request]()
        self.pending: list[Request] = []
        self.queue: list[Request] = []
        self.transfer: list[Request] = []
        self.held: list[Request] = []
        self.nbytes: dict[int, int] = {}
        self.busy: Callable[[], Event] | None = None
        self.where: Callable[[Side, str], bool] = lambda side, address: side.ensure(address)

    def knows(self, prefill: Prefill) -> None:
        """The bootstrap server of this prefill server answers from now on."""
        for side in self.sides:
            side.directory._places[BOOTSTRAP] = _Place((prefill.source,))

    def add(self, room: int, tokens: Sequence[int], address: str = BOOTSTRAP) -> Request:
        """A request."""
        request = Request(room, list(tokens), [ReceiverRoom(side, address, room) for side in self.sides])
        for one in request.rooms:
            one.asked(tokens, self.busy)
        self.queue.append(request)
        self.pending.append(request)
        return request

    def step(self) -> None:
        """One turn of ``process_decode_queue``."""
        for request in [one for one in self.held if all(side.free(one.name) for side in self.sides)]:
            self.held.remove(request)
            self.give_back(request)
            for side, room in zip(self.sides, request.rooms, strict=True):
                side.kept.pop(request.name, None)
                room.clear()
        for request in list(self.pending):
            if all(self.where(side, BOOTSTRAP) and side.directory.get(BOOTSTRAP) for side in self.sides):
                self.pending.remove(request)
                for room in request.rooms:
                    room.init(0)
        for request in list(self.queue):
            state = self.state(request)
            assert state in (Poll.FAILED, Poll.BOOTSTRAPPING, Poll.WAITING_FOR_INPUT), state
            if state is Poll.FAILED:
                self.queue.remove(request)
                self.pending = [one for one in self.pending if one is not request]
                self.fail(request)
                for room in request.rooms:
                    room.clear()
            request.ready = state is Poll.WAITING_FOR_INPUT
        for request in [one for one in self.queue if one.ready]:
            if not self.rows or not self._preallocate(request):
                break
        for request in list(self.transfer):
            self._poll_transfer(request)

    def holds(self, request: Request) -> bool:
        """``pop_transferred``: its pages are kept until :meth:`step` finds them free on every rank."""
        if request.row < 0 or not self.sides[0].defers:
            return False
        for room in request.rooms:
            if not room.abort_notified:
                room.ensure_abort_notified(force_arm=True)
        if any(room.abort_notified for room in request.rooms):
            self.held.append(request)
        return request in self.held

    def _preallocate(self, request: Request) -> bool:
        matched = max((self._matches(one, request) for one in self.kept), key=lambda found: len(found), default=[])
        request.pages, request.prefix = list(matched), len(matched) * self.page
        if not self.allocate(request, len(request.tokens)):
            request.pages = []
            return False
        request.row = self.rows.pop()
        pages = self.indices(request, request.prefix, len(request.tokens))
        for room in request.rooms:
            room.send_metadata(pages, request.row, None, decode_prefix_len=request.prefix)
        self.queue.remove(request)
        self.transfer.append(request)
        return True

    def _matches(self, kept: Request, request: Request) -> list[int]:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(kept.tokens, request.tokens, strict=False))
        return kept.pages[: len(list(same)) // self.page]

    def _poll_transfer(self, request: Request) -> None:
        states = [room.poll() for room in request.rooms]
        for rank, state in enumerate(states):
            if state is Poll.SUCCESS and not self.metadata[rank]["room"][request.row, 0]:
                states[rank] = Poll.TRANSFERRING
        state = Poll(min(states))
        if state is Poll.FAILED:
            shared = request.prefix // self.page
            request.pages = request.pages[shared:]
            self.fail(request)
        elif state is Poll.SUCCESS:
            self._check(request)
            self.nbytes[request.name] = sum(room.report.nbytes for room in request.rooms)
            for room in request.rooms:
                room.clear()
            self.ended[request.name] = "done"
            self._keep_or_free(request)
        else:
            return
        self.transfer.remove(request)

    def _check(self, request: Request) -> None:
        for array, where, rows in self.each(request, 0, len(request.tokens)):
            assert np.array_equal(array[where], rows), f"wrong rows of room {request.name}"
        for rows in self.metadata:
            assert rows["token"][request.row, 0] == sum(request.tokens) % 1000
            assert rows["room"][request.row, 0] == request.name

    def _keep_or_free(self, request: Request) -> None:
        shared = request.prefix // self.page
        if self.radix and not shared:
            whole = len(request.tokens) // self.page
            self.give_back(request, keep=whole)
            self.kept.append(request)
        else:
            request.pages = request.pages[shared:]
            self.give_back(request)

    def abort(self, name: int) -> None:
        """``abort_request``: the next poll finds the failure."""
        for queue in (self.queue, self.transfer):
            for request in [one for one in queue if one.name == name]:
                for room in request.rooms:
                    room.abort()


def settled(prefill: Prefill, decode: Decode, *names: int) -> bool:
    """One turn of both; whether the requests have ended on both."""
    prefill.step()
    decode.step()
    return all(name in server.ended for server in (prefill, decode) for name in names)
