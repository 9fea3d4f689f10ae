"""One-sided writes."""

from .base import (
    Capabilities,
    Flags,
    Lane,
    LinkCost,
    PeerLost,
    Settled,
    SupportsAllocate,
    SupportsFlags,
    SupportsLanes,
    SupportsMapping,
    Transport,
    WriteEnded,
)
from .combining import combine
from .connected import Connected
from .descriptor import Descriptor, Region, decode, encode, pack, unpack
from .inproc import InprocTransport
from .process import PROCESS, Home, Process, Watch
from .regions import Extents, RegionTable, copy
from .registry import available, between_processes, default_transport, register_transport, transport
from .shm import ShmTransport

__all__ = [
    "PROCESS",
    "Capabilities",
    "Connected",
    "Descriptor",
    "Extents",
    "Flags",
    "Home",
    "InprocTransport",
    "Lane",
    "LinkCost",
    "PeerLost",
    "Process",
    "Region",
    "RegionTable",
    "Settled",
    "ShmTransport",
    "SupportsAllocate",
    "SupportsFlags",
    "SupportsLanes",
    "SupportsMapping",
    "Transport",
    "Watch",
    "WriteEnded",
    "available",
    "between_processes",
    "combine",
    "copy",
    "decode",
    "default_transport",
    "encode",
    "pack",
    "register_transport",
    "transport",
    "unpack",
]
