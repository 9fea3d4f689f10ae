"""Real endpoints with their own threads, an innocent room beside each batch of junk, and what must hold afterwards."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from attrs import frozen

from disagg_kv.core import Phase
from disagg_kv.endpoints import Fail, RecoveringReceiver
from disagg_kv.errors import DisaggKVError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from tests.support.rig import Rig, tp_shards

from .values import JUNK, LEGAL

SPEC = CacheSpec.kv(2, 2, 8, "float16")
ROWS = 12
WAIT_S = float(os.environ.get("JUNK_WAIT_S", "60"))


@runtime_checkable
class Ends(Protocol):
    """A room's handle."""

    @property
    def released(self) -> bool:
        """Nobody touches its pages any more."""
        ...

    def abort(self, reason: str) -> None:
        """Give it up."""
        ...


Ready = tuple[Callable[..., object], dict[str, object]]
"""What to call, and keyword arguments with which it works."""


@frozen
class Call:
    """One public call.

    Args:
        name: ``Class.method`` or ``function``.
        kinds: of each argument, as :data:`~tests.junk.values.LEGAL` names them.
        make: what to call, on fresh objects.
    """

    name: str
    kinds: Mapping[str, str]
    make: Callable[[Bench], Ready]


class Bench:
    """One prefill and two decode instances over the transport within one process."""

    def __init__(self) -> None:
        self.rig = Rig(SPEC, threaded=True)
        self.prefills = self.rig.prefill(tp_shards(SPEC, 1), strategy="auto+layer_pipelined")
        self.decodes = self.rig.decode(tp_shards(SPEC, 1), strategy="auto+incremental")
        self.others = self.rig.decode(tp_shards(SPEC, 1), "R", strategy="auto+incremental")
        self.prefill = self.prefills[0].endpoint
        self.decode = self.decodes[0].endpoint
        self.recovering = RecoveringReceiver(self.others[0].endpoint, Fail())
        self.table = self.prefills[0].take(ROWS)
        self.place = self.decodes[0].take(ROWS)
        self.elsewhere = self.others[0].take(ROWS)
        self._numbers = itertools.count()
        self._victims: list[Ends] = []
        self._closing: list[Callable[[], object]] = []

    def room(self) -> RoomId:
        """A room that no other call has."""
        return RoomId(b"victim %d" % next(self._numbers))

    def victim(self, handle: Ends) -> Ends:
        """A room that must end once it is given up, whatever was done to it."""
        self._victims.append(handle)
        return handle

    def later(self, close: Callable[[], object]) -> None:
        """What to do when the batch is over."""
        self._closing.append(close)

    @contextmanager
    def innocent(self) -> Iterator[None]:
        """A room is half way while the block runs; then it must end well, and all that the block opened must end."""
        request = self.rig.request(f"innocent {next(self._numbers)}", self.prefills, self.decodes, ROWS)
        request.open_prefill().open_decode().expect(ROWS).send(4)
        yield
        request.send(ROWS, 4)
        for send in request.sends:
            send.finish(ROWS)
        for victim in self._victims:
            victim.abort("the batch is over")
        for close in self._closing:
            close()
        self._wait(lambda: all(h.released for h in request.handles), "the innocent room")
        assert all(h.phase is Phase.DONE for h in request.handles), [str(h.error) for h in request.handles]
        self._wait(self._victims_ended, "the rooms that were given junk")
        self._check(request)
        self._victims.clear()
        self._closing.clear()

    def _victims_ended(self) -> bool:
        self.recovering.poll()
        return all(victim.released for victim in self._victims)

    def _check(self, request: object) -> None:
        from tests.support.rig import POISON, Request, put

        assert isinstance(request, Request)
        table = request.taken[0]
        decode = self.decodes[0]
        put(decode.want, table, 0, ROWS, request.truth)
        decode.check()
        put(decode.want, table, 0, ROWS, None)
        put(decode.pool, table, 0, ROWS, None)
        decode.give(table)
        for given in request.given.pop(0):
            self.prefills[0].give(given)
        assert POISON
        for member in self.rig.members:
            assert not member.observer.counters["errors.unforeseen"], "an endpoint met what it did not foresee"
            thread = member.endpoint.driver._thread
            assert thread is not None
            assert thread.is_alive(), "an endpoint's thread has ended"
            assert not member.endpoint.driver.closed

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < limit, f"waited {WAIT_S:g} s for {what}"
            self.prefill.poll()
            self.decode.poll()
            time.sleep(0.0005)

    def close(self) -> None:
        """Close all endpoints."""
        self.rig.close()


@frozen
class Verdict:
    """What became of one call: ``error`` (None: it was accepted), and what is wrong with that, if anything is."""

    call: str
    argument: str
    junk: str
    error: Exception | None
    wrong: str


def attempt(bench: Bench, call: Call, argument: str, junk: str) -> Verdict:
    """Make one call with one argument replaced."""
    function, good = call.make(bench)
    legal = junk in LEGAL[call.kinds[argument]]
    try:
        made = function(**{**good, argument: JUNK[junk]})
    except DisaggKVError as exc:
        return Verdict(call.name, argument, junk, exc, "")
    except Exception as exc:
        return Verdict(call.name, argument, junk, exc, f"raised {type(exc).__name__}, which is no error of ours: {exc}")
    if isinstance(made, Ends):
        bench.victim(made)
    elif hasattr(made, "driver") and hasattr(made, "close"):
        try:
            made.close(0.0)
        except Exception as exc:
            return Verdict(call.name, argument, junk, None, f"was accepted, and cannot be closed: {exc}")
    return Verdict(call.name, argument, junk, None, "" if legal else "was accepted")
