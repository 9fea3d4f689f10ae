"""Every frame about a room, each with fields that fit, that lie, and that cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import get_args

from disagg_kv.core import RoomFrame
from disagg_kv.core.wire import frames as f
from disagg_kv.core.wire.frames import AnyFrame, Head

Fields = Mapping[str, tuple[object, ...]]

ROWS, LAYERS = 8, 2
WHOLE: f.Box = (0, ROWS, 0, LAYERS, False)
BOXES: tuple[f.Box, ...] = (
    WHOLE,
    (0, ROWS // 2, 0, LAYERS, False),
    (ROWS, 0, LAYERS, 0, False),
    (0, ROWS, 0, LAYERS, True),
    (2**61, 2**62, 0, 2**62, False),
)
NUMBERS = (0, 1, 2**62)
PATHS = ("staged", "direct", "nowhere")
PAGES = f.WireTable("kv", 0, 2, 0, bytes(8))
SHORT = f.WireTable("kv", 0, 2**31, 0, b"")

FIELDS: Mapping[type[RoomFrame], Fields] = {
    f.Expect: {
        "start": (0, 2**62), "stop": (None, 0, ROWS), "path": PATHS, "tables": (None, (PAGES,), (SHORT,)),
        "tag": (b"", b"other"), "flags": (None, (0, 32, 1)), "unsegmented": (True,),
    },
    f.Expected: {"parked": (False, True)},
    f.StagingRequest: {"segment": BOXES, "ask": NUMBERS, "ready": (True,)},
    f.Queued: {"segment": BOXES},
    f.Grant: {"segment": BOXES, "ask": (0, 1), "lease": NUMBERS, "offset": (0,), "nbytes": (0, 1024, 2**62)},
    f.Landed: {"segments": (*((box,) for box in BOXES), BOXES, (WHOLE, WHOLE))},
    f.ChunkReady: {"segment": BOXES, "lease": (None, 0, 2**62), "sums": (None, b"", bytes(16))},
    f.Done: {"stop": (0, ROWS, 2**62), "segments": NUMBERS, "aux": (None, b"", bytes(8))},
    f.Complete: {},
    f.Abort: {"reason": ("lied",), "tag": (b"", b"other")},
    f.Drained: {"reason": ("lied",)},
    f.DrainedAck: {},
    f.Vote: {"ok": (None, True, False), "reason": ("lied",)},
    f.Decision: {"ok": (None, True, False), "shared": (False, True), "reason": ("lied",)},
    f.Return: {"segment": BOXES, "ask": NUMBERS},
    f.Returned: {"segment": BOXES, "ask": NUMBERS},
}  # fmt: skip
"""Each combination of a kind's values is one frame."""

KINDS = {kind for kind in get_args(AnyFrame) if issubclass(kind, RoomFrame)}


def frames_about(head: Head, *kinds: type[RoomFrame]) -> Iterator[RoomFrame]:
    """Every frame of some kinds (none: of all) with this head."""
    for kind in kinds or FIELDS:
        names, values = FIELDS[kind].keys(), FIELDS[kind].values()
        for one in product(*values):
            yield kind(**head, **dict(zip(names, one, strict=True)))


def few_about(head: Head, *kinds: type[RoomFrame]) -> Iterator[RoomFrame]:
    """Frames of some kinds (none: of all): one that fits, and those that differ from it in one field."""
    for kind in kinds or FIELDS:
        fields = FIELDS[kind]
        first = {name: values[0] for name, values in fields.items()}
        yield kind(**head, **first)
        for name, values in fields.items():
            for value in values[1:]:
                yield kind(**head, **(first | {name: value}))
