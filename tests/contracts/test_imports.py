"""A package imports only packages before it, and a module only modules before it.

`docs/architecture.md` has the same order; a test compares them.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polarprune

ROOT = Path(polarprune.__file__).parent
ORDER: dict[str, list[str]] = {
    "errors": [],
    "plain_data": [],
    "torch_internals": [
        "class_swaps",
        "fused_encoders",
        "markers",
        "parallel",
        "patches",
        "process_settings",
        "refused_methods",
    ],
    "validation": [
        "models",
        "numbers",
        "arguments",
        "compaction",
        "gates",
        "optimizers",
        "optional_packages",
        "plans",
        "pruner_state",
        "run",
        "schedule",
    ],
    "tracing": [
        "copying",
        "mac_count",
        "schemas",
        "model_state",
        "generation",
        "shape_only",
        "source_lines",
        "watched_sizes",
        "tape",
        "op_recorder",
        "python_reads",
        "recorder",
    ],
    "channels": [
        "notes",
        "group_table",
        "reasons",
        "labels",
        "propagation",
        "layout",
        "graph",
        "connectivity",
        "label_decisions",
        "layout_builder",
        "grouping",
        "rules",
    ],
    "rules": [],
    "rewriting": [
        "call_form",
        "captured_forward",
        "call_matching",
        "node_shapes",
        "parametrizations",
        "side_effects",
        "node_functions",
        "size_limits",
        "node_names",
        "interpreter",
        "allowed_calls",
        "stored_graphs",
        "installed_forward",
        "value_proxies",
        "capture",
        "symbolic_graphs",
        "remove_branches",
        "weight_graphs",
        "forward_weights",
        "weighted_statistics",
        "weighted_norms",
        "width_arithmetic",
        "resize_calls",
        "resize",
    ],
    "surgery": [
        "other_inputs",
        "repeatable_runs",
        "precision",
        "proof",
        "cut_proof",
        "recipe",
        "module_sizes",
        "replacement_layers",
        "write_recipe",
        "config_models",
        "config_entries",
        "config_sizes",
        "config_proof",
        "config_trials",
        "apply",
    ],
    "cost": [
        "families",
        "latency",
        "resources",
        "timing",
        "width_search",
        "budget",
        "other_scores",
        "stopwatch",
    ],
    "gates": ["folding", "gate", "weight_factors", "gated_inputs", "fused", "install", "sharding"],
    "analysis": [
        "findings",
        "inspection",
        "tape_comparison",
        "trial_cuts",
        "repairs",
        "width_decisions",
        "confirm",
        "attribute_reads",
        "other_forwards",
        "repeated_blocks",
        "unread_attributes",
        "trace",
    ],
    "report": ["facts", "loading", "groups", "plots", "svg", "page", "text", "report"],
    "training": [
        "parameter_groups",
        "proximal",
        "state_bytes",
        "carried_state",
        "step_check",
        "rebuild",
        "copies",
        "processes",
        "schedule",
        "settings",
        "controller",
        "stepper",
        "course_check",
        "steering",
        "compaction",
        "attachment",
        "run",
        "steps",
        "export",
        "resuming",
        "pruner",
    ],
    "files": ["deployment", "untrusted", "old_versions", "writing", "model_file"],
    "integrations": [
        "factories",
        "gate_group",
        "refusals",
        "loggers",
        "accelerate",
        "lightning",
        "folder_settings",
        "pretrained_folder",
        "transformers",
        "ultralytics",
    ],
    "experiments": ["networks", "processes", "settings", "data", "methods", "presets", "runs"],
    "cli": [
        "arguments",
        "console",
        "demo",
        "entry",
        "run_options",
        "side_by_side",
        "referee",
        "sweep",
        "experiments",
        "lazy",
        "model_commands",
        "report_commands",
        "app",
    ],
}
INNER: dict[str, list[str]] = {
    "channels/rules": [
        "elementwise",
        "indexing",
        "movement",
        "products",
        "contractions",
        "reductions",
        "table",
    ],
    "experiments/data": [
        "distillation",
        "photos",
        "task",
        "images",
        "cifar10",
        "imagenet",
        "own",
        "style",
        "text",
        "tiny_imagenet",
        "voc",
        "table",
    ],
    "experiments/methods": [
        "base",
        "from_scratch",
        "expected_cost",
        "kernel_gates",
        "l0",
        "lasso",
        "magnitude",
        "model_cost",
        "slimming",
        "torch_pruning",
        "table",
    ],
    "experiments/networks": [
        "imagenet",
        "deeplab",
        "small_images",
        "style",
        "transformers",
        "table",
    ],
    "experiments/runs": [
        "calibration",
        "cuda_graph",
        "files",
        "card",
        "pruned_file",
        "source",
        "training_cost",
        "optimizers",
        "trainer",
        "best_weights",
        "rehearsal",
        "report_files",
        "weights",
        "start",
        "run",
        "prune",
        "trials",
        "ray_trials",
        "sweep_results",
        "intervals",
        "referee",
        "referee_results",
    ],
    "files/untrusted": [
        "checksum",
        "require",
        "json_text",
        "metadata",
        "recipe",
        "stored_code",
        "tensors",
    ],
}
PACKAGES = list(ORDER)
DOOR = {"Gate", "PruneError", "Pruner", "Schedule", "load", "save", "shrink", "trace"}
FILES = sorted(
    path.relative_to(ROOT).with_suffix("")
    for path in ROOT.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield import statements, also inside functions, but not those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from statements(ast.Module([other], []))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        else:
            yield from statements(node)


def imported(source: str, package: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Return the modules of polarprune that a source in `package` imports, as parts of names."""
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
    """Return the module or package that an imported name belongs to."""
    known = {path.parts for path in FILES} | {(package,) for package in PACKAGES}
    known |= {tuple(inner.split("/")) for inner in INNER}
    while name and name not in known:
        name = name[:-1]
    return name


def position(module: tuple[str, ...]) -> list[int]:
    """Return where a module stands: among the packages, in its package, and in that part of it."""
    found = [PACKAGES.index(module[0])]
    if len(module) > 1:
        found.append(ORDER[module[0]].index(module[1]))
    if len(module) > 2:
        found.append(INNER[f"{module[0]}/{module[1]}"].index(module[2]))
    return found


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
    listed = {Path(package) for package in PACKAGES if not (ROOT / package).is_dir()}
    for package, modules in ORDER.items():
        for module in modules:
            inner = INNER.get(f"{package}/{module}")
            listed |= {Path(package, module, one) for one in inner or []}
            listed |= set() if inner else {Path(package, module)}
    assert listed == set(FILES)


def test_the_documented_order_of_packages_is_the_one_that_is_checked() -> None:
    text = (ROOT.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Packages")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == PACKAGES
    _, _, listed = (polarprune.__doc__ or "").partition("in this list:")
    assert re.findall(r"\w+", listed) == PACKAGES


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_module_imports_only_what_comes_before_it(path: Path) -> None:
    source = (ROOT / path).with_suffix(".py").read_text()
    found = {module_of(name) for name in imported(source, path.parts[:-1])}
    late = [name for name in found if not name or position(name) >= position(path.parts)]
    assert not late, f"{path} imports {late}"


def test_packages_say_what_comes_in_what_goes_out_and_what_they_may_touch() -> None:
    inner = [folder for folder in INNER if folder.startswith("experiments/")]
    for package in [one for one in PACKAGES if (ROOT / one).is_dir()] + inner:
        text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
        assert len(text.split()) > 25 and "In:" in text and "Out:" in text, package


def test_no_file_has_more_than_400_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_the_door_has_exactly_eight_names() -> None:
    assert set(polarprune.__all__) == DOOR
    assert len(polarprune.__all__) == 8
    public = {
        name
        for name, value in vars(polarprune).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == DOOR


def test_importing_the_library_imports_no_extra() -> None:
    tools = ["jinja2", "matplotlib", "rich", "typer", "sklearn", "lightning", "transformers"]
    tools += ["accelerate", "tensorboard", "polarprune.integrations"]
    code = f"import sys, polarprune; print([tool for tool in {tools} if tool in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
