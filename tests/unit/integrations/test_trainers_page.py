"""The code of docs/trainers.md and the examples run as they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import polarprune as pp
from tests.helpers.adapters import BATCH, EXAMPLE, Classifier, Digits, WithLoss, loader
from tests.helpers.nets import digits_resnet

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("*_digits.py"))

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # advice about workers and loggers
    pytest.mark.usefixtures("quick_collections"),
]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_of_the_page_runs(block: str) -> None:
    net = digits_resnet(4)
    scope: dict[str, Any] = {
        "example": EXAMPLE,
        "epochs": 3,
        "loader": loader(),
        "model": net,
        "module": Classifier(net),
        "rows": [],
    }
    if "PruningTrainer" in block:
        scope["model"], scope["data"] = WithLoss(net), Digits(as_dicts=True)
        scope["args"] = transformers.TrainingArguments(
            "checkpoints", per_device_train_batch_size=BATCH, report_to="none", use_cpu=True
        )
    exec(block, scope)
    pruner = scope["pruner"]
    if "watch" in scope:
        assert pruner.watchers
    else:
        assert Path("small.safetensors").exists() and pruner.step_count == pruner.steps
        assert pruner.cost()["macs"] <= 0.5 * pruner.graph.cost.original()["macs"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_writes_a_file_that_fits_its_model(path: Path) -> None:
    scope = runpy.run_path(str(path))
    scope["main"](epochs=2)
    small = pp.load("small.safetensors", model=scope["make_model"]())
    whole = scope["make_model"]()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in whole.parameters())


def test_examples_have_at_most_60_lines() -> None:
    assert len(EXAMPLES) >= 3
    assert {p.name for p in EXAMPLES if len(p.read_text().splitlines()) > 60} == set()


def test_the_page_lists_every_key_of_the_history() -> None:
    pruner = pp.Pruner(digits_resnet(4), torch.zeros(2, 1, 8, 8), macs=0.5, steps=5)
    section = TEXT.partition("## Watching")[2].partition("```")[0]
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", section, re.M))))
    assert listed == set(pruner.history[0])
