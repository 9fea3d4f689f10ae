"""Faults while a kernel of decode reads prefill's pages: an engine acts, a process ends, or decode stands still."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from disagg_kv.endpoints.decode.inspection import DecodeInspection

from .aimed_faults import FROZEN_S, AimedFaults
from .fault import FaultClass
from .node import SimNode
from .rooms import Entry

STRUCK, MOST = 0.5, 4
"""Share of decode's steps after which one happens, while a kernel reads; and how many happen in a world at most."""


class PullFaults(AimedFaults):
    """Waits for such kernels, and uses the faults that a scenario has. Its draws do not shift those of others."""

    name, most = "pull", MOST

    def strike(self, node: SimNode) -> None:
        """A process has made a step: a fault may happen before its next one."""
        world, view = self._world, node.view
        if not isinstance(view, DecodeInspection) or not view.pulls.running or world.calm or not world.faulty:
            return
        if not self._left or node.failing or self._random.random() >= STRUCK:
            return
        one = self._random.choice(view.pulls.running)
        source = one.room.remotes[one.what.rank].epoch
        mine = [entry for entry in world.entries.values() if entry.room.plan.room == one.room.key.room]
        reader = next((entry for entry in mine if entry.node is node), None)
        writer = next((entry for entry in mine if entry.node.epoch == source), None)
        if reader is None or writer is None or not writer.node.alive:
            return
        acts = self._acts(reader, writer)
        if acts:
            self._left -= 1
            name, act = self._random.choice(acts)
            world.mark(f"pulling:{name}")
            world.later(0.0, act)

    def _acts(self, reader: Entry, writer: Entry) -> list[tuple[str, Callable[[], object]]]:
        world, faults = self._world, self._world.scenario.faults
        acts: list[tuple[str, Callable[[], object]]] = []
        if FaultClass.ABORT in faults:
            acts.append(("decode gives up", partial(reader.room.abort, reader)))
            acts.append(("prefill gives up", partial(writer.room.abort, writer)))
            if FaultClass.PAUSE in faults:
                acts.append(("decode stands still", partial(self._silence, reader, writer)))
        if FaultClass.WITHDRAW in faults:
            acts.append(("pages are taken away", partial(writer.room.withdraw, writer)))
        if FaultClass.PREFILL_CRASH in faults and FaultClass.PREFILL_CRASH not in world.hits and not world.healed:
            acts.append(("prefill ends", partial(self._lose, FaultClass.PREFILL_CRASH, writer.node)))
        return acts

    def _silence(self, reader: Entry, writer: Entry) -> None:
        if reader.node.alive and not reader.node.paused:
            self._world.hit(FaultClass.PAUSE)
            self._freeze(reader.node, FROZEN_S)
        writer.room.abort(writer)
