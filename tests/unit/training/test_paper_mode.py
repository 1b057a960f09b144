"""`Schedule.paper()` with `lam=`: every step is that of the paper, read in plain torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp

WIDTHS = (6, 7, 8, 6, 3)  # 21 gates before the last three layers
EVERY, DECAY, RATE = 7, 0.6, 0.1


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    both = [torch.randn(5, 9, generator=draw, dtype=torch.float64) for _ in range(count)]
    return [(one[:, :6], one[:, 6:]) for one in both]


class Paper:
    """Equations 2 and 5 and Algorithm 1 of the paper with N = 1, in plain torch."""

    def __init__(self, lam: float, momentum: float) -> None:
        net = network()
        self.weights = [w.detach().clone().requires_grad_() for w in net.parameters()]
        self.alphas = [torch.ones(n, dtype=torch.float64, requires_grad=True) for n in WIDTHS[1:-1]]
        self.lam, self.momentum, self.steps = lam, momentum, 0
        self.speeds = [torch.zeros_like(p) for p in (*self.weights, *self.alphas)]

    def __call__(self, x: Tensor) -> Tensor:
        eps = 0.1 * DECAY ** (self.steps // EVERY)
        for number, (w, b) in enumerate(zip(self.weights[::2], self.weights[1::2], strict=True)):
            if number:
                alpha = self.alphas[number - 1]
                x = x.relu() * (alpha**2 / (alpha**2 + eps))
            x = x @ w.t() + b
        return x

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = (self(x) - y).square().mean()
        parameters = [*self.weights, *self.alphas]
        slopes = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for number, (p, slope) in enumerate(zip(parameters, slopes, strict=True)):
                rate = RATE if number < len(self.weights) else 0.1 * RATE
                self.speeds[number] = self.momentum * self.speeds[number] + slope
                p -= rate * self.speeds[number]
            n = [WIDTHS[0], *(int((a != 0).sum()) for a in self.alphas), WIDTHS[-1]]
            full = sum(a * b for a, b in pairwise(WIDTHS))
            for number, alpha in enumerate(self.alphas):
                price = (n[number] + n[number + 2]) / full
                beta = 0.1 * RATE * self.lam * price
                alpha.copy_(alpha.sign() * (alpha.abs() - beta).clamp_min(0))
        self.steps += 1


def beside(lam: float, momentum: float, steps: int = 40) -> tuple[pp.Pruner, Paper]:
    net, paper = network(), Paper(lam, momentum)
    schedule = pp.Schedule.paper(decay=DECAY, every=EVERY)
    example = torch.randn(2, 6, dtype=torch.float64)
    pruner = pp.Pruner(net, example, lam=lam, steps=steps, schedule=schedule)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=RATE), momentum=momentum)
    pruner.attach(optimizer)
    for x, y in batches(steps):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
        paper.step(x, y)
        theirs = torch.cat([alpha.detach() for alpha in paper.alphas])
        torch.testing.assert_close(pruner._run.stepper.last(), theirs, rtol=0, atol=1e-12)
        assert torch.equal(pruner._run.stepper.last() == 0, theirs == 0)
    return pruner, paper


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("lam", [5.0, 60.0])
def test_every_step_is_that_of_the_paper(lam: float, momentum: float) -> None:
    pruner, paper = beside(lam, momentum)
    x, _ = batches(1)[0]
    torch.testing.assert_close(pruner.model(x), paper(x), rtol=0, atol=1e-12)
    closed = int((pruner._run.stepper.last() == 0).sum())
    assert closed == 0 if lam < 10 else closed > 0


def test_closed_gates_may_open_again_by_momentum() -> None:
    pruner, _ = beside(60.0, 0.9, steps=30)
    closed = pruner._run.stepper.last() == 0
    assert bool(closed.any())
    with torch.no_grad():
        for gate in pruner.gates.values():
            gate.alpha.add_(0.5 * (gate.alpha == 0))
    pruner._run.steering.progress.step -= 1
    pruner._steps.move_gates()
    assert not bool((pruner._run.stepper.last() == 0)[closed].any())


def test_a_network_that_falls_apart_is_refused_at_export() -> None:
    net = network()
    example = torch.randn(2, 6, dtype=torch.float64)
    pruner = pp.Pruner(net, example, lam=1e4, steps=10, schedule=pp.Schedule.paper())
    pruner.param_groups(lr=RATE)
    for _ in range(10):
        pruner.step()
    assert int((pruner._run.stepper.last() != 0).sum()) == 0
    with pytest.raises(pp.PruneError, match="the group needs at least 1"):
        pruner.export()


@pytest.mark.parametrize("other", [{"floor": 1e-3}, {"max_shrink": 10.0}, {"spares": True}])
def test_what_the_paper_does_not_have_can_be_asked_for(other: dict[str, Any]) -> None:
    schedule = pp.Schedule.paper(0.9, every=3, **other)
    assert (schedule.decay, schedule.every) == (0.9, 3)
    assert all(getattr(schedule, name) == value for name, value in other.items())
