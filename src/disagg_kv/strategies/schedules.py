"""The two schedules that come with the library."""

from __future__ import annotations

from attrs import field, frozen

from ..errors import ConfigurationError
from ..planning import Adaptive, Groups, LayerRun, Pace, fastest, whole
from .base import Feature


@frozen
class PerChunk:
    """Everything of a chunk when all its layers are final."""

    name: str = field(default="per_chunk", init=False)

    def groups(self, run: LayerRun) -> Groups:
        """One group."""
        return whole(run.layers, "the schedule is per_chunk")


@frozen
class LayerPipelined:
    """A group of layers crosses while the next one is computed.

    How many groups: ``fixed`` outranks everything; then the cost model, where a pace is known; else ``adaptive``.

    Args:
        fixed: layers of a group.
        pace: how fast the instance is, equal on all its ranks; None: what the endpoint measures, where it may.
        adaptive: the formula for passes whose pace is not known.

    Raises:
        ConfigurationError: a group of no layers.
    """

    name: str = field(default="layer_pipelined", init=False)
    fixed: int | None = None
    pace: Pace | None = None
    adaptive: Adaptive = field(factory=Adaptive)

    def __attrs_post_init__(self) -> None:
        if self.fixed is not None and self.fixed < 1:
            raise ConfigurationError(f"layer groups: a fixed size must be at least 1, not {self.fixed}")

    def groups(self, run: LayerRun) -> Groups:
        """Cut a run of layers into groups; each crosses as soon as its layers are final."""
        batch = run.batch
        if not batch.layered:
            return whole(run.layers, "the rows became final at once, not layer by layer")
        for feature in Feature:
            if feature in batch.uses:
                return whole(run.layers, f"the engine uses {feature}: {feature.why}")
        if self.fixed is not None:
            return Groups(run.layers, min(self.fixed, run.layers), f"groups of {self.fixed} layers were asked for")
        pace = run.pace if self.pace is None else self.pace
        if pace is not None and any(batch.tokens):
            return fastest(run, pace)
        return self.adaptive.groups(run.layers, batch.tokens)
