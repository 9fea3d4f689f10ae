"""The corpus of the fuzz targets, replayed: what was found once, and what honest peers send, whole and in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.targets import TARGETS, frame
from fuzz.world import World
from tests.support.pages import ROOT

CORPUS = sorted((ROOT / "fuzz" / "corpus").glob("*/*"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_bytes_from_the_corpus_make_an_object_or_the_peers_error(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_seeds() -> None:
    assert {path.parent.name for path in CORPUS} == set(TARGETS)


@pytest.mark.parametrize("path", [p for p in CORPUS if p.parent.name == "frame"], ids=lambda path: path.name)
def test_every_beginning_of_a_frame_is_refused_or_a_frame(path: Path) -> None:
    """In pieces."""
    data = path.read_bytes()
    for cut in range(len(data)):
        frame(data[:cut])


def test_the_world_of_the_fuzzer_moves_rooms_when_nobody_disturbs_it() -> None:
    """Or its events would find nothing: engines hand over rows, and the rooms end well."""
    world = World(bytes([16, 7, 0, *[0, 7] * 12]))
    try:
        world.run()
        world.rig.until(lambda: all(h.released for r in world._requests for h in r.handles), "all rooms")
        assert all(h.error is None for r in world._requests for h in r.handles)
        assert world._decodes[0].endpoint.poll()
    finally:
        world.close()
