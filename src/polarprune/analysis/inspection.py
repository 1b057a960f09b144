"""One look at a model: tapes, labels, groups and cost, under what is known so far.

`trace` looks again whenever it has found something out: code that was re-emitted, numbers that
follow a width, groups that stay whole.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from ..channels.connectivity import hold_heads, hold_spine
from ..channels.graph import FROZEN, Graph, Location, module_of
from ..channels.grouping import build, follow
from ..channels.labels import Labels
from ..channels.propagation import AtLeast, Flow, Rule
from ..channels.rules.table import by_tag
from ..cost.resources import measure
from ..errors import PruneError
from ..rewriting.capture import capture_all
from ..rewriting.captured_forward import CapturedForward
from ..rewriting.resize import shim
from ..rewriting.weighted_norms import weights_in
from ..tracing.model_state import Example, named_tensors, on_host
from ..tracing.recorder import record
from ..tracing.tape import Tape


class Inspection:
    """One look at the model; repeated when something has to be treated differently."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        keep: tuple[str, ...],
        rules: Mapping[Any, Rule],
        norms: bool,
    ) -> None:
        self.model, self.example, self.keep, self.rules = model, example, keep, rules
        self.norms = norms
        self.norm_code: dict[str, CapturedForward] = {}  # modules that take means over channels
        self.mixing: set[str] = set()  # those whose means cannot be weighted
        self.modules = dict(model.named_modules())
        self.rewritten: dict[str, CapturedForward] = {}
        self.size_attributes: dict[str, dict[str, Location]] = {}  # attributes that follow a width
        self.held: dict[str, str] = {}  # group -> why it stays whole
        self.minimum: dict[str, str] = {}  # group -> why it cannot close entirely
        self.seeds: set[int] = {1, 2}  # of the plans that are tried
        self.notes: list[str] = []
        self._tapes: list[Tape] = []
        self._flow: tuple[list[Tape], int, Flow] | None = None
        self._hopeless: set[str] = set()  # modules that cannot be re-emitted

    def __call__(self) -> Graph:
        """Repeated until all means over open channels can be weighted."""
        while True:
            graph = self._look()
            unknown = {item.op.module for item in graph.statistics} - self.norm_code.keys()
            if unknown:
                found = capture_all(self.model, self.example, sorted(unknown))
                self.norm_code.update(found)
                self.mixing |= unknown - found.keys()
                self._tapes = []
            elif not self._weigh(graph):
                return graph

    def _weigh(self, graph: Graph) -> bool:
        """Find the means in the code of their modules; True if some cannot be weighted."""
        before = len(self.mixing)
        for path in dict.fromkeys(item.op.module for item in graph.statistics):
            captured = self.rewritten.get(path) or self.norm_code[path]
            weights = weights_in(graph, path, captured)
            if weights is None or "forward" in vars(self.modules[path]):  # could not be put back
                self.mixing.add(path)
            else:
                graph.weights[path], graph.weighted[path] = weights
        names = graph.owners
        for units in graph.weights.values():
            for name in {names[unit] for unit in units.tolist() if unit != FROZEN}:
                graph.groups[name].minimum = max(1, graph.groups[name].minimum)
        return len(self.mixing) > before

    def _look(self) -> Graph:
        tapes = self._tapes or self._record()
        with on_host():
            graph = build(tapes, self._followed(tapes), self.held)
            graph.rewritten = dict(self.rewritten)
            graph.size_attributes = self.following()
            graph.notes += [*self.notes, *(f"{g}: {why}" for g, why in self.minimum.items())]
            hold_spine(graph)
            hold_heads(graph)
            for name in self.minimum:
                graph.groups[name].minimum = max(1, graph.groups[name].minimum)
            graph.cost = measure(self.model, graph)
        return graph

    def more_with_norms(self, graph: Graph) -> int:
        """How many more channels `norms=True` may open, as far as labels tell."""
        with on_host():
            if self.norms or not self._followed(graph.tapes).unweighted:
                return 0
            flow = Flow(Labels(), self.rules, by_tag, norms=lambda path: True)
            follow(graph.tapes, flow, self._kept())
            return max(0, build(graph.tapes, flow, self.held).units - graph.units)

    def _followed(self, tapes: list[Tape]) -> Flow:
        """The labels, sent through these tapes; the same as before if nothing has changed."""
        state = (tapes, len(self.mixing))
        if self._flow is None or self._flow[0] is not tapes or self._flow[1] != len(self.mixing):
            flow = Flow(Labels(), self.rules, by_tag)
            flow.norms = lambda path: self.norms and path not in self.mixing
            follow(tapes, flow, self._kept())
            self._hold_projections(flow)
            self._flow = (*state, flow)
        return self._flow[2]

    def _hold_projections(self, flow: Flow) -> None:
        """torch tells an LSTM with projections by its state: more hidden units than projections."""
        for path, module in self.modules.items():
            if isinstance(module, nn.LSTM) and module.proj_size:
                why = f"more than the {module.proj_size} projections of {path or 'the model'}"
                for name, _ in module.named_parameters(path):
                    if name.rpartition(".")[2].startswith("weight_hr") and flow.named_layers(name):
                        layer = flow.named_layers(name)[-1]
                        flow.at_least.append(AtLeast(layer, 1, module.proj_size + 1, why))

    def _record(self) -> list[Tape]:
        code = {**self.norm_code, **self.rewritten}
        forwards = {path: partial(shim, captured=captured) for path, captured in code.items()}
        self._tapes = [record(self.model, self.example, training=False, forwards=forwards)]
        self.notes = []
        try:
            self._tapes.append(record(self.model, self.example, training=True, forwards=forwards))
        except PruneError as error:
            self.notes = [f"followed in eval mode only; train mode did not run: {error}"]
        return self._tapes

    def rewrite(self, paths: Iterable[str]) -> bool:
        """Have these modules re-emitted; False if none of them can be."""
        wanted = [
            path
            for path in dict.fromkeys(paths)
            if path not in self.rewritten and path not in self._hopeless
            and not type(self.modules[path]).__module__.startswith("torch.nn.")
        ]  # fmt: skip
        found = capture_all(self.model, self.example, wanted)
        self._hopeless |= set(wanted) - found.keys()
        self.set_rewritten({**self.rewritten, **found})
        return bool(found)

    def set_rewritten(self, rewritten: dict[str, CapturedForward]) -> None:
        self.rewritten, self._tapes = rewritten, []

    def following(self) -> dict[str, dict[str, Location]]:
        """Attributes that follow a width; re-emitted code does not read them."""
        return {
            path: mine for path, mine in self.size_attributes.items() if path not in self.rewritten
        }

    def like(self, path: str) -> list[str]:
        """All modules of the same class."""
        family = type(self.modules[path])
        return [other for other, module in self.modules.items() if type(module) is family]

    def _kept(self) -> list[tuple[str, str]]:
        """The tensors of the modules that `keep` names."""
        found = []
        for pattern in self.keep:
            hits = [
                (tensor, pattern)
                for tensor, _ in named_tensors(self.model)
                if _matches(module_of(tensor), pattern)
            ]
            if not hits:
                raise PruneError(
                    f"keep: no module with parameters matches {pattern!r}. Names are as in "
                    f"model.named_modules(); * matches anything."
                )
            found += hits
        return found


def _matches(module: str, pattern: str) -> bool:
    """A pattern names a module and what is inside it."""
    return fnmatch.fnmatch(module, pattern) or fnmatch.fnmatch(module, f"{pattern}.*")
