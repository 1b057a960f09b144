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
    "validation": ["numbers", "arguments", "optimizers", "run", "pruner_state"],
    "tracing": ["shape_only", "watched_sizes", "tape", "recorder"],
    "channels": ["labels", "propagation", "rules", "graph", "grouping", "connectivity"],
    "rewriting": [
        "size_limits",
        "interpreter",
        "allowed_calls",
        "captured_forward",
        "call_matching",
        "installed_forward",
        "side_effects",
        "stored_graphs",
        "value_proxies",
        "capture",
        "parametrizations",
        "weight_graphs",
        "forward_weights",
        "node_shapes",
        "width_arithmetic",
        "resize_calls",
        "resize",
        "symbolic_graphs",
        "remove_branches",
        "weighted_statistics",
        "weighted_norms",
    ],
    "surgery": [
        "replacement_layers",
        "recipe",
        "module_sizes",
        "write_recipe",
        "apply",
        "other_inputs",
        "proof",
    ],
    "cost": [
        "resources",
        "width_search",
        "budget",
        "timing",
        "latency",
        "stopwatch",
        "other_scores",
    ],
    "gates": ["folding", "gate", "fused", "install"],
    "analysis": ["trial_cuts", "inspection", "width_decisions", "trace"],
    "report": ["html", "report", "plots"],
    "training": [
        "proximal",
        "schedule",
        "controller",
        "stepper",
        "steering",
        "rebuild",
        "compaction",
        "export",
        "run",
        "pruner",
    ],
    "files": ["untrusted", "model_file", "deployment"],
    "experiments": ["settings", "presets", "processes", "data", "networks", "methods", "runs"],
    "cli": ["console", "demo", "experiments", "app"],
}
PACKAGES = list(ORDER)
RULES = ["movement", "reductions", "contractions", "table"]
INNER = {  # packages inside of packages
    "channels/rules": RULES,
    "experiments/data": [
        "task",
        "distillation",
        "photos",
        "cifar10",
        "imagenet",
        "voc",
        "style",
        "table",
    ],
    "experiments/networks": ["small_images", "imagenet", "style", "deeplab", "table"],
    "experiments/methods": [
        "base",
        "model_cost",
        "magnitude",
        "slimming",
        "lasso",
        "expected_cost",
        "l0",
        "kernel_gates",
        "torch_pruning",
        "table",
    ],
    "experiments/runs": [
        "source",
        "files",
        "weights",
        "pruned_file",
        "card",
        "cuda_graph",
        "trainer",
        "calibration",
        "rehearsal",
        "run",
        "prune",
    ],
}
LISTS = {"": PACKAGES, **ORDER, **INNER}  # folder -> its modules and packages, in order
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
    """The module or package that an imported name belongs to."""
    known = {path.parts for path in FILES} | {tuple(folder.split("/")) for folder in LISTS}
    while name and name not in known:
        name = name[:-1]
    return name


def position(module: tuple[str, ...]) -> tuple[int, ...]:
    """The index of each part of a dotted name in the list of its folder.

    A package comes directly before its modules: its tuple is a prefix of theirs.
    """
    return tuple(LISTS["/".join(module[:depth])].index(part) for depth, part in enumerate(module))


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
    listed = {Path(folder, name) for folder, names in LISTS.items() for name in names}
    assert listed - {Path(folder) for folder in LISTS} | {Path("errors")} == set(FILES)
    assert all(path in listed for path in map(Path, INNER))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_module_imports_only_what_comes_before_it(path: Path) -> None:
    source = (ROOT / path).with_suffix(".py").read_text()
    found = {module_of(name) for name in imported(source, path.parts[:-1])}
    late = [name for name in found if not name or position(name) >= position(path.parts)]
    assert not late, f"{path} imports {late}"


def test_packages_say_what_comes_in_what_goes_out_and_what_they_may_touch() -> None:
    inner = [folder for folder in INNER if folder.startswith("experiments/")]
    for package in PACKAGES[1:] + inner:
        text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
        assert len(text.split()) > 25 and "In:" in text and "Out:" in text, package


def test_no_file_has_more_than_400_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > LIMIT
    }
    assert not long


LIMIT = 520


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
    tools = ["jinja2", "matplotlib", "rich", "typer", "sklearn"]
    code = f"import sys, polarprune; print([tool for tool in {tools} if tool in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
