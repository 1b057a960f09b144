"""Layers that compute their weight in forward are pruned like others, and plain afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp

X = torch.randn(2, 4, 9, 9, dtype=torch.float64)


class Standard(nn.Conv2d):
    """Weight standardization as in timm and BiT."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        made = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(
            x,
            made.reshape_as(self.weight),
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


class ScaledStandard(nn.Conv2d):
    """Weight standardization with a learnable gain, as in networks without batch norms."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)
        self.scale = self.weight[0].numel() ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        made = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=(self.gain * self.scale).view(-1),
            training=True,
            momentum=0.0,
            eps=1e-6,
        )
        return F.conv2d(
            x,
            made.reshape_as(self.weight),
            bias=self.bias,
            padding=self.padding,
            groups=self.groups,
        )


class ByHand(nn.Conv2d):
    """As in the code of the paper on weight standardization, with torch's own padding."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        mean = weight.mean(1, keepdim=True).mean(2, keepdim=True).mean(3, keepdim=True)
        weight = weight - mean
        std = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
        return self._conv_forward(x, weight / std.expand_as(weight), self.bias)


class Masked(nn.Conv2d):
    """A layer that masks some of its weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("mask", (torch.rand_like(self.weight) > 0.3).to(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class Adapted(nn.Conv2d):
    """A layer with a low-rank correction that is trained while the weight itself is not."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weight.requires_grad_(False)
        self.left = nn.Parameter(torch.randn(self.weight.shape[0], 2) / 10)
        self.right = nn.Parameter(torch.randn(2, self.weight[0].numel()) / 10)

    def forward(self, x: Tensor) -> Tensor:
        more = (self.left @ self.right).reshape(self.weight.shape)
        return self._conv_forward(x, self.weight + 0.5 * more, self.bias)


class ScaledProduct(nn.Module):
    """A layer that is not torch's, with a transposed weight."""

    def __init__(self, wide: int, width: int, size: int, padding: int = 0, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, wide) / 3)
        self.scale = nn.Parameter(torch.rand(width, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        made = F.normalize(self.weight, dim=1) * self.scale
        return (x.permute(0, 2, 3, 1) @ made.t()).permute(0, 3, 1, 2)


LAYERS = {
    layer.__name__: layer
    for layer in (Standard, ScaledStandard, ByHand, Masked, Adapted, ScaledProduct)
}
Make = Callable[..., nn.Module]


def net(layer: Make) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        layer(4, 16, 3, padding=1),
        nn.ReLU(),
        layer(16, 12, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(12, 3, 1),
    ).double()


def trained(model: nn.Module, steps: int = 60, **options: Any) -> pp.Pruner:
    pruner = pp.Pruner(model, X, **{"macs": 0.5, "steps": 60, **options})
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05, weight_decay=1e-4), momentum=0.9)
    pruner.attach(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(4, 4, 9, 9, dtype=torch.float64)) - 1).square().mean().backward()
        optimizer.step()
    return pruner


@pytest.mark.parametrize("name", LAYERS)
def test_pruned_exactly_and_plain_afterwards(name: str, tmp_path: Path) -> None:
    model = net(LAYERS[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pruner = trained(model)
    assert pruner.graph.units == 16 + 12
    learned = model[0].parametrizations.weight.original  # type: ignore[union-attr]
    assert torch.equal(learned, before["0.weight"]) == (name == "Adapted")
    small = pruner.export()
    y = torch.randn(3, 4, 12, 12, dtype=torch.float64)
    model.eval(), small.eval()
    torch.testing.assert_close(small(y), model(y), rtol=0, atol=1e-12)
    assert pruner.cost()["macs"] <= 0.5 * pruner.report().before["macs"]
    assert {key.split(".")[-1] for key in small.state_dict()} <= {"weight", "bias"}
    assert all(p.requires_grad for p in small.parameters())
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=net(LAYERS[name])).eval()
    assert torch.equal(loaded(y), small(y))


@pytest.mark.parametrize("name", LAYERS)
def test_looking_changes_nothing_and_plans_of_others_are_cut(name: str) -> None:
    model = net(LAYERS[name])
    before, families = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    graph = pp.trace(model, X)
    plan = {group: [0, 2, 3] for group in graph.prunable}
    small = pp.shrink(model, graph, plan)
    assert [type(m) for m in model.modules()] == families
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert list(before) == list(model.state_dict())
    gone = copy.deepcopy(model)
    (first, one), (second, two) = graph.prunable.items()
    assert {first, second} == {"0", "2"} and (one.size, two.size) == (16, 12)
    with torch.no_grad():  # what a channel that goes would say is not heard
        x = gone[1](gone[0](X))
        x[:, [c for c in range(16) if c not in plan[first]]] = 0
        x = gone[3](gone[2](x))
        x[:, [c for c in range(12) if c not in plan[second]]] = 0
        torch.testing.assert_close(small(X), gone[4](x), rtol=0, atol=1e-12)


class Grouped(nn.Sequential):
    def __init__(self, layer: Make) -> None:
        super().__init__(
            layer(4, 12, 3, padding=1),
            nn.ReLU(),
            layer(12, 12, 3, padding=1, groups=12),
            nn.ReLU(),
            layer(12, 16, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(16, 3, 1),
        )


@pytest.mark.parametrize("layer", [Standard, ScaledStandard, ByHand])
def test_groups_of_convolutions_become_fewer(layer: Make) -> None:
    torch.manual_seed(0)
    model = Grouped(layer).double()
    pruner = trained(model)
    small: Any = pruner.export()
    y = torch.randn(3, 4, 12, 12, dtype=torch.float64)
    model.eval(), small.eval()
    torch.testing.assert_close(small(y), model(y), rtol=0, atol=1e-12)
    assert small[2].groups == small[2].weight.shape[0] < 12 and small[4].groups == 2


def test_copies_compute_with_what_is_theirs() -> None:
    model = net(ScaledStandard)
    trained(model, steps=3)
    other = copy.deepcopy(model)
    before = model(X)
    with torch.no_grad():
        other[0].gain.mul_(2)  # type: ignore[union-attr, operator]
    assert torch.equal(model(X), before) and not torch.allclose(other(X), before)


def test_a_run_goes_on_where_it_was_cut_off() -> None:
    def go(model: nn.Module, pruner: pp.Pruner, optimizer: Any, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            (model(torch.randn(4, 4, 9, 9, dtype=torch.float64)) - 1).square().mean().backward()
            optimizer.step()

    def build() -> tuple[nn.Module, pp.Pruner, Any]:
        model = net(ScaledStandard)
        pruner = pp.Pruner(model, X, macs=0.5, steps=40)
        optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)
        pruner.attach(optimizer)
        return model, pruner, optimizer

    whole, parts = build(), build()
    go(*whole, range(40))
    go(*parts, range(15))
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    parts = build()
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    go(*parts, range(15, 40))
    assert torch.equal(whole[0](X), parts[0](X))
    assert torch.equal(whole[1].export()(X), parts[1].export()(X))


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_as_one_graph(name: str) -> None:
    model = net(LAYERS[name])
    trained(model, steps=2)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(fast(X), model(X), rtol=0, atol=1e-12)


def test_a_number_that_the_code_no_longer_reads_may_not_change() -> None:
    model: Any = net(ScaledStandard)
    trained(model, steps=1)
    with pytest.raises(pp.PruneError, match=r"ScaledStandard\.scale = 3\.0"):
        model[0].scale = 3.0


def test_what_cannot_be_gated_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(ScaledStandard)
    families, keys, before = [type(m) for m in model.modules()], list(model.state_dict()), model(X)
    monkeypatch.setattr("polarprune.gates.install.fuse_gates", lambda *_: 1 / 0)
    with pytest.raises(pp.PruneError, match="Nothing was changed"):
        pp.Pruner(model, X, macs=0.5, steps=10)
    assert [type(m) for m in model.modules()] == families
    assert list(model.state_dict()) == keys and torch.equal(model(X), before)


class Noisy(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight + 0.1 * torch.randn_like(self.weight), self.bias)


class Moded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.tanh() if self.training else self.weight.sin()
        return self._conv_forward(x, weight, self.bias)


class Written(nn.Conv2d):
    """A layer that stores something at every call."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("seen", torch.zeros(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen.add_(1)
        return self._conv_forward(x, self.weight / seen.detach(), self.bias)


class Twice(nn.Conv2d):
    """A layer that also reads the plain weight."""

    def forward(self, x: Tensor) -> Tensor:
        made = self._conv_forward(x, self.weight.tanh(), self.bias)
        return made + self._conv_forward(x, self.weight, None)


class OfTheInput(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * x.mean().sigmoid(), self.bias)


@pytest.mark.parametrize("layer", [Noisy, Moded, Written, Twice, OfTheInput])
def test_what_is_more_than_a_weight_that_was_computed_stays_whole(layer: Make) -> None:
    model = net(layer)
    graph = pp.trace(model, X)
    assert graph.computed == [] and "0" not in graph.prunable
    small = pp.shrink(model, graph, {name: [0] for name in graph.prunable})
    assert type(small[0]) is layer  # type: ignore[index]


def test_a_weight_that_others_hold_stays_whole() -> None:
    one, two = Standard(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    two.weight = one.weight
    model = nn.Sequential(Standard(4, 16, 3, padding=1), one, two, nn.Conv2d(16, 3, 1)).double()
    graph = pp.trace(model, X)
    assert graph.computed == ["0.weight"]
    assert "merged by a computed weight" in str(graph) or "mixes channels" in str(graph)


class Plain(nn.Linear):
    """A linear layer with a user's forward that uses the weight as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


def test_a_weight_that_is_only_moved_about_is_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Plain(6, 16), nn.ReLU(), Plain(16, 3)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    graph = pp.trace(model, x)
    assert graph.computed == [] and graph.units == 16
    small = pp.shrink(model, graph, {"0": [1, 2]})
    assert [type(layer) for layer in small[::2]] == [Plain, Plain]  # type: ignore[index]
