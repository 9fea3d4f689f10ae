"""Which rank of a measurement or a demo has which GPU."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import ConfigurationError


def spread(prefill: int, decode: int, gpus: int) -> tuple[Sequence[int], Sequence[int]]:
    """GPUs of prefill and of decode ranks: one each where there are enough, else each side shares its part in turn.

    Bytes always cross from one GPU to another where there are two.

    Raises:
        ConfigurationError: no GPU.
    """
    if gpus < 1:
        raise ConfigurationError("device 'cuda': torch sees no GPU")
    if prefill + decode <= gpus:
        return range(prefill), range(prefill, prefill + decode)
    mine = min(max(1, gpus * prefill // (prefill + decode)), max(1, gpus - 1))
    theirs = max(1, gpus - mine)
    return [rank % mine for rank in range(prefill)], [gpus - theirs + rank % theirs for rank in range(decode)]
