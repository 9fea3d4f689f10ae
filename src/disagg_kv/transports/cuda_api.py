"""What the ``cuda_ipc`` transport knows of CUDA: GPUs, streams, and places in them."""

from __future__ import annotations

from typing import NewType

from attrs import frozen

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
