"""Which pools of prefill ranks a room reads here, and which paths that leaves its ranks.

Only a rank that sends rows of the room to this rank has its pool mapped, for the first such room. Rooms wait for that.
Where other paths are left, they wait for half of what is left of their silence at most, and take the other paths until
the pool is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.wire.page_runs import nameable
from ...errors import ConfigurationError
from ...ids import Rank
from ...memory import MappedPool
from ...planning import InstancePlans
from ...strategies import pulls_pages
from ..loop.event_loop import EventLoop
from ..peers.connections import READY_S
from ..peers.handshake import RemoteEndpoint
from .room import DecodeRoom


class PullSources:
    """Runs on the thread that advances.

    Args:
        loop: the endpoint's: its paths, and the connections that map.
        plans: what the ranks of a prefill instance send here.
    """

    def __init__(self, loop: EventLoop, plans: Callable[[Sequence[RemoteEndpoint]], InstancePlans]) -> None:
        self._loop = loop
        self._plans = plans
        pulling = [path for path in loop.me.paths if pulls_pages(path)]
        self._versions = {(path.name, path.version) for path in pulling}
        self._pulling = tuple(path.name for path in pulling)
        self._others = tuple(path.name for path in loop.me.paths if not pulls_pages(path))

    def ready(self, room: DecodeRoom, remotes: Sequence[RemoteEndpoint]) -> bool:
        """Whether it is known of all pools that a room reads if they are mapped; the first call begins to map them.

        False: the room waits, and the side's ``on_mapped`` says when to ask again.
        """
        left_s = room.opened + self._loop.options.silence_s - self._loop.now
        most_s = min(READY_S, max(0.0, left_s / 2)) if self._others else READY_S
        known = [self._loop.connections.map(remote.epoch, most_s) for remote in self._read(room, remotes)]
        return all(known)

    def find(self, room: DecodeRoom, remotes: Sequence[RemoteEndpoint]) -> dict[Rank, MappedPool]:
        """The pools that a room reads, as they are mapped here; none, if one of them is not.

        Raises:
            ConfigurationError: one is not mapped, with the reason, and no other path is left.
        """
        found: dict[Rank, MappedPool] = {}
        for remote in self._read(room, remotes):
            mapping = self._loop.connections.mapping(remote.epoch)
            if mapping.pool is not None:
                found[Rank(remote.hello.rank)] = mapping.pool
            elif not self._others:
                raise ConfigurationError(f"{remote.name}: path {self._pulling[0]!r} cannot: {mapping.refused}")
            else:
                return {}
        return found

    def barred(self, room: DecodeRoom) -> tuple[str, ...]:
        """Names of the paths that a room's prefill ranks may not take.

        Where the pages of all that send can be read, that costs less than any path through staging memory. As all know
        that none takes such a path, its size does not cut what they offer. A rank that sends nothing has a path, too.
        """
        if room.sources and all(map(self._pulls_from, room.remotes)):
            return self._others
        return () if room.sources or not self._others else self._pulling

    def _read(self, room: DecodeRoom, remotes: Sequence[RemoteEndpoint]) -> list[RemoteEndpoint]:
        """The prefill ranks whose pages a room may read: those that send something of it to this rank.

        None, if other paths are left and one frame may not be able to name the pages of a segment.
        """
        if not self._pulling:
            return []
        plans = self._plans(remotes)
        parts = plans.intake(plans.rotation(room.key.room)).parts
        read = [remote for remote, part in zip(remotes, parts, strict=True) if part and self._pulls_from(remote)]
        most = self._loop.options.table_part
        if self._others and not all(nameable([g.rows_per_page for g in one.site.groups], most) for one in read):
            return []
        return read

    def _pulls_from(self, remote: RemoteEndpoint) -> bool:
        """Whether both sides know a path by which kernels here read a prefill rank's pages; none of them converts."""
        return remote.spec == self._loop.me.site.spec and not self._versions.isdisjoint(remote.hello.paths)
