"""Rules for operations that mix elements: reductions, windows and norms."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ...tracing.tape import Op, Value
from ..labels import along, support
from ..propagation import AtLeast, Flow

# --- reductions and windows -----------------------------------------------------------------------


def reduction(flow: Flow, op: Op) -> None:
    """Over axes along which labels do not vary: they stay. Over whole rows: the row is the unit."""
    source = op.args[0]
    axes = _axes_of(op, source)
    kept = _left(flow, op, source, lambda axis: axis not in axes)
    for out in op.outs:
        if len(out.shape) == len(source.shape):
            flow.set(out, kept)
        else:
            rest = tuple(axis for axis in range(len(source.shape)) if axis not in axes)
            flow.set(out, [layer.reshape([layer.shape[axis] for axis in rest]) for layer in kept])


def _left(flow: Flow, op: Op, source: Value, untouched: Callable[[int], bool]) -> list[Tensor]:
    """The layers as they vary along axes that the operation does not run over."""
    kept = []
    for layer in flow.layers(source):
        rest = tuple(axis for axis in support(layer) if untouched(axis))
        if not rest and op.name in _WEIGHABLE and flow.weigh(op, layer):
            if "var" in op.name and _unbiased(op):  # there is none of one channel
                why = f"{op.name} over channels in {op.where}"
                flow.at_least.append(AtLeast(layer, support(layer)[0], 2, why))
            continue
        if not rest:
            flow.labels.freeze(layer, f"{op.name} mixes channels in {op.where}")
            continue
        if len(rest) < len(support(layer)):
            layer = flow.labels.flatten_onto(layer, rest)
        kept.append(layer)
    return kept


def _unbiased(op: Op) -> bool:
    names = [argument.name for argument in op.func._schema.arguments]
    given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    correction = given.get("correction", given.get("unbiased"))
    return correction is None or correction != 0


_WEIGHABLE = ("mean", "sum", "var", "var_mean", "linalg_vector_norm")


def _axes_of(op: Op, source: Value) -> set[int]:
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
    """Pooling, interpolation, reflection: works on each channel of (batch, channel, space...)."""
    source = op.args[0]
    space = _space(op)
    kept = _left(flow, op, source, lambda axis: axis < len(source.shape) - space)
    for out in op.outs:
        flow.set(out, kept)


def unpool(flow: Flow, op: Op) -> None:
    """Every channel back to the places it came from."""
    source, places = (flow.on(value, len(value.shape) - 1 - _space(op)) for value in op.args[:2])
    if source is not None and places is not None:
        flow.labels.join(source, places)
    window(flow, op)


def patches(flow: Flow, op: Op) -> None:
    """im2col and back: beside every channel stand its neighbours, as many as the kernel has."""
    source, out = op.args[0], op.outs[0]
    sizes = op.args[1] if op.name == "im2col" else op.args[2]
    axis = len(source.shape) - (3 if op.name == "im2col" else 2)
    for layer in flow.layers(source):
        if axis not in support(layer):
            flow.labels.freeze(layer, f"{op.name} mixes channels in {op.where}")
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


def _space(op: Op) -> int:
    name = op.name
    return next(k for k in (1, 2, 3) if f"{k}d" in name)


def glu(flow: Flow, op: Op) -> None:
    """The first half gated by the second."""
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
    """Batch norm and its relatives: every channel by itself, but all that it has together."""
    source = op.args[0]
    if next((arg for arg in op.args if isinstance(arg, bool)), False):  # with batch statistics
        for layer in flow.layers(source):
            if 1 not in support(layer):
                flow.labels.freeze(layer, f"{op.name} mixes channels in {op.where}")
    channels = flow.on(source, 1)
    for value in op.args[1:5]:
        vector = flow.on(value, 0) if isinstance(value, Value) else None
        if vector is not None and channels is not None:
            flow.labels.join(vector, channels)
        elif vector is not None:
            flow.labels.freeze(vector, f"normalises channels of unknown origin in {op.where}")
    for out in op.outs:
        if len(out.shape) == len(source.shape):
            flow.set(out, flow.layers(source))
        elif channels is not None and out.shape == tuple(channels.shape):
            flow.set(out, [channels])


def group_norm(flow: Flow, op: Op) -> None:
    """Statistics are shared by the channels of a norm group: these go together."""
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
        elif not flow.weigh(op, along(channels, 1, len(source.shape))):
            flow.labels.freeze(channels, f"group norm over all channels in {op.where}")
    flow.set(op.outs[0], flow.layers(source))


def layer_norm(flow: Flow, op: Op) -> None:
    source = op.args[0]
    dim = len(source.shape)
    normed = set(range(dim - len(op.args[1]), dim))
    layers, mixed = list[Tensor](), list[Tensor]()
    for layer in flow.layers(source):
        rest = tuple(axis for axis in support(layer) if axis not in normed)
        if set(support(layer)) & normed and rest:  # within a head: whole heads go
            layer = flow.labels.flatten_onto(layer, rest)
        elif set(support(layer)) & normed:
            mixed.append(layer)
        layers.append(layer)
    scales = [
        layer.reshape((1,) * (dim - layer.dim()) + tuple(layer.shape))
        for value in op.args[2:4]
        for layer in flow.layers(value)
    ]
    if len(mixed) == 1 and flow.weigh(op, mixed[0]):
        for layer in scales:  # along the other axes that are normalised they stay
            if support(layer) == support(mixed[0]):
                flow.labels.join(layer, mixed[0])
    else:
        for layer in (*scales, *mixed):
            flow.labels.freeze(layer, f"layer norm mixes channels in {op.where}")
    flow.set(op.outs[0], layers)
