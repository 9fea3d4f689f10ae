"""Into how many groups the layers of a forward pass are cut, so that one crosses while the next is computed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from ..errors import ConfigurationError


@frozen
class Batch:
    """One forward pass, as all ranks of an instance see it.

    Args:
        tokens: new rows of each room.
        uses: what the engine declared of this pass, by name.
        layered: True: layers become final one by one; False: all rows at once.
    """

    tokens: tuple[int, ...] = ()
    uses: frozenset[str] = frozenset()
    layered: bool = False


@frozen
class Pace:
    """How fast an instance computes and its wire is.

    Args:
        layer_token_s: seconds to compute one layer of one token.
        bytes_per_s: bytes of one rank that reach their target per second, a gather by the CPU included.
        group_s: seconds that one more group costs.

    Raises:
        ConfigurationError: a number that is not positive (``group_s`` may be 0).
    """

    layer_token_s: float
    bytes_per_s: float
    group_s: float = 1e-4

    def __attrs_post_init__(self) -> None:
        for name, value in (("layer_token_s", self.layer_token_s), ("bytes_per_s", self.bytes_per_s)):
            if not 0 < value < math.inf:
                raise ConfigurationError(f"pace: {name} must be positive, not {value}")
        if not 0 <= self.group_s < math.inf:
            raise ConfigurationError(f"pace: group_s must not be negative, but is {self.group_s}")


@frozen
class LayerRun:
    """The subject of a decision: some rows of a run of layers, towards one decode rank.

    Args:
        layers: how many; they are of one pipeline stage.
        rows: of the room, in this pass.
        nbytes: bytes of them that the prefill rank with the most bytes sends.
        batch: the forward pass.
        pace: None: not known.
    """

    layers: int
    rows: int
    nbytes: int
    batch: Batch
    pace: Pace | None = None


@frozen
class Groups:
    """A decision: groups of ``size`` layers (the last may be smaller), and one sentence that says why.

    Args:
        layers: how many there are.
        size: layers of a group, 1 to ``layers``.
        reason: why.
    """

    layers: int
    size: int
    reason: str

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.size <= self.layers:
            raise ConfigurationError(f"groups of {self.size} layers out of {self.layers}")

    @property
    def count(self) -> int:
        """How many groups."""
        return -(-self.layers // self.size)

    def cut(self, run: range) -> list[range]:
        """The groups of a run of layers: ranges of layer ids, ascending."""
        return [range(a, min(a + self.size, run.stop)) for a in range(run.start, run.stop, self.size)]


def whole(layers: int, reason: str) -> Groups:
    """All layers at once."""
    return Groups(layers, layers, reason)


@frozen
class Adaptive:
    """The published adaptive formula (SGLang #23515): longer prompts get fewer, larger groups.

    Args:
        min_tokens: below this mean length of a pass's rooms there is one group.
        saturation: the fewest groups are reached at this multiple of ``min_tokens``.
        most, least: how many groups.
        few_layers: this number of layers or fewer is one group.

    Raises:
        ConfigurationError: numbers below 1 (``saturation``: 1.01), or ``least`` above ``most``.
    """

    min_tokens: int = 3072
    saturation: float = 3.0
    most: int = 10
    least: int = 4
    few_layers: int = 4

    def __attrs_post_init__(self) -> None:
        floors = {"min_tokens": 1, "saturation": 1.01, "most": 1, "least": 1, "few_layers": 0}
        for name, floor in floors.items():
            if not floor <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"layer groups: {name} must be at least {floor:g}, not {getattr(self, name)}")
        if self.least > self.most:
            raise ConfigurationError(f"layer groups: least {self.least} is above most {self.most}")

    def groups(self, layers: int, tokens: Sequence[int]) -> Groups:
        """The groups of a pass over rooms that have these numbers of new tokens."""
        if not tokens:
            return whole(layers, "an empty pass has no groups")
        mean = sum(tokens) / len(tokens)
        if mean < self.min_tokens:
            return whole(layers, f"{mean:.0f} tokens per room are fewer than {self.min_tokens}")
        if layers <= self.few_layers:
            return whole(layers, f"{layers} layers are too few to group")
        saturated = self.min_tokens * self.saturation
        t = min(max((mean - self.min_tokens) / (saturated - self.min_tokens), 0.0), 1.0)
        count = min(max(self.most - t * (self.most - self.least), self.least), self.most)
        size = min(max(1, int(layers // count)), layers)
        return Groups(layers, size, f"the adaptive formula gives {count:.1f} groups for {mean:.0f} tokens per room")


def exposed_s(compute_s: float, wire_s: float, groups: int, group_s: float) -> float:
    """Seconds from the pass's beginning to the last byte's landing, if the layers cross in equal groups.

    If computing takes longer, only the last group crosses after its end. If the wire takes longer, it waits only for
    the first group.
    """
    longer, shorter = max(compute_s, wire_s), min(compute_s, wire_s)
    return longer + shorter / groups + groups * group_s


def fastest(run: LayerRun, pace: Pace, margin: float = 0.02) -> Groups:
    """The groups that expose the least time; one group unless others gain more than ``margin`` of it."""
    tokens = sum(run.batch.tokens)
    compute = pace.layer_token_s * run.layers * tokens
    wire = run.nbytes / run.rows * tokens / pace.bytes_per_s
    sizes = {-(-run.layers // size): size for size in range(run.layers, 0, -1)}
    times = {count: exposed_s(compute, wire, count, pace.group_s) for count in sizes}
    best = min(times, key=lambda count: (times[count], count))
    if times[best] >= (1 - margin) * times[1]:
        best = 1
    reason = (
        f"{compute * 1e3:.2f} ms of computing and {wire * 1e3:.2f} ms of wire take {times[best] * 1e3:.2f} ms in "
        f"{best} group{'s' if best > 1 else ''}, {times[1] * 1e3:.2f} ms in one"
    )
    return Groups(run.layers, sizes[best], reason)
