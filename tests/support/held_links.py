"""What an endpoint holds of its peers, against what its table of peers says that it may hold."""

from __future__ import annotations

from disagg_kv.core import SendTo
from disagg_kv.endpoints import DecodeEndpoint, PrefillEndpoint
from disagg_kv.endpoints.loop.event_loop import EventLoop
from disagg_kv.ids import Epoch, Peer
from disagg_kv.transports import InprocTransport, ShmTransport


def may_hold(loop: EventLoop) -> set[Epoch]:
    """Incarnations that the table knows: those that rooms use may owe evidence."""
    return set(loop.peers._peers)


def connected(loop: EventLoop) -> set[Peer]:
    """The peers of the transport itself."""
    (transport,) = loop.me.transports
    inner = getattr(transport, "_inner", transport)
    assert isinstance(inner, InprocTransport | ShmTransport)
    watched = set(inner._exits._watched) if isinstance(inner, ShmTransport) else set[Peer]()
    return set(inner._peers.all) | watched


def check_links(endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
    """Connections, watched processes and the transport hold no incarnation that the table of peers has forgotten."""
    loop = endpoint.driver.loop
    links = loop.connections._owners
    held = {
        "linked": {link.session.epoch for link in links.values()},
        "watched": {session.epoch for session in loop._exits._watched},
        "ended": {session.epoch for session in loop.landing},
    }
    left = {what: epochs - may_hold(loop) for what, epochs in held.items() if epochs - may_hold(loop)}
    assert not left, {what: [epoch.hex()[:8] for epoch in epochs] for what, epochs in left.items()}
    assert connected(loop) <= {peer for _, peer in links}, "the transport has a peer without a link"
    there = {epoch for epoch in loop.peers.epochs() if epoch not in loop.ranks}
    assert there <= held["linked"], "a peer is there without a link"


def forget(loop: EventLoop, epoch: Epoch) -> None:
    """The table forgets a peer that no room uses; the notice to it is lost."""
    peer = loop.peers.known(epoch)
    assert peer is not None
    loop._peer_effects([one for one in loop.peers._forget(peer, loop.now) if not isinstance(one, SendTo)])
