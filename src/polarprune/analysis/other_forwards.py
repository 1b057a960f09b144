"""Run other forwards of a class, such as one for an exporter, to see which width an integer is.

Some classes have a second method that computes the same as `forward` in another way, and code that
prepares a model for a runtime replaces `forward` by it. If it reads an integer that `forward` does
not read, it computes the same after a cut only if that integer has the right width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..channels.graph import Graph
from ..surgery.apply import cut_copy
from ..surgery.proof import difference
from ..surgery.write_recipe import write_recipe
from ..tracing.copying import copy_model
from ..tracing.model_state import Example
from .trial_cuts import trial_plan

_SEEDS = (0, 1, 2, 3)  # of the plans with which a second forward is tried
_CLOSE = 1e-4  # relative difference of outputs in float32
_MOST = 16  # choices that are tried


class OtherForwards:
    """Tells graphs apart by the other forwards of a model's classes."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.model, self.example = model, example
        self._known: dict[type[nn.Module], list[str]] = {}

    def only_fitting(self, family: type[nn.Module], graphs: Sequence[Graph]) -> int | None:
        """Return the index of the only graph whose cuts let all other forwards compute the same.

        None if the class has no other forward, or if none or several of the graphs fit.
        """
        methods = self._methods(family)
        if not methods or len(graphs) > _MOST:
            return None
        fitting = [
            number
            for number, graph in enumerate(graphs)
            if all(self._fits(graph, seed, family, methods) for seed in _SEEDS)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def _methods(self, family: type[nn.Module]) -> list[str]:
        """Return the names of the methods that compute the same as `forward` in the whole model."""
        if family not in self._known:
            named = [name for name in dir(family) if name.startswith("forward_")]
            self._known[family] = [
                name for name in named if self._same(copy_model(self.model), family, name)
            ]
        return self._known[family]

    def _fits(self, graph: Graph, seed: int, family: type[nn.Module], methods: list[str]) -> bool:
        """Return whether the other forwards work in a copy that is cut by a trial plan."""
        recipe = write_recipe(self.model, graph, trial_plan(graph, seed))
        small = cut_copy(self.model, recipe)
        return all(self._same(small, family, name) for name in methods)

    def _same(self, model: nn.Module, family: type[nn.Module], name: str) -> bool:
        """Return whether a model computes the same with another method in place of `forward`."""
        other = copy_model(model)
        for module in other.modules():
            if isinstance(module, family) and "forward" not in vars(module):
                vars(module)["forward"] = getattr(module, name)
        try:
            return difference(model, other, self.example, training=False) < _CLOSE
        except Exception:  # the method may take other arguments, or not fit the widths
            return False
