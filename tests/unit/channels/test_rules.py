"""docs/rules.md stays true: its code runs, and what it teaches is proved by numbers."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune import rules
from polarprune.rules import Flow, Labels, Op, Value, pointwise
from tests.helpers.random_cuts import cut_at_random, images

PAGE = Path(__file__).parents[3] / "docs" / "rules.md"
TEXT = PAGE.read_text(encoding="utf-8")


def run_block(number: int) -> dict[str, Any]:
    """Run a block of the page, with the line numbers that it has there."""
    block = list(re.finditer(r"```python\n(.*?)```", TEXT, re.DOTALL))[number]
    lines = "\n" * TEXT[: block.start(1)].count("\n")
    scope: dict[str, Any] = {}
    exec(compile(lines + block[1], PAGE.name, "exec"), scope)
    return scope


def line_of(code: str) -> int:
    return TEXT[: TEXT.index(code)].count("\n") + 1


@pytest.fixture(scope="module")
def swish() -> dict[str, Any]:
    torch.manual_seed(0)
    return run_block(0)


def doubled(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.rand_like(parameter))
    return net.double()


def test_operation_without_a_rule_is_listed_with_its_place(swish: dict[str, Any]) -> None:
    graph = swish["unruled"]
    place = f"rules.md:{line_of('return swish(x, self.gain)')}"
    assert graph.unknown == {"my.swish.default": f"1 ({place})"}
    for name, module in (("0", "1"), ("2", "3")):
        reason = f"channels cannot be followed through my.swish.default in {module} ({place})"
        reason += "; teach the operation with rules={torch.ops.my.swish: …}, see polarprune.rules"
        assert graph.groups[name].frozen and graph.groups[name].reason == reason
    assert f"unknown operation: my.swish.default in 1 ({place})" in str(graph)


@pytest.mark.parametrize("overload", [False, True], ids=["all overloads", "one overload"])
def test_taught_operation_is_cut_exactly(swish: dict[str, Any], overload: bool) -> None:
    net, x = doubled(swish["net"]), images(2, 3, 9, 9)
    taught = torch.ops.my.swish.default if overload else torch.ops.my.swish
    graph = pp.trace(net, x, rules={taught: swish["per_channel"]})
    assert set(graph.prunable) == {"0", "2"}
    this = cut_at_random(net, graph, (x,))
    assert len(this.small[1].gain) == this.small[0].out_channels == len(this.plan["0"])
    assert torch.equal(this.small[1].gain, net[1].gain[this.plan["0"]])


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x · sigmoid(gain · x)."""
    x, gain = ctx.saved_tensors
    wide = gain[:, None, None]
    share = torch.sigmoid(wide * x)
    slope = share * (1 - share)
    return grad * (share + wide * x * slope), (grad * x * x * slope).sum((0, 2, 3))


def test_taught_operation_is_pruned_while_it_trains(swish: dict[str, Any], tmp_path: Path) -> None:
    """Train, interrupt, resume, export, save and load: the resumed run is the same."""
    swish["swish"].register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    original = nn.Sequential(doubled(swish["net"]), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data, classes = images(16, 3, 9, 9), torch.arange(16) % 4
    rules = {torch.ops.my.swish: swish["per_channel"]}
    with pytest.raises(pp.PruneError, match=r"cannot be followed through my\.swish\.default"):
        pp.Pruner(copy.deepcopy(original), data, macs=0.5, steps=30)

    def start() -> tuple[nn.Module, pp.Pruner, torch.optim.Optimizer]:
        net = copy.deepcopy(original)
        pruner = pp.Pruner(net, data, macs=0.5, steps=30, rules=rules)
        optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)
        pruner.attach(optimizer)
        return net, pruner, optimizer

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data), classes).backward()
            optimizer.step()

    first, second = start(), start()
    train(first[0], first[2], 10)
    for before, after in zip(first, second, strict=True):
        after.load_state_dict(before.state_dict())
    net, pruner, optimizer = second
    train(net, optimizer, 20)
    small = pruner.export()
    assert not torch.equal(net[0][1].gain, original[0][1].gain)  # it was trained
    assert pruner.cost()["macs"] <= 0.5 * pruner.graph.cost.original()["macs"]
    assert len(small[0][1].gain) == small[0][0].out_channels == len(pruner.plan()["0.0"]) < 8
    assert torch.allclose(small(data), net(data), rtol=1e-10, atol=1e-12)
    pp.save(small, tmp_path / "small.safetensors")
    again = pp.load(tmp_path / "small.safetensors", model=original)
    assert torch.equal(again(data), small(data))


def test_rule_that_forgets_an_operand_is_found_out(swish: dict[str, Any]) -> None:
    def forgetful(flow: Flow, op: Op) -> None:
        flow.set(op.outs[0], flow.layers(op.args[0]))

    net = nn.Sequential(*swish["net"][:3]).double()
    graph = pp.trace(net, images(2, 3, 9, 9), rules={torch.ops.my.swish: forgetful})
    assert graph.prunable == {}
    assert "the model's code does not adapt to fewer channels: " in graph.groups["0"].reason


def test_rule_that_freezes_says_why() -> None:
    def whole(flow: Flow, op: Op) -> None:
        for layer in flow.layers(op.args[0]):
            flow.labels.freeze(layer, f"I say so in {op.where}")
        pointwise(flow, op)

    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    graph = pp.trace(net, torch.randn(4, 3), rules={torch.ops.aten.relu: whole})
    assert graph.groups["0"].reason.startswith("I say so in 1 (test_rules.py:")
    assert set(graph.prunable) == {"2"}


def test_contraction_of_the_user_is_a_place_for_a_gate() -> None:
    torch.manual_seed(0)
    scope = run_block(1)
    net, x = doubled(scope["net"]), images(2, 3, 9, 9)
    graph = pp.trace(net, x, rules={torch.ops.my.project: scope["merging"]})
    assert {name: sorted(axes) for name, axes in graph.sites.items()} == {
        "1.weight": [1],
        "3.weight": [1],
    }
    this = cut_at_random(net, graph, (x,))
    kept = len(this.plan["1"]), len(this.plan["0"])
    assert tuple(this.small[1].weight.shape) == kept


def test_rule_that_takes_mixed_channels_for_separate_ones_is_found_out() -> None:
    graph = run_block(2)["graph"]
    assert graph.prunable == {}
    assert graph.unknown == {}


def test_page_names_only_what_there_is() -> None:
    value, flow = Value((1,)), Flow(Labels(), {}, pointwise)
    there = {"flow": flow, "op": Op(None, (), {}, [value], "", ""), "labels": flow.labels}
    named = re.findall(r"`(?:flow\.)?(flow|op|labels)\.(\w+)", TEXT)
    assert {("flow", "layers"), ("flow", "on"), ("labels", "join"), ("op", "outs")} <= set(named)
    assert [pair for pair in named if not hasattr(there[pair[0]], pair[1])] == []


def test_unused_rule_changes_nothing() -> None:
    def never(flow: Flow, op: Op) -> None:
        raise AssertionError("not in this model")

    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = pp.trace(net, torch.randn(4, 3), rules={torch.ops.aten.gelu: never})
    assert graph.groups == pp.trace(net, torch.randn(4, 3)).groups


def test_the_public_module_describes_every_name_and_is_all_that_the_guide_imports() -> None:
    for name in rules.__all__:
        assert f"    {name}: " in (rules.__doc__ or ""), name
    found = set(re.findall(r"(?:from|import) (polarprune[\w.]*)", TEXT))
    assert found == {"polarprune", "polarprune.rules"}
