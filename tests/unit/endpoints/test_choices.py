"""What decode remembers of its prefill ranks' paths, and which rooms are uncut by that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg_kv.endpoints.decode.choices import PathChoices
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch
from disagg_kv.strategies import paths
from tests.support.rig import Memory, Rig, tp_shards

SPEC = CacheSpec.kv(4, 4, 8, "float16")
A, B = Epoch(b"a"), Epoch(b"b")


def test_a_room_is_uncut_once_all_its_ranks_chose_to_copy_into_mapped_pages() -> None:
    choices = PathChoices(paths().values())
    assert not choices.map((A, B))
    choices.chose(A, "mapped")
    assert not choices.map((A, B))
    choices.chose(B, "mapped")
    assert choices.map((A, B))
    choices.chose(B, "staged")
    assert not choices.map((A, B))
    assert choices.map((A,))


@pytest.mark.parametrize("path", ["staged", "direct", "slice", "mapped_pull", "of-a-third-party", ""])
def test_no_other_path_leaves_a_room_uncut(path: str) -> None:
    choices = PathChoices(paths().values())
    choices.chose(A, path)
    assert not choices.map((A,))


def test_a_rank_that_is_lost_or_whose_room_failed_chooses_again() -> None:
    choices = PathChoices(paths().values())
    ends: list[Callable[[], None]] = [lambda: choices.forget(B), lambda: choices.failed((B, A))]
    for end in ends:
        choices.chose(A, "mapped")
        choices.chose(B, "mapped")
        end()
        assert not choices.map((A, B))
    choices.failed((A, B))


@pytest.mark.parametrize("heads", [4, 1])
def test_rooms_are_uncut_after_one_that_was_mapped_until_one_fails(heads: int) -> None:
    """Also where ranks hold the same, so that one of them alone sends it."""
    spec = CacheSpec.kv(4, heads, 8, "float16")
    rig = Rig(spec)
    prefills = rig.prefill(tp_shards(spec, 4), strategy="auto")
    decodes = rig.decode(tp_shards(spec, 2), memory=Memory(page_size=2), strategy="auto")

    def uncut() -> bool:
        side = decodes[0].endpoint._side
        return side._choices.map(tuple(member.endpoint._loop.me.epoch for member in prefills))

    assert not uncut()
    rig.request("first", prefills, decodes, 9).start(9).landed()
    assert uncut()
    rig.request("second", prefills, decodes, 9).start(9).landed()
    assert uncut()
    failing = rig.request("third", prefills, decodes, 9).start(9)
    failing.receives[0].abort("enough")
    failing.failed()
    assert not uncut()
    rig.quiet()
