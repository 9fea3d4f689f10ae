"""Forward passes of a prefill rank: which rooms' chunks each computes, and when their layers are final."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from disagg_kv.endpoints import PrefillEndpoint
from disagg_kv.endpoints.prefill.handle import ForwardPass
from disagg_kv.ids import LayerId

from .at_once import AtOnce
from .cluster import Cluster
from .events import SimEvent
from .fault import survives
from .kind import Kind
from .node import SimNode
from .rooms import Chunk, Entry

GATHER_S = (0.008, 0.02)
"""Ranks that compute the same passes let rooms gather for this time."""


class ForwardPasses:
    """A rank computes one pass at a time, over all rooms that wait when the pass begins.

    Ranks of one instance announce the same passes where the groups of layers follow from the number of tokens of a
    pass. There the rank that begins a pass first decides for all ranks which rooms are in it. This holds only where
    every room succeeds. A rank whose room has failed would never begin the pass; so elsewhere each room has passes of
    its own.
    """

    def __init__(self, world: Cluster, node: SimNode, at_once: AtOnce) -> None:
        schedule = world.scenario.schedule
        self._world = world
        self._node = node
        self._at_once = at_once
        self._free = node.split.world == 1 or schedule is None or schedule.fixed is not None
        succeed = survives(world.scenario.faults) and not any(one.unmet for one in world.scenario.requests)
        self._together = self._free or succeed
        self._listed = world.passes.setdefault(node.instance, [])
        self._next_listed = 0
        self._waiting: list[tuple[Entry, int]] = []
        self._running = False

    def join(self, entry: Entry, number: int) -> None:
        """A chunk of a room waits for its pass."""
        if not self._together:
            self._begin([(entry, number)])
            return
        self._waiting.append((entry, number))
        self._world.later(self._world.random.choice((0.0, 0.001) if self._free else GATHER_S), self._next)

    def _next(self) -> None:
        if self._running or not self._node.alive:
            return
        if self._free:
            waiting, self._waiting = self._waiting, []
            self._begin(waiting)
        elif self._waiting:
            self._next_in_step()

    def _next_in_step(self) -> None:
        """The pass that the other ranks compute too, once all that is in it waits here."""
        waiting = {(entry.room.number, number): (entry, number) for entry, number in self._waiting}
        follows = self._next_listed < len(self._listed)
        if not follows:
            self._listed.append(list(waiting))
        listed = self._listed[self._next_listed]
        if all(key in waiting for key in listed):
            self._next_listed += 1
            begun = [waiting.pop(key) for key in listed]
            self._waiting = list(waiting.values())
            if follows and len(listed) > 1:
                self._world.saw(Kind.PASS_IN_STEP)
            self._begin(begun)

    def _begin(self, waiting: Sequence[tuple[Entry, int]]) -> None:
        chunks = [c for entry, number in waiting if (c := entry.room.taken(entry, number)) is not None]
        if not chunks:
            return
        assert isinstance(self._node.endpoint, PrefillEndpoint)
        step = self._node.endpoint.step({c.entry.room.plan.room: (self._world.count(c.stop), c.tables) for c in chunks})
        self._running = True
        if len(chunks) > 1:
            self._world.saw(Kind.PASS)
        seconds = max(c.entry.room.plan.pass_s for c in chunks)
        self._world.later(seconds, partial(self._computed, step, chunks))

    def _computed(self, step: ForwardPass, chunks: Sequence[Chunk]) -> None:
        """A pass has begun to end."""
        if not self._node.alive:
            return
        rng = self._world.random
        layers = list(reversed(self._node.memory.pool.site.shard.layers()))
        if rng.random() < 0.6:
            if rng.random() < 0.5:
                rng.shuffle(layers)
            self._layer(step, chunks, layers)
        else:
            self._close(step, chunks, layers)

    def _layer(self, step: ForwardPass, chunks: Sequence[Chunk], layers: list[LayerId]) -> None:
        """Layer after layer is final, most often from the first on; the pass ends with the last, or before it."""
        if not self._node.alive:
            return
        layer = layers.pop()
        self._say(chunks, partial(step.layer_ready, layer, self._by_event(chunks, [layer])))
        if layers and self._world.random.random() < 0.85:
            self._world.later(0.001, partial(self._layer, step, chunks, layers))
        else:
            self._close(step, chunks, layers)

    def _close(self, step: ForwardPass, chunks: Sequence[Chunk], layers: list[LayerId]) -> None:
        """A pass ends; layers that were not announced are final then, or at an event."""
        if layers and len(layers) < len(self._node.memory.pool.site.shard.layers()):
            self._world.saw(Kind.LAYERS_REST)
        self._say(chunks, partial(step.close, self._by_event(chunks, layers)))
        self._running = False
        for chunk in chunks:
            chunk.entry.room.chunk(chunk.entry, chunk.number + 1)
        if self._waiting:
            self._world.later(0.0, self._next)

    def _say(self, chunks: Sequence[Chunk], call: Callable[[], object]) -> None:
        """A call that makes layers final; it may launch copies."""
        before, entries = self._node.kernels.copies, [chunk.entry for chunk in chunks]
        self._at_once.before_layers(entries)
        call()
        launched = self._node.kernels.copies > before
        if launched:
            self._world.saw(Kind.LAUNCHED)
        self._at_once.after_layers(entries, launched=launched)

    def _by_event(self, chunks: Sequence[Chunk], layers: list[LayerId]) -> SimEvent | None:
        """Layers of rows are in their pages now, or when the event happens."""
        if not layers or self._world.random.random() < 0.6:
            for chunk in chunks:
                chunk.lay(layers)
            return None
        ready = SimEvent()

        def happen() -> None:
            if self._node.alive:
                for chunk in chunks:
                    chunk.lay(layers)
                ready.happen()
                self._world.saw(Kind.LAYER_LATE)
                self._node.touch()

        self._world.later(self._world.random.randint(1, 5) / 1000, happen)
        return ready
