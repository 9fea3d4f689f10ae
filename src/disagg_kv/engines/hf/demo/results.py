"""What the processes leave for the parent, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from attrs import frozen

from .check import PoolFile
from .config import DemoConfig


@frozen
class Moved:
    """What one endpoint says about one room.

    Args:
        nbytes: bytes of cache it sent or received.
        descriptors: writes it posted.
        path: the path that the room took.
        seconds: per phase.
    """

    nbytes: int
    descriptors: int
    path: str
    seconds: Mapping[str, float]


@frozen
class PrefillResult:
    """One prefill rank's work.

    Args:
        pid: its process.
        heads: the KV heads it holds.
        ready: when it could begin.
        ended: when its last forward pass had ended.
        rooms: what it sent, per request, turn after turn.
    """

    pid: int
    heads: tuple[int, ...]
    ready: float
    ended: float
    rooms: tuple[Moved, ...]


@frozen
class DecodeResult:
    """One decode rank's work.

    Args:
        pid: its process.
        heads: the KV heads it holds.
        ready: when it could begin.
        arrived: when the last request's cache was there.
        ended: when the last token was.
        tokens: per request, the answers of all turns.
        rooms: what it received, per request, turn after turn.
        held: tokens that it held, per request, turn after turn.
        pool: how its pages lie in ``pool-<rank>.npy``.
    """

    pid: int
    heads: tuple[int, ...]
    ready: float
    arrived: float
    ended: float
    tokens: tuple[tuple[int, ...], ...]
    rooms: tuple[Moved, ...]
    held: tuple[int, ...]
    pool: PoolFile


@frozen
class ReferenceResult:
    """What one process with the whole model made of the prompts.

    Args:
        pid: its process.
        seconds: how long it took.
        tokens: per request, the answers of all turns.
        descriptors_slice: writes that one per token and slice would have been.
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
    """What all of them left.

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
