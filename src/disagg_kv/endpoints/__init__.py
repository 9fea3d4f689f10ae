"""Senders and receivers: the only place where core, pool, kernels, transport and channel meet."""

from .api import (
    Delivery,
    Handle,
    Receiver,
    Reception,
    Step,
    SupportsFileno,
    SupportsStatus,
    SupportsUsage,
)
from .decode.endpoint import DecodeEndpoint
from .expectation import Expectation
from .loop.construction import Environment, threads_on
from .peers.incarnation import Incarnation
from .prefill.endpoint import PrefillEndpoint
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
    "Step",
    "SupportsFileno",
    "SupportsStatus",
    "SupportsUsage",
    "Usage",
    "attempt_id",
    "room_id",
    "threads_on",
]
