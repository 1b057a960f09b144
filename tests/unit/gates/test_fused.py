"""Weights that are computed together equal those that are computed one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import polarprune as pp
from polarprune.gates import fused
from polarprune.tracing.model_state import as_call, tensors_in
from tests.helpers.nets import NETS, WHOLE_NETS

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(autouse=True, params=["elements", "gates", "rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select a strategy on any device: for accelerators, for large networks there, for CPUs."""
    slow = {"cuda"} if request.param == "rows" else {"cpu", "cuda"}
    monkeypatch.setattr(fused, "SLOW_TO_LAUNCH", slow)
    if request.param == "gates":
        monkeypatch.setattr(fused, "LIMIT", 0)
    found: str = request.param
    return found


class Net(nn.Module):
    """A network with a shared group, a weight without gates, a depthwise and an odd layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.one, self.two = nn.Conv2d(6, 5, 1), nn.Conv2d(5, 6, 3, padding=1)
        self.head, self.other = nn.Linear(6, 4), nn.Linear(6, 2)

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.two(self.one(self.deep(x).relu()).relu()) + x

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x).mean((2, 3))
        return torch.cat([self.head(y), self.other(y)], 1)


IMAGES = torch.randn(3, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gated(make: Callable[[], nn.Module] = Net, example: Any = IMAGES, **how: Any) -> pp.Pruner:
    torch.manual_seed(1)
    model = make().double()
    pruner = pp.Pruner(model, example, macs=0.5, steps=8, **how)
    with torch.no_grad():
        for alpha in pruner._run.stepper.alphas:
            alpha.copy_(torch.rand_like(alpha))
    return pruner


def in_double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def banks(model: nn.Module) -> list[fused.FusedGates]:
    return [
        hook for hook in model._forward_pre_hooks.values() if isinstance(hook, fused.FusedGates)
    ]


def without(model: nn.Module) -> nn.Module:
    """Return a copy in which every weight is computed separately."""
    other = copy.deepcopy(model)
    fused.drop_hooks(other)
    return other


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    out.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        if grad is None or other[name] is None:
            assert grad is other[name], name
        else:
            torch.testing.assert_close(grad, other[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    taken: list[int] = []
    for name in ("take", "values_for"):
        original = getattr(fused.FusedGates, name)

        def counting(
            self: fused.FusedGates, slot: int, weight: Tensor, original: Any = original
        ) -> Any:
            found = original(self, slot, weight)
            if found is not None:
                taken.append(slot)
            return found

        monkeypatch.setattr(fused.FusedGates, name, counting)
    yield taken


@pytest.mark.parametrize("name", sorted(NETS.keys() - WHOLE_NETS))
def test_outputs_and_gradients_are_those_of_single_weights(name: str) -> None:
    model, example = NETS[name]()
    example = tree_map_only(Tensor, in_double, example)
    pruner = gated(lambda: model, example)
    args, kwargs = as_call(example)
    found = []
    for one in (pruner.model, without(pruner.model)):
        torch.manual_seed(3)
        out = one(*args, **kwargs)
        first = next(x for x in tensors_in(out) if x.requires_grad)
        found.append((first, gradients(one, first)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-12)
    assert_same(found[0][1], found[1][1])


def test_layers_take_what_is_ready(counted: list[int]) -> None:
    pruner = gated()
    (found,) = banks(pruner.model)
    counted.clear()
    pruner.model(IMAGES)
    assert sorted(counted) == list(range(len(found.parts))) and len(counted) > 3


def test_outside_of_a_run_nothing_is_ready(counted: list[int]) -> None:
    model = gated().model
    out = model(IMAGES)
    counted.clear()
    weight = model.two.weight  # what a captured step would leave here could be of yesterday
    assert not counted and weight.grad_fn is not None
    model.features(IMAGES)
    assert not counted
    out.sum().backward()
    with pytest.raises(RuntimeError):
        model(IMAGES[:, :2])
    model.features(IMAGES)
    assert not counted


@pytest.mark.parametrize("form", ["channels_last", "channels_first", "mixed"])
def test_any_order_of_memory(form: str) -> None:
    model = gated().model
    if form != "channels_first":
        model.to(memory_format=torch.channels_last)
    if form == "mixed":
        model.two.parametrizations.weight.original.data = (
            model.two.parametrizations.weight.original.data.permute(3, 2, 1, 0)
            .contiguous()
            .permute(3, 2, 1, 0)
        )
    alone = without(model)
    assert_same(gradients(model, model(IMAGES)), gradients(alone, alone(IMAGES)))
    model.two.parametrizations.weight.original.data = torch.randn(6, 10, 3, 3).double()[:, ::2]
    alone = without(model)
    assert_same(gradients(model, model(IMAGES)), gradients(alone, alone(IMAGES)))


def test_gradients_of_gradients() -> None:
    model = gated().model
    alone = without(model)
    found = []
    for one in (model, alone):
        x = IMAGES.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        found.append(gradients(one, slope))
    assert_same(*found)


def test_a_penalty_on_the_gradients_of_weights() -> None:
    model = gated().model
    found = []
    for one in (model, without(model)):
        inputs = list(one.parameters())
        slopes = torch.autograd.grad(one(IMAGES).square().sum(), inputs, create_graph=True)
        found.append(gradients(one, torch.stack([slope.square().sum() for slope in slopes])))
    assert_same(*found)


def test_losses_that_share_no_layer_may_go_back_one_after_the_other() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Net(), Net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(x)

    model = gated(Two).model
    alone = without(model)
    for one in (model, alone):
        left, right = one(IMAGES)
        left.square().sum().backward()
        if one is model:
            assert all(p.grad is None for p in model.right.parameters())
        right.square().sum().backward()
    assert_same(*({name: p.grad for name, p in one.named_parameters()} for one in (model, alone)))


@pytest.mark.parametrize("what", ["weight", "gate"])
def test_what_is_changed_before_the_backward_pass_is_noticed(what: str) -> None:
    pruner = gated()
    model = pruner.model
    out = model(IMAGES)
    with torch.no_grad():
        tensor = model.two.parametrizations.weight.original
        (tensor if what == "weight" else pruner._run.stepper.alphas[0]).mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        out.sum().backward()


class Counting(TorchDispatchMode):
    """A mode that counts the operations that compute something, which views do not."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_gates_take_few_operations() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(12)))

    counts = []
    pruner = gated(deep)
    for model in (deep().double(), pruner.model, without(pruner.model)):
        with Counting() as seen:
            model(IMAGES).sum().backward()
        counts.append(seen.count)
    plain, together, alone = counts
    gates = 11
    assert alone - plain > 15 * gates
    assert together - plain < 5 * gates + 30


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    class Checked(Net):
        def features(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            y: Tensor = (
                checkpoint(self.branch, x, use_reentrant=reentrant)
                if x.requires_grad
                else self.branch(x)
            )
            return y + x

        def branch(self, x: Tensor) -> Tensor:
            return self.two(self.one(self.deep(x).relu()).relu())

    plain, checked = gated(Net).model, gated(Checked).model
    checked.load_state_dict(plain.state_dict())
    for _ in range(2):
        one, other = plain(IMAGES), checked(IMAGES)
        assert_same(gradients(plain, one), gradients(checked, other))


def test_a_part_without_gradients() -> None:
    class Still(Net):
        def features(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.stem(x).relu()
                x = self.deep(x).relu()
            return self.two(self.one(x).relu()) + x

    model = gated(Still).model
    alone = without(model)
    assert_same(gradients(model, model(IMAGES)), gradients(alone, alone(IMAGES)))
    with torch.no_grad():
        assert not model(IMAGES).requires_grad
    with torch.inference_mode():
        model(IMAGES)
    assert_same(gradients(model, model(IMAGES)), gradients(alone, alone(IMAGES)))


def test_frozen_layers_and_frozen_gates_get_no_gradient() -> None:
    pruner = gated()
    pruner.model.two.requires_grad_(False)
    alone = without(pruner.model)
    found = gradients(pruner.model, pruner.model(IMAGES))
    assert found["two.parametrizations.weight.original"] is None
    assert_same(found, gradients(alone, alone(IMAGES)))


def test_copies_pickles_and_other_precisions() -> None:
    model = gated().model
    out = model(IMAGES)  # leaves something behind
    other = copy.deepcopy(model)
    (mine,) = banks(other)
    parts = {id(part) for part in other.modules()}
    assert all(id(part) in parts for part in mine.parts) and not (mine.ready or mine.values)
    assert_same(gradients(model, out), gradients(other, other(IMAGES)))
    with torch.no_grad():
        other.two.parametrizations.weight.original.zero_()
        other.two.bias.zero_()
    assert not torch.equal(model(IMAGES), other(IMAGES))
    single = model.float()
    torch.testing.assert_close(single(IMAGES.float()), out.float(), rtol=1e-4, atol=1e-5)


def test_functions_of_the_model() -> None:
    model = gated().model
    alone = without(model)
    other = {k: v * 1.5 for k, v in model.named_parameters()}
    out = functional_call(model, other, (IMAGES,))
    torch.testing.assert_close(out, functional_call(alone, other, (IMAGES,)))
    rows = vmap(lambda x: model(x[None]))(IMAGES)
    torch.testing.assert_close(rows[:, 0], model(IMAGES))


def test_compiled_code_does_without(counted: list[int]) -> None:
    pruner = gated()
    compiled = torch.compile(pruner.model, backend="aot_eager", fullgraph=True)
    counted.clear()
    out = compiled(IMAGES)
    assert not counted
    torch.testing.assert_close(out, pruner.model(IMAGES))


def test_a_whole_run_is_the_same_and_nothing_is_left_in_the_small_model() -> None:
    runs = []
    for together in (True, False):
        pruner = gated(compact="auto")
        if not together:
            fused.drop_hooks(pruner.model)
        optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)
        pruner.attach(optimizer)
        for _ in range(8):
            optimizer.zero_grad()
            pruner.model(IMAGES).square().mean().backward()
            optimizer.step()
        small = pruner.export()
        assert not small._forward_pre_hooks and not small._forward_hooks
        assert not small._forward_hooks_always_called
        runs.append((pruner.plan(), small(IMAGES)))
        assert len(banks(pruner.model)) == 1 or not together
    assert runs[0][0] == runs[1][0]
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-9, atol=1e-12)


def test_what_is_computed_together(way: str) -> None:
    model = gated().model
    model(IMAGES)
    (bank,) = banks(model)
    assert [len(value) for value in bank.values] == [len(gate.alpha) for gate in bank.gates]
    simple = {slot for slot, part in enumerate(bank.parts) if part.simple}
    ready = {"elements": range(len(bank.parts)), "gates": (), "rows": simple}[way]
    assert bank.ready.keys() == set(ready) and len(simple) > 3


def test_on_a_cpu_large_weights_are_multiplied_alone(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "SMALL_WEIGHT", 36)
    (bank,) = banks(gated().model)
    sizes = [site.original.numel() for site in bank.sites]
    small = [slot for slot, size in enumerate(sizes) if size < 36]
    assert way != "rows" or bank.slots == small != list(range(len(sizes)))


def test_the_order_of_sums_does_not_change_from_run_to_run() -> None:
    model = gated().model
    first, second = (gradients(model, model(IMAGES)) for _ in range(2))
    for name, grad in first.items():
        assert torch.equal(grad, second[name]), name  # type: ignore[arg-type]
