"""Which rows of a request cross."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from ..errors import ConfigurationError
from ..ids import GroupId


@frozen
class Full:
    """Every row crosses; what decode holds already is refused."""

    name: str = field(default="full", init=False)

    def start(self, held: Mapping[GroupId, int], page_rows: int) -> int:
        """Decode: the first row that crosses."""
        rows = {group: rows for group, rows in held.items() if rows}
        if rows:
            raise ConfigurationError(
                f"a held prefix {rows} needs the selection 'incremental', the endpoint has {self.name!r}"
            )
        return 0

    def accepts(self, start: int) -> bool:
        """Prefill: whether decode may leave out the rows before ``start``."""
        return start == 0


@frozen
class Incremental:
    """Only the rows after those that decode holds in every group, in whole pages."""

    name: str = field(default="incremental", init=False)

    def start(self, held: Mapping[GroupId, int], page_rows: int) -> int:
        """Decode: the first row that crosses."""
        return min(held.values(), default=0) // page_rows * page_rows

    def accepts(self, start: int) -> bool:
        """Prefill: whether decode may leave out the rows before ``start``."""
        return True
