"""Copies from a room's pages into mapped pages of decode ranks, from their launch until they have ended.

One launch carries all transfers that are ready together. Our kernel reads pages of the room and writes pages of peers,
whether they live or not: a mapping outlives its owner. So only the event of its end proves that a copy is quiet; the
end of a peer's process proves nothing about it.

An event that raises fails the rooms, but proves nothing either. The copy is asked again in each step of the loop, and
is quiet once its event has happened.

Such a copy may outlive its endpoint. What it reads and writes stays mapped until its event has happened, or the process
ends.

Copies of rows that are still computed are armed, see :mod:`.armed`: the engine's thread may launch them at any time.

A launch carries the bells of its segments. Where the device rings them behind the copy, decode's engine knows that the
bytes are there before a thread of ours does. What rings stays mapped as the pages do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial

from attrs import define

from ...core.room.rows import Readiness
from ...ids import LayerId
from ...kernels import Kernels, PageMove, SupportsArming
from ...memory import Bell, Event
from .armed import Armed, ArmedCopies, Launch, Launched
from .room import PrefillRoom
from .writes import Post, PostedWrites

_RUNNING: dict[Copying, None] = {}
"""Launches of all endpoints of this process, closed ones too, whose events are not known to have happened."""


@define(eq=False)
class Copying:
    """A launch that may still run, and what keeps its memory mapped."""

    event: Event
    moves: Sequence[PageMove]
    posts: Sequence[Post]
    after: Event | None


@define(eq=False)
class ArmedCopy:
    """A copy that is armed, or that the engine's thread has launched since; ``listed``: where that thread finds it."""

    armed: Armed
    room: PrefillRoom
    moves: Sequence[PageMove]
    posts: Sequence[Post]
    listed: ArmedCopies
    drop: Callable[[], None]


class PageCopies:
    """Runs on the endpoint's thread only.

    ``running`` are the launches that may still run, ``failed`` those of them whose event raised, ``armed`` what is not
    launched, as far as this thread knows.

    Args:
        kernels: copy.
        writes: takes the outcomes.
        clock: seconds.
    """

    def __init__(self, kernels: Kernels, writes: PostedWrites, clock: Callable[[], float]) -> None:
        self._kernels = kernels
        self._writes = writes
        self._clock = clock
        self.running: list[Copying] = []
        self.failed: list[Copying] = []
        self.armed: list[ArmedCopy] = []
        self._arming = kernels if isinstance(kernels, SupportsArming) else None

    def launch(self, begun: Sequence[tuple[Post, PageMove]], after: Event | None) -> None:
        """Copy for all of these posts, behind ``after``; an error of the kernels becomes theirs."""
        posts, moves = [post for post, _ in begun], [move for _, move in begun]
        one = Armed(frozenset(), partial(self._kernels.copy, moves, bells=_bells(posts)))
        one.launch(after, self._clock)
        self._launched(moves, posts, one.launched)
        one.settle()

    def _launched(self, moves: Sequence[PageMove], posts: Sequence[Post], what: Launched | None) -> None:
        """A launch has begun, or has failed."""
        assert what is not None
        for post in posts:
            post.posted, post.copying = True, False
        if what.after is None:
            self._cross(posts, what.started)
        if what.error is not None:
            # Kernels raise before they have launched anything, or once all that they copied is done.
            self._end(posts, what.error)
            return
        for post in posts:
            post.room.handle.report.descriptors += 1
        posts[0].room.handle.report.spend("post", what.took)
        if what.event is None:
            self._end(posts, None)
            return
        for post in posts:
            post.copying = True
        self.running.append(Copying(what.event, moves, posts, what.after))
        _RUNNING[self.running[-1]] = None

    def arm(self, begun: Sequence[tuple[Post, PageMove]], layers: frozenset[LayerId], listed: ArmedCopies) -> None:
        """Plan a copy for these posts of one room, and let the engine's thread launch it once ``layers`` are final."""
        posts, moves = [post for post, _ in begun], [move for _, move in begun]
        bells = _bells(posts)
        launch: Launch = partial(self._kernels.copy, moves, bells=bells)
        drop = _nothing
        try:
            prepared = None if self._arming is None else self._arming.prepare_copy(moves, bells)
        except Exception as exc:
            self._end(posts, exc)
            return
        if prepared is not None:
            launch, drop = prepared.launch, prepared.drop
        armed = Armed(layers, launch)
        for post in posts:
            post.copying = True
        self.armed.append(ArmedCopy(armed, posts[0].room, moves, posts, listed, drop))
        listed.add(armed)

    def review(self, rooms: Container[PrefillRoom]) -> None:
        """Take in what the engine's thread has launched. In ``rooms``, where something changed, act on what is armed.

        It is dropped where the room has failed or has no pages any more. It is launched where its rows are final: the
        engine's thread has left it to this one.
        """
        for one in list(self.armed):
            if one.armed.launched is None and one.room in rooms:
                self._take(one)
            if one.armed.launched is not None:
                self._remove(one)
                self._launched(one.moves, one.posts, one.armed.launched)
                one.armed.settle()

    def _take(self, one: ArmedCopy) -> None:
        machine, segment = one.room.machine, one.posts[0].transfer.segment
        readiness = Readiness.WITHDRAWN if machine.error is not None else machine.rows.readiness(segment)
        if readiness is Readiness.READY:
            one.armed.launch(one.room.ready_events.before(segment), self._clock)
        elif readiness is Readiness.WITHDRAWN and one.armed.take():
            self._remove(one)
            one.drop()
            for post in one.posts:
                post.copying = False
                self._writes.disarmed(post)

    def _remove(self, one: ArmedCopy) -> None:
        self.armed.remove(one)
        one.listed.remove(one.armed)

    def look(self) -> None:
        """Take in the copies that have ended since the last look."""
        for one in list(self.running):
            try:
                if one.after is not None and one.after.query():
                    one.after = None
                    self._cross(one.posts, self._clock())
                if not one.event.query():
                    continue
            except Exception as exc:
                self.running.remove(one)
                self.failed.append(one)
                self._end(one.posts, exc)
                continue
            self.running.remove(one)
            self._ended(one)
            self._end(one.posts, None)

    def look_at_failed(self) -> None:
        """Take in the copies that failed and are proved to have ended."""
        for one in list(self.failed):
            try:
                if not one.event.query():
                    continue
            except Exception:
                continue  # Its rooms have failed with the first such error; their pages stay held.
            self.failed.remove(one)
            self._ended(one)
            for post in one.posts:
                self._writes.quiet(post)

    def _ended(self, one: Copying) -> None:
        del _RUNNING[one]
        for post in one.posts:
            post.copying = False

    def posts(self) -> Iterator[Sequence[Post]]:
        """Of each copy that is armed or may still run."""
        yield from (one.posts for one in (*self.running, *self.failed))
        yield from (one.posts for one in self.armed)

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the posts of copies that are armed or may still run count as such."""
        copying = {post for posts in self.posts() for post in posts}
        assert copying == {post for posts in self._writes.of_room.values() for post in posts if post.copying}, copying

    def _cross(self, posts: Sequence[Post], at: float) -> None:
        for post in posts:
            self._writes.crosses(post, at)

    def _end(self, posts: Sequence[Post], error: Exception | None) -> None:
        for post in posts:
            post.error = post.error or error
            self._writes.end(post)


def _bells(posts: Sequence[Post]) -> Sequence[Bell]:
    return [post.bell for post in posts if post.bell is not None]


def _nothing() -> None:
    """Nothing was prepared."""
