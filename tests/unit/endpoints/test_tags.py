"""Tags: an instance that means another request by a room id fails alone, and the delivery goes to the right one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation
from disagg_kv.errors import AbortedError, DeadlineError, IntegrityError
from disagg_kv.geometry import CacheSpec
from tests.support.rig import Memory, Request, Rig, tp_shards
from tests.support.rig_parts import Unreliable

SPEC = CacheSpec.kv(2, 4, 8, "float16")
RIGHT, WRONG = b"prompt", b"another prompt"


def two_requests(
    prefill: int, decode: int, path: str = "auto", memory: Memory | None = None
) -> tuple[Request, Request]:
    """One room id that two decode instances open: the right one, and a stray."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, prefill), memory=memory, strategy=path)
    sides = [rig.decode(tp_shards(SPEC, decode), name=name, memory=memory, strategy=path) for name in ("D", "S")]
    right, stray = (rig.request("room", prefills, side, 13) for side in sides)
    return right, stray


def refused(stray: Request) -> None:
    """Every rank of the stray instance has failed, at least one by the tag."""
    stray.rig.until(lambda: all(h.released for h in stray.receives), "the end of the stray")
    errors = [h.error for h in stray.receives]
    assert {h.phase for h in stray.receives} == {Phase.FAILED}
    assert any(isinstance(error, IntegrityError) for error in errors), errors
    assert all(isinstance(error, IntegrityError | AbortedError) for error in errors), errors
    text = f"prefill's tag {RIGHT.hex()} is not {WRONG.hex()}"
    assert any(text in str(error) for error in errors), errors
    stray.forgive()


@pytest.mark.parametrize(("ours", "theirs"), [(b"a", b"a"), (b"", b"a"), (b"a", b"")])
def test_equal_tags_and_one_that_is_missing_harm_nothing(ours: bytes, theirs: bytes) -> None:
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 8).open_decode(tag=ours).expect().open_prefill(tag=theirs)
    request.send(8).finish().landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("order", ["stray, prefill, right", "prefill, stray, right", "right, prefill, stray"])
def test_a_stray_instance_fails_alone_whenever_it_comes(order: str, split: tuple[int, int], path: str) -> None:
    """Parked before prefill opens the room, or after it; before the right instance, or while that one is served."""
    right, stray = two_requests(*split, path)
    rig = right.rig
    for who in order.split(", "):
        if who == "prefill":
            right.open_prefill(tag=RIGHT).send(5)
        elif who == "right":
            right.open_decode(tag=RIGHT).expect(13)
        else:
            stray.open_decode(tag=WRONG).expect(13)
        rig.wait(0.3, 0.05)
    refused(stray)
    assert right.sends[0].error is None
    right.send(13, start=5).finish().landed()
    rig.quiet()


def test_nothing_of_the_room_reaches_a_stray_instance() -> None:
    """Also if it was the first to ask: its pages stay as they were."""
    right, stray = two_requests(2, 1)
    stray.open_decode(tag=WRONG).expect(13)
    right.open_prefill(tag=RIGHT).send(13).finish()
    right.rig.until(lambda: stray.receives[0].released, "the end of the stray")
    right.rig.check()
    assert stray.receives[0].report.nbytes == 0
    right.open_decode(tag=RIGHT).expect(13).landed()


def test_a_stray_instance_that_gives_up_before_prefill_opens_the_room_ends_nothing() -> None:
    """Without a tag of its own prefill believes it, as before."""
    for tag, phase in ((RIGHT, Phase.DONE), (b"", Phase.FAILED)):
        right, stray = two_requests(2, 1)
        stray.open_decode(tag=WRONG).expect(13)
        right.rig.wait(0.5)
        stray.receives[0].abort("no use")
        right.rig.wait(0.5)
        right.open_prefill(tag=tag).open_decode(tag=RIGHT).expect(13)
        if phase is Phase.DONE:
            right.send(13).finish()
        right.released()
        assert {h.phase for h in right.handles} == {phase}


def test_a_room_that_only_strays_ask_for_ends_at_its_deadline() -> None:
    right, stray = two_requests(1, 1)
    right.open_prefill(total_s=5.0, tag=RIGHT).send(13).finish()
    stray.open_decode(tag=WRONG).expect(13)
    refused(stray)
    right.rig.wait(3.0)
    assert right.sends[0].phase is Phase.CONNECTING
    right.released()
    assert isinstance(right.sends[0].error, DeadlineError)
    right.rig.quiet()


def test_a_stray_instance_does_not_claim_a_finished_room() -> None:
    """The pages of a room that only strays ask for are released ``claim_s`` after ``finish``."""
    right, stray = two_requests(1, 1)
    right.open_prefill(tag=RIGHT).send(13).finish()
    stray.open_decode(tag=WRONG).expect(13)
    refused(stray)
    right.rig.wait(20.0)
    assert right.sends[0].phase is Phase.CONNECTING
    right.rig.wait(15.0)
    assert right.sends[0].released
    assert "no decode rank asked for it within 30 s" in str(right.sends[0].error)


@settings(max_examples=40)
@given(
    st.integers(0, 2**32),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    st.permutations(["prefill", "right", "stray"]),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.none() | st.integers(0, 60),
)
def test_lost_and_late_frames_do_not_make_a_stray_instance_harm_the_room(
    seed: int, split: tuple[int, int], order: list[str], pauses: list[int], abort: int | None
) -> None:
    """Its abort may arrive before what it awaits, or alone; and its engine may give up at any time."""
    rng = random.Random(seed)

    def fate(number: int, address: str) -> list[int]:
        return [] if rng.random() < 0.15 else [rng.choice((0, 0, 0, 1, 2, 5))]

    right, stray = two_requests(*split, memory=Memory(channel=lambda inner: Unreliable(inner, fate)))
    rig = right.rig
    for who, pause in zip(order, pauses, strict=True):
        if who == "prefill":
            right.open_prefill(tag=RIGHT).send(13).finish()
        elif who == "right":
            right.open_decode(tag=RIGHT).expect(13)
        else:
            stray.open_decode(total_s=30.0, tag=WRONG).expect(13)
        for _ in range(pause):
            rig.turn()
    if abort is not None:
        for _ in range(abort):
            rig.turn()
        rng.choice(stray.receives).abort("no use")
    rig.until(lambda: all(h.released for h in right.handles), "the room", 20_000)
    rig.wait(45.0, 0.5)  # a stray that comes after the room waits in vain
    assert all(h.released and h.phase is Phase.FAILED for h in stray.receives), stray.errors()
    assert not any(h.report.nbytes for h in stray.receives)
    stray.forgive()
    right.landed()
    rig.quiet()


def test_another_instance_without_a_tag_is_refused_as_before() -> None:
    """A tag tells requests apart; of one request there is one decode instance."""
    right, stray = two_requests(1, 1)
    right.open_prefill(tag=RIGHT).open_decode(tag=RIGHT).expect(13)
    right.rig.until(lambda: right.sends[0].phase is Phase.READY, "the expectation")
    (handle,) = stray.open_decode().receives
    handle.expect(Expectation(13, [stray.decodes[0].take(13)]))
    right.rig.until(lambda: handle.released, "the refusal")
    assert isinstance(handle.error, AbortedError)
    assert "has this room already" in str(handle.error)
    right.send(13).finish().landed()
