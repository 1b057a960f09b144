"""A report as plain text for a terminal, and as Markdown for a pull request or a README."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .facts import (
    Fact,
    Rows,
    cost_table,
    goal,
    group_table,
    measured_facts,
    odd_widths,
    origin,
    prediction_checks,
    sentence,
    stage_table,
    title,
)
from .loading import loading_lines

if TYPE_CHECKING:
    from .report import Report


def plain_text(report: Report) -> str:
    """Return the report as aligned columns of plain text."""
    parts = [
        [title(report), goal(report)],
        _aligned(cost_table(report)),
        _aligned(group_table(report), left=(0, 4)),
        _aligned(stage_table(report)),
        [_line(fact) for fact in measured_facts(report)],
        [*prediction_checks(report), *origin(report)],
        [f"note: {note}" for note in _notes(report)],
        loading_lines(report),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _notes(report: Report) -> list[str]:
    return [*odd_widths(report), *report.notes]


def _line(fact: Fact) -> str:
    return f"{fact.name}: {fact.value}" + (f" ({fact.detail})" if fact.detail else "")


def markdown(report: Report) -> str:
    """Return the report as Markdown with tables."""
    remarks = [_escaped(line) for line in [*prediction_checks(report), *origin(report)]]
    parts = [
        [f"# {_escaped(title(report))}", "", _escaped(sentence(goal(report)))],
        _pipe_table("Cost", cost_table(report)),
        _pipe_table("Before and after removal", stage_table(report)),
        _bullet_list("Measured", [*map(_bold_name, measured_facts(report)), *remarks]),
        _pipe_table("Groups", group_table(report), left=(0, 4)),
        _bullet_list("Notes", [_escaped(note) for note in _notes(report)]),
        _code_block("Load the small model", loading_lines(report)),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _bold_name(fact: Fact) -> str:
    detail = f" ({_escaped(fact.detail)})" if fact.detail else ""
    return f"**{fact.name}**: {_escaped(fact.value)}{detail}"


def _aligned(rows: Rows, left: Sequence[int] = (0,)) -> list[str]:
    """Align columns: those in `left` to the left, the others (numbers) to the right."""
    rows = [tuple(_one_line(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Return Markdown that shows exactly this text, also inside a table."""
    return re.sub(r"([\\`*_{}\[\]<#|~&])", r"\\\1", _one_line(text))


def _pipe_table(title: str, rows: Rows, left: Sequence[int] = (0,)) -> list[str]:
    if not rows:
        return []
    lines = ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]
    rule = "|".join(":---" if i in left else "---:" for i in range(len(rows[0])))
    return [f"## {title}", "", lines[0], f"|{rule}|", *lines[1:]]


def _bullet_list(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {line}" for line in lines)] if lines else []


def _code_block(title: str, lines: list[str]) -> list[str]:
    """Return lines of Python between fences that are longer than any run of backticks in them."""
    if not lines:
        return []
    code = "\n".join(lines)
    fence = "`" * (2 + max(1, *map(len, re.findall("`+", code)), 0))
    return [f"## {title}", "", f"{fence}python", code, fence]
