"""Which rank has which GPU."""

from __future__ import annotations

import pytest

from disagg_kv.engines.hf.demo.devices import spread
from disagg_kv.errors import ConfigurationError


@pytest.mark.parametrize(
    ("ranks", "gpus", "sides"),
    [
        ((2, 1), 3, ([0, 1], [2])),
        ((2, 1), 8, ([0, 1], [2])),
        ((2, 1), 2, ([0, 0], [1])),
        ((1, 2), 2, ([0], [1, 1])),
        ((2, 2), 2, ([0, 0], [1, 1])),
        ((4, 2), 4, ([0, 1, 0, 1], [2, 3])),
        ((4, 1), 4, ([0, 1, 2, 0], [3])),
        ((3, 2), 1, ([0, 0, 0], [0, 0])),
    ],
)
def test_each_rank_has_a_gpu_and_the_sides_share_one_only_if_there_is_no_other(
    ranks: tuple[int, int], gpus: int, sides: tuple[list[int], list[int]]
) -> None:
    found = spread(*ranks, gpus)
    assert (list(found[0]), list(found[1])) == sides


def test_without_a_gpu_it_is_said() -> None:
    with pytest.raises(ConfigurationError, match="no GPU"):
        spread(1, 1, 0)
