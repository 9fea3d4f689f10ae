"""Layers that are sent while others are computed.

SGLang reports rows once all layers of a forward pass are computed. So the plug-in announces the pass itself: the rows
of its batch before it, and each layer during it, from the calls of SGLang's attention. A layer is final when the
attention of another one begins: some models call it several times in a layer. Where no call is seen, as with
attention that SGLang captures in a graph, all layers are final at the end of the pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...endpoints import ForwardPass, PrefillEndpoint
from ...errors import DisaggKVError, LocalProtocolError
from ...memory import Mark
from .rooms import I32, SenderRoom

log = logging.getLogger("disagg_kv.sglang")

Chunk = tuple[SenderRoom, int, I32]
"""A request's room, one past its last row of the pass, and the pages of its rows from the room's next one on."""


class Passes:
    """The forward passes of a prefill rank; one thread calls. What goes wrong here fails requests, and no pass.

    Args:
        endpoint: this rank's.
    """

    def __init__(self, endpoint: PrefillEndpoint) -> None:
        self._endpoint = endpoint
        self._rooms: list[SenderRoom] = []
        self._step: ForwardPass | None = None
        self._mark: Mark | None = None
        self._layer: int | None = None
        self._seen: set[int] = set()

    @contextmanager
    def computing(self, chunks: Sequence[Chunk], mark: Mark | None) -> Iterator[None]:
        """Around a forward pass.

        Args:
            chunks: of its requests; those whose rooms send nothing, or not yet, are left out.
            mark: an event that fires when the stream of the pass has done what is queued now; None: it is done.
        """
        self._attempt(lambda: self._begin(chunks, mark))
        try:
            yield
        except BaseException:
            self._fail(LocalProtocolError("SGLang's forward pass has failed"))
            raise
        self._attempt(self._end)

    def layer_begins(self, layer: int, *, writes: bool = True) -> None:
        """The attention of a layer begins, so that of the last one has ended.

        Some models use the rows of an earlier layer again: that call writes none.
        """
        if self._step is not None and layer != self._layer and (writes or layer not in self._seen):
            self._attempt(lambda: self._next(layer))

    def _begin(self, chunks: Sequence[Chunk], mark: Mark | None) -> None:
        self._rooms, self._mark, self._seen = [], mark, set()
        rows = {}
        for room, stop, pages in chunks:
            chunk = room.upcoming(stop, pages)
            if chunk is not None:
                self._rooms.append(room)
                rows[room.id] = chunk
        if rows:
            self._step = self._endpoint.step(rows)
            for room in self._rooms:
                room.announced(rows[room.id][0])

    def _next(self, layer: int) -> None:
        if layer in self._seen:
            raise LocalProtocolError(f"layer {layer} is computed in several parts")
        self._seen.add(layer)
        last, self._layer = self._layer, layer
        if last is not None:
            assert self._step is not None
            self._step.layer_ready(last, self._mark)

    def _end(self) -> None:
        step, self._step, self._layer = self._step, None, None
        if step is not None:
            step.close(None if self._mark is None else self._mark())
        self._rooms = []

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except DisaggKVError as exc:
            self._fail(exc)
        except Exception as exc:
            log.exception("a forward pass cannot be sent")
            self._fail(LocalProtocolError(f"unexpected {type(exc).__name__}: {exc}"))

    def _fail(self, error: DisaggKVError) -> None:
        """The rows of this pass cannot be sent: its requests fail."""
        rooms, self._rooms, self._step, self._layer = self._rooms, [], None, None
        for room in rooms:
            room.refuse(error)
