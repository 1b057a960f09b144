"""Cards name the commit of the sources that ran."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from polarprune.experiments.runs import source
from polarprune.experiments.runs.source import VARIABLE, commit


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "src" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("one = 1\n")
    return folder


@pytest.fixture
def tracked(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    root = package.parent.parent
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return package


def test_a_clean_tree_has_its_commit(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = git(tracked, "rev-parse", "HEAD")
    assert re.fullmatch("[0-9a-f]{40}", head)
    monkeypatch.setenv(VARIABLE, "something else")  # for machines without git
    assert commit(tracked) == head
    monkeypatch.setenv("GIT_DIR", str(tracked / "nowhere"))  # as in a hook of another repository
    assert commit(tracked) == head


@pytest.mark.parametrize("name", ["__init__.py", "new.py"])
def test_changed_and_added_sources_are_said_to_be(tracked: Path, name: str) -> None:
    head = git(tracked, "rev-parse", "HEAD")
    (tracked.parent.parent / "results.json").write_text("{}")  # beside the sources
    assert commit(tracked) == head
    (tracked / name).write_text("two = 2\n")
    assert commit(tracked) == f"{head}+changes"


def test_the_commit_of_another_repository_is_not_ours(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tracked.parent.parent / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    monkeypatch.setenv(VARIABLE, "abc")
    assert commit(installed) == "abc"


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize("has_git", [True, False])
def test_without_a_repository_the_variable_or_the_version(
    package: Path, has_git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_git:
        monkeypatch.setenv("PATH", str(package))
    monkeypatch.setenv(VARIABLE, "abc+changes")
    assert commit(package) == "abc+changes"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(source, "version", lambda name: {"polarprune": "1.2.3"}[name])
    assert commit(package) == "version 1.2.3"
    monkeypatch.setattr(source, "version", missing)
    assert commit(package) == "unknown"
