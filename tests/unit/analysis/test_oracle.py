"""`trace` against brute force: no coupling is missed, and what is prunable can be removed.

The oracle disturbs one slice of one parameter at a time and sees what moves (`oracle.py`); it
shares no code with the engine. Groups may be coarser than what it finds, never finer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import polarprune as pp
from polarprune.channels.graph import Graph
from tests.helpers.nets import NETS, randomise
from tests.helpers.oracle import OUTPUT, Oracle, Slice

# One or two of each pattern: a network takes a second, as every slice is disturbed twice.
_CHOSEN = """
    conv_bias conv1d conv3d padding_circular prelu_channel instance_norm_affine_stats
    group_norm_one group_norm_two group_norm_no_affine conv_transpose conv_transpose_grouped
    depthwise_multiplier grouped_two_wide grouped_chain residual_pad_cat_zeros residual_preact
    bottleneck_projection layer_scale learned_additive densenet_cat inception unet_interpolate
    parallel_sum parallel_product c2f_chunk c2f_split se_linear_view spatial_attention cbam
    max_over_channels glu_functional split_unequal slice_channels shuffle_baked shuffle_module
    pixel_shuffle pixel_unshuffle flatten_view_baked pool_squeeze mlp_3d generator_dynamic
    layer_norm_flatten shared_conv shared_head keyword_inputs outputs_nested auxiliary_head
"""
MORE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}


def pattern(*shape: int) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a pattern that `nets` lacks: attention, tied weights, embeddings, recurrences."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make() -> tuple[nn.Module, Any]:
            torch.manual_seed(1)
            model = randomise(build()).eval()
            return model, (torch.randn(shape) if len(shape) == 3 else torch.randint(7, shape),)

        MORE[build.__name__] = make
        return build

    return register


class Net(nn.Module):
    def __init__(self, body: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def tokens(body: Callable[..., Tensor], **parts: Any) -> nn.Module:
    """Build a layer, the body with a skip connection, and a classifier."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.last((x + net.body_of(net, x)).mean(1))

    return Net(forward, body_of=body, first=nn.Linear(5, 6), last=nn.Linear(6, 3), **parts)


@pattern(3, 4, 5)
def heads_by_hand() -> nn.Module:
    def attend(net: Any, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (-1, 2)).transpose(1, 2) for f in (net.q, net.k, net.v))
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return net.out(y.transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(6, 6) for name in "qkv"}
    return tokens(attend, **layers, out=nn.Linear(6, 6))


@pattern(3, 4, 5)
def torchs_heads() -> nn.Module:
    attention = nn.MultiheadAttention(6, 3, batch_first=True)
    return tokens(lambda net, x: net.a(x, x, x, need_weights=False)[0], a=attention)


@pattern(3, 4, 5)
def grouped_queries() -> nn.Module:
    def attend(net: Any, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (-1, 2)).transpose(1, 2) for f in (net.q, net.k, net.v))
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return net.out(y.transpose(1, 2).flatten(2))

    return tokens(
        attend, q=nn.Linear(6, 8), k=nn.Linear(6, 4), v=nn.Linear(6, 4), out=nn.Linear(8, 6)
    )


@pattern(3, 4, 5)
def tied_to_its_transpose() -> nn.Module:
    return tokens(lambda net, x: F.linear(F.silu(net.a(x)), net.a.weight.t()), a=nn.Linear(6, 4))


@pattern(3, 4, 5)
def tied_layers() -> nn.Module:
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    two.weight = one.weight
    return tokens(lambda net, x: net.two(F.silu(net.one(x))), one=one, two=two)


@pattern(3, 4)
def embedding() -> nn.Module:
    parts = {"a": nn.Embedding(7, 6), "b": nn.Linear(6, 5), "c": nn.Linear(5, 3)}
    return Net(lambda net, x: net.c(F.gelu(net.b(net.a(x))).mean(1)), **parts)


@pattern(3, 4)
def embedding_tied_to_the_output() -> nn.Module:
    parts = {"a": nn.Embedding(7, 6), "b": nn.Linear(6, 6)}
    return Net(lambda net, x: F.linear(net.a(x) + net.b(net.a(x)), net.a.weight), **parts)


def recurrent(kind: type[nn.RNNBase], **settings: Any) -> nn.Module:
    layer = kind(5, 4, batch_first=True, **settings)
    width = settings.get("proj_size", 4) * (1 + settings.get("bidirectional", False))
    return Net(lambda net, x: net.b(net.a(x)[0].mean(1)), a=layer, b=nn.Linear(width, 3))


@pattern(3, 4, 5)
def lstm() -> nn.Module:
    return recurrent(nn.LSTM)


@pattern(3, 4, 5)
def lstm_of_two_layers() -> nn.Module:
    return recurrent(nn.LSTM, num_layers=2, bidirectional=True)


@pattern(3, 4, 5)
def lstm_with_projection() -> nn.Module:
    return recurrent(nn.LSTM, proj_size=3)


@pattern(3, 4, 5)
def gru() -> nn.Module:
    return recurrent(nn.GRU)


@pattern(3, 4, 5)
def einsum() -> nn.Module:
    weight = nn.Parameter(torch.randn(6, 4))
    back = nn.Parameter(torch.randn(4, 6))
    return tokens(
        lambda net, x: torch.einsum("btc,cd->btd", x, net.w).tanh() @ net.v, w=weight, v=back
    )


NAMES = [*_CHOSEN.split(), *MORE]


@cache
def known(name: str) -> tuple[nn.Module, Any, Oracle, Graph]:
    model, inputs = (NETS | MORE)[name]()
    model = model.double()
    inputs = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
    return model, inputs, Oracle(model, inputs), pp.trace(model, inputs)


def unit(graph: Graph, one: Slice) -> int:
    """Return the unit of `trace` that a slice of a parameter belongs to; -1 if it is frozen."""
    name, axis, index = one
    units = graph.axes.get(name, {}).get(axis)
    return -1 if units is None else int(units[index])


@pytest.mark.parametrize("name", NAMES)
def test_no_coupling_is_missed(name: str) -> None:
    _, _, oracle, graph = known(name)
    assert len(oracle.components()) > 1
    for together in oracle.components():
        slices = [one for one in together if one[0] in oracle.tensors]
        units = {unit(graph, one) for one in slices}
        assert units == {-1} if OUTPUT in together else len(units) == 1, (slices, units)


def output(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return tree_leaves(out)


def silenced(model: nn.Module, columns: set[Slice]) -> nn.Module:
    """Return a copy with zeros in these slices, with which layers read channels."""
    model = copy.deepcopy(model)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, axis, index in columns:
            tensors[name].select(axis, index).zero_()
    return model


@pytest.mark.parametrize("name", NAMES)
def test_what_is_prunable_can_be_removed(name: str) -> None:
    """Remove the first or last channel of a group, and compare with masking the oracle's slices."""
    model, inputs, oracle, graph = known(name)
    read = {column for item in oracle.contractions for column in item.columns}
    if None in read:
        pytest.skip("a grouped convolution has no slice for each channel that it reads")
    for group in graph.prunable.values():
        for index in {0, group.size - 1} if group.size > max(1, group.minimum) else set[int]():
            gone = [
                c
                for c in oracle.components()
                if any(unit(graph, one) == group.offset + index for one in c)
            ]
            if not gone:
                continue  # runs in train mode only
            columns = {one for c in gone for one in c if one in read}
            assert columns, f"{group.name}: nothing reads it"
            kept = [k for k in range(group.size) if k != index]
            small = pp.shrink(model, graph, {group.name: kept})
            for a, b in zip(
                output(silenced(model, columns), inputs), output(small, inputs), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_oracle_sees_what_is_not_there_to_be_read() -> None:
    """Against a coupling made up here: two layers summed, and one channel of a slice."""
    a, b, c = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 2)
    model = Net(lambda net, x: net.c((net.a(x) + net.b(x).flip(1)).tanh()), a=a, b=b, c=c)
    oracle = Oracle(model.double(), (torch.randn(8, 2, dtype=torch.float64),))
    found = next(part for part in oracle.components() if ("a.weight", 0, 0) in part)
    assert found == {
        ("a.weight", 0, 0),
        ("a.bias", 0, 0),
        ("b.weight", 0, 2),
        ("b.bias", 0, 2),
        ("c.weight", 1, 0),
    }
