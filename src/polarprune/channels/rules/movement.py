"""Rules for operations that move elements: views, permutations, slices, concatenation, padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...tracing.tape import Op, Value
from .. import labels as lab
from ..labels import along, compress, support
from ..propagation import Flow
from ..reasons import POINTWISE, because, unknown_origin
from .elementwise import fits, freeze_unlabelled, merge

# --- views and permutations -----------------------------------------------------------------------


def movement(flow: Flow, op: Op) -> None:
    """permute, repeat, flip, …: run the operation on the labels."""
    source = op.args[0]
    results: list[list[Tensor]] = [[] for _ in op.outs]
    for layer in flow.layers(source):
        args = (layer.expand(source.shape), *op.args[1:])
        args, kwargs = tree_map_only(Value, lambda value: value.data, (args, op.kwargs))
        moved = tree_leaves(op.func(*args, **{k: v for k, v in kwargs.items() if k != "dtype"}))
        for result, piece in zip(results, moved, strict=True):
            result.append(compress(piece))
    flow.set_moved(op, source, results)


def same(flow: Flow, op: Op) -> None:
    """Give the results the labels of the first argument, as for clone, detach and to.

    Args:
        flow: The labels of all tensors.
        op: The operation.

    Example:
        >>> from polarprune.rules import same
        >>> class Copied(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x).clone()
        >>> model = torch.nn.Sequential(Copied(4, 8), torch.nn.Linear(8, 2))
        >>> rules = {torch.ops.aten.clone: same}
        >>> graph = pp.trace(model, torch.randn(1, 4), rules=rules)
        >>> {name: group.size for name, group in graph.prunable.items()}
        {'0': 8}
    """
    source = op.args[0]
    flow.set_moved(op, source, [flow.layers(source) for _ in op.outs])


def view(flow: Flow, op: Op) -> None:
    """view, reshape, flatten, unflatten: reshape the labels."""
    source, out = op.args[0], op.outs[0]
    moved = [lab.reshape(layer, source.shape, out.shape) for layer in flow.layers(source)]
    flow.set_moved(op, source, [moved])


def squeeze(flow: Flow, op: Op) -> None:
    """squeeze: two channels must remain along an axis that it would otherwise remove."""
    source, given = op.args[0], op.args[1] if len(op.args) > 1 else range(len(op.args[0].shape))
    axes = {source.axis(axis) for axis in ([given] if isinstance(given, int) else given)}
    for layer in flow.layers(source):
        for axis in axes & set(support(layer)):
            why = f"squeeze would take away an axis of one channel in {op.where}"
            flow.require(layer, axis, 2, why)
    movement(flow, op)


def expand(flow: Flow, op: Op) -> None:
    """expand: a repeated axis gets new labels, which are joined with those of later operands.

    This does not hold after an axis of channels: there each channel is repeated, as key heads are
    repeated for their queries.
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
    """roll: freeze channels it moves around; which channel comes first depends on the last one."""
    source = op.args[0]
    axes = {source.axis(axis) for axis in (op.args[2] if len(op.args) > 2 else ())}
    for layer in flow.layers(source):
        if not axes or axes & set(support(layer)):
            flow.labels.freeze(layer, because(op, "channels are rolled", remedy=POINTWISE))
    movement(flow, op)


def unfold(flow: Flow, op: Op) -> None:
    """unfold: freeze channels if the windows slide along them."""
    source, axis = op.args[0], op.args[0].axis(op.args[1])
    for layer in flow.layers(source):
        if axis in support(layer):
            flow.labels.freeze(
                layer, because(op, "unfold takes windows of channels", remedy=POINTWISE)
            )
    movement(flow, op)


def restride(flow: Flow, op: Op) -> None:
    """as_strided: the same tensor if only axes of size 1 change their stride (channels last)."""
    source, size, stride = op.args[:3]
    unchanged = tuple(size) == source.shape and all(
        n == 1 or a == b for n, a, b in zip(source.shape, source.stride, stride, strict=True)
    )
    if unchanged and len(op.args) == 3:
        return same(flow, op)
    remedy = "use view, permute or indexing instead"
    fact = f"{op.name} reads memory with other strides"
    flow.freeze(source, because(op, fact, tensor=flow.describe(source), remedy=remedy))


def shuffle(flow: Flow, op: Op) -> None:
    """channel_shuffle: join the groups of channels, so that all keep the same width."""
    movement(flow, op)
    for layer in flow.layers(op.args[0]):
        if 1 in support(layer):
            rows = layer.unflatten(1, (op.args[1], -1))
            flow.labels.join(rows, rows.narrow(1, 0, 1))


# --- parts of an axis -----------------------------------------------------------------------------


def cut(flow: Flow, op: Op) -> None:
    """slice, split_with_sizes: part of an axis, by integers that count channels."""
    source = op.args[0]
    position = next(i for i, a in enumerate(op.func._schema.arguments) if a.name == "dim")
    axis = source.axis(op.args[position] if len(op.args) > position else op.kwargs.get("dim", 0))
    if op.name == "slice" and not op.outs[0].shape[axis]:  # an empty slice fits any width
        return flow.mark_uniform(op.outs[0])
    for layer in flow.layers(source):
        if axis in support(layer) and op.outs[0].shape[axis] != source.shape[axis]:
            flow.count_channels(op, layer, axis)
            _freeze_repeated(flow, op, layer, axis)
            if op.name == "slice" and len(op.args) > 4 and op.args[4] != 1:
                _slice_with_step(flow, op, layer, axis)
    movement(flow, op)


def _slice_with_step(flow: Flow, op: Op, layer: Tensor, axis: int) -> None:
    """Freeze channels of which a slice takes every n-th, or join them within their heads."""
    rest = tuple(other for other in support(layer) if other != axis)
    if rest:
        flow.labels.flatten_onto(layer, rest)
    else:
        fact = f"one of every {op.args[4]} channels is taken"
        flow.labels.freeze(layer, because(op, fact, remedy=POINTWISE))


def select(flow: Flow, op: Op) -> None:
    """select: one index of an axis, by an integer that counts channels.

    If the result is discarded, any channel will do, and there only have to be enough.
    """
    source, index = op.args[0], op.args[2]
    axis = op.args[1] % len(source.shape)
    for layer in flow.layers(source):
        if axis in support(layer):
            if flow.labels.binding:
                flow.count_channels(op, layer, axis)
                _freeze_repeated(flow, op, layer, axis)
            else:
                why = f"{op.name} takes index {index} in {op.where}, and its result is not used"
                needed = index + 1 if index >= 0 else -index
                flow.require(layer, axis, needed, why)
    movement(flow, op)


def _freeze_repeated(flow: Flow, op: Op, layer: Tensor, axis: int) -> None:
    """Freeze channels that occupy several indices each, as after flattening an image.

    For images of another size the same indices would belong to other channels.
    """
    if support(layer) == (axis,) and len(layer.unique()) < layer.shape[axis]:
        fact = f"{op.name} picks elements of flattened channels by position"
        flow.labels.freeze(layer, because(op, fact, remedy="slice before flattening"))


def split(flow: Flow, op: Op) -> None:
    """split, chunk: join pieces of equal size, so that `chunk(2)` still cuts between them."""
    source = op.args[0]
    axis = source.axis(op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0))
    movement(flow, op)
    sizes = {out.shape[axis] for out in op.outs}
    for layer in flow.layers(source):
        if axis in support(layer):
            if len(sizes) > 1:
                flow.count_channels(op, layer, axis)
            else:
                rows = layer.unflatten(axis, (len(op.outs), -1))
                flow.labels.join(rows, rows.narrow(axis, 0, 1))


# --- several tensors, and padding -----------------------------------------------------------------


def cat(flow: Flow, op: Op) -> None:
    """cat: concatenate labels along the axis. A part without labels there gets new ones."""
    out = op.outs[0]
    axis = out.axis(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0))
    parts = [part for part in op.args[0] if part.shape != (0,) and part.shape[axis]]
    crossing: list[Tensor] = []  # layers that vary along other axes
    pieces: list[Tensor | None] = []  # the layer of each part along the axis
    for part in parts:
        piece = None
        for layer in flow.layers(part):
            if axis in support(layer):
                piece = layer
            else:
                merge(flow, crossing, layer)
        pieces.append(piece)
    alike = [flow.is_uniform(part) for part in parts]
    labelled = any(piece is not None for piece in pieces) or (any(alike) and not all(alike))
    own = [_concatenated(flow, op, parts, pieces, axis)] if labelled else []
    for part in parts:
        if not flow.is_uniform(part):
            crossing = freeze_unlabelled(flow, op, part, crossing, len(out.shape))
    flow.set(out, [*own, *crossing])


def _concatenated(
    flow: Flow, op: Op, parts: list[Value], pieces: list[Tensor | None], axis: int
) -> Tensor:
    """Return the layer of the result along the axis."""
    filled = [
        _new_piece(flow, op, part, axis) if piece is None else piece
        for part, piece in zip(parts, pieces, strict=True)
    ]
    dim = len(parts[0].shape)
    sizes = [max(piece.shape[k] for piece in filled) for k in range(dim)]
    full = [piece.expand([-1 if k == axis else sizes[k] for k in range(dim)]) for piece in filled]
    return torch.cat(full, axis)


def _new_piece(flow: Flow, op: Op, part: Value, axis: int) -> Tensor:
    """Return new labels for a part without channels. They are frozen unless it is uniform."""
    piece = along(flow.labels.fresh(part.shape[axis]), axis, len(part.shape))
    if flow.is_uniform(part):
        flow.set(part, [*flow.layers(part), piece])
    else:
        tensor = flow.describe(part)
        reason = unknown_origin(op, "joined with", tensor, detail=f"{op.name} with")
        flow.labels.freeze(piece, reason)
    return piece


def stack(flow: Flow, op: Op) -> None:
    """stack: join the labels of all parts. The new axis has no labels."""
    out = op.outs[0]
    axis = out.axis(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0))
    merged: list[Tensor] = []
    for part in op.args[0]:
        for layer in flow.layers(part):
            merge(flow, merged, layer)
    for part in op.args[0]:
        if not flow.is_uniform(part):
            merged = freeze_unlabelled(flow, op, part, merged, len(part.shape))
    flow.set(out, [layer.unsqueeze(axis) for layer in merged])


def pad(flow: Flow, op: Op) -> None:
    """constant_pad_nd: padded channels get new labels, which are joined with later operands."""
    source, out = op.args[0], op.outs[0]
    moved = []
    for layer in flow.layers(source):
        for axis in support(layer):
            position = 2 * (layer.dim() - 1 - axis)
            before, after = (*op.args[1][position : position + 2], 0, 0)[:2]
            if before or after:
                layer = _padded(flow, op, layer, axis, (before, after))
        moved.append(layer)
    flow.set_moved(op, source, [[layer for layer in moved if fits(layer, out.shape)]])


def _padded(flow: Flow, op: Op, layer: Tensor, axis: int, amounts: tuple[int, int]) -> Tensor:
    """Return the layer with new labels before and after the old ones along an axis."""
    rest = tuple(other for other in support(layer) if other != axis)
    if rest:  # positions within a head: entire heads are removed
        return flow.labels.flatten_onto(layer, rest)
    if min(amounts) < 0:
        fact = "channels are cropped by negative padding"
        flow.labels.freeze(layer, because(op, fact, remedy="slice them instead"))
        return layer
    before, after = (along(flow.labels.fresh(n), axis, layer.dim()) for n in amounts)
    flow.count_channels(op, layer, axis)
    return torch.cat([before, layer, after], axis)
