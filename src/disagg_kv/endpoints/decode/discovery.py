"""Finds the prefill instances that rooms wait for.

A room waits here from ``open`` on. It leaves in one of three ways. All ranks of its instance are connected: it is
:class:`Found`. One of them cannot be connected, they contradict each other, or they are not found in ``silence_s``: it
is :class:`Unreachable`. Or it ends for another reason, such as its deadline, and :meth:`Discovery.forget` removes it.

While a room waits here, the ranks that are connected are in use: none is forgotten before the last one is connected.

Rooms that leave wait in :attr:`Discovery.outcomes`. The owner takes them, and checks that they are still open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from math import inf
from typing import TypeAlias

from attrs import define, field, frozen

from ...core import RoomKey
from ...errors import DisaggKVError, IncompatiblePeerError, InstanceClosedError, PeerLostError, text_of
from ...ids import Epoch
from ...rendezvous import Source
from ..loop.event_loop import EventLoop
from ..peers.directory import LOOKUP_FAILED_S, LOOKUP_S, LookupResult
from ..peers.handshake import RemoteEndpoint
from ..peers.session import PeerSession
from .room import DecodeRoom


@frozen
class Found:
    """All prefill ranks of a room are connected, in the order of their ranks."""

    room: DecodeRoom
    remotes: tuple[RemoteEndpoint, ...]


@frozen
class Unreachable:
    """A room cannot begin. It may have been declined: not all of its prefill ranks were there to be notified."""

    room: DecodeRoom
    error: DisaggKVError


Outcome: TypeAlias = Found | Unreachable


@define(eq=False)
class PrefillInstance:
    """An instance that rooms wait for.

    Args:
        addresses: of its ranks; None: not known.
        look_at: when to ask the rendezvous again.
        pause_s: seconds between the last two questions.
        error: why the rendezvous gave no addresses.
        waiting: the rooms that wait.
        held: ranks that are in use for them.
    """

    addresses: tuple[str, ...] | None = None
    look_at: float = 0.0
    pause_s: float = 0.0
    error: DisaggKVError | None = None
    waiting: dict[RoomKey, DecodeRoom] = field(factory=dict)
    held: list[PeerSession] = field(factory=list)

    def fail(self, error: DisaggKVError, address: str | None = None) -> list[Outcome]:
        """No room that waits can begin, as the rank at ``address`` is not there. The addresses are asked for again."""
        rank = self.addresses.index(address) if self.addresses and address is not None else None
        self.addresses = None
        waiting, self.waiting = self.waiting, {}
        return [Unreachable(room, _named(error, room.source, rank)) for room in waiting.values()]


class Discovery:
    """Instances that rooms wait for; everything here runs on the thread that advances.

    Attributes:
        outcomes: of the rooms that have left.
        unmet: by source, rooms that failed before their prefill ranks were known.
        untold: those of which a rank has to learn that, in order: a room that failed earlier comes first.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._instances: dict[Source, PrefillInstance] = {}
        self.outcomes: deque[Outcome] = deque()
        self.unmet: dict[Source, dict[RoomKey, DecodeRoom]] = {}
        self.untold: dict[tuple[RoomKey, Epoch], DecodeRoom] = {}

    def add(self, room: DecodeRoom) -> None:
        """A room waits from now on."""
        instance = self._instances.setdefault(room.source, PrefillInstance())
        instance.waiting[room.key] = room
        instance.look_at = self._loop.now
        self._find(room.source, instance)

    def again(self, room: DecodeRoom) -> None:
        """A rank that was found is lost. In the next ``tick`` all such rooms take one look, so none leaves at once."""
        instance = self._instances.setdefault(room.source, PrefillInstance())
        instance.waiting[room.key] = room
        instance.look_at = self._loop.now

    def forget(self, room: DecodeRoom) -> None:
        """A room has ended; harmless if it does not wait."""
        if room.machine.error is not None and not room.given_up:
            self._loop.directory.doubt(room.source)
        instance = self._instances.get(room.source)
        if instance is not None:
            instance.waiting.pop(room.key, None)
            self._let_go(instance)
        unmet = self.unmet.get(room.source, {})
        if unmet.pop(room.key, None) is not None and not unmet:
            del self.unmet[room.source]

    def inform(self, *sources: Source) -> None:
        """Rooms of these sources failed before their prefill ranks were known: ranks that do not know that learn it.

        The ranks are there, or cannot work with us. Who learns of a room learns of all earlier ones of the source, so
        no room costs more because of them.
        """
        loop = self._loop
        for source in sources:
            there = [one.epoch for one in loop.all_there() if one.hello.instance == source.instance]
            useless = (loop.peers.useless_at(address, loop.now) for address in loop.directory.known(source) or ())
            for epoch in [*there, *filter(None, useless)]:
                rooms = list(takewhile(partial(self._uninformed, epoch), reversed(self.unmet[source].values())))
                self.untold.update({(room.key, epoch): room for room in reversed(rooms)})

    def next_untold(self) -> tuple[DecodeRoom, Epoch]:
        """The first of ``untold``, and the rank that learns of it now."""
        key, epoch = next(iter(self.untold))
        return self.untold.pop((key, epoch)), epoch

    def _uninformed(self, epoch: Epoch, room: DecodeRoom) -> bool:
        return epoch not in room.machine.writers and (room.key, epoch) not in self.untold

    def tick(self) -> None:
        """Ask the rendezvous again where that is due. Instances that no room waits for are forgotten."""
        for source, instance in list(self._instances.items()):
            if not instance.waiting:
                del self._instances[source]
            elif instance.look_at <= self._loop.now:
                self._find(source, instance)
            while self._until(instance) <= self._loop.now:
                room = instance.waiting.pop(next(iter(instance.waiting)))
                self.outcomes.append(Unreachable(room, self._not_found(room)))
                self._let_go(instance)

    def _until(self, instance: PrefillInstance) -> float:
        """When the first room has waited for its whole ``silence_s``; infinity: none waits."""
        first = next(iter(instance.waiting.values()), None)
        return inf if first is None else first.opened + self._loop.options.silence_s

    def next_at(self) -> float | None:
        """When ``tick`` is due; None: not at all."""
        return min((min(one.look_at, self._until(one)) for one in self._instances.values()), default=None)

    def on_answer(self, answer: LookupResult) -> None:
        """The rendezvous has answered. Where it failed, rooms keep waiting, and it is asked again."""
        instance = self._instances.get(answer.source)
        if instance is None:
            return
        instance.error = answer.error
        if isinstance(answer.error, InstanceClosedError):
            self._fail(instance, answer.error)
            return
        if answer.error is not None:
            instance.look_at = self._loop.now + LOOKUP_FAILED_S
        if answer.addresses is None:
            return
        instance.addresses = answer.addresses
        for address in answer.addresses:
            if self._loop.peers.at(address) is None:
                self._loop.dial(address)
        self._ready(instance)

    def on_up(self, address: str) -> None:
        """A prefill rank is connected."""
        for instance in self._with(address):
            self._ready(instance)

    def on_unreachable(self, address: str, error: DisaggKVError) -> None:
        """A prefill rank cannot be connected."""
        for instance in self._with(address):
            self._fail(instance, error, address)

    def _fail(self, instance: PrefillInstance, error: DisaggKVError, address: str | None = None) -> None:
        self.outcomes += instance.fail(error, address)
        self._let_go(instance)

    def _hold(self, instance: PrefillInstance) -> None:
        """The ranks that are connected stay so while rooms wait for the others."""
        for address in instance.addresses or ():
            if (epoch := self._loop.peers.at(address)) is not None:
                self._loop.use(epoch, instance.held)

    def _let_go(self, instance: PrefillInstance) -> None:
        """The same is over once no room waits."""
        if not instance.waiting:
            self._loop.release(instance.held)

    def _not_found(self, room: DecodeRoom) -> PeerLostError:
        """The error of a room that waited for its whole ``silence_s``."""
        instance = self._instances.get(room.source)
        why = f": {text_of(instance.error)}" if instance is not None and instance.error is not None else ""
        name = room.source.instance
        reason = f"prefill instance {name!r} was not found in {self._loop.options.silence_s:g} s{why}"
        return PeerLostError(reason, instance=name)

    def _find(self, source: Source, instance: PrefillInstance) -> None:
        """Take the ranks that are connected, else ask the rendezvous, ever more seldom.

        It is also asked now and then while they are connected, since an instance may move. No room waits for that.
        """
        loop = self._loop
        instance.pause_s = min(max(LOOKUP_S, 1.5 * instance.pause_s), LOOKUP_FAILED_S)
        instance.look_at = loop.now + instance.pause_s
        ranks = self._ranks(source)
        lively = all(loop.peers.lively(peer.epoch, loop.now) for peer in ranks)
        if not ranks or loop.directory.stale(source, lively=lively):
            loop.look_up(source)
            ranks = self._ranks(source)
        if instance.waiting and ranks:
            instance.addresses = loop.directory.known(source)
            self._ready(instance)

    def _ranks(self, source: Source) -> list[PeerSession]:
        """The ranks of an instance at the addresses that the rendezvous gave last; none unless all are connected.

        A rank whose connection is broken may have ended, and another instance may have taken its address: then the
        rendezvous is asked first.
        """
        ranks: list[PeerSession] = []
        for rank, address in enumerate(self._loop.directory.known(source) or ()):
            peer = self._loop.peers.addresses.get(address)
            if (
                peer is None
                or peer.lost
                or peer.closed is not None
                or (peer.hello.instance, peer.hello.rank) != (source.instance, rank)
            ):
                return []
            ranks.append(peer)
        return ranks

    def _ready(self, instance: PrefillInstance) -> None:
        """The rooms that wait leave, once all ranks are connected."""
        there = [self._loop.peers.addresses.get(address) for address in instance.addresses or ()]
        ready = tuple(one.remote for one in there if one is not None and not one.lost and one.remote is not None)
        if not instance.addresses or len(ready) < len(instance.addresses):
            self._hold(instance)
            return
        waiting, instance.waiting = instance.waiting, {}
        self._let_go(instance)
        self.outcomes += [_checked(room, ready) for room in waiting.values()]

    def _with(self, address: str) -> list[PrefillInstance]:
        return [one for one in self._instances.values() if one.addresses and address in one.addresses]


def _named(error: DisaggKVError, source: Source, rank: int | None) -> DisaggKVError:
    """The error of a rank that gave no ``Hello``: which one was looked for there."""
    if error.instance is not None:
        return error
    name = f"instance {source.instance!r}"
    return error.about(name if rank is None else f"rank {rank} of {name}", instance=source.instance, rank=rank)


def _checked(room: DecodeRoom, remotes: tuple[RemoteEndpoint, ...]) -> Outcome:
    try:
        check_ranks(room.source, remotes)
    except DisaggKVError as exc:
        return Unreachable(room, exc)
    return Found(room, remotes)


def check_ranks(source: Source, remotes: Sequence[RemoteEndpoint]) -> None:
    """All ranks must say the same of their instance, and be where the rendezvous says they are.

    Raises:
        IncompatiblePeerError: names the field that differs.
    """
    first = remotes[0]
    for rank, remote in enumerate(remotes):
        hello = remote.hello
        said = (hello.instance, hello.rank, len(remote.shards), hello.slot_bytes)
        wanted = (source.instance, rank, len(remotes), first.hello.slot_bytes)
        names = ("instance", "rank", "ranks", "slot_bytes")
        for name, ours, theirs in zip(names, wanted, said, strict=True):
            if ours != theirs:
                raise IncompatiblePeerError(f"{name} of {hello.address}", ours, theirs).about(**hello.who)
        if remote.shards != first.shards:
            others = IncompatiblePeerError(f"shards of {hello.address}", "those of rank 0", "others")
            raise others.about(**hello.who)
