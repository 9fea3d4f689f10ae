"""One request from the router's call to its tokens: which process sends what to which."""

from __future__ import annotations

from .drawing import Picture

LANES = {"router": 70, "prefill engine": 220, "PrefillEndpoint": 390, "DecodeEndpoint": 600, "decode engine": 780}


def request() -> Picture:
    """The sequence of one request over the path ``staged``, in time from top to bottom."""
    p = Picture("Sequence of one request", 880, 740)
    for name, x in LANES.items():
        p.box("box" if name.endswith("Endpoint") else "engine", x - 65, 20, 130, 32, name)
    for y, height, title in (
        (66, 176, "either order"),
        (256, 206, "each chunk, and each segment of it"),
        (476, 204, "the end"),
    ):
        p.rect("panel", 10, y, 860, height)
        p.text(22, y + 18, title, "title", "start")
        for x in LANES.values():
            p.line("life", f"M{x} {y + 24}V{y + height - 4}", head=False)

    def step(y: float, source: str, target: str, words: str, kind: str = "call") -> None:
        start, stop = LANES[source], LANES[target]
        way = 1 if stop > start else -1
        p.line(kind, f"M{start + 3 * way} {y}H{stop - 3 * way}")
        p.text((start + stop) / 2, y - 6, words, "small")

    step(110, "router", "prefill engine", "request 7")
    step(110, "prefill engine", "PrefillEndpoint", "open(7)")
    p.line("call", "M73 144H777")
    p.text(500, 138, "request 7, and its prefill instance", "small")
    step(172, "decode engine", "DecodeEndpoint", "open(7), expect")
    step(196, "DecodeEndpoint", "PrefillEndpoint", "Expect, to every prefill rank", "frame")
    p.text(385, 199, "parked here, until 7", "small", "end")
    p.text(385, 214, "is open on this side", "small", "end")
    step(224, "PrefillEndpoint", "DecodeEndpoint", "Expected", "frame")

    step(300, "prefill engine", "PrefillEndpoint", "send_chunk(stop, pages)")
    step(322, "PrefillEndpoint", "DecodeEndpoint", "StagingRequest", "frame")
    step(346, "DecodeEndpoint", "PrefillEndpoint", "Grant: a lease of the ring", "frame")
    p.text(385, 372, "gather: pages to slot", "small", "end")
    step(390, "PrefillEndpoint", "DecodeEndpoint", "one bulk write", "bytes")
    step(416, "PrefillEndpoint", "DecodeEndpoint", "ChunkReady, once it has ended", "frame")
    step(440, "DecodeEndpoint", "PrefillEndpoint", "Landed", "frame")
    p.text(605, 440, "scatter: lease to pages", "small", "start")

    step(518, "prefill engine", "PrefillEndpoint", "finish(stop)")
    step(540, "PrefillEndpoint", "DecodeEndpoint", "Done, with the aux row", "frame")
    p.text(605, 560, "all ranks of the instance agree", "small", "start")
    step(582, "DecodeEndpoint", "PrefillEndpoint", "Complete", "frame")
    step(582, "DecodeEndpoint", "decode engine", "poll: DONE, released")
    step(616, "PrefillEndpoint", "prefill engine", "poll: DONE, released")
    p.text(228, 640, "its pages are free again", "small", "start")
    p.line("call", "M777 664H73")
    p.text(500, 658, "tokens", "small")

    for kind, x, meaning in (
        ("call", 40, "calls, and the router's messages"),
        ("frame", 300, "control frames"),
        ("bytes", 470, "bytes of the cache"),
    ):
        p.line(kind, f"M{x} 712H{x + 36}")
        p.text(x + 44, 716, meaning, "small", "start")
    return p
