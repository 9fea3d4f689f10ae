"""What a decode rank keeps per room and per prefill instance."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from ...errors import DisaggKVError, IncompatiblePeerError
from ...geometry import Share
from ...ids import Rank
from ...planning import PartView
from ...protocol import ReceiveRoom, Receiving, RoomKey
from ...rendezvous import Source
from ..kept_pages import CachedPagesCheck
from ..runtime.handshake import RemoteEndpoint
from ..runtime.plan_cache import PlanCache
from .handle import CheckedExpectation, ReceptionHandle


@define(eq=False)
class DecodeRoom:
    """A room, with what is known of its other side and of where its rows go.

    ``checking``: what it builds on. ``views``: what each prefill rank sends of what it awaits, and where it lies here.
    """

    key: RoomKey
    machine: ReceiveRoom
    handle: ReceptionHandle
    source: Source
    silence_s: float
    opened: float
    routes: PlanCache | None = None
    remotes: tuple[RemoteEndpoint, ...] = ()
    wanted: CheckedExpectation | None = None
    checking: CachedPagesCheck | None = None
    views: dict[Rank, tuple[Sequence[Share], PartView]] = field(factory=dict)

    def next_at(self) -> float | None:
        """When something is due for it: a deadline, a repeat, or that its prefill ranks were not found in time."""
        due, machine = self.machine.next_at(), self.machine
        if machine.writers or machine.state is Receiving.CLOSED:
            return due
        unfound = self.opened + self.silence_s
        return unfound if due is None else min(due, unfound)

    @property
    def name(self) -> str:
        """For messages."""
        return f"room {self.key.room.hex()} generation {self.key.generation}"


@define(eq=False)
class PrefillInstance:
    """A prefill instance that rooms wait for; ``error``: why the rendezvous does not say where it is."""

    addresses: tuple[str, ...] | None = None
    look_at: float = 0.0
    pause_s: float = 0.0
    error: DisaggKVError | None = None
    waiting: dict[RoomKey, DecodeRoom] = field(factory=dict)


def check_ranks(source: Source, remotes: Sequence[RemoteEndpoint]) -> None:
    """All ranks must say the same of their instance, and be where the rendezvous says they are."""
    first = remotes[0]
    for rank, remote in enumerate(remotes):
        hello = remote.hello
        said = (hello.instance, hello.rank, len(remote.shards), hello.slot_bytes)
        wanted = (source.instance, rank, len(remotes), first.hello.slot_bytes)
        names = ("instance", "rank", "ranks", "slot_bytes")
        for name, ours, theirs in zip(names, wanted, said, strict=True):
            if ours != theirs:
                raise IncompatiblePeerError(f"{name} of {hello.address}", ours, theirs)
        if remote.shards != first.shards:
            raise IncompatiblePeerError(f"shards of {hello.address}", "those of rank 0", "others")
