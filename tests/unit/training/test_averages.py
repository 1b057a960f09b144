"""Averages of a gated model follow its gates, are cut with it, and are exported by its plan."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from tests.helpers.nets import digits_resnet
from tests.helpers.resuming import STEPS, Parts, build, learn
from tests.helpers.training import same_state, snapshot

pytestmark = pytest.mark.usefixtures("shared_traces")
DECAY = 0.9


class Average(Protocol):
    """Something that averages the weights of a model."""

    module: nn.Module

    def update(self, model: nn.Module) -> None: ...


class OfTorch:
    def __init__(self, model: nn.Module, use_buffers: bool) -> None:
        self.average = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers
        )
        self.module = self.average

    def update(self, model: nn.Module) -> None:
        self.average.update_parameters(model)


class OfUltralytics:
    """An average as in Ultralytics: a deep copy that is updated through both state dicts."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        state = model.state_dict()
        for key, value in self.module.state_dict().items():
            if value.dtype.is_floating_point:
                value *= DECAY
                value += (1 - DECAY) * state[key].detach()


class ByData:
    """An average as users write it, which bypasses torch's version counters."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model)

    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.data.mul_(DECAY).add_(theirs.data, alpha=1 - DECAY)
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)


def of_timm(model: nn.Module) -> Average:
    import_torchvision()  # timm needs it
    average: Average = import_module("timm.utils").ModelEmaV3(model, decay=DECAY)
    return average


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "AveragedModel": lambda model: OfTorch(model, use_buffers=False),
    "AveragedModel with buffers": lambda model: OfTorch(model, use_buffers=True),
    "ModelEmaV3": of_timm,
    "Ultralytics": OfUltralytics,
    "by data": ByData,
}


def averaged(name: str, steps: int = STEPS, **settings: Any) -> tuple[Parts, Any]:
    """A run with an average that is updated after every step."""
    parts = build(**settings)
    average = AVERAGES[name](parts[1])
    for step in range(steps):
        learn(parts, step, step + 1)
        average.update(parts[1])
    return parts, average


def gates_of(model: nn.Module) -> list[pp.Gate]:
    return [module for module in model.modules() if isinstance(module, pp.Gate)]


def images(number: int) -> Tensor:
    return torch.randn(number, 1, 8, 8, generator=torch.Generator().manual_seed(7))


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(images(16))


@pytest.mark.parametrize("compact", [None, "auto"])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_exported_by_the_plan_and_computes_what_it_did(
    name: str, compact: str | None
) -> None:
    (pruner, model, _), average = averaged(name, compact=compact)
    assert bool(pruner.compactions) == (compact == "auto")
    before, own = outputs(average.module), snapshot(model)
    small = pruner.export(model=average.module)
    assert pruner.proof and max(pruner.proof.values()) <= 1e-5
    torch.testing.assert_close(small.eval()(images(16)), before, rtol=1e-4, atol=1e-5)
    assert not outputs(model).allclose(before, atol=1e-3)
    shapes = [p.shape for p in pruner.export().parameters()]
    assert [p.shape for p in small.parameters()] == shapes
    assert same_state(own, snapshot(model))


@pytest.mark.parametrize("name", AVERAGES)
def test_gates_are_not_averaged(name: str) -> None:
    parts = build()
    average = AVERAGES[name](parts[1])
    for step in range(25):
        learn(parts, step, step + 1)
        average.update(parts[1])
        if step > 1:  # that it is an average shows at its first update
            pairs = list(zip(gates_of(average.module), gates_of(parts[1]), strict=True))
            for mine, theirs in pairs:
                torch.testing.assert_close(mine.alpha, theirs.alpha, rtol=1e-6, atol=0)
                torch.testing.assert_close(mine.eps, theirs.eps, rtol=1e-6, atol=0)
                assert torch.equal(mine.alpha == 0, theirs.alpha == 0)
    assert any(bool((gate.alpha == 0).any()) for gate in gates_of(average.module))
    weights = [p for p in average.module.parameters() if p.dim() == 4]
    theirs = [p for p in parts[1].parameters() if p.dim() == 4]
    assert not any(map(torch.equal, weights, theirs))


def test_an_average_that_is_resumed_with_the_model_goes_on_bit_equal() -> None:
    parts, average = averaged("AveragedModel", 25, compact="auto")
    assert parts[0].compactions
    states = copy.deepcopy([parts[1].state_dict(), parts[2].state_dict()])
    states.append(copy.deepcopy(average.module.state_dict()))
    again = build(compact="auto")
    other = OfTorch(again[1], use_buffers=False)
    for part, state in zip((again[1], again[2], other.module), states, strict=True):
        part.load_state_dict(state)
    for run, mean in ((parts, average), (again, other)):
        for step in range(25, STEPS):
            learn(run, step, step + 1)
            mean.update(run[1])
    assert same_state(snapshot(average.module), snapshot(other.module))


def test_a_snapshot_stays_as_it_is() -> None:
    parts = build()
    learn(parts, 0, 12)
    best = copy.deepcopy(parts[1])
    before, shapes = snapshot(best), [p.shape for p in best.parameters()]
    learn(parts, 12, 25)
    assert same_state(snapshot(best), before)
    parts[0].compact()
    assert [p.shape for p in best.parameters()] == shapes
    with pytest.raises(pp.PruneError, match=r"export: .* is not a copy of the gated"):
        learn(parts, 25, STEPS)
        parts[0].export(model=best)


def test_an_average_that_begins_late_is_cut_if_it_is_named() -> None:
    parts = build()
    average = AveragedModel(parts[1])
    parts[0].copies = [average]
    learn(parts, 0, 25)
    parts[0].compact()
    average.update_parameters(parts[1])
    learn(parts, 25, STEPS)
    average.update_parameters(parts[1])
    parts[0].export(model=average)


def test_copies_that_are_gone_are_forgotten() -> None:
    parts = build()
    for _ in range(5):
        copy.deepcopy(parts[1])
    gc.collect()
    learn(parts, 0, 25)
    parts[0].compact()
    assert len(parts[0]._run.copies._found) <= 1


def test_copies_that_we_make_ourselves_are_not_taken_for_averages() -> None:
    parts = build(compact="auto")
    learn(parts, 0, STEPS)
    parts[0].export()
    assert parts[0].compactions and not parts[0]._run.copies._found


def test_a_copy_of_an_average_is_an_average_of_the_same_pruner() -> None:
    parts, average = averaged("by data", 25)
    parts[0].compact()
    learn(parts, 25, STEPS)
    average.update(parts[1])
    twin = copy.deepcopy(average.module).half().float()
    small = parts[0].export(model=twin)
    assert small(images(4)).shape == (4, 10)


def test_the_plan_decides_also_for_weights_whose_gates_are_open() -> None:
    parts = build()
    early = copy.deepcopy(parts[1])  # all gates are open there
    learn(parts, 0, STEPS)
    small, own = parts[0].export(model=early), parts[0].export()
    assert [p.shape for p in small.parameters()] == [p.shape for p in own.parameters()]


def test_a_model_that_is_no_copy_is_refused() -> None:
    parts = build()
    learn(parts, 0, STEPS)
    for wrong in (digits_resnet(8), nn.Linear(3, 4), AveragedModel(digits_resnet(8)), "average"):
        with pytest.raises(pp.PruneError, match="is not a copy of the gated model as it is now"):
            parts[0].export(model=wrong)
    with pytest.raises(pp.PruneError, match=r"export\(model=average\)"):
        parts[0].export(parts[1])
