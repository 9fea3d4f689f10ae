"""Endpoints with several transports in processes of their own, one of which names another host."""

from __future__ import annotations

from functools import cache

import attrs

from disagg_kv.transports import process
from tests.support.processes import Cluster, Knobs, Member, Node, Setup

ROOM, AGAIN, TOKENS = b"room", b"again", 600


class Elsewhere(Member):
    """A process that says that it is on another host, so that a transport within a host refuses its peers."""

    def __init__(self, setup: Setup) -> None:
        process._host = cache(lambda: "elsewhere")
        super().__init__(setup)


def crosses(cluster: Cluster, knobs: Knobs, kind: type[Member]) -> tuple[Node, Node]:
    """One request from a rank of some kind to one of decode, byte for byte, into other pages; both ranks."""
    (prefill,) = cluster.start("prefill", "P", 1, knobs, kind)
    (decode,) = cluster.start("decode", "D", 1, attrs.evolve(knobs, page_size=32, layout="HND"))
    cross(prefill, decode, ROOM)
    return prefill, decode


def cross(prefill: Node, decode: Node, *rooms: bytes) -> None:
    """The last of these requests, in two chunks; the others have crossed before."""
    room, there = rooms[-1], dict.fromkeys(rooms, TOKENS)
    decode.ask("expect", room, "P", TOKENS)
    assert decode.ask("wrong", there) > 0, "the check of the bytes cannot fail"
    prefill.ask("begin", room, TOKENS)
    prefill.ask("send", room, 0, TOKENS // 2, False)
    prefill.ask("send", room, TOKENS // 2, TOKENS, True)
    for node in (prefill, decode):
        look = node.until(room, lambda look: look.released)
        assert look.phase == "DONE", look
    assert decode.ask("wrong", there) == 0


def check_near(cluster: Cluster, near: str, far: str, device: str) -> None:
    """A peer of the host is reached over the near transport, and mapped for the second room; both sides name it."""
    prefill, decode = crosses(cluster, Knobs("auto", transport=f"{near}+{far}", device=device), Member)
    look = prefill.ask("look", ROOM)
    assert (look.path, look.transport, look.transport_reason) == ("staged", near, "the first transport"), look
    assert decode.ask("look", ROOM).transport == near
    cut = look.segments
    assert cut > 2, "more than the chunks"
    cross(prefill, decode, ROOM, AGAIN)
    look = prefill.ask("look", AGAIN)
    assert (look.path, look.segments) == ("mapped", cut if device == "cpu" else 2), (
        "decode knows that its pool is mapped"
    )


def check_far(cluster: Cluster, near: str, far: str, device: str) -> None:
    """A peer that the near transport refuses is reached over the far one, with the near one's reason."""
    prefill, decode = crosses(cluster, Knobs("auto", transport=f"{near}+{far}", device=device), Elsewhere)
    look = prefill.ask("look", ROOM)
    assert (look.path in ("staged", "slice"), look.transport) == (True, far), look
    assert look.transport_reason.startswith(f"not {near}: "), look
    assert decode.ask("look", ROOM).transport == far
