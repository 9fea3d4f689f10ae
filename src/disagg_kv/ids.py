"""The identifiers that cross layers, as distinct types, so that type checkers find mix-ups."""

from typing import Literal, NewType

Role = Literal["prefill", "decode"]
"""The two sides."""

RoomId = NewType("RoomId", bytes)
"""One attempt to transfer one request; 1 to 64 bytes, chosen by the engine and used once."""

Generation = NewType("Generation", int)
"""The number of a room on one endpoint; grows by one each time that endpoint opens a room."""

Epoch = NewType("Epoch", bytes)
"""One incarnation of an endpoint: 16 random bytes, drawn at its start and never reused."""

LayerId = NewType("LayerId", int)
"""Index of a layer in the whole model, counted from 0 (draft-model layers follow the model's own).

Calls that take a layer take a plain ``int`` too, also under ``mypy --strict``. What the library returns is a LayerId.
"""

GroupId = NewType("GroupId", str)
"""One page-id space of a pool.

Calls that take a group take a plain ``str`` too, also under ``mypy --strict``. What the library returns is a GroupId:
to read a mapping of theirs, write ``held[GroupId("kv")]``.
"""

KV = GroupId("kv")
"""The group of tokens of a pool whose groups the engine does not name."""

RegionId = NewType("RegionId", int)
"""One registered buffer of a transport; unique only together with the peer that registered it."""

Ticket = NewType("Ticket", int)
"""One submitted batch of writes; never used twice by one transport object."""

Peer = NewType("Peer", bytes)
"""One incarnation of a remote transport, from its descriptor."""

Rank = NewType("Rank", int)
"""Index of an endpoint in its instance, counted from 0."""

VirtualOffset = NewType("VirtualOffset", int)
"""An offset in the staging ring that only grows; the byte in memory is this modulo the capacity."""


def room_name(room: bytes) -> str:
    """The name of a room in errors and logs: ``room <id>``; see :func:`room_text`."""
    return f"room {room_text(room)}"


def room_text(room: bytes) -> str:
    """The id of a room as people read it: its text, if that is printable UTF-8, else its hex digits."""
    try:
        text = room.decode()
    except UnicodeDecodeError:
        return room.hex()
    return text if text.isprintable() else room.hex()


def peer_name(epoch: bytes, instance: str | None = None, rank: int = 0) -> str:
    """The name of a peer in errors, logs and reports: ``instance/rank (epoch <32 hex digits>)``.

    An endpoint's ``confirm_terminated`` accepts these digits. Without an instance the name is only the epoch.
    Characters of the instance's name that would break a log line are replaced.
    """
    if instance is None:
        return f"epoch {epoch.hex()}"
    name = "".join(c if c.isprintable() else "?" for c in instance)
    return f"{name}/{rank} (epoch {epoch.hex()})"
