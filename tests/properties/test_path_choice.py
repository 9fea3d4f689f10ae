"""``auto`` takes the path with the least estimate of those that can, whatever was measured."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.endpoints.prefill.path_choice import NOMINAL_ROWS, PathChooser, PathRequest, choose_path, fitted
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import Epoch, Rank
from disagg_kv.planning import CostModel, Intake, Limits, MeasuredRates, PairPlan, RowRange
from disagg_kv.planning.cost import rounded
from disagg_kv.strategies import Job, auto_paths, maps_pages
from disagg_kv.strategies.explain import estimated
from tests.support.worlds import build_site

SPEC = CacheSpec.kv(2, 2, 8, "float16")
PATHS = auto_paths()
NAMES = [path.name for path in PATHS]
KNOWN = [(path.name, path.version) for path in PATHS]

rates = st.none() | st.floats(1.0, 1e18)
costs = st.builds(
    CostModel,
    write_s=st.floats(1e-7, 1e-3),
    bytes_per_s=st.floats(1e3, 1e12),
    copy_bytes_per_s=st.floats(1e3, 1e12),
    measured=st.builds(MeasuredRates, rates, rates),
)


@st.composite
def requests(draw: st.DrawFn) -> PathRequest:
    """What one prefill rank of one sends to one decode rank, of equal or of other pages."""
    pages = draw(st.sampled_from([4, 8]))
    sites = [build_site(SPEC, shard(SPEC), rows, 64, "NHD") for rows in (4, pages)]
    rows = RowRange(0, draw(st.integers(1, 200)))
    intake = Intake.build(SPEC, (shard(SPEC),), shard(SPEC), 0).for_rows(rows)
    return PathRequest(
        PairPlan(sites[0], sites[1], intake.parts[0], rows),
        intake,
        Rank(0),
        Limits(draw(st.sampled_from([16, 4096])), 1 << 20, pages),
        tuple(sorted(draw(st.sets(st.sampled_from(NAMES), min_size=1)))),
        draw(st.booleans()),
        draw(st.sampled_from([0, 16, 256])),
        draw(st.sampled_from([None, "nothing is mapped"])),
    )


def able(request: PathRequest) -> list[str]:
    """The paths that can, by the rules alone: each row of this cache takes 32 bytes of a layer."""
    found = []
    for path in PATHS:
        can = path.name in request.allowed and (request.exposed or not path.exposes_pages)
        can &= request.unmapped is None or not maps_pages(path)
        can &= path.exposes_pages or request.limits.slot_bytes > 16
        if can and path.refuse(request.pair) is None:
            found.append(path.name)
    return found


@given(requests(), costs)
def test_the_choice_is_the_cheapest_path_that_can(request: PathRequest, model: CostModel) -> None:
    """No measured rate makes a path that is refused the choice, and equal arguments give equal choices."""
    names = able(request)
    try:
        path, reason = choose_path("auto", PATHS, request, model)
    except ConfigurationError:
        assert not names
        return
    assert path.name in names
    segments = request.intake.segments(
        Rank(0), 0, request.rows or NOMINAL_ROWS, fitted(request.intake, Rank(0), request.limits)
    )
    nbytes = sum(request.intake.part_bytes(segment, Rank(0)) for segment in segments)
    seconds = {}
    for one in PATHS:
        if one.name in names:
            count = sum(one.count(Job(request.pair, segment)) for segment in segments)
            seconds[one.name] = estimated(one, model, count, nbytes, len(segments)).seconds
    assert seconds[path.name] == min(seconds.values())
    assert choose_path("auto", PATHS, request, model) == (path, reason)
    used = model.measured.copies if maps_pages(path) else model.measured.writes
    assert ("as measured" in reason.split("; ")[0]) is (used is not None)


@given(requests(), costs, st.lists(st.floats(1e8, 4e8), min_size=1, max_size=60))
def test_choices_by_rates_that_vary_are_few(request: PathRequest, model: CostModel, seen: list[float]) -> None:
    """A chooser remembers one answer for each step of a rate: nine in a factor of four."""
    chooser, compared = PathChooser("auto", PATHS), []
    if not able(request):
        return
    for rate in seen:
        costs = evolve(model, measured=MeasuredRates(rounded(rate), None))
        compared.append(chooser.choose(Epoch(b"epoch"), 0, KNOWN, request, costs))
    assert len({choice.reason for choice in compared}) <= 9


@given(requests(), costs)
def test_an_uncut_room_stages_nothing_and_says_what_would_be_chosen(request: PathRequest, model: CostModel) -> None:
    """Where only staging is left, it has no path."""
    names = able(request)
    chooser = PathChooser("auto", PATHS)
    if not set(names) - {"staged"}:
        with pytest.raises(ConfigurationError):
            chooser.choose(Epoch(b"epoch"), 0, KNOWN, evolve(request, uncut=True), model)
        return
    bound = chooser.choose(Epoch(b"epoch"), 0, KNOWN, evolve(request, uncut=True), model)
    free = chooser.choose(Epoch(b"epoch"), 0, KNOWN, request, model)
    assert bound.path.name in names
    assert bound.path.name != "staged"
    assert (bound.path, bound.reason) == (free.path, free.reason) or free.path.name == "staged"
    stages_nothing = "mapped" in names and free.path.name != "staged" if request.pair.parts else None
    assert bound.unstaged is free.unstaged is stages_nothing


@given(st.floats(1e-3, 1e18))
def test_a_rounded_rate_is_near(rate: float) -> None:
    """Within half a step: nine percent."""
    assert abs(rounded(rate) / rate - 1) < 0.0906
    assert rounded(rounded(rate)) == rounded(rate)
