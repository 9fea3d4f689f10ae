"""The results of the processes for the parent, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from attrs import frozen

from .check import PoolFile
from .config import DemoConfig


@frozen
class Moved:
    """One endpoint's report of one room.

    Args:
        nbytes: bytes of cache it sent or received.
        descriptors: writes it posted.
        path: the path that the room took.
        transport: the one that carried it.
        seconds: per phase.
    """

    nbytes: int
    descriptors: int
    path: str
    transport: str
    seconds: Mapping[str, float]


@frozen
class PrefillResult:
    """One prefill rank's work.

    Args:
        pid: its process.
        heads: the KV heads it holds.
        ready: the time at which it could begin.
        ended: the end of its last forward pass.
        rooms: its rooms to decode, per request, turn after turn.
        returned: its rooms from decode, in the same order.
        evicted: how many of those decode gave up, as it had evicted the rows.
        pool: the layout of its pages in ``pool-prefill-<rank>.npy``, if rows came back.
    """

    pid: int
    heads: tuple[int, ...]
    ready: float
    ended: float
    rooms: tuple[Moved, ...]
    returned: tuple[Moved, ...]
    evicted: int
    pool: PoolFile | None


@frozen
class DecodeResult:
    """One decode rank's work.

    Args:
        pid: its process.
        heads: the KV heads it holds.
        ready: the time at which it could begin.
        arrived: the arrival of the last request's cache.
        ended: the time of the last token.
        tokens: per request, the answers of all turns.
        rooms: its rooms from prefill, per request, turn after turn.
        returned: its rooms to prefill, in the same order.
        held: tokens that it held, per request, turn after turn.
        pool: the layout of its pages in ``pool-decode-<rank>.npy``.
    """

    pid: int
    heads: tuple[int, ...]
    ready: float
    arrived: float
    ended: float
    tokens: tuple[tuple[int, ...], ...]
    rooms: tuple[Moved, ...]
    returned: tuple[Moved, ...]
    held: tuple[int, ...]
    pool: PoolFile


@frozen
class ReferenceResult:
    """The result of one process with the whole model.

    Args:
        pid: its process.
        seconds: its running time.
        tokens: per request, the answers of all turns.
        descriptors_slice: writes that the path ``slice`` would post.
    """

    pid: int
    seconds: float
    tokens: tuple[tuple[int, ...], ...]
    descriptors_slice: int


_PREFILL = msgspec.json.Decoder(PrefillResult)
_DECODE = msgspec.json.Decoder(DecodeResult)
_REFERENCE = msgspec.json.Decoder(ReferenceResult)


@frozen
class Results:
    """The results of all processes.

    Args:
        prefill: by rank.
        decode: by rank.
        reference: the whole model's.
    """

    prefill: tuple[PrefillResult, ...]
    decode: tuple[DecodeResult, ...]
    reference: ReferenceResult

    @classmethod
    def read(cls, work: Path, config: DemoConfig) -> Results:
        """Read the files in ``work``."""
        prefill = [(work / f"prefill-{rank}.json").read_bytes() for rank in range(config.prefills)]
        decode = [(work / f"decode-{rank}.json").read_bytes() for rank in range(config.decodes)]
        return cls(
            tuple(_PREFILL.decode(of) for of in prefill),
            tuple(_DECODE.decode(of) for of in decode),
            _REFERENCE.decode((work / "reference-0.json").read_bytes()),
        )
