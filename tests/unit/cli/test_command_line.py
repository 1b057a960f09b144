"""The command line loads only what a command needs, and says what to install if it is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_group
from typer.testing import CliRunner

import polarprune as pp
from polarprune.channels.notes import Note, folded
from polarprune.cli.app import app
from polarprune.cli.demo import DigitsNet
from polarprune.cli.experiments import app as experiments
from polarprune.cli.lazy import LAZY_COMMANDS
from polarprune.report.groups import graph_facts

SOURCE = Path(pp.__file__).parent.parent
DIGITS = "polarprune.cli.demo:DigitsNet"
# Runs commands one after the other and prints, for each, its exit code and whether the
# experiments are loaded by then. The output of the commands goes to the standard error.
LOADED = """
import contextlib, json, sys
from polarprune.cli.entry import main
told = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["polarprune", *command]
    code = None
    with contextlib.redirect_stdout(sys.stderr):
        try:
            main()
        except SystemExit as end:
            code = end.code
    experiments = ("polarprune.experiments", "polarprune.cli.experiments")
    told[" ".join(command)] = code, any(name.startswith(experiments) for name in sys.modules)
print(json.dumps(told))
"""
MISSING = """
import sys
sys.modules[sys.argv.pop(1)] = None
from polarprune.cli.entry import main
main()
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pruned network and the report of its run."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("command_line")
    pruner = pp.Pruner(DigitsNet(), torch.randn(2, 1, 8, 8), macs=0.5, steps=2)
    for _ in range(2):
        pruner.step()
    pp.save(pruner.export(), path / "small.safetensors")
    (path / "report.json").write_text(pruner.report().to_json())
    return path


LIBRARY_COMMANDS = (
    "--help",
    "inspect --help",
    f"inspect {DIGITS} --shape 2,1,8,8",
    "report {}/report.json",
    "report {}/report.json --html {}/report.html",
    f"bench {DIGITS} --shape 2,1,8,8 --runs 1 --small {{}}/small.safetensors",
    f"export {{}}/small.safetensors --model {DIGITS} --shape 1,1,8,8 --to {{}}/small.pt2",
    "demo --help",
)


def test_commands_of_the_library_do_not_load_the_experiments_and_others_do(folder: Path) -> None:
    commands = [text.replace("{}", str(folder)) for text in LIBRARY_COMMANDS]
    last = "train --help"
    done = python(LOADED, json.dumps([text.split() for text in (*commands, last)]))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {**{one: [0, False] for one in commands}, last: [0, True]}, done.stderr
    assert "--hold-out" in done.stderr


def test_ray_is_loaded_by_no_command_that_does_not_run_on_it() -> None:
    done = python("import sys, polarprune.cli.sweep; print('ray' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_the_list_of_commands_says_what_the_commands_say_of_themselves() -> None:
    commands = get_group(experiments).commands
    assert {name: command.help for name, command in commands.items()} == LAZY_COMMANDS
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.replace("│", " ").split())
    assert not [text for text in LAZY_COMMANDS.values() if text not in shown]


def test_an_unknown_command_is_refused_with_a_suggestion() -> None:
    done = CliRunner().invoke(app, ["trian"])
    assert done.exit_code == 2 and "'train'" in done.output


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named_with_the_extra(package: str) -> None:
    done = python(MISSING, package, "--help")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        f"polarprune: the command line needs {package}. Install it with: "
        "pip install 'polarprune[cli]'"
    ]


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0 and done.output == f"polarprune {version('polarprune')}\n"


def as_json(command: str, folder: Path) -> Any:
    """Return what a command prints, which must be JSON and nothing else."""
    done = CliRunner().invoke(app, [*command.replace("{}", str(folder)).split(), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_inspect_prints_the_groups_as_json(folder: Path) -> None:
    found = as_json(f"inspect {DIGITS} --shape 2,1,8,8", folder)
    graph = pp.trace(DigitsNet(), torch.randn(2, 1, 8, 8))
    assert [group["name"] for group in found["groups"]] == list(graph.groups)
    assert found["cost"] == graph.cost.original() and found["unknown_operations"] == {}
    stem, head = found["groups"][0], found["groups"][-1]
    assert stem["price"]["macs"] == graph.cost.prices()["stem.0"][0] and not stem["frozen"]
    assert head["frozen"] and head["price"] == {} and "model's output" in head["state"]


def test_bench_prints_the_spread_of_the_times(folder: Path) -> None:
    command = f"bench {DIGITS} --shape 2,1,8,8 --runs 8 --small {{}}/small.safetensors"
    found = as_json(command, folder)
    times = found["models"]["small.safetensors"]
    low, high = times["quartiles"]
    assert 0 < low <= times["milliseconds"] <= high and found["runs"] == 8
    shown = CliRunner().invoke(app, command.replace("{}", str(folder)).split()).output
    assert len(re.findall(r"\d\.\d\d ± \d\.\d\d", shown)) == 2 and "quartiles" in shown


def test_report_prints_the_file_as_json(folder: Path) -> None:
    assert as_json("report {}/report.json", folder) == json.loads(
        (folder / "report.json").read_text()
    )


def test_a_note_about_several_modules_is_printed_once() -> None:
    notes = [
        Note("needs one", ["a.qkv"]),
        Note("it is slow"),
        Note("needs one", ["b.qkv"]),
        Note("other", ["b.qkv"]),
        Note("needs one", ["c.qkv"]),
    ]
    assert folded(notes) == ["a.qkv (and 2 more): needs one", "it is slow", "b.qkv: other"]
    graph = replace(pp.trace(DigitsNet(), torch.randn(2, 1, 8, 8)), notes=tuple(notes))
    assert str(graph).count("needs one") == 1 and "note: a.qkv (and 2 more): needs one" in str(
        graph
    )
    plan = {name: list(range(group.size)) for name, group in graph.prunable.items()}
    assert graph_facts(graph, plan)["notes"][:3] == folded(notes)


def test_another_missing_module_is_not_hidden() -> None:
    done = python(MISSING, "polarprune.cli.console", "--help")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr
