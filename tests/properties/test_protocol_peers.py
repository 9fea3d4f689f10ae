"""A tick that has nothing to do is left out; nothing that it would have said is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core import VERSION, Hello, KnownPeer, Options, PeerTable
from disagg_kv.core.peers.peer_effects import PeerEffect
from disagg_kv.core.wire.frames import Heartbeat, WireSite, WireSpec
from disagg_kv.errors import PeerLostError
from disagg_kv.ids import Epoch

OURS = Epoch(bytes(16))
PEERS = [Epoch(bytes([n] * 16)) for n in (1, 2)]
ADDRESSES = ("a", "b")
ACTS = ("tick", "tick", "tick", "dial", "hello", "answer", "frame", "closed", "opened", "lose", "end", "use", "release")


def hello(src: Epoch, dst: bytes, address: str) -> Hello:
    return Hello(
        src=src, dst=dst, version=VERSION, address=address, role="any", instance="i", rank=0, host="h", pid=1,
        started=1, born=src[0], spec=WireSpec(b"", (), ()), shards=(), site=WireSite((), (), ()), regions=(),
        transport="inproc", descriptor=b"", paths=(), conversions=(), verdict="elected", slot_bytes=0, ring_region=0,
        ring_bytes=0, lease_bytes=0,
    )  # fmt: skip


class Eager(PeerTable[KnownPeer]):
    """One that looks at every peer and address whenever it is asked to."""

    def tick(self, now: float) -> list[PeerEffect]:
        for peer in self._peers.values():
            self._timers.schedule(peer, now)
        for address in self._dials._dials:
            self._dials._timers.schedule(address, now)
        return super().tick(now)


def act(table: PeerTable[KnownPeer], what: str, peer: Epoch, address: str, now: float) -> object:
    match what:
        case "tick":
            return table.tick(now)
        case "dial":
            return table.dial(address, now)
        case "hello":
            return table.on_hello(hello(peer, b"", address), now)
        case "answer":
            return table.on_hello(hello(peer, OURS, address), now)
        case "frame":
            return table.on_frame(Heartbeat(src=peer, dst=OURS), now)
        case "closed":
            table.on_closed(address, now)
        case "opened":
            table.on_opened(address)
        case "use":
            table.use(peer, now)
        case "release":
            if (known := table.known(peer)) is not None and known.users:
                table.release(known)
        case _:
            return table.lose(peer, PeerLostError("lost"), ended=what == "end")
    return None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(ACTS),
            st.sampled_from(PEERS),
            st.sampled_from(ADDRESSES),
            st.sampled_from((0.0, 0.05, 0.3, 0.3, 1.0, 41.0)),
        ),
        min_size=20,
        max_size=60,
    )
)
def test_a_table_that_looks_only_when_something_may_be_due_says_what_one_says_that_always_looks(
    acts: list[tuple[str, Epoch, str, float]],
) -> None:
    options = Options(silence_s=2.0, heartbeat_s=0.9, closed_s=0.25, retry_s=0.04)
    tables = [
        kind(OURS, "us", lambda dst: hello(OURS, dst, "us"), lambda hello: None, KnownPeer, options)
        for kind in (PeerTable, Eager)
    ]
    now = 0.0
    for what, peer, address, later in acts:
        now += later
        said = [act(table, what, peer, address, now) for table in tables]
        # A connection may be dropped twice, which does no more than once.
        lazy, eager = (sorted(set(map(str, one))) if isinstance(one, list) else str(one) for one in said)
        assert lazy == eager
