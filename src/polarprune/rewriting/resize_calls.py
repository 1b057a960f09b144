"""Give the calls in a graph the sizes and indices that fit the kept channels.

One function for each kind of call: it changes the arguments of a node and returns whether a number
changed. `HANDLERS` maps the functions and methods of torch to them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import Argument

from ..channels.graph import Graph
from ..tracing.tape import Value
from .node_functions import no_channel, one_channel
from .node_shapes import NodeShapes
from .width_arithmetic import resized_argument

Handler = Callable[[fx.Node, NodeShapes], bool]
_FILLINGS = ("zeros", "ones", "full", "empty")
_FACTORIES = (torch.zeros, torch.ones, torch.full, torch.empty)


def resize_call(node: fx.Node, shapes: NodeShapes) -> bool:
    """Resize one call; return whether a number in it changed."""
    handler = HANDLERS.get(node.target) if node.op.startswith("call_") else None
    if handler is None or not (shapes.values(node) or node.target is operator.setitem):
        return False
    _pass_input_by_position(node)
    return handler(node, shapes)


def _pass_input_by_position(node: fx.Node) -> None:
    """Turn `torch.narrow(input=x, …)` into `torch.narrow(x, …)`."""
    if not node.args and "input" in node.kwargs:
        node.args = (node.kwargs["input"],)
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "input"}


def _argument(node: fx.Node, position: int, name: str, default: object = None) -> Any:
    """Return an argument of a call, whether it was passed by position or by keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


# --- sizes ----------------------------------------------------------------------------------------


def _pad(node: fx.Node, shapes: NodeShapes) -> bool:
    """Resize `F.pad(x, amounts)`."""
    (out,), given = shapes.values(node), _argument(node, 1, "pad")
    if isinstance(given, fx.Node):
        return False  # read from a tensor
    amounts = [shapes.number_of(item) for item in given]
    if None in amounts:
        return False
    counted = padding(shapes.graph, shapes.kept_units, out, amounts)
    new = [a if x == y else y for a, x, y in zip(given, amounts, counted, strict=True)]
    rest = {key: value for key, value in node.kwargs.items() if key != "pad"}
    node.args, node.kwargs = (node.args[0], tuple(new), *node.args[2:]), rest
    return counted != amounts


def padding(graph: Graph, kept_units: Tensor, out: Value, amounts: list[int]) -> list[int]:
    """Return how many of the padded channels are kept, before and after the input."""
    new = list(amounts)
    for position in range(0, len(amounts), 2):
        kept = graph.kept(out, len(out.shape) - 1 - position // 2, kept_units)
        before, after = amounts[position : position + 2]
        if kept is not None and (before or after):
            new[position] = int(kept[:before].sum())
            new[position + 1] = int(kept[len(kept) - after :].sum())
    return new


def _shape(node: fx.Node, shapes: NodeShapes) -> bool:
    """Resize `x.reshape(...)`, `torch.zeros(...)` and others that take all sizes."""
    (out,) = shapes.values(node)
    lead = 0 if node.target in _FACTORIES else 1
    first = _argument(node, lead, "size", node.kwargs.get("shape", ()))
    if isinstance(first, fx.Node) and shapes.number(first) is None:
        return False  # a shape that is read from a tensor
    shape = list(first) if isinstance(first, (tuple, list)) else list(node.args[lead:])
    more = [] if shape == list(node.args[lead:]) else node.args[lead + 1 :]
    axes = [axis for axis, given in enumerate(shape) if _needs_size(given, out, axis, shapes)]
    for axis in axes:
        size = shapes.size(out, axis)
        shape[axis] = resized_argument(node, shape[axis], shapes, out.shape[axis], size)
    if axes:
        rest = {k: v for k, v in node.kwargs.items() if k not in ("size", "shape")}
        node.args, node.kwargs = (*node.args[:lead], tuple(shape), *more), rest
    return bool(axes)


def _needs_size(given: object, out: Value, axis: int, shapes: NodeShapes) -> bool:
    """Return whether a size has to be replaced. -1 is inferred, unless no channel is kept."""
    changed = shapes.changed(out, axis) and (given != -1 or not shapes.size(out, axis))
    return given in shapes.width_nodes or changed


def _unflatten(node: fx.Node, shapes: NodeShapes) -> bool:
    """Resize `x.unflatten(dim, sizes)`."""
    (out,), sizes = shapes.values(node), _argument(node, 2, "sizes")
    if isinstance(sizes, fx.Node):
        return False  # read from a tensor
    start = shapes.number_of(_argument(node, 1, "dim")) % (len(out.shape) - len(sizes) + 1)
    new, changed = _new_sizes(out, start, sizes, shapes)
    node.args, node.kwargs = (node.args[0], start, new), {}
    return changed


def _new_sizes(
    out: Value, start: int, sizes: Sequence[Argument], shapes: NodeShapes
) -> tuple[tuple[Argument, ...], bool]:
    """Return the sizes of consecutive axes after pruning, and whether one of them changed."""
    axes = range(start, start + len(sizes))
    new = tuple(
        shapes.size(out, axis) if shapes.changed(out, axis) else size
        for axis, size in zip(axes, sizes, strict=True)
    )
    return new, any(shapes.changed(out, axis) for axis in axes)


def _normalized(node: fx.Node, shapes: NodeShapes) -> bool:
    """Resize the `normalized_shape` of layer and RMS norms."""
    (out,), shape = shapes.values(node), _argument(node, 1, "normalized_shape")
    if isinstance(shape, fx.Node):
        return False  # read from a tensor
    new, changed = _new_sizes(out, len(out.shape) - len(shape), shape, shapes)
    rest = {key: value for key, value in node.kwargs.items() if key != "normalized_shape"}
    node.args, node.kwargs = (node.args[0], new, *node.args[2:]), rest
    return changed


def _split(node: fx.Node, shapes: NodeShapes) -> bool:
    """Turn `x.split(...)` and `x.chunk(...)` into a split with one size for each piece."""
    pieces = shapes.values(node)
    axis = pieces[0].axis(shapes.number_of(_argument(node, 2, "dim", 0)))
    if not any(shapes.changed(piece, axis) for piece in pieces):
        return False
    sizes = [shapes.size(piece, axis) for piece in pieces]
    node.op, node.target = "call_function", torch.split
    node.args, node.kwargs = (node.args[0], sizes, axis), {}
    return True


def _without_channels(node: fx.Node, shapes: NodeShapes) -> bool:
    """Run pools and similar calls, which refuse zero channels, on one channel of zeros."""
    kept = shapes.kept(shapes.values(node)[0], 1)
    if kept is None or bool(kept.any()):
        return False
    graph = node.graph
    with graph.inserting_before(node):
        one = graph.call_function(one_channel, (node.args[0],))
    node.args = (one, *node.args[1:])
    with graph.inserting_after(node):
        none = graph.call_function(no_channel, (node,))
    node.replace_all_uses_with(none, delete_user_cb=lambda user: user is not none)
    return True


# --- indices --------------------------------------------------------------------------------------


def _narrow(node: fx.Node, shapes: NodeShapes) -> bool:
    """Renumber `x.narrow(dim, start, length)`."""
    (out,), source = shapes.values(node), shapes.values(node.args[0])[0]
    axis = out.axis(shapes.number_of(_argument(node, 1, "dim")))
    kept = shapes.kept_if_cut(source, axis)
    start = shapes.number_of(_argument(node, 2, "start"))
    if kept is None or start is None:  # (a tensor may hold the start)
        return False
    length = shapes.number_of(_argument(node, 3, "length"))
    low, high = _bounds(kept, start, start + length)
    node.args, node.kwargs = (node.args[0], axis, low, high - low), {}
    return True


def _getitem(node: fx.Node, shapes: NodeShapes) -> bool:
    """Renumber `x[:, 1]`, `x[:, 2:]`, and writes into these."""
    if not isinstance(node.args[0], fx.Node):
        return False
    source, outs = shapes.values(node.args[0]), shapes.values(node)
    reads = node.target is operator.getitem
    if len(source) != 1 or (reads and len(outs) != 1):
        return False
    if reads and outs[0] is source[0]:
        return False  # an item of a tuple whose other items are not tensors
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    new = _new_index(index, source[0], shapes)
    changed = any(one is not other for one, other in zip(new, index, strict=True))
    node.args = (node.args[0], tuple(new), *node.args[2:])
    return changed


def _new_index(index: tuple[Any, ...], source: Value, shapes: NodeShapes) -> list[Argument]:
    """Return an index of several axes, counted in the kept channels."""
    new, axis = list(index), 0
    spare = len(source.shape) - sum(item is not None and item is not Ellipsis for item in index)
    for k, item in enumerate(index):
        if item is Ellipsis:
            axis += spare
        elif item is not None:
            kept = None if item == slice(None) else shapes.kept_if_cut(source, axis)
            new[k] = item if kept is None else _renumbered(item, kept, shapes)
            axis += 1
    return new


def _renumbered(item: Argument, kept: Tensor, shapes: NodeShapes) -> Argument:
    """Return an index, a list of indices or a slice along an axis, counted in the kept channels."""
    if isinstance(item, slice):
        return slice(*_bounds(kept, shapes.number_of(item.start), shapes.number_of(item.stop)))
    order = _index_list(item, shapes)
    if order is not None:
        rank = (kept.cumsum(0) - 1).tolist()
        return [rank[index] for index in (n % len(kept) for n in order) if kept[index]]
    index = shapes.number_of(item)
    if not isinstance(index, int) or isinstance(index, bool):
        return item  # a tensor: the channels that it picks are frozen
    return int(kept[: index % len(kept)].sum())


def _bounds(kept: Tensor, start: int | None, stop: int | None) -> tuple[int, int]:
    """Return where a slice starts and stops among the kept channels."""
    low, high, _ = slice(start, stop).indices(len(kept))
    return int(kept[:low].sum()), int(kept[:high].sum())


def _index_list(item: object, shapes: NodeShapes) -> list[int] | None:
    """Return the indices in a list, or in a vector that the model holds; None for others."""
    if isinstance(item, (list, tuple)):
        return list(item) if all(type(n) is int for n in item) else None
    values = shapes.values(item) if isinstance(item, fx.Node) else []
    data = values[0].data if len(values) == 1 and len(values[0].shape) == 1 else None
    return None if data is None or data.dtype == torch.bool else [int(n) for n in data]


def _picked(node: fx.Node, shapes: NodeShapes) -> tuple[int, Argument] | None:
    """Return the axis and the index of a selection, renumbered; None if all channels are kept."""
    source = shapes.values(node.args[0])[0]
    axis = source.axis(shapes.number_of(_argument(node, 1, "dim")))
    kept = shapes.kept_if_cut(source, axis)
    return None if kept is None else (axis, _renumbered(_argument(node, 2, "index"), kept, shapes))


def _select(node: fx.Node, shapes: NodeShapes) -> bool:
    """Renumber `x.select(dim, index)`."""
    picked = _picked(node, shapes)
    if picked is None:
        return False
    node.args, node.kwargs = (node.args[0], *picked), {}
    return True


def _index_select(node: fx.Node, shapes: NodeShapes) -> bool:
    """Renumber `x.index_select(dim, index)`, as `x[:, index]`."""
    picked = _picked(node, shapes)
    if picked is None:
        return False
    axis, order = picked
    node.op, node.target = "call_function", operator.getitem
    node.args, node.kwargs = (node.args[0], (*[slice(None)] * axis, order)), {}
    return True


_METHODS_WITH_SHAPE = ("view", "reshape", "expand", *(f"new_{x}" for x in _FILLINGS))
_POOLS = [getattr(F, f"{kind}_pool{n}d") for kind in ("max", "avg") for n in (1, 2, 3)]
HANDLERS: dict[object, Handler] = {
    **dict.fromkeys((F.pad, torch._C._nn.pad), _pad),
    **dict.fromkeys((*_METHODS_WITH_SHAPE, torch.reshape, *_FACTORIES), _shape),
    **dict.fromkeys(("unflatten", torch.unflatten), _unflatten),
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split"), _split),
    **dict.fromkeys((torch.split, torch.chunk, torch.tensor_split), _split),
    **dict.fromkeys((F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm), _normalized),
    **dict.fromkeys((*_POOLS, F.interpolate, F.upsample), _without_channels),
    **dict.fromkeys(("narrow", torch.narrow), _narrow),
    **dict.fromkeys((operator.getitem, operator.setitem), _getitem),
    **dict.fromkeys(("select", torch.select), _select),
    **dict.fromkeys(("index_select", torch.index_select), _index_select),
}
