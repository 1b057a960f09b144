"""Find comparisons and roundings of widths in the model's code that a cut may change.

A traced run has noted what the model's code did with sizes (`tracing/watched_sizes.py`). Here these
expressions are evaluated for many plans, without running the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from ..channels.graph import FROZEN, Graph
from ..surgery.write_recipe import write_sizes
from ..tracing.watched_sizes import AttributeOf, Decision, Expression, Leaf, SizeOf

Read = Callable[[Leaf], int]  # returns the number that a size or an attribute has after a cut


class WidthReader:
    """Computes what comparisons and roundings of sizes give after each of several plans.

    Args:
        model: The traced model.
        graph: What `trace` found.
        plans: For each plan, the units that are left after it.
    """

    def __init__(self, model: nn.Module, graph: Graph, plans: Sequence[Tensor]) -> None:
        self.graph = graph
        self.decisions = [one for tape in graph.tapes for one in tape.decisions]
        self.rounded = [one for tape in graph.tapes for one in tape.rounded]
        decided = [one.leaves for one in self.decisions]
        rounded = [one.leaves for one in self.rounded]
        leaves = frozenset[Leaf]().union(*decided, *rounded)
        self._modules = {leaf.module for leaf in leaves if isinstance(leaf, AttributeOf)}
        self._readers = [self._reader(model, plan) for plan in plans if decided or rounded]

    def _reader(self, model: nn.Module, kept_units: Tensor) -> Read:
        """Return a function that reads sizes and attributes as they are with these units."""
        attributes = write_sizes(model, self.graph, kept_units, self._modules).attributes

        def read(leaf: Leaf) -> int:
            if isinstance(leaf, AttributeOf):
                found = attributes.get(leaf.module, {}).get(leaf.name, leaf.number)
                return found if isinstance(found, int) else leaf.number
            left = self.graph.shape(leaf.value, kept_units)
            return leaf.number if left is None else left[leaf.axis]

        return read

    def changing(self) -> Iterator[Decision]:
        """Yield the comparisons whose result may change with a cut.

        A comparison does not change if both sides are equal in every plan, if it compares
        constants, or if it tests for emptiness and all groups keep a channel.
        """
        for decision in self.decisions:
            if decision.tells_emptiness and not self.closable(decision):
                continue
            left, right = (self._values(side) for side in (decision.left, decision.right))
            constant = all(self._is_constant(side) for side in (left, right))
            if not constant and (left != right or None in left):
                yield decision

    def distinguishing(self) -> Iterator[set[int]]:
        """Yield, for each rounding whose result depends on the plan, the plans that change it."""
        for one in self.rounded:
            first, *others = self._values(one)
            found = {k for k, value in enumerate(others) if value != first}
            if found:
                yield found

    def _values(self, one: Expression) -> list[object]:
        """Return the value of an expression as traced, then for every plan."""
        return [one.value(read) for read in (_as_traced, *self._readers)]

    @staticmethod
    def _is_constant(values: list[object]) -> bool:
        return None not in values and all(value == values[0] for value in values)

    def groups(self, decision: Decision) -> list[str]:
        """Return the prunable groups whose widths are compared."""
        layers = [layer for leaf in decision.leaves for layer in self._layers(leaf)]
        units = {unit for layer in layers for unit in layer.unique().tolist()}
        owners = self.graph.owners
        return list(dict.fromkeys(owners[unit] for unit in sorted(units - {FROZEN})))

    def closable(self, decision: Decision) -> list[str]:
        """Return the groups among them that may close entirely."""
        groups = self.graph.groups
        return [name for name in self.groups(decision) if not groups[name].minimum]

    def _layers(self, leaf: Leaf) -> list[Tensor]:
        """Return the units of a tensor, or of all parameters of the attribute's module."""
        if isinstance(leaf, SizeOf):
            return self.graph.values.get(leaf.value, [])
        prefix = f"{leaf.module}." if leaf.module else ""
        return [
            units
            for name, axes in self.graph.axes.items()
            if name.startswith(prefix)
            for units in axes.values()
        ]


def _as_traced(leaf: Leaf) -> int:
    return leaf.number
