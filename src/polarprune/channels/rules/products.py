"""Rules for products of activations: batched products, outer products and attention.

There is no weight here, so no gate acts on these operations. Entire heads are the units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...tracing.tape import Op, Value
from ..labels import support, with_leading_axes
from ..propagation import Contraction, Flow
from ..reasons import HEADS, POINTWISE, because
from .elementwise import merge


def outer_product(flow: Flow, op: Op, left: Value, right: Value) -> None:
    """A product that sums over one element: join batched channels, let the others pass."""
    kept = [layer for x in (left, right) for layer in flow.layers(x) if 0 not in support(layer)]
    batched = [[layer for layer in flow.layers(x) if 0 in support(layer)] for x in (left, right)]
    unmatched = batched[1]
    for layer in batched[0]:
        other = next((other for other in unmatched if _correspond(layer, other)), None)
        if other is not None:
            flow.labels.join(layer, other)
            kept.append(layer)
            unmatched = [rest for rest in unmatched if rest is not other]
        else:
            unmatched.append(layer)
    for layer in unmatched:
        flow.labels.freeze(layer, because(op, "batched product of channels", remedy=POINTWISE))
    vectors = [layer.flatten() for layer in kept]
    flow.add_contraction(Contraction(op, vectors, [], vectors))
    flow.set(op.outs[0], kept)


def _correspond(layer: Tensor, other: Tensor) -> bool:
    """Return True if two layers have the same shape and distinguish the same positions."""
    if layer.shape != other.shape:
        return False
    pairs = torch.stack([layer.flatten(), other.flatten()])
    return len(pairs.unique(dim=1).T) == len(layer.unique()) == len(other.unique())


def batched_product(flow: Flow, op: Op, left: Value, right: Value, bias: list[Value]) -> None:
    """A product of two activations for every head: join what is contracted within its head."""
    merged = list[Tensor]()
    for value, contracted in ((left, 2), (right, 1)):
        for layer in flow.layers(value):
            if contracted in support(layer):
                rest = tuple(axis for axis in support(layer) if axis != contracted)
                if not rest:
                    fact = "product of two sets of channels"
                    flow.labels.freeze(layer, because(op, fact, remedy=HEADS))
                    continue
                layer = flow.labels.flatten_onto(layer, rest)
            merge(flow, merged, layer)
    for value in bias:
        for layer in flow.layers(value):
            merge(flow, merged, with_leading_axes(layer, 3))
    _add_product(flow, op, merged)


def attention(flow: Flow, op: Op) -> None:
    """softmax(q kᵀ) v for every head: entire heads are the units."""
    dim = len(op.args[0].shape)
    merged: list[Tensor] = []
    for operand in op.args[:3]:
        for layer in flow.layers(operand):
            heads = _layer_of_heads(flow, op, layer, dim)
            if heads is not None:
                merge(flow, merged, heads)
    mask = op.kwargs.get("attn_mask", op.kwargs.get("attn_bias"))
    for layer in flow.layers(mask):
        layer = with_leading_axes(layer, dim)
        if dim - 3 in support(layer):
            merge(flow, merged, layer)
    _add_product(flow, op, [layer for layer in merged if support(layer) == (dim - 3,)])


def _layer_of_heads(flow: Flow, op: Op, layer: Tensor, dim: int) -> Tensor | None:
    """Return a layer of a query, key or value as it varies along heads, or freeze it."""
    if dim - 2 in support(layer):
        flow.labels.freeze(layer, because(op, "attention between channels", remedy=POINTWISE))
        return None
    if dim - 1 in support(layer):
        heads = tuple(axis for axis in support(layer) if axis < dim - 2)
        if not heads:
            flow.labels.freeze(layer, because(op, "attention over all channels", remedy=HEADS))
            return None
        layer = flow.labels.flatten_onto(layer, heads)
    if dim - 3 in support(layer):  # a key head that serves several queries is removed with them
        times = op.args[0].shape[dim - 3] // layer.shape[dim - 3]
        layer = layer.repeat_interleave(times, dim - 3)
    return layer


def _add_product(flow: Flow, op: Op, merged: list[Tensor]) -> None:
    """Record a product of at most two sets of channels, and freeze the others."""
    vectors = [layer.flatten() for layer in merged]
    for vector in vectors[2:]:
        fact = "product of several sets of channels"
        flow.labels.freeze(vector, because(op, fact, remedy=POINTWISE))
    flow.add_contraction(Contraction(op, vectors[:2], [], vectors[:2]))
    flow.set(op.outs[0], merged)
