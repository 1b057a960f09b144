"""Layers whose weight is much larger than their input gate the input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.gates import gated_inputs
from polarprune.gates.gate import GatedWeight
from polarprune.rewriting.parametrizations import parametrized


class Net(nn.Module):
    """Layers of every kind, frozen channels, and a channel shared with a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.second = nn.Conv2d(12, 16, 3, padding=1, padding_mode="reflect")
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.third = nn.Conv2d(28, 8, 1)
        self.head = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x).relu()
        second = self.grouped(self.second(first).relu()).relu()
        third = self.third(torch.cat([first, second], 1)).relu()
        out: Tensor = self.head(third.mean((2, 3)))
        return out


IMAGES = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_inputs, "SMALL_WEIGHT", 0)
    monkeypatch.setattr(gated_inputs, "_RATIO", 0)  # any input is small


def pruned(**options: object) -> pp.Pruner:
    torch.manual_seed(0)
    pruner = pp.Pruner(Net().double(), IMAGES, macs=0.6, steps=40, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for gate in pruner.gates.values():
            gate.alpha.uniform_(0.2, 1)
    return pruner


def gates_of_weights(model: nn.Module) -> list[GatedWeight]:
    return [part for _, _, _, parts in parametrized(model) for part in parts]  # type: ignore[misc]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(IMAGES).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_outputs_and_gradients_are_those_of_gated_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = pruned().model, list[nn.Module]()
    original = GatedWeight.skip_once
    monkeypatch.setattr(
        GatedWeight, "skip_once", lambda part: (read.append(part), original(part))[1]
    )
    by_input, out = gradients(model), model(IMAGES)
    assert len(read) == 2 * 4  # second, third and both linear layers; not the grouped one
    monkeypatch.setattr(gated_inputs, "_RATIO", 10**6)
    by_weight = gradients(model)
    torch.testing.assert_close(model(IMAGES), out)
    assert by_input.keys() == by_weight.keys()
    for name, grad in by_weight.items():
        torch.testing.assert_close(by_input[name], grad, msg=name)


def test_the_weight_of_a_layer_is_gated_whenever_somebody_else_reads_it() -> None:
    model = pruned().model
    before = model.second.weight.detach().clone()
    model(IMAGES)
    assert torch.equal(model.second.weight, before)
    with pytest.raises(RuntimeError):
        model.second(IMAGES)  # 3 channels instead of 12
    assert torch.equal(model.second.weight, before)
    handle = model.second.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError()))
    with pytest.raises(KeyError):
        model(IMAGES)
    handle.remove()
    assert torch.equal(model.second.weight, before)


def test_evaluation_without_gradients_reads_gated_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pruned().model
    monkeypatch.setattr(GatedWeight, "skip_once", lambda part: pytest.fail("the input was gated"))
    with torch.no_grad():
        model(IMAGES)


def test_compiled_code_multiplies_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pruned().model
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(GatedWeight, "skip_once", lambda part: pytest.fail("the input was gated"))
    out = compiled(IMAGES)
    monkeypatch.undo()
    torch.testing.assert_close(out, model(IMAGES))


def test_a_layer_with_a_forward_of_its_own_keeps_gated_weights() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight + 0 * self.weight, self.bias)

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Own(6, 2)).double()
    pp.Pruner(model, torch.randn(3, 4).double(), macs=0.5, steps=10)
    assert gates_of_weights(model) and not model[2]._forward_pre_hooks


def test_a_whole_run_is_the_same_and_copies_have_hooks_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    for ratio in (0, 10**6):
        monkeypatch.setattr(gated_inputs, "_RATIO", ratio)
        pruner = pruned(compact="auto")
        optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)
        pruner.attach(optimizer)
        for _ in range(40):
            optimizer.zero_grad()
            pruner.model(IMAGES).square().mean().backward()
            optimizer.step()
        small = pruner.export()
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in small.modules())
        runs.append((pruner.plan(), small(IMAGES)))
        twin = copy.deepcopy(pruner.model)
        mine = {id(part) for part in gates_of_weights(twin)}
        hooks = [h for m in twin.modules() for h in m._forward_pre_hooks.values()]
        parts = [hook.part for hook in hooks if isinstance(hook, gated_inputs.GateInput)]
        assert parts and all(id(part) in mine for part in parts)
    assert runs[0][0] == runs[1][0]
    torch.testing.assert_close(runs[0][1], runs[1][1])
