"""`attach` finds the optimizer inside wrappers such as accelerate's, and follows its real steps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import polarprune as pp
from tests.helpers.resuming import STEPS, build, learn
from tests.helpers.training import same_state, sgd, snapshot

pytestmark = pytest.mark.usefixtures("shared_traces")


class Wrapper:
    """A wrapper that holds an optimizer without being one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class NamedWrapper(torch.optim.Optimizer):
    """A subclass of Optimizer that, like accelerate's, does not call torch's constructor."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def unattached() -> tuple[pp.Pruner, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    pruner = pp.Pruner(model, torch.randn(4, 6), macs=0.5, steps=10)
    return pruner, model, sgd(pruner)


def step(model: nn.Module, optimizer: Any, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(4, 6)).square().mean() * scale).backward()
    optimizer.step()


@pytest.mark.parametrize("wrapper", [Wrapper, NamedWrapper])
def test_the_optimizer_inside_a_wrapper_is_followed(wrapper: Any) -> None:
    pruner, model, optimizer = unattached()
    pruner.attach(wrapper(wrapper(optimizer)))
    for _ in range(10):
        step(model, optimizer)
    assert pruner.step_count == 10
    pruner.compact(optimizer=wrapper(optimizer))
    pruner.export()


@pytest.mark.parametrize("wrong", [Wrapper(3), Wrapper(None), NamedWrapper(Wrapper(3)), 3])
def test_a_wrapper_without_an_optimizer_of_torch_is_refused(wrong: Any) -> None:
    pruner, _, _ = unattached()
    with pytest.raises(pp.PruneError, match=r"attach: .* is not a torch.optim.Optimizer"):
        pruner.attach(wrong)


@pytest.mark.parametrize("prepared_first", [True, False])
def test_accelerate_may_prepare_before_or_after_attach(prepared_first: bool) -> None:
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    whole = build()
    learn(whole, 0, STEPS)
    torch.manual_seed(1)
    pruner, model, optimizer = build(attached=False)
    if not prepared_first:
        pruner.attach(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if prepared_first:
        pruner.attach(optimizer)
    learn((pruner, model, optimizer), 0, STEPS)
    assert pruner.step_count == STEPS
    assert same_state(snapshot(whole[1]), snapshot(model))


def test_steps_that_a_scaler_skips_are_not_counted() -> None:
    pruner, model, optimizer = unattached()
    pruner.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for scale in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 6)).square().mean() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
    assert pruner.step_count == 2
