"""The logger that watches a pruner gets every row of its history."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import polarprune as pp
from polarprune.integrations.loggers import watch
from tests.helpers.nets import digits_resnet
from tests.helpers.training import batches, sgd, train

STEPS = 10
NAMES = {"macs", "params", "closed", "between", "eps", "lam"}

pytestmark = pytest.mark.usefixtures("shared_traces")


def pruner() -> pp.Pruner:
    return pp.Pruner(digits_resnet(4), torch.zeros(2, 1, 8, 8), macs=0.5, steps=STEPS)


def watched(logger: Any, **options: Any) -> pp.Pruner:
    """Train to the end while a logger watches."""
    made = pruner()
    watch(made, logger, **options)
    optimizer = sgd(made)
    made.attach(optimizer)
    train(made.model, optimizer, batches(STEPS, channels=1, size=8))
    return made


@pytest.mark.parametrize("kind", ["object", "function"])
def test_a_logger_of_dicts_gets_the_numbers_of_every_new_row(kind: str) -> None:
    rows: list[dict[str, float]] = []
    made = watched(
        SimpleNamespace(log=lambda row: rows.append(row)) if kind == "object" else rows.append
    )
    assert [row["pruning/step"] for row in rows] == list(range(1, STEPS + 1))
    assert set(rows[0]) == {f"pruning/{name}" for name in NAMES | {"step"}}
    assert [row["pruning/macs"] for row in rows] == [row["macs"] for row in made.history[1:]]
    assert rows[-1]["pruning/macs"] <= 0.5


def test_tensorboard_gets_scalars_and_a_histogram_of_the_gates(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        made = watched(writer, prefix="run 3")
    found = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    found.Reload()
    assert set(found.Tags()["scalars"]) == {f"run 3/{name}" for name in NAMES}
    scalars = found.Scalars("run 3/closed")
    assert [(one.step, one.value) for one in scalars] == [
        (row["step"], row["closed"]) for row in made.history[1:]
    ]
    last = found.Histograms("run 3/gates")[-1]
    assert last.step == STEPS
    assert last.histogram_value.num == sum(made.history[-1]["histogram"])
    assert 0 < last.histogram_value.sum < last.histogram_value.num


def test_a_logger_of_lightning_gets_metrics_with_the_step(tmp_path: Path) -> None:
    calls: list[tuple[dict[str, float], int]] = []

    class Metrics:
        experiment = None

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            calls.append((metrics, step))

    watched(Metrics())
    assert [step for _, step in calls] == list(range(1, STEPS + 1))
    assert set(calls[0][0]) == {f"pruning/{name}" for name in NAMES}


def test_rows_that_a_logger_gets_cannot_change_the_history() -> None:
    made = watched(lambda row: row.clear())
    assert all(set(row) == NAMES | {"step", "histogram"} for row in made.history)


@pytest.mark.parametrize(
    "logger", [logging.getLogger("x"), 3, lambda: None], ids=lambda one: type(one).__name__
)
def test_what_does_not_take_a_dict_is_refused_at_once(logger: Any) -> None:
    made = pruner()
    with pytest.raises(pp.PruneError, match=r"has no log\(dict\). Give a SummaryWriter"):
        watch(made, logger)
    assert not made.watchers
