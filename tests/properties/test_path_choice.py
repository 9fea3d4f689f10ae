"""The path that decode chooses is the first of the order of ``auto`` that every rank which sends rows can take."""

from __future__ import annotations

from functools import cache

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from disagg_kv.endpoints.decode.path_choice import UNSAID, PathChooser
from disagg_kv.endpoints.peers.handshake import EndpointInfo, RemoteEndpoint
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec
from disagg_kv.planning import InstancePlans, RowRange
from disagg_kv.strategies import exposes_pages, paths
from disagg_kv.strategies.registry import AUTO_ORDER
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 64, "float16")
BUILT_IN = ("direct", "slice", "staged", "mapped")
ROWS = RowRange(0, 9)


@frozen
class Rank:
    """A prefill rank: the paths that it knows, whether its slots hold a row, and what it has said of its mapping."""

    names: tuple[str, ...]
    holds: bool
    said: str | None


names = st.sets(st.sampled_from(BUILT_IN), min_size=1).map(lambda some: tuple(sorted(some)))
instances = st.sampled_from([1, 2, 4]).flatmap(
    lambda size: st.lists(
        st.builds(Rank, names, st.booleans(), st.sampled_from([None, "", "no handle is left"])),
        min_size=size,
        max_size=size,
    )
)


@cache
def sides(size: int) -> tuple[list[RemoteEndpoint], EndpointInfo]:
    """``size`` real prefill ranks, as they introduce themselves, and a decode rank."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, size))
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    return [RemoteEndpoint.of(one.endpoint._loop.me.hello()(b"")) for one in prefills], decode.endpoint._loop.me


def can(name: str, ranks: list[Rank], asked: bool) -> bool:
    """Whether all ranks can take a path, by the rules alone."""
    if name == "mapped":
        return asked or all(rank.said == "" for rank in ranks)
    if name == "staged":
        return all(rank.holds for rank in ranks)
    return name == "slice" or len(ranks) == 1  # only one rank has pages like decode's


@given(instances, names, st.none() | st.just("too many pages"))
def test_the_choice_is_the_first_path_that_all_can_take(
    ranks: list[Rank], ours: tuple[str, ...], unexposed: str | None
) -> None:
    """No other; equal questions have equal answers, and where there is none, the reason of each path is given."""
    known = paths()
    found, me = sides(len(ranks))
    remotes = [
        evolve(
            one,
            hello=structs.replace(
                one.hello,
                paths=tuple((name, known[name].version) for name in rank.names),
                slot_bytes=1 << 20 if rank.holds else 16,
            ),
        )
        for one, rank in zip(found, ranks, strict=True)
    ]
    chooser = PathChooser(evolve(me, paths=tuple(known[name] for name in ours)))
    said = tuple(UNSAID if rank.said is None else rank.said for rank in ranks)
    common = set(ours).intersection(*(rank.names for rank in ranks))
    order = [name for name in AUTO_ORDER if name in common] if len(common) != 1 else list(common)
    exposable = [name for name in order if unexposed is None or not exposes_pages(known[name])]
    able = [name for name in exposable if can(name, ranks, len(common) == 1)]
    asked = remotes, said, InstancePlans.of(remotes[0].shards_as(SPEC), me.site), 0, ROWS, unexposed
    if not able:
        with pytest.raises(ConfigurationError) as caught:
            chooser.choose(*asked)
        assert all(f"{name} cannot: " in str(caught.value) for name in order)
        return
    choice = chooser.choose(*asked)
    assert choice.path.name == able[0]
    assert [name for name in order if f"{name} cannot: " in choice.reason] == order[: order.index(able[0])]
    again = chooser.choose(*asked)
    assert (again.path, again.reason, again.unsegmented) == (choice.path, choice.reason, choice.unsegmented)
