"""Move KV cache from prefill GPUs to decode GPUs.

An engine builds a pool over its cache, opens a :class:`PrefillEndpoint` or a :class:`DecodeEndpoint` per rank, and
opens a room per request. These are the names that an engine needs, and the five Protocols that it may implement. Every
other public name is imported from its package: docs/reference-packages.md lists them. All else is private.
"""

from .channels import UnixChannel, ZmqChannel
from .core import Alone, Elected, Options, Phase
from .endpoints import DecodeEndpoint, Expectation, PrefillEndpoint, Receiver, RecoveringReceiver, Retry, room_id
from .errors import DisaggKVError
from .geometry import CacheSpec, Component, PageTable, shard
from .ids import GroupId, LayerId
from .memory import MemoryPool, PagedPool
from .rendezvous import Source, StaticRendezvous, StoreRendezvous
from .staging import StagingAllocator
from .strategies import TransferPlanner, strategy
from .transports import Transport, transport

__version__ = "0.1.0"

__all__ = [
    "Alone",
    "CacheSpec",
    "Component",
    "DecodeEndpoint",
    "DisaggKVError",
    "Elected",
    "Expectation",
    "GroupId",
    "LayerId",
    "MemoryPool",
    "Options",
    "PageTable",
    "PagedPool",
    "Phase",
    "PrefillEndpoint",
    "Receiver",
    "RecoveringReceiver",
    "Retry",
    "Source",
    "StagingAllocator",
    "StaticRendezvous",
    "StoreRendezvous",
    "TransferPlanner",
    "Transport",
    "UnixChannel",
    "ZmqChannel",
    "room_id",
    "shard",
    "strategy",
    "transport",
]
