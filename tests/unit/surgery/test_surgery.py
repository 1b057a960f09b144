"""`shrink` cuts a copy of the user's own class by any plan, and refuses plans that do not fit."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.channels.graph import Graph
from polarprune.cost.other_scores import magnitude_scores, plan_by_score, random_scores
from polarprune.surgery.apply import cut_copy
from polarprune.surgery.recipe import Recipe
from polarprune.surgery.write_recipe import write_recipe
from polarprune.torch_internals.markers import attached_recipe
from tests.helpers.exact import VARIANTS, counted, difference, double, pruner_of, set_gates, traced
from tests.helpers.nets import NETS, BasicBlock, cbr, digits_resnet, head

pytestmark = pytest.mark.usefixtures("shared_traces")

Plan = dict[str, list[int]]


def silence(model: nn.Module, dropped: dict[str, list[int]]) -> nn.Module:
    """Return a copy in which the named layers do not read the given channels."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer, channels in dropped.items():
            model.get_submodule(layer).weight[:, channels] = 0
    return model


def digits() -> tuple[nn.Module, tuple[Tensor]]:
    model, inputs = NETS["digits_resnet"]()
    return model.double(), double(inputs)


def some_plan(graph: Graph, seed: int = 0) -> Plan:
    """Return a plan with a random half of every group."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: sorted(torch.randperm(g.size, generator=generator)[: max(1, g.size // 2)].tolist())
        for name, g in graph.prunable.items()
    }


def closed_plan(graph: Graph) -> Plan:
    half = some_plan(graph)
    return {name: half[name] if group.minimum else [] for name, group in graph.prunable.items()}


# --------------------------------------------------------------------------------------------------
# what is cut


def test_kept_channels_are_the_planned_ones() -> None:
    model, inputs = NETS["conv_bn_relu_forward"]()
    graph = pp.trace(model, inputs)
    small = pp.shrink(model, graph, {"conv1": [1, 6], "conv2": [0, 3, 11]})
    with torch.no_grad():
        assert torch.equal(small.conv1.weight, model.conv1.weight[[1, 6]])
        assert torch.equal(small.conv1.bias, model.conv1.bias[[1, 6]])
        assert torch.equal(small.bn1.running_mean, model.bn1.running_mean[[1, 6]])
        assert torch.equal(small.bn1.weight, model.bn1.weight[[1, 6]])
        assert torch.equal(small.conv2.weight, model.conv2.weight[[0, 3, 11]][:, [1, 6]])
        assert torch.equal(small.bn2.running_var, model.bn2.running_var[[0, 3, 11]])
        assert torch.equal(small.fc.weight, model.fc.weight[:, [0, 3, 11]])
        assert torch.equal(small.fc.bias, model.fc.bias)
    assert (small.conv2.in_channels, small.conv2.out_channels) == (2, 3)
    assert (small.bn1.num_features, small.fc.in_features, small.fc.out_features) == (2, 3, 5)


def test_order_of_a_plan_does_not_matter() -> None:
    model, inputs = NETS["conv_bn_relu_forward"]()
    graph = pp.trace(model, inputs)
    one = pp.shrink(model, graph, {"conv1": [6, 1, 1], "conv2": [4]})
    other = pp.shrink(model, graph, {"conv2": [4], "conv1": [1, 6]})
    assert torch.equal(one(*inputs), other(*inputs))


def test_group_that_the_plan_does_not_name_stays_whole() -> None:
    model, inputs = NETS["conv_bn_relu_forward"]()
    small = pp.shrink(model, pp.trace(model, inputs), {"conv1": [2]})
    assert small.conv1.out_channels == 1
    assert small.conv2.out_channels == 12


def test_empty_plan_gives_an_equal_copy() -> None:
    model, inputs = NETS["digits_resnet"]()
    small = pp.shrink(model, pp.trace(model, inputs), {})
    assert small is not model
    assert torch.equal(small(*inputs), model(*inputs))
    assert not {id(p) for p in small.parameters()} & {id(p) for p in model.parameters()}


def magnitude_plan(model: nn.Module, graph: Graph) -> Plan:
    """Return a plan with the half of every group whose producing weights are the largest."""
    plan = {}
    for name, group in graph.prunable.items():
        size = model.get_submodule(name).weight.detach().flatten(1).norm(dim=1)
        assert len(size) == group.size
        plan[name] = sorted(size.argsort(descending=True)[: group.size // 2].tolist())
    return plan


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("way", ["shrink", "export", "compact"])
def test_layout_in_memory_is_kept(way: str, form: torch.memory_format) -> None:
    """A kernel in another layout makes convolutions put out that layout, or convert at each run."""
    kernels = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)]
    model = nn.Sequential(*kernels).to(memory_format=form)
    with torch.no_grad():
        model[1].weight = nn.Parameter(model[1].weight.clone(memory_format=form))
    before = [layer.weight.is_contiguous(memory_format=form) for layer in model]
    x = torch.randn(2, 3, 9, 9).contiguous(memory_format=form)
    if way == "shrink":
        graph = pp.trace(model, x)
        small = pp.shrink(model, graph, some_plan(graph))
    else:
        pruner = pp.Pruner(model, x, lam=1.0, steps=1)
        set_gates(pruner, VARIANTS["half"], "half")
        if way == "compact":
            pruner.compact(optimizer=())
        small = pruner.export()
    assert small[1].weight.shape[1] < 8
    assert [layer.weight.is_contiguous(memory_format=form) for layer in small] == before
    for layer in small:
        x = layer(x)
        assert x.is_contiguous(memory_format=form)


@pytest.mark.parametrize("kind", ["magnitude", "random"])
def test_shrunk_model_equals_the_model_that_does_not_read_the_dropped_channels(kind: str) -> None:
    model, inputs = digits()
    graph = pp.trace(model, inputs)
    plan = magnitude_plan(model, graph) if kind == "magnitude" else some_plan(graph)
    dropped = {
        layer: [k for k in range(graph.groups[name].size) if k not in plan[name]]
        for name in graph.prunable
        for layer in graph.groups[name].consumers
    }
    masked = silence(model, dropped)
    small = pp.shrink(model, graph, plan)
    for training in (False, True):
        assert difference(masked, small, inputs, training=training) <= 1e-10
        assert difference(model, small, inputs, training=training) > 1e-3


def test_magnitude_plan_keeps_the_largest_channels() -> None:
    model, inputs = NETS["conv_bn_relu"]()
    graph = pp.trace(model, inputs)
    with torch.no_grad():
        model[1][0].weight[[2, 5, 7]] *= 100
    plan = plan_by_score(graph, magnitude_scores(model, graph), macs=0.4)
    assert {2, 5, 7} <= set(plan["1.0"])


@pytest.mark.parametrize("limits", [{"macs": 0.5}, {"params": 0.3}, {"macs": 0.4, "params": 0.4}])
def test_controls_meet_the_budget_with_the_same_widths(limits: dict[str, float]) -> None:
    model, inputs = NETS["digits_resnet"]()
    graph = pp.trace(model, inputs)
    plans = [
        plan_by_score(graph, scores, **limits)
        for scores in (magnitude_scores(model, graph), random_scores(graph, 1))
    ]
    assert plans[0] != plans[1]
    assert [len(k) for k in plans[0].values()] == [len(k) for k in plans[1].values()]
    whole = counted(model, inputs)
    for plan in plans:
        cost = counted(pp.shrink(model, graph, plan), inputs)
        shares = {key: cost[key] / whole[key] for key in limits}
        assert all(shares[key] <= limit for key, limit in limits.items())
        assert any(shares[key] > limit - 0.03 for key, limit in limits.items())


def test_random_plans_differ_by_seed_only() -> None:
    graph = pp.trace(*NETS["digits_resnet"]())
    one, same, other = (plan_by_score(graph, random_scores(graph, s), macs=0.5) for s in (1, 1, 2))
    assert one == same != other


# --------------------------------------------------------------------------------------------------
# the original, and the copy


@pytest.mark.parametrize("name", ["digits_resnet", "residual_pad_lambda", "resnext", "shared_conv"])
def test_original_is_unchanged(name: str) -> None:
    model = NETS[name]()[0]
    graph = traced(name)
    twin = copy.deepcopy(model)
    plan = closed_plan(graph)
    frozen_plan = copy.deepcopy(plan)
    small = pp.shrink(model, graph, plan)
    assert plan == frozen_plan
    with torch.no_grad():
        for tensor in small.state_dict().values():
            tensor.zero_()
    for left, right in zip(twin.modules(), model.modules(), strict=True):
        assert type(left) is type(right)
        assert repr(left) == repr(right)
        assert vars(left).keys() == vars(right).keys()
    before, after = twin.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_modes_and_frozen_weights_are_kept() -> None:
    model, inputs = NETS["digits_resnet"]()
    graph = pp.trace(model, inputs)
    model.train()
    model[1].eval()
    model[2].requires_grad_(False)
    small = pp.shrink(model, graph, some_plan(graph))
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in small.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


@pytest.mark.parametrize("name", ["residual_projection", "bottleneck_projection", "digits_resnet"])
def test_classes_of_a_resnet_with_projections_are_the_users_own(name: str) -> None:
    model = NETS[name]()[0]
    graph = traced(name)
    small = pp.shrink(model, graph, some_plan(graph))
    before, after = dict(model.named_modules()), dict(small.named_modules())
    assert before.keys() == after.keys()
    assert {path: type(module) for path, module in before.items()} == {
        path: type(module) for path, module in after.items()
    }
    assert model.state_dict().keys() == small.state_dict().keys()


def test_classes_exported_by_a_pruner_are_the_users_own() -> None:
    model, inputs = NETS["digits_resnet"]()
    twin = copy.deepcopy(model)
    pruner = pruner_of(model, inputs)
    with torch.no_grad():
        for gate in pruner.gates.values():
            gate.alpha[::2] = 0
    pruner.param_groups(lr=0.0)
    pruner.step()
    small = pruner.export()
    assert [type(m) for m in small.modules()] == [type(m) for m in twin.modules()]
    assert list(small.state_dict()) == list(twin.state_dict())
    assert [n for n, _ in small.named_parameters()] == [n for n, _ in twin.named_parameters()]


def test_only_the_code_that_bakes_in_widths_is_rewritten() -> None:
    model, inputs = NETS["residual_pad_lambda"]()
    graph = pp.trace(model, inputs)
    small = pp.shrink(model, graph, some_plan(graph))
    rewritten = [
        path for path, m in small.named_modules() if type(m).__module__.endswith(".class_swaps")
    ]
    assert rewritten == ["2.downsample"]
    assert type(small[2]) is type(model[2])


def test_closed_block_is_taken_out() -> None:
    model, inputs = NETS["residual_projection"]()
    graph = pp.trace(model, inputs)
    small = pp.shrink(model, graph, {"3.conv1": []})
    layers = [m for m in small[3].modules() if isinstance(m, nn.Conv2d)]
    assert layers == []
    whole, left = counted(model, inputs), counted(small, inputs)
    places = 2 * 4 * 4
    assert whole["macs"] - left["macs"] == 2 * 12 * 12 * 9 * places
    # what goes: two convolutions and the norm between them; the norm after them is the constant
    assert whole["params"] - left["params"] == 2 * 12 * 12 * 9 + 2 * 12


def test_closed_block_keeps_the_modules_that_its_forward_does_not_call() -> None:
    """They may be called from elsewhere, and they are counted as parameters."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = cbr(8, 6), cbr(6, 8)
            self.extra = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.outer(self.inner(x))

    model, x = nn.Sequential(cbr(3, 8), Block(), head(8)), torch.randn(2, 3, 8, 8)
    graph = pp.trace(model, x)
    small = pp.shrink(model, graph, {"1.inner.0": []})
    assert torch.equal(small[1].extra.weight, model[1].extra.weight)
    widths = torch.tensor(
        [0 if name == "1.inner.0" else g.size for name, g in graph.prunable.items()]
    )
    assert counted(small, (x,))["params"] == graph.cost.at(widths)["params"]


@pytest.mark.parametrize("plan", [some_plan, closed_plan])
@pytest.mark.parametrize(
    "name", ["digits_resnet", "residual_pad_lambda", "unet_interpolate", "split_unequal", "aspp"]
)
def test_shrunk_model_can_be_copied(name: str, plan: Any) -> None:
    model, inputs = NETS[name]()
    graph = traced(name)
    small = pp.shrink(model, graph, plan(graph))
    again = copy.deepcopy(small)
    assert torch.equal(small(*inputs), again(*inputs))
    assert torch.equal(small.train()(*inputs), again.train()(*inputs))
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert any(bool(p.any()) for p in small.parameters())


def test_shrunk_model_can_be_traced_and_shrunk_again() -> None:
    model, inputs = digits()
    graph = pp.trace(model, inputs)
    first = pp.shrink(model, graph, {"1.conv1": [0, 2, 4, 6], "3.conv1": list(range(9))})
    again = pp.trace(first, inputs)
    second = pp.shrink(first, again, {"1.conv1": [1, 3], "3.conv1": [8, 0]})
    direct = pp.shrink(model, graph, {"1.conv1": [2, 6], "3.conv1": [0, 8]})
    assert difference(direct, second, inputs, training=True) == 0


def test_batch_and_image_size_may_change_after_the_cut() -> None:
    model, inputs = NETS["residual_pad_lambda"]()
    graph = pp.trace(model, inputs)
    for plan in (some_plan(graph), closed_plan(graph)):
        small = pp.shrink(model, graph, plan)
        assert small(torch.randn(5, 3, 16, 12)).shape == (5, 5)


# --------------------------------------------------------------------------------------------------
# the recipe


@pytest.mark.parametrize("plan", [some_plan, closed_plan])
@pytest.mark.parametrize(
    "name", ["digits_resnet", "residual_pad_lambda", "resnext", "aspp", "group_norm_no_affine"]
)
def test_recipe_survives_json(name: str, plan: Any) -> None:
    model, inputs = NETS[name]()
    graph = traced(name)
    recipe = write_recipe(model, graph, plan(graph))
    text = json.dumps(recipe.to_json(), allow_nan=False)
    again = Recipe(**json.loads(text))
    assert again == recipe
    small, rebuilt = (cut_copy(model, r) for r in (recipe, again))
    assert torch.equal(small(*inputs), rebuilt(*inputs))
    assert json.loads(json.dumps(attached_recipe(small))) == json.loads(text)


def test_plan_survives_json() -> None:
    model, inputs = NETS["digits_resnet"]()
    pruner = pp.Pruner(model, inputs, macs=0.5, steps=1)
    pruner.step()
    plan = pruner.plan()
    assert json.loads(json.dumps(plan)) == plan
    assert set(plan) == set(pruner.graph.prunable)


# --------------------------------------------------------------------------------------------------
# what is refused


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, Graph]:
    model, inputs = NETS["residual_projection"]()
    return model, pp.trace(model, inputs)


@pytest.mark.parametrize(
    ("plan", "wording"),
    [
        (
            {"nowhere": [0]},
            "plan: unknown or frozen group 'nowhere'. Use prunable groups: 0.0, 1.conv1",
        ),
        ({"4.2": [0]}, "plan: unknown or frozen group '4.2'"),  # the output
        ({"1.conv1": [0, 6]}, "plan: group '1.conv1' has 6 channels; use indices from 0 to 5"),
        ({"1.conv1": [-1]}, "plan: group '1.conv1' has 6 channels; use indices from 0 to 5"),
        ({"0.0": []}, "0.0: the plan keeps 0 channels, but the group needs at least 1"),
        ({"2.conv2": [], "1.conv1": []}, "2.conv2: the plan keeps 0 channels"),
    ],
)
def test_plan_that_does_not_fit_is_refused(net: Any, plan: Plan, wording: str) -> None:
    model, graph = net
    before = copy.deepcopy(model).state_dict()
    with pytest.raises(pp.PruneError) as error:
        pp.shrink(model, graph, plan)
    assert wording in str(error.value)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_graph_of_another_model_is_refused(net: Any) -> None:
    _, graph = net
    other = nn.Sequential(cbr(3, 6), BasicBlock(6, 6), head(6))
    with pytest.raises(pp.PruneError):
        pp.shrink(other, graph, some_plan(graph))


def test_graph_of_a_wider_model_is_refused() -> None:
    graph = pp.trace(*NETS["digits_resnet"]())
    with pytest.raises(pp.PruneError):
        pp.shrink(digits_resnet(width=16), graph, some_plan(graph))


def test_gated_model_is_refused_by_trace() -> None:
    model, inputs = NETS["conv_bn_relu"]()
    pp.Pruner(model, inputs, lam=1.0, steps=1)
    with pytest.raises(pp.PruneError, match="the model has gates already"):
        pp.trace(model, inputs)
