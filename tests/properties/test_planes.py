"""Two planes share a byte exactly if a model that marks every byte says so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.geometry.overlap import Lattice, meet

Axes = list[tuple[int, int]]


@st.composite
def lattices(draw: st.DrawFn) -> tuple[Axes, int]:
    """Nested strides: each covers what is inside it, with a gap or without one."""
    run = draw(st.integers(1, 6))
    axes: Axes = []
    extent = run
    for count in draw(st.lists(st.integers(1, 4), max_size=3)):
        stride = extent + draw(st.sampled_from((0, 0, 1, 3, 8)))
        axes.append((stride, count))
        extent += stride * (count - 1)
    return axes, run


def _bytes(axes: Axes, run: int, start: int) -> set[int]:
    starts = {start}
    for stride, count in axes:
        starts = {one + i * stride for one in starts for i in range(count)}
    return {one + i for one in starts for i in range(run)}


@given(lattices(), lattices(), st.integers(-40, 300))
def test_lattices_meet_exactly_where_a_model_has_a_common_byte(
    one: tuple[Axes, int], other: tuple[Axes, int], distance: int
) -> None:
    """Equal and unequal strides, with the axes in any order."""
    (axes, run), (others, length) = one, other
    want = bool(_bytes(axes, run, 0) & _bytes(others, length, distance))
    assert meet(Lattice.of(axes, run), Lattice.of(others[::-1], length), distance) == want


@given(lattices(), lattices(), st.integers(-40, 300))
def test_the_answer_does_not_depend_on_which_plane_is_first(
    one: tuple[Axes, int], other: tuple[Axes, int], distance: int
) -> None:
    """The order in which an engine names its planes is of no consequence."""
    a, b = Lattice.of(*one), Lattice.of(*other)
    assert meet(a, b, distance) == meet(b, a, -distance)
