"""Rewrite modules whose Python code contains widths.

`F.pad(x, (0, 0, 0, 0, 8, 8))`, `x.split(self.c, 1)` and `x.reshape(b, n, c)` fail, or compute
something else, when channels are removed. Such a module is captured as a graph. For every plan,
the numbers in the graph are computed again from the channels that are kept. The rest of the module
is not changed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx, nn

from ..channels.graph import Graph, stays
from ..tracing.recorder import Mark
from ..tracing.source_lines import SOURCE_LINE, run_as_line
from .call_matching import graph_arguments
from .captured_forward import CapturedForward
from .node_shapes import NodeShapes
from .resize_calls import resize_call
from .stored_graphs import StoredForward, encode
from .width_arithmetic import find_width_nodes, keep_scales


def marked_forward(
    module: nn.Module, mark: Mark, captured: CapturedForward
) -> Callable[..., object]:
    """Return a forward that runs the captured graph node by node and marks every result.

    `tracing.recorder` runs it in place of the module's own forward, so that the tape knows which
    node made which tensor.
    """

    class MarkingInterpreter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = run_as_line(n.meta.get(SOURCE_LINE), super().run_node, n)
            mark(n.name, result)
            return result

    def forward(*args: object, **kwargs: object) -> object:
        graph = captured.graphs["train" if module.training else "eval"]
        inputs = graph_arguments(captured, module, args, kwargs, type(module).__name__)
        return MarkingInterpreter(module, graph=graph).run(*inputs)

    return forward


def resized(path: str, graph: Graph, kept_units: Tensor) -> StoredForward | None:
    """Return a rewritten module's graphs for a plan, as plain data.

    Args:
        path: The name of the module.
        graph: What `trace` found; `graph.rewritten` holds the captured forward.
        kept_units: One truth value for each unit: False if the plan removes it.

    Returns:
        The graphs, or None if the plan changes nothing in this module.
    """
    captured = graph.rewritten[path].copy()
    changed = _is_cut(path, graph, kept_units)
    for mode, tape in zip(("eval", "train"), graph.tapes, strict=False):
        code = captured.graphs[mode]
        shapes = NodeShapes(graph, path, kept_units, tape)
        shapes.width_nodes = find_width_nodes(code, shapes)
        for node in list(code.nodes):
            changed |= resize_call(node, shapes)
        changed |= keep_scales(code, shapes)
        _give_lines(code)
    if len(graph.tapes) == 1:  # train mode did not run on the example
        captured.graphs["train"] = captured.graphs["eval"]
    return encode(captured) if changed else None


def _give_lines(code: fx.Graph) -> None:
    """Give every new call the source line of the call that it was made for, which follows it."""
    line = None
    for node in reversed(code.nodes):
        if node.op.startswith("call_"):
            line = node.meta.setdefault(SOURCE_LINE, line)


def _is_cut(path: str, graph: Graph, kept_units: Tensor) -> bool:
    """Return whether a tensor that the module uses, or a weight inside it, gets narrower.

    Its code may count channels without passing a number to any operation.
    """
    stem = f"{path}." if path else ""
    weights = [axes for name, axes in graph.axes.items() if name.startswith(stem)]
    inside = (units for axes in weights for units in axes.values())
    values = (value for op in graph.ops_in(path) for value in op.tensors())
    used = (units for value in values for units in graph.values.get(value, []))
    distinct = {id(units): units for units in (*inside, *used)}
    return any(not bool(stays(units, kept_units).all()) for units in distinct.values())
