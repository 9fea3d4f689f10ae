"""The tables of pools on one GPU: each is uploaded once, at the first call for its pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from attrs import define

from ..memory import PagedMemory
from .triton_tables import Planes


@define(eq=False)
class _Uploaded:
    """A pool's table; ``event``: not there before it, None: there."""

    planes: Planes
    table: torch.Tensor
    event: torch.cuda.Event | None


class PoolTables:
    """The tables of pools on one GPU; any thread.

    Args:
        device: the GPU.
        streams: launches that read the tables are enqueued on these.
        neighbours_together: see :class:`.triton_tables.Planes`.
    """

    def __init__(self, device: str, streams: Sequence[torch.cuda.Stream], neighbours_together: bool) -> None:
        self._device = device
        self._streams = streams
        self._neighbours_together = neighbours_together
        self._lock = threading.Lock()
        self._planes: WeakKeyDictionary[PagedMemory, _Uploaded] = WeakKeyDictionary()

    def of(self, pool: PagedMemory, stream: torch.cuda.Stream) -> Planes:
        """The pool's planes, whose words are there for what is enqueued on ``stream`` next; uploaded at first."""
        with self._lock:
            found = self._planes.get(pool)
            if found is None:
                planes = Planes(pool, self._neighbours_together)
                with torch.cuda.stream(stream):
                    table = torch.from_numpy(planes.words).pin_memory().to(self._device, non_blocking=True)
                    planes.addr = table.data_ptr()
                    uploaded = torch.cuda.Event()
                    uploaded.record(stream)
                for other in self._streams:
                    table.record_stream(other)
                found = self._planes[pool] = _Uploaded(planes, table, uploaded)
        event = found.event
        if event is not None:
            if event.query():
                found.event = None
            else:
                stream.wait_event(event)
        return found.planes
