"""Every reason for frozen channels comes with something that the user can do."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polarprune import channels
from polarprune.channels.labels import Labels
from polarprune.channels.notes import Note
from polarprune.channels.reasons import Origin, because
from polarprune.tracing.tape import Op

RULES = sorted((Path(channels.__file__).parent / "rules").glob("*.py"))


def reasons_without_remedy(source: str) -> Iterator[str]:
    """Yield the calls of `because` that name no remedy."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call):
            is_reason = isinstance(call.func, ast.Name) and call.func.id == "because"
            if is_reason and "remedy" not in {keyword.arg for keyword in call.keywords}:
                yield ast.unparse(call)


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.name)
def test_rules_give_a_remedy_with_every_reason(file: Path) -> None:
    assert list(reasons_without_remedy(file.read_text(encoding="utf-8"))) == []


def test_the_search_finds_a_reason_without_a_remedy() -> None:
    assert list(reasons_without_remedy("def rule(flow, op):\n    because(op, 'fact')"))


OP = Op(torch.ops.aten.relu.default, (), {}, [], "block.act", "net.py:7")


def test_a_reason_is_a_text_that_knows_its_parts() -> None:
    tensor = Origin("the result of mul in block.scale (net.py:5)", "block.scale")
    reason = because(OP, "freezes", detail="relu of", tensor=tensor, refusal="no", remedy="stop")
    assert reason == (
        "freezes in block.act (net.py:7) (its forward cannot be rewritten: no): relu of the result "
        "of mul in block.scale (net.py:5); stop"
    )
    assert (reason.fact, reason.refusal, reason.remedy) == ("freezes", "no", "stop")
    assert reason.modules == {"block.act", "block.scale"}


def test_a_plain_text_of_the_user_is_a_reason_too() -> None:
    labels = Labels()
    labels.freeze(labels.fresh(2), "I say so")
    _, (reason,) = labels.reasons(labels.roots())
    assert reason == reason.fact == "I say so" and not reason.modules


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_reasons_and_notes_keep_their_parts(copied: Callable[[Any], Any]) -> None:
    reason, note = copied(because(OP, "freezes", remedy="stop")), copied(Note("slow", ["a", "b"]))
    assert (str(reason), reason.fact, reason.remedy) == (
        "freezes in block.act (net.py:7); stop",
        "freezes",
        "stop",
    )
    assert (str(note), note.text, note.subjects) == ("a (and 1 more): slow", "slow", ("a", "b"))
