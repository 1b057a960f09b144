"""What each operation means for labels. One rule a kind of operation, one table at the end.

A rule is a function `(flow, op) -> None` that reads the layers of the operation's inputs
(`flow.layers`), joins or freezes labels, and sets the layers of its outputs (`flow.set`).
An operation without a rule freezes what it touches: nothing is ever cut on a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from . import labels as lab
from .labels import Labels, along, compress, support
from .tape import Op, Tape, Value

aten = torch.ops.aten
Rule = Callable[["Flow", Op], None]


@dataclass(eq=False)
class Contraction:
    """An operation that merges channels.

    `factors` are the label vectors whose live shares scale its MACs; `sites` are the label vectors,
    belonging to a weight, at which a gate silences the incoming channels; `makes` are the channels
    that come out (none: a single one, which stays).
    """

    op: Op
    factors: list[Tensor]
    sites: list[Tensor]
    makes: list[Tensor]


@dataclass(eq=False)
class Flow:
    """Labels on their way through a tape."""

    labels: Labels
    rules: Mapping[Any, Rule]
    contractions: list[Contraction] = field(default_factory=list)
    baked: list[tuple[Op, Tensor]] = field(default_factory=list)  # numbers that count channels
    wide: list[Tensor] = field(default_factory=list)  # layers that vary along several axes
    unknown: dict[str, str] = field(default_factory=dict)  # operation -> where
    _layers: dict[Value, list[Tensor]] = field(default_factory=dict)
    _tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    _uniform: set[Value] = field(default_factory=set)
    _weights: set[Value] = field(default_factory=set)  # parameters that were moved about

    def run(self, tape: Tape) -> None:
        for op in tape.ops:
            rule = self.rules.get(op.func) or self.rules.get(op.func._overloadpacket) or _default
            rule(self, op)
        for value in tape.outputs:
            self.freeze(value, "part of the model's output")

    def layers(self, value: Any) -> list[Tensor]:
        if not isinstance(value, Value):
            return []
        if value not in self._layers:
            self._layers[value] = self._of_tensor(value) if value.name else []
        return self._layers[value]

    def _of_tensor(self, value: Value) -> list[Tensor]:
        if value.name not in self._tensors:
            self._tensors[value.name] = self.labels.of_tensor(value.name, value.shape)
        return self._tensors[value.name]

    def set(self, value: Value, layers: Iterable[Tensor]) -> None:
        kept = []
        for layer in layers:
            if support(layer):
                kept.append(layer)
                if len(support(layer)) > 1:
                    self.wide.append(layer)
            else:
                self.labels.freeze(layer, "a single channel is picked out of its group")
        self._layers[value] = kept

    def on(self, value: Any, axis: int) -> Tensor | None:
        """The layer that varies along this axis, joined along all its other axes."""
        axis %= max(len(value.shape), 1)
        for layer in self.layers(value):
            if axis in support(layer):
                return self.labels.flatten_onto(layer, (axis,)).flatten()
        return None

    def freeze(self, value: Any, reason: str) -> None:
        for layer in self.layers(value):
            self.labels.freeze(layer, reason)

    def uniform(self, value: Any) -> bool:
        """True for zeros, ones, noise: every channel is like every other, so any may go."""
        return value in self._uniform

    def pure(self, value: Any) -> bool:
        """True for a parameter, moved about at most: scaling it scales what is computed with it."""
        if value.name:
            return ".parametrizations." not in value.name
        return value in self._weights


# --- point-wise -----------------------------------------------------------------------------------


def pointwise(flow: Flow, op: Op) -> None:
    """Operands that vary along the same axis are joined there, element by element."""
    operands = op.inputs()
    dim = max((len(out.shape) for out in op.outs), default=0)
    merged: list[Tensor] = []
    for value in operands:
        for layer in flow.layers(value):
            layer = layer.reshape((1,) * (dim - layer.dim()) + tuple(layer.shape))
            _merge(flow, merged, layer)
    for value in operands:
        if not flow.uniform(value):
            _check_unlabelled(flow, op, value, merged, dim)
    for out in op.outs:
        flow.set(out, merged)
        if all(flow.uniform(value) for value in operands):
            flow._uniform.add(out)


def _merge(flow: Flow, merged: list[Tensor], layer: Tensor) -> None:
    """Join `layer` with those in `merged` that vary along an axis of its own, or add it."""
    for i, other in enumerate(merged):
        if set(support(other)) & set(support(layer)):
            flow.labels.join(other, layer)
            if len(support(layer)) > len(support(other)):
                merged[i] = layer
            return
    merged.append(layer)


def _check_unlabelled(flow: Flow, op: Op, value: Value, merged: list[Tensor], dim: int) -> None:
    """A tensor of unknown origin that varies along a labelled axis could not be cut with it."""
    shape = (1,) * (dim - len(value.shape)) + value.shape
    known = {axis + dim - len(value.shape) for own in flow.layers(value) for axis in support(own)}
    for layer in merged:
        if any(shape[axis] > 1 and axis not in known for axis in support(layer)):
            reason = f"meets a tensor that is no parameter and has no channels, in {op.where}"
            flow.labels.freeze(layer, reason)


# --- movement -------------------------------------------------------------------------------------


def movement(flow: Flow, op: Op) -> None:
    """Elements change place, not value: do the same to the labels."""
    source = op.args[0]
    results: list[list[Tensor]] = [[] for _ in op.outs]
    for layer in flow.layers(source):
        args = (layer.expand(source.shape), *op.args[1:])
        args, kwargs = tree_map_only(Value, lambda value: value.data, (args, op.kwargs))
        moved = tree_leaves(op.func(*args, **{k: v for k, v in kwargs.items() if k != "dtype"}))
        for result, piece in zip(results, moved, strict=True):
            result.append(compress(piece))
    _moved(flow, op, source, results)


def _moved(flow: Flow, op: Op, source: Value, results: list[list[Tensor]]) -> None:
    for out, result in zip(op.outs, results, strict=True):
        flow.set(out, result)
        if flow.uniform(source):
            flow._uniform.add(out)
        if flow.pure(source):
            flow._weights.add(out)


def cut(flow: Flow, op: Op) -> None:
    """slice, split_with_sizes: part of an axis, by numbers that count channels."""
    source = op.args[0]
    position = next(i for i, a in enumerate(op.func._schema.arguments) if a.name == "dim")
    axis = op.args[position] if len(op.args) > position else op.kwargs.get("dim", 0)
    axis %= len(source.shape)
    for layer in flow.layers(source):
        if axis in support(layer) and op.outs[0].shape[axis] != source.shape[axis]:
            flow.baked.append((op, layer))
            if _short(op) == "slice" and len(op.args) > 4 and op.args[4] != 1:
                flow.labels.freeze(layer, f"every {op.args[4]}th channel is taken in {op.where}")
    movement(flow, op)


def roll(flow: Flow, op: Op) -> None:
    """Fine along other axes; along channels the first would depend on which the last is."""
    source = op.args[0]
    axes = {axis % len(source.shape) for axis in (op.args[2] if len(op.args) > 2 else ())}
    for layer in flow.layers(source):
        if not axes or axes & set(support(layer)):
            flow.labels.freeze(layer, f"channels are rolled in {op.where}")
    movement(flow, op)


def restride(flow: Flow, op: Op) -> None:
    """as_strided: the same tensor if only axes of size 1 get other strides (channels last)."""
    source, size, stride = op.args[:3]
    same_place = tuple(size) == source.shape and all(
        n == 1 or a == b for n, a, b in zip(source.shape, source.stride, stride, strict=True)
    )
    if same_place and len(op.args) == 3:
        return same(flow, op)
    flow.freeze(source, f"memory is read in another order in {op.where}")


def same(flow: Flow, op: Op) -> None:
    """A copy, a cast, an alias."""
    source = op.args[0]
    _moved(flow, op, source, [flow.layers(source) for _ in op.outs])


def view(flow: Flow, op: Op) -> None:
    source, out = op.args[0], op.outs[0]
    moved = [lab.reshape(layer, source.shape, out.shape) for layer in flow.layers(source)]
    _moved(flow, op, source, [moved])


def split(flow: Flow, op: Op) -> None:
    """Pieces of equal size stay of equal size, so that `chunk(2)` finds the same boundary again."""
    source = op.args[0]
    axis = (op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0)) % len(source.shape)
    movement(flow, op)
    sizes = {out.shape[axis] for out in op.outs}
    for layer in flow.layers(source):
        if axis in support(layer):
            if len(sizes) > 1:
                flow.baked.append((op, layer))
            else:
                rows = layer.unflatten(axis, (len(op.outs), -1))
                flow.labels.join(rows, rows.narrow(axis, 0, 1))


def cat(flow: Flow, op: Op) -> None:
    """Side by side along one axis; there, a part without labels gets labels of its own."""
    parts = [part for part in op.args[0] if part.shape != (0,)]
    out = op.outs[0]
    axis = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % len(out.shape)
    crossing: list[Tensor] = []
    pieces = []
    for part in parts:
        piece = None
        for layer in flow.layers(part):
            if axis in support(layer):
                piece = layer
            else:
                _merge(flow, crossing, layer)
        pieces.append(piece)
    if any(piece is not None for piece in pieces):
        crossing.append(_lay_side_by_side(flow, op, parts, pieces, axis))
    for part in parts:
        if not flow.uniform(part):
            others = [layer for layer in crossing if axis not in support(layer)]
            _check_unlabelled(flow, op, part, others, len(out.shape))
    flow.set(out, crossing)


def _lay_side_by_side(
    flow: Flow, op: Op, parts: list[Value], pieces: list[Tensor | None], axis: int
) -> Tensor:
    laid = []
    for part, piece in zip(parts, pieces, strict=True):
        if piece is None:
            piece = along(flow.labels.fresh(part.shape[axis]), axis, len(part.shape))
            if flow.uniform(part):
                flow.set(part, [*flow.layers(part), piece])
            else:
                flow.labels.freeze(piece, f"joined with channels of unknown origin in {op.where}")
        laid.append(piece)
    dim = len(parts[0].shape)
    sizes = [max(piece.shape[k] for piece in laid) for k in range(dim)]
    full = [piece.expand([-1 if k == axis else sizes[k] for k in range(dim)]) for piece in laid]
    return torch.cat(full, axis)


def stack(flow: Flow, op: Op) -> None:
    """Along a new axis: the parts are joined, the new axis is whole."""
    out = op.outs[0]
    axis = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % len(out.shape)
    merged: list[Tensor] = []
    for part in op.args[0]:
        for layer in flow.layers(part):
            _merge(flow, merged, layer)
    for part in op.args[0]:
        if not flow.uniform(part):
            _check_unlabelled(flow, op, part, merged, len(part.shape))
    flow.set(out, [layer.unsqueeze(axis) for layer in merged])


def pad(flow: Flow, op: Op) -> None:
    """New elements get labels of their own, which then join with whatever they meet."""
    source, out = op.args[0], op.outs[0]
    amounts = op.args[1]
    moved = []
    for layer in flow.layers(source):
        for axis in support(layer):
            place = 2 * (layer.dim() - 1 - axis)
            before, after = (*amounts[place : place + 2], 0, 0)[:2]
            if before or after:
                if before < 0 or after < 0 or len(support(layer)) > 1:
                    flow.labels.freeze(layer, f"padded across channels in {op.where}")
                    continue
                ends = [along(flow.labels.fresh(n), axis, layer.dim()) for n in (before, after)]
                flow.baked.append((op, layer))
                layer = torch.cat([ends[0], layer, ends[1]], axis)
        moved.append(layer)
    _moved(flow, op, source, [[x for x in moved if _fits(x, out.shape)]])


def _fits(layer: Tensor, shape: tuple[int, ...]) -> bool:
    return layer.dim() == len(shape) and all(
        a in (1, b) for a, b in zip(layer.shape, shape, strict=True)
    )


def pick(flow: Flow, op: Op) -> None:
    """Indexing by a tensor: fine along other axes, not followed along channels."""
    source = op.args[0]
    for layer in flow.layers(source):
        flow.labels.freeze(layer, f"channels are picked by index in {op.where}")


def pick_along(flow: Flow, op: Op) -> None:
    """index_select: one axis is indexed, the others pass."""
    source, axis = op.args[0], op.args[1] % len(op.args[0].shape)
    kept = []
    for layer in flow.layers(source):
        if axis in support(layer):
            flow.labels.freeze(layer, f"channels are picked by index in {op.where}")
        else:
            kept.append(layer)
    _moved(flow, op, source, [kept])


def embedding(flow: Flow, op: Op) -> None:
    weight, out = op.args[0], op.outs[0]
    vector = flow.on(weight, 1)
    flow.set(out, [] if vector is None else [along(vector, len(out.shape) - 1, len(out.shape))])


def create(flow: Flow, op: Op) -> None:
    """Zeros, ones, constants, noise."""
    flow._uniform.update(op.outs)


def create_like(flow: Flow, op: Op) -> None:
    """The same, as wide as another tensor."""
    create(flow, op)
    flow.set(op.outs[0], flow.layers(op.args[0]))


def fill(flow: Flow, op: Op) -> None:
    """Overwrites its target with one value or with noise; the target keeps its labels."""


def write(flow: Flow, op: Op) -> None:
    """copy_: a write into part of a fresh tensor labels the whole of it, where that is possible."""
    target, source = op.args[:2]
    pointwise(flow, op)
    base = target.base
    if base is None or not flow.uniform(base) or flow.layers(base):
        return
    if all(_fits(layer, base.shape) for layer in flow.layers(source)):
        flow.set(base, flow.layers(source))
    else:
        flow.freeze(source, f"written into part of another tensor in {op.where}")


# --- reductions and windows -----------------------------------------------------------------------


def reduction(flow: Flow, op: Op) -> None:
    """Over axes along which labels do not vary: they stay. Over whole rows: the row is the unit."""
    source = op.args[0]
    axes = _axes_of(op, len(source.shape))
    kept = []
    for layer in flow.layers(source):
        rest = tuple(axis for axis in support(layer) if axis not in axes)
        if not rest:
            flow.labels.freeze(layer, f"{_short(op)} mixes channels in {op.where}")
            continue
        if len(rest) < len(support(layer)):
            layer = flow.labels.flatten_onto(layer, rest)
        kept.append(layer)
    for out in op.outs:
        if len(out.shape) == len(source.shape):
            flow.set(out, kept)
        else:
            rest = tuple(axis for axis in range(len(source.shape)) if axis not in axes)
            flow.set(out, [layer.reshape([layer.shape[axis] for axis in rest]) for layer in kept])


def _axes_of(op: Op, dim: int) -> set[int]:
    for position, argument in enumerate(op.func._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = op.kwargs.get(argument.name, argument.default_value)
            given = op.args[position] if position < len(op.args) else given
            if given is None or given == []:
                break
            return {axis % dim for axis in (given if isinstance(given, (list, tuple)) else [given])}
    return set(range(dim))


def window(flow: Flow, op: Op) -> None:
    """Pooling, interpolation, reflection: works on each channel of (batch, channel, space...)."""
    source = op.args[0]
    space = _space(op)
    kept = []
    for layer in flow.layers(source):
        rest = tuple(axis for axis in support(layer) if axis < layer.dim() - space)
        if not rest:
            flow.labels.freeze(layer, f"{_short(op)} runs across channels in {op.where}")
            continue
        if len(rest) < len(support(layer)):
            layer = flow.labels.flatten_onto(layer, rest)
        kept.append(layer)
    for out in op.outs:
        flow.set(out, kept)


def _space(op: Op) -> int:
    name = _short(op)
    return next(k for k in (1, 2, 3) if f"{k}d" in name)


def glu(flow: Flow, op: Op) -> None:
    """The first half gated by the second."""
    source, out = op.args[0], op.outs[0]
    axis = (op.args[1] if len(op.args) > 1 else -1) % len(source.shape)
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
    """Batch norm and its relatives: every channel by itself."""
    source = op.args[0]
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
        flow.labels.join(rows, rows[:, :1])
        if groups == 1:
            flow.labels.freeze(channels, f"group norm over all channels in {op.where}")
    flow.set(op.outs[0], flow.layers(source))


def layer_norm(flow: Flow, op: Op) -> None:
    source = op.args[0]
    normed = set(range(len(source.shape) - len(op.args[1]), len(source.shape)))
    for layer in flow.layers(source):
        if set(support(layer)) & normed:
            flow.labels.freeze(layer, f"layer norm mixes channels in {op.where}")
    for value in op.args[2:4]:
        flow.freeze(value, f"layer norm mixes channels in {op.where}")
    flow.set(op.outs[0], flow.layers(source))


# --- contractions ---------------------------------------------------------------------------------


def convolution(flow: Flow, op: Op) -> None:
    source, weight, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    incoming = flow.on(source, 1)
    for layer in flow.layers(source):
        if 1 not in support(layer):
            flow.labels.freeze(layer, f"convolved along channels in {op.where}")
    if groups == 1:
        outgoing = _plain_convolution(flow, op, incoming, weight, transposed)
    else:
        outgoing = _grouped_convolution(flow, op, incoming, weight, transposed, groups)
    shift = flow.on(bias, 0) if isinstance(bias, Value) else None
    if shift is not None and outgoing is not None:
        flow.labels.join(shift, outgoing)
    out = op.outs[0]
    flow.set(out, [] if outgoing is None else [along(outgoing, 1, len(out.shape))])


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
        return None
    rows, arriving = lead.reshape(groups, -1), incoming.reshape(groups, -1)
    out_rows = rows.shape[1] if not transposed else weight.shape[1]
    if width == 1 or groups >= width + out_rows:
        flow.labels.join(rows, arriving[:, :1])
        flow.labels.join(arriving, arriving[:, :1])
        if per_group is not None:
            flow.labels.freeze(per_group, "width of a convolution group")
        sites = [] if width == 1 else [lead]
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
    flow.contractions.append(Contraction(op, factors, [] if inner is None else [inner], makes))
    return per_group.repeat(groups) if transposed and per_group is not None else lead


def matmul(flow: Flow, op: Op) -> None:
    """mm, addmm, bmm, baddbmm: the last axis of one operand against the first of the other."""
    *bias, left, right = op.args[:3] if "add" in _short(op) else op.args[:2]
    out = op.outs[0]
    dim = len(out.shape)
    weight = right if flow.pure(right) else left
    incoming, inner = flow.on(left, dim - 1), flow.on(right, dim - 2)
    rows, columns = flow.on(left, dim - 2), flow.on(right, dim - 1)
    if weight is left:
        incoming, inner = inner, incoming
    outer = columns if weight is right else rows
    layers = [along(v, a, dim) for v, a in ((rows, dim - 2), (columns, dim - 1)) if v is not None]
    batches = [flow.on(value, 0) if dim == 3 else None for value in (left, right)]
    for batch in batches:
        if batch is not None:
            flow.labels.freeze(batch, f"batched product of channels in {op.where}")
    _meet(flow, op, incoming, inner, weight, [outer])
    other = rows if weight is right else columns
    if other is not None and outer is not None:
        flow.labels.freeze(other, f"product of two sets of channels in {op.where}")
    flow.set(out, layers)
    for value in bias:
        for layer in flow.layers(value):
            layer = layer.reshape((1,) * (dim - layer.dim()) + tuple(layer.shape))
            _merge(flow, list(layers), layer)


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


# --- unknown --------------------------------------------------------------------------------------


def _default(flow: Flow, op: Op) -> None:
    """Point-wise by torch's own tag, harmless without labels, else frozen with the reason."""
    if torch.Tag.pointwise in op.func.tags:
        return pointwise(flow, op)
    if torch.Tag.reduction in op.func.tags:
        return reduction(flow, op)
    labelled = [value for value in op.inputs() if flow.layers(value)]
    for value in labelled:
        flow.freeze(value, f"channels cannot be followed through {op.func} in {op.where}")
    if labelled:
        flow.unknown.setdefault(str(op.func), op.where)


def _short(op: Op) -> str:
    return str(op.func._schema.name).split("::")[-1]


def _table() -> dict[Any, Rule]:
    kinds: dict[Rule, str] = {
        pointwise: "_prelu_kernel native_dropout where hardswish hardswish_ log_sigmoid_forward "
        "rrelu_with_noise rrelu_with_noise_ rsub masked_fill masked_fill_",
        write: "copy_",
        same: "clone detach alias contiguous _to_copy lift_fresh detach_ to",
        view: "view _unsafe_view reshape flatten unflatten",
        movement: "permute transpose t unsqueeze squeeze expand select unbind pixel_shuffle "
        "pixel_unshuffle channel_shuffle repeat flip movedim swapaxes native_channel_shuffle "
        "repeat_interleave",
        cut: "slice split_with_sizes",
        roll: "roll",
        restride: "as_strided as_strided_",
        split: "split",
        cat: "cat",
        stack: "stack",
        pad: "constant_pad_nd",
        pick: "index gather index_put index_put_",
        pick_along: "index_select",
        embedding: "embedding",
        create: "zeros ones full empty rand randn new_zeros new_ones new_full new_empty "
        "scalar_tensor",
        create_like: "zeros_like ones_like full_like empty_like rand_like randn_like",
        fill: "zero_ fill_ bernoulli_ uniform_ normal_ random_",
        reduction: "mean sum amax amin max min var std var_mean std_mean prod any all argmax "
        "argmin norm linalg_vector_norm logsumexp softmax _softmax _log_softmax cumsum sort topk",
        window: "max_pool2d_with_indices max_pool3d_with_indices max_pool1d max_pool2d max_pool3d "
        "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
        "adaptive_avg_pool1d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d "
        "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d",
        glu: "glu",
        channel_norm: "native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
        "_batch_norm_with_update _native_batch_norm_legit_no_training _batch_norm_no_update",
        group_norm: "native_group_norm",
        layer_norm: "native_layer_norm",
        convolution: "convolution cudnn_convolution",
        matmul: "mm addmm bmm baddbmm",
    }
    table: dict[Any, Rule] = {}
    for rule, names in kinds.items():
        for name in names.split():
            if hasattr(aten, name):
                table[getattr(aten, name)] = rule
    del table[aten.max], table[aten.min]
    table[aten.max.dim] = table[aten.min.dim] = reduction
    table[aten.max.other] = table[aten.min.other] = pointwise
    return table


RULES: Mapping[Any, Rule] = _table()
