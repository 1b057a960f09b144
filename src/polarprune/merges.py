"""Rules for operations that mix elements: reductions, windows, norms and contractions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .flow import Contraction, Flow
from .labels import along, support
from .moves import merge
from .tape import Op, Value

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
            continue
        if not rest:
            flow.labels.freeze(layer, f"{op.name} mixes channels in {op.where}")
            continue
        if len(rest) < len(support(layer)):
            layer = flow.labels.flatten_onto(layer, rest)
        kept.append(layer)
    return kept


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
    if len(mixed) == len(normed) == 1 and flow.weigh(op, mixed[0]):
        for layer in scales:
            flow.labels.join(layer, mixed[0])
    else:
        for layer in (*scales, *mixed):
            flow.labels.freeze(layer, f"layer norm mixes channels in {op.where}")
    flow.set(op.outs[0], layers)


# --- contractions ---------------------------------------------------------------------------------


def convolution(flow: Flow, op: Op) -> None:
    source, weight, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    beside = []  # channels on other axes, if every one of them is convolved by itself
    for layer in flow.layers(source):
        others = tuple(axis for axis in support(layer) if axis != 1)
        if others and all(_apart(op, axis) for axis in others):  # else whole heads go
            beside.append(flow.labels.flatten_onto(layer, others))
        elif 1 not in support(layer):
            flow.labels.freeze(layer, f"convolved along channels in {op.where}")
    incoming = None if beside else flow.on(source, 1)
    if groups == 1:
        outgoing = _plain_convolution(flow, op, incoming, weight, transposed)
    else:
        outgoing = _grouped_convolution(flow, op, incoming, weight, transposed, groups)
    shift = flow.on(bias, 0) if isinstance(bias, Value) else None
    if shift is not None and outgoing is not None:
        flow.labels.join(shift, outgoing)
    out = op.outs[0]
    flow.contractions[-1].factors.extend(layer.flatten() for layer in beside)
    made = [] if outgoing is None else [along(outgoing, 1, len(out.shape))]
    flow.set(out, [*made, *beside])


def _apart(op: Op, axis: int) -> bool:
    """True for the batch, and along space for a kernel of one that visits every place."""
    if axis == 0:
        return True
    size, stride, padding = op.args[1].shape, op.args[3], op.args[4]
    step, pad = stride[(axis - 2) % len(stride)], padding[(axis - 2) % len(padding)]
    return bool(size[axis] == 1 and step == 1 and pad == 0)


def _plain_convolution(
    flow: Flow, op: Op, incoming: Tensor | None, weight: Value, transposed: bool
) -> Tensor | None:
    inner, outer = flow.on(weight, 0 if transposed else 1), flow.on(weight, 1 if transposed else 0)
    _meet(flow, op, incoming, inner, weight, [outer])
    return outer


def _grouped_convolution(
    flow: Flow, op: Op, incoming: Tensor | None, weight: Value, transposed: bool, groups: int
) -> Tensor | None:
    """Depth-wise: point-wise. Else whole groups go, or the same columns of every group."""
    lead, per_group = flow.on(weight, 0), flow.on(weight, 1)
    width = op.args[0].shape[1] // groups
    if lead is None or incoming is None:
        for vector in (lead, per_group, incoming):
            if vector is not None:
                flow.labels.freeze(vector, f"no channels to follow in {op.where}")
        flow.contractions.append(Contraction(op, [], [], []))
        return None
    rows, arriving = lead.reshape(groups, -1), incoming.reshape(groups, -1)
    out_rows = rows.shape[1] if not transposed else weight.shape[1]
    if width == 1 or groups >= width + out_rows:
        flow.labels.join(rows, arriving[:, :1])
        flow.labels.join(arriving, arriving[:, :1])
        if per_group is not None:
            flow.labels.freeze(per_group, "width of a convolution group")
        sites = [] if width == 1 else [lead]
        if sites and not flow.pure(weight):
            flow.labels.freeze(lead, f"merged by a computed weight in {op.where}")
            sites = []
        flow.contractions.append(Contraction(op, [lead], sites, [lead]))
        return rows[:, :1].expand(-1, out_rows).flatten() if transposed else lead
    flow.labels.join(rows, rows[:1])
    inner = lead if transposed else per_group
    if inner is None:
        flow.labels.freeze(incoming, f"no channels to follow in {op.where}")
    else:
        flow.labels.join(arriving, inner.reshape(groups, -1) if transposed else inner[None])
    factors = [lead] if per_group is None else [rows[0], per_group]
    outer = per_group if transposed else lead
    makes = [] if outer is None else [outer]
    sites = [] if inner is None else [inner]
    if sites and not flow.pure(weight):
        flow.labels.freeze(sites.pop(), f"merged by a computed weight in {op.where}")
    flow.contractions.append(Contraction(op, factors, sites, makes))
    return per_group.repeat(groups) if transposed and per_group is not None else lead


def matmul(flow: Flow, op: Op) -> None:
    """mm, addmm, bmm, baddbmm: the last axis of one operand against the first of the other."""
    *bias, left, right = op.args[:3] if "add" in op.name else op.args[:2]
    out = op.outs[0]
    dim = len(out.shape)
    if dim == 3 and left.shape[2] == 1 and not bias:
        return _outer(flow, op, left, right)
    if dim == 3 and not flow.pure(left) and not flow.pure(right):
        return _batched(flow, op, left, right, bias)
    weight, source = (right, left) if flow.pure(right) else (left, right)
    last, first = dim - 1, dim - 2  # of left and of right are contracted
    inner = flow.on(weight, first if weight is right else last)
    incoming = None
    if not _of_heads(flow, source):
        incoming = flow.on(source, last if weight is right else first)
    if inner is not None and _of_heads(flow, source):
        flow.labels.freeze(inner, f"reads a part of every head in {op.where}")
    rows, columns = flow.on(left, dim - 2), flow.on(right, dim - 1)
    outer = columns if weight is right else rows
    layers = [along(v, a, dim) for v, a in ((rows, dim - 2), (columns, dim - 1)) if v is not None]
    if dim == 3 and (batch := flow.on(source, 0)) is not None:
        flow.labels.freeze(batch, f"batched product of channels in {op.where}")
    _meet(flow, op, incoming, inner, weight, [outer])
    other = rows if weight is right else columns
    if other is not None:  # rows that carry channels too: a cost of degree three, if all are open
        flow.contractions[-1].factors.append(other)
    flow.set(out, layers)
    for value in bias:
        for layer in flow.layers(value):
            layer = layer.reshape((1,) * (dim - layer.dim()) + tuple(layer.shape))
            merge(flow, list(layers), layer)


def matvec(flow: Flow, op: Op) -> None:
    """mv, addmv, dot: the last axis of one operand against a vector; either may be the weight."""
    *bias, left, right = op.args[:3] if "add" in op.name else op.args[:2]
    weight, source = (right, left) if flow.pure(right) else (left, right)
    heads = len(source.shape) == 2 and _of_heads(flow, source)
    incoming, inner = (None if heads else flow.on(source, -1)), flow.on(weight, -1)
    if heads and inner is not None:
        flow.labels.freeze(inner, f"reads a part of every head in {op.where}")
    rows = flow.on(left, 0) if len(left.shape) == 2 else None
    _meet(flow, op, incoming, inner, weight, [rows if weight is left else None])
    if weight is right and rows is not None:
        flow.contractions[-1].factors.append(rows)
    flow.set(op.outs[0], [] if rows is None else [rows])
    for value in bias:
        for layer in flow.layers(value):
            merge(flow, list(flow.layers(op.outs[0])), layer)


def _of_heads(flow: Flow, value: Value) -> bool:
    """True if rows and columns both vary: heads that share a weight, and that go as a whole."""
    axes = {len(value.shape) - 2, len(value.shape) - 1}
    return any(axes <= set(support(layer)) for layer in flow.layers(value))


def _outer(flow: Flow, op: Op, left: Value, right: Value) -> None:
    """A sum over one element is a plain product: what is batched goes together, the rest passes."""
    kept = [layer for x in (left, right) for layer in flow.layers(x) if 0 not in support(layer)]
    batched = [[layer for layer in flow.layers(x) if 0 in support(layer)] for x in (left, right)]
    for layer in batched[0]:
        other = next((other for other in batched[1] if _alike(layer, other)), None)
        if other is not None:
            flow.labels.join(layer, other)
            kept.append(layer)
            batched[1] = [rest for rest in batched[1] if rest is not other]
        else:
            batched[1].append(layer)
    for layer in batched[1]:
        flow.labels.freeze(layer, f"batched product of channels in {op.where}")
    vectors = [layer.flatten() for layer in kept]
    flow.contractions.append(Contraction(op, vectors, [], vectors))
    flow.set(op.outs[0], kept)


def _alike(layer: Tensor, other: Tensor) -> bool:
    """True if both tell apart the same places: heads, say, and not layers by heads."""
    if layer.shape != other.shape:
        return False
    pairs = torch.stack([layer.flatten(), other.flatten()])
    return len(pairs.unique(dim=1).T) == len(layer.unique()) == len(other.unique())


def _batched(flow: Flow, op: Op, left: Value, right: Value, bias: list[Value]) -> None:
    """A product of two activations for every head: what is contracted goes with its whole head."""
    out, merged = op.outs[0], list[Tensor]()
    for value, contracted in ((left, 2), (right, 1)):
        for layer in flow.layers(value):
            if contracted in support(layer):
                rest = tuple(axis for axis in support(layer) if axis != contracted)
                if not rest:
                    flow.labels.freeze(layer, f"product of two sets of channels in {op.where}")
                    continue
                layer = flow.labels.flatten_onto(layer, rest)
            merge(flow, merged, layer)
    for value in bias:
        for layer in flow.layers(value):
            merge(flow, merged, layer.reshape((1,) * (3 - layer.dim()) + tuple(layer.shape)))
    _attend(flow, op, out, merged)


def attention(flow: Flow, op: Op) -> None:
    """softmax(q kᵀ) v for every head; heads are the units."""
    query, key, value = op.args[:3]
    dim = len(query.shape)
    merged: list[Tensor] = []
    for operand in (query, key, value):
        for layer in flow.layers(operand):
            if dim - 2 in support(layer):
                flow.labels.freeze(layer, f"attention between channels in {op.where}")
                continue
            if dim - 1 in support(layer):
                heads = tuple(axis for axis in support(layer) if axis < dim - 2)
                if not heads:
                    flow.labels.freeze(layer, f"attention over all channels in {op.where}")
                    continue
                layer = flow.labels.flatten_onto(layer, heads)
            if dim - 3 in support(layer):  # a key head that serves several queries goes with them
                times = query.shape[dim - 3] // layer.shape[dim - 3]
                layer = layer.repeat_interleave(times, dim - 3)
            merge(flow, merged, layer)
    mask = op.kwargs.get("attn_mask", op.kwargs.get("attn_bias"))
    for layer in flow.layers(mask):
        layer = layer.reshape((1,) * (dim - layer.dim()) + tuple(layer.shape))
        if dim - 3 in support(layer):
            merge(flow, merged, layer)
    _attend(flow, op, op.outs[0], [layer for layer in merged if support(layer) == (dim - 3,)])


def _attend(flow: Flow, op: Op, out: Value, merged: list[Tensor]) -> None:
    vectors = [layer.flatten() for layer in merged]
    if len(vectors) > 2:
        for vector in vectors[2:]:
            flow.labels.freeze(vector, f"product of several sets of channels in {op.where}")
    flow.contractions.append(Contraction(op, vectors[:2], [], vectors[:2]))
    flow.set(out, merged)


def _meet(
    flow: Flow,
    op: Op,
    incoming: Tensor | None,
    inner: Tensor | None,
    weight: Value,
    outer: list[Tensor | None],
) -> None:
    """Incoming channels against the input axis of a weight: joined, and a place for a gate."""
    outers = [vector for vector in outer if vector is not None]
    if incoming is None and any(flow.uniform(v) for v in op.inputs() if v is not weight):
        incoming = inner  # zeros to begin with: as many as are wanted
    if inner is None or incoming is None:
        for vector in (inner, incoming):
            if vector is not None:
                reason = f"merged with a tensor that has no channels to follow in {op.where}"
                if vector is inner:
                    reason = f"reads channels of unknown origin (or the input) in {op.where}"
                flow.labels.freeze(vector, reason)
        flow.contractions.append(Contraction(op, outers, [], outers))
        return
    flow.labels.join(incoming, inner)
    if not flow.pure(weight):
        flow.labels.freeze(inner, f"merged by a computed weight in {op.where}")
        flow.contractions.append(Contraction(op, [inner, *outers], [], outers))
        return
    flow.contractions.append(Contraction(op, [inner, *outers], [inner], outers))
