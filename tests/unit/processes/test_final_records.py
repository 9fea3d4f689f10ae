"""Final records between processes: decode's engine knows that a room is done while its endpoint stands still."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.final_records import ROWS, check_final_record

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("aux", [None, 0, 1, 4096, 4097])
def test_a_room_without_a_known_end_is_ended_by_bells(tmp_path: Path, aux: int | None) -> None:
    """With its aux data; longer ones come by frames."""
    rung = check_final_record(tmp_path, "shm", "cpu", stop=None, aux=aux, states=False)
    assert rung == (aux != 4097)


@pytest.mark.parametrize(("stop", "aux"), [(ROWS, None), (ROWS, 16), (None, 16)])
def test_a_room_with_states_is_ended_by_bells(tmp_path: Path, stop: int | None, aux: int | None) -> None:
    """They are rung as rows are."""
    assert check_final_record(tmp_path, "shm", "cpu", stop=stop, aux=aux, states=True)
