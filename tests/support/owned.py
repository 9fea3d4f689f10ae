"""A guard: one thread at a time makes the calls of a channel or a transport."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar

T = TypeVar("T")

ANY_THREAD = frozenset({"wait", "wake", "connect", "open_flags", "unmappable", "map"})
"""Methods of channels and transports that any thread may call at any time."""


def owned(thing: T, any_thread: Collection[str] = ANY_THREAD) -> T:
    """Have a thing's public methods raise an AssertionError in each thread that is inside them beside another thread.

    The thing itself is changed and returned.
    """
    inside: list[int] = []

    def guard(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def guarded(*args: object, **options: object) -> object:
            inside.append(get_ident())
            try:
                assert {*inside} == {get_ident()}, f"{method} is called by two threads of {inside} at a time"
                return method(*args, **options)
            finally:
                inside.remove(get_ident())

        return guarded

    for name, _ in inspect.getmembers(type(thing), inspect.isfunction):
        if not name.startswith("_") and name not in any_thread:
            setattr(thing, name, guard(getattr(thing, name)))
    return thing
