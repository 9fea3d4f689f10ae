"""One-sided writes."""

from .base import (
    Capabilities,
    Flags,
    LinkCost,
    PeerLost,
    Settled,
    SupportsAllocate,
    SupportsFlags,
    SupportsMapping,
    Transport,
    WriteEnded,
)
from .connected import Connected
from .descriptor import Descriptor, Region, decode, encode, pack, unpack
from .inproc import InprocTransport
from .process import PROCESS, Home, Process, Watch
from .regions import Extents, RegionTable, copy
from .registry import available, between_processes, register_transport, transport
from .several import Carrier, Failed, Transports
from .shm import ShmTransport

__all__ = [
    "PROCESS",
    "Capabilities",
    "Carrier",
    "Connected",
    "Descriptor",
    "Extents",
    "Failed",
    "Flags",
    "Home",
    "InprocTransport",
    "LinkCost",
    "PeerLost",
    "Process",
    "Region",
    "RegionTable",
    "Settled",
    "ShmTransport",
    "SupportsAllocate",
    "SupportsFlags",
    "SupportsMapping",
    "Transport",
    "Transports",
    "Watch",
    "WriteEnded",
    "available",
    "between_processes",
    "copy",
    "decode",
    "encode",
    "pack",
    "register_transport",
    "transport",
    "unpack",
]
