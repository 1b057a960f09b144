"""The table that `print(graph)` shows: groups, prices, and why a group is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .notes import folded

if TYPE_CHECKING:
    from .graph import Graph, Group

_HEAD = ("group", "channels", "MACs", "params", "also made by", "read by", "state")
_NUMBERS = (1, 2, 3)  # columns that are aligned to the right


def table(graph: Graph) -> str:
    """Return the table of a graph. A price is the share that removing one channel saves."""
    prices = graph.resources.prices() if graph.resources else {}
    rows = [_HEAD, *(_row(group, prices.get(group.name)) for group in graph.groups.values())]
    return "\n".join([*_aligned(rows), "", _summary(graph), *_remarks(graph)])


def state_of(group: Group) -> str:
    """Return "prunable", "prunable, at least 2 stay" or "frozen: <reason>"."""
    if group.frozen:
        return f"frozen: {group.reason}"
    if group.minimum:
        return f"prunable, at least {group.minimum} {'stays' if group.minimum == 1 else 'stay'}"
    return "prunable"


def _row(group: Group, price: tuple[float, float] | None) -> tuple[str, ...]:
    """Return the cells of a group. A frozen group has no price."""
    macs, params = (f"{share:.3%}" for share in price) if price else ("", "")
    others = [maker for maker in group.producers if maker != group.name]
    makers, readers = _first_of(others), _first_of(group.consumers)
    return group.name, str(group.size), macs, params, makers, readers, state_of(group)


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are."""
    return ", ".join(names[:1]) + (f" +{len(names) - 1}" if len(names) > 1 else "")


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines, with a rule below the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    # The last column holds long reasons, so the rule ends before it.
    return [lines[0], "  ".join("-" * width for width in widths[:-1]), *lines[1:]]


def _summary(graph: Graph) -> str:
    """Return how many channels are prunable and frozen, and what the whole network costs."""
    frozen = sum(group.size for group in graph.groups.values() if group.frozen)
    total = graph.resources.original() if graph.resources else {}
    costs = ", ".join(f"{key}: {value:,.0f}" for key, value in total.items())
    return f"{graph.units} channels prunable, {frozen} frozen; {costs}"


def _remarks(graph: Graph) -> list[str]:
    """Return the lines below the table: unknown operations, families, notes, norms."""
    lines = [
        f"unknown operation: {name} in {where}; teach it with rules={{torch.ops.…: rule}}"
        for name, where in graph.unknown.items()
    ]
    lines += [
        f"uniform: {family}: {len(names)} groups of {graph.groups[names[0]].size} keep equally many"
        for family, names in graph.families.items()
    ]
    lines += [f"note: {note}" for note in folded(graph.notes)]
    if graph.with_norms:
        lines.append(
            f"note: norms=True may make {graph.with_norms} more channels prunable, "
            f"which are frozen because norms or means mix them"
        )
    return lines
