"""A process of a test: it does what the test says over a pipe."""

from __future__ import annotations

from multiprocessing.connection import Connection

from disagg_kv.errors import DisaggKVError


def answer(pipe: Connection, member: object) -> None:
    """Call methods of ``member`` by their names, and send back what each returns or raises, until the test is gone."""
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(member, name)(*args))
        except (DisaggKVError, AssertionError) as error:
            pipe.send(error)
