"""`trace` changes nothing, and what it reports about groups, costs and reasons is true."""

from __future__ import annotations

import copy
import doctest
import inspect
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import polarprune as pp
from polarprune.analysis import trace
from polarprune.channels.graph import Graph
from polarprune.rules import pointwise
from tests.helpers import exact
from tests.helpers.exact import counted, difference, double, pruner_of
from tests.helpers.nets import NETS, BasicBlock, cbr, head

IMAGE = torch.Generator().manual_seed(0)


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=IMAGE)


def around(middle: nn.Module, channels: int = 8) -> nn.Sequential:
    return nn.Sequential(cbr(3, channels), middle, cbr(channels, 10), head(10))


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def fraction(table_cell: str) -> float:
    return float(table_cell.rstrip("%")) / 100


# --------------------------------------------------------------------------------------------------
# nothing is changed


@pytest.mark.parametrize(
    "name",
    [
        "conv_bn_relu",
        "dropout",
        "instance_norm_stats",
        "residual_pad_lambda",
        "unet_interpolate",
        "auxiliary_head",
        "keyword_inputs",
        "c2f_split",
    ],
)
def test_trace_changes_nothing(name: str) -> None:
    model, inputs = NETS[name]()
    for module in list(model.modules())[::3]:
        module.training = not module.training  # a mixture, as after model.bn.eval()
    first = next(iter(model.parameters()))
    first.grad = torch.ones_like(first)
    twin, inputs_before = copy.deepcopy(model), tree_map_only(Tensor, torch.clone, inputs)
    identities = [id(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    random_state = torch.get_rng_state()

    pp.trace(model, inputs)

    assert torch.equal(torch.get_rng_state(), random_state)
    assert [id(x) for x in model.state_dict(keep_vars=True).values()] == identities
    before, after = twin.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for left, right in zip(twin.modules(), model.modules(), strict=True):
        assert type(left) is type(right)
        assert left.training == right.training
        assert vars(left).keys() == vars(right).keys()
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"):
            assert not getattr(right, hooks)
    assert [p.requires_grad for p in twin.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(
        torch.equal(a, b)
        for a, b in zip(tree_leaves(inputs_before), tree_leaves(inputs), strict=True)
    )
    assert torch.is_grad_enabled()


def test_hooks_of_the_user_stay_and_run() -> None:
    model, inputs = NETS["conv_bn_relu"]()
    seen = []
    model[1].register_forward_hook(lambda *args: seen.append("hook"))
    pp.trace(model, inputs)
    seen.clear()
    model(*inputs)
    assert seen == ["hook"]
    assert len(model[1]._forward_hooks) == 1


def test_trace_that_fails_changes_nothing() -> None:
    model, _ = NETS["residual_pad_lambda"]()
    twin = copy.deepcopy(model.train())
    with pytest.raises(pp.PruneError, match="does not run on the example inputs"):
        pp.trace(model, images(2, 7, 8, 8))
    for left, right in zip(twin.modules(), model.modules(), strict=True):
        assert left.training == right.training
        assert vars(left).keys() == vars(right).keys()
        assert not right._forward_hooks and not right._forward_pre_hooks
    assert all(
        torch.equal(a, b)
        for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_trace_under_no_grad_gives_the_same_groups() -> None:
    model, inputs = NETS["digits_resnet"]()
    expected = str(pp.trace(model, inputs))
    with torch.no_grad():
        assert str(pp.trace(model, inputs)) == expected


def test_buffer_that_forward_replaces_is_put_back() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.average = 0.9 * self.average + 0.1 * x.detach().mean((0, 2, 3))
            return x - self.average[:, None, None]

    model = around(Average())
    buffer = model[1].average
    pp.trace(model, images(2, 3, 8, 8))
    assert model[1].average is buffer
    assert torch.equal(buffer, torch.zeros(8))


def test_what_forward_remembers_is_never_symbolic() -> None:
    """Code that bakes in widths is traced with proxies, which must not leak into the model."""

    class Remembers(nn.Module):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            a, b = x.split(4, 1)
            self.last = torch.cat([b, a], 1)
            return self.last

    model = around(Remembers())
    graph = pp.trace(model, images(2, 3, 8, 8))
    assert not graph.rewritten and graph.groups["0.0"].frozen  # somebody may look at it
    assert model[1].last is None or isinstance(model[1].last, Tensor)


def test_forward_that_the_user_replaced_stays() -> None:
    model, inputs = NETS["residual_pad_cat_zeros"]()
    block = model[2]

    def patched(x: Tensor) -> Tensor:
        return type(block).forward(block, x)

    block.forward = patched
    pp.trace(model, inputs)
    assert vars(block).get("forward") is patched


def test_example_may_be_a_tensor_a_tuple_a_list_or_a_dict() -> None:
    model, (image,) = NETS["conv_bn_relu"]()
    forms: list[Any] = [image, (image,), [image], {"input": image}]
    assert len({str(pp.trace(model, form)) for form in forms}) == 1


# --------------------------------------------------------------------------------------------------
# the table


def test_table_names_groups_prices_and_reasons() -> None:
    graph = pp.trace(*NETS["spatial_attention"]())
    text = str(graph)
    rows = text.splitlines()
    for group in graph.groups.values():
        row = next(r for r in rows if r.startswith(f"{group.name} "))
        assert f" {group.size} " in row
        assert group.producers[0] in row
        assert all(reader in row for reader in group.consumers[:1])
        assert (group.reason in row) == group.frozen or not group.reason
        assert row.count("% ") == (0 if group.frozen else 2)
    assert "mean mixes channels in 2 (nets.py:" in text
    assert "part of the model's output" in text
    assert "18 channels prunable, 17 frozen; " in text
    cost = graph.cost.original()
    assert f"macs: {cost['macs']:,}" in text and f"params: {cost['params']:,}" in text


def test_prices_in_the_table_are_what_a_channel_saves() -> None:
    model, inputs = NETS["conv_bn_relu_forward"]()
    graph = pp.trace(model, inputs)
    head, _, *rows = [line.split() for line in str(graph).splitlines()]
    row = next(row for row in rows if row and row[0] == "conv2")
    whole = counted(model, inputs)
    less = counted(pp.shrink(model, graph, {"conv2": list(range(11))}), inputs)
    assert fraction(row[2]) == pytest.approx(1 - less["macs"] / whole["macs"], abs=1e-5)
    assert fraction(row[3]) == pytest.approx(1 - less["params"] / whole["params"], abs=1e-5)
    assert head[2:4] == ["MACs", "params"]


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("residual_projection", {"0.0": "prunable, at least 1 stays", "1.conv1": "prunable"}),
        ("conv_bn_relu_forward", {"fc": "frozen: part of the model's output"}),
    ],
)
def test_state_of_a_group_is_prunable_or_frozen(name: str, states: dict[str, str]) -> None:
    graph = pp.trace(*NETS[name]())
    rows = {row.split()[0]: row for row in str(graph).splitlines() if row.strip()}
    for group, state in states.items():
        assert rows[group].endswith(f"  {state}")
        assert str(graph.groups[group]).endswith(f"channels, {state}")


def test_example_in_the_docstring_of_trace_runs() -> None:
    done = doctest.testmod(sys.modules["polarprune.analysis.trace"])
    assert done.attempted >= 6 and not done.failed


# --------------------------------------------------------------------------------------------------
# cost


@pytest.fixture
def traced() -> Callable[[str], tuple[nn.Module, Any, Graph]]:
    """Return a net, its inputs, and its graph, which is made only once."""

    def look(name: str) -> tuple[nn.Module, Any, Graph]:
        model, inputs = NETS[name]()
        return model.double(), double(inputs), exact.traced(name)

    return look


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize("name", NETS)
def test_cost_at_full_width_is_what_torch_counts(name: str, traced: Any) -> None:
    model, inputs, graph = traced(name)
    cost = graph.cost.original()
    assert {key: cost[key] for key in ("macs", "params")} == counted(model, inputs)


def some_plan(graph: Graph, rng: random.Random, least: int = 1) -> dict[str, list[int]]:
    return {
        name: sorted(rng.sample(range(group.size), rng.randint(least, group.size)))
        for name, group in graph.prunable.items()
    }


@pytest.mark.parametrize(
    "name",
    [
        "conv_bias",
        "conv3d",
        "depthwise_multiplier",
        "resnext",
        "grouped_chain",
        "shared_conv",
        "conv_transpose_grouped",
        "densenet_list",
        "pixel_unshuffle",
        "flatten_module",
        "resnet20",
        "mobilenetv2_small",
        "shuffle_dynamic",
        "group_norm_four",
        "mlp_3d",
        "keyword_inputs",
    ],
)
def test_cost_at_random_widths_is_what_torch_counts(name: str, traced: Any) -> None:
    model, inputs, graph = traced(name)
    rng = random.Random(name)
    for _ in range(4):
        plan = some_plan(graph, rng)
        cost = graph.cost.at(torch.tensor([len(kept) for kept in plan.values()]))
        small = pp.shrink(model, graph, plan)
        assert {key: cost[key] for key in ("macs", "params")} == counted(small, inputs)


def test_price_is_what_one_channel_less_saves(traced: Any) -> None:
    _, _, graph = traced("resnet20")
    n = graph.cost.full - 3
    for resource in ("macs", "params"):
        now = graph.cost.at(n)[resource]
        for index, saving in enumerate(graph.cost.parts[resource].saving(n).tolist()):
            less = n.clone()
            less[index] -= 1
            assert now - graph.cost.at(less)[resource] == saving


def test_convolution_inside_one_stream_costs_the_square_of_its_width(traced: Any) -> None:
    _, _, graph = traced("shared_conv")
    stream = graph.cost.names.index("stem.0")
    places = 2 * 8 * 8  # images and pixels
    macs, params = graph.cost.parts["macs"], graph.cost.parts["params"]
    # R = ½ q n² + …: one 3 x 3 convolution from n to n channels, applied twice
    assert 0.5 * macs.q[stream, stream] == 2 * 9 * places
    assert 0.5 * params.q[stream, stream] == 9
    tail = graph.cost.names.index("tail.0.0")
    assert macs.q[stream, tail] == macs.q[tail, stream] == 9 * places
    assert macs.b[stream] == 3 * 9 * places
    assert params.b[stream] == 3 * 9 + 2 + 4  # stem, its norm, the two norms
    assert macs.b[tail] == 2 * 5 and macs.c == 0


def test_cost_of_a_small_net_is_the_one_worked_out_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    graph = pp.trace(model, images(5, 4))
    assert graph.cost.original() == {
        "macs": 5 * (4 * 3 + 3 * 2),
        "params": 4 * 3 + 3 + 3 * 2 + 2,
        "memory": 4 * (4 * 3 + 3 + 3 * 2 + 2) + 4 * 5 * (3 + 2),
    }
    assert graph.cost.at(torch.tensor([1.0])) == {
        "macs": 5 * (4 + 2),
        "params": 4 + 1 + 2 + 2,
        "memory": 4 * (4 + 1 + 2 + 2) + 4 * 5 * (1 + 2),
    }


# --------------------------------------------------------------------------------------------------
# keep


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["1.conv1"], {"0.0", "1.conv1"}),  # it reads the trunk and makes the inner channels
        (["3"], {"2.conv2", "3.conv1"}),  # a block: all that is inside
        (["*.conv1"], {"0.0", "1.conv1", "2.conv1", "2.conv2", "3.conv1"}),
        (["2.bn1"], {"2.conv1"}),
        (["1.conv1", "3.bn1"], {"0.0", "1.conv1", "3.conv1"}),
        ([], set()),
    ],
)
def test_keep_freezes_exactly_what_it_names(patterns: list[str], kept: set[str]) -> None:
    model, inputs = NETS["residual_projection"]()
    everything = set(pp.trace(model, inputs).prunable)
    graph = pp.trace(model, inputs, keep=patterns)
    assert set(graph.prunable) == everything - kept
    for name in kept:
        assert graph.groups[name].reason.startswith("kept by keep=")
        assert "remove this pattern" in graph.groups[name].reason


def test_keep_of_everything_leaves_the_model_as_it_is() -> None:
    model, inputs = NETS["conv_bn_relu"]()
    graph = pp.trace(model, inputs, keep=["*"])
    assert graph.prunable == {}
    small = pp.shrink(model, graph, {})
    assert counted(small, inputs) == counted(model, inputs)


def test_keep_that_matches_nothing_is_refused() -> None:
    model, inputs = NETS["conv_bn_relu"]()
    wording = r"keep: no module with parameters matches 'layer9\.\*'.*model\.named_modules\(\)"
    with pytest.raises(pp.PruneError, match=wording):
        pp.trace(model, inputs, keep=["0", "layer9.*"])


# --------------------------------------------------------------------------------------------------
# unknown operations


@torch.library.custom_op("polarprune_test::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    return x * 2


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def call_mystery(x: Tensor) -> Tensor:
    return mystery(x)


def line_of_the_call() -> str:
    return f"test_trace.py:{inspect.getsourcelines(call_mystery)[1] + 1}"


def test_unknown_operation_freezes_what_it_touches_and_says_so() -> None:
    graph = pp.trace(around(Apply(call_mystery)).eval(), images(2, 3, 8, 8))
    touched = graph.groups["0.0"]
    assert touched.frozen
    assert "polarprune_test.mystery" in touched.reason
    assert f"1 ({line_of_the_call()})" in touched.reason
    assert list(graph.unknown) == ["polarprune_test.mystery.default"]
    assert line_of_the_call() in graph.unknown["polarprune_test.mystery.default"]
    assert "unknown operation: polarprune_test.mystery.default in 1" in str(graph)
    assert set(graph.prunable) == {"2.0"}


def test_rule_of_the_user_makes_channels_of_an_unknown_operation_prunable() -> None:
    model, inputs = around(Apply(call_mystery)).eval(), images(2, 3, 8, 8)
    rules = {torch.ops.polarprune_test.mystery.default: pointwise}
    graph = pp.trace(model, inputs, rules=rules)
    assert set(graph.prunable) == {"0.0", "2.0"}
    assert graph.unknown == {}
    small = pp.shrink(model, graph, {"0.0": [1, 5], "2.0": [0]})
    assert small[0][0].out_channels == 2
    assert small(inputs).shape == (2, 5)


def test_wrong_rule_of_the_user_is_found_out() -> None:
    """The rule says that channels stay apart, but they are mixed: a trial cut shows it."""
    mixing = Apply(lambda x: x + x.amax(1, keepdim=True))
    rules = {torch.ops.aten.amax: lambda flow, op: flow.set(op.outs[0], [])}
    graph = pp.trace(around(mixing).eval(), images(2, 3, 8, 8), rules=rules)
    assert graph.groups["0.0"].frozen
    assert "differs by" in graph.groups["0.0"].reason
    assert set(graph.prunable) == {"2.0"}


# --------------------------------------------------------------------------------------------------
# reasons


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (Apply(lambda x: x.softmax(1)), "softmax mixes channels in 1"),
        (Apply(lambda x: x / x.norm(dim=1, keepdim=True)), "norm mixes channels in 1"),
        (Apply(lambda x: x - x.mean(1, keepdim=True)), "mean mixes channels in 1"),
        (Apply(lambda x: x.cumsum(1)), "cumsum mixes channels in 1"),
        (nn.GroupNorm(1, 8), "group norm over all channels in 1"),
        (nn.LayerNorm([8, 8, 8]), "layer norm mixes channels in 1"),
        (Apply(lambda x: x[:, torch.randperm(8)]), "channels are picked by index in 1"),
        (Apply(lambda x: x.index_add(1, torch.arange(8), x)), "channels are picked by index in 1"),
    ],
    ids=["softmax", "norm", "mean", "cumsum", "group norm", "layer norm", "index", "index add"],
)
def test_mixed_channels_are_frozen_with_the_reason(middle: nn.Module, reason: str) -> None:
    graph = pp.trace(around(middle).eval(), images(2, 3, 8, 8))
    assert graph.groups["0.0"].frozen
    assert reason in graph.groups["0.0"].reason
    assert "test_trace.py:" in graph.groups["0.0"].reason
    assert set(graph.prunable) == {"2.0"}


@pytest.mark.parametrize(
    "middle",
    [Apply(lambda x: x.softmax(-1)), nn.LayerNorm([8]), Apply(lambda x: x.cumsum(2))],
    ids=["softmax over columns", "layer norm over columns", "cumsum over rows"],
)
def test_reduction_over_other_axes_leaves_channels_prunable(middle: nn.Module) -> None:
    graph = pp.trace(around(middle).eval(), images(2, 3, 8, 8))
    assert set(graph.prunable) == {"0.0", "2.0"}


def fixed_view(x: Tensor) -> Tensor:
    with torch.enable_grad():  # no graph can hold this
        return x.view(x.shape[0], 8, -1, x.shape[3]).relu()


def fixed_slice(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.cat([x[:, 3:], x[:, :3]], 1)


@pytest.mark.parametrize(
    ("code", "fact", "remedy"),
    [
        (
            fixed_view,
            "the model's code does not adapt to fewer channels: ",
            "make that line work with any number of channels",
        ),
        (
            fixed_slice,
            "slice selects channels by position in ",
            "use separate layers, or equal parts (chunk)",
        ),
    ],
)
def test_reason_of_code_with_fixed_sizes_names_module_line_and_remedy(
    code: Any, fact: str, remedy: str
) -> None:
    graph = pp.trace(around(Apply(code)).eval(), images(2, 3, 8, 8))
    line = inspect.getsourcelines(code)[1] + 2
    reason = graph.groups["0.0"].reason
    assert reason.startswith(fact) and reason.endswith(f"; {remedy}")
    assert f"in 1 (test_trace.py:{line}) (its forward cannot be rewritten: " in reason


def test_output_is_frozen() -> None:
    graph = pp.trace(*NETS["outputs_tuple"]())
    frozen = {name: group.reason for name, group in graph.groups.items() if group.frozen}
    facts = {name: reason.fact for name, reason in frozen.items()}
    assert facts == dict.fromkeys(("logits.2", "boxes"), "part of the model's output")


def test_each_of_several_outputs_is_named_with_its_operation_and_line() -> None:
    reason = pp.trace(*NETS["outputs_tuple"]()).groups["boxes"].reason
    assert reason.startswith("part of the model's output: the result of shape (")
    assert " of convolution in boxes (" in reason


def test_a_layer_whose_parts_are_different_outputs_is_one_group() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            first, second = self.conv(x).chunk(2, 1)
            return first.relu(), second.sigmoid()

    (group,) = pp.trace(Halves(), images(2, 3, 8, 8)).groups.values()
    assert group.name == "conv" and "of relu in model" in group.reason


@dataclass
class Box:
    content: Any


class Boxed(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.features, self.head, self.pack = cbr(3, 8), head(8), pack

    def forward(self, x: Tensor) -> Any:
        features = self.features(x)
        return self.pack(self.head(features), features)


@pytest.mark.parametrize(
    "pack",
    [
        lambda logits, features: Box([logits, features]),
        lambda logits, features: [logits, Box({"deep": [Box(features)]})],
        lambda logits, features: {"logits": logits, "more": Box((features,))},
    ],
    ids=["object", "objects in objects", "object in dict"],
)
def test_output_is_found_inside_objects(pack: Callable[[Tensor, Tensor], Any]) -> None:
    graph = pp.trace(Boxed(pack), images(2, 3, 8, 8))
    assert graph.prunable == {}
    assert {group.reason.fact for group in graph.groups.values()} == {"part of the model's output"}


def test_model_without_an_output_to_compare_is_refused() -> None:
    with pytest.raises(pp.PruneError, match="output"):
        pp.trace(Boxed(lambda logits, features: None), images(2, 3, 8, 8))


def test_channels_of_the_input_belong_to_no_group() -> None:
    graph = pp.trace(*NETS["conv_bn_relu"]())
    assert all("0.0" not in group.consumers for group in graph.groups.values())


# --------------------------------------------------------------------------------------------------
# groups that must keep a channel


def minima(graph: Graph) -> dict[str, int]:
    return {name: group.minimum for name, group in graph.prunable.items()}


def test_group_that_would_cut_the_net_keeps_a_channel(traced: Any) -> None:
    assert set(minima(traced("conv_bn_relu")[2]).values()) == {1}


def test_inner_group_of_a_residual_block_may_close(traced: Any) -> None:
    expected = {"0.0": 1, "1.conv1": 0, "2.conv1": 0, "2.conv2": 1, "3.conv1": 0}
    assert minima(traced("residual_projection")[2]) == expected


def test_padding_of_a_trunk_may_close_but_not_the_trunk(traced: Any) -> None:
    found = minima(traced("residual_pad_lambda")[2])
    assert (found["0.0"], found["2.conv2"]) == (1, 0)


def test_one_of_several_branches_keeps_a_channel(traced: Any) -> None:
    found = minima(traced("aspp")[2])
    branches = [found[f"1.convs.{k}.0"] for k in range(3)] + [found["1.convs.3.project.0"]]
    assert sorted(branches) == [0, 0, 0, 1]


def test_every_output_is_reached(traced: Any) -> None:
    assert set(minima(traced("outputs_tuple")[2]).values()) == {1}
    assert set(minima(traced("shared_head")[2]).values()) == {1}


def test_input_still_reaches_every_output_when_all_that_may_close_has_closed(traced: Any) -> None:
    for name in ("inverted_residual", "unet_transpose", "inception", "densenet_list", "c2f_split"):
        model, inputs, graph = traced(name)
        plan = {g: list(range(group.minimum)) for g, group in graph.prunable.items()}
        small = pp.shrink(model, graph, plan).train()
        (x,) = (x.clone().requires_grad_() for x in inputs)
        small(x).square().sum().backward()
        assert float(x.grad.abs().max()) > 0, name


def test_auxiliary_head_that_runs_in_train_mode_is_followed(traced: Any) -> None:
    _, _, graph = traced("auxiliary_head")
    assert graph.groups["early.0"].consumers == ("late.0.0", "aux.0.0")
    assert not graph.groups["aux.0.0"].frozen
    assert graph.groups["aux.0.0"].minimum == 1
    assert graph.groups["aux.1.2"].reason.fact == "part of the model's output"


def test_model_that_cannot_run_in_train_mode_is_followed_in_eval_mode_with_a_note() -> None:
    class EvalOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = around(nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("targets are missing")
            return self.body(x)

    graph = pp.trace(EvalOnly(), images(2, 3, 8, 8))
    assert set(graph.prunable) == {"body.0.0", "body.2.0"}
    assert len(graph.notes) == 1
    assert "eval mode only" in graph.notes[0] and "targets are missing" in graph.notes[0]


# --------------------------------------------------------------------------------------------------
# without data, and other uses


@pytest.mark.parametrize("name", ["conv_bn_relu", "digits_resnet", "resnext", "unet_transpose"])
def test_model_on_the_meta_device_gives_the_same_groups_and_costs(name: str, traced: Any) -> None:
    model, inputs, graph = traced(name)
    abstract = copy.deepcopy(model).to("meta")
    looked = pp.trace(abstract, tree_map_only(Tensor, lambda x: x.to("meta"), inputs))
    assert looked.groups == graph.groups
    assert looked.cost.original() == graph.cost.original()
    assert all(p.is_meta for p in abstract.parameters())


def test_large_model_on_the_meta_device_is_traced_without_data() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4_000, 4_000) for _ in range(3)))
    graph = pp.trace(model, torch.empty(1, 4_000, device="meta"))
    assert graph.cost.original()["params"] == 3 * (4_000**2 + 4_000)
    assert [group.size for group in graph.prunable.values()] == [4_000, 4_000]


def test_default_device_of_the_user_does_not_matter() -> None:
    model, inputs = NETS["digits_resnet"]()
    expected = str(pp.trace(model, inputs))
    with torch.device("meta"):
        assert str(pp.trace(model, inputs)) == expected


@pytest.mark.parametrize(
    "name", ["conv_bn_relu", "digits_resnet", "resnet20", "depthwise_separable"]
)
def test_memory_format_does_not_matter(name: str, traced: Any) -> None:
    _, _, graph = traced(name)
    model, inputs = NETS[name]()
    model = model.double().to(memory_format=torch.channels_last)
    last = pp.trace(model, inputs[0].double().contiguous(memory_format=torch.channels_last))
    assert last.groups == graph.groups
    assert last.cost.original() == graph.cost.original()


def test_parameters_of_the_root_have_a_name_and_keep_the_net_together() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 6))
            self.second = nn.Parameter(torch.randn(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.first.T) @ self.second.T

    graph = pp.trace(Functional(), images(4, 6))
    (group,) = graph.prunable.values()
    assert group.size == 8
    assert group.minimum == 1
    assert group.name


def test_state_made_like_another_tensor_has_its_width() -> None:
    """A recurrent cell: `zeros_like(x)` is as wide as x, whatever it is added to later."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.new = (nn.Conv2d(16, 8, 3, padding=1) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros_like(x)
            for _ in range(2):
                both = torch.cat([state, x], 1)
                state = state + torch.sigmoid(self.gate(both)) * torch.tanh(self.new(both))
            return state

    model, x = around(Cell()).double(), images(2, 3, 8, 8).double()
    graph = pp.trace(model, x)
    rng = random.Random(0)
    for _ in range(5):
        plan = some_plan(graph, rng)
        assert pp.shrink(model, graph, plan)(x).shape == (2, 5)


def test_weight_that_two_layers_share_is_cut_and_gated_in_both() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)))

    model, x = around(Tied()).double(), images(2, 3, 8, 8).double()
    pruner = pruner_of(model, x)
    with torch.no_grad():
        for gate in pruner.gates.values():
            gate.alpha[1::2] = 0
    pruner.param_groups(lr=0.0)
    pruner.step()
    for gate in pruner.gates.values():
        gate.eps.fill_(0.1)
    small = pruner.export()
    assert difference(pruner.model, small, (x,), training=True) <= 1e-10


def test_frozen_weights_are_traced_like_any_other() -> None:
    model, inputs = NETS["digits_resnet"]()
    expected = pp.trace(model, inputs).groups
    model.requires_grad_(False)
    assert pp.trace(model, inputs).groups == expected


def test_weights_that_start_at_zero_do_not_hide_a_wrong_cut() -> None:
    """A residual branch whose last norm starts at 0 puts out nothing, whatever is cut in it."""
    model, inputs = around(BasicBlock(8, 8)).eval(), images(2, 3, 8, 8)
    nn.init.zeros_(model[1].bn2.weight)
    graph = pp.trace(model, inputs)
    assert {"0.0", "1.conv1"} <= set(graph.prunable)
    plan = {name: list(range(group.size // 2)) for name, group in graph.prunable.items()}
    masked = copy.deepcopy(model)
    with torch.no_grad():
        nn.init.ones_(masked[1].bn2.weight)
        masked[1].conv1.weight[:, 4:] = 0
        masked[1].conv2.weight[:, 4:] = 0
        masked[2][0].weight[:, 4:] = 0
        masked[3][2].weight[:, 5:] = 0
    small = pp.shrink(masked, graph, plan)
    assert difference(masked.double(), small.double(), (inputs.double(),), training=False) <= 1e-10


class Collector:
    """Stands for Python's garbage collector, and counts how often it is asked."""

    def __init__(self, frozen: int) -> None:
        self.frozen, self.asked = frozen, 0

    def get_freeze_count(self) -> int:
        self.asked += 1
        return self.frozen

    def freeze(self) -> None:
        self.frozen += 100

    def unfreeze(self) -> None:
        self.frozen = 0


def test_old_objects_are_excluded_from_garbage_collection_until_the_outermost_trace_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector, excluded = Collector(frozen=0), trace.OldObjects()
    monkeypatch.setattr(trace, "gc", collector)
    for _ in range(2):
        with excluded:
            with excluded:
                assert collector.frozen == 100
            assert collector.frozen == 100
        assert collector.frozen == 0


def test_objects_that_the_process_froze_stay_frozen_and_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector, excluded = Collector(frozen=7), trace.OldObjects()
    monkeypatch.setattr(trace, "gc", collector)
    for _ in range(3):
        with excluded:
            assert collector.frozen == 7
    assert (collector.frozen, collector.asked) == (7, 1)
