"""The comparison of bytes finds what is wrong; it is tried here with files made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from disagg_kv.engines.hf.demo.check import POISON, Checked, PlaneFile, PoolFile, check

LAYERS, HEADS, DIM, PAGE = 2, 4, 3, 2
ROWS = (5, 2)
TABLES = ((4, 0, 2), (1,))
PAGES = 5
U8 = npt.NDArray[np.uint8]


def planes(heads: int) -> list[list[tuple[int, int, int, int]]]:
    """Layer by layer, K then V, page by page, row by row, with 8 bytes between planes."""
    unit = DIM * 4
    size = PAGES * PAGE * heads * unit + 8
    at = [[(layer * 2 + kind) * size for kind in range(2)] for layer in range(LAYERS)]
    return [[(offset, PAGE * heads * unit, heads * unit, unit) for offset in of] for of in at]


def leave(work: Path, prefill_tp: int, decode_tp: int, spoil: Callable[[U8], None]) -> list[PoolFile]:
    """Files of a transfer that worked, the first decode rank's memory spoiled afterwards."""
    random = np.random.default_rng(0)
    own = [random.standard_normal((LAYERS, 2, HEADS, rows, DIM)).astype(np.float32) for rows in ROWS]
    for request, whole in enumerate(own):
        for rank, part in enumerate(np.split(whole, prefill_tp, axis=2)):
            names = [(f"{layer}.{'kv'[kind]}", part[layer, kind]) for layer in range(LAYERS) for kind in range(2)]
            files_of = {f"{name}.{rank * HEADS // prefill_tp}": cells for name, cells in names}
            np.savez(work / f"own-{request}-{rank}.npz", **files_of)
    each = HEADS // decode_tp
    files = []
    for rank in range(decode_tp):
        strides = planes(each)
        memory = np.full(LAYERS * 2 * (PAGES * PAGE * each * DIM * 4 + 8), POISON, np.uint8)
        for request, rows in enumerate(ROWS):
            for layer in range(LAYERS):
                for kind in range(2):
                    for row in range(rows):
                        for head in range(each):
                            offset, page, step, unit = strides[layer][kind]
                            at = offset + TABLES[request][row // PAGE] * page + row % PAGE * step + head * unit
                            cell = own[request][layer, kind, rank * each + head, row].tobytes()
                            memory[at : at + unit] = np.frombuffer(cell, np.uint8)
        if rank == 0:
            spoil(memory)
        np.save(work / f"pool-decode-{rank}.npy", memory)
        held = (rank * each, (rank + 1) * each)
        of = [
            PlaneFile(f"{layer}.{'kv'[kind]}", held, 0, None, "float32", strides[layer][kind])
            for layer in range(LAYERS)
            for kind in range(2)
        ]
        files.append(PoolFile(of, PAGE, TABLES))
    return files


def flip(*places: int) -> Callable[[U8], None]:
    """Change single bytes."""

    def spoil(memory: U8) -> None:
        memory[list(places)] ^= 0xFF

    return spoil


NBYTES = LAYERS * 2 * HEADS * sum(ROWS) * DIM * 4


@pytest.mark.parametrize("decode_tp", [1, 2, 4])
@pytest.mark.parametrize("prefill_tp", [1, 2, 4])
def test_equal_bytes_are_equal_for_every_pair_of_sizes(tmp_path: Path, prefill_tp: int, decode_tp: int) -> None:
    """Every byte is looked at."""
    files = leave(tmp_path, prefill_tp, decode_tp, flip())
    assert check(tmp_path, "decode", ROWS, prefill_tp, files) == Checked(NBYTES, 0, 0)


@pytest.mark.parametrize(
    ("places", "wrong", "stray"),
    [
        ((0,), 1, 0),  # row 2 of request 0: page 0, the first of the pool
        ((3 * PAGE * HEADS * DIM * 4,), 0, 1),  # page 3 is nobody's
        ((5 * PAGE * HEADS * DIM * 4 + 2,), 0, 1),  # between two planes
        (((2 * PAGE + 1) * HEADS * DIM * 4,), 0, 1),  # request 0 ends in the middle of page 2
        ((0, 1, 3 * PAGE * HEADS * DIM * 4), 2, 1),
    ],
)
def test_each_changed_byte_is_counted_where_it_lies(
    tmp_path: Path, places: tuple[int, ...], wrong: int, stray: int
) -> None:
    """Among the rows that had to arrive it is wrong, elsewhere it is stray."""
    files = leave(tmp_path, 2, 1, flip(*places))
    assert check(tmp_path, "decode", ROWS, 2, files) == Checked(NBYTES, wrong, stray)


def test_nothing_arrived_is_all_wrong(tmp_path: Path) -> None:
    """A pool that still holds its poison; random floats hardly ever have that byte."""
    files = leave(tmp_path, 1, 2, lambda memory: memory.fill(POISON))
    found = check(tmp_path, "decode", ROWS, 1, files)
    assert found.wrong > 0.45 * NBYTES
    assert found.stray == 0


def test_rows_that_were_told_are_compared_and_prefills_caches_are_not(tmp_path: Path) -> None:
    """Each rank was told its heads of rows that several processes computed; an instance may have fewer of them."""
    files = leave(tmp_path, 1, 2, flip())
    for request in range(len(ROWS)):
        path = tmp_path / f"own-{request}-0.npz"
        with np.load(path) as of:
            whole = np.array([[of[f"{layer}.{kind}.0"] for kind in "kv"] for layer in range(LAYERS)])
        path.unlink()
        for rank in range(2):
            np.save(tmp_path / f"rows-decode-{request}-{rank}.npy", whole[:, :, rank * 2 : rank * 2 + 2])
    files = [attrs.evolve(file, expected=True) for file in files]
    assert check(tmp_path, "decode", ROWS, 1, files) == Checked(NBYTES, 0, 0)
    path = tmp_path / "rows-decode-0-1.npy"
    told = np.load(path)
    np.save(path, np.concatenate((told[:, :, :, :3], told[:, :, :, 3:4] + 1), axis=3))
    row = LAYERS * 2 * 2 * DIM * 4
    found = check(tmp_path, "decode", ROWS, 1, files)
    assert found.nbytes == NBYTES - row, "the last row is not awaited"
    assert 0 < found.wrong <= row
    assert 0.9 * row < found.stray <= row, "a byte or two are like poison"


def test_pages_of_earlier_turns_may_hold_anything(tmp_path: Path) -> None:
    """But rows of theirs that are awaited now must be right."""
    page = PAGE * HEADS * DIM * 4
    files = leave(tmp_path, 2, 1, flip(0, 3 * page, 3 * page + 1))
    files = [attrs.evolve(of, used=(0, 3)) for of in files]
    assert check(tmp_path, "decode", ROWS, 2, files) == Checked(NBYTES, 1, 0)


def test_of_a_window_the_last_rows_and_of_a_state_its_slot_must_arrive(tmp_path: Path) -> None:
    """Rows before the window are stray where they arrive all the same; replicas say the same of a unit."""
    random = np.random.default_rng(1)
    rows = random.standard_normal((2, 3, DIM)).astype(np.float32)  # units, the last 3 of 5 tokens
    state = random.standard_normal((2, 4, DIM)).astype(np.float32)
    for rank in range(2):
        np.savez(tmp_path / f"own-0-{rank}.npz", **{"0.k.0": rows, "1.ssm.0": state})  # type: ignore[arg-type]
    unit = DIM * 4
    memory = np.full(PAGES * PAGE * 2 * unit + 3 * 4 * 2 * unit, POISON, np.uint8)
    slots = PAGES * PAGE * 2 * unit
    for row in range(2, 5):
        at = TABLES[0][row // PAGE] * PAGE * 2 * unit + row % PAGE * 2 * unit
        memory[at : at + 2 * unit] = np.frombuffer(rows[:, row - 2].tobytes(), np.uint8)
    memory[slots + 4 * 2 * unit :][: 4 * 2 * unit] = np.frombuffer(state.swapaxes(0, 1).tobytes(), np.uint8)
    planes_of = (
        PlaneFile("0.k", (0, 2), 0, 3, "float32", (0, PAGE * 2 * unit, 2 * unit, unit)),
        PlaneFile("1.ssm", (0, 2), 4, None, "float32", (slots, 4 * 2 * unit, 2 * unit, unit)),
    )
    file = PoolFile(planes_of, PAGE, TABLES[:1], ((1,),))
    nbytes = (3 + 4) * 2 * unit
    np.save(tmp_path / "pool-decode-0.npy", memory)
    assert check(tmp_path, "decode", (5,), 2, [file]) == Checked(nbytes, 0, 0)
    memory[[TABLES[0][0] * PAGE * 2 * unit, slots, slots + 4 * 2 * unit]] ^= 1  # row 0, slot 0, slot 1
    np.save(tmp_path / "pool-decode-0.npy", memory)
    assert check(tmp_path, "decode", (5,), 2, [file]) == Checked(nbytes, 1, 2)
