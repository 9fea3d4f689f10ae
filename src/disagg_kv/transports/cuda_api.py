"""What the ``cuda_ipc`` transport asks of CUDA, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, Protocol

from attrs import frozen

from ..geometry import I64

Stream = NewType("Stream", int)
"""A queue of copies on one device."""

Mark = NewType("Mark", int)
"""A place in a stream: an event of the driver's that was recorded there."""


@frozen
class Gpu:
    """What names a GPU in every process of a host; its number does not.

    Args:
        uuid: 16 bytes; of the instance, where the GPU is partitioned (MIG).
        partitioned: whether it is such an instance.
    """

    uuid: bytes
    partitioned: bool = False

    def __str__(self) -> str:
        return f"{'MIG instance' if self.partitioned else 'GPU'} {self.uuid.hex()}"


class Cuda(Protocol):
    """The driver. Addresses are those of this process; devices are numbered as in ``Buffer.device``. Any thread.

    Every method raises a :class:`~disagg_kv.errors.TransportError` that names the call and the driver's own word.
    None but ``open``, ``close``, ``share`` and ``unshare`` may wait for a GPU.
    """

    def gpus(self) -> Sequence[Gpu]:
        """The GPUs that this process sees, by their numbers here."""
        ...

    def reaches(self, device: int, other: int) -> bool:
        """Whether kernels on one device can have the memory of another one mapped; both have numbers here."""
        ...

    def segment(self, device: int, addr: int) -> tuple[int, int]:
        """First byte and length of the allocation that holds the address ``addr`` of a device, as it sees it."""
        ...

    def shareable(self, device: int, addr: int) -> bool:
        """Whether the memory at ``addr`` can be exported: what is mapped piecewise (VMM), or pooled, cannot."""
        ...

    def export(self, device: int, addr: int) -> bytes:
        """What another process needs to open the allocation that begins at ``addr``."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for copies and kernels of ``device``; the address of its first byte.

        What is open already gets the same address again, and has to be closed once more.
        """
        ...

    def close(self, device: int, addr: int) -> None:
        """Undo one :meth:`open`; no copy may use the mapping any more."""
        ...

    def share(self, device: int, addr: int, nbytes: int) -> int:
        """Let streams of all devices store words in host memory; its address as those of ``device`` see it."""
        ...

    def unshare(self, device: int, addr: int) -> None:
        """Undo one :meth:`share`; no stream may store there any more."""
        ...

    def stream(self, device: int) -> Stream:
        """A new queue, which waits for no other one."""
        ...

    def end(self, device: int, stream: Stream) -> None:
        """Release an empty queue."""
        ...

    def copy(
        self, device: int, stream: Stream, target: I64, source: I64, nbytes: I64, after: Sequence[int] = ()
    ) -> Mark:
        """Queue copies of at least one byte each, in any order; gives the place behind them.

        They, and what is queued later, begin when all events (``CUevent``) of ``after`` have happened, as those were
        last recorded.
        """
        ...

    def passed(self, mark: Mark) -> bool:
        """Whether all before a mark is done."""
        ...

    def forget(self, mark: Mark) -> None:
        """A mark is of no use any more."""
        ...
