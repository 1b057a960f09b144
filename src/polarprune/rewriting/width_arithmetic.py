"""Numbers that a module's code computes from widths.

Code such as `x * x.shape[1] ** -0.5` or `x.reshape(b * c, -1)` reads a width and computes with it.
After pruning, a scale has to be computed with the width before pruning, a size with the width after
it. Sizes that are not widths (batch, height, length) are still read from the tensors.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument
from torch.utils._pytree import tree_leaves

from ..tracing.tape import Value
from .node_functions import expect
from .node_shapes import NodeShapes

# Operations that use a number as a value, not as a size.
_ARITHMETIC = (
    operator.mul,
    operator.truediv,
    operator.add,
    operator.sub,
    operator.imul,
    operator.itruediv,
    operator.pow,
    torch.mul,
    torch.div,
    torch.tensor,
    torch.clamp,
    "mul",
    "div",
    "mul_",
    "div_",
    "new_tensor",
    "clamp",
)


def find_width_nodes(graph: fx.Graph, shapes: NodeShapes) -> set[fx.Node]:
    """Return the nodes that read a width that changes, or compute a number from one."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        computed = shapes.number(node) is not None and not found.isdisjoint(node.all_input_nodes)
        if computed or _reads_width(node, shapes):
            found.add(node)
    return found


def keep_scales(graph: fx.Graph, shapes: NodeShapes) -> bool:
    """Let values be computed with the widths before pruning; return whether anything changed.

    `x * width ** -0.5` keeps the factor that the model was trained with.
    """
    changed = False
    for node in list(graph.nodes):
        given = [width for width in node.all_input_nodes if width in shapes.width_nodes]
        if node.target is expect and given:
            _keep_expectation(graph, node, given[0], shapes)
        elif node.target in _ARITHMETIC and (
            node not in shapes.width_nodes or isinstance(shapes.number(node), float)
        ):
            for width in given:
                node.replace_input_with(width, _before_pruning(width, shapes))
        else:
            continue
        changed |= bool(given)
    return changed


def _keep_expectation(graph: fx.Graph, node: fx.Node, width: fx.Node, shapes: NodeShapes) -> None:
    """Let `expect` check the sizes that are not widths, or remove it if there are none."""
    trained = _before_pruning(width, shapes)
    if isinstance(trained, fx.Node):
        node.args = (trained, node.args[1])
    else:
        graph.erase_node(node)


def _before_pruning(node: Argument, shapes: NodeShapes) -> Argument:
    """Return a number computed with the widths before pruning.

    It is a constant, or a node if it also depends on sizes such as the batch size.
    """
    if not isinstance(node, fx.Node) or node not in shapes.width_nodes:
        return node
    if _size_read_by(node, shapes) is not None:
        return shapes.number(node)
    counted = _elements_counted_by(node, shapes)
    if counted:
        return _count_before_pruning(node, shapes, *counted)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _before_pruning(n, shapes))
    if not any(isinstance(leaf, fx.Node) for leaf in tree_leaves((args, kwargs))):
        return shapes.number(node)
    with node.graph.inserting_after(node):
        return node.graph.create_node(node.op, node.target, args, kwargs)


def _after_pruning(node: Argument, shapes: NodeShapes) -> Argument:
    """Return a number computed with the widths after pruning, for the sizes of the example."""
    if not isinstance(node, fx.Node):
        return node
    if node not in shapes.width_nodes:
        return shapes.number(node)
    read = _size_read_by(node, shapes)
    if read is not None:
        return shapes.size(*read)
    counted = _elements_counted_by(node, shapes)
    if counted:
        return math.prod(shapes.size(counted[0], axis) for axis in range(len(counted[0].shape)))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _after_pruning(n, shapes))
    return None if isinstance(node.target, str) else node.target(*args, **kwargs)


def resized_argument(
    user: fx.Node, given: Argument, shapes: NodeShapes, old: int, new: int
) -> Argument:
    """Return an argument of `user` that was `old` and has to be `new`.

    If it depends on more than widths, it stays a formula, because the next batch may have another
    size. If no formula is known, the node is valid for the sizes of the example only.
    """
    trained = _before_pruning(given, shapes)
    if not isinstance(trained, fx.Node):
        return new
    if _after_pruning(given, shapes) == new:
        return given
    graph = user.graph
    count, rest = _factors(trained)
    with graph.inserting_before(user):
        if not rest or count * new % old:
            graph.call_function(expect, (trained, shapes.number_of(given)))
            return new
        found: fx.Node | int = count * new // old
        for factor in rest:
            found = graph.call_function(operator.mul, (factor, found))
    return found


def _factors(node: Any) -> tuple[int, list[fx.Node]]:
    """Return a product as a constant and the nodes that it is multiplied with."""
    if isinstance(node, int):
        return node, []
    if node.target is operator.mul and not node.kwargs:
        (one, left), (two, right) = (_factors(factor) for factor in node.args)
        return one * two, left + right
    return 1, [node]


# --- nodes that read sizes ------------------------------------------------------------------------


def _reads_width(node: fx.Node, shapes: NodeShapes) -> bool:
    """Return whether a node reads a size that changes: `x.shape[1]`, `x.size(1)`, `x.numel()`."""
    read = _size_read_by(node, shapes)
    if read is not None:
        return shapes.changed(*read)
    counted = _elements_counted_by(node, shapes)
    return counted is not None and bool(counted[1])


def _elements_counted_by(node: fx.Node, shapes: NodeShapes) -> tuple[Value, list[int]] | None:
    """Return the tensor whose elements a node counts, and its axes that change; None otherwise."""
    if node.target not in ("numel", "nelement", torch.numel) or len(node.args) != 1:
        return None
    values = shapes.values(node.args[0])
    if len(values) != 1:
        return None
    return values[0], [k for k in range(len(values[0].shape)) if shapes.changed(values[0], k)]


def _count_before_pruning(
    node: fx.Node, shapes: NodeShapes, value: Value, axes: list[int]
) -> Argument:
    """Return the number of elements with all channels, for any batch size, height or length."""
    left = math.prod(shapes.size(value, axis) for axis in axes)
    if not left:
        return shapes.number(node)
    with node.graph.inserting_after(node):
        each = node.graph.call_function(operator.floordiv, (node, left))
    with node.graph.inserting_after(each):
        before = math.prod(value.shape[axis] for axis in axes)
        return node.graph.call_function(operator.mul, (each, before))


def _size_read_by(node: fx.Node, shapes: NodeShapes) -> tuple[Value, int] | None:
    """Return the tensor and the axis if a node reads a size, else None."""
    if node.target == "size" and len(node.args) == 2:
        values, axis = shapes.values(node.args[0]), shapes.number_of(node.args[1])
        axes = list(range(len(values[0].shape))) if values else []
    elif node.target is operator.getitem:
        values, axes = _shape_read_by(node.args[0], shapes)
        axis = shapes.number_of(node.args[1]) if values else None
    else:
        return None
    return (values[0], axes[axis]) if values and isinstance(axis, int) else None


def _shape_read_by(node: Argument, shapes: NodeShapes) -> tuple[list[Value], list[int]]:
    """Return the tensor and the axes if a node is a shape or a slice of one."""
    if not isinstance(node, fx.Node):
        return [], []
    if (node.target is getattr and node.args[1] == "shape") or (
        node.target == "size" and len(node.args) == 1
    ):
        values = shapes.values(node.args[0])
        return values, list(range(len(values[0].shape))) if values else []
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        values, axes = _shape_read_by(node.args[0], shapes)
        return values, axes[node.args[1]]
    return [], []
