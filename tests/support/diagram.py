"""State diagrams of the machines, drawn from their tables as Mermaid text."""

from __future__ import annotations

from enum import Enum

from disagg_kv.core.cells import Table


def diagram(table: Table, start: Enum) -> str:
    """A Mermaid ``stateDiagram-v2``: one arrow per pair of states, named after the events that may lead there.

    Events after which a machine stays where it is are left out.
    """
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, event), cell in table.items():
        for to in cell.leads_to - {state}:
            arrows.setdefault((state, to), []).append(event.__name__)
    order = {state: i for i, state in enumerate(type(start))}
    lines = ["stateDiagram-v2", f"    [*] --> {start.value}"]
    for (state, to), events in sorted(arrows.items(), key=lambda arrow: [order[s] for s in arrow[0]]):
        lines.append(f"    {state.value} --> {to.value}: {', '.join(sorted(events))}")
    return "\n".join(lines)
