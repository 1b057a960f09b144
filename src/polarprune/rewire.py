"""Modules whose Python code bakes in widths: their forward is re-emitted with other numbers.

`F.pad(x, (0, 0, 0, 0, 8, 8))`, `x.split(self.c, 1)`, `x[:, :16]` do not follow when channels go.
Such a module is traced by torch.fx (its children stay opaque), the numbers are computed anew from
the labels, and the result keeps the module's children and the names of its parameters.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .groups import Graph, stays
from .tape import Mark, Value

Edit = dict[str, Any]


class _Shallow(fx.Tracer):
    """Layers are opaque, and a split gives its pieces, so that `list(x.chunk(2))` works."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = super().create_proxy(kind, target, *args, **kwargs)
        pieces = None
        if target in ("chunk", torch.chunk):
            pieces = _argument(proxy.node, 1, "chunks")
        elif target in ("split", "split_with_sizes", torch.split):
            sizes = _argument(proxy.node, 1, "split_size", ())
            pieces = len(sizes) if isinstance(sizes, (tuple, list)) else None
        return tuple(proxy[i] for i in range(pieces)) if isinstance(pieces, int) else proxy


def as_graph(module: nn.Module) -> fx.GraphModule | None:
    """The module's forward as a graph, or None if it cannot be written down as one."""
    if "forward" in vars(module):
        return None  # replaced by the user; fx would read the one of the class
    double, graphs = copy.copy(module), []  # what forward remembers must not end up in the module
    try:
        for double.training in (True, False):
            graphs.append(_Shallow().trace(double))
    except Exception:  # whatever the user's code does with a proxy
        return None
    if str(graphs[0]) != str(graphs[1]):
        return None  # train and eval mode take different ways
    return fx.GraphModule(module, graphs[0], type(module).__name__)


def shim(module: nn.Module, mark: Mark) -> Callable[..., Any]:
    """A forward that computes the same, node by node, and marks what each node gave."""
    graph = as_graph(module)
    assert graph is not None, "only modules that can be written as a graph are shimmed"

    class Marking(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            mark(n.name, result)
            return result

    return lambda *args, **kwargs: Marking(graph).run(*_positional(graph, args, kwargs))


def _positional(graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    values = list(args)
    for node in [n for n in graph.graph.nodes if n.op == "placeholder"][len(args) :]:
        if node.target in kwargs:
            values.append(kwargs[node.target])
        elif node.args:
            values.append(node.args[0])
    return values


def rewiring(module: nn.Module, path: str, graph: Graph, alive: Tensor) -> list[Edit]:
    """The edits that this module's graph needs for the given live units."""
    found = as_graph(module)
    if found is None:
        return []
    edits = []
    for node in found.graph.nodes:
        handler = _HANDLERS.get(node.target) if node.op.startswith("call_") else None
        if handler:
            edit = handler(node, _Sight(graph, path, alive))
            if edit is not None:
                edits.append({"node": node.name, **edit})
    return edits


class _Sight:
    """How many channels are left where, for the nodes of one module."""

    def __init__(self, graph: Graph, path: str, alive: Tensor) -> None:
        self.graph, self.path, self.alive = graph, path, alive

    def values(self, node: Any) -> list[Value]:
        for tape in self.graph.tapes:
            if (self.path, node.name) in tape.marks:
                return tape.marks[self.path, node.name]
        return []

    def kept(self, value: Value, axis: int) -> Tensor | None:
        """Which indices along an axis stay, or None if no label varies along it."""
        for units in self.graph.values.get(value, []):
            if units.shape[axis] > 1:
                return stays(units, self.alive).movedim(axis, 0).flatten(1).any(1)
        return None

    def size(self, value: Value, axis: int) -> int:
        kept = self.kept(value, axis)
        return value.shape[axis] if kept is None else int(kept.sum())


def _pad(node: fx.Node, sight: _Sight) -> Edit | None:
    (out,) = sight.values(node)
    amounts = list(_argument(node, 1, "pad"))
    new = list(amounts)
    for place in range(0, len(amounts), 2):
        axis = len(out.shape) - 1 - place // 2
        kept = sight.kept(out, axis)
        before, after = amounts[place : place + 2]
        if kept is not None and (before or after):
            new[place] = int(kept[:before].sum())
            new[place + 1] = int(kept[len(kept) - after :].sum())
    return {"pad": new} if new != amounts else None


def _shape(node: fx.Node, sight: _Sight) -> Edit | None:
    """Sizes of a view that are written as numbers, or computed by a rule that no longer holds."""
    (out,) = sight.values(node)
    new = {
        axis: sight.size(out, axis)
        for axis in range(len(out.shape))
        if sight.size(out, axis) != out.shape[axis]
    }
    given = _shape_arguments(node)
    new = {axis: size for axis, size in new.items() if axis < len(given) and given[axis] != -1}
    return {"shape": {str(axis): size for axis, size in new.items()}} if new else None


def _split(node: fx.Node, sight: _Sight) -> Edit | None:
    pieces = sight.values(node)
    axis = _argument(node, 2, "dim", 0) % len(pieces[0].shape)
    sizes = [sight.size(piece, axis) for piece in pieces]
    if sizes == [piece.shape[axis] for piece in pieces]:
        return None
    return {"split": sizes, "axis": axis}


def _getitem(node: fx.Node, sight: _Sight) -> Edit | None:
    if not isinstance(node.args[0], fx.Node):
        return None
    source = sight.values(node.args[0])
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if len(source) != 1 or Ellipsis in index or None in index:
        return None
    edit = {}
    for axis, item in enumerate(index):
        kept = sight.kept(source[0], axis) if isinstance(item, slice) else None
        whole = not isinstance(item, slice) or (item.start is None and item.stop is None)
        if kept is None or whole or bool(kept.all()):
            continue
        (out,) = sight.values(node)
        edit[str(axis)] = _bounds(sight, source[0], out, axis, kept, item)
    return {"slice": edit} if edit else None


def _bounds(
    sight: _Sight, source: Value, out: Value, axis: int, kept: Tensor, given: slice
) -> list[int]:
    """Where the slice `out` of `source` starts and stops among the kept channels."""
    if not any(isinstance(end, fx.Node) for end in (given.start, given.stop)):
        start, stop, _ = given.indices(source.shape[axis])
        return [int(kept[:start].sum()), int(kept[:stop].sum())]
    wanted = next(units for units in sight.graph.values[out] if units.shape[axis] > 1)
    have = next(units for units in sight.graph.values[source] if units.shape[axis] > 1)
    length = wanted.shape[axis]
    for start in range(have.shape[axis] - length + 1):
        if torch.equal(have.narrow(axis, start, length), wanted):
            return [int(kept[:start].sum()), int(kept[: start + length].sum())]
    raise AssertionError("a slice that is not part of its source")


def _hollow(node: fx.Node, sight: _Sight) -> Edit | None:
    values = sight.values(node)
    if values and all(sight.kept(value, 1) is not None for value in values[:1]):
        kept = sight.kept(values[0], 1)
        if kept is not None and not bool(kept.any()):
            return {"hollow": True}
    return None


Handler = Callable[[fx.Node, _Sight], Edit | None]
_TARGETS: dict[Handler, tuple[Any, ...]] = {
    _pad: (F.pad, torch._C._nn.pad),
    _getitem: (operator.getitem,),
    _shape: ("view", "reshape", "new_zeros", "new_ones", torch.reshape, torch.zeros, torch.ones),
    _split: ("split", "chunk", "split_with_sizes", torch.split, torch.chunk),
    _hollow: (F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
              F.interpolate, F.upsample),
}  # fmt: skip
_HANDLERS = {target: handler for handler, targets in _TARGETS.items() for target in targets}

BAKED = ("constant_pad_nd", "view", "_unsafe_view", "split", "split_with_sizes", "slice",
         "max_pool", "avg_pool", "upsample")  # fmt: skip


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _shape_arguments(node: fx.Node) -> list[Any]:
    lead = 0 if node.target in (torch.zeros, torch.ones) else 1
    first = _argument(node, lead, "size" if lead == 0 or "new" in str(node.target) else "shape", ())
    return list(first) if isinstance(first, (tuple, list)) else list(node.args[lead:])


def rewire(module: nn.Module, edits: list[Edit]) -> fx.GraphModule:
    """The module with other numbers in its forward."""
    graph = as_graph(module)
    assert graph is not None, "written into the recipe, so it can be written as a graph"
    nodes = {node.name: node for node in graph.graph.nodes}
    for edit in edits:
        _edit(graph.graph, nodes[edit["node"]], edit)
    _carry_over(module, graph)
    return graph


def _carry_over(module: nn.Module, graph: fx.GraphModule) -> None:
    """What forward does not use may be used from elsewhere."""
    for table in ("_modules", "_parameters", "_buffers"):
        for key, item in getattr(module, table).items():
            getattr(graph, table).setdefault(key, item)
    for key, value in vars(module).items():
        if key not in vars(graph):
            setattr(graph, key, value)


def _edit(graph: fx.Graph, node: fx.Node, edit: Edit) -> None:
    source = node.args[0] if node.args else None
    if "pad" in edit:
        rest = {key: value for key, value in node.kwargs.items() if key != "pad"}
        node.args, node.kwargs = (source, tuple(edit["pad"]), *node.args[2:]), rest
    elif "shape" in edit:
        shape = _shape_arguments(node)
        for axis, size in edit["shape"].items():
            shape[int(axis)] = size
        rest = {k: v for k, v in node.kwargs.items() if k in ("dtype", "device", "requires_grad")}
        source_too = () if node.target in (torch.zeros, torch.ones) else (source,)
        node.args, node.kwargs = (*source_too, tuple(shape)), rest
    elif "split" in edit:
        node.op, node.target = "call_function", torch.split
        node.args, node.kwargs = (source, edit["split"], edit["axis"]), {}
    elif "slice" in edit:
        index = list(node.args[1]) if isinstance(node.args[1], tuple) else [node.args[1]]
        for axis, (start, stop) in edit["slice"].items():
            index[int(axis)] = slice(start, stop)
        node.args = (source, tuple(index))
    else:
        _make_hollow(graph, node)


def _make_hollow(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        one = graph.call_function(one_channel, (node.args[0],))
    node.args = (one, *node.args[1:])
    with graph.inserting_after(node):
        none = graph.call_function(no_channel, (node,))
    node.replace_all_uses_with(none, delete_user_cb=lambda user: user is not none)


def one_channel(x: Tensor) -> Tensor:
    """Zeros of the shape of `x` with one channel: many kernels refuse to run on none."""
    return x.new_zeros(x.shape[0], 1, *x.shape[2:])


def no_channel(x: Tensor) -> Tensor:
    return x[:, :0]
