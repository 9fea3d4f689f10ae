"""An endpoint's descriptor is readable while ``poll`` has something to return or to raise, and not otherwise."""

from __future__ import annotations

import gc
import os
import select
from pathlib import Path

import pytest

from disagg_kv.core import Phase
from disagg_kv.endpoints import DecodeEndpoint, Expectation, PrefillEndpoint
from disagg_kv.endpoints.handle import ChangeQueue, RoomHandle
from disagg_kv.errors import AbortedError, EndpointBrokenError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from disagg_kv.rendezvous import Source
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(2, 2, 8, "float16")


def readable(endpoint: PrefillEndpoint | DecodeEndpoint, wait_s: float = 0.0) -> bool:
    """As an engine finds out."""
    return bool(select.select([endpoint], [], [], wait_s)[0])


def eventfds() -> list[str]:
    """Of this process."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(file))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return [target for target in found if "eventfd" in target]


def pair(rig: Rig) -> tuple[PrefillEndpoint, DecodeEndpoint]:
    """One prefill rank and one decode rank."""
    (prefill,), (decode,) = (
        rig.prefill(tp_shards(SPEC, 1)),
        rig.decode(tp_shards(SPEC, 1)),
    )
    return prefill.endpoint, decode.endpoint


def ask(sender: PrefillEndpoint, receiver: DecodeEndpoint, name: bytes) -> None:
    """A request without rows, on both sides."""
    receiver.open(RoomId(name), Source("P")).expect(Expectation(0, []))
    sender.open(RoomId(name)).finish(0)


def test_it_is_readable_from_a_change_until_poll_has_returned_it() -> None:
    rig = Rig(SPEC)
    sender, receiver = pair(rig)
    assert not readable(sender)
    assert not readable(receiver)
    ask(sender, receiver, b"a")
    rig.until(lambda: readable(receiver), "a change")
    rig.wait(2.0)
    assert [room.phase for room in receiver.poll()] == [Phase.DONE]
    assert not readable(receiver)
    assert receiver.poll() == []
    assert readable(sender)
    rig.close()


def test_a_descriptor_that_is_asked_for_late_knows_of_earlier_changes_and_is_always_the_same() -> None:
    rig = Rig(SPEC)
    sender, receiver = pair(rig)
    ask(sender, receiver, b"a")
    rig.wait(2.0)
    assert readable(receiver)
    assert receiver.fileno() == receiver.fileno()
    assert len(receiver.poll()) == 1
    assert not readable(receiver)
    rig.close()


def test_rooms_that_close_fails_are_seen_after_it() -> None:
    rig = Rig(SPEC)
    sender, _ = pair(rig)
    delivery = sender.open(RoomId(b"a"))
    assert not readable(sender)
    sender.close(0.0)
    assert readable(sender)
    assert sender.poll() == [delivery]
    assert (delivery.phase, readable(sender)) == (Phase.FAILED, False)
    rig.close()


@pytest.mark.parametrize("late", [False, True])
def test_an_endpoint_without_rooms_that_breaks_is_readable_and_poll_raises(late: bool) -> None:
    rig = Rig(SPEC)
    sender, _ = pair(rig)
    assert late or not readable(sender)

    def fail(budget_s: float, *, copies: bool = True) -> None:
        raise ValueError("a bug")

    sender._loop.advance = fail  # type: ignore[method-assign]
    with pytest.raises(EndpointBrokenError):
        sender.driver.step()
    for _ in range(2):
        assert readable(sender)
        with pytest.raises(EndpointBrokenError):
            sender.poll()
    rig.close()


def test_the_endpoints_own_thread_wakes_an_engine_that_waits() -> None:
    rig = Rig(SPEC, threaded=True)
    sender, receiver = pair(rig)
    sender.fileno()
    reception = receiver.open(RoomId(b"a"), Source("P"))
    reception.expect(Expectation(0, []))
    sender.open(RoomId(b"a")).finish(0)
    while not reception.released:
        assert readable(receiver, 60.0)
        receiver.poll()
    rig.close()


def test_nothing_is_opened_until_it_is_asked_for_and_it_ends_with_the_queue() -> None:
    gc.collect()
    before = len(eventfds())
    changes: ChangeQueue[RoomHandle] = ChangeQueue()
    handle = RoomHandle(RoomId(b"a"))
    handle.publish((Phase.FAILED, True), AbortedError("no"), 1.0)
    changes.add(handle)
    changes.take()
    assert len(eventfds()) == before
    changes.fileno()
    assert len(eventfds()) == before + 1
    del changes
    gc.collect()
    assert len(eventfds()) == before
