"""Weights that parametrizations compute are pruned like others, and plain in the export."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import polarprune as pp
from polarprune.gates.folding import fold

X = torch.randn(2, 4, 20, dtype=torch.float64)


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


class Standard(nn.Module):
    """A parametrization that mixes all channels that a kernel reads."""

    def forward(self, weight: Tensor) -> Tensor:
        away = weight - weight.mean((1, 2), keepdim=True)
        return away / (weight.std((1, 2), keepdim=True, correction=0) + 1e-5)


class Adapted(nn.Module):
    """A low-rank correction that is trained while the weight itself is not."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        made, rest = weight.shape[0], weight[0].numel()
        self.left = nn.Parameter(torch.randn(made, 2, dtype=weight.dtype) / 10)
        self.right = nn.Parameter(torch.randn(2, rest, dtype=weight.dtype) / 10)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.left @ self.right).view_as(weight)


def with_part(make: Callable[[Tensor], nn.Module]) -> Callable[[Any], Any]:
    def wrapped(layer: Any) -> Any:
        return parametrize.register_parametrization(layer, "weight", make(layer.weight))

    return wrapped


def adapted(layer: Any) -> Any:
    layer.weight.requires_grad_(False)
    return with_part(Adapted)(layer)


def twice(layer: Any) -> Any:
    return with_part(lambda _: Standard())(parametrizations.weight_norm(layer))


WRAPS: dict[str, Callable[[Any], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm of inputs": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "positive": with_part(lambda _: Positive()),
    "standard": with_part(lambda _: Standard()),
    "adapted": adapted,
    "twice": twice,
}


def net(wrap: Callable[[Any], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv1d(4, 16, 3, padding=1), nn.Conv1d(16, 12, 3, padding=1), nn.Conv1d(12, 3, 1)]
    one, two, three = (wrap(conv.double()) for conv in convs)
    return nn.Sequential(one, nn.ReLU(), two, nn.ReLU(), three)


def trained(model: nn.Module, **options: Any) -> pp.Pruner:
    pruner = pp.Pruner(model, X, macs=0.5, steps=60, **options)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05, weight_decay=1e-4), momentum=0.9)
    pruner.attach(optimizer)
    for _ in range(60):
        optimizer.zero_grad()
        (model(torch.randn(4, 4, 20, dtype=torch.float64)) - 1).square().mean().backward()
        optimizer.step()
    return pruner


@pytest.mark.parametrize("name", WRAPS)
def test_a_computed_weight_is_pruned_and_comes_out_plain(name: str, tmp_path: Path) -> None:
    model = net(WRAPS[name])
    pruner = trained(model)
    assert pruner.graph.units == 16 + 12
    small = pruner.export()
    y = torch.randn(3, 4, 33, dtype=torch.float64)
    model.eval(), small.eval()
    assert torch.allclose(small(y), model(y), rtol=0, atol=1e-12)
    assert pruner.cost()["macs"] <= 0.5 * pruner.report().before["macs"]
    assert [type(layer) for layer in small[::2]] == [nn.Conv1d] * 3  # type: ignore[index]
    assert set(small.state_dict()) == {
        f"{k}.{leaf}" for k in (0, 2, 4) for leaf in ("weight", "bias")
    }
    kept = {name: len(indices) for name, indices in pruner.plan().items()}
    assert [layer.out_channels for layer in small[::2]] == [*kept.values(), 3]  # type: ignore[index]
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=net(WRAPS[name])).eval()
    assert torch.equal(loaded(y), small(y))


@pytest.mark.parametrize("name", WRAPS)
def test_looking_changes_nothing(name: str) -> None:
    model = net(WRAPS[name])
    before, mode = copy.deepcopy(model.state_dict()), model.training
    graph = pp.trace(model, X)
    small = pp.shrink(model, graph, {group: [0, 2, 3] for group in graph.prunable})
    after = model.state_dict()
    assert list(before) == list(after) and model.training == mode
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert parametrize.is_parametrized(model[2]) and not parametrize.is_parametrized(small[2])  # type: ignore[index]
    model.eval()
    with torch.no_grad():  # what is left of the plain weights
        first, second = model[0].weight[[0, 2, 3]], model[2].weight[[0, 2, 3]][:, [0, 2, 3]]
    assert torch.equal(small[0].weight, first)  # type: ignore[index]
    assert torch.equal(small[2].weight, second)  # type: ignore[index]


def test_only_what_learned_before_learns_after() -> None:
    small = trained(net(adapted)).export()
    assert all(layer.weight.requires_grad is False for layer in small[::2])  # type: ignore[index]
    small = trained(net(parametrizations.weight_norm)).export()
    assert all(layer.weight.requires_grad for layer in small[::2])  # type: ignore[index]


def test_compact_says_that_it_cannot() -> None:
    model = net(parametrizations.weight_norm)
    pruner = trained(model)
    before = model(X)
    with pytest.raises(pp.PruneError, match=r"compact: 0.weight is computed from other parameters"):
        pruner.compact()
    assert torch.equal(model(X), before) and pruner.compactions == 0
    with pytest.warns(UserWarning, match="turned off: compact: 0.weight is computed"):
        trained(net(parametrizations.weight_norm), compact="auto").export()


def test_a_run_is_resumed() -> None:
    model = net(parametrizations.weight_norm)
    first = trained(model)
    other = net(parametrizations.weight_norm)
    second = pp.Pruner(other, X, macs=0.5, steps=60)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(model.state_dict())
    assert torch.equal(second.export()(X), first.export()(X))


def test_a_weight_that_is_tied_to_a_computed_one_stays_its_own() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.middle = nn.Embedding(11, 8), nn.Linear(8, 8)
            self.answer = nn.Linear(8, 11, bias=False)
            self.answer.weight = self.words.weight
            with_part(lambda _: Positive())(self.answer)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.answer(self.middle(self.words(x)).relu())
            return scores

    torch.manual_seed(0)
    model, x = Tied().double().eval(), torch.tensor([[1, 2, 3]])
    graph = pp.trace(model, x)
    assert {name: group.size for name, group in graph.prunable.items()} == {"words": 8, "middle": 8}
    plan = {"words": [1, 5], "middle": [0, 2, 7]}
    small = pp.shrink(model, graph, plan)
    with torch.no_grad():
        hidden = model.middle(model.words(x) * torch.tensor([0, 1, 0, 0, 0, 1, 0, 0])).relu()
        wanted = model.answer(hidden * torch.tensor([1, 0, 1, 0, 0, 0, 0, 1]))
    assert torch.allclose(small(x), wanted, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_older_functions_are_named_with_a_remedy(name: str) -> None:
    model = net(getattr(nn.utils, name))
    said = (
        rf"0 \(and 2 more\): torch.nn.utils.{name} computes .*use .*parametrizations.{name}, which"
    )
    with pytest.raises(pp.PruneError, match=said):
        pp.Pruner(model, X, macs=0.5, steps=10)
    assert "the same weight and can be pruned" in str(pp.trace(model, X))


def test_a_file_for_a_plain_model_of_the_same_shape(tmp_path: Path) -> None:
    """The parametrizations were taken away before: what is left fits as well."""
    model = net(parametrizations.weight_norm)
    graph = pp.trace(model, X)
    small = pp.shrink(model.eval(), graph, {name: [1, 2] for name in graph.prunable})
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=net(lambda layer: layer))
    assert torch.equal(loaded.eval()(X), small(X))
    with pytest.raises(pp.PruneError, match="to another model"):
        pp.load(tmp_path / "small.safetensors", model=nn.Sequential(nn.Conv1d(4, 7, 3)))


def test_gates_are_multiplied_into_what_was_computed() -> None:
    model = net(parametrizations.weight_norm).eval()
    graph = pp.trace(model, X)
    plan = {name: [1, 2, 5] for name in graph.prunable}
    masked = copy.deepcopy(model)
    fold(masked, graph, graph.kept_units(plan).double())
    with torch.no_grad():
        one, two, three = (layer.weight.clone() for layer in model[::2])
        hidden = F.conv1d(X, one, model[0].bias, padding=1).relu()
        hidden = hidden * torch.tensor([k in (1, 2, 5) for k in range(16)])[:, None]
        hidden = F.conv1d(hidden, two, model[2].bias, padding=1).relu()
        hidden = hidden * torch.tensor([k in (1, 2, 5) for k in range(12)])[:, None]
        wanted = F.conv1d(hidden, three, model[4].bias)
    assert torch.allclose(masked(X), wanted, rtol=0, atol=1e-12)
    assert torch.allclose(pp.shrink(masked, graph, plan)(X), wanted, rtol=0, atol=1e-12)
