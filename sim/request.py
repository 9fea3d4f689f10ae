"""What one room of a simulation is asked to do."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import evolve, frozen

from disagg_kv.endpoints import retry
from disagg_kv.ids import RoomId

from .conversations import Prompt


@frozen
class Request:
    """What one room is asked to do.

    Args:
        request: its id.
        source: which prefill instance.
        rows: how many it has; 0: nothing but aux.
        edges: where prefill's chunks end.
        at: seconds from the start at which the router knows of it.
        prefill_late, decode_late: seconds after which each engine opens it, and then after which it has its pages.
        pass_s: how long prefill computes a chunk.
        open_end: decode does not say how many rows it awaits.
        aux: small results ride along.
        steps: chunks are announced ahead, by forward passes.
        abort_decode, abort_prefill: seconds after which one rank of that side gives up; None: never.
        withdraw: seconds after which prefill is preempted; None: never.
        late: those seconds begin when a prefill rank has all rows, not with the room.
        total_s: its deadline.
        back: it goes from decode to the first prefill instance.
        attempt: its number; it begins when the one before has ended.
        burst: chunks are handed over at once, whether or not the endpoint has taken any.
        unmet: the side, ``prefill`` or ``decode``, for which the other waits in vain; empty: none.
        never: that side does not come at all; False: it comes too late.
        prompt: what its rows are, where decode keeps prefixes; None: they are like no others.
    """

    request: RoomId
    source: int
    rows: int
    edges: tuple[int, ...]
    at: float
    prefill_late: tuple[float, float]
    decode_late: tuple[float, float]
    pass_s: float
    open_end: bool
    aux: bool
    steps: bool
    abort_decode: float | None
    abort_prefill: float | None
    withdraw: float | None
    late: bool
    total_s: float
    prompt: Prompt | None = None
    burst: bool = False
    unmet: str = ""
    never: bool = False
    back: bool = False
    attempt: int = 1

    @property
    def room(self) -> RoomId:
        """The id of this attempt."""
        return retry.attempt_id(self.request, self.attempt)


def flagged(seed: int, requests: Sequence[Request]) -> tuple[Request, ...]:
    """The requests of a world in which flags can be raised.

    In some worlds they are alike, so that what is left of an earlier one on the page could be taken for a later one.
    """
    rng, first = random.Random(f"flagged {seed}"), requests[0]
    alike = rng.random() < 0.5 and first.prompt is None
    return tuple(evolve(one, rows=first.rows, edges=first.edges) for one in requests) if alike else tuple(requests)
