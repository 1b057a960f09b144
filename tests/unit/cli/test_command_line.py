"""The command line loads only what a command needs, and says what to install if it is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_group
from typer.testing import CliRunner

import polarprune as pp
from polarprune.cli.app import app
from polarprune.cli.demo import DigitsNet
from polarprune.cli.experiments import app as experiments
from polarprune.cli.lazy import LAZY_COMMANDS

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
    """A pruned network and the report of its run."""
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


def test_another_missing_module_is_not_hidden() -> None:
    done = python(MISSING, "polarprune.cli.console", "--help")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr
