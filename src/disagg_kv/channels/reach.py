"""Whether a channel can be reached from another host."""

from __future__ import annotations

import ipaddress
import re

from .keys import split_key

ON_ONE_HOST = ("inproc://", "ipc://", "unix://")
"""Addresses that only processes of the same host can use."""


def is_loopback(host: str) -> bool:
    """Whether a host, by name or number, is this one, and is called so by processes of this host alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def leaves_host(address: str) -> bool:
    """Whether endpoints of other hosts may reach the channel at an address; of an unknown kind of address: yes."""
    where, _ = split_key(address)
    tcp = re.fullmatch(r"tcp://(?:\[(.+)\]|([^:/\[\]]+)):\d+", where)
    return not where.startswith(ON_ONE_HOST) if tcp is None else not is_loopback(tcp[1] or tcp[2])
