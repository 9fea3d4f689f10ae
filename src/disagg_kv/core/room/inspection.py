"""The accounts of a room on a decode rank, for tests and for the simulator."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from ...ids import Epoch
from .inbound import InboundSegments
from .writers import Writer


@frozen(eq=False)
class ReceiveInspection:
    """Live, and read only.

    Args:
        writers: the prefill ranks, once they are known.
        parts: the segments that are not placed in pages.
        exposed: prefill was given the room's pages.
    """

    writers: Mapping[Epoch, Writer]
    parts: InboundSegments
    exposed: bool
