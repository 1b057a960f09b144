"""The step reads nothing back from the device, and compiled code is compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from tests.helpers.no_reading import NoReading

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


def started(steps: int, **goal: Any) -> tuple[pp.Pruner, torch.optim.Optimizer]:
    pruner = pp.Pruner(net(), torch.randn(4, 3, 6, 6), steps=steps, **(goal or {"macs": 0.5}))
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1), momentum=0.9)
    pruner.attach(optimizer)
    return pruner, optimizer


def loss_of(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return F.cross_entropy(model(images), torch.arange(len(images), device=images.device) % 4)


def test_the_check_sees_a_value_that_is_read() -> None:
    for read in (lambda x: x.item(), lambda x: x[x > 0], lambda x: bool(x.sum() > 0)):
        with pytest.raises(AssertionError, match="waits for the device"), NoReading():
            read(torch.ones(1))
    with pytest.raises(AssertionError, match="Python numbers"), NoReading():
        torch.tensor([0.5, 0.25])


@pytest.mark.parametrize(
    "goal", [{"macs": 0.5}, {"params": 0.4, "macs": 0.6}, {"lam": 1.0}], ids=str
)
@pytest.mark.parametrize("compacted", [False, True])
def test_no_step_reads_back_from_the_device(goal: dict[str, float], compacted: bool) -> None:
    pruner, optimizer = started(4000, **goal)
    if compacted:
        pruner._run.stepper.put(torch.arange(pruner.graph.units) % 3)
        pruner.compact()
    images = torch.randn(4, 3, 6, 6)
    for _ in range(25):  # the host looks in at every tenth
        loss_of(pruner.model, images).backward()
        if (pruner.step_count + 1) % 10:
            with NoReading():
                optimizer.step()
        else:
            optimizer.step()
    assert pruner.step_count == 25 and len(pruner.history) == 3


def test_compiled_once_while_eps_and_lambda_change() -> None:
    pruner, optimizer = started(60)
    compiled = torch.compile(pruner.model, fullgraph=True, backend="aot_eager")
    images = torch.randn(4, 3, 6, 6)
    for number in range(60):
        if number == 1:
            torch.compiler.set_stance("fail_on_recompile")
        loss_of(compiled, images).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.compiler.set_stance("default")
    assert pruner.landed and len({row["lam"] for row in pruner.history}) > 4
    small = pruner.export()
    assert pruner.cost()["macs"] <= 0.5 * pruner.graph.cost.original()["macs"]
    assert small(images).shape == (4, 4)


def test_a_compacted_model_is_compiled_again_and_goes_on() -> None:
    pruner, optimizer = started(40)
    compiled = torch.compile(pruner.model, fullgraph=True, backend="aot_eager")
    images = torch.randn(4, 3, 6, 6)
    for number in range(40):
        loss_of(compiled, images).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 25:
            pruner.compact()
    pruner.model.eval()
    assert compiled(images).allclose(pruner.export()(images), atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("compacted", [False, True])
def test_a_captured_step_prunes_like_an_eager_one(compacted: bool) -> None:
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = net().cuda().double()
        images = torch.randn(8, 3, 6, 6, device="cuda", dtype=torch.float64)
        pruner = pp.Pruner(model, images, macs=0.5, steps=60)
        optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1), momentum=0.9)
        pruner.attach(optimizer)

        def step(model: nn.Module = model, images: Tensor = images, opt: Any = optimizer) -> None:
            opt.zero_grad(set_to_none=True)
            loss_of(model, images).backward()
            opt.step()

        graph = None
        for number in range(60):
            if compacted and number == 35:
                pruner.compact()
                graph = None
            if graph is None and captured and number % 35 >= 3:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
            if graph is None:
                step()
            else:
                graph.replay()
                pruner.replayed()
        found.append((pruner.plan(), pruner.history[-1]["macs"], pruner.export()(images)))
    assert found[0][:2] == found[1][:2]
    assert found[0][2].allclose(found[1][2], rtol=1e-6)


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_synchronises_with_the_gpu() -> None:
    model = net().cuda()
    images = torch.randn(8, 3, 6, 6, device="cuda")
    pruner = pp.Pruner(model, images, macs=0.5, steps=4000)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1), momentum=0.9, foreach=True)
    pruner.attach(optimizer)
    loss_of(model, images).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pruner.step_count == 8
