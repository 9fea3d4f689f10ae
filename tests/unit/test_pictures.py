"""The pictures of the docs are what their functions draw, are readable, are shown, and name what is there."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from disagg_kv.core import AnyFrame
from disagg_kv.endpoints import Delivery, Handle, PrefillEndpoint, Receiver, Reception
from pictures.all import IMAGES, PICTURES
from pictures.drawing import Picture
from pictures.prefix import HELD, ROWS
from pictures.request import request
from tests.support.pages import PAGES, ROOT

FROM_BENCHMARKS = {"bench-engines", "bench-pipeline", "bench-prefix", "bench-sglang", "bench-trace", "dashboard"}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_function_draws(name: str) -> None:
    assert (IMAGES / f"{name}.svg").read_text() == PICTURES[name]().svg(), "run python -m pictures"


@pytest.mark.parametrize("name", PICTURES)
def test_no_words_of_a_picture_overlap_or_leave_it(name: str) -> None:
    assert list(PICTURES[name]().clashes()) == []


def test_words_that_overlap_or_leave_a_picture_would_be_noticed() -> None:
    picture = Picture("test", 200, 100)
    for x, y, text in ((100, 50, "in the middle"), (110, 55, "too near"), (150, 90, "over the right edge")):
        picture.text(x, y, text)
    assert list(picture.clashes()) == [
        "'in the middle' meets 'too near'",
        "'over the right edge' leaves the picture",
    ]


def test_every_picture_has_a_function_or_is_of_a_benchmark_and_is_shown_with_words_for_those_who_cannot_see() -> None:
    files = {path.stem for path in IMAGES.glob("*.svg")}
    assert files == {*PICTURES, *FROM_BENCHMARKS}
    shown = {
        name for page in PAGES for name in re.findall(r"!\[\w[^\]]+\]\([^)]*images/([\w-]+)\.svg\)", page.read_text())
    }
    assert shown == files


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_a_page(name: str) -> None:
    assert PICTURES[name]().width <= 900


def test_every_picture_has_the_colours_of_both_themes() -> None:
    """Those of benchmarks, too; a ground that is always white would blind a reader at night."""
    texts = {path.stem: path.read_text() for path in IMAGES.glob("*.svg")}
    assert [name for name, text in texts.items() if "prefers-color-scheme: dark" not in text] == []
    assert [name for name, text in texts.items() if 'fill="white"' in text] == []


def test_the_frames_and_calls_of_the_sequence_exist() -> None:
    words = " ".join(re.findall(r">([^<]+)</text>", request().svg()))
    frames = {kind.__name__ for kind in get_args(AnyFrame)}
    named = {"Expect", "Expected", "StagingRequest", "Grant", "ChunkReady", "Landed", "Done", "Complete"}
    assert named <= frames
    assert [name for name in named if name not in words] == []
    calls = [*re.findall(r"(\w+)\(", words), "expect", "poll"]
    faces = (PrefillEndpoint, Receiver, Delivery, Reception, Handle)
    assert len(calls) > 5
    assert [call for call in calls if not any(hasattr(face, call) for face in faces)] == []


def test_the_picture_of_a_prefix_has_the_numbers_of_the_example_beside_it() -> None:
    page = (ROOT / "docs/incremental.md").read_text()
    assert f"Expectation({ROWS}, " in page
    assert f'held={{"kv": {HELD}}}' in page
