"""Whether a channel can be reached from another host, and where."""

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
    where, host = _split(address)
    return not is_loopback(host) if host else not where.startswith(ON_ONE_HOST)


def reached_at(address: str) -> str:
    """The name or number by which other hosts reach this one, in the address of a channel; empty: it has none."""
    _, host = _split(address)
    return "" if is_loopback(host) else host


def _split(address: str) -> tuple[str, str]:
    """An address without its key, and the host in it; "": no TCP address."""
    where, _ = split_key(address)
    tcp = re.fullmatch(r"tcp://(?:\[(.+)\]|([^:/\[\]]+)):\d+", where)
    return where, "" if tcp is None else tcp[1] or tcp[2]
