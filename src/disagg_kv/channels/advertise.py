"""The address at which peers reach a listener that is bound to every address of its host."""

from __future__ import annotations

import re
import socket
from contextlib import closing

from ..errors import ConfigurationError

ANY = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "[::]": (socket.AF_INET6, "2001:db8::1")}
"""Every address of a host, and an address elsewhere that is reserved for examples (RFC 5737, RFC 3849)."""


def reached_at(bind: str, bound: str, advertise: str | None) -> str:
    """The address of a listener, as its peers use it.

    Args:
        bind: what the user gave, for errors.
        bound: where it listens.
        advertise: host, or ``host:port``, at which peers reach it; None: it is found.

    Raises:
        ConfigurationError: no address is found, or ``advertise`` does not name a host.
    """
    listens = re.fullmatch(r"tcp://(.+):(\d+)", bound)
    if listens is None:
        if advertise is not None:
            raise ConfigurationError(f"channel {bind!r}: advertise {advertise!r} is for tcp addresses")
        return bound
    host, port = listens[1], listens[2]
    if advertise is not None:
        named = re.fullmatch(r"(\[[^\[\]]+\]|[^:/\[\]\s#]+)(?::(\d+))?", advertise)
        if named is None or named[1] in ANY or named[1] == "*":
            what = "neither a host nor host:port that a peer can reach; an IPv6 address is in brackets"
            raise ConfigurationError(f"channel {bind!r}: advertise {advertise!r} is {what}")
        return f"tcp://{named[1]}:{named[2] or port}"
    return f"tcp://{_own_address(bind, host) if host in ANY else host}:{port}"


def _own_address(bind: str, host: str) -> str:
    """The address from which this host sends to others, by its routing table. No packet is sent.

    Raises:
        ConfigurationError: the host has no route to others.
    """
    family, elsewhere = ANY[host]
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((elsewhere, 9))
        except OSError as exc:
            reason = f"peers cannot reach {host}, and this host has no route to others ({exc.strerror})"
            raise ConfigurationError(f"channel {bind!r}: {reason}: give advertise=") from exc
        found = str(probe.getsockname()[0])
    return f"[{found}]" if family is socket.AF_INET6 else found
