"""Rules for operations that merge channels by a weight: convolutions and matrix products.

The input axis of the weight is where a gate acts (a site of a `Contraction`).
"""

from __future__ import annotations

from torch import Tensor

from ...tracing.tape import Op, Value
from ..labels import along, support
from ..propagation import Choice, Contraction, Flow
from ..reasons import HEADS_AS_WHOLE, ORIGIN, POINTWISE, Reason, because, for_origin, unknown_origin
from .elementwise import merge_bias
from .products import batched_product, outer_product

# --- convolutions ---------------------------------------------------------------------------------


def convolution(flow: Flow, op: Op) -> None:
    """Convolutions of all kinds: join incoming channels with the input axis of the weight."""
    source, weight, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    in_blocks = _layer_in_blocks(flow, op) if groups == 1 else None
    others, crossed = _other_channels(flow, op, in_blocks)
    incoming = None if crossed else flow.on(source, 1)
    passed = []
    if in_blocks is not None:
        outgoing = flow.on(weight, 1 if transposed else 0)
        inner = flow.on(weight, 0 if transposed else 1)
        passed = [_choose_later(flow, op, in_blocks, 1, inner, outgoing)]
    elif groups == 1:
        outgoing = _plain_convolution(flow, op, incoming, weight, transposed)
    else:
        outgoing = _grouped_convolution(flow, op, incoming)
    shift = flow.on(bias, 0) if isinstance(bias, Value) else None
    if shift is not None and outgoing is not None:
        flow.labels.join(shift, outgoing)
    out = op.outs[0]
    flow.add_factors(layer.flatten() for layer in others)
    made = [] if outgoing is None else [along(outgoing, 1, len(out.shape))]
    flow.set(out, [*made, *others, *passed])


def _other_channels(flow: Flow, op: Op, in_blocks: Tensor | None) -> tuple[list[Tensor], bool]:
    """Return the layers on axes along which the kernel does not mix, and freeze mixed channels.

    Returns:
        The layers along other axes than that of channels; and whether some layer varies along the
        axis of channels and along such axes.
    """
    found, crossed = [], in_blocks is not None
    for layer in (layer for layer in flow.layers(op.args[0]) if layer is not in_blocks):
        others = tuple(axis for axis in support(layer) if axis != 1)
        if others and all(_is_separate(op, axis) for axis in others):  # else remove entire heads
            found.append(flow.labels.flatten_onto(layer, others))
            crossed |= 1 in support(layer)
        elif 1 not in support(layer):
            flow.labels.freeze(layer, because(op, "convolved along channels", remedy=POINTWISE))
    return found, crossed


def _layer_in_blocks(flow: Flow, op: Op) -> Tensor | None:
    """Return the layer that varies along channels and along axes the kernel does not mix.

    A pixel shuffle followed by a 1 x 1 convolution creates one.
    """
    layers = [layer for layer in flow.layers(op.args[0]) if 1 in support(layer)]
    if len(layers) != 1 or not flow.is_weight(op.args[1]):
        return None
    others = [axis for axis in support(layers[0]) if axis != 1]
    return layers[0] if others and all(_is_separate(op, axis) for axis in others) else None


def _is_separate(op: Op, axis: int) -> bool:
    """Return True for the batch, and for spatial axes with kernel 1, stride 1 and no padding."""
    if axis == 0:
        return True
    size, stride, padding = op.args[1].shape, op.args[3], op.args[4]
    step, pad = stride[(axis - 2) % len(stride)], padding[(axis - 2) % len(padding)]
    return bool(size[axis] == 1 and step == 1 and pad == 0)


def _plain_convolution(
    flow: Flow, op: Op, incoming: Tensor | None, weight: Value, transposed: bool
) -> Tensor | None:
    inner, outer = flow.on(weight, 0 if transposed else 1), flow.on(weight, 1 if transposed else 0)
    _contract(flow, op, incoming, inner, weight, outer)
    return outer


def _grouped_convolution(flow: Flow, op: Op, incoming: Tensor | None) -> Tensor | None:
    """Remove entire groups, or the same channels of every group, whichever leaves more choices."""
    source, weight, transposed, groups = op.args[0], op.args[1], op.args[6], op.args[8]
    first, second = flow.on(weight, 0), flow.on(weight, 1)
    if incoming is None and not flow.layers(source):
        return _grouped_input(flow, op, first, second)
    if first is None or incoming is None:
        for vector in (first, second, incoming):
            if vector is not None:
                flow.labels.freeze(vector, _unknown_origin(flow, op, source))
        flow.add_contraction(Contraction(op, [], [], []))
        return None
    width = source.shape[1] // groups
    made = weight.shape[1] if transposed else len(first) // groups
    if width == 1 or groups >= width + made:
        return _entire_groups(flow, op, incoming, first, second)
    return _same_channels_of_every_group(flow, op, incoming, first, second)


def _grouped_input(
    flow: Flow, op: Op, first: Tensor | None, second: Tensor | None
) -> Tensor | None:
    """Freeze groups that read the model's input. Join channel k of the outputs of all groups."""
    transposed, groups = op.args[6], op.args[8]
    inner, made = (first, second) if transposed else (second, first)
    if inner is not None:
        flow.labels.freeze(inner, _unknown_origin(flow, op, op.args[0]))
    if made is not None and not transposed:
        rows = made.reshape(groups, -1)
        if rows.shape[1] == 1:
            fact, tensor = (
                "makes one channel for each channel of its input",
                flow.describe(op.args[0]),
            )
            reason = because(op, fact, detail=f"{op.name} of", tensor=tensor, remedy=ORIGIN)
            flow.labels.freeze(made, reason)
        flow.labels.join(rows, rows[:1])
    makes = [] if made is None else [made]
    flow.add_contraction(Contraction(op, makes, [], makes))
    return made.repeat(groups) if transposed and made is not None else made


def _entire_groups(
    flow: Flow, op: Op, incoming: Tensor, first: Tensor, second: Tensor | None
) -> Tensor:
    """Join all channels of a group. A depth-wise convolution has groups of one channel."""
    weight, transposed, groups = op.args[1], op.args[6], op.args[8]
    rows, arriving = first.reshape(groups, -1), incoming.reshape(groups, -1)
    flow.labels.join(rows, arriving[:, :1])
    flow.labels.join(arriving, arriving[:, :1])
    if second is not None:
        fact = "inside of a group of a convolution, of which all channels are pruned together"
        tensor, remedy = flow.describe(weight), "use groups=1 to prune single channels"
        flow.labels.freeze(second, because(op, fact, tensor=tensor, remedy=remedy))
    sites = [] if arriving.shape[1] == 1 else _sites(flow, op, first, weight)
    flow.add_contraction(Contraction(op, [first], sites, [first]))
    return rows[:, :1].expand(-1, weight.shape[1]).flatten() if transposed else first


def _same_channels_of_every_group(
    flow: Flow, op: Op, incoming: Tensor, first: Tensor, second: Tensor | None
) -> Tensor | None:
    """Join channel k of every group, for incoming and outgoing channels."""
    weight, transposed, groups = op.args[1], op.args[6], op.args[8]
    rows, arriving = first.reshape(groups, -1), incoming.reshape(groups, -1)
    flow.labels.join(rows, rows[:1])
    inner, outer = (first, second) if transposed else (second, first)
    if inner is None:
        flow.labels.freeze(incoming, _unknown_weight(flow, op, weight))
    else:
        flow.labels.join(arriving, inner.reshape(groups, -1) if transposed else inner[None])
    factors = [first] if second is None else [rows[0], second]
    sites = [] if inner is None else _sites(flow, op, inner, weight)
    makes = [] if outer is None else [outer]
    flow.add_contraction(Contraction(op, factors, sites, makes))
    if not transposed:
        return first
    return None if second is None else second.repeat(groups)


def _sites(flow: Flow, op: Op, inner: Tensor, weight: Value) -> list[Tensor]:
    """Return the input axis as a site. No gate can act on a weight that is computed: freeze."""
    if flow.is_weight(weight):
        return [inner]
    flow.labels.freeze(inner, _computed_weight(flow, op, weight))
    return []


def _computed_weight(flow: Flow, op: Op, weight: Value) -> Reason:
    remedy = "compute the weight with torch.nn.utils.parametrize"
    return because(
        op,
        "merged by a computed weight",
        detail=f"{op.name} with",
        tensor=flow.describe(weight),
        remedy=remedy,
    )


# --- matrix products ------------------------------------------------------------------------------


def matmul(flow: Flow, op: Op) -> None:
    """mm, addmm, bmm, baddbmm: contract the last axis of one operand with one of the other."""
    *bias, left, right = op.args[:3] if "add" in op.name else op.args[:2]
    out = op.outs[0]
    dim = len(out.shape)
    if dim == 3 and left.shape[2] == 1 and not bias:
        return outer_product(flow, op, left, right)
    if dim == 3 and not flow.is_weight(left) and not flow.is_weight(right):
        return batched_product(flow, op, left, right, bias)
    weight, source = (right, left) if flow.is_weight(right) else (left, right)
    inner = flow.on(weight, dim - 2 if weight is right else dim - 1)
    if dim == 2 and _is_choice(flow, source, weight, inner):
        return _matmul_in_blocks(flow, op, source, weight, bias)
    incoming = None
    if not _has_heads(flow, source):
        incoming = flow.on(source, dim - 1 if weight is right else dim - 2)
    elif inner is not None:
        flow.labels.freeze(inner, because(op, "reads a part of every head", remedy=HEADS_AS_WHOLE))
    rows, columns = flow.on(left, dim - 2), flow.on(right, dim - 1)
    layers = [along(v, a, dim) for v, a in ((rows, dim - 2), (columns, dim - 1)) if v is not None]
    if dim == 3 and (batch := flow.on(source, 0)) is not None:
        flow.labels.freeze(batch, because(op, "batched product of channels", remedy=POINTWISE))
    outer, other = (columns, rows) if weight is right else (rows, columns)
    _contract(flow, op, incoming, inner, weight, outer, source)
    if other is not None:  # rows carry channels too: the cost has degree three
        flow.add_factors([other])
    flow.set(out, layers)
    for value in bias:
        merge_bias(flow, layers, value, dim)


def matvec(flow: Flow, op: Op) -> None:
    """mv, addmv, dot: contract the last axis with a vector. Either operand may be the weight."""
    *bias, left, right = op.args[:3] if "add" in op.name else op.args[:2]
    weight, source = (right, left) if flow.is_weight(right) else (left, right)
    heads = len(source.shape) == 2 and _has_heads(flow, source)
    incoming, inner = (None if heads else flow.on(source, -1)), flow.on(weight, -1)
    if heads and inner is not None:
        flow.labels.freeze(inner, because(op, "reads a part of every head", remedy=HEADS_AS_WHOLE))
    rows = flow.on(left, 0) if len(left.shape) == 2 else None
    _contract(flow, op, incoming, inner, weight, rows if weight is left else None, source)
    if weight is right and rows is not None:
        flow.add_factors([rows])
    flow.set(op.outs[0], [] if rows is None else [rows])
    for value in bias:
        merge_bias(flow, flow.layers(op.outs[0]), value, len(op.outs[0].shape))


def _has_heads(flow: Flow, value: Value) -> bool:
    """Return True if a layer varies along rows and columns, as for heads that share a weight."""
    axes = {len(value.shape) - 2, len(value.shape) - 1}
    return any(axes <= set(support(layer)) for layer in flow.layers(value))


# --- a weight that reads channels in blocks -------------------------------------------------------


def _is_choice(flow: Flow, source: Value, weight: Value, inner: Tensor | None) -> bool:
    """Return True if either columns or rows of a matrix can be removed where a weight reads it."""
    one = inner is not None and flow.is_weight(weight) and len(flow.layers(source)) == 1
    return one and _has_heads(flow, source)


def _matmul_in_blocks(flow: Flow, op: Op, source: Value, weight: Value, bias: list[Value]) -> None:
    """Multiply a weight by a matrix whose labels vary along rows and columns."""
    last = weight is op.args[-1] or op.args.index(source) < op.args.index(weight)
    axis = 1 if last else 0  # of the source, contracted
    inner, outer = flow.on(weight, 1 - axis), flow.on(weight, axis)
    passed = _choose_later(flow, op, flow.layers(source)[0], axis, inner, outer)
    layers = [passed] if outer is None else [passed, along(outer, axis, 2)]
    flow.set(op.outs[0], layers)
    for value in bias:
        merge_bias(flow, layers, value, 2)


def _choose_later(
    flow: Flow, op: Op, layer: Tensor, axis: int, inner: Tensor | None, outer: Tensor | None
) -> Tensor:
    """Record a `Choice` between columns and rows, and return the labels of the rows that pass."""
    assert inner is not None, "as wide as the axis along which the channels vary"
    known, position = layer.narrow(axis, 0, 1).unique(return_inverse=True)
    passed = flow.labels.fresh(len(known))[position]  # equal where the rows are equal
    outers = [] if outer is None else [outer]
    merging = Contraction(op, [inner, *outers, passed.flatten()], [inner], outers)
    flow.add_choice(Choice(merging, layer, axis, inner, passed))
    return passed


# --- where a gate acts ----------------------------------------------------------------------------


def _contract(
    flow: Flow,
    op: Op,
    incoming: Tensor | None,
    inner: Tensor | None,
    weight: Value,
    outer: Tensor | None,
    source: Value | None = None,
) -> None:
    """Join incoming channels with the input axis of a weight, and record the contraction.

    Args:
        flow: The labels.
        op: The operation.
        incoming: Labels of the incoming channels.
        inner: Labels along the input axis of the weight.
        weight: The weight.
        outer: Labels along the output axis of the weight.
        source: The other operand; the first argument of the operation unless given.
    """
    outers = [] if outer is None else [outer]
    if incoming is None and any(flow.is_uniform(v) for v in op.inputs() if v is not weight):
        incoming = inner  # zeros, such as an initial state, fit any width
    if inner is None or incoming is None:
        if inner is not None:
            flow.labels.freeze(inner, _unknown_origin(flow, op, source or op.args[0]))
        if incoming is not None:
            flow.labels.freeze(incoming, _unknown_weight(flow, op, weight))
        flow.add_contraction(Contraction(op, outers, [], outers))
        return
    flow.labels.join(incoming, inner)
    sites = _sites(flow, op, inner, weight)
    flow.add_contraction(Contraction(op, [inner, *outers], sites, outers))


def _unknown_origin(flow: Flow, op: Op, source: Value) -> Reason:
    return unknown_origin(op, "reads", flow.describe(source), detail=f"{op.name} of")


def _unknown_weight(flow: Flow, op: Op, weight: Value) -> Reason:
    """Return the reason for channels that a weight merges along an axis without labels."""
    tensor = flow.describe(weight)
    fact = "merged with a tensor that has no known channels"
    remedy = for_origin(tensor, POINTWISE)
    return because(op, fact, detail=f"{op.name} with", tensor=tensor, remedy=remedy)
