"""The tensors and numbers in a module's graph: as recorded on the example, and after pruning."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..channels.graph import Graph
from ..tracing.tape import Tape, Value


class NodeShapes:
    """Looks up what the nodes of one module computed, and which channels a plan keeps.

    Args:
        graph: What `trace` found.
        path: The name of the module.
        kept_units: One truth value for each unit: False if the plan removes it.
        tape: A recorded run in the mode of the graph.
    """

    def __init__(self, graph: Graph, path: str, kept_units: Tensor, tape: Tape) -> None:
        self.graph, self.path, self.kept_units, self.tape = graph, path, kept_units, tape
        self.width_nodes: set[fx.Node] = set()  # numbers computed from widths that change

    def values(self, node: Any) -> list[Value]:
        """Return the tensors that a node computed in the recorded run."""
        return self.tape.nodes.values.get((self.path, node.name), [])

    def number(self, node: fx.Node) -> int | float | None:
        """Return the number that a node computed in the recorded run, or None."""
        return self.tape.nodes.numbers.get((self.path, node.name))

    def number_of(self, item: object) -> Any:
        """Return an argument as a number: a constant, or what a node computed (None if none)."""
        return self.number(item) if isinstance(item, fx.Node) else item

    def kept(self, value: Value, axis: int) -> Tensor | None:
        """Return which indices along an axis are kept, or None if it has no channels."""
        return self.graph.kept(value, axis, self.kept_units)

    def kept_if_cut(self, value: Value, axis: int) -> Tensor | None:
        """Return which indices along an axis are kept, or None if all are."""
        kept = self.kept(value, axis)
        return None if kept is None or bool(kept.all()) else kept

    def size(self, value: Value, axis: int) -> int:
        """Return the size along an axis after pruning."""
        kept = self.kept(value, axis)
        return value.shape[axis] if kept is None else int(kept.sum())

    def changed(self, value: Value, axis: int) -> bool:
        """Return whether pruning changes the size along an axis."""
        return self.size(value, axis) != value.shape[axis]
