"""The tests mirror the packages, share code through `tests.helpers` only, and hide no package."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BENCHMARKS = TESTS.parent / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.rglob("*.py"))
PACKAGES = TESTS.parent / "src" / "polarprune"
SOURCES = sorted(TESTS.rglob("*.py"))
# Some tools are not installed everywhere; a file with one of these names hides them all the same.
WELL_KNOWN = {"build", "coverage", *sys.stdlib_module_names, *packages_distributions()}
PATCHES = re.compile(r"sys\.path\b|syspath_prepen[d]|site\.addsitedi[r]")


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the full name of everything that is imported anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def from_tests(source: str) -> list[str]:
    """Return the imports that reach into a test file or a conftest."""
    names = imported(ast.parse(source))
    return [
        name
        for name in names
        if any(part.startswith("test_") or part == "conftest" for part in name.split("."))
    ]


def shown(path: Path) -> str:
    return path.relative_to(TESTS.parent).as_posix()


def test_no_test_imports_from_another_test() -> None:
    found = {shown(path): from_tests(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import test_budget",
        "from test_budget import plan",
        "from .test_budget import plan",
        "from tests.unit.cost import test_budget",
        "from tests.unit.cost.test_budget import plan",
        "def late():\n    from conftest import batches",
    ],
)
def test_the_check_sees_an_import_from_a_test(line: str) -> None:
    assert len(from_tests(line)) == 1
    assert from_tests("from tests.helpers.nets import NETS") == []


def test_no_test_patches_the_search_path() -> None:
    """Pytest's `pythonpath` sets it, and `tests.helpers.processes` passes it to new processes."""
    assert PATCHES.search("sys" + ".path.insert(0, 'benchmarks')")
    assert [
        shown(path) for path in SOURCES if PATCHES.search(path.read_text(encoding="utf-8"))
    ] == []


def test_no_file_has_the_name_of_a_well_known_package() -> None:
    assert {"torch", "pytest", "coverage", "code", "json"} <= WELL_KNOWN
    names = WELL_KNOWN - {"__main__"}
    assert [shown(path) for path in [*SOURCES, *SCRIPTS] if path.stem in names] == []


def test_what_measures_does_not_depend_on_the_pages_that_show_it() -> None:
    measure = [path for path in SCRIPTS if path.parent.name == "measure"]
    assert len(measure) > 20
    found = {
        shown(path): [
            name
            for name in imported(ast.parse(path.read_text(encoding="utf-8")))
            if name.startswith(("benchmarks.pages", "..pages"))
        ]
        for path in measure
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_every_package_has_a_folder_of_tests() -> None:
    packages = {path.parent.name for path in PACKAGES.glob("*/__init__.py")}
    assert {"channels", "training"} <= packages
    assert {path.parent.name for path in TESTS.glob("unit/*/test_*.py")} == packages


def test_tests_are_in_the_folders_that_are_meant_for_them() -> None:
    rooms = {"unit", "models", "contracts", "experiments"}
    tests = [path.relative_to(TESTS) for path in SOURCES if path.name.startswith("test_")]
    assert [path.as_posix() for path in tests if path.parts[0] not in rooms] == []
    folders = {path.parent for path in SOURCES}
    assert [shown(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_readme_of_the_rewriting_names_all_its_modules() -> None:
    folder = PACKAGES / "rewriting"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    table = [line for line in (folder / "README.md").read_text().splitlines() if line[:1] == "|"]
    assert names - set(re.findall(r"`([a-z_]+)`", "\n".join(table))) == set()
