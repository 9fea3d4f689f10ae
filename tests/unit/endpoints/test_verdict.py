"""Ranks that decide each for themselves: one outcome after the engine's reduction, and failures that reach all."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from disagg_kv.core import Alone, Elected, Options, Phase, Send
from disagg_kv.core.wire.frames import Decision, Vote
from disagg_kv.endpoints import Expectation, RecoveringReceiver, Retry
from disagg_kv.errors import ConfigurationError, IncompatiblePeerError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Rank
from tests.support.rig import Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
ROWS = 9


def scene(
    prefill_tp: int = 1, decode_tp: int = 2, *, prefill: type[Elected] | type[Alone] = Alone
) -> tuple[Rig, Request]:
    """A room that every rank has opened; decode's ranks decide each for itself."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, prefill_tp), verdict=prefill)
    request = rig.request("room", prefills, rig.decode(tp_shards(SPEC, decode_tp), verdict=Alone), ROWS)
    request.open_decode().expect(ROWS).open_prefill()
    rig.wait(0.3)
    return rig, request


def noting(send: Callable[[Send], None], said: list[object]) -> Callable[[Send], None]:
    """Notes every frame that is sent."""

    def noted(one: Send) -> None:
        said.append(one.frame)
        send(one)

    return noted


@pytest.mark.parametrize("prefill", [Alone, Elected])
def test_a_request_succeeds_without_a_frame_between_the_ranks(
    prefill: type[Elected] | type[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two sides need not take the same verdict."""
    rig, request = scene(2, 2, prefill=prefill)
    said: list[object] = []
    for member in rig.decodes:
        monkeypatch.setattr(member.endpoint.driver.loop, "send", noting(member.endpoint.driver.loop.send, said))
    request.send(ROWS).finish().landed()
    rig.quiet()
    assert not any(isinstance(frame, Vote | Decision) for frame in said)


def test_a_rank_that_has_everything_succeeds_although_another_one_fails() -> None:
    """The engine reduces: the request has failed. Prefill has, too."""
    rig, request = scene()
    request.receives[1].abort("enough")
    request.decodes[1].endpoint.driver.step()
    request.decodes[1].frozen = True
    request.prefills[0].frozen = True  # it does not know yet
    assert [one.phase for one in request.receives] == [Phase.MOVING, Phase.FAILED]
    request.prefills[0].frozen = request.decodes[1].frozen = False
    request.send(ROWS).finish()
    rig.until(lambda: all(handle.released for handle in request.handles), "the end")
    assert request.sends[0].phase is Phase.FAILED
    assert request.receives[0].phase in (Phase.DONE, Phase.FAILED)
    request.forgive()
    rig.quiet()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_failure_reaches_every_rank_that_has_not_ended(who: str) -> None:
    """By the prefill ranks that learn of it, in less than a second."""
    rig, request = scene(2, 2)
    handle = request.sends[0] if who == "prefill" else request.receives[1]
    handle.abort("enough")
    rig.wait(1.0)
    assert {one.phase for one in request.handles} == {Phase.FAILED}
    assert all(one.released for one in request.handles)
    request.forgive()
    rig.quiet()


def half(options: Options | None = None) -> tuple[Rig, Request]:
    """One of two decode ranks has everything; the engine of the other one has not opened the room."""
    rig = Rig(SPEC, options=options)
    prefills = rig.prefill(tp_shards(SPEC, 1), verdict=Alone)
    decodes = rig.decode(tp_shards(SPEC, 2), verdict=Alone)
    rig.request("first", prefills, decodes, ROWS).start().landed()
    request = rig.request("room", prefills, decodes, ROWS)
    request.receives = [decodes[0].endpoint.open(request.room, request.source)]
    table = decodes[0].take(ROWS)
    request.receives[0].expect(Expectation(ROWS, [table]))
    request.open_prefill().send(ROWS).finish()
    rig.wait(1.0)
    assert [one.phase for one in request.handles] == [Phase.CONNECTING, Phase.DONE]
    return rig, request


@pytest.mark.parametrize("how", ["crash", "close"])
def test_prefill_s_pages_are_free_once_decode_has_gone(how: str) -> None:
    """Although one of its ranks never asked for the rows."""
    rig, request = half()
    for member in request.decodes:
        getattr(member, how)()
    rig.until(lambda: request.sends[0].released, "prefill's pages", turns=200)
    assert request.sends[0].phase is Phase.FAILED


def test_a_decode_rank_that_never_asks_ends_the_request_after_claim_s() -> None:
    """It lives, and so does the other one."""
    rig, request = half(Options(claim_s=3.0))
    rig.wait(3.5)
    (send,) = request.sends
    assert (send.phase, send.released) == (Phase.FAILED, True)
    assert "1 of 2 decode ranks asked for it within 3 s" in str(send.error)


def test_a_rank_whose_room_is_parked_learns_at_once_that_another_one_gave_up() -> None:
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 2), verdict=Alone)
    rig.request("first", prefills, decodes, ROWS).start().landed()
    request = rig.request("room", prefills, decodes, ROWS).open_decode().expect(ROWS)
    rig.wait(0.5)
    request.receives[1].abort("enough")
    rig.wait(0.5)
    assert {one.phase for one in request.receives} == {Phase.FAILED}


def test_ranks_of_one_instance_with_different_verdicts_refuse_each_other_by_name() -> None:
    rig = Rig(SPEC)
    rig.decode(tp_shards(SPEC, 2), verdict=Alone)
    me = rig.decodes[0].endpoint.driver.loop.me
    hello = rig.decodes[1].endpoint.driver.loop.me.hello()(b"")
    me.admit(hello)
    with pytest.raises(IncompatiblePeerError, match="verdict") as found:
        me.admit(msgspec.structs.replace(hello, verdict="elected"))
    assert (found.value.field, found.value.ours, found.value.theirs) == ("verdict", "alone", "elected")
    assert Rank(hello.rank) == 1


@pytest.mark.parametrize("verdict", [None, "alone", int])
def test_what_is_no_verdict_is_refused(verdict: object) -> None:
    with pytest.raises(ConfigurationError, match="verdict: Elected or Alone is needed"):
        Rig(SPEC).decode(tp_shards(SPEC, 1), verdict=verdict)  # type: ignore[arg-type]


def test_retries_over_several_ranks_need_a_common_outcome() -> None:
    """One rank alone retries for itself."""
    rig = Rig(SPEC)
    policy = Retry(lambda attempt: None, attempts=2)
    first, _ = rig.decode(tp_shards(SPEC, 2), verdict=Alone)
    with pytest.raises(ConfigurationError, match="needs verdict Elected, not Alone"):
        RecoveringReceiver(first.endpoint, policy)
    (single,) = Rig(SPEC).decode(tp_shards(SPEC, 1), verdict=Alone)
    RecoveringReceiver(single.endpoint, policy)
