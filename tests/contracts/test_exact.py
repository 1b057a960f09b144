"""An export computes what the gated model computed, at the cost that it claims.

All comparisons are made here, in float64, without the library's own proof.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import polarprune as pp
from polarprune.gates.folding import plain
from tests.helpers.exact import (
    PRUNABLE,
    REFUSED,
    VARIANTS,
    counted,
    difference,
    memory,
    outputs,
    pruner_of,
    run,
    set_gates,
    start,
    started,
    traced,
)
from tests.helpers.nets import NETS, cbr, randomise

OUTPUT = "part of the model's output"

# Groups that stay whole without being outputs. All other nets are open but for their outputs.
WHOLE = {
    "spatial_attention": {"1.0": "mean mixes channels"},
    "cbam": {"0.0": "mean mixes channels"},
    "max_over_channels": {"1.0": "max mixes channels"},
    "layer_norm_flatten": {"0.1.0": "layer norm mixes channels"},
    "outputs_nested": {"logits.2": "_softmax mixes channels"},
    "group_norm_one": {"0": REFUSED["group_norm_one"], "3": REFUSED["group_norm_one"]},
    "layer_norm_linear": {"0": REFUSED["layer_norm_linear"], "3": REFUSED["layer_norm_linear"]},
}
# Norms whose channels were read by closed layers only: they stay, and get no gradient.
IDLE = {"densenet_list": ("norm1",)}


@dataclass(frozen=True)
class Case:
    gated: nn.Module
    small: nn.Module
    inputs: Any
    plan: dict[str, list[int]]
    claimed: dict[str, int]


@cache
def case(name: str, variant: str) -> Case:
    pruner = started(name)
    set_gates(pruner, VARIANTS[variant], f"{name} {variant}")
    small = pruner.export(verify=variant == "closed")  # the comparison is ours
    gated = copy.deepcopy(pruner.model)
    return Case(gated, small, pruner.example, pruner.plan(), pruner.cost())


every_case = pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name in PRUNABLE for variant in VARIANTS]
)
every_net = pytest.mark.parametrize("name", PRUNABLE)


# --------------------------------------------------------------------------------------------------
# equality and cost


@every_case
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_exported_model_equals_gated_model(name: str, variant: str, training: bool) -> None:
    this = case(name, variant)
    assert difference(this.gated, this.small, this.inputs, training=training) <= 1e-10


@every_case
def test_claimed_memory_is_what_is_there(name: str, variant: str) -> None:
    this = case(name, variant)
    assert memory(this.small, this.inputs) == this.claimed["memory"]


@every_case
def test_plan_has_the_widths_that_were_set(name: str, variant: str) -> None:
    """It may be less only where a group was read only by layers that were removed."""
    this, groups = case(name, variant), started(name).graph.prunable
    assert set(this.plan) == set(groups)
    widths = {g: len(kept) for g, kept in this.plan.items()}
    assert all(widths[g] >= group.minimum for g, group in groups.items())
    if variant != "random":
        assert widths == {g: VARIANTS[variant](group) for g, group in groups.items()}


@every_case
def test_claimed_cost_is_what_torch_counts(name: str, variant: str) -> None:
    this = case(name, variant)
    claimed = {key: this.claimed[key] for key in ("macs", "params")}
    assert counted(this.small, this.inputs) == claimed
    assert all(isinstance(value, int) for value in claimed.values())


@pytest.mark.parametrize("variant", ["half", "closed"])
@every_net
def test_kept_channels_have_the_same_running_statistics(name: str, variant: str) -> None:
    this = case(name, variant)
    gated, small = copy.deepcopy(this.gated).train(), copy.deepcopy(this.small).train()
    for model in (gated, small):
        run(model, this.inputs)
    before, after = dict(gated.named_buffers()), dict(small.named_buffers())
    assert {n for n in after if "running" in n} <= set(before)
    for buffer, kept in after.items():
        if "running" in buffer:
            gap = (kept[:, None] - before[buffer][None]).abs()
            assert len(kept) <= len(before[buffer])
            assert float(gap.amin(1).max()) <= 1e-12, buffer


@every_case
def test_no_empty_layer_is_left(name: str, variant: str) -> None:
    layers = (nn.modules.conv._ConvNd, nn.Linear)
    small = case(name, variant).small
    found = [module for module in small.modules() if isinstance(module, layers)]
    assert found
    assert [tuple(m.weight.shape) for m in found if 0 in m.weight.shape] == []


@every_case
def test_exported_model_has_no_gates(name: str, variant: str) -> None:
    small = case(name, variant).small
    assert not any(
        isinstance(m, pp.Gate) or hasattr(m, "parametrizations") for m in small.modules()
    )
    assert not any("alpha" in key for key in small.state_dict())


def loss_of(model: nn.Module, inputs: Any) -> Tensor:
    return sum((out - 1).square().mean() for out in tree_leaves(run(model, inputs)))


@every_case
def test_exported_model_trains(name: str, variant: str) -> None:
    this = case(name, variant)
    small = copy.deepcopy(this.small).train()
    loss = loss_of(small, this.inputs)
    loss.backward()
    idle = [key for key, p in small.named_parameters() if p.numel() and p.grad is None]
    assert all(key.rpartition(".")[0].endswith(IDLE.get(name, ())) for key in idle)
    weights = [p for p in small.parameters() if p.grad is not None]
    norm = torch.cat([p.grad.flatten() for p in weights]).norm()
    assert norm.isfinite() and norm > 0
    torch.optim.SGD(weights, lr=1e-4 / float(norm)).step()
    assert loss_of(small, this.inputs) < loss


@pytest.mark.parametrize("name", [*PRUNABLE[::4], "digits_resnet"])
def test_float32_export_proves_itself(name: str) -> None:
    pruner = start(name, torch.float32)
    for variant in ("half", "closed"):
        set_gates(pruner, VARIANTS[variant], f"{name} {variant}")
        small = pruner.export()
        assert pruner.proof.keys() > {"eval", "train", "other values"}
        assert max(pruner.proof.values()) <= 1e-5
        assert {p.dtype for p in small.parameters()} == {torch.float32}


# --------------------------------------------------------------------------------------------------
# gates


@every_net
def test_gates_that_are_one_change_nothing(name: str) -> None:
    original = NETS[name]()[0].double()
    pruner = started(name)
    set_gates(pruner, lambda group: group.size, name)
    for gate in pruner.gates.values():
        gate.eps.zero_()
    for training in (False, True):
        assert difference(original, pruner.model, pruner.example, training=training) <= 1e-14
    small = pruner.export()
    assert counted(small, pruner.example) == counted(original, pruner.example)


@every_net
def test_every_gate_is_felt_by_the_output(name: str) -> None:
    pruner = started(name)
    set_gates(pruner, lambda group: group.size, name)
    model = copy.deepcopy(pruner.model).train()
    loss_of(model, pruner.example).backward()
    slopes = {n: p.grad for n, p in model.named_parameters() if n.endswith("alpha")}
    assert len(slopes) == len(pruner.gates)
    assert all(float(slope.abs().max()) > 1e-9 for slope in slopes.values()), slopes


@pytest.mark.parametrize(
    "name", ["conv_bn_relu", "residual_pad_lambda", "resnext", "unet_interpolate"]
)
def test_export_leaves_the_gated_model_as_it_was(name: str) -> None:
    pruner = start(name)
    set_gates(pruner, VARIANTS["closed"], name)
    types = [type(module) for module in pruner.model.modules()]
    state = {key: value.clone() for key, value in pruner.model.state_dict().items()}
    before = outputs(pruner.model, pruner.example, training=True)
    first, second = pruner.export(), pruner.export()
    assert [type(module) for module in pruner.model.modules()] == types
    after = pruner.model.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(state[key], after[key]) for key in state)
    now = outputs(pruner.model, pruner.example, training=True)
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert difference(first, second, pruner.example, training=False) == 0


@every_net
def test_input_reaches_every_output_when_all_that_may_close_has_closed(name: str) -> None:
    pruner = started(name)
    plan = {group: [] for group, g in pruner.graph.prunable.items() if not g.minimum}
    small = pp.shrink(NETS[name]()[0].double(), pruner.graph, plan).train()
    inputs = tree_map_only(Tensor, lambda x: x.clone().requires_grad_(), pruner.example)
    for out in tree_leaves(run(small, inputs)):
        loss, leaves = out.square().sum(), tree_leaves(inputs)
        slopes = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        assert max(float(slope.abs().max()) for slope in slopes if slope is not None) > 0


# --------------------------------------------------------------------------------------------------
# the check can fail


@every_net
def test_comparison_sees_one_more_channel_dropped(name: str) -> None:
    pruner = started(name)
    set_gates(pruner, lambda group: -(-3 * group.size // 4), name)
    plan, folded = pruner.plan(), plain(pruner.model)
    right = pp.shrink(folded, pruner.graph, plan)
    assert difference(pruner.model, right, pruner.example, training=False) <= 1e-10
    widest = max(plan, key=lambda group: len(plan[group]))
    gaps = []
    for unit in plan[widest][:3]:  # ReLU may have silenced some
        left = [other for other in plan[widest] if other != unit]
        wrong = pp.shrink(folded, pruner.graph, {**plan, widest: left})
        gaps.append(difference(pruner.model, wrong, pruner.example, training=True))
    assert max(gaps) > 1e-3


@every_net
def test_comparison_sees_gates_that_were_not_folded_in(name: str) -> None:
    this, graph = case(name, "half"), started(name).graph
    original = NETS[name]()[0].double()
    wrong = pp.shrink(original, graph, this.plan)
    assert difference(this.gated, wrong, this.inputs, training=False) > 1e-3


# --------------------------------------------------------------------------------------------------
# code that channels are hard to follow through


def single_write(x: Tensor) -> Tensor:
    wide = torch.zeros(x.size(0), 12, *x.shape[2:], dtype=x.dtype)
    wide[:, :8] = x
    return wide


def striped(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :, ::2] = x[:, :, ::2]
    return out


# What happens to 8 channels, how many come out, how many units are open (None: none need be).
ODD: dict[str, tuple[Callable[[Tensor], Tensor], int, int | None]] = {
    "flip": (lambda x: x.flip(1), 8, 8),
    "roll": (lambda x: x.roll(1, 1), 8, None),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), 16, 8),
    "repeat interleave": (lambda x: x.repeat_interleave(2, 1), 16, 8),
    "cat with itself": (lambda x: torch.cat([x, -x], 1), 16, 8),
    "stack and flatten": (lambda x: torch.stack([x, 2 * x], 2).flatten(1, 2), 16, 8),
    "odd and even": (lambda x: x[:, 0::2] + x[:, 1::2], 4, None),
    "two halves": (lambda x: x[:, :4] + x[:, 4:], 4, None),
    "every second": (lambda x: x[:, ::2], 4, None),
    "the last": (lambda x: x[:, -4:], 4, 4),
    "narrow": (lambda x: x.narrow(1, 2, 4), 4, None),
    "one of them": (lambda x: x[:, 3:4] * x, 8, None),
    "three chunks": (lambda x: torch.cat(x.chunk(3, 1)[::-1], 1), 8, 8),
    "tensor split": (lambda x: torch.cat(torch.tensor_split(x, 3, 1)[::-1], 1), 8, None),
    "maxout": (lambda x: x.view(x.size(0), 4, 2, 8, 8).amax(2), 4, 4),
    "shift in time": (
        lambda x: torch.cat([x[:, :2].roll(1, 0), x[:, 2:4].roll(-1, 0), x[:, 4:]], 1),
        8,
        8,
    ),
    "pad": (lambda x: F.pad(x, (0, 0, 0, 0, 2, 3)), 13, 8),
    "pad with ones": (lambda x: F.pad(x, (0, 0, 0, 0, 2, 3), value=1.0), 13, 8),
    "cut by padding": (lambda x: F.pad(x, (0, 0, 0, 0, -2, 0)), 6, None),
    "space to depth": (lambda x: F.pixel_unshuffle(x, 2).flip(1), 32, 8),
    "write into a wider tensor": (single_write, 12, None),
    "write every second row": (striped, 8, 8),
    "constants by channel": (lambda x: x * torch.arange(8.0).to(x)[:, None, None], 8, None),
    "as strided": (lambda x: x.contiguous().as_strided(x.shape, x.stride()), 8, None),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), 8, 8),
    "standard deviation": (lambda x: x / (x.std((2, 3), keepdim=True) + 1), 8, 8),
    "softmax over space": (lambda x: x.flatten(2).softmax(-1).view(x.shape), 8, 8),
    "pixels by two indices": (lambda x: x[:, :, [0, 2, 4], [1, 3, 5]][..., None], 8, 8),
    "samples and columns by index": (
        lambda x: x[torch.arange(2)[:, None], :, :, torch.arange(4)].transpose(1, 2),
        8,
        8,
    ),
    "pixels by a mask": (lambda x: x[:, :, torch.eye(8) > 0][..., None], 8, None),
    "channels and rows by index": (lambda x: x[:, [0, 1, 2], [0, 1, 2]][..., None], 3, None),
    "add to rows": (lambda x: x.index_add(2, torch.tensor([0, 0, 3]), x[:, :, :3]), 8, 8),
    "add to rows of nothing": (
        lambda x: torch.zeros_like(x).index_add_(-1, torch.tensor([5, 0, 5]), x[..., :3]),
        8,
        8,
    ),
    "add to channels": (lambda x: x.index_add(1, torch.tensor([0, 0]), x[:, :2]), 8, None),
    "unsafe chunks": (lambda x: torch.cat(x.unsafe_chunk(2, 1)[::-1], 1), 8, None),
    "gram matrix": (lambda x: (x.flatten(2) @ x.flatten(2).mT)[..., None], 8, None),
}


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", ODD)
def test_odd_code_is_followed_exactly_or_stays_whole(name: str) -> None:
    function, channels, expected = ODD[name]
    torch.manual_seed(0)
    tail = cbr(channels, 10), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 5)
    model = randomise(nn.Sequential(cbr(3, 8), Apply(function), *tail)).eval().double()
    pruner = pruner_of(model, torch.randn(2, 3, 8, 8).double())
    opened = [group for group in pruner.graph.prunable.values() if "0.0" in group.producers]
    assert expected is None or sum(group.size for group in opened) == expected
    (after,) = (group for group in pruner.graph.prunable.values() if "2.0" in group.producers)
    assert (after.size, after.minimum) == (10, 1)
    for seed in range(4):
        set_gates(pruner, VARIANTS["random"], f"{name} {seed}")
        small = pruner.export()
        inputs = (pruner.example,)
        for training in (False, True):
            assert difference(pruner.model, small, inputs, training=training) <= 1e-10
        assert counted(small, inputs) == {key: pruner.cost()[key] for key in ("macs", "params")}


# --------------------------------------------------------------------------------------------------
# what is open


@pytest.mark.parametrize("name", REFUSED)
def test_net_without_prunable_channels_is_refused(name: str) -> None:
    model, inputs = NETS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(pp.PruneError, match="no prunable channels.*" + REFUSED[name]):
        pp.Pruner(model, inputs, lam=1.0, steps=1)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)


NOTES = {"c2f_chunk": ["1.c = 6"]}  # the forward does not read it, and two widths are 6


@pytest.mark.parametrize("name", NETS)
def test_only_outputs_and_listed_groups_stay_whole(name: str) -> None:
    graph = traced(name)
    whole = {group.name: group.reason for group in graph.groups.values() if group.frozen}
    listed = WHOLE.get(name, {})
    others = {group: reason.fact for group, reason in whole.items() if group not in listed}
    assert set(others.values()) == {OUTPUT}
    assert all(listed[group] in whole[group] for group in listed)
    assert [note.partition(":")[0] for note in graph.notes] == NOTES.get(name, [])
    assert graph.unknown == {}
    share = len(graph.prunable) / len(graph.groups)
    assert (share == 0) == (name in REFUSED)


@every_net
def test_closing_half_saves_macs_and_params(name: str) -> None:
    this = case(name, "half")
    whole = started(name).graph.cost.original()
    assert this.claimed["macs"] < 0.9 * whole["macs"]
    assert this.claimed["params"] < 0.9 * whole["params"]


# Worked out by hand: open group -> number of units.
BY_HAND = {
    # a chain: every width but the last
    "conv_bn_relu": {"0.0": 8, "1.0": 12, "2.0": 10},
    "conv_bias": {"0": 8, "2": 12, "4": 10},
    "mlp": {"0": 24, "2": 16},
    "conv_transpose": {"0.0": 8, "1.0": 12, "2.0": 10, "3.0": 6},
    # a depth-wise layer has no channels of its own
    "depthwise_separable": {"0.0": 8, "1.1.0": 12, "2.1.0": 16, "3.1.0": 16},
    "depthwise_multiplier": {"0.0": 6, "2.0": 10},
    "padding_reflect": {"0": 8, "3": 12},
    # one unit = the same place in every convolution group: 16 / 4 in and out
    "resnext": {
        "0.0": 12,
        "1.reduce.0": 4,
        "1.grouped.0": 4,
        "2.reduce.0": 4,
        "2.grouped.0": 4,
        "2.expand.0": 16,
    },
    "grouped_two_wide": {"0.0": 16 // 2, "1.0": 24 // 2, "2.0": 12},
    # 16 channels are made by 4 groups (4 units) and read by 2 (8 units): 4 are left
    "grouped_chain": {"0.0": 12 // 4, "1.0": 4, "2.0": 18 // 2, "3.0": 10},
    "conv_transpose_grouped": {"0.0": 12 // 2, "1.0": 8 // 2},
    # expand = 1 has no hidden width; the hidden width of the others is inner
    "inverted_residual": {"0.0": 8, "2.conv.0.0": 24, "2.conv.2.0": 12, "3.conv.0.0": 36},
    # trunk before and after the projection, one inner width a block
    "residual_projection": {"0.0": 6, "1.conv1": 6, "2.conv1": 12, "2.conv2": 12, "3.conv1": 12},
    "residual_preact": {"0.0": 6, "1.conv1": 6, "2.shortcut": 12, "2.conv1": 12, "3.conv1": 12},
    "bottleneck_projection": {
        "0.0": 8,
        "1.conv1": 4,
        "1.conv2": 4,
        "1.conv3": 16,
        "2.conv1": 4,
        "2.conv2": 4,
    },
    # option A: the 6 trunk channels go on, and the stage adds 12 - 6 of its own around them
    "residual_pad_lambda": {"0.0": 6, "1.conv1": 6, "2.conv1": 12, "2.conv2": 6, "3.conv1": 12},
    "residual_pad_cat_zeros": {"0.0": 6, "1.conv1": 6, "2.conv1": 12, "2.conv2": 6, "3.conv1": 12},
    # cat(x, 0 * x): the padding is made of the same channels
    "residual_pad_cat_mul": {"0.0": 6, "1.conv1": 6, "2.conv1": 12, "3.conv1": 12},
    "bottleneck_pad_lambda": {
        "0.0": 8,
        "1.conv1": 6,
        "1.conv2": 6,
        "1.conv3": 24 - 8,
        "2.conv1": 6,
        "2.conv2": 6,
    },
    "densenet_cat": {
        "0.0": 8,
        "1.layers.0.0": 4,
        "1.layers.1.0": 4,
        "1.layers.2.0": 4,
        "2.2": 10,
        "3.layers.0.0": 4,
        "3.layers.1.0": 4,
    },
    "parallel_sum": {"0.0": 8, "1.a.0": 12, "2.0": 10},
    "parallel_product": {"0.0": 8, "1.a.0": 12, "2.0": 10},
    # a norm group is one unit
    "group_norm_two": {"0": 2, "3": 2},
    "group_norm_four": {"0": 4, "3": 4},
    "group_norm_per_channel": {"0": 8, "3": 16},
    "se_conv": {"0.0": 12, "1.scale.1": 4, "2.0": 10},
    # a value and its gate are one unit
    "chunk_gate": {"0.0": 8, "1.0": 16 // 2, "3.0": 10},
    "glu_module": {"0.0": 8, "1.0": 16 // 2, "3.0": 10},
    "split_equal": {"0.0": 8, "1.0": 16 // 2, "3.0": 10},
    # parts with different readers are different groups
    "split_unequal": {"0.0": 4, "0.0#2": 8, "1.conv": 4, "2.0": 10},
    "slice_channels": {"0.0": 5, "0.0#2": 12 - 5, "1.left.0": 10},
    # chunk(2) must find the same boundary again: position k of both halves is one unit
    "c2f_chunk": {"0.0": 8, "1.cv1.0": 6, "1.m.0.0": 6, "1.m.1.0": 6, "1.cv2.0": 12},
    # sizes that are written down are rewritten: the halves are free
    "c2f_split": {"0.0": 8, "1.cv1.0": 6, "1.cv1.0#2": 6, "1.cv2.0": 12},
    # shuffled pairs (6 units), halved by chunk(2) (3 units)
    "shuffle_dynamic": {"0.0": 8, "1.branch1.1.0": 3, "1.branch2.0.0": 6, "2.branch2.0.0": 6},
    # channel c of 8 goes to places 2c and 2c + 1, read modulo 8: c and c + 4 are one unit
    "shuffle_module": {"0.0": 12 // 2, "1.0": 4, "3.0": 12 // 2, "4.0": 10},
    # 3 groups of 4, shuffled, are read as 3 groups of 4 again: 3 and 4 have no common divisor
    "shuffle_baked": {"0.0": 18 // 3, "1.compress.0": 1, "2.0": 10},
    # r² = 4 channels make one
    "pixel_shuffle": {"0.0": 8, "1": 24 // 4},
    "pixel_unshuffle": {"0.0": 6, "2.0": 10},
    # a unit of the flattened layer is a channel: 4 x 4 columns of the linear layer
    "flatten_module": {"0.0": 6, "1.0": 8, "4": 16},
    "flatten_view_baked": {"0.0": 6, "1.0": 8, "4": 16},
    "generator_baked": {"0": 8, "4.0": 6},
    "unet_transpose": {
        "down1.0": 6,
        "down2.0": 10,
        "middle.0": 16,
        "up2": 8,
        "dec2.0": 10,
        "up1": 6,
        "dec1.0": 6,
    },
    "aspp": {
        "0.0": 8,
        "1.convs.0.0": 6,
        "1.convs.1.0": 6,
        "1.convs.2.0": 6,
        "1.convs.3.project.0": 6,
        "1.project.0": 10,
    },
    "shared_conv": {"stem.0": 8, "tail.0.0": 12},
    "shared_head": {"stage1.0": 8, "stage2.0": 14, "lateral1": 10, "head.0.0": 12},
    "keyword_inputs": {"film": 24 // 2, "features.0.0": 8},
    "auxiliary_head": {"early.0": 10, "late.0.0": 12, "late.1.0": 12, "aux.0.0": 6},
    # one trunk through all stages: 16 channels, and what each stage adds
    "resnet20": {
        "0.0": 16,
        "4.conv2": 32 - 16,
        "7.conv2": 64 - 32,
        **{
            f"{block}.conv1": width
            for first, width in ((1, 16), (4, 32), (7, 64))
            for block in range(first, first + 3)
        },
    },
    "outputs_nested": {"body.0": 8},
    "spatial_attention": {"0.0": 8, "3.0": 10},
    "cbam": {"1.mlp.0": 4, "3.0": 10},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_open_groups_are_those_worked_out_by_hand(name: str) -> None:
    graph = traced(name)
    assert {group.name: group.size for group in graph.prunable.values()} == BY_HAND[name]


# Channels of a layer that one unit stands for, worked out by hand.
CHANNELS = [
    ("conv_bn_relu", "1.0.weight", 0, 12, 1),
    ("depthwise_multiplier", "1.0.weight", 0, 12, 2),
    ("resnext", "1.grouped.0.weight", 0, 16, 4),
    ("resnext", "1.grouped.0.weight", 1, 4, 1),
    ("group_norm_two", "3.weight", 0, 16, 8),
    ("chunk_gate", "1.0.weight", 0, 16, 2),
    ("pixel_shuffle", "1.weight", 0, 24, 4),
    ("pixel_shuffle", "3.weight", 0, 6, 1),
    ("pixel_unshuffle", "2.0.weight", 1, 24, 4),
    ("flatten_module", "4.weight", 1, 128, 16),
    ("generator_baked", "0.weight", 0, 128, 16),
    ("shuffle_dynamic", "1.branch1.1.0.weight", 0, 6, 2),
    ("residual_pad_cat_mul", "2.conv2.weight", 0, 12, 2),
]


@pytest.mark.parametrize(("name", "tensor", "axis", "size", "channels"), CHANNELS)
def test_unit_stands_for_the_channels_worked_out_by_hand(
    name: str, tensor: str, axis: int, size: int, channels: int
) -> None:
    this = case(name, "one")
    before = dict(NETS[name]()[0].named_parameters())[tensor].shape[axis]
    after = dict(this.small.named_parameters())[tensor].shape[axis]
    assert (before, after) == (size, channels)


def test_residual_branches_share_one_gate() -> None:
    graph = traced("residual_projection")
    assert graph.groups["0.0"].producers == ("0.0", "1.conv2")
    assert set(graph.groups["0.0"].consumers) == {"1.conv1", "2.conv1", "2.downsample.0"}
    assert set(graph.groups["2.conv2"].producers) == {"2.conv2", "2.downsample.0", "3.conv2"}


def test_option_a_trunk_runs_through_all_stages() -> None:
    graph = traced("resnet20")
    assert graph.groups["0.0"].producers == ("0.0", *(f"{k}.conv2" for k in range(1, 10)))
    assert graph.groups["4.conv2"].producers == tuple(f"{k}.conv2" for k in range(4, 10))
    assert graph.groups["7.conv2"].producers == tuple(f"{k}.conv2" for k in range(7, 10))


def test_depthwise_layer_makes_but_does_not_read_channels() -> None:
    group = traced("depthwise_separable").groups["0.0"]
    assert group.producers == ("0.0", "1.0.0")
    assert group.consumers == ("1.1.0",)
