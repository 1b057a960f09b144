"""Confirm a graph by trial cuts: repair the code that does not adapt, freeze what cannot be cut.

The steps, each until trial cuts show no mismatch:

1. Code that selects channels by position (`x[:, :8]`) is captured, or its channels are frozen.
2. Code that does not adapt to fewer channels is repaired (`repairs.py`), or its channels are
   frozen.
3. Code that branches on a number of channels is captured, or its channels are frozen. Where it only
   tests for zero channels, they keep one.
4. Whole groups are closed. A group without which the model does not run keeps a channel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from torch import Tensor, nn

from ..channels.graph import FROZEN, Graph
from ..channels.notes import Note
from ..channels.reasons import Reason, because
from ..tracing.generation import CannotContinue
from .inspection import Inspection
from .repairs import PLANS, no_further, repair, with_captured_class
from .tape_comparison import Mismatch
from .trial_cuts import TrialCuts, closing_plan, trial_plan, trial_units
from .width_decisions import WidthReader

_ATTEMPTS = 60  # repairs in one step, after which groups are tested one by one


def confirm(inspection: Inspection, compare_outputs: bool) -> Graph:
    """Inspect the model until trial cuts confirm every prunable group.

    Args:
        inspection: The model and the findings so far; more findings are added to it.
        compare_outputs: Compare the outputs of trial cuts too, not only their operations.
    """
    graph = inspection.inspect()
    if not graph.prunable:
        return graph
    trial = TrialCuts(inspection.model, inspection.example)
    if graph.layout.channel_counts:
        graph = _capture_channel_counts(inspection, graph)
    graph = _confirm_cuts(inspection, graph, trial)
    graph = _confirm_decisions(inspection, graph, trial)
    if graph.prunable and compare_outputs:
        half = trial_plan(graph, 0)
        if trial.mismatch(graph, half, compare_outputs=True):
            graph = _freeze_one_by_one(inspection, graph, trial)
    return _confirm_closing(inspection, graph, trial, compare_outputs)


def _freeze(inspection: Inspection, names: Iterable[str], why: Reason) -> Graph:
    """Freeze groups for a reason and inspect again."""
    inspection.freeze(names, why)
    return inspection.inspect()


# --- 1. code that selects channels by position ----------------------------------------------------


def _capture_channel_counts(inspection: Inspection, graph: Graph) -> Graph:
    """Capture code that selects channels by position (slices, splits, pads), or freeze these.

    A trial cut proves nothing here, because torch accepts slices beyond the end of a cut axis.
    `nn.MultiheadAttention` needs neither, as a cut replaces it by a layer of this library.
    """
    replaced = {
        path for path, module in inspection.modules.items() if type(module) is nn.MultiheadAttention
    }
    counting = (op.module for op in graph.layout.channel_counts)
    inspection.rewrite(path for path in counting if path not in replaced)
    try:
        graph = inspection.inspect()
    except CannotContinue as error:
        graph = inspection.keep_cache(error)
    owners = graph.owners
    for op, units in graph.layout.channel_counts.items():
        if op.module not in inspection.findings.rewritten and op.module not in replaced:
            why = because(
                op,
                f"{op.name} selects channels by position",
                refusal=inspection.refusal(op.module),
                remedy="use separate layers, or equal parts (chunk)",
            )
            found = set(units.flatten().tolist()) - {FROZEN}
            inspection.freeze((owners[unit] for unit in found), why)
    return inspection.inspect() if inspection.findings.frozen else graph


# --- 2. code that does not adapt ------------------------------------------------------------------


def _confirm_cuts(inspection: Inspection, graph: Graph, trial: TrialCuts) -> Graph:
    """Repair or freeze until no trial cut shows a mismatch."""
    for _ in range(_ATTEMPTS):
        found = _first_mismatch(inspection, graph, trial)
        if found is None:
            return graph
        changed = (
            (found.hint and repair(inspection, graph, trial, replace(found, op=found.hint)))
            or (found.op and repair(inspection, graph, trial, found))
            or _freeze_passing(inspection, graph, found)
        )
        if not changed:
            break
        graph = changed
    return _freeze_one_by_one(inspection, graph, trial)


def _first_mismatch(inspection: Inspection, graph: Graph, trial: TrialCuts) -> Mismatch | None:
    """Try every plan in eval or train mode, in turns; after a mismatch, in both modes."""
    for turn, seed in enumerate(sorted(inspection.findings.seeds) if graph.prunable else ()):
        plan = trial_plan(graph, seed)
        found = trial.mismatch(graph, plan, mode=turn % 2) and trial.mismatch(graph, plan)
        if found is not None:
            return replace(found, seed=seed)
    return None


def _freeze_passing(inspection: Inspection, graph: Graph, found: Mismatch) -> Graph | None:
    """Freeze the channels that pass the line of the mismatch, or else its whole module."""
    names = _passing(inspection, graph, found) or _passing(
        inspection, graph, found, anywhere_in_module=True
    )
    if not names:
        return None
    return _freeze(inspection, names, _does_not_adapt(inspection, found))


def _does_not_adapt(inspection: Inspection, found: Mismatch) -> Reason:
    """Return the reason why such code freezes groups, with the remedy."""
    remedy = (
        "make that line work with any number of channels"
        if found.op
        else "make the code work with any number of channels, or correct the rule if you gave one"
    )
    fact = f"the model's code does not adapt to fewer channels: {found.why}"
    return because(found.op, fact, refusal=_refusal(inspection, found), remedy=remedy)


def _refusal(inspection: Inspection, found: Mismatch) -> str:
    """Return why the module of a mismatch cannot be rewritten; empty if it can."""
    return inspection.refusal(found.op.module) if found.op else ""


def _passing(
    inspection: Inspection, graph: Graph, found: Mismatch, anywhere_in_module: bool = False
) -> list[str]:
    """Return the prunable groups that pass the line of a mismatch, or its module.

    All modules of the same class count: they run the same line.
    """
    if found.op is None:
        return []
    line = None if anywhere_in_module else found.op.line
    layers: dict[int, Tensor] = {}  # by id: the modules' tensors share most of them
    for path in inspection.same_class(found.op.module):
        for op in graph.ops_in(path):
            if line in (None, op.line):
                layers |= {id(x): x for v in op.tensors() for x in graph.values.get(v, [])}
    return _owners_of(graph, layers.values())


def _owners_of(graph: Graph, layers: Iterable[Tensor]) -> list[str]:
    """Return the prunable groups with units in these layers, in their order."""
    owners = graph.owners
    units = {unit for layer in layers for unit in layer.unique().tolist()} - {FROZEN}
    return list(dict.fromkeys(owners[unit] for unit in sorted(units)))


def _freeze_one_by_one(inspection: Inspection, graph: Graph, trial: TrialCuts) -> Graph:
    """Freeze every group that cannot be cut alone, and all groups if that is not enough.

    This is the last resort, when a mismatch cannot be traced to a line of code.
    """
    plan = trial_plan(graph, 0)
    for name in graph.prunable:
        alone = trial.mismatch(graph, {name: plan[name]}, compare_outputs=True)
        if alone:
            inspection.freeze([name], _does_not_adapt(inspection, alone))
    graph = inspection.inspect()
    if not graph.prunable:
        return graph
    rest = trial.mismatch(graph, trial_plan(graph, 0), compare_outputs=True)
    if rest:
        why = because(
            rest.op,
            f"a trial cut of all prunable groups together is not exact: {rest.why}",
            remedy="name the modules in question in keep to prune the others",
        )
        graph = _freeze(inspection, graph.prunable, why)
    return graph


# --- 3. code that branches on a number of channels ------------------------------------------------


def _confirm_decisions(inspection: Inspection, graph: Graph, trial: TrialCuts) -> Graph:
    """Capture code that compares widths, with the branch it takes now, or freeze these groups.

    Code that rounds a width is tried with further plans, in which the result differs.
    """
    for _ in range(_ATTEMPTS):
        plans = [trial_units(graph, seed) for seed in range(PLANS)]
        reader = WidthReader(inspection.model, graph, plans)
        changing = list(reader.changing())
        for asked in [one for one in changing if one.tells_emptiness]:
            why = f"keeps at least 1 channel, as the code asks whether there is one: {asked.where}"
            kept = inspection.findings.must_keep
            names = [name for name in reader.closable(asked) if name not in kept]
            graph = _with_one_channel(inspection, graph, names, why)
        found = next((one for one in changing if not one.tells_emptiness), None)
        if found is None:
            tried = inspection.findings.seeds
            more = {min(seeds) for seeds in reader.distinguishing() if tried.isdisjoint(seeds)}
            inspection.try_seeds(more)
            return _confirm_cuts(inspection, graph, trial) if more else graph
        new = with_captured_class(inspection, graph, found.module)
        if new is None:
            reason = because(
                found,
                "the code decides by the number of channels",
                refusal=inspection.refusal(found.module),
                remedy="decide by an attribute set in __init__",
            )
            new = _freeze(inspection, reader.groups(found), reason)
        graph = _confirm_cuts(inspection, new, trial)
    return _freeze_one_by_one(inspection, graph, trial)


# --- 4. groups that close entirely ----------------------------------------------------------------


def _confirm_closing(
    inspection: Inspection, graph: Graph, trial: TrialCuts, compare_outputs: bool
) -> Graph:
    """Find the groups that can close entirely; the others keep a channel.

    Pooling layers, for example, refuse to run on no channels, unless the code around them is
    captured.
    """
    for _ in range(_ATTEMPTS):
        found = _closing_mismatch(graph, trial, compare_outputs)
        if not found:
            break
        better = _capture_to_close(inspection, graph, trial, found, compare_outputs)
        if better:
            graph = better
            continue
        before = inspection.findings.must_keep
        graph = _keep_one_channel(inspection, graph, found)
        if len(inspection.findings.must_keep) == len(before):
            why = (
                f"keeps at least 1 channel, as a trial cut that closes whole groups fails: {found}"
            )
            others = [name for name in graph.prunable if name not in before]
            return _with_one_channel(inspection, graph, others, why)
    return graph


def _closing_mismatch(graph: Graph, trial: TrialCuts, compare_outputs: bool) -> Mismatch | None:
    """Close every group without a minimum in a copy; return the first mismatch, or None."""
    if not graph.prunable:
        return None
    return trial.mismatch(graph, closing_plan(graph), compare_outputs=compare_outputs)


def _capture_to_close(
    inspection: Inspection, graph: Graph, trial: TrialCuts, found: Mismatch, compare_outputs: bool
) -> Graph | None:
    """Capture the code that fails on no channels; return the new graph if that gets further."""
    before = inspection.findings.rewritten
    new = with_captured_class(inspection, graph, found.op.module) if found.op else None
    if new is None or found.op is None:
        return None
    further = _closing_mismatch(new, trial, compare_outputs)
    if not further or further.index > found.index:
        return new
    inspection.note_failure(found.op.module, no_further(further))
    inspection.use_rewritten(before)
    return None


def _keep_one_channel(inspection: Inspection, graph: Graph, found: Mismatch) -> Graph:
    """Let the groups that pass the line of the mismatch keep a channel."""
    names = _passing(inspection, graph, found)
    closable = [name for name in names if not graph.groups[name].minimum]
    why = because(
        found.op,
        f"keeps at least 1 channel, as the model's code needs one: {found.why}",
        refusal=_refusal(inspection, found),
    )
    return _with_one_channel(inspection, graph, closable, why)


def _with_one_channel(
    inspection: Inspection, graph: Graph, names: Collection[str], why: str
) -> Graph:
    """Let groups keep a channel, for a reason."""
    inspection.keep_one(names, why)
    notes = (Note(why, [name]) for name in names)
    graph = graph.with_minimum(dict.fromkeys(names, 1))
    return replace(graph, notes=(*graph.notes, *notes))
