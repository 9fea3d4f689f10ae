"""Senders and receivers: the only place where core, pool, kernels, transport and channel meet."""

from .api import (
    Delivery,
    Handle,
    Receiver,
    Reception,
    SupportsStatus,
    SupportsUsage,
)
from .decode.endpoint import DecodeEndpoint
from .expectation import Expectation
from .loop.construction import Environment, threads_on
from .peers.incarnation import Incarnation
from .prefill.endpoint import PrefillEndpoint
from .prefill.handle import ForwardPass
from .retry import Attempt, Fail, Recovering, RecoveringReceiver, Recovery, Retry, attempt_id, room_id
from .status import EndpointStatus, PeerInfo, PeerState, Report, RoomInfo, Usage

__all__ = [
    "Attempt",
    "DecodeEndpoint",
    "Delivery",
    "EndpointStatus",
    "Environment",
    "Expectation",
    "Fail",
    "ForwardPass",
    "Handle",
    "Incarnation",
    "PeerInfo",
    "PeerState",
    "PrefillEndpoint",
    "Receiver",
    "Reception",
    "Recovering",
    "RecoveringReceiver",
    "Recovery",
    "Report",
    "Retry",
    "RoomInfo",
    "SupportsStatus",
    "SupportsUsage",
    "Usage",
    "attempt_id",
    "room_id",
    "threads_on",
]
