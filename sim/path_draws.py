"""Which paths are known, and how kernels take them."""

from __future__ import annotations

import random

REFUSED = 0.2
"""Share of the worlds whose decode allows no exposed pages in which a prefill instance knows no other path."""

AGREES = 0.5
"""Share of the worlds with several decode ranks in which prefill writes to exposed pages in most rooms."""

SLOWLY = 0.15
"""Share of the worlds in which mapping a pool takes long."""

UNQUEUED, UNLIKE = 0.25, 0.25
"""Share of the worlds in which kernels of no prefill rank queue, and of those with several in which some of them do."""


def refused_of(seed: int, decode_path: str, prefills: int) -> int | None:
    """In some worlds a prefill instance writes to exposed pages alone, and decode exposes none."""
    rng = random.Random(f"refused {seed}")
    return rng.randrange(prefills) if decode_path == "staged" and rng.random() < REFUSED else None


def paths_of(seed: int, ranks: int, decode_path: str, draws: random.Random) -> tuple[bool, str, list[str]]:
    """Whether memory is mapped, decode's path, and the paths from which each prefill instance has one."""
    maps = draws.random() < 0.7
    if agrees(seed, ranks):
        return True, "auto", ["mapped", "slice"]
    return maps, decode_path, ["auto", "staged", *([] if decode_path == "staged" else ["staged", "slice"])]


def agrees(seed: int, ranks: int) -> bool:
    """Whether ranks of decode vote on rooms of exposed pages in the world of a seed."""
    return ranks > 1 and random.Random(f"agrees {seed}").random() < AGREES


def queue(seed: int, ranks: int) -> tuple[bool, ...]:
    """Whether the kernels of each prefill rank queue copies, as on a GPU; others keep a thread meanwhile."""
    rng = random.Random(f"queues {seed}")
    kind = rng.random()
    if kind < UNQUEUED or (ranks > 1 and kind < UNQUEUED + UNLIKE):
        queued = rng.sample(range(ranks), 0 if kind < UNQUEUED else rng.randrange(1, ranks))
        return tuple(rank in queued for rank in range(ranks))
    return (True,) * ranks


def slow_mappings(seed: int) -> bool:
    """Whether mapping a peer's pool may take long in the world of a seed."""
    return random.Random(f"slow mappings {seed}").random() < SLOWLY
