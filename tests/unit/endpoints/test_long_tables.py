"""Requests of more pages than one frame names, and page tables that a peer makes up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from disagg_kv.channels import Arrived, Channel, News
from disagg_kv.core import Codec, Options, Phase
from disagg_kv.core.wire import frames as f
from disagg_kv.errors import OversizeError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from tests.support.rig import Memory, Rig, tp_shards
from tests.unit.endpoints.test_forged import Scene

SPEC = CacheSpec.kv(2, 4, 8, "float16")


class Counting:
    """A channel that counts the frames that come by kind."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.came: Counter[str] = Counter()
        self.send, self.wake, self.forget, self.close = inner.send, inner.wake, inner.forget, inner.close
        self.wait, self.eager = inner.wait, inner.eager

    @property
    def address(self) -> str:
        return self.inner.address

    def poll(self) -> Sequence[News]:
        came = self.inner.poll()
        self.came.update(type(Codec().decode(news.frame)).__name__ for news in came if isinstance(news, Arrived))
        return came


def counting(rig: Rig) -> list[Counting]:
    """The channels of prefill and decode, in this order."""
    return [m.channel for m in rig.members if isinstance(m.channel, Counting)]


@pytest.mark.parametrize("path", ["mapped", "slice", "auto"])
def test_a_request_of_more_pages_than_one_frame_names_is_staged(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page less, and its pages are exposed. Decode's report says why; where no path stages, the error does."""
    monkeypatch.setattr("disagg_kv.core.wire.page_runs.MAX_TABLE", 400)
    rig = Rig(SPEC)
    memory = Memory(page_size=1, pages=256)
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 2), memory=memory, strategy=path)
    for decode in decodes:
        decode.free.sort(key=lambda page: (page % 2, page))
    rig.request("first", prefills, decodes, 4).start().landed()
    request = rig.request("fits", prefills, decodes, 100).start().landed()
    assert {handle.report.path for handle in request.handles} == {"mapped" if path == "auto" else path}
    request = rig.request("is larger", prefills, decodes, 101).start()
    why = "404 bytes of page tables in one frame, at most 400"
    if path == "auto":
        request.landed()
        assert {handle.report.path for handle in request.handles} == {"staged"}
        assert {handle.report.reason for handle in request.receives} == {f"auto takes staged; mapped cannot: {why}"}
    else:
        request.failed()
        assert isinstance(request.receives[0].error, OversizeError)
        assert "bytes of page tables in one frame" in str(request.receives[0].error)
    rig.quiet()


@pytest.mark.parametrize(("pages", "path"), [(1 << 18, "mapped"), ((1 << 18) + 1, "staged")])
def test_the_most_pages_that_one_frame_names(pages: int, path: str) -> None:
    """Pages of one token, no two of which follow one another."""
    spec = CacheSpec.kv(1, 1, 4, "int8")
    rig = Rig(spec, options=Options(total_s=3000.0))
    memory = Memory(channel=Counting, page_size=1, pages=2 * pages)
    prefills = rig.prefill(tp_shards(spec, 1), memory=memory, slot_bytes=1 << 20)
    decodes = rig.decode(tp_shards(spec, 1), memory=memory, ring_bytes=1 << 24)
    decodes[0].free.sort(key=lambda page: (page % 2, page))
    rig.request("first", prefills, decodes, 1).start().landed()
    request = rig.request("room", prefills, decodes, pages).start().landed()
    assert request.receives[0].report.path == path
    rig.quiet()


def test_pages_that_follow_one_another_are_exposed_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of them costs eight bytes."""
    monkeypatch.setattr("disagg_kv.core.wire.page_runs.MAX_TABLE", 16)
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="slice")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="slice")
    decodes[0].free.sort()
    rig.request("room", prefills, decodes, 250).start().landed()
    rig.quiet()


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ((f.WireTable("kv", 0, (1 << 22) + 1, 0, b""),), "at most 4194304 are allowed (request_pages)"),
        ((f.WireTable("kv", 0, 1 << 31, 1, b""),), "at most 4194304 are allowed (request_pages)"),
        ((f.WireTable("kv", 0, 2, 1, b""),), "1 runs of 2 pages are no shorter than page ids"),
        ((f.WireTable("kv", 0, 3, 0, bytes(12)),) * 2, "one is given twice"),
        ((f.WireTable("kv", 0, 3, 0, b""),), "'kv': 0 bytes of 12"),
        ((f.WireTable("kv", 0, 3, 0, bytes(13)),), "'kv': 13 bytes of 12"),
        ((f.WireTable("kv", 0, 1 << 22, 1, b""),), "'kv': 0 bytes of 8"),
        ((f.WireTable("kv", 0, 4, 1, np.array([0, 3], "<i4").tobytes()),), "runs of 3 pages"),
    ],
)
@pytest.mark.parametrize("opened", [False, True])
def test_tables_that_cannot_be_end_their_room_by_name(tables: tuple[f.WireTable, ...], why: str, opened: bool) -> None:
    """And no other; where the room is not open yet, once it opens."""
    scene = Scene("slice")
    handle = scene.prefills[0].endpoint.open(RoomId(b"other")) if opened else None
    own = {"room": b"other", "generation": 9}
    scene.from_decode(f.Expect, start=0, stop=8, path="slice", tables=tables, tag=b"", **own)
    scene.rig.wait(0.1)
    if handle is None:
        handle = scene.prefills[0].endpoint.open(RoomId(b"other"))
        scene.rig.wait(0.1)
    assert handle.phase is Phase.FAILED
    assert why in str(handle.error)
    scene.rig.wait(1.0)
    scene.request.send(8).finish().landed()
