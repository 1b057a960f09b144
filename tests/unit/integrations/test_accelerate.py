"""accelerate: real steps are counted, in any order of `prepare` and `attach`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

import polarprune as pp
from polarprune.integrations.accelerate import attach, optimizer_steps
from tests.helpers.adapters import BATCHES, EPOCHS, EXAMPLE, STEPS, Digits, loader
from tests.helpers.nets import digits_resnet
from tests.helpers.processes import run_module
from tests.helpers.training import same_state, share, snapshot

pytestmark = [
    pytest.mark.usefixtures("shared_traces"),
    pytest.mark.filterwarnings("ignore"),  # advice about devices
]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def parts(steps: int = STEPS) -> Any:
    torch.manual_seed(1)
    model = digits_resnet(8)
    pruner = pp.Pruner(model, EXAMPLE, macs=0.5, steps=steps)
    return model, pruner, torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)


def learn(accelerator: Any, model: Any, optimizer: Any, data: Any) -> None:
    for _ in range(EPOCHS):
        for images, labels in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()


def test_the_order_of_prepare_and_attach_does_not_matter() -> None:
    found = []
    for first in (True, False):
        accelerator = accelerate.Accelerator(cpu=True)
        model, pruner, optimizer = parts()
        if first:
            attach(pruner, accelerator, optimizer, loader=loader(), epochs=EPOCHS)
        prepared = accelerator.prepare(model, optimizer, loader())
        if not first:
            attach(pruner, accelerator, prepared[1], loader=prepared[2], epochs=EPOCHS)
        learn(accelerator, *prepared)
        assert pruner.step_count == STEPS and share(pruner)["macs"] <= 0.5
        found.append(snapshot(model))
    assert same_state(*found)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("sync", [True, False])
def test_the_steps_are_those_that_the_optimizer_takes(
    accumulated: int, drop_last: bool, sync: bool
) -> None:
    plugin = accelerate.utils.GradientAccumulationPlugin(accumulated, sync_with_dataloader=sync)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    data = DataLoader(Digits(), batch_size=10, drop_last=drop_last)
    steps = optimizer_steps(accelerator, data, EPOCHS)
    model, pruner, optimizer = parts(steps)
    prepared = accelerator.prepare(model, optimizer, data)
    assert optimizer_steps(accelerator, prepared[2], EPOCHS) == steps
    attach(pruner, accelerator, prepared[1], loader=prepared[2], epochs=EPOCHS)
    learn(accelerator, *prepared)
    assert pruner.step_count == steps


def test_another_number_of_steps_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    _, pruner, optimizer = parts()
    with pytest.raises(pp.PruneError, match=r"steps=40 were announced, but 5 epochs take 20"):
        attach(pruner, accelerator, optimizer, loader=loader(), epochs=EPOCHS)


def test_a_loader_without_a_length_is_refused() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Digits())

    with pytest.raises(pp.PruneError, match="has no length; count the optimizer steps yourself"):
        optimizer_steps(accelerate.Accelerator(cpu=True), DataLoader(Endless()), EPOCHS)


def test_two_processes_take_half_of_the_steps(tmp_path: Path) -> None:
    run_module("tests.helpers.two_processes", tmp_path)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one["processes"] == 2 and one["steps"] == one["taken"] == EPOCHS * BATCHES / 2
    assert "steps=40 were announced, but 5 epochs take 20 optimizer steps, with 2" in one["refused"]
    assert one["left"] <= 0.5 and one["alpha"] == other["alpha"]
