"""Calls of engines with arguments that cannot be: each is refused at once by name, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import nan

import numpy as np

from disagg_kv.endpoints import DecodeEndpoint, Expectation, PrefillEndpoint
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import DisaggKVError
from disagg_kv.rendezvous import Source

from .cluster import Cluster
from .fault import FaultClass
from .node import SimNode

MOST = 24
"""Calls of one seed."""

UNTIL_S = 0.4
"""They come while the first rooms are open."""

Junk = Callable[..., object]


class JunkCalls:
    """Makes such calls. Its draws do not shift those of the rest of a seed."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self._random = world.junk
        self._on = FaultClass.JUNK in world.scenario.faults
        if self._on:
            for _ in range(self._random.randint(4, MOST)):
                world.later(self._random.random() * UNTIL_S, self._spoil)

    def _spoil(self) -> None:
        world = self._world
        nodes = [node for node in world.nodes if not node.paused]
        if not nodes:
            return
        node = self._random.choice(nodes)
        calls = self._calls(node)
        name = self._random.choice(sorted(calls))
        world.hit(FaultClass.JUNK)
        before = _remembered(world, node)
        try:
            calls[name]()
        except DisaggKVError:
            if _remembered(world, node) != before:
                world.violation("I7", f"{node.address}: {name} is refused, and has changed something")
        except Exception as exc:
            world.violation("I7", f"{node.address}: {name} raises what is no error of this library: {exc!r}")
        else:
            world.violation("I7", f"{node.address}: {name} is accepted")

    def _calls(self, node: SimNode) -> dict[str, Callable[[], object]]:
        endpoint = node.endpoint
        handles = [e.handle for e in self._world.entries.values() if e.node is node and e.handle is not None]
        calls = _of_decode(endpoint) if isinstance(endpoint, DecodeEndpoint) else _of_prefill(endpoint)
        confirm: Junk = endpoint.confirm_terminated
        for epoch in (None, "a life", b"short", 16):
            calls[f"confirm_terminated({epoch!r})"] = partial(confirm, epoch)
        opens: Junk = endpoint.open
        for handle in handles:
            source = (Source("prefill"),) if isinstance(endpoint, DecodeEndpoint) else ()
            calls[f"open({handle.room!r}) again"] = partial(opens, handle.room, *source)
            if isinstance(handle, DeliveryHandle):
                calls |= _of_delivery(handle)
            elif isinstance(handle, ReceptionHandle):
                calls |= _of_reception(handle)
        return calls


def _remembered(world: Cluster, node: SimNode) -> list[object]:
    """What is queued, how many rooms there are, and what their handles know."""
    known: list[object] = [node.backlog, len(node.view.rooms)]
    for entry in world.entries.values():
        if entry.node is node and entry.handle is not None:
            known.append(repr(vars(entry.handle)))
    return known


def _rooms(opens: Junk, *more: object) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for room in ("req-1", 8, None, b"", b"x" * 65, [b"r"]):
        calls[f"open({room!r})"] = partial(opens, room, *more)
    for seconds in ("1", nan, -1.0, 0, True):
        calls[f"open(total_s={seconds!r})"] = partial(opens, b"junk", *more, total_s=seconds)
    return calls


def _of_decode(endpoint: DecodeEndpoint) -> dict[str, Callable[[], object]]:
    opens: Junk = endpoint.open
    calls = _rooms(opens, Source("prefill"))
    for source in ("prefill 0", None, b"prefill"):
        calls[f"open(source={source!r})"] = partial(opens, b"junk", source)
    return calls


def _of_prefill(endpoint: PrefillEndpoint) -> dict[str, Callable[[], object]]:
    calls, step = _rooms(endpoint.open), endpoint.step
    made: Junk = step
    wrong: tuple[object, ...] = ([b"r"], {"r": (1, [])}, {b"r": 1}, {b"r": ("1", [])}, None)
    for chunks in wrong:
        calls[f"step({chunks!r})"] = partial(made, chunks)
    return calls


def _of_delivery(handle: DeliveryHandle) -> dict[str, Callable[[], object]]:
    send, finish, abort = handle.send_chunk, handle.finish, handle.abort
    chunk: Junk = send
    end: Junk = finish
    stop: Junk = abort
    calls: dict[str, Callable[[], object]] = {"abort(None)": partial(stop, None), "abort(b'')": partial(stop, b"")}
    for rows in ("4", 2.5, True, None, -1, np.float32(2)):
        calls[f"send_chunk({rows!r})"] = partial(chunk, rows, [])
        calls[f"finish({rows!r})"] = partial(end, rows)
    after = handle.given + 1
    calls["send_chunk of a list of pages"] = partial(chunk, after, [0, 1])
    calls["send_chunk of an array"] = partial(chunk, after, np.zeros(1, np.int32))
    calls["send_chunk at no event"] = partial(chunk, after, [], object())
    calls["finish with half an aux row"] = partial(end, after - 1, aux=0.5)
    calls["finish at no event"] = partial(end, after - 1, ready=object())
    return calls


def _of_reception(handle: ReceptionHandle) -> dict[str, Callable[[], object]]:
    rows_of: Junk = Expectation
    expect: Junk = handle.expect
    stop: Junk = handle.abort

    def wait(*rows: object, **more: object) -> object:
        return expect(rows_of(*rows, **more))

    calls: dict[str, Callable[[], object]] = {"abort(None) here": partial(stop, None)}
    for rows in ("4", 2.5, True, -1):
        calls[f"expect({rows!r})"] = partial(wait, rows, [])
    calls["expect in a list of pages"] = partial(wait, 1, [0, 1])
    calls["expect in an array"] = partial(wait, 1, np.zeros(1, np.int32))
    calls["expect with half an aux row"] = partial(wait, 0, [], aux=0.5)
    calls["expect after half a row"] = partial(wait, 0, [], held={"kv": 0.5})
    calls["expect after a list"] = partial(wait, 0, [], held=[4])
    return calls
