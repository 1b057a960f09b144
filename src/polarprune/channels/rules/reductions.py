"""Rules for operations that compute one element from several: reductions, windows and norms."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ...tracing.tape import Op, Value
from ..labels import along, support, with_leading_axes
from ..propagation import Flow
from ..reasons import POINTWISE, because, mixes, unknown_origin

_WEIGHABLE = ("mean", "sum", "var", "var_mean", "linalg_vector_norm")

# --- reductions and windows -----------------------------------------------------------------------


def reduction(flow: Flow, op: Op) -> None:
    """Pass the labels along the axes that are not reduced, as for mean, sum, amax and softmax.

    Channels along an axis that is reduced are frozen.

    Args:
        flow: The labels of all tensors.
        op: The operation.

    Example:
        >>> from polarprune.rules import reduction
        >>> class Highest(torch.nn.Conv2d):
        ...     def forward(self, x):
        ...         return super().forward(x).amax((2, 3))
        >>> model = torch.nn.Sequential(Highest(3, 8, 3), torch.nn.Linear(8, 2))
        >>> rules = {torch.ops.aten.amax: reduction}
        >>> graph = pp.trace(model, torch.randn(1, 3, 6, 6), rules=rules)
        >>> {name: group.size for name, group in graph.prunable.items()}
        {'0': 8}
    """
    source = op.args[0]
    axes = _reduced_axes(op, source)
    kept = _passing(flow, op, source, lambda axis: axis not in axes)
    for out in op.outs:
        if len(out.shape) == len(source.shape):
            flow.set(out, kept)
        else:
            rest = tuple(axis for axis in range(len(source.shape)) if axis not in axes)
            flow.set(out, [layer.reshape([layer.shape[axis] for axis in rest]) for layer in kept])


def _passing(flow: Flow, op: Op, source: Value, passes: Callable[[int], bool]) -> list[Tensor]:
    """Return the layers as they vary along axes that pass, and freeze channels that are mixed.

    If a layer varies along reduced axes and others, it is joined along the reduced ones: entire
    rows can still be removed.
    """
    kept = []
    for layer in flow.layers(source):
        rest = tuple(axis for axis in support(layer) if passes(axis))
        if not rest:
            _weight_or_freeze(flow, op, layer)
            continue
        if len(rest) < len(support(layer)):
            layer = flow.labels.flatten_onto(layer, rest)
        kept.append(layer)
    return kept


def _weight_or_freeze(flow: Flow, op: Op, layer: Tensor) -> None:
    """Let gates weight a mean over channels, or freeze the channels."""
    if op.name not in _WEIGHABLE or not flow.weight_mean(op, layer):
        flow.labels.freeze(layer, mixes(op))
    elif "var" in op.name and _is_unbiased(op):  # undefined for a single channel
        why = f"{op.name} over channels in {op.where}"
        flow.require(layer, support(layer)[0], 2, why)


def _is_unbiased(op: Op) -> bool:
    names = [argument.name for argument in op.func._schema.arguments]
    given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    correction = given.get("correction", given.get("unbiased"))
    return correction is None or correction != 0


def _reduced_axes(op: Op, source: Value) -> set[int]:
    """Return the axes that are reduced: those of the argument `dim`, or all."""
    for position, argument in enumerate(op.func._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = op.kwargs.get(argument.name, argument.default_value)
            given = op.args[position] if position < len(op.args) else given
            if given is None or given == []:
                break
            listed = given if isinstance(given, (list, tuple)) else [given]
            return {source.axis(axis) for axis in listed}
    return set(range(len(source.shape)))


def window(flow: Flow, op: Op) -> None:
    """Pooling, interpolation, reflection padding: every channel is treated separately."""
    source = op.args[0]
    space = _spatial_axes(op)
    kept = _passing(flow, op, source, lambda axis: axis < len(source.shape) - space)
    for out in op.outs:
        flow.set(out, kept)


def unpool(flow: Flow, op: Op) -> None:
    """max_unpool: join the channels of the input with those of the indices."""
    axes = [len(value.shape) - 1 - _spatial_axes(op) for value in op.args[:2]]
    source, positions = (flow.on(value, axis) for value, axis in zip(op.args, axes, strict=False))
    if source is not None and positions is not None:
        flow.labels.join(source, positions)
    window(flow, op)


def patches(flow: Flow, op: Op) -> None:
    """im2col, col2im: each channel has one index along the axis for each element of the kernel."""
    source, out = op.args[0], op.outs[0]
    sizes = op.args[1] if op.name == "im2col" else op.args[2]
    axis = len(source.shape) - (3 if op.name == "im2col" else 2)
    for layer in flow.layers(source):
        if axis not in support(layer):
            flow.labels.freeze(layer, mixes(op))
    channels = flow.on(source, axis)
    if channels is None:
        return flow.set(out, [])
    if op.name == "im2col":
        channels = channels.repeat_interleave(math.prod(sizes))
    else:
        rows = channels.reshape(-1, math.prod(sizes))
        flow.labels.join(rows, rows[:, :1])
        channels = rows[:, 0]
    flow.set(out, [along(channels, axis, len(out.shape))])


def _spatial_axes(op: Op) -> int:
    """Return the number of spatial axes, from a name such as `avg_pool2d`."""
    return next(k for k in (1, 2, 3) if f"{k}d" in op.name)


def glu(flow: Flow, op: Op) -> None:
    """glu: join the first half of the channels with the second, which gates it."""
    source, out = op.args[0], op.outs[0]
    axis = source.axis(op.args[1] if len(op.args) > 1 else -1)
    kept = []
    for layer in flow.layers(source):
        if axis in support(layer):
            first, second = layer.chunk(2, axis)
            flow.labels.join(first, second)
            layer = first
        kept.append(layer)
    flow.set(out, kept)


# --- norms ----------------------------------------------------------------------------------------


def channel_norm(flow: Flow, op: Op) -> None:
    """Batch norm: join the channels with the weight, the bias and the running statistics."""
    source = op.args[0]
    if next((arg for arg in op.args if isinstance(arg, bool)), False):  # uses batch statistics
        for layer in flow.layers(source):
            if 1 not in support(layer):
                flow.labels.freeze(layer, mixes(op))
    channels = flow.on(source, 1)
    for value in op.args[1:5]:
        vector = flow.on(value, 0) if isinstance(value, Value) else None
        if vector is not None and channels is not None:
            flow.labels.join(vector, channels)
        elif vector is not None:
            tensor = flow.describe(source)
            flow.labels.freeze(vector, unknown_origin(op, f"{op.name} normalises", tensor))
    for out in op.outs:
        if len(out.shape) == len(source.shape):
            flow.set(out, flow.layers(source))
        elif channels is not None and out.shape == tuple(channels.shape):
            flow.set(out, [channels])


def group_norm(flow: Flow, op: Op) -> None:
    """Group norm: join the channels of each norm group, which share statistics."""
    source, groups = op.args[0], op.args[6]
    channels = flow.on(source, 1)
    if channels is not None:
        for value in op.args[1:3]:
            vector = flow.on(value, 0) if isinstance(value, Value) else None
            if vector is not None:
                flow.labels.join(vector, channels)
        rows = channels.reshape(groups, -1)
        if groups > 1:
            flow.labels.join(rows, rows[:, :1])
        elif not flow.weight_mean(op, along(channels, 1, len(source.shape))):
            fact = "group norm over all channels"
            flow.labels.freeze(channels, because(op, fact, remedy=POINTWISE))
    flow.set(op.outs[0], flow.layers(source))


def layer_norm(flow: Flow, op: Op) -> None:
    """Layer and RMS norm: let gates weight the mean over channels, or freeze the channels."""
    source = op.args[0]
    dim = len(source.shape)
    normalized = set(range(dim - len(op.args[1]), dim))
    layers, mixed = list[Tensor](), list[Tensor]()
    for layer in flow.layers(source):
        rest = tuple(axis for axis in support(layer) if axis not in normalized)
        if set(support(layer)) & normalized and rest:  # within a head: entire heads are removed
            layer = flow.labels.flatten_onto(layer, rest)
        elif set(support(layer)) & normalized:
            mixed.append(layer)
        layers.append(layer)
    scales = [
        with_leading_axes(layer, dim) for value in op.args[2:4] for layer in flow.layers(value)
    ]
    if len(mixed) == 1 and flow.weight_mean(op, mixed[0]):
        for layer in scales:
            if support(layer) == support(mixed[0]):
                flow.labels.join(layer, mixed[0])
    else:
        for layer in (*scales, *mixed):
            fact = "layer norm mixes channels"
            flow.labels.freeze(layer, because(op, fact, remedy=POINTWISE))
    flow.set(op.outs[0], layers)
