"""An engine, its endpoint, and the route of the bytes, on a prefill rank and on a decode rank."""

from __future__ import annotations

from .drawing import Picture


def architecture() -> Picture:
    """The picture of the page Architecture."""
    p = Picture("Architecture: a prefill rank and a decode rank", 880, 640)
    for x, side in ((20, "prefill"), (500, "decode")):
        p.rect("panel", x, 10, 360, 572, 10)
        p.text(x + 180, 32, f"{side} rank", "title")
    _calls(p)
    _rooms(p)
    _queues(p)
    _memory(p)
    _legend(p)
    return p


def _calls(p: Picture) -> None:
    """Engine, endpoint and loop of both sides, and the frames between them."""
    p.box("engine", 35, 44, 330, 40, "engine", "open, step, send_chunk, finish, poll")
    p.box("engine", 515, 44, 330, 40, "engine", "open, expect, poll")
    p.box("box", 35, 116, 330, 44, "PrefillEndpoint, DeliveryHandle", "check, then post a command")
    p.box("box", 515, 116, 330, 44, "DecodeEndpoint, ReceptionHandle", "check, then post a command")
    p.port(680, 92, "Receiver")
    for x in (35, 515):
        p.box("box", x, 188, 330, 40, "EventLoop", "commands, frames, reports, time")
    for path in ("M200 84V112", "M600 84V112", "M200 160V184", "M680 160V184"):
        p.line("call", path)
    p.line("frame", "M367 200H511")
    p.line("frame", "M513 216H369")
    p.port(440, 164, "Channel")
    p.text(440, 194, "frames", "small")


def _rooms(p: Picture) -> None:
    """The sides and their state machines."""
    p.box("box", 35, 268, 150, 46, "PrefillSide", "rooms")
    p.box("box", 245, 268, 120, 46, "SendRoom, Flow", "state machines")
    p.box("box", 695, 268, 150, 46, "DecodeSide", "rooms")
    p.box("box", 515, 268, 120, 46, "ReceiveRoom", "state machine")
    for path in ("M110 228V264", "M770 228V264", "M187 283H241", "M243 300H189", "M693 283H639", "M637 300H691"):
        p.line("call", path)
    for x in (215, 665):
        p.text(x, 277, "events", "small")
        p.text(x, 314, "effects", "small")


def _queues(p: Picture) -> None:
    """What moves bytes, what grants memory, and who chooses the path."""
    p.box("box", 35, 362, 150, 46, "TransferQueue", "to the path's mover")
    p.box("box", 245, 362, 120, 46, "Router", "plans, layer groups")
    p.box("box", 515, 362, 100, 46, "GrantQueue", "leases")
    p.box("box", 625, 362, 100, 46, "PathChooser", "one a room")
    p.box("box", 735, 362, 110, 46, "ScatterQueue", "scatter, sums")
    p.port(305, 334, "TransferPlanner")
    p.port(250, 414, "Schedule")
    p.port(331, 414, "Selection")
    p.port(573, 414, "StagingAllocator")
    p.port(708, 414, "TransferPlanner")
    paths = ("M90 314V358", "M130 362V318", "M187 385H241", "M745 314V358", "M820 362V318", "M720 314L690 358")
    for path in (*paths, "M696 312L596 358", "M110 408V422"):
        p.line("call", path)
    p.text(136, 342, "outcomes", "small", "start")
    p.text(84, 342, "orders", "small", "end")
    p.box("box", 35, 426, 150, 46, "Mover", "staged, direct, mapped")


def _memory(p: Picture) -> None:
    """Slots, ring and pages, and the bytes' way through them."""
    p.cells("cell", 215, 452, 30, 26, 5)
    p.text(312, 494, "staging slots", "small")
    p.cells("cell", 515, 452, 30, 26, 5)
    p.text(572, 494, "ring of leases", "small")
    for x in (35, 515):
        p.cells("cell", x, 530, 30, 26, 11)
    p.line("bytes", "M367 465H511")
    p.port(440, 436, "Transport")
    p.text(440, 484, "one bulk write", "small")
    p.text(440, 498, "per segment, writer", "small")
    p.line("call", "M187 465H211")
    p.text(110, 488, "kernels, submit", "small")
    p.line("call", "M800 408V440Q800 465 670 465")
    p.text(806, 444, "kernels", "small", "start")
    p.line("bytes", "M250 528V482")
    p.text(242, 512, "gather", "small", "end")
    p.line("bytes", "M630 480V526")
    p.text(640, 512, "scatter", "small", "start")
    p.port(200, 558, "MemoryPool")
    p.port(680, 558, "MemoryPool")
    p.text(60, 524, "pages", "small")
    p.text(820, 524, "pages", "small")


def _legend(p: Picture) -> None:
    for kind, x, meaning in (
        ("call", 40, "calls"),
        ("frame", 150, "control frames"),
        ("bytes", 310, "bytes of the cache"),
    ):
        p.line(kind, f"M{x} 610H{x + 36}")
        p.text(x + 44, 614, meaning, "small", "start")
    p.port(560, 600, "Protocol")
    p.text(610, 614, "yours may take its place", "small", "start")
