"""Page tables that are too long for one frame: requests of many pages, and parts that a peer makes up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from disagg_kv.channels import Arrived, Channel, News
from disagg_kv.core import Codec, Options, Phase
from disagg_kv.core.wire import frames as f
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from tests.support.rig import Memory, Rig, tp_shards
from tests.unit.endpoints.test_forged import Scene

SPEC = CacheSpec.kv(2, 4, 8, "float16")
SMALL = Options(table_part=16)


class Counting:
    """A channel that counts the frames that come by kind, and loses a third of some kinds."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.came: Counter[str] = Counter()
        self.loses: frozenset[str] = frozenset()
        self.rng = random.Random(0)
        self.send, self.wake, self.forget, self.close = inner.send, inner.wake, inner.forget, inner.close
        self.wait, self.eager = inner.wait, inner.eager

    @property
    def address(self) -> str:
        return self.inner.address

    def poll(self) -> Sequence[News]:
        return [news for news in self.inner.poll() if not (isinstance(news, Arrived) and self._lost(news))]

    def _lost(self, news: Arrived) -> bool:
        kind = type(Codec().decode(news.frame)).__name__
        self.came[kind] += 1
        return kind in self.loses and self.rng.random() < 1 / 3


def counting(rig: Rig) -> list[Counting]:
    """The channels of prefill and decode, in this order."""
    return [m.channel for m in rig.members if isinstance(m.channel, Counting)]


@pytest.mark.parametrize("loses", [(), ("TablePart", "TablesTaken", "Expect")])
@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("path", ["mapped", "slice"])
def test_a_long_table_crosses_in_parts(path: str, first: str, loses: tuple[str, ...]) -> None:
    """Whichever side opens the room first, and whatever is lost: the bytes are right, and nothing is left."""
    rig = Rig(SPEC, options=SMALL)
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=Memory(channel=Counting, page_size=1, pages=128), strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 2), memory=Memory(channel=Counting, page_size=1, pages=128), strategy=path)
    for channel in counting(rig):
        channel.loses = frozenset(loses)
    request = rig.request("room", prefills, decodes, 100)
    if first == "decode":
        request.open_decode().expect(100)
        rig.wait(1.0)
        assert {handle.phase for handle in request.receives} == {Phase.WAITING}
        request.open_prefill()
    else:
        request.open_decode().open_prefill().expect(100)
    request.send(100).finish().landed()
    assert counting(rig)[0].came["TablePart"] >= 2 * 100 * 4 / 16
    rig.quiet()


def test_a_table_of_runs_crosses_in_one_frame() -> None:
    """Pages that follow one another cost eight bytes, however many there are."""
    rig = Rig(SPEC, options=SMALL)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(channel=Counting), strategy="slice")
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(channel=Counting), strategy="slice")
    decodes[0].free.sort()
    rig.request("room", prefills, decodes, 250).start().landed()
    assert counting(rig)[0].came["TablePart"] == 0


def test_a_room_that_fails_forgets_the_parts_that_came() -> None:
    """The peer of a room that has ended here is told so, in the middle of its tables; nothing of them stays."""
    rig = Rig(SPEC, options=Options(table_part=16, silence_s=5.0, heartbeat_s=1.0))
    memory = Memory(channel=Counting, page_size=1, pages=128)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="slice")
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="slice")
    rig.request("first", prefills, decodes, 4).start().landed()
    counting(rig)[0].loses = frozenset({"TablePart"})
    request = rig.request("room", prefills, decodes, 100).open_decode().expect(100).open_prefill()
    rig.until(lambda: counting(rig)[0].came["TablePart"] > 4, "some parts")
    request.sends[0].abort("enough")
    request.failed()
    assert "enough" in request.errors()
    rig.quiet()
    rig.wait(6.0)
    assert not len(prefills[0].endpoint._side._early)


class TestPartsOfAPeer:
    """What a decode rank makes up about its page tables ends its room by name, and no other."""

    @pytest.mark.parametrize("opened", [False, True])
    @pytest.mark.parametrize(
        ("offset", "size", "why"),
        [
            (0, 60, "bytes 0-60 of 48 of page tables, after 20"),
            (10, 20, "bytes 10-30 of 48 of page tables, after 20"),
            (20, 29, "bytes 20-49 of 48 of page tables, after 20"),
            (2**62, 1, "of 48 of page tables, after 20"),
        ],
    )
    def test_that_cannot_be_are_refused(self, offset: int, size: int, why: str, opened: bool) -> None:
        scene = Scene("slice")
        own = {"room": b"other", "generation": 9}
        handle = scene.prefills[0].endpoint.open(RoomId(b"other")) if opened else None
        self._expect(scene, f.WireTable("kv", 0, 12, 0, b""), **own)
        for again in (0, 0, 3):
            scene.from_decode(f.TablePart, offset=0, data=bytes(20 - again), **own)
        scene.from_decode(f.TablePart, offset=offset, data=bytes(size), **own)
        scene.rig.wait(0.1)
        assert not len(scene.prefills[0].endpoint._side._early)
        if handle is not None:
            assert handle.phase is Phase.FAILED
            assert why in str(handle.error)
        scene.rig.wait(1.0)
        scene.request.send(8).finish().landed()

    def test_that_nobody_announced_are_counted(self) -> None:
        scene = Scene("slice")
        for room in (b"other", b"room"):
            scene.from_decode(f.TablePart, offset=0, data=bytes(9), room=room, generation=9)
        scene.rig.wait(0.1)
        assert scene.counted(scene.prefills, "frames.unknown_room") == 2
        scene.request.send(8).finish().landed()

    def test_that_never_end_are_forgotten(self) -> None:
        """They are kept for as long as a peer may be silent, and no longer."""
        scene = Scene("slice")
        own = {"room": b"other", "generation": 9}
        self._expect(scene, f.WireTable("kv", 0, 1 << 22, 0, b""), **own)
        for number in range(100):
            scene.from_decode(f.TablePart, offset=number, data=b"a", **own)
        scene.rig.wait(1.0)
        early = scene.prefills[0].endpoint._side._early
        assert early.lacks(RoomId(b"other"), scene.decode.epoch) == 100
        scene.request.send(8).finish().landed()
        scene.rig.wait(31.0, 1.0)
        assert not len(early)

    @pytest.mark.parametrize(
        ("tables", "why"),
        [
            ((f.WireTable("kv", 0, (1 << 22) + 1, 0, b""),), "at most 4194304 are allowed (request_pages)"),
            ((f.WireTable("kv", 0, 1 << 31, 1, b""),), "at most 4194304 are allowed (request_pages)"),
            ((f.WireTable("kv", 0, 2, 1, b""),), "1 runs of 2 pages are no shorter than page ids"),
            ((f.WireTable("kv", 0, 3, 0, b""), f.WireTable("kv", 0, 3, 0, b"")), "one is given twice"),
            ((f.WireTable("kv", 0, 4, 1, np.array([0, 3], "<i4").tobytes()),), "runs of 3 pages"),
        ],
    )
    def test_with_tables_that_cannot_be_are_refused_before_any_comes(
        self, tables: tuple[f.WireTable, ...], why: str
    ) -> None:
        scene = Scene("slice")
        handle = scene.prefills[0].endpoint.open(RoomId(b"other"))
        self._expect(scene, *tables, room=b"other", generation=9)
        scene.rig.until(lambda: handle.phase is Phase.FAILED, "the refusal")
        assert why in str(handle.error)
        scene.request.send(8).finish().landed()

    def _expect(self, scene: Scene, *tables: f.WireTable, **about: object) -> None:
        scene.from_decode(f.Expect, start=0, stop=8, paths=("slice",), tables=tables, tag=b"", **about)


@pytest.mark.slow
def test_a_million_scattered_pages_of_one_token_are_copied_into_mapped_pages() -> None:
    """Page size 1 on both sides, 1,048,576 tokens, no two pages of which follow one another."""
    tokens = 1 << 20
    spec = CacheSpec.kv(1, 1, 4, "int8")
    rig = Rig(spec, options=Options(total_s=3000.0))
    memory = Memory(channel=Counting, page_size=1, pages=tokens)
    prefills = rig.prefill(tp_shards(spec, 1), memory=memory, strategy="mapped", slot_bytes=1 << 26)
    decodes = rig.decode(tp_shards(spec, 1), memory=memory, strategy="mapped", ring_bytes=1 << 16)
    request = rig.request("room", prefills, decodes, tokens).start()
    request.landed()
    assert {handle.report.path for handle in request.sends} == {"mapped"}
    assert counting(rig)[0].came["TablePart"] == 4 * tokens // Options().table_part
    rig.check()
    rig.quiet()
