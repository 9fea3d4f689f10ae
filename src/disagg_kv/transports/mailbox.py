"""Items for one thread, which waits for them for short and bounded times."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue that any thread fills and one thread empties, in the order in which it was filled.

    A finalizer may fill it in the middle of any of its methods, which would make ``queue.Queue`` wait for itself.
    ``queue.SimpleQueue`` allows that too, but CPython's waits again for the rest of the timeout, and takes a negative
    rest for "without end" (``_queue_SimpleQueue_get_impl``; seen with 3.11 and 3.12, not with 3.13). A thread that is
    suspended there for a few microseconds sleeps until the next ``put``.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        # Free: something was put since the reader last waited.
        self._some = threading.Lock()
        self._some.acquire()

    def put(self, item: T) -> None:
        """Add an item and wake the reader; never waits."""
        self._items.append(item)
        with suppress(RuntimeError):  # it is free already: the reader takes the items before it waits again
            self._some.release()

    def get(self, timeout_s: float) -> T | None:
        """The oldest item; None: there is none, after about ``timeout_s`` seconds at most, and at times earlier."""
        if not self._items:
            self._some.acquire(timeout=timeout_s)
        return self._items.popleft() if self._items else None

    def empty(self) -> bool:
        """Whether nothing is left to take, at this moment."""
        return not self._items
