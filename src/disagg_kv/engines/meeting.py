"""Where the instances of an adapter meet: what its option ``rendezvous`` names."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from string import whitespace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import ConfigurationError, StoreUnreachableError, text_of
from ..rendezvous import EtcdRendezvous, RequestRendezvous, StoreRendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

OUTSIDE = frozenset("@?#" + whitespace)
"""What no ``HOST:PORT`` has."""

STORE_S = 30.0
"""Seconds to wait for a ``TCPStore``: a launcher may start it beside the instances."""


def meeting_place(given: str) -> tuple[str, Sequence[str], str]:
    """Kind, members as ``HOST:PORT``, and prefix that an option names.

    Raises:
        ConfigurationError: another kind than ``tcp`` and ``etcd``, no host, no port, or what this kind does not have.
    """
    kind, _, place = given.partition("://")
    listed, _, prefix = place.partition("/")
    members = listed.split(",")
    try:
        whole = all(not set(one) & OUTSIDE and (at := urlsplit(f"//{one}")).hostname and at.port for one in members)
    except ValueError as exc:
        raise ConfigurationError(f"rendezvous {given!r}: {exc}") from exc
    if whole and (kind == "etcd" or (kind == "tcp" and len(members) == 1 and not prefix)):
        return kind, members, prefix
    wanted = "tcp://HOST:PORT of a torch TCPStore, or etcd://HOST:PORT[,HOST:PORT]/PREFIX"
    raise ConfigurationError(f"rendezvous {given!r}: not {wanted}")


def meet_at(given: str) -> RequestRendezvous | StoreRendezvous | EtcdRendezvous:
    """The rendezvous of an option; "": addresses travel in requests.

    Raises:
        ConfigurationError: an option that cannot be.
        MissingDependencyError: the extra ``etcd`` is not installed.
        StoreUnreachableError: no ``TCPStore`` answers there. Of etcd nothing is asked before a rank is published.
    """
    if not given:
        return RequestRendezvous()
    kind, members, prefix = meeting_place(given)
    if kind == "etcd":
        return EtcdRendezvous([f"http://{one}" for one in members], prefix or "disagg_kv")
    return StoreRendezvous(_store(given, members[0]))


def _store(given: str, member: str) -> TCPStore:
    """The store; on a thread of its own, as torch waits without limit for a server that accepts and says nothing."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

    host, _, port = member.rpartition(":")
    made: list[TCPStore] = []
    why = "no answer"

    def connect() -> None:
        nonlocal why
        try:
            made.append(TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=STORE_S)))
        except Exception as exc:
            why = text_of(exc)

    thread = threading.Thread(target=connect, name="disagg_kv store", daemon=True)
    thread.start()
    thread.join(2 * STORE_S)
    if made:
        return made[0]
    raise StoreUnreachableError(f"rendezvous {given!r}: no torch TCPStore answers there; start one first: {why}")
