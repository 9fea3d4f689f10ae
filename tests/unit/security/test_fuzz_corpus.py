"""The corpus of the fuzz targets, replayed: what was found once, and what honest peers send, whole and in pieces."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import pytest

from disagg_kv.core.wire.frames import Frame
from disagg_kv.errors import RemoteProtocolError
from fuzz.mutate import changed
from fuzz.seeds import SEEDS, at
from fuzz.targets import CODEC, PLANS, TARGETS, frame
from fuzz.world import KINDS, Draw, World, forge
from tests.support.pages import ROOT

CORPUS = sorted((ROOT / "fuzz" / "corpus").glob("*/*"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_bytes_from_the_corpus_make_an_object_or_the_peers_error(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_the_seeds_that_honest_peers_send_today() -> None:
    """Seeds of frames that have changed since are refused at their first field, and a fuzzer would learn nothing."""
    assert set(SEEDS) == set(TARGETS)
    files = [at(target, seed) for target, make in SEEDS.items() for seed in make()]
    assert not [path for path in files if not path.exists()], "run `python -m fuzz.seeds`, and remove stale seeds"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_the_fuzzer_forges_is_a_frame(kind: type[Frame]) -> None:
    draw, drawn = Random(1), set()
    for _ in range(300):
        made = forge(kind, Draw(draw.randbytes(200)), src=bytes(16), dst=bytes(16))
        assert CODEC.decode(CODEC.encode(made)) == made
        drawn.add(CODEC.encode(made))
    fields = {field.name for field in msgspec.structs.fields(kind)} - {"src", "dst"}
    assert len(drawn) > len(fields), "each field has several values"


@pytest.mark.parametrize("path", [p for p in CORPUS if p.parent.name == "frame"], ids=lambda path: path.name)
def test_every_beginning_of_a_frame_is_refused_or_a_frame(path: Path) -> None:
    """In pieces."""
    data = path.read_bytes()
    for cut in range(len(data)):
        frame(data[:cut])


def test_changes_of_a_frame_are_mostly_frames_and_all_different() -> None:
    """Random bytes in a frame are none at all, most of the time, and go no deeper than its decoder."""
    for target, decoder in (("frame", CODEC.decode), ("plan", PLANS.decode)):
        seed, found = max(SEEDS[target](), key=len), set()
        for number in range(400):
            with suppress(RemoteProtocolError, msgspec.MsgspecError, UnicodeDecodeError):
                mutant = changed(seed, 4096, number)
                decoder(mutant)
                found.add(mutant)
        assert len(found) > 100


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
