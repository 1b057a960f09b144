"""Every reason for frozen channels comes with something that the user can do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarprune import channels

RULES = sorted((Path(channels.__file__).parent / "rules").glob("*.py"))


def reasons_without_remedy(source: str) -> Iterator[str]:
    """Yield the calls of `because` that name no remedy, unless whole units are meant."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
            for call in calls:
                is_reason = isinstance(call.func, ast.Name) and call.func.id == "because"
                if is_reason and "remedy" not in {keyword.arg for keyword in call.keywords}:
                    yield ast.unparse(function)


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.name)
def test_rules_give_a_remedy_with_every_reason(file: Path) -> None:
    found = list(reasons_without_remedy(file.read_text(encoding="utf-8")))
    assert [text for text in found if "removed as a whole" not in text] == []


def test_the_search_finds_a_reason_without_a_remedy() -> None:
    assert list(reasons_without_remedy("def rule(flow, op):\n    because(op, 'fact')"))
