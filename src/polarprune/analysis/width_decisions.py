"""Code that decides by a width: comparisons and roundings that a cut may change.

A recorded run has written down what the model's code did with sizes (`watched_sizes`). Here these
expressions are computed for many plans, without running the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from ..channels.graph import FROZEN, Graph, Plan
from ..surgery.recipe import Recipe
from ..surgery.write_recipe import write_recipe
from ..tracing.watched_sizes import AttributeOf, Decision, Expression, Leaf, SizeOf

Read = Callable[[Leaf], int]


class WidthReader:
    """Reads sizes and attributes as several plans would leave them."""

    def __init__(self, model: nn.Module, graph: Graph, plans: Sequence[Plan]) -> None:
        self.graph = graph
        self.log = [tape.sizes for tape in graph.tapes]
        self._readers = [self._reader(model, plan) for plan in plans] if self._used() else []

    def _used(self) -> bool:
        return any(log.decisions or log.rounded for log in self.log)

    def _reader(self, model: nn.Module, plan: Plan) -> Read:
        alive = self.graph.settle(self.graph.alive(plan))
        recipe: Recipe = write_recipe(model, self.graph, plan)

        def read(leaf: Leaf) -> int:
            if isinstance(leaf, AttributeOf):
                found = recipe.attributes.get(leaf.module, {}).get(leaf.name, leaf.number)
                return found if isinstance(found, int) else leaf.number
            left = self.graph.shape(leaf.value, alive)
            return leaf.number if left is None else left[leaf.axis]

        return read

    def changing(self) -> Iterator[Decision]:
        """Comparisons that may come out differently: neither of the same on both sides, nor of
        numbers that stay as they are."""
        for decision in (one for log in self.log for one in log.decisions.values()):
            left, right = (self._values(side) for side in (decision.left, decision.right))
            constant = all(self._is_constant(side) for side in (left, right))
            if not constant and (left != right or None in left):
                yield decision

    def telling(self) -> Iterator[set[int]]:
        """For every rounding that depends on widths, the plans in which it has another result."""
        for one in (one for log in self.log for one in log.rounded.values()):
            first, *others = self._values(one)
            found = {k for k, value in enumerate(others) if value != first}
            if found:
                yield found

    def _values(self, one: Expression) -> list[object]:
        """As it is, and for every plan."""
        return [one.value(read) for read in (_as_traced, *self._readers)]

    @staticmethod
    def _is_constant(values: list[object]) -> bool:
        return None not in values and all(value == values[0] for value in values)

    def groups(self, decision: Decision) -> list[str]:
        """The open groups whose widths are compared."""
        units: set[int] = set()
        for leaf in decision.leaves:
            layers = (
                self.graph.values.get(leaf.value, [])
                if isinstance(leaf, SizeOf)
                else [u for name, axes in self.graph.axes.items()
                      if name.startswith(f"{leaf.module}." if leaf.module else "")
                      for u in axes.values()]
            )  # fmt: skip
            units.update(unit for layer in layers for unit in layer.unique().tolist())
        owners = self.graph.owners
        return list(dict.fromkeys(owners[unit] for unit in sorted(units - {FROZEN})))


def _as_traced(leaf: Leaf) -> int:
    return leaf.number
