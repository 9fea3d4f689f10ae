"""What an endpoint holds of its peers, against what its table of peers says that it may hold."""

from __future__ import annotations

from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.endpoints.loop.event_loop import EventLoop
from disagg_kv.ids import Epoch, Peer
from disagg_kv.transports import InprocTransport, ShmTransport


def may_hold(loop: EventLoop) -> set[Epoch]:
    """Lives that the table knows and has not parted, and those that rooms use: they may owe evidence.

    What a forgotten life keeps goes with the next step after the end of the last room that used it.
    """
    peers = loop.peers
    known = {epoch for epoch, peer in peers._peers.items() if not peer.parted}
    return known.union(peers._users, (epoch for epoch in peers._timers._due if epoch not in peers._peers))


def connected(loop: EventLoop) -> set[Peer]:
    """The peers of the transport itself."""
    transport = loop.me.transport
    inner = getattr(transport, "_inner", transport)
    assert isinstance(inner, InprocTransport | ShmTransport)
    watched = set(inner._exits._watched) if isinstance(inner, ShmTransport) else set[Peer]()
    return set(inner._peers.all) | watched


def check_links(endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
    """Connections, watched processes and the transport hold no life that the table of peers has given up."""
    loop = endpoint.driver.loop
    links, monitor = loop.connections._links, loop._process_monitor
    held = {
        "remotes": set(loop.remotes),
        "linked": set(links),
        "watched": set(monitor._watches._watched),
        "ended": set(monitor.landing),
        "listed": set(loop.peer_registry._present),
    }
    left = {what: lives - may_hold(loop) for what, lives in held.items() if lives - may_hold(loop)}
    assert not left, {what: [life.hex()[:8] for life in lives] for what, lives in left.items()}
    assert connected(loop) <= {link.peer for link in links.values()}, "the transport has a peer without a link"
    there = {epoch for epoch in loop.peers.epochs() if epoch not in loop.siblings}
    assert there <= set(links), "a life is there without a link"
