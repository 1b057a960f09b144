"""Rules for operations that treat every element by itself, or only move elements about."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...tracing.tape import Op, Value
from .. import labels as lab
from ..labels import along, compress, support
from ..propagation import AtLeast, Flow

# --- point-wise -----------------------------------------------------------------------------------


def pointwise(flow: Flow, op: Op) -> None:
    """Operands that vary along the same axis are joined there, element by element."""
    operands = op.inputs()
    dim = max((len(out.shape) for out in op.outs), default=0)
    merged: list[Tensor] = []
    for value in operands:
        for layer in flow.layers(value):
            layer = layer.reshape((1,) * (dim - layer.dim()) + tuple(layer.shape))
            merge(flow, merged, layer)
    for value in operands:
        if flow.uniform(value):
            _adopt(flow, value, merged)
        else:
            merged = _check_unlabelled(flow, op, value, merged, dim)
    for out in op.outs:
        flow.set(out, merged)
        if all(flow.uniform(value) for value in operands):
            flow._uniform.add(out)


def merge(flow: Flow, merged: list[Tensor], layer: Tensor) -> None:
    """Join `layer` with those in `merged` that vary along an axis of its own, or add it."""
    for i, other in enumerate(merged):
        if set(support(other)) & set(support(layer)):
            wide, narrow = (other, layer) if other.numel() >= layer.numel() else (layer, other)
            if set(support(narrow)) < set(support(wide)):
                flow.pending.append((wide, narrow))
            else:
                flow.labels.join(wide, narrow)
            merged[i] = wide
            return
    merged.append(layer)


def _adopt(flow: Flow, value: Value, merged: list[Tensor]) -> None:
    """Zeros are as wide as what they meet, and so is what else meets them."""
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


def _check_unlabelled(
    flow: Flow, op: Op, value: Value, merged: list[Tensor], dim: int
) -> list[Tensor]:
    """A tensor of unknown origin that varies along a labelled axis could not be cut with it.

    Gives the layers that go on; what is frozen need not be followed.
    """
    left = []
    shape = (1,) * (dim - len(value.shape)) + value.shape
    known = {axis + dim - len(value.shape) for own in flow.layers(value) for axis in support(own)}
    for layer in merged:
        fixed = {axis for axis in support(layer) if shape[axis] > 1 and axis not in known}
        rest = tuple(axis for axis in support(layer) if axis not in fixed)
        if fixed and rest:  # whole rows may go, if the tensor is the same for each of them
            flow.labels.flatten_onto(layer, rest)
        elif fixed:
            reason = f"meets a tensor that is no parameter and has no channels, in {op.where}"
            flow.labels.freeze(layer, reason)
            continue
        left.append(layer)
    return left


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


def squeeze(flow: Flow, op: Op) -> None:
    """Takes away axes of one: an axis of channels has to keep two, or it would go as well."""
    source, given = op.args[0], op.args[1] if len(op.args) > 1 else range(len(op.args[0].shape))
    axes = {source.axis(axis) for axis in ([given] if isinstance(given, int) else given)}
    for layer in flow.layers(source):
        for axis in axes & set(support(layer)):
            why = f"squeeze would take away an axis of one channel in {op.where}"
            flow.at_least.append(AtLeast(layer, axis, 2, why))
    movement(flow, op)


def cut(flow: Flow, op: Op) -> None:
    """slice, split_with_sizes: part of an axis, by numbers that count channels."""
    source = op.args[0]
    position = next(i for i, a in enumerate(op.func._schema.arguments) if a.name == "dim")
    axis = op.args[position] if len(op.args) > position else op.kwargs.get("dim", 0)
    axis = source.axis(axis)
    if op.name == "slice" and not op.outs[0].shape[axis]:  # nothing, as wide as it must be
        return flow._uniform.add(op.outs[0])
    for layer in flow.layers(source):
        if axis in support(layer) and op.outs[0].shape[axis] != source.shape[axis]:
            flow.channel_counts.append((op, layer, axis))
            _freeze_repeated(flow, op, layer, axis)
            if op.name == "slice" and len(op.args) > 4 and op.args[4] != 1:
                rest = tuple(other for other in support(layer) if other != axis)
                if rest:  # places within a head: whole heads go
                    flow.labels.flatten_onto(layer, rest)
                else:
                    why = f"one of every {op.args[4]} channels is taken in {op.where}"
                    flow.labels.freeze(layer, why)
    movement(flow, op)


def select(flow: Flow, op: Op) -> None:
    """One place of an axis, by a number that counts channels."""
    source = op.args[0]
    axis = op.args[1] % len(source.shape)
    for layer in flow.layers(source):
        if axis in support(layer):
            flow.channel_counts.append((op, layer, axis))
            _freeze_repeated(flow, op, layer, axis)
    movement(flow, op)


def _freeze_repeated(flow: Flow, op: Op, layer: Tensor, axis: int) -> None:
    """Where a channel takes up several places (a picture was flattened), numbers that count places
    mean other channels for other pictures."""
    if support(layer) == (axis,) and len(layer.unique()) < layer.shape[axis]:
        why = f"places of flattened channels are picked by number in {op.where}"
        flow.labels.freeze(layer, why)


def expand(flow: Flow, op: Op) -> None:
    """What is repeated along an axis goes with whatever it meets there.

    Not so after an axis of channels: each channel is repeated then, as a key head for its queries.
    """
    source, out = op.args[0], op.outs[0]
    movement(flow, op)
    more = len(out.shape) - len(source.shape)
    first = min((min(support(layer)) for layer in flow.layers(out)), default=len(out.shape))
    repeated = [
        along(flow.labels.fresh(out.shape[axis]), axis, len(out.shape))
        for axis in range(1, first)
        if out.shape[axis] > 1 and (axis < more or source.shape[axis - more] == 1)
    ]
    flow.set(out, [*flow.layers(out), *repeated])


def roll(flow: Flow, op: Op) -> None:
    """Fine along other axes; along channels the first would depend on which the last is."""
    source = op.args[0]
    axes = {source.axis(axis) for axis in (op.args[2] if len(op.args) > 2 else ())}
    for layer in flow.layers(source):
        if not axes or axes & set(support(layer)):
            flow.labels.freeze(layer, f"channels are rolled in {op.where}")
    movement(flow, op)


def slide(flow: Flow, op: Op) -> None:
    """unfold: windows along an axis. Fine where it is not that of channels."""
    source, axis = op.args[0], op.args[0].axis(op.args[1])
    for layer in flow.layers(source):
        if axis in support(layer):
            flow.labels.freeze(layer, f"windows of channels in {op.where}")
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


def shuffle(flow: Flow, op: Op) -> None:
    """Channels of every group in turn: groups stay as wide as one another."""
    movement(flow, op)
    for layer in flow.layers(op.args[0]):
        if 1 in support(layer):
            rows = layer.unflatten(1, (op.args[1], -1))
            flow.labels.join(rows, rows.narrow(1, 0, 1))


def split(flow: Flow, op: Op) -> None:
    """Pieces of equal size stay of equal size, so that `chunk(2)` finds the same boundary again."""
    source = op.args[0]
    axis = source.axis(op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0))
    movement(flow, op)
    sizes = {out.shape[axis] for out in op.outs}
    for layer in flow.layers(source):
        if axis in support(layer):
            if len(sizes) > 1:
                flow.channel_counts.append((op, layer, axis))
            else:
                rows = layer.unflatten(axis, (len(op.outs), -1))
                flow.labels.join(rows, rows.narrow(axis, 0, 1))


def cat(flow: Flow, op: Op) -> None:
    """Side by side along one axis; there, a part without labels gets labels of its own."""
    out = op.outs[0]
    axis = out.axis(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0))
    parts = [part for part in op.args[0] if part.shape != (0,) and part.shape[axis]]
    crossing: list[Tensor] = []
    pieces = []
    for part in parts:
        piece = None
        for layer in flow.layers(part):
            if axis in support(layer):
                piece = layer
            else:
                merge(flow, crossing, layer)
        pieces.append(piece)
    alike = [flow.uniform(part) for part in parts]
    if any(piece is not None for piece in pieces) or (any(alike) and not all(alike)):
        crossing.append(_lay_side_by_side(flow, op, parts, pieces, axis))
    for part in parts:
        if not flow.uniform(part):
            others = [layer for layer in crossing if axis not in support(layer)]
            mine = [layer for layer in crossing if axis in support(layer)]
            crossing = mine + _check_unlabelled(flow, op, part, others, len(out.shape))
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
    axis = out.axis(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0))
    merged: list[Tensor] = []
    for part in op.args[0]:
        for layer in flow.layers(part):
            merge(flow, merged, layer)
    for part in op.args[0]:
        if not flow.uniform(part):
            merged = _check_unlabelled(flow, op, part, merged, len(part.shape))
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
                rest = tuple(other for other in support(layer) if other != axis)
                if rest:  # places within a head: whole heads go
                    layer = flow.labels.flatten_onto(layer, rest)
                    continue
                if before < 0 or after < 0:
                    flow.labels.freeze(layer, f"padded across channels in {op.where}")
                    continue
                ends = [along(flow.labels.fresh(n), axis, layer.dim()) for n in (before, after)]
                flow.channel_counts.append((op, layer, axis))
                layer = torch.cat([ends[0], layer, ends[1]], axis)
        moved.append(layer)
    _moved(flow, op, source, [[x for x in moved if _fits(x, out.shape)]])


def _fits(layer: Tensor, shape: tuple[int, ...]) -> bool:
    return layer.dim() == len(shape) and all(
        a in (1, b) for a, b in zip(layer.shape, shape, strict=True)
    )


def pick(flow: Flow, op: Op) -> None:
    """Indexing by tensors: what they index becomes new axes, the other axes pass."""
    source, indices = op.args[0], op.args[1] if op.name == "index" else []
    taken = [k for k, index in enumerate(indices) if index is not None]
    inner = max((len(indices[k].shape) for k in taken), default=0)
    # not so with a mask, which takes up as many axes as it has
    plain = taken and len(op.outs[0].shape) == len(source.shape) - len(taken) + inner
    apart = taken and taken[-1] - taken[0] >= len(taken)  # then the new axes come first
    kept = []
    for layer in flow.layers(source):
        if plain and not set(taken) & set(support(layer)):
            shape = [size for axis, size in enumerate(layer.shape) if axis not in taken]
            start = 0 if apart else taken[0]
            kept.append(layer.reshape(shape[:start] + [1] * inner + shape[start:]))
        elif plain and len(taken) == 1:
            kept += _reordered(flow, op, layer, taken[0], indices[taken[0]])
        else:
            flow.labels.freeze(layer, f"channels are picked by index in {op.where}")
    if kept:
        flow.set(op.outs[0], kept)


def _reordered(flow: Flow, op: Op, layer: Tensor, axis: int, index: Value) -> list[Tensor]:
    """Channels in a fixed order: labels move like them, and the code has to count anew."""
    order = flow.constant(index)
    if order is None:
        flow.labels.freeze(layer, f"channels are picked by index in {op.where}")
        return []
    flow.channel_counts.append((op, layer, axis))
    moved = layer.index_select(axis, order % layer.shape[axis])
    if not index.name and support(moved) == (axis,):  # numbers in the code: as many as are left
        flow.set(index, [moved.flatten()])
    return [moved]


def gather(flow: Flow, op: Op) -> None:
    """Elements along one axis; along the others index and source go together."""
    source, axis, index = op.args[:3]
    axis = source.axis(axis)
    kept = []
    for layer in flow.layers(source):
        if axis in support(layer) or not _same_for_all(index, layer):
            flow.labels.freeze(layer, f"channels are picked by index in {op.where}")
        else:
            kept.append(layer)
    flow.set(index, [*flow.layers(index), *kept])
    flow.set(op.outs[0], kept)


def scatter_add(flow: Flow, op: Op) -> None:
    """The way back: elements are added to those of another tensor."""
    target, axis, index, values = op.args[:4]
    layers = [*flow.layers(target), *flow.layers(values)]
    alike = all(_same_for_all(index, layer) for layer in layers)
    if alike:
        flow.set(index, [*flow.layers(index), *flow.layers(values)])
    _into_rows(flow, op, values, target.axis(axis) if alike else None)


def _same_for_all(index: Value, layer: Tensor) -> bool:
    """True if an index was expanded along the axes of these channels, to their full width."""
    return all(
        index.stride[axis] == 0 and index.shape[axis] == layer.shape[axis]
        for axis in support(layer)
    )


def put(flow: Flow, op: Op) -> None:
    """index_put: rows of a tensor are overwritten; a mask over several axes picks rows, too."""
    target, indices, values = op.args[:3]
    if len(indices) == 1 and len(values.shape) == len(target.shape):
        return _into_rows(flow, op, values, 0)
    masked = len(indices) == 1 and indices[0] is not None and indices[0].itemsize == 1
    taken = len(indices[0].shape) if masked else len(indices)
    rest = len(target.shape) - taken
    inside = all(min(support(layer)) >= taken for layer in flow.layers(target))
    alike = all(min(support(x)) >= x.dim() - rest for x in flow.layers(values))
    if None in indices or not (rest and inside and alike) or len(values.shape) < rest:
        return _into_rows(flow, op, values, None)
    merged = list(flow.layers(target))
    for layer in flow.layers(values):
        merge(flow, merged, layer.reshape((1,) * taken + layer.shape[layer.dim() - rest :]))
    if not flow.uniform(target):
        merged = _check_unlabelled(flow, op, target, merged, len(target.shape))
    for value in {op.outs[0], target}:
        flow.set(value, merged)


def add_rows(flow: Flow, op: Op) -> None:
    """index_add: rows of a tensor are added to those of another."""
    target, axis, _, values = op.args[:4]
    _into_rows(flow, op, values, target.axis(axis))


def _into_rows(flow: Flow, op: Op, values: Value, axis: int | None) -> None:
    """Along all other axes target and values go together."""
    target, out = op.args[0], op.outs[0]
    merged = list(flow.layers(target))
    layers = [*flow.layers(values), *merged]
    if axis is None or any(axis in support(layer) for layer in layers):
        for layer in layers:
            flow.labels.freeze(layer, f"channels are picked by index in {op.where}")
        return
    for layer in flow.layers(values):
        merge(flow, merged, layer)
    for value in (target, values):
        if not flow.uniform(value):
            merged = _check_unlabelled(flow, op, value, merged, len(target.shape))
    for value in {out, target}:
        flow.set(value, merged)


def pick_along(flow: Flow, op: Op) -> None:
    """index_select: one axis is indexed, the others pass."""
    source, axis = op.args[0], op.args[0].axis(op.args[1])
    kept = []
    for layer in flow.layers(source):
        if axis in support(layer):
            kept += _reordered(flow, op, layer, axis, op.args[2])
        else:
            kept.append(layer)
    _moved(flow, op, source, [kept])


def embedding(flow: Flow, op: Op) -> None:
    weight, out = op.args[0], op.outs[0]
    vector = flow.on(weight, 1)
    if vector is None:
        flow.set(out, [])
        return
    flow.looked_up.append(vector)
    flow.set(out, [along(vector, len(out.shape) - 1, len(out.shape))])


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
        flow._uniform -= {value for value in flow._uniform if base in (value, value.base)}
