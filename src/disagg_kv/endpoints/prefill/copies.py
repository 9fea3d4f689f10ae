"""Copies from a room's pages into mapped pages of decode ranks, from their launch until they have ended.

One launch carries all transfers that are ready together. Our kernel reads pages of the room and writes pages of peers,
whether they live or not: a mapping outlives its owner. So only the event of its end proves that a copy is quiet; the
end of a peer's process proves nothing about it.

An event that raises fails the rooms, but proves nothing either. The copy is asked again in each step of the loop, and
is quiet once its event has happened.

Such a copy may outlive its endpoint. What it reads and writes stays mapped until its event has happened, or the process
ends.

A launch carries the flags of its segments. Where the device raises them behind the copy, decode knows that the bytes
are there before a thread of ours does. What raises them stays mapped as the pages do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define

from ...kernels import Kernels, PageMove
from ...memory import Event
from .writes import Post, PostedWrites

_RUNNING: dict[Copying, None] = {}
"""Launches of all endpoints of this process, closed ones too, whose events are not known to have happened."""


@define(eq=False)
class Copying:
    """A launch that may still run, and what keeps its memory mapped."""

    event: Event | None
    moves: Sequence[PageMove]
    posts: Sequence[Post]
    after: Event | None

    def over(self) -> bool:
        """Whether it has ended; raises what its event raises."""
        return self.event is None or self.event.query()


class PageCopies:
    """Runs on the thread that advances.

    ``running`` are the launches that may still run, ``failed`` those of them whose event raised.

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

    def launch(self, begun: Sequence[tuple[Post, PageMove]], after: Event | None) -> None:
        """Copy for all of these posts, behind ``after``; an error of the kernels becomes theirs."""
        posts, moves = [post for post, _ in begun], [move for _, move in begun]
        one, started = Copying(None, moves, posts, after), self._clock()
        # Before the launch: an interrupt of the engine's thread leaves open whether it runs, and then this stays.
        _RUNNING[one] = None
        error: Exception | None = None
        try:
            one.event = self._kernels.copy(moves, after, [post.flag for post in posts if post.flag is not None])
        except Exception as exc:
            error = exc
        took = self._clock() - started
        for post in posts:
            post.posted = True
        if after is None:
            self._cross(posts, started)
        if error is not None:
            # Kernels raise before they have launched anything, or once all that they copied is done.
            del _RUNNING[one]
            self._end(posts, error)
            return
        for post in posts:
            post.room.handle.report.descriptors += 1
        posts[0].room.handle.report.spend("post", took)
        if one.event is None:
            del _RUNNING[one]
            self._end(posts, None)
            return
        for post in posts:
            post.copying = True
        self.running.append(one)

    def look(self) -> None:
        """Take in the copies that have ended since the last look."""
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
                self._end(one.posts, exc)
                continue
            self.running.remove(one)
            self._ended(one)
            self._end(one.posts, None)

    def look_at_failed(self) -> None:
        """Take in the copies that failed and are proved to have ended."""
        for one in list(self.failed):
            try:
                if not one.over():
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

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the posts of copies that may still run count as such."""
        copying = {post for one in (*self.running, *self.failed) for post in one.posts}
        assert copying == {post for posts in self._writes.of_room.values() for post in posts if post.copying}, copying

    def _cross(self, posts: Sequence[Post], at: float) -> None:
        for post in posts:
            self._writes.crosses(post, at)

    def _end(self, posts: Sequence[Post], error: Exception | None) -> None:
        for post in posts:
            post.error = post.error or error
            self._writes.end(post)
