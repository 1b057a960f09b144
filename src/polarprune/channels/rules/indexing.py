"""Rules for operations that read or write elements by a tensor of indices, and for embeddings."""

from __future__ import annotations

from torch import Tensor

from ...tracing.tape import Op, Value
from ..labels import along, support
from ..propagation import Flow
from ..reasons import picked_by_index
from .elementwise import freeze_unlabelled, merge

# --- reads ----------------------------------------------------------------------------------------


def index(flow: Flow, op: Op) -> None:
    """x[indices]: indexed axes become new axes, labels along the other axes pass."""
    source, indices = op.args[0], op.args[1] if op.name == "index" else []
    taken = [k for k, index in enumerate(indices) if index is not None]
    inner = max((len(indices[k].shape) for k in taken), default=0)
    # A boolean mask indexes as many axes as it has itself: then the numbers of axes differ.
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
            flow.labels.freeze(layer, picked_by_index(op))
    if kept:
        flow.set(op.outs[0], kept)


def _reordered(flow: Flow, op: Op, layer: Tensor, axis: int, order: Value) -> list[Tensor]:
    """Return the labels of channels in a constant order, or freeze them if it is not constant.

    The code spells out indices of channels, so it has to be rewritten for other widths.
    """
    indices = flow.constant_index(order)
    if indices is None:
        flow.labels.freeze(layer, picked_by_index(op))
        return []
    flow.count_channels(op, layer, axis)
    moved = layer.index_select(axis, indices % layer.shape[axis])
    if not order.name and support(moved) == (axis,):  # spelled out in the code: one per channel
        flow.set(order, [moved.flatten()])
    return [moved]


def index_select(flow: Flow, op: Op) -> None:
    """index_select: one axis is indexed, labels along the others pass."""
    source, axis = op.args[0], op.args[0].axis(op.args[1])
    kept = []
    for layer in flow.layers(source):
        if axis in support(layer):
            kept += _reordered(flow, op, layer, axis, op.args[2])
        else:
            kept.append(layer)
    flow.set_moved(op, source, [kept])


def gather(flow: Flow, op: Op) -> None:
    """gather: elements along one axis; along the others, index and source share their labels."""
    source, axis, positions = op.args[:3]
    axis = source.axis(axis)
    kept = []
    for layer in flow.layers(source):
        if axis in support(layer) or not _same_for_all(positions, layer):
            flow.labels.freeze(layer, picked_by_index(op))
        else:
            kept.append(layer)
    flow.set(positions, [*flow.layers(positions), *kept])
    flow.set(op.outs[0], kept)


def _same_for_all(positions: Value, layer: Tensor) -> bool:
    """Return True if indices were expanded to the full width along the axes of these channels."""
    return all(
        positions.stride[axis] == 0 and positions.shape[axis] == layer.shape[axis]
        for axis in support(layer)
    )


def embedding(flow: Flow, op: Op) -> None:
    """embedding: the columns of the table are channels of the result."""
    weight, out = op.args[0], op.outs[0]
    vector = flow.on(weight, 1)
    if vector is None:
        flow.set(out, [])
        return
    flow.add_embedding(vector)
    flow.set(out, [along(vector, len(out.shape) - 1, len(out.shape))])


# --- writes ---------------------------------------------------------------------------------------


def scatter_add(flow: Flow, op: Op) -> None:
    """scatter_add: elements are added to those of another tensor along one axis."""
    target, axis, positions, values = op.args[:4]
    layers = [*flow.layers(target), *flow.layers(values)]
    alike = all(_same_for_all(positions, layer) for layer in layers)
    if alike:
        flow.set(positions, [*flow.layers(positions), *flow.layers(values)])
    _write_rows(flow, op, values, target.axis(axis) if alike else None)


def index_add(flow: Flow, op: Op) -> None:
    """index_add: rows of a tensor are added to those of another."""
    target, axis, _, values = op.args[:4]
    _write_rows(flow, op, values, target.axis(axis))


def index_put(flow: Flow, op: Op) -> None:
    """x[indices] = values: join the labels along the axes that are not indexed."""
    target, indices, values = op.args[:3]
    if len(indices) == 1 and len(values.shape) == len(target.shape):
        return _write_rows(flow, op, values, 0)
    masked = len(indices) == 1 and indices[0] is not None and indices[0].itemsize == 1
    taken = len(indices[0].shape) if masked else len(indices)  # a mask may cover several axes
    rest = len(target.shape) - taken
    inside = all(min(support(layer)) >= taken for layer in flow.layers(target))
    alike = all(min(support(x)) >= x.dim() - rest for x in flow.layers(values))
    if None in indices or not (rest and inside and alike) or len(values.shape) < rest:
        return _write_rows(flow, op, values, None)
    merged = list(flow.layers(target))
    for layer in flow.layers(values):
        merge(flow, merged, layer.reshape((1,) * taken + layer.shape[layer.dim() - rest :]))
    if not flow.is_uniform(target):
        merged = freeze_unlabelled(flow, op, target, merged, len(target.shape))
    for value in {op.outs[0], target}:
        flow.set(value, merged)


def _write_rows(flow: Flow, op: Op, values: Value, axis: int | None) -> None:
    """Join the labels of target and values along all axes except the indexed one.

    Args:
        flow: The labels.
        op: The operation; its first argument is the target.
        values: The tensor that is written.
        axis: The indexed axis, or None if the indices differ between channels.
    """
    target, out = op.args[0], op.outs[0]
    merged = list(flow.layers(target))
    layers = [*flow.layers(values), *merged]
    if axis is None or any(axis in support(layer) for layer in layers):
        for layer in layers:
            flow.labels.freeze(layer, picked_by_index(op))
        return
    for layer in flow.layers(values):
        merge(flow, merged, layer)
    for value in (target, values):
        if not flow.is_uniform(value):
            merged = freeze_unlabelled(flow, op, value, merged, len(target.shape))
    for value in {out, target}:
        flow.set(value, merged)
