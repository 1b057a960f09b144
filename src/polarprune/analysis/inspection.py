"""One inspection of a model: run it, follow its channels, form groups, measure the cost.

`Inspection` holds the findings about a model so far: captured forwards, attributes that follow a
width, groups that trial cuts froze. `inspect()` builds a `Graph` under these findings. `confirm.py`
adds a finding and inspects again until trial cuts agree with the graph.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from ..channels.connectivity import attention_groups, carrying_groups
from ..channels.graph import FROZEN, Graph, Location, Place, Rewrites, module_of
from ..channels.grouping import build
from ..channels.label_decisions import follow
from ..channels.labels import Labels
from ..channels.propagation import AtLeast, Flow, Rule
from ..channels.rules.table import by_tag
from ..cost.resources import measure
from ..errors import PruneError
from ..rewriting.capture import capture_all
from ..rewriting.captured_forward import CapturedForward, Refused, notes_of
from ..rewriting.resize import marked_forward
from ..rewriting.weighted_norms import weights_in
from ..tracing.generation import CannotContinue
from ..tracing.model_state import Example, named_tensors, on_host
from ..tracing.recorder import record
from ..tracing.tape import Tape
from ..validation.arguments import check_keep


class Inspection:
    """A model, the user's settings, and what has been found out about the model so far.

    Attributes:
        rewritten: Modules whose forward was captured, which is resized for every cut.
        size_attributes: Module -> attribute -> the location whose width the attribute follows.
        frozen: Groups that trial cuts froze, and why.
        must_keep: Groups that cannot close entirely, and why.
        seeds: The seeds of the plans that trial cuts use.
        notes: Remarks for the user about the traced runs.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        keep: tuple[str, ...],
        rules: Mapping[object, Rule],
        norms: bool,
        min_channels: int = 0,
    ) -> None:
        self.model, self.example, self.keep, self.rules = model, example, keep, rules
        self.norms, self.min_channels = norms, min_channels
        self.modules = dict(model.named_modules())
        self.rewritten: dict[str, CapturedForward] = {}
        self.size_attributes: dict[str, dict[str, Location]] = {}
        self.frozen: dict[str, str] = {}
        self.must_keep: dict[str, str] = {}
        self.seeds: set[int] = {1, 2}
        self.notes: list[str] = []
        self._norm_code: dict[str, CapturedForward] = {}  # modules that take means over channels
        self._unweightable: dict[str, Refused] = {}  # means that cannot be weighted
        self._not_capturable: dict[str, Refused] = {}
        self._not_running: dict[str, Refused] = {}  # the model did not run with these
        self._not_continuing: CannotContinue | None = None  # why a cache counts as an output
        self._tapes: tuple[Tape, ...] = ()
        self._followed_before: tuple[tuple[Tape, ...], int, Flow] | None = None

    def inspect(self) -> Graph:
        """Build the graph repeatedly, until all means over prunable channels are weighted."""
        while True:
            graph = self._graph()
            unknown = {item.op.module for item in graph.statistics} - self._norm_code.keys()
            if unknown:
                found = capture_all(self.model, self.example, sorted(unknown))
                self._norm_code.update(found.captured)
                self._unweightable.update(found.refused)
                self._tapes = ()
                continue
            before = len(self._unweightable)
            graph = self._with_weighted_norms(graph)
            if len(self._unweightable) == before:
                return graph

    def _graph(self) -> Graph:
        """Build the graph under what is known so far."""
        tapes = self._tapes or self._record()
        with on_host():
            graph = build(tapes, self._followed(tapes), self.frozen)
            closing = [f"{name}: {why}" for name, why in self.must_keep.items()]
            graph = replace(
                graph,
                rewrites=Rewrites(dict(self.rewritten), self.followed_attributes()),
                notes=(*graph.notes, *self.notes, *closing, *self._unweightable_notes()),
            )
            needed = carrying_groups(graph) | attention_groups(graph) | self.must_keep.keys()
            graph = graph.with_minimum(dict.fromkeys(needed, 1))
            asked = {k: min(self.min_channels, g.size) for k, g in graph.prunable.items()}
            graph = graph.with_minimum(asked)
            return replace(graph, resources=measure(self.model, graph))

    def _with_weighted_norms(self, graph: Graph) -> Graph:
        """Find the means over prunable channels in the code of their modules, and weight them.

        Modules where that fails are added to `_unweightable`: their channels are frozen next time.
        """
        weights, weighted = {}, {}
        for path in dict.fromkeys(item.op.module for item in graph.statistics):
            captured = self.rewritten.get(path) or self._norm_code[path]
            found = weights_in(graph, path, captured)
            if "forward" in vars(self.modules[path]):  # could not be restored
                found = Refused("its forward was replaced on the instance")
            if isinstance(found, Refused):
                self._unweightable[path] = found
            else:
                weights[path], weighted[path] = found
        rewrites = replace(graph.rewrites, weights=weights, weighted=weighted)
        owners = graph.owners
        units = {unit for vector in weights.values() for unit in vector.tolist()} - {FROZEN}
        # A norm over no channels is undefined.
        graph = graph.with_minimum({owners[unit]: 1 for unit in units})
        return replace(graph, rewrites=rewrites)

    def counting_with_norms(self, graph: Graph) -> Callable[[], int]:
        """Return a function that counts how many more channels `norms=True` may make prunable.

        It follows all labels again, and does not hold the model.
        """
        with on_host():
            if self.norms or not self._followed(graph.tapes).unweighted:
                return int  # none
        return partial(
            _more_with_norms, graph.tapes, self.rules, self._kept(), dict(self.frozen), graph.units
        )

    # --- tapes and labels ---

    def _record(self) -> tuple[Tape, ...]:
        """Trace the model in eval mode, and in train mode if it runs in that."""
        code = {**self._norm_code, **self.rewritten}
        forwards = {
            path: partial(marked_forward, captured=captured) for path, captured in code.items()
        }
        run = partial(record, self.model, self.example, forwards=forwards)
        try:
            tapes = [run(training=False, generates=self._not_continuing is None)]
        except CannotContinue as error:
            if self.rewritten:  # the code that was captured may be the cause
                raise
            self._not_continuing = error
            tapes = [run(training=False, generates=False)]
        self.notes = self._cache_notes(tapes[0])
        try:
            tapes.append(run(training=True, generates=tapes[0].generates))
        except PruneError as error:
            self.notes += [f"followed in eval mode only; train mode did not run: {error}"]
        self._tapes = tuple(tapes)
        return self._tapes

    def _cache_notes(self, tape: Tape) -> list[str]:
        """Return what the user should know about a cache in the output."""
        if self._not_continuing is not None:
            return [
                f"the cache that the model returns counts as an output, and its channels are "
                f"frozen, because the model does not run on one more token with it: "
                f"{self._not_continuing}; pass use_cache=False to prune them"
            ]
        if tape.further_ops:
            return ["the cache that the model returns is not compared; generation with it is"]
        return []

    def keep_cache(self, error: CannotContinue) -> Graph:
        """Count a cache as an output from now on, and inspect again."""
        self._not_continuing = error
        return self.inspect()

    def _followed(self, tapes: tuple[Tape, ...]) -> Flow:
        """Return the labels after these tapes; computed again only if something has changed."""
        before, excluded = self._followed_before, len(self._unweightable)
        if before is None or before[0] is not tapes or before[1] != excluded:
            flow = Flow(Labels(), self.rules, by_tag)
            flow.norms = lambda path: self.norms and path not in self._unweightable
            follow(tapes, flow, self._kept())
            self._require_more_than_projections(flow)
            before = self._followed_before = (tapes, excluded, flow)
        return before[2]

    def _require_more_than_projections(self, flow: Flow) -> None:
        """Keep the hidden state of an LSTM with projections larger than the projections.

        torch recognizes the projections by this difference.
        """
        for path, module in self.modules.items():
            if isinstance(module, nn.LSTM) and module.proj_size:
                why = f"more than the {module.proj_size} projections of {path or 'the model'}"
                for name, _ in module.named_parameters(path):
                    if name.rpartition(".")[2].startswith("weight_hr") and flow.named_layers(name):
                        layer = flow.named_layers(name)[-1]
                        flow.at_least.append(AtLeast(layer, 1, module.proj_size + 1, why))

    # --- findings ---

    def rewrite(self, paths: Iterable[str]) -> bool:
        """Capture the forward of these modules; return False if none of them can be captured."""
        wanted = [path for path in dict.fromkeys(paths) if self._may_be_captured(path)]
        found = capture_all(self.model, self.example, wanted)
        self._not_capturable.update(found.refused)
        self.set_rewritten({**self.rewritten, **found.captured})
        return bool(found.captured)

    def _may_be_captured(self, path: str) -> bool:
        """Return False for layers of torch, and for modules that were captured or refused."""
        of_torch = type(self.modules[path]).__module__.startswith("torch.nn.")
        return not of_torch and path not in self.rewritten and path not in self._not_capturable

    def refusal(self, path: str) -> str:
        """Return why a module cannot be rewritten, as the end of a clause; empty if it can."""
        refused = self._not_capturable.get(path) or self._not_running.get(path)
        return f" (its forward cannot be rewritten: {refused})" if refused else ""

    def note_failure(self, path: str, error: PruneError) -> None:
        """Note that the model did not run with this module rewritten."""
        self._not_running[path] = Refused(str(error))

    def _unweightable_notes(self) -> list[str]:
        return notes_of(self._unweightable, "norms=True has no effect on its statistics")

    def set_rewritten(self, rewritten: dict[str, CapturedForward]) -> None:
        """Use these captured forwards; the model has to be traced again."""
        self.rewritten, self._tapes = rewritten, ()

    def followed_attributes(self) -> dict[str, dict[str, Place]]:
        """Return the attributes that follow a width. Captured forwards do not read theirs."""
        known = self.size_attributes.items()
        return {path: dict(mine) for path, mine in known if path not in self.rewritten}

    def same_class(self, path: str) -> list[str]:
        """Return all modules of the class of this one."""
        family = type(self.modules[path])
        return [other for other, module in self.modules.items() if type(module) is family]

    # --- what the user keeps ---

    def _kept(self) -> list[tuple[str, str]]:
        """Return the tensors of the modules that `keep` names, each with its pattern."""
        found = []
        for pattern in self.keep:
            hits = [
                (tensor, pattern)
                for tensor, _ in named_tensors(self.model)
                if _matches(module_of(tensor), pattern)
            ]
            check_keep(pattern, hits)
            found += hits
        return found


def _more_with_norms(
    tapes: tuple[Tape, ...],
    rules: Mapping[object, Rule],
    kept: list[tuple[str, str]],
    frozen: dict[str, str],
    units: int,
) -> int:
    """Return how many more units labels give if all means are weighted."""
    with on_host():
        flow = Flow(Labels(), rules, by_tag, norms=lambda path: True)
        follow(tapes, flow, kept)
        return max(0, build(tapes, flow, frozen).units - units)


def _matches(module: str, pattern: str) -> bool:
    """Return True if a pattern names a module or one that contains it."""
    return fnmatch.fnmatch(module, pattern) or fnmatch.fnmatch(module, f"{pattern}.*")
