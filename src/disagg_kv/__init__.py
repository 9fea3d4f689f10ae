"""Move KV cache from prefill GPUs to decode GPUs.

An engine builds a pool over its cache, opens a :class:`PrefillEndpoint` or a :class:`DecodeEndpoint` per rank, and
opens a room per request. Names that neither this module nor a package's ``__init__`` exports are private.
"""

from .channels import Channel
from .core import Options, Phase
from .endpoints import (
    DecodeEndpoint,
    Delivery,
    Expectation,
    PeerInfo,
    PrefillEndpoint,
    Receiver,
    Reception,
    Report,
    Sender,
    Step,
    attempt_id,
    room_id,
)
from .errors import DisaggKVError
from .geometry import (
    CacheSpec,
    Component,
    Group,
    Holding,
    PageTable,
    Plane,
    Shard,
    Site,
    attention_tp,
    shard,
    stages,
)
from .ids import Epoch, GroupId, LayerId, Peer, Rank, RegionId, RoomId, Ticket
from .memory import Buffer, Event, MemoryPool, PagedPool
from .prefix import HashPrefixIndex, PrefixCache, PrefixIndex
from .rendezvous import Rendezvous, Source, StoreMinimum
from .staging import StagingAllocator
from .strategies import Strategy, TransferPlanner, register, strategy
from .trace import Observer, Recorder, Span
from .transports import Capabilities, Transport, register_transport, transport

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "CacheSpec",
    "Capabilities",
    "Channel",
    "Component",
    "DecodeEndpoint",
    "Delivery",
    "DisaggKVError",
    "Epoch",
    "Event",
    "Expectation",
    "Group",
    "GroupId",
    "HashPrefixIndex",
    "Holding",
    "LayerId",
    "MemoryPool",
    "Observer",
    "Options",
    "PageTable",
    "PagedPool",
    "Peer",
    "PeerInfo",
    "Phase",
    "Plane",
    "PrefillEndpoint",
    "PrefixCache",
    "PrefixIndex",
    "Rank",
    "Receiver",
    "Reception",
    "Recorder",
    "RegionId",
    "Rendezvous",
    "Report",
    "RoomId",
    "Sender",
    "Shard",
    "Site",
    "Source",
    "Span",
    "StagingAllocator",
    "Step",
    "StoreMinimum",
    "Strategy",
    "Ticket",
    "TransferPlanner",
    "Transport",
    "attempt_id",
    "attention_tp",
    "register",
    "register_transport",
    "room_id",
    "shard",
    "stages",
    "strategy",
    "transport",
]
