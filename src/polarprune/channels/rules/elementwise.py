"""Rules for operations that treat every element separately, and for new tensors."""

from __future__ import annotations

from torch import Tensor

from ...tracing.tape import Op, Value
from ..labels import support, with_leading_axes
from ..propagation import Flow
from ..reasons import because, unlabelled


def pointwise(flow: Flow, op: Op) -> None:
    """Join the labels of operands that vary along the same axis, element by element.

    Args:
        flow: The labels of all tensors.
        op: The operation.

    Example:
        >>> from polarprune.rules import pointwise
        >>> class Squashed(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x).erfc()
        >>> model = torch.nn.Sequential(Squashed(4, 8), torch.nn.Linear(8, 2))
        >>> rules = {torch.ops.aten.erfc: pointwise}
        >>> graph = pp.trace(model, torch.randn(1, 4), rules=rules)
        >>> {name: group.size for name, group in graph.prunable.items()}
        {'0': 8}
    """
    operands = op.inputs()
    dim = max((len(out.shape) for out in op.outs), default=0)
    merged: list[Tensor] = []
    for value in operands:
        for layer in flow.layers(value):
            merge(flow, merged, with_leading_axes(layer, dim))
    for value in operands:
        if flow.is_uniform(value):
            _take_labels(flow, value, merged)
        else:
            merged = freeze_unlabelled(flow, op, value, merged, dim)
    for out in op.outs:
        flow.set(out, merged)
        if all(flow.is_uniform(value) for value in operands):
            flow.mark_uniform(out)


def merge(flow: Flow, merged: list[Tensor], layer: Tensor) -> None:
    """Join `layer` with the layer in `merged` that shares an axis with it, or append it."""
    for i, other in enumerate(merged):
        if set(support(other)) & set(support(layer)):
            wide, narrow = (other, layer) if other.numel() >= layer.numel() else (layer, other)
            if set(support(narrow)) < set(support(wide)):
                flow.join_later(wide, narrow)
            else:
                flow.labels.join(wide, narrow)
            merged[i] = wide
            return
    merged.append(layer)


def merge_bias(flow: Flow, layers: list[Tensor], bias: Value, dim: int) -> None:
    """Join the labels of a bias with the layers of the result that it is added to."""
    for layer in flow.layers(bias):
        merge(flow, list(layers), with_leading_axes(layer, dim))


def _take_labels(flow: Flow, value: Value, merged: list[Tensor]) -> None:
    """Give a uniform tensor the labels of the operands that it is broadcast with."""
    own = flow.layers(value)
    free = [size > 1 for size in value.shape]
    for axis in (axis for layer in own for axis in support(layer)):
        free[axis] = False
    found = []
    for layer in merged:
        more = layer.dim() - len(free)
        if all(axis >= more and free[axis - more] for axis in support(layer)):
            found.append(layer.reshape(layer.shape[more:]))
    if found:
        flow.set(value, [*own, *found])


def freeze_unlabelled(
    flow: Flow, op: Op, value: Value, merged: list[Tensor], dim: int
) -> list[Tensor]:
    """Freeze channels that meet a tensor which varies along their axis but has no labels there.

    Such a tensor could not be cut together with the channels. If a layer varies along other axes
    too, its labels are joined along the tensor's axes: entire rows can still be removed, because
    the tensor is the same for each of them.

    Returns:
        The layers to continue with.
    """
    remaining = []
    shape = (1,) * (dim - len(value.shape)) + value.shape
    known = {axis + dim - len(value.shape) for own in flow.layers(value) for axis in support(own)}
    for layer in merged:
        fixed = {axis for axis in support(layer) if shape[axis] > 1 and axis not in known}
        rest = tuple(axis for axis in support(layer) if axis not in fixed)
        if fixed and not rest:
            flow.labels.freeze(layer, unlabelled(op, flow.describe(value)))
            continue
        if fixed:
            flow.labels.flatten_onto(layer, rest)
        remaining.append(layer)
    return remaining


# --- new tensors, and writes into tensors ---------------------------------------------------------


def create(flow: Flow, op: Op) -> None:
    """zeros, ones, full, randn: the result is uniform."""
    for out in op.outs:
        flow.mark_uniform(out)


def create_like(flow: Flow, op: Op) -> None:
    """zeros_like, ones_like, …: the result is uniform and has the labels of the argument."""
    create(flow, op)
    flow.set(op.outs[0], flow.layers(op.args[0]))


def fill(flow: Flow, op: Op) -> None:
    """zero_, fill_, normal_, …: the target keeps its labels."""


def write(flow: Flow, op: Op) -> None:
    """copy_: a write into part of a new tensor labels all of it, if the layers fit its shape."""
    target, source = op.args[:2]
    pointwise(flow, op)
    base = target.base
    if base is None or not flow.is_uniform(base) or flow.layers(base):
        return
    if all(fits(layer, base.shape) for layer in flow.layers(source)):
        flow.set(base, flow.layers(source))
    else:
        detail, tensor = f"{op.name} into", flow.describe(base)
        remedy = "build the tensor with torch.cat instead"
        fact = "written into part of another tensor"
        flow.freeze(source, because(op, fact, detail=detail, tensor=tensor, remedy=remedy))
        flow.unmark_uniform(base)


def fits(layer: Tensor, shape: tuple[int, ...]) -> bool:
    """Return True if the layer could belong to a tensor of this shape."""
    return layer.dim() == len(shape) and all(
        a in (1, b) for a, b in zip(layer.shape, shape, strict=True)
    )
