"""Data flows one way: a package imports only packages before it, a module only modules before it.

`docs/architecture.md` has the same order; a test compares them.
"""

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

ROOT = Path(polarprune.__file__).parent
ORDER = {
    "errors": [],
    "validation": ["numbers", "arguments", "pruner_state"],
    "tracing": ["shape_only", "watched_sizes", "tape", "recorder"],
    "channels": ["labels", "propagation", "rules", "graph", "grouping", "connectivity"],
    "rewriting": [
        "size_limits",
        "interpreter",
        "allowed_calls",
        "captured_forward",
        "stored_graphs",
        "capture",
        "parametrizations",
        "forward_weights",
        "resize",
        "remove_branches",
        "weighted_norms",
    ],
    "surgery": ["attention", "replacement_layers", "recipe", "apply", "other_inputs", "proof"],
    "cost": ["resources", "budget", "timing", "latency", "other_scores"],
    "gates": ["gate", "fused", "install"],
    "analysis": ["trial_cuts", "inspection", "width_decisions", "trace"],
    "report": ["html", "report", "plots"],
    "training": ["proximal", "schedule", "controller", "stepper", "compaction", "pruner"],
    "files": ["untrusted", "model_file", "deployment"],
    "experiments": [
        "source",
        "recipes",
        "processes",
        "task",
        "data",
        "voc",
        "imagenet",
        "style",
        "deeplab",
        "networks",
        "kinds",
        "training",
        "run",
        "concrete",
        "methods",
    ],
    "cli": ["console", "demo", "experiments", "app"],
}
PACKAGES = list(ORDER)
RULES = ["movement", "reductions", "contractions", "table"]
DOOR = {"Gate", "PruneError", "Pruner", "Schedule", "load", "save", "shrink", "trace"}
FILES = sorted(
    path.relative_to(ROOT).with_suffix("")
    for path in ROOT.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


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


def imported(source: str, package: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Modules of polarprune that a source in `package` imports, as parts of their dotted names."""
    found = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            above = ("polarprune", *package)
            base = above[: len(above) - node.level + 1] if node.level else ()
            stem = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*stem, alias.name) for alias in node.names]
        found |= {name[1:] for name in names if name[:1] == ("polarprune",)}
    return found


def module_of(name: tuple[str, ...]) -> tuple[str, ...]:
    """The module that an imported name belongs to."""
    known = {path.parts for path in FILES} | {(package,) for package in PACKAGES}
    while name and name not in known | {("channels", "rules")}:
        name = name[:-1]
    return name


def position(module: tuple[str, ...]) -> tuple[int, int, int]:
    """Where a module stands in the order."""
    package = PACKAGES.index(module[0])
    inner = ORDER[module[0]].index(module[1]) if len(module) > 1 else -1
    return package, inner, RULES.index(module[2]) if len(module) > 2 else -1


def test_the_walk_sees_every_way_to_import() -> None:
    source = """
from __future__ import annotations
import torch, polarprune
import polarprune.tracing.tape as tape
from . import labels
from .rules import Flow
from ..cost.resources import Cost
from polarprune.files import model_file
if TYPE_CHECKING:
    from .cli import app
def late():
    from ..cli.demo import run
"""
    assert imported(source, ("channels",)) == {
        (),
        ("tracing", "tape"),
        ("channels", "labels"),
        ("channels", "rules", "Flow"),
        ("cost", "resources", "Cost"),
        ("files", "model_file"),
        ("cli", "demo", "run"),
    }


def test_every_module_has_its_place_in_the_order() -> None:
    listed = {
        Path(package, module)
        for package, modules in ORDER.items()
        for module in modules
        if module != "rules"
    }
    listed |= {Path("channels", "rules", module) for module in RULES} | {Path("errors")}
    assert listed == set(FILES)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_module_imports_only_what_comes_before_it(path: Path) -> None:
    source = (ROOT / path).with_suffix(".py").read_text()
    found = {module_of(name) for name in imported(source, path.parts[:-1])}
    late = [name for name in found if not name or position(name) >= position(path.parts)]
    assert not late, f"{path} imports {late}"


def test_packages_say_what_comes_in_what_goes_out_and_what_they_may_touch() -> None:
    for package in PACKAGES[1:]:
        text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
        assert len(text.split()) > 25 and "In:" in text and "Out:" in text, package


def test_no_file_has_more_than_400_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > LIMIT
    }
    assert not long


LIMIT = 530


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
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
