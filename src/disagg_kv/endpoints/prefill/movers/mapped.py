"""Copies from a room's pages into mapped pages of decode ranks, from their launch until they have ended.

One launch carries all transfers that are ready together. Our kernel reads pages of the room and writes pages of peers,
whether they live or not: a mapping outlives its owner. So only the event of its end proves that a copy is quiet; the
end of a peer's process proves nothing about it.

An event that raises fails the rooms, but proves nothing either. The copy is asked again whenever something is due,
and is quiet once its event has happened.

Such a copy may outlive its endpoint. What it reads and writes stays mapped until its event has happened, or the process
ends.

A launch carries the flags of its segments. Where the device raises them behind the copy, decode knows that the bytes
are there before a thread of ours does. What raises them stays mapped as the pages do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from attrs import define

from ....core import Transfer
from ....kernels import Kernels, PageMove, Pages, SupportsStreams
from ....memory import Event, Flag, parts
from ....planning import PageCopy, check_tables
from ....strategies import Tables
from ...loop.event_loop import EventLoop
from ...loop.timing import Budget
from ..room import PrefillRoom
from ..routes import Route
from .direct import PageLines
from .posts import Post, Posts

_RUNNING: dict[Copying, None] = {}
"""Launches of all endpoints of this process, closed ones too, whose events are not known to have happened."""


@define(eq=False)
class Copying:
    """A launch that may still run, and what keeps its memory mapped."""

    event: Event | None
    moves: Sequence[PageMove]
    flags: Sequence[Flag]
    posts: Sequence[Post]
    after: Event | None

    def over(self) -> bool:
        """Whether it has ended; raises what its event raises."""
        return self.event is None or self.event.query()


class MappedMover:
    """A :class:`~.base.Mover`.

    Copies wait for events by themselves: rows whose event does not wait on a device are not final before it. On a
    device, transfers of a room that wait for the same events share a launch. On a CPU a launch blocks, so that it has
    one segment for all its destinations.

    ``running`` are the launches that may still run, ``failed`` those of them whose event raised.

    Args:
        loop: the endpoint's: its peers, clock and observer.
        kernels: copy.
        posts: the account of what has begun.
    """

    def __init__(self, loop: EventLoop, kernels: Kernels, posts: Posts) -> None:
        self._loop = loop
        self._kernels = kernels
        self._together = isinstance(kernels, SupportsStreams)
        self._clock = loop.clock
        self._posts = posts
        self.lines = PageLines()
        self.add, self.withdraw, self.outcome = self.lines.add, self.lines.forget, posts.outcome
        self.running: list[Copying] = []
        self.failed: list[Copying] = []

    def start(self, budget: Budget) -> list[Post]:
        """See :class:`~.base.Mover`."""
        launches: dict[tuple[PrefillRoom, Hashable], list[Transfer]] = {}
        for room, _, transfers in self.lines.lines():
            for transfer in transfers:
                what: Hashable = transfer.segment
                if self._together:
                    what = frozenset(map(id, parts(room.ready_events.before(transfer.segment))))
                launches.setdefault((room, what), []).append(transfer)
        begun: list[Post] = []
        for (room, _), transfers in launches.items():
            if not budget.take():
                break
            begun += self._copy(room, transfers)
            if any(post.route.verifies(room.key.room, post.transfer.segment) for post in begun):
                break  # to sum them is a piece of work of its own
        return begun

    def _copy(self, room: PrefillRoom, transfers: Sequence[Transfer]) -> list[Post]:
        """Launch these transfers together, but those that cannot begin."""
        for transfer in transfers:
            self.lines.remove(room, transfer.to, transfer.segment)
        posts: list[Post] = []
        moves: list[PageMove] = []
        flags: list[Flag] = []
        for transfer in transfers:
            begun = self._posts.begin(room, transfer, self._plan)
            if begun is None:
                continue
            post, copy = begun
            try:
                # Nothing may begin to write once a peer's end was seen.
                self._loop.reach(transfer.to)
            except Exception as exc:
                post.error = exc
                self._posts.end(post)
                continue
            mapped = post.route.mapped
            assert mapped is not None
            flag = room.arm_flag(transfer, mapped.buffers[0].device, self._loop.observer)
            flags += [] if flag is None else [flag]
            moves.append(PageMove(copy, Pages(post.route.pool, post.tables), Pages(mapped, post.route.tables)))
            posts.append(post)
        if posts:
            self._launch(Copying(None, moves, flags, posts, posts[-1].after))
        return posts

    def _plan(self, route: Route, transfer: Transfer, tables: Tables) -> PageCopy:
        """What to copy: never more than the part, nor outside the pages of both sides."""
        plan = route.plan(PageCopy, f"a copy of {transfer.nbytes} bytes", transfer, tables)
        check_tables(route.pool.site, plan.source, tables)
        check_tables(route.remote.site, plan.target, route.tables)
        return plan

    def _launch(self, one: Copying) -> None:
        """Copy for all of its posts; an error of the kernels becomes theirs."""
        posts, started = one.posts, self._clock()
        # Before the launch: an interrupt of the engine's thread leaves open whether it runs, and then this stays.
        _RUNNING[one] = None
        error: Exception | None = None
        try:
            one.event = self._kernels.copy(one.moves, one.after, one.flags)
        except Exception as exc:
            error = exc
        took = self._clock() - started
        for post in posts:
            post.posted = True
            post.moving.add(one)
        if one.after is None:
            self._cross(posts, started)
        if error is None:
            report = posts[0].room.handle.report
            report.descriptors += len(posts)
            report.spend("post", took)
        if one.event is None:
            # Kernels raise before they have launched anything, or once all that they copied is done.
            self._over(one, error)
        else:
            self.running.append(one)

    def look(self) -> None:
        """See :class:`~.base.Mover`."""
        for one in list(self.running):
            try:
                if one.after is not None and one.after.query():
                    one.after = None
                    self._cross(one.posts, self._clock())
                if not one.over():
                    continue
            except Exception as exc:
                self.running.remove(one)
                self.failed.append(one)
                for post in one.posts:
                    self._posts.ended(post, one, exc, quiet=False)
                continue
            self.running.remove(one)
            self._over(one, None)

    def look_at_failed(self) -> None:
        """Take in the copies that failed and are proved to have ended."""
        for one in list(self.failed):
            try:
                if not one.over():
                    continue
            except Exception:
                continue  # Its rooms have failed with the first such error; their pages stay held.
            self.failed.remove(one)
            del _RUNNING[one]
            for post in one.posts:
                self._posts.settled(post, one)

    def _cross(self, posts: Sequence[Post], at: float) -> None:
        for post in posts:
            self._posts.crosses(post, at)

    def _over(self, one: Copying, error: Exception | None) -> None:
        """It reads and writes no more."""
        del _RUNNING[one]
        for post in one.posts:
            self._posts.ended(post, one, error, quiet=True)
