"""Modules whose Python code bakes in widths: their forward is re-emitted with other numbers.

`F.pad(x, (0, 0, 0, 0, 8, 8))`, `x.split(self.c, 1)`, `x.reshape(b, n, c)` do not follow when
channels go. Such a module is written down as a graph (`emit`), its numbers are computed anew from
the labels, and the module stays what it is in everything else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ..channels.graph import Graph, stays
from ..tracing.recorder import Mark
from ..tracing.source_lines import SOURCE_LINE, run_as_line
from ..tracing.tape import Tape, Value
from .captured_forward import CapturedForward
from .interpreter import expect, no_channel, one_channel
from .stored_graphs import decode, encode


def shim(module: nn.Module, mark: Mark, captured: CapturedForward) -> Callable[..., Any]:
    """A forward that computes the same, node by node, and marks what each node gave."""

    class Marking(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = run_as_line(n.meta.get(SOURCE_LINE), super().run_node, n)
            mark(n.name, result)
            return result

    def forward(*args: Any, **kwargs: Any) -> Any:
        graph = captured.graphs["train" if module.training else "eval"]
        return Marking(module, graph=graph).run(*captured.leaves(module, args, kwargs))

    return forward


def resized(path: str, graph: Graph, alive: Tensor) -> dict[str, Any] | None:
    """The module's graphs with the numbers that these live units need, as plain data."""
    captured = decode(encode(graph.rewritten[path]))
    changed = _is_cut(path, graph, alive)
    for mode, tape in zip(("eval", "train"), graph.tapes, strict=False):
        sight = _Sight(graph, path, alive, tape)
        sight.widths = _widths(captured.graphs[mode], sight)
        for node in list(captured.graphs[mode].nodes):
            handler = _HANDLERS.get(node.target) if node.op.startswith("call_") else None
            if handler and (sight.values(node) or node.target is operator.setitem):
                _by_position(node)
                changed |= handler(node, sight)
        changed |= _keep_scales(captured.graphs[mode], sight)
    if len(graph.tapes) == 1:  # train mode did not run on the example
        captured.graphs["train"] = captured.graphs["eval"]
    return encode(captured) if changed else None


def _is_cut(path: str, graph: Graph, alive: Tensor) -> bool:
    """True if a tensor in the module gets narrower, or a weight inside it: its code may count them
    without giving a number to any operation."""
    stem = f"{path}." if path else ""
    inside = (units for name, axes in graph.axes.items() if name.startswith(stem)
              for units in axes.values())  # fmt: skip
    met = (units for op in graph.ops_in(path) for value in op.tensors()
           for units in graph.values.get(value, []))  # fmt: skip
    known = {id(units): units for units in (*inside, *met)}
    return any(not bool(stays(units, alive).all()) for units in known.values())


class _Sight:
    """How many channels are left where, for the nodes of one module in one run."""

    def __init__(self, graph: Graph, path: str, alive: Tensor, tape: Tape) -> None:
        self.graph, self.path, self.alive, self.tape = graph, path, alive, tape
        self.widths: set[fx.Node] = set()  # numbers that are computed from widths that change

    def values(self, node: Any) -> list[Value]:
        return self.tape.node_values.get((self.path, node.name), [])

    def number(self, node: fx.Node) -> Any:
        return self.tape.node_numbers.get((self.path, node.name))

    def given(self, item: Any) -> Any:
        """A number, whether the code has it as such or computes it; None if a node gives none."""
        return self.number(item) if isinstance(item, fx.Node) else item

    def kept(self, value: Value, axis: int) -> Tensor | None:
        return self.graph.kept(value, axis, self.alive)

    def size(self, value: Value, axis: int) -> int:
        kept = self.kept(value, axis)
        return value.shape[axis] if kept is None else int(kept.sum())

    def changed(self, value: Value, axis: int) -> bool:
        return self.size(value, axis) != value.shape[axis]


# --- nodes that are given widths ------------------------------------------------------------------


def _pad(node: fx.Node, sight: _Sight) -> bool:
    (out,), given = sight.values(node), _argument(node, 1, "pad")
    if isinstance(given, fx.Node):
        return False  # read from a tensor
    amounts = [sight.given(item) for item in given]
    if None in amounts:
        return False
    counted = padding(sight.graph, sight.alive, out, amounts)
    new = [a if x == y else y for a, x, y in zip(given, amounts, counted, strict=True)]
    rest = {key: value for key, value in node.kwargs.items() if key != "pad"}
    node.args, node.kwargs = (node.args[0], tuple(new), *node.args[2:]), rest
    return counted != amounts


def padding(graph: Graph, alive: Tensor, out: Value, amounts: list[int]) -> list[int]:
    """How many of the padded channels are left, before and after."""
    new = list(amounts)
    for place in range(0, len(amounts), 2):
        kept = graph.kept(out, len(out.shape) - 1 - place // 2, alive)
        before, after = amounts[place : place + 2]
        if kept is not None and (before or after):
            new[place] = int(kept[:before].sum())
            new[place + 1] = int(kept[len(kept) - after :].sum())
    return new


def _shape(node: fx.Node, sight: _Sight) -> bool:
    """Sizes that are written as numbers, or computed by a rule that no longer holds."""
    (out,) = sight.values(node)
    lead = 0 if node.target in _FILLINGS else 1
    first = _argument(node, lead, "size", node.kwargs.get("shape", ()))
    if isinstance(first, fx.Node) and sight.number(first) is None:
        return False  # a shape that is read from a tensor
    shape = list(first) if isinstance(first, (tuple, list)) else list(node.args[lead:])
    more = [] if shape == list(node.args[lead:]) else node.args[lead + 1 :]
    axes = [
        axis
        for axis, given in enumerate(shape)
        if given in sight.widths
        or (sight.changed(out, axis) and (given != -1 or not sight.size(out, axis)))
    ]
    for axis in axes:
        shape[axis] = _resized(node, shape[axis], sight, out.shape[axis], sight.size(out, axis))
    if axes:
        rest = {k: v for k, v in node.kwargs.items() if k not in ("size", "shape")}
        node.args, node.kwargs = (*node.args[:lead], tuple(shape), *more), rest
    return bool(axes)


def _unflatten(node: fx.Node, sight: _Sight) -> bool:
    (out,), sizes = sight.values(node), _argument(node, 2, "sizes")
    if isinstance(sizes, fx.Node):
        return False  # read from a tensor
    start = sight.given(_argument(node, 1, "dim")) % (len(out.shape) - len(sizes) + 1)
    axes = [start + k for k in range(len(sizes))]
    new = [sight.size(out, axis) if sight.changed(out, axis) else size
           for axis, size in zip(axes, sizes, strict=True)]  # fmt: skip
    node.args, node.kwargs = (node.args[0], start, tuple(new)), {}
    return any(sight.changed(out, axis) for axis in axes)


def _split(node: fx.Node, sight: _Sight) -> bool:
    pieces = sight.values(node)
    axis = pieces[0].axis(sight.given(_argument(node, 2, "dim", 0)))
    if not any(sight.changed(piece, axis) for piece in pieces):
        return False
    sizes = [sight.size(piece, axis) for piece in pieces]
    node.op, node.target = "call_function", torch.split
    node.args, node.kwargs = (node.args[0], sizes, axis), {}
    return True


def _narrow(node: fx.Node, sight: _Sight) -> bool:
    (out,), source = sight.values(node), sight.values(node.args[0])[0]
    axis = out.axis(sight.given(_argument(node, 1, "dim")))
    kept = sight.kept(source, axis)
    start, length = _argument(node, 2, "start"), _argument(node, 3, "length")
    if kept is None or bool(kept.all()) or sight.given(start) is None:  # (a tensor may say where)
        return False
    low, high = _bounds(sight, source, axis, kept, (start, start, length))
    node.args, node.kwargs = (node.args[0], axis, low, high - low), {}
    return True


def _getitem(node: fx.Node, sight: _Sight) -> bool:
    """`x[:, 1]`, `x[:, 2:]`, and writes into these: indices count the channels that are left."""
    if not isinstance(node.args[0], fx.Node):
        return False
    source, outs = sight.values(node.args[0]), sight.values(node)
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    reads = node.target is operator.getitem
    if len(source) != 1 or (reads and len(outs) != 1):
        return False
    if reads and outs[0] is source[0]:
        return False  # taken out of a tuple, of which the rest are no tensors
    new, axis, changed = list(index), 0, False
    spare = len(source[0].shape) - sum(item is not None and item is not Ellipsis for item in index)
    for k, item in enumerate(index):
        if item is Ellipsis:
            axis += spare
        elif item is not None:
            kept = None if item == slice(None) else sight.kept(source[0], axis)
            if kept is not None and not bool(kept.all()):
                new[k] = _counted(sight, source[0], axis, kept, item)
                changed |= new[k] is not item
            axis += 1
    node.args = (node.args[0], tuple(new), *node.args[2:])
    return changed


def _counted(sight: _Sight, source: Value, axis: int, kept: Tensor, item: Any) -> Any:
    """An index or a slice along an axis, in the channels that are left of it."""
    if isinstance(item, slice):
        return slice(*_bounds(sight, source, axis, kept, (item.start, item.stop, None)))
    order = _order(item, sight)
    if order is not None:
        rank = (kept.cumsum(0) - 1).tolist()
        return [rank[place] for place in (n % len(kept) for n in order) if kept[place]]
    place = sight.number(item) if isinstance(item, fx.Node) else item
    if not isinstance(place, int) or isinstance(place, bool):
        return item  # a tensor: what it picks is frozen
    return int(kept[: place % len(kept)].sum())


def _order(item: Any, sight: _Sight) -> list[int] | None:
    """The numbers in a list, or in a vector that the model holds."""
    if isinstance(item, (list, tuple)):
        return list(item) if all(type(n) is int for n in item) else None
    values = sight.values(item) if isinstance(item, fx.Node) else []
    data = values[0].data if len(values) == 1 and len(values[0].shape) == 1 else None
    return None if data is None or data.dtype == torch.bool else [int(n) for n in data]


def _select(node: fx.Node, sight: _Sight) -> bool:
    source = sight.values(node.args[0])[0]
    axis = source.axis(sight.given(_argument(node, 1, "dim")))
    kept = sight.kept(source, axis)
    if kept is None or bool(kept.all()):
        return False
    place = _counted(sight, source, axis, kept, _argument(node, 2, "index"))
    node.args, node.kwargs = (node.args[0], axis, place), {}
    return True


def _index_select(node: fx.Node, sight: _Sight) -> bool:
    source = sight.values(node.args[0])[0]
    axis = source.axis(sight.given(_argument(node, 1, "dim")))
    kept = sight.kept(source, axis)
    if kept is None or bool(kept.all()):
        return False
    order = _counted(sight, source, axis, kept, _argument(node, 2, "index"))
    node.op, node.target = "call_function", operator.getitem
    node.args, node.kwargs = (node.args[0], (*[slice(None)] * axis, order)), {}
    return True


def _bounds(
    sight: _Sight,
    source: Value,
    axis: int,
    kept: Tensor,
    given: tuple[Any, Any, Any],
) -> tuple[int, int]:
    """Where a slice of `source` starts and stops among the kept channels."""
    start, stop, length = map(sight.given, given)
    start, stop, _ = slice(start, stop if length is None else start + length).indices(
        source.shape[axis]
    )
    return int(kept[:start].sum()), int(kept[:stop].sum())


def _normed(node: fx.Node, sight: _Sight) -> bool:
    """Layer and RMS norms are told the shape of what they normalise."""
    (out,), shape = sight.values(node), _argument(node, 1, "normalized_shape")
    if isinstance(shape, fx.Node):
        return False  # read from a tensor
    axes = range(len(out.shape) - len(shape), len(out.shape))
    rest = {key: value for key, value in node.kwargs.items() if key != "normalized_shape"}
    new = tuple(sight.size(out, axis) if sight.changed(out, axis) else size
                for axis, size in zip(axes, shape, strict=True))  # fmt: skip
    node.args, node.kwargs = (node.args[0], new, *node.args[2:]), rest
    return any(sight.changed(out, axis) for axis in axes)


def _hollow(node: fx.Node, sight: _Sight) -> bool:
    """Pools and the like refuse to run on no channels."""
    kept = sight.kept(sight.values(node)[0], 1)
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


Handler = Callable[[fx.Node, _Sight], bool]
_FILLINGS = (torch.zeros, torch.ones, torch.full, torch.empty)
_TARGETS: dict[Handler, tuple[Any, ...]] = {
    _pad: (F.pad, torch._C._nn.pad),
    _getitem: (operator.getitem, operator.setitem),
    _select: ("select", torch.select),
    _index_select: ("index_select", torch.index_select),
    _shape: ("view", "reshape", "expand", "new_zeros", "new_ones", "new_full", "new_empty",
             torch.reshape, *_FILLINGS),
    _unflatten: ("unflatten", torch.unflatten),
    _split: ("split", "chunk", "split_with_sizes", "tensor_split", torch.split, torch.chunk,
             torch.tensor_split),
    _narrow: ("narrow", torch.narrow),
    _normed: (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm),
    _hollow: (F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
              F.interpolate, F.upsample),
}  # fmt: skip
_HANDLERS = {target: handler for handler, targets in _TARGETS.items() for target in targets}


def _by_position(node: fx.Node) -> None:
    """`torch.narrow(input=x, …)` as `torch.narrow(x, …)`."""
    if not node.args and "input" in node.kwargs:
        node.args = (node.kwargs["input"],)
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "input"}


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


# --- numbers that are computed from widths --------------------------------------------------------


def _widths(graph: fx.Graph, sight: _Sight) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        computed = sight.number(node) is not None and not found.isdisjoint(node.all_input_nodes)
        if computed or _reads_width(node, sight):
            found.add(node)
    return found


def _keep_scales(graph: fx.Graph, sight: _Sight) -> bool:
    """`x * width ** -0.5` has to go on with the width that it was trained with."""
    changed = False
    for node in list(graph.nodes):
        given = [width for width in node.all_input_nodes if width in sight.widths]
        if node.target is expect and given:
            trained = _as_trained(given[0], sight)
            if isinstance(trained, fx.Node):  # other sizes are still to be what they were
                node.args = (trained, node.args[1])
            else:
                graph.erase_node(node)  # the number of the example is the one to go on with
        elif node.target in _ARITHMETIC and (
            node not in sight.widths or isinstance(sight.number(node), float)
        ):
            for width in given:
                node.replace_input_with(width, _as_trained(width, sight))
        else:
            continue
        changed |= bool(given)
    return changed


def _as_trained(node: Any, sight: _Sight) -> Any:
    """A number computed with the widths of the example; what else it is made of (batch, height,
    length) is read as before."""
    if node not in sight.widths:
        return node
    if _read_by(node, sight) is not None:
        return sight.number(node)
    counted = _counted_by(node, sight)
    if counted:
        return _count_as_trained(node, sight, *counted)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _as_trained(n, sight))
    if not any(isinstance(leaf, fx.Node) for leaf in tree_leaves((args, kwargs))):
        return sight.number(node)
    with node.graph.inserting_after(node):
        return node.graph.create_node(node.op, node.target, args, kwargs)


def _resized(user: fx.Node, given: Any, sight: _Sight, old: int, new: int) -> Any:
    """A size that was `old` and has to be `new` now; as a formula, if it depends on more than
    widths: the next batch may be another."""
    trained = _as_trained(given, sight)
    if not isinstance(trained, fx.Node):
        return new
    if _as_cut(given, sight) == new:
        return given
    graph = user.graph
    count, rest = _product(trained)
    if rest and count * new % old == 0:
        with graph.inserting_before(user):
            found: Any = count * new // old
            for factor in rest:
                found = graph.call_function(operator.mul, (factor, found))
        return found
    with graph.inserting_before(user):  # no formula is known: the sizes of the example only
        graph.call_function(expect, (trained, sight.number(given)))
    return new


def _as_cut(node: Any, sight: _Sight) -> Any:
    """A number computed with the widths that are left, and the other sizes of the example."""
    if not isinstance(node, fx.Node):
        return node
    if node not in sight.widths:
        return sight.number(node)
    read = _read_by(node, sight)
    if read is not None:
        return sight.size(*read)
    counted = _counted_by(node, sight)
    if counted:
        return math.prod(sight.size(counted[0], axis) for axis in range(len(counted[0].shape)))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _as_cut(n, sight))
    return cast(Any, node.target)(*args, **kwargs) if node.op == "call_function" else None


def _product(node: Any) -> tuple[int, list[fx.Node]]:
    """A number as a constant times readings."""
    if isinstance(node, int):
        return node, []
    if node.target is operator.mul and not node.kwargs:
        (one, left), (two, right) = (_product(factor) for factor in node.args)
        return one * two, left + right
    return 1, [node]


_ARITHMETIC = (operator.mul, operator.truediv, operator.add, operator.sub, operator.imul,
               operator.itruediv, operator.pow, torch.mul, torch.div, torch.tensor, torch.clamp,
               "mul", "div", "mul_", "div_", "new_tensor", "clamp")  # fmt: skip


def _reads_width(node: fx.Node, sight: _Sight) -> bool:
    """True for `x.shape[axis]`, `x.size(axis)` and `x.numel()`, of channels that go."""
    read = _read_by(node, sight) or _counted_by(node, sight)
    if read is None or isinstance(read[1], list):
        return bool(read and read[1])
    return sight.changed(*read)


def _counted_by(node: Any, sight: _Sight) -> tuple[Value, list[int]] | None:
    """The tensor, and its axes that get shorter, where a node counts the elements."""
    if node.target not in ("numel", "nelement", torch.numel) or len(node.args) != 1:
        return None
    values = sight.values(node.args[0])
    if len(values) != 1:
        return None
    return values[0], [k for k in range(len(values[0].shape)) if sight.changed(values[0], k)]


def _count_as_trained(node: fx.Node, sight: _Sight, value: Value, axes: list[int]) -> Any:
    """As many elements as there were with all channels, for any batch, height or length."""
    left = math.prod(sight.size(value, axis) for axis in axes)
    if not left:
        return sight.number(node)
    with node.graph.inserting_after(node):
        each = node.graph.call_function(operator.floordiv, (node, left))
    with node.graph.inserting_after(each):
        before = math.prod(value.shape[axis] for axis in axes)
        return node.graph.call_function(operator.mul, (each, before))


def _read_by(node: Any, sight: _Sight) -> tuple[Value, int] | None:
    """The tensor and the axis, where a node reads a size."""
    if node.target == "size" and len(node.args) == 2:
        values, axis = sight.values(node.args[0]), sight.given(node.args[1])
        axes = list(range(len(values[0].shape))) if values else []
    elif node.target is operator.getitem:
        values, axes = _shape_of(node.args[0], sight)
        axis = sight.given(node.args[1]) if values else None
    else:
        return None
    return (values[0], axes[axis]) if values and isinstance(axis, int) else None


def _shape_of(node: Any, sight: _Sight) -> tuple[list[Value], list[int]]:
    """The tensor and the axes, where a node is a shape or a part of one."""
    if not isinstance(node, fx.Node):
        return [], []
    if (node.target is getattr and node.args[1] == "shape") or (
        node.target == "size" and len(node.args) == 1
    ):
        values = sight.values(node.args[0])
        return values, list(range(len(values[0].shape))) if values else []
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        values, axes = _shape_of(node.args[0], sight)
        return values, axes[node.args[1]]
    return [], []
