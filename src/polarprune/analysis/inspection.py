"""One inspection of a model: run it, follow its channels, form groups, measure the cost.

`Inspection` holds the findings about a model so far (`findings.py`): captured forwards, attributes
that follow a width, groups that trial cuts froze. `inspect()` builds a `Graph` under these
findings. `confirm.py` adds a finding and inspects again until trial cuts agree with the graph.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ..channels.connectivity import attention_groups, carrying_groups
from ..channels.graph import FROZEN, Graph, Rewrites, module_of
from ..channels.grouping import build
from ..channels.label_decisions import follow
from ..channels.labels import Labels
from ..channels.notes import Note
from ..channels.propagation import Flow, Rule
from ..channels.reasons import Reason
from ..channels.rules.table import by_tag
from ..cost.resources import measure
from ..errors import PruneError
from ..rewriting.capture import capture_all
from ..rewriting.captured_forward import Refused, notes_of
from ..rewriting.resize import marked_forward
from ..rewriting.weighted_norms import weights_in
from ..tracing.generation import CannotContinue
from ..tracing.model_state import Example, named_tensors, on_host
from ..tracing.recorder import record
from ..tracing.tape import Tape
from ..validation.arguments import check_keep
from .findings import Attributes, Captured, Findings


@dataclass(frozen=True)
class Settings:
    """What the user asks of an inspection.

    Attributes:
        rules: The rule of every operation that has one.
        keep: Patterns of modules whose channels are frozen.
        norms: Weight means over prunable channels in place of freezing these.
        min_channels: The least number of channels that every group keeps.
    """

    rules: Mapping[object, Rule]
    keep: tuple[str, ...] = ()
    norms: bool = False
    min_channels: int = 0


@dataclass(frozen=True, eq=False)
class _Runs:
    """The tapes of the model, and remarks about these runs."""

    tapes: tuple[Tape, ...]
    notes: tuple[Note, ...]


# The labels after tapes, without the means of modules that cannot be weighted.
_Followed = tuple[tuple[Tape, ...], Mapping[str, Refused], Flow]


class Inspection:
    """A model, the user's settings, and what has been found out about the model so far.

    Args:
        model: The model.
        example: The inputs to run it on.
        settings: What the user asks.
        frozen: Groups that are frozen in any case, each with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        settings: Settings,
        frozen: Mapping[str, Reason],
    ) -> None:
        self.model, self.example, self.settings = model, example, settings
        self.modules = dict(model.named_modules())
        self._findings = Findings(frozen=dict(frozen))
        self._runs: _Runs | None = None
        self._followed_before: _Followed | None = None

    @property
    def findings(self) -> Findings:
        """What has been found out so far. The methods of this class add to it."""
        return self._findings

    def inspect(self) -> Graph:
        """Build the graph repeatedly, until all means over prunable channels are weighted."""
        while True:
            graph = self._graph()
            known = self._findings
            unknown = {item.op.module for item in graph.statistics} - known.norm_code.keys()
            if unknown:
                found = capture_all(self.model, self.example, sorted(unknown))
                self._findings = replace(
                    known,
                    norm_code={**known.norm_code, **found.captured},
                    unweightable={**known.unweightable, **found.refused},
                )
                self._runs = None
                continue
            graph, refused = self._with_weighted_norms(graph)
            if not refused:
                return graph
            self._findings = replace(known, unweightable={**known.unweightable, **refused})

    def _graph(self) -> Graph:
        """Build the graph under what is known so far."""
        runs, known = self._runs or self._record(), self._findings
        with on_host():
            graph = build(runs.tapes, self._followed(runs.tapes), known.frozen)
            closing = [Note(why, [name]) for name, why in known.must_keep.items()]
            unweightable = notes_of(
                known.unweightable, "norms=True has no effect on its statistics"
            )
            graph = replace(
                graph,
                rewrites=Rewrites(dict(known.rewritten), known.followed(known.attributes)),
                notes=(*graph.notes, *runs.notes, *closing, *unweightable),
            )
            needed = carrying_groups(graph) | attention_groups(graph) | known.must_keep.keys()
            graph = graph.with_minimum(dict.fromkeys(needed, 1))
            least = self.settings.min_channels
            asked = {k: min(least, g.size) for k, g in graph.prunable.items()}
            graph = graph.with_minimum(asked)
            return replace(graph, resources=measure(self.model, graph))

    def _with_weighted_norms(self, graph: Graph) -> tuple[Graph, dict[str, Refused]]:
        """Find the means over prunable channels in the code of their modules, and weight them.

        Returns:
            The graph, and the modules where that fails: their channels have to be frozen.
        """
        weights, weighted, refused = {}, {}, dict[str, Refused]()
        for path in dict.fromkeys(item.op.module for item in graph.statistics):
            captured = self._findings.rewritten.get(path) or self._findings.norm_code[path]
            found = weights_in(graph, path, captured)
            if "forward" in vars(self.modules[path]):  # could not be restored
                found = Refused("its forward was replaced on the instance")
            if isinstance(found, Refused):
                refused[path] = found
            else:
                weights[path], weighted[path] = found
        rewrites = replace(graph.rewrites, weights=weights, weighted=weighted)
        owners = graph.owners
        units = {unit for vector in weights.values() for unit in vector.tolist()} - {FROZEN}
        # A norm over no channels is undefined.
        graph = graph.with_minimum({owners[unit]: 1 for unit in units})
        return replace(graph, rewrites=rewrites), refused

    def counting_with_norms(self, graph: Graph) -> Callable[[], int]:
        """Return a function that counts how many more channels `norms=True` may make prunable.

        It follows all labels again, and does not hold the model.
        """
        with on_host():
            if self.settings.norms or not self._followed(graph.tapes).unweighted:
                return int  # none
        rules, frozen = self.settings.rules, dict(self._findings.frozen)
        return partial(_more_with_norms, graph.tapes, rules, self._kept(), frozen, graph.units)

    # --- tapes and labels ---

    def _record(self) -> _Runs:
        """Trace the model in eval mode, and in train mode if it runs in that."""
        code = {**self._findings.norm_code, **self._findings.rewritten}
        forwards = {
            path: partial(marked_forward, captured=captured) for path, captured in code.items()
        }
        run = partial(record, self.model, self.example, forwards=forwards)
        try:
            tapes = [run(training=False, generates=self._findings.not_continuing is None)]
        except CannotContinue as error:
            if self._findings.rewritten:  # the code that was captured may be the cause
                raise
            self._findings = replace(self._findings, not_continuing=error)
            tapes = [run(training=False, generates=False)]
        notes = self._cache_notes(tapes[0])
        try:
            tapes.append(run(training=True, generates=tapes[0].generates))
        except PruneError as error:
            notes.append(Note(f"followed in eval mode only; train mode did not run: {error}"))
        self._runs = _Runs(tuple(tapes), tuple(notes))
        return self._runs

    def _cache_notes(self, tape: Tape) -> list[Note]:
        """Return what the user should know about a cache in the output."""
        if self._findings.not_continuing is not None:
            text = (
                f"the cache that the model returns counts as an output, and its channels are "
                f"frozen, because the model does not run on one more token with it: "
                f"{self._findings.not_continuing}; pass use_cache=False to prune them"
            )
            return [Note(text)]
        if tape.further_ops:
            text = "the cache that the model returns is not compared; generation with it is"
            return [Note(text)]
        return []

    def _followed(self, tapes: tuple[Tape, ...]) -> Flow:
        """Return the labels after these tapes; computed again only if something has changed."""
        before, unweightable = self._followed_before, self._findings.unweightable
        if before is None or before[0] is not tapes or before[1] is not unweightable:
            norms, rules = self.settings.norms, self.settings.rules
            flow = Flow(
                Labels(), rules, by_tag, norms=lambda path: norms and path not in unweightable
            )
            follow(tapes, flow, self._kept())
            self._require_more_than_projections(flow)
            before = self._followed_before = (tapes, unweightable, flow)
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
                        flow.require(layer, 1, module.proj_size + 1, why)

    # --- findings ---

    def freeze(self, names: Iterable[str], why: Reason) -> None:
        """Freeze groups for a reason."""
        self._findings = self._findings.with_frozen(names, why)

    def keep_one(self, names: Iterable[str], why: str) -> None:
        """Let groups keep a channel for a reason."""
        self._findings = self._findings.with_must_keep(names, why)

    def try_seeds(self, seeds: Iterable[int]) -> None:
        """Let trial cuts use the plans of these seeds, too."""
        self._findings = self._findings.with_seeds(seeds)

    def follow_attributes(self, attributes: Attributes) -> None:
        """Let these attributes of modules follow widths."""
        self._findings = replace(self._findings, attributes=attributes)

    def keep_cache(self, error: CannotContinue) -> Graph:
        """Count a cache as an output from now on, and inspect again."""
        self._findings = replace(self._findings, not_continuing=error)
        return self.inspect()

    def rewrite(self, paths: Iterable[str]) -> bool:
        """Capture the forward of these modules; return False if none of them can be captured."""
        wanted = [path for path in dict.fromkeys(paths) if self._may_be_captured(path)]
        found = capture_all(self.model, self.example, wanted)
        self._findings = self._findings.with_refused(found.refused)
        self.use_rewritten({**self._findings.rewritten, **found.captured})
        return bool(found.captured)

    def use_rewritten(self, rewritten: Captured) -> None:
        """Use these captured forwards; the model has to be traced again."""
        self._findings, self._runs = replace(self._findings, rewritten=rewritten), None

    def _may_be_captured(self, path: str) -> bool:
        """Return False for layers of torch, and for modules that were captured or refused."""
        of_torch = type(self.modules[path]).__module__.startswith("torch.nn.")
        known = self._findings
        return not (of_torch or path in known.rewritten or path in known.refused)

    def note_failure(self, path: str, why: str) -> None:
        """Note why a module whose forward was captured runs its own forward nevertheless."""
        failed = {**self._findings.failed, path: Refused(why)}
        self._findings = replace(self._findings, failed=failed)

    def refusal(self, path: str) -> str:
        """Return why a module cannot be rewritten; empty if it can."""
        return str(self._findings.refused.get(path) or self._findings.failed.get(path) or "")

    def same_class(self, path: str) -> list[str]:
        """Return all modules of the class of this one."""
        family = type(self.modules[path])
        return [other for other, module in self.modules.items() if type(module) is family]

    # --- what the user keeps ---

    def _kept(self) -> list[tuple[str, str]]:
        """Return the tensors of the modules that `keep` names, each with its pattern."""
        found = []
        for pattern in self.settings.keep:
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
    frozen: dict[str, Reason],
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
