"""The parts of a run own their fields: no part writes a field of another one."""

from __future__ import annotations

import ast
from pathlib import Path

from polarprune.training import pruner

FILES = sorted(Path(pruner.__file__).parent.glob("*.py"))
CUTS_MODULES = "rebuild.py"  # it writes into tensors and modules of the user


def foreign_writes(source: str) -> list[str]:
    """Return the fields that are assigned on anything but `self` and its own progress."""
    stored = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    owners = {ast.unparse(node): ast.unparse(node.value) for node in stored if is_stored(node)}
    return [name for name, owner in owners.items() if owner not in ("self", "self.progress")]


def is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


def test_no_part_of_a_run_writes_a_field_of_another() -> None:
    assert {"run.py", "steps.py", "steering.py", CUTS_MODULES} <= {path.name for path in FILES}
    found = {path.name: foreign_writes(path.read_text(encoding="utf-8")) for path in FILES}
    assert found.pop(CUTS_MODULES)
    assert {name: writes for name, writes in found.items() if writes} == {}


def test_the_check_sees_a_field_that_is_written_from_outside() -> None:
    code = "self.a = 1\nself.part.a, other.b = 1, 2\nself.part.count += 1\nself.progress.step = 0"
    assert set(foreign_writes(code)) == {"self.part.a", "other.b", "self.part.count"}
