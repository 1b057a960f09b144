"""Data flows one way: a module imports only modules before it. The door has eight names."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polarprune

PACKAGE = Path(polarprune.__file__).parent
# fmt: off
ORDER = [
    "errors", "standins", "watched_sizes", "tape", "recorder", "computed", "labels", "flow",
    "moves", "merges", "contractions", "rules", "size_limits", "interpret", "allowed_calls", "emit",
    "stored_graphs", "capture", "inline", "groups", "schedule", "settings", "forming", "spine",
    "cost", "rewire", "blocks", "norms", "attention", "leftovers", "recipe", "surgery", "untrusted",
    "fresh_inputs", "proof", "trial", "look", "width_decisions", "trace", "gates", "bank", "place",
    "compact", "prox", "stepper", "budget", "controller", "bench", "latency", "controls", "html",
    "report", "pictures", "resume", "pruner", "checkpoint", "demo", "deploy", "console",
    "experiments", "cli",
]
EXPERIMENTS = [
    "recipes", "source", "processes", "task", "data", "voc", "imagenet", "style", "deeplab",
    "networks", "kinds", "training", "run", "concrete", "methods", "commands",
]
# fmt: on
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))
DOOR = {"Gate", "PruneError", "Pruner", "Schedule", "load", "save", "shrink", "trace"}


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements, those inside functions too, but not those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from statements(ast.Module([other], []))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        else:
            yield from statements(node)


def imported(source: str) -> set[str]:
    """Names of the package's modules that a source imports; "" is the package itself."""
    found = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif node.level:
            base = f"polarprune.{node.module}" if node.module else "polarprune"
            full = [base] if node.module else [f"{base}.{alias.name}" for alias in node.names]
        elif node.module == "polarprune":
            full = [f"polarprune.{alias.name}" for alias in node.names]
        else:
            full = [node.module or ""]
        parts = [name.split(".") for name in full]
        found |= {"".join(part[1:2]) for part in parts if part[0] == "polarprune"}
    return found


def test_the_walk_sees_every_way_to_import() -> None:
    source = """
from __future__ import annotations
import torch, polarprune
import polarprune.tape as tape
from . import labels
from .rules import Flow
from polarprune import groups
from polarprune.cost import Cost
if TYPE_CHECKING:
    from .cli import app
def late():
    from .demo import run
"""
    assert imported(source) == {"", "tape", "labels", "rules", "groups", "cost", "demo"}


def test_every_module_has_its_place_in_the_order() -> None:
    assert set(MODULES) <= set(ORDER)
    packages = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert [path.name for path in packages] == ["experiments"]
    assert {path.stem for path in packages[0].glob("[!_]*.py")} == set(EXPERIMENTS)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_modules_before_it(module: str) -> None:
    before = ORDER[: ORDER.index(module)]
    late = imported((PACKAGE / f"{module}.py").read_text()) - set(before)
    assert not late, f"{module} imports {sorted(late)}"


@pytest.mark.parametrize("module", EXPERIMENTS)
def test_experiments_import_the_library_and_what_comes_before_them(module: str) -> None:
    before = ORDER[: ORDER.index("experiments")] + EXPERIMENTS[: EXPERIMENTS.index(module)]
    late = imported((PACKAGE / "experiments" / f"{module}.py").read_text()) - set(before)
    assert not late, f"{module} imports {sorted(late)}"


def test_the_door_has_exactly_eight_names() -> None:
    assert set(polarprune.__all__) == DOOR
    assert len(polarprune.__all__) == 8
    public = {
        name
        for name, value in vars(polarprune).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == DOOR


def test_importing_the_library_imports_no_tool_of_the_command_line() -> None:
    tools = ["matplotlib", "rich", "typer", "sklearn"]
    code = f"import sys, polarprune; print([tool for tool in {tools} if tool in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
