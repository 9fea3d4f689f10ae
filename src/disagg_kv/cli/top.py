"""``disagg-kv top``: rooms, peers and memory of the endpoints of this host, live."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError, DisaggKVError, PeerLostError, text_of
from ..observe.status import default_folder, read_status, sockets
from .options import number
from .output import JsonFlag, emit

Status = dict[str, Any]
"""A document of an endpoint, and ``socket``, where it is."""


def top(
    where: Annotated[
        Path | None, typer.Argument(help="A socket, or a folder of sockets; default: the folder of this user.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    every: Annotated[float, number(0.1, 3600, text="Seconds between two looks.")] = 1.0,
    rooms: Annotated[int, typer.Option(min=0, help="Rooms that are shown of each endpoint.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Show endpoints that have a status socket. With --json, print one document and end."""
    place = default_folder() if where is None else where
    if once or as_json:
        found = look(place)
        emit({"ok": True, "endpoints": found}, *shown(found, rooms, Console().width), as_json=as_json)
        return
    console = Console()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(Group(*shown(look(place), rooms, console.width)), refresh=True)
            time.sleep(every)


def look(place: Path) -> list[Status]:
    """The documents of all endpoints there; one that cannot be read is a document with ``error``.

    Raises:
        ConfigurationError: no such socket or folder, or of another user.
        DisaggKVError: a socket that was named itself cannot be read.
    """
    if not place.is_dir():
        if not place.exists():
            raise ConfigurationError(f"{place}: there is no socket or folder; does an endpoint have a StatusSocket?")
        return [{**read_status(place), "socket": str(place)}]
    found: list[Status] = []
    for path in sockets(place):
        try:
            found.append({**read_status(path), "socket": str(path)})
        except (PeerLostError, ConfigurationError):
            continue  # its process has ended, and has not removed it
        except DisaggKVError as exc:
            found.append({"ok": False, "socket": str(path), "error": text_of(exc)})
    return found


def shown(found: Sequence[Status], rooms: int, width: int) -> Sequence[RenderableType]:
    """Tables for a terminal. All text of other processes is shown as it is, without markup."""
    if not found:
        return [Text("no endpoint has a status socket here")]
    good = [one for one in found if one["ok"]]
    bad = [Text(f"{one['socket']}: {one['error']}") for one in found if not one["ok"]]
    parts: list[RenderableType] = [_endpoints(good)] if good else []
    for one in good:
        name = f"{one['side']} {one['instance']}/{one['rank']}"
        if one["peers"]:
            parts.append(_peers(name, one["peers"], width))
        if one["rooms"] and rooms:
            parts.append(_rooms(name, one["rooms"][:rooms]))
    return [*parts, *bad]


def _endpoints(found: Sequence[Status]) -> Table:
    names = ("endpoint", "state", "pid", "rooms", "ring", "slots", "quarantine", "peers", "links")
    table = _table("", names)
    for one in found:
        memory, phases = one["memory"], one["rooms_by_phase"]
        table.add_row(
            Text(f"{one['side']} {one['instance']}/{one['rank']}"),
            Text(str(one["state"])),
            str(one["pid"]),
            " ".join(f"{number} {name}" for name, number in phases.items() if number) or "0",
            f"{size(memory['ring_used_bytes'])} of {size(memory['ring_bytes'])}" if memory["ring_bytes"] else "-",
            f"{memory['slots_used']} of {memory['slots']}" if memory["slots"] else "-",
            size(memory["quarantined_bytes"]),
            str(len(one["peers"])),
            f"{one['links']['held']} of {one['links']['most']}",
        )
    return table


def _peers(name: str, found: Sequence[Status], width: int) -> Table:
    """A line for each peer: the last columns are left out where they do not fit."""
    names = ("peer", "state", "silent", "keeps", "over", "address", "pid", "epoch", "host")
    rows = []
    for one in found:
        silent = "-" if one["silent_s"] is None else f"{one['silent_s']:.1f} s"
        keeps = size(one["ring_bytes"] + one["page_bytes"] + one["slot_bytes"])
        last = (str(one[part]) for part in ("address", "pid", "epoch", "host"))
        rows.append((f"{one['instance']}/{one['rank']}", one["state"], silent, keeps, one["transport"] or "-", *last))
    widths = [max(map(cell_len, column)) + 1 for column in zip(names, *rows, strict=True)]
    shown = max(3, sum(1 for total in accumulate(widths) if total <= width + 1))
    table = _table(f"peers of {name}", ())
    for at, column in enumerate(names[:shown]):
        table.add_column(column, no_wrap=True, min_width=widths[at] - 1 if at else None)
    for row in rows:
        table.add_row(*map(Text, row[:shown]))
    return table


def _rooms(name: str, found: Sequence[Status]) -> Table:
    table = _table(f"oldest rooms of {name}", ("room", "phase", "age", "path", "bytes", "segments", "error"))
    for one in found:
        age = "-" if one["age_s"] is None else f"{one['age_s']:.1f} s"
        parts = (one["phase"], age, one["path"], size(one["bytes"]), str(one["segments"]))
        table.add_row(Text(str(one["room"])), *parts, Text(str(one["error"])))
    return table


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def size(nbytes: int) -> str:
    """Bytes for people."""
    number = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError(nbytes)
