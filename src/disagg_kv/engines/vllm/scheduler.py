"""The connector in vLLM's scheduler process. It decides what every rank does in a step; it moves nothing itself.

A request of a **prefill** instance becomes a transfer with its first rows. Each step adds the rows that it computes.
The transfer is complete with the last row of the prompt. vLLM keeps the request's blocks until every rank has reported
that nothing reads them any more.

A request of a **decode** instance waits until all its rows have landed, or the transfer has failed. What happens then
is vLLM's own policy: it computes the prompt itself, or fails the request.

Decode computes the last token of a prompt anew, and a state already has all tokens that were computed. So prefill of a
model with states leaves the last token out, as vLLM's ``NixlConnector`` does.

Where rows go both ways, decode holds the blocks of an answer, as prefill does those of a prompt, and a prefill request
waits for these rows before it is computed, as a decode request does; see ``turns``.

Either side may wait in its engine's queue while the other one is ready. A request that waits there for
:data:`QUEUED_S` is announced to the other side, which then keeps its blocks for longer than ``claim_s``.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from attrs import define

from ...errors import RemoteProtocolError
from ...rendezvous import Source
from .params import FIRST_TOKEN, REMOTE_DECODE, REMOTE_PREFILL, Origin, transfer_id
from .request import ANSWERED, BlockGroup, BlockState, EngineRequest, rows, tag_of
from .turns import EARLIER, RETURN_S, Earlier, HeldTurns, hold_s
from .work import Chunk, Declined, Hold, Load, Pages, StepWork

log = logging.getLogger("vllm.disagg_kv")

MAX_LOADED = 1 << 16
"""Transfers that a decode instance remembers, to notice further requests for the same rows."""

LOADING = "WAITING_FOR_REMOTE_KVS"
"""The status of a request whose rows a connector loads."""

QUEUED_S = 1.0
"""Seconds in the engine's queue after which a request is announced. Few wait for longer, so few have that cost."""


@define
class Sending:
    """A transfer of a prefill request.

    Args:
        request: as vLLM knows it, live.
        transfer: its id.
        tag: digest of the prompt.
        preemptions: how often vLLM had preempted the request at the last look.
        sent: rows of the chunks so far.
        opened: the ranks have a room, which must end.
        complete: the last row of the prompt was among them.
        lost: vLLM may have freed blocks with rows that decode needs.
        elsewhere: another connector of a ``MultiConnector`` loads its rows, and reports it.
        since: when the request came; infinite if decode cannot know the transfer yet.
    """

    request: EngineRequest
    transfer: str
    tag: bytes
    since: float
    preemptions: int = 0
    sent: int = 0
    opened: bool = False
    complete: bool = False
    lost: bool = False
    elsewhere: bool = False


@define
class Queued:
    """A decode request in the engine's queue. ``said``: it is announced to prefill."""

    origin: Origin
    since: float
    tag: bytes | None
    said: bool = False


class SchedulerSide:
    """The connector's state in the scheduler; one thread calls.

    Args:
        instance: name of this instance.
        groups: vLLM's KV cache groups that are transferred, in order.
        produces: whether other instances may decode requests of this one.
        consumes: whether other instances may prefill requests of this one.
        total_s: seconds after which a transfer ends.
        lossy: the cache rounds what the model computes, so its rows do not go back.
        clock: gives seconds.

    Attributes:
        held: the answers whose rows are held.
    """

    def __init__(
        self,
        instance: str,
        groups: Sequence[BlockGroup],
        *,
        produces: bool,
        consumes: bool,
        total_s: float = 300.0,
        lossy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance = instance
        self._groups = tuple(group for group in groups if not group.states)
        self._states = tuple(group for group in groups if group.states)
        self._left_out = 1 if self._states else 0
        self._produces = produces
        self._consumes = consumes
        self._total_s = total_s
        self._lossy = lossy
        self._clock = clock
        self.held = HeldTurns()
        self._earlier: dict[str, Earlier] = {}
        self._addresses: tuple[str, ...] = ()
        self._sending: dict[str, Sending] = {}
        self._queued: dict[str, Queued] = {}
        self._loading: set[str] = set()
        self._asked: set[str] = set()
        self._loaded: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._work = StepWork()

    def meet(self, addresses: Sequence[str]) -> None:
        """The addresses of this instance's prefill ranks, in order of ranks."""
        self._addresses = tuple(addresses)

    # Prefill.

    def on_new_request(self, request: EngineRequest) -> None:
        """A request has come; it is sent if another instance decodes it."""
        params = request.kv_transfer_params or {}
        if params.get(REMOTE_PREFILL) and self._consumes:
            try:
                self._queued[request.request_id] = Queued(Origin.of(params), self._clock(), tag_of(request))
            except RemoteProtocolError as exc:
                log.warning("request %s: %s", request.request_id, exc)
        if params.get(REMOTE_DECODE) and self._produces:
            self._note_sending(request, params)
        if params.get(EARLIER) is not None and not params.get(REMOTE_PREFILL):
            self._note_earlier(request, params[EARLIER])

    def _note_sending(self, request: EngineRequest, params: Mapping[str, Any]) -> None:
        try:
            given, tag = transfer_id(params), tag_of(request)
        except RemoteProtocolError as exc:
            log.warning("request %s is not sent: %s", request.request_id, exc)
            return
        if given is not None and any(one.transfer == given for one in self._sending.values()):
            log.warning("request %s is not sent: transfer %s is another request's", request.request_id, given)
        elif tag is None:
            log.warning("request %s is not sent: its prompt has embeddings", request.request_id)
            self._work.unsent += [] if given is None else [given]
        elif request.num_prompt_tokens <= self._left_out:
            log.warning("request %s is not sent: decode computes the only token of its prompt", request.request_id)
            self._work.unsent += [] if given is None else [given]
        elif self._outruns(request.num_prompt_tokens - self._left_out):
            log.warning("request %s is not sent: vLLM frees a row of its sliding window as it ends", request.request_id)
            self._work.unsent += [] if given is None else [given]
        else:
            self._leave_out(request)
            transfer = given if given is not None else f"{request.request_id}-{uuid.uuid4().hex[:12]}"
            self._sending[request.request_id] = Sending(request, transfer, tag, inf if given is None else self._clock())

    def _leave_out(self, request: EngineRequest) -> None:
        """The last token of a prompt, whose rows decode computes. ``NixlConnector`` of vLLM 0.32 changes the same."""
        if self._left_out:
            assert request.prompt_token_ids is not None
            del request.prompt_token_ids[-self._left_out :], request._all_token_ids[-self._left_out :]
            request.num_prompt_tokens -= self._left_out

    def _chunks(self, scheduled: Mapping[str, int], blocks: BlockState | None) -> None:
        for name, one in self._sending.items():
            self._note_preemption(name, one)
            one.elsewhere = one.request.status.name == LOADING and name not in self._loading
            if name not in scheduled or one.lost:
                continue
            if self._overwrites and one.request.num_computed_tokens + scheduled[name] > one.request.num_prompt_tokens:
                log.warning(
                    "request %s is not sent: it generates more tokens than one, over rows that decode needs", name
                )
                self._work.preempted.append(name)
                self._work.aborted.append(name)
                one.complete, one.lost = False, True
            if one.complete or one.lost or blocks is None:
                continue
            ids = blocks.get_block_ids(name)
            if ids is not None:
                self._chunk(name, one, scheduled[name], ids)

    @property
    def _overwrites(self) -> bool:
        """Whether a prefill request that goes on changes what decode needs: windows slide, and so do states."""
        return bool(self._states) or any(group.window is not None for group in self._groups)

    def _note_preemption(self, name: str, one: Sending) -> None:
        """The blocks of a request that vLLM has preempted hold rows of other requests now: all its rows come anew."""
        if one.preemptions != one.request.num_preemptions:
            one.preemptions = one.request.num_preemptions
            self._work.preempted += [name] if one.sent else []
            one.sent, one.complete = 0, False

    def _chunk(self, name: str, one: Sending, scheduled: int, ids: tuple[list[int], ...]) -> None:
        prompt = one.request.num_prompt_tokens
        tokens = min(one.request.num_computed_tokens + scheduled, prompt)
        stop = rows(tokens, self._groups[0], whole=tokens == prompt)
        if stop == one.sent:
            return
        pages = self._pages(ids, one.sent, stop)
        one.complete = tokens == prompt
        states = self._slots(ids) if one.complete else ()
        self._work.chunks[name] = Chunk(one.transfer, stop, stop - one.sent, pages, one.complete, one.tag, states)
        one.sent, one.opened = stop, True

    def _finished_sending(self, name: str) -> tuple[bool, dict[str, Any] | None]:
        one = self._sending[name]
        if one.opened and (one.elsewhere or name in self._loading):
            # VLLM frees the blocks with the first report of the ranks, as loaded, and a second one would end it.
            del self._sending[name]
            self._work.dropped.append(name)
            return False, None
        self._note_preemption(name, one)
        if one.complete and one.request.status.name in ANSWERED:
            origin = Origin(one.transfer, Source(self._instance, self._addresses))
            first = {} if self._left_out else {FIRST_TOKEN: one.request.output_token_ids[0]}
            return True, {**origin.params(), **first}
        if one.opened:
            self._work.aborted.append(name)
            return True, None
        del self._sending[name]
        self._work.unsent.append(one.transfer)
        return False, None

    # Decode.

    def matched_tokens(self, request: EngineRequest, computed: int) -> tuple[int, bool]:
        """How many tokens beyond ``computed`` another instance sends, and whether vLLM goes on meanwhile."""
        params = request.kv_transfer_params or {}
        self._asked.add(request.request_id)
        if (earlier := self._earlier.get(request.request_id)) is not None and not earlier.over:
            return max(0, earlier.tokens - computed), earlier.tokens > computed
        if not params.get(REMOTE_PREFILL) or not self._consumes:
            return 0, False
        sent = request.num_prompt_tokens - self._left_out
        lacking = sent - computed
        tag = self._tag(request)
        if lacking <= 0 or self._outruns(sent, computed) or tag is None:
            return 0, False
        if self._is_sibling(request, tag):
            log.warning("request %s computes its prompt: another request has loaded its transfer", request.request_id)
            return 0, False
        return lacking, True

    def _tag(self, request: EngineRequest) -> bytes | None:
        """VLLM asks about a request that waits for blocks in each step."""
        queued = self._queued.get(request.request_id)
        return tag_of(request) if queued is None else queued.tag

    def _is_sibling(self, request: EngineRequest, tag: bytes | None) -> bool:
        """Whether another request of this prompt has the transfer: vLLM makes several of one with ``n`` > 1."""
        given = (request.kv_transfer_params or {}).get("transfer_id")
        return isinstance(given, str) and tag is not None and self._has_loaded(given, tag, request.request_id)

    def _has_loaded(self, transfer: str, tag: bytes, but: str) -> bool:
        """Whether another request than ``but`` has had a transfer."""
        return self._loaded.get((transfer, tag), but) != but

    def _outruns(self, prompt: int, computed: int = 0) -> bool:
        """Whether a row that decode needs for the last token of a prompt lies before those that can be transferred.

        Decode computes that token anew, over the window that ends with it. Both sides free the blocks behind the window
        of the token that follows: decode as it allocates, prefill as the request ends. Rows of a window that decode has
        ``computed`` lie in blocks that other requests may read.
        """
        return any(
            max(group.freed(prompt), rows(computed, group, whole=False)) > group.first_needed(prompt)
            for group in self._groups
            if group.window is not None
        )

    def on_allocated(self, request: EngineRequest, blocks: tuple[list[int], ...], lacking: int) -> None:
        """VLLM has given a request its blocks, to load ``lacking`` tokens."""
        name = request.request_id
        self._asked.discard(name)
        if (earlier := self._earlier.pop(name, None)) is not None:
            self._await(name, lambda: earlier.origin, earlier.tokens, blocks, lacking, earlier.tag, RETURN_S)
            return
        params = request.kv_transfer_params or {}
        if not params.get(REMOTE_PREFILL) or not self._consumes:
            return
        params[REMOTE_PREFILL] = False  # vLLM calls again once the rows are there
        tag = self._tag(request)
        self._leave(name)
        if not self._is_sibling(request, tag):
            sent = request.num_prompt_tokens - self._left_out
            self._await(name, partial(Origin.of, params), sent, blocks, lacking, tag)

    def _await(
        self,
        name: str,
        origin_of: Callable[[], Origin],
        tokens: int,
        blocks: tuple[list[int], ...],
        lacking: int,
        tag: bytes | None,
        claim_s: float | None = None,
    ) -> None:
        """Load the last ``lacking`` of ``tokens``, or decline all of them."""
        try:
            origin = origin_of()
            if lacking and tag is not None:
                self._work.loads[name] = self._load(origin, tokens, blocks, lacking, tag, claim_s)
                self._remember(name, origin.transfer, tag)
            else:
                self._work.declined.append(Declined(origin, tag or b""))
        except Exception as exc:
            log.warning("request %s cannot be loaded: %s", name, exc)
            if lacking:
                self._work.refused[name] = exc
        if lacking:
            self._loading.add(name)

    def _remember(self, name: str, transfer: str, tag: bytes) -> None:
        self._loaded[transfer, tag] = name
        while len(self._loaded) > MAX_LOADED:
            self._loaded.popitem(last=False)

    def _load(
        self,
        origin: Origin,
        tokens: int,
        blocks: tuple[list[int], ...],
        lacking: int,
        tag: bytes,
        claim_s: float | None,
    ) -> Load:
        stop, first = rows(tokens, self._groups[0], whole=True), rows(tokens - lacking, self._groups[0], whole=False)
        known = {group.id: first for group in self._groups} if first else {}
        return Load(origin, stop, self._pages(blocks, first, stop), known, tag, self._slots(blocks), claim_s)

    def _leave(self, name: str) -> None:
        """A decode request is in the engine's queue no more."""
        one = self._queued.pop(name, None)
        if one is not None and one.said:
            self._work.left.append(one.origin.transfer)

    # Both ways.

    def _note_earlier(self, request: EngineRequest, given: object) -> None:
        """A prompt has an earlier turn: decode's rows of it are loaded, if they are this prompt's.

        VLLM makes several requests of one with several prompts: the first of them uses the reference.
        """
        name = request.request_id
        try:
            earlier = Earlier.of(given)
        except RemoteProtocolError as exc:
            log.warning("request %s computes its prompt: %s", name, exc)
            return
        another = self._has_loaded(earlier.origin.transfer, b"", name)
        if another:
            why = "another request has them"
        elif not self._consumes or self._overwrites:
            why = "sliding windows and states do not go back" if self._consumes else "its kv_role is not kv_both"
        elif not (why := earlier.unfit(request)):
            self._earlier[name] = earlier
            self._remember(name, earlier.origin.transfer, b"")
            return
        log.warning("request %s does not load the rows of the turn before: %s", name, why)
        if self._consumes and not another:
            self._remember(name, earlier.origin.transfer, b"")
            self._work.declined.append(Declined(earlier.origin, b""))

    def _hold(self, request: EngineRequest, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Hold the rows of an answer, if the router asks for that: all but that of the last token."""
        name, params = request.request_id, request.kv_transfer_params
        try:
            seconds = min(hold_s(params), self._total_s)
        except RemoteProtocolError as exc:
            log.warning("request %s: %s", name, exc)
            return False, None
        tokens = min(len(request._all_token_ids) - 1, request.num_computed_tokens)
        holds = self._produces and not self._overwrites and not self._lossy and request.status.name in ANSWERED
        if not seconds or not holds or tokens < 1 or self._is_sibling(request, tag_of(request)):
            return False, None
        tag, stop = tag_of(request, tokens), rows(tokens, self._groups[0], whole=True)
        if tag is None:
            return False, None
        origin = Origin(uuid.uuid4().hex, Source(self._instance, self._addresses))
        self._work.holds[name] = Hold(origin.transfer, stop, self._pages(blocks, 0, stop), tag, seconds)
        self.held.names[name] = None
        return True, Earlier(origin, tokens, tag, time.time() + seconds).params()

    # Both.

    def _announce(self) -> None:
        """The requests that have waited in the engine's queue for long: those of prefill, then those of decode."""
        until = self._clock() - QUEUED_S
        for name, one in self._sending.items():
            if one.since <= until and not (one.opened or one.lost):
                self._work.early[name] = one.transfer, one.tag
                one.opened = True
        late = [one for one in self._queued.values() if one.since <= until]
        said = {one.origin.transfer for one in late if one.said}
        for waiting in late:
            if waiting.origin.transfer not in said:
                self._work.queued.append(waiting.origin)
                said.add(waiting.origin.transfer)
                waiting.said = True

    def build(self, scheduled: Mapping[str, int], blocks: BlockState | None) -> StepWork:
        """The work of this step, once. ``scheduled`` has the number of tokens per request."""
        self._chunks(scheduled, blocks)
        self._announce()
        # VLLM asks for a request's tokens, then tries to give it blocks: it has found too few for one of these.
        if (oldest := self.held.give_up(self._clock(), waiting=bool(self._asked))) is not None:
            self._work.aborted.append(oldest)
        self._asked.clear()
        work, self._work = self._work, StepWork()
        work.idle = not scheduled
        return work

    def reset(self) -> bool:
        """Give up all answers. Whether none is held any more."""
        self._work.aborted += self.held.give_up_all(self._clock())
        return not self.held.names

    def finished(
        self, request: EngineRequest, blocks: Sequence[Sequence[int]] = ()
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether vLLM must keep its blocks, and what its response carries."""
        name = request.request_id
        self._leave(name)
        if (earlier := self._earlier.pop(name, None)) is not None:
            self._work.declined.append(Declined(earlier.origin, b""))
        if name in self._loading:
            self._work.aborted.append(name)  # vLLM keeps the blocks of a request that waits for rows
        else:
            self._decline(request)
        return self._finished_sending(name) if name in self._sending else self._hold(request, blocks)

    def _decline(self, request: EngineRequest) -> None:
        """A request has ended before it had blocks: prefill may free its own.

        VLLM announces a request that it has rejected by a stand-in with another prompt, so the tag is not compared.
        """
        params = request.kv_transfer_params or {}
        if not params.get(REMOTE_PREFILL) or not self._consumes or self._is_sibling(request, tag_of(request)):
            return
        params[REMOTE_PREFILL] = False
        try:
            self._work.declined.append(Declined(Origin.of(params), b""))
        except RemoteProtocolError as exc:
            log.warning("request %s: %s", request.request_id, exc)

    def sends(self, name: str) -> bool:
        """Whether ranks may read the blocks of a request."""
        return name in self._sending or name in self.held.names

    def on_results(self, sent: set[str], received: set[str]) -> None:
        """All ranks have reported these requests."""
        for name in sent:
            self._sending.pop(name, None)
            self.held.ended(name)
        self._loading -= received

    @property
    def pending(self) -> bool:
        """Whether a step is needed although no request needs one."""
        return bool(self._work)

    def _pages(self, ids: Sequence[Sequence[int]], start: int, stop: int) -> Pages:
        """The pages of the rows ``[start, stop)``, of every group."""
        out = []
        for group in self._groups:
            first, end = start // group.page_rows, -(-stop // group.page_rows)
            out.append((group.id, tuple(ids[group.index][first:end]), first * group.page_rows))
        return tuple(out)

    def _slots(self, ids: Sequence[Sequence[int]]) -> Pages:
        """The block of every group of states."""
        return tuple((group.id, tuple(ids[group.index][:1]), 0) for group in self._states)
