"""Which path is taken, and the sentence that says why."""

from __future__ import annotations

import pytest

from disagg_kv.errors import ConfigurationError
from disagg_kv.planning import CostModel, Estimate, choose

MODEL = CostModel(write_s=1e-3, bytes_per_s=1e6, copy_bytes_per_s=1e6, round_trip_s=0.5, launch_s=1e-2)


def test_bytes_that_go_straight_cost_wire_and_descriptors() -> None:
    """Many small writes are slow whatever the bandwidth."""
    assert MODEL.estimate("slice", 1000, 10**6).seconds == pytest.approx(2.0)


def test_staging_overlaps_consecutive_segments() -> None:
    """A chunk's time tends to the largest of gather, wire and scatter, not to their sum; of several, ends are short."""
    one = MODEL.estimate("staged", 1, 10**6, segments=1).seconds
    assert one == pytest.approx(0.5 + 2 * 1.01 + 1.001)
    many = MODEL.estimate("staged", 10, 10**6, segments=10).seconds
    assert many == pytest.approx(0.5 + 1.1 + (1.1 + 1.01) / 18)


def test_copies_into_mapped_pages_cost_launches_and_a_share_of_the_wire() -> None:
    """Nothing is granted, gathered or scattered."""
    mapped = MODEL.estimate_mapped("mapped", 2, 9 * 10**5)
    assert (mapped.path, mapped.descriptors, mapped.nbytes) == ("mapped", 2, 9 * 10**5)
    assert mapped.seconds == pytest.approx(1.0 + 0.02)


def test_fragmented_pages_go_through_staging_and_a_few_runs_do_not() -> None:
    """The choice is the cost model's."""
    staged = MODEL.estimate("staged", 1, 10**6, segments=1)
    few, many = (MODEL.estimate("direct", n, 10**6) for n in (4, 4096))
    assert few.seconds < staged.seconds < many.seconds


def test_the_reason_is_one_sentence_with_every_number_and_refusal() -> None:
    """Who falls back says why."""
    slow, fast = Estimate("slice", 4096, 1000, 2.0), Estimate("direct", 4, 1000, 0.25)
    choice = choose([fast, slow], {"staged": "the transport gives no memory"})
    assert (choice.path, choice.estimates) == ("direct", (fast, slow))
    assert choice.reason == (
        "direct takes 250.00 ms for 4 writes of 1,000 bytes; slice would take 2,000.00 ms for 4,096 writes of 1,000 "
        "bytes; staged cannot: the transport gives no memory"
    )
    assert choose([slow, fast], {}).path == "slice", "the first, not the fastest"


def test_no_path_at_all_is_an_error_with_the_reasons() -> None:
    """Nothing is chosen silently."""
    with pytest.raises(ConfigurationError, match="no path is left: staged cannot: no memory; slice cannot: no pages"):
        choose([], {"staged": "no memory", "slice": "no pages"})
    with pytest.raises(ConfigurationError, match="none was offered"):
        choose([], {})


def test_costs_are_positive() -> None:
    """A rate of zero would make every path equally endless."""
    with pytest.raises(ConfigurationError, match="cost model: bytes_per_s must be positive, not 0"):
        CostModel(bytes_per_s=0)


@pytest.mark.parametrize(("device", "path"), [("cuda:0", "staged"), ("cpu", "direct")])
def test_a_gpu_gathers_faster_than_a_network_takes_many_writes(device: str, path: str) -> None:
    """1 GiB in 16,384 pieces: a copy on a GPU takes a millisecond, and each piece microseconds."""
    costs = CostModel.of_transport(5.5e-6, 3.8e11, device)
    estimates = [costs.estimate("direct", 16_384, 1 << 30), costs.estimate("staged", 17, 1 << 30, segments=17)]
    assert min(estimates, key=lambda e: e.seconds).path == path
