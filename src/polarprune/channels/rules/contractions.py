"""Rules for operations that merge channels by a weight, or two sets of them: here gates act."""

from __future__ import annotations

import torch
from torch import Tensor

from ...tracing.tape import Op, Value
from ..labels import along, support
from ..propagation import Choice, Contraction, Flow
from .movement import merge


def convolution(flow: Flow, op: Op) -> None:
    source, weight, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    either = _in_blocks(flow, op) if groups == 1 else None
    beside = []  # channels on other axes, if every one of them is convolved by itself
    rows = either is not None  # do channels lie on both?
    for layer in (layer for layer in flow.layers(source) if layer is not either):
        others = tuple(axis for axis in support(layer) if axis != 1)
        if others and all(_apart(op, axis) for axis in others):  # else whole heads go
            beside.append(flow.labels.flatten_onto(layer, others))
            rows |= 1 in support(layer)
        elif 1 not in support(layer):
            flow.labels.freeze(layer, f"convolved along channels in {op.where}")
    incoming = None if rows else flow.on(source, 1)
    if either is not None:
        outgoing = flow.on(weight, 1 if transposed else 0)
        inner = flow.on(weight, 0 if transposed else 1)
        passed = _either(flow, op, either, 1, inner, outgoing)
    elif groups == 1:
        outgoing = _plain_convolution(flow, op, incoming, weight, transposed)
    else:
        outgoing = _grouped_convolution(flow, op, incoming, weight, transposed, groups)
    shift = flow.on(bias, 0) if isinstance(bias, Value) else None
    if shift is not None and outgoing is not None:
        flow.labels.join(shift, outgoing)
    out = op.outs[0]
    flow.contractions[-1].factors.extend(layer.flatten() for layer in beside)
    if either is not None:
        beside.append(passed)
    made = [] if outgoing is None else [along(outgoing, 1, len(out.shape))]
    flow.set(out, [*made, *beside])


def _in_blocks(flow: Flow, op: Op) -> Tensor | None:
    """Channels that vary along the axis of channels and along others, all convolved by themselves:
    what a pixel shuffle gives to a 1 x 1 convolution."""
    layers = [layer for layer in flow.layers(op.args[0]) if 1 in support(layer)]
    if len(layers) != 1 or not flow.pure(op.args[1]):
        return None
    others = [axis for axis in support(layers[0]) if axis != 1]
    return layers[0] if others and all(_apart(op, axis) for axis in others) else None


def _either(
    flow: Flow, op: Op, layer: Tensor, axis: int, inner: Tensor | None, outer: Tensor | None
) -> Tensor:
    """Leave open whether columns go or whole rows; gives the labels of the rows that go on."""
    assert inner is not None, "as wide as the axis along which the channels vary"
    known, place = layer.narrow(axis, 0, 1).unique(return_inverse=True)
    passed = flow.labels.fresh(len(known))[place]  # alike where the rows are
    outers = [] if outer is None else [outer]
    merging = Contraction(op, [inner, *outers, passed.flatten()], [inner], outers)
    flow.contractions.append(merging)
    flow.choices.append(Choice(merging, layer, axis, inner, passed))
    return passed


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
    if incoming is None and not flow.layers(op.args[0]):
        return _grouped_input(flow, op, lead, per_group, transposed, groups)
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
    if not transposed:
        return lead
    return None if per_group is None else per_group.repeat(groups)


def _grouped_input(
    flow: Flow,
    op: Op,
    lead: Tensor | None,
    per_group: Tensor | None,
    transposed: bool,
    groups: int,
) -> Tensor | None:
    """Groups that read the model's input stay; of what they make, the same columns of each go."""
    inner, made = (lead, per_group) if transposed else (per_group, lead)
    if inner is not None:
        flow.labels.freeze(inner, f"reads channels of unknown origin (or the input) in {op.where}")
    if made is not None and not transposed:
        rows = made.reshape(groups, -1)
        if rows.shape[1] == 1:
            flow.labels.freeze(made, f"one channel for each of the input in {op.where}")
        flow.labels.join(rows, rows[:1])
    makes = [] if made is None else [made]
    flow.contractions.append(Contraction(op, makes, [], makes))
    return made.repeat(groups) if transposed and made is not None else made


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
    if dim == 2 and _is_choice(flow, source, weight, inner):
        return _matmul_either(flow, op, source, weight, bias)
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


def _is_choice(flow: Flow, source: Value, weight: Value, inner: Tensor | None) -> bool:
    layers = flow.layers(source)
    return inner is not None and flow.pure(weight) and len(layers) == 1 and _of_heads(flow, source)


def _matmul_either(flow: Flow, op: Op, source: Value, weight: Value, bias: list[Value]) -> None:
    """A matrix whose rows and columns both vary, times a weight."""
    last = weight is op.args[-1] or op.args.index(source) < op.args.index(weight)
    axis = 1 if last else 0  # of the source, contracted
    inner, outer = flow.on(weight, 1 - axis), flow.on(weight, axis)
    passed = _either(flow, op, flow.layers(source)[0], axis, inner, outer)
    layers = [passed] if outer is None else [passed, along(outer, axis, 2)]
    flow.set(op.outs[0], layers)
    for value in bias:
        for layer in flow.layers(value):
            merge(flow, list(layers), layer.reshape((1,) * (2 - layer.dim()) + tuple(layer.shape)))


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
