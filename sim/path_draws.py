"""Which paths are known, and how kernels take them."""

from __future__ import annotations

import random

REFUSED = 0.2
"""Share of the worlds whose decode allows no exposed pages in which a prefill instance knows no other path."""

PULL = "mapped_pull"
PULLS = 0.15
"""Share of the worlds in which kernels of decode read the pages of prefill, and no other path is known."""

ITSELF = 0.5
"""Share of those worlds in which engines of decode wait for no peer, and ``auto`` finds the path. Others are known."""

WITHHELD, MAPPED = 0.8, 0.85
"""Share of prefill instances that wait for decode in such worlds, and of such worlds in which memory is mapped."""
AGREES = 0.5
"""Share of the worlds with several decode ranks in which prefill writes to exposed pages, so that words may agree."""

SLOW = 0.8
"""Share of those worlds in which kernels take their time although others of the same seed would not."""

SLOWLY, SELDOM = 0.8, 0.15
"""Share of the worlds in which ``auto`` pulls, and of the others, in which mapping a pool takes long."""

BROKEN = 0.2
"""Share of the pulls that fail, where kernels may fail."""

LONG, PULL_S = 0.4, (0.02, 0.2, 0.5)
"""Share of the pulls that take longer than others, and the most seconds that such a pull takes."""

UNQUEUED, UNLIKE = 0.25, 0.25
"""Share of the worlds in which kernels of no prefill rank queue, and of those with several in which some of them do."""


def refused_of(seed: int, decode_path: str, prefills: int) -> int | None:
    """In some worlds a prefill instance writes to exposed pages alone, and decode exposes none."""
    rng = random.Random(f"refused {seed}")
    return rng.randrange(prefills) if decode_path == "staged" and rng.random() < REFUSED else None


def pulls(seed: int) -> bool:
    """Whether decode pulls in the world of a seed."""
    return random.Random(f"pulls {seed}").random() < PULLS


def pulls_by_itself(seed: int) -> bool:
    """Whether ``auto`` finds that path in the world of a seed, as decode's engines wait for no peer."""
    return pulls(seed) and random.Random(f"pulls by itself {seed}").random() < ITSELF


def withheld(seed: int, prefills: int) -> tuple[bool, ...]:
    """Whether the engine of each prefill instance waits for decode before it frees pages."""
    rng = random.Random(f"withheld {seed}")
    return tuple(not pulls_by_itself(seed) or rng.random() < WITHHELD for _ in range(prefills))


def paths_of(seed: int, ranks: int, decode_path: str, draws: random.Random) -> tuple[bool, str, list[str]]:
    """Whether memory is mapped, decode's path, and the paths from which each prefill instance has one."""
    maps = draws.random() < 0.7
    if pulls_by_itself(seed):
        return draws.random() < MAPPED, "auto", ["auto", "auto", "auto", "staged"]
    if pulls(seed):
        return True, PULL, [PULL]
    if agrees(seed, ranks):
        return True, "auto", ["mapped", "slice"]
    return maps, decode_path, ["auto", "staged", *([] if decode_path == "staged" else ["staged", "slice"])]


def agrees(seed: int, ranks: int) -> bool:
    """Whether ranks of decode may agree by words in most rooms of the world of a seed."""
    return ranks > 1 and not pulls(seed) and random.Random(f"agrees {seed}").random() < AGREES


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
    return random.Random(f"slow mappings {seed}").random() < (SLOWLY if pulls_by_itself(seed) else SELDOM)


def slow_pulls(seed: int) -> bool:
    """Whether decode pulls in the world of a seed, by kernels that take their time."""
    return pulls(seed) and random.Random(f"slow pulls {seed}").random() < SLOW
