"""`trace`: look at a model. Groups, coupling, cost, what is frozen and why; nothing is changed.

What the rules say is not taken on trust: before a group is called open, channels of it are cut from
a copy and the copy is run (`trial`). Where the model's code does not follow, whole numbers that it
holds are changed with the widths; else the code is re-emitted (`rewire`); and where that fails as
well, the group stays whole, with the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..channels.graph import FROZEN, Graph, Location, Plan
from ..channels.propagation import Rule
from ..channels.rules.table import RULES
from ..cost.resources import add_extras
from ..errors import PruneError
from ..rewriting.captured_forward import fixed_values
from ..rewriting.forward_weights import find, without_computed_weights
from ..rewriting.parametrizations import by_hooks, computed, is_gated
from ..rewriting.remove_branches import dropped_with, remembering
from ..tracing.model_state import Example, as_call, named_tensors, on_host
from ..tracing.tape import Op
from ..validation.arguments import checked_rules, keep_patterns
from .inspection import Inspection
from .trial_cuts import Deviation, Trial
from .width_decisions import WidthReader


def trace(
    model: nn.Module,
    example_inputs: Example,
    *,
    keep: str | Iterable[str] = (),
    rules: Mapping[Any, Rule] | None = None,
    norms: bool = False,
) -> Graph:
    """Follow every channel of `model` by running it once on `example_inputs`.

    `keep`: patterns of module names to leave whole (`"layer4.*"`).
    `rules`: rules for operations that are not known, `{torch.ops.…: rule}`.
    `norms`: open channels that layer, RMS and group norms mix, such as the residual stream of a
    transformer; the gated model then computes these norms with gate-weighted statistics.
    """
    return survey(
        model, example_inputs, keep=keep, rules=rules, norms=norms, compare_outputs=bool(rules)
    )


def survey(
    model: nn.Module,
    example: Example,
    *,
    keep: str | Iterable[str] = (),
    rules: Mapping[Any, Rule] | None = None,
    norms: bool = False,
    compare_outputs: bool = False,
) -> Graph:
    """`trace`; `compare_outputs`: compare the outputs of trial cuts, too."""
    patterns, own = keep_patterns(keep), checked_rules(rules)
    if not isinstance(norms, bool):
        raise PruneError(f"norms={norms!r}: give True or False.")
    check_model(model)
    check_example(model, example)
    inline, hooks = find(model, example), by_hooks(model)
    names = computed(model) + [f"{path}.{one.leaf}" for path, one in inline.items()]
    model = without_computed_weights(model, inline)
    inspection = Inspection(model, example, patterns, {**RULES, **own}, norms)
    with remembering(), _few_collections():
        graph = _prove(inspection, compare_outputs)
        closable = [name for name, group in graph.prunable.items() if not group.minimum]
        with on_host():
            add_extras(model, graph, dropped_with(model, graph, closable))
    graph.with_norms = inspection.more_with_norms(graph)
    graph.computed, graph.forward_weights = names, inline
    graph.notes += hooks
    graph.held = {path: fixed_values(model.get_submodule(path)) for path in graph.rewritten}
    return graph


def changed(graph: Graph, model: nn.Module) -> list[str]:
    """Plain numbers that re-emitted code would go on with, though the model has others now."""
    return [
        f"{path}.{name}"
        for path, held in graph.held.items()
        for name, now in fixed_values(model.get_submodule(path)).items()
        if name in held and held[name] != now
    ]


@contextmanager
def _few_collections() -> Iterator[None]:
    """Else Python looks for garbage among all that was imported, again and again."""
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def check_model(model: nn.Module) -> None:
    """Refuse wrappers: gates have to be installed before these, not after."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise PruneError(f"the model is a {name}; give a torch.nn.Module.")
    if torch.is_inference_mode_enabled():
        raise PruneError("torch.inference_mode() is on, in which no operation can be followed: "
                         "call this outside of it.")  # fmt: skip
    compiled = [path for path, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise PruneError(
            f"{compiled[0] or 'the model'} is compiled: give polarprune the plain model first, and "
            f"call torch.compile on it afterwards."
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise PruneError(
            f"the model is wrapped in {name}: give polarprune the plain model (model.module) "
            f"first, and wrap it afterwards."
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise PruneError(f"the model is a {name}, compiled to TorchScript: give the plain model.")
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise PruneError(
            "the model has lazy modules without weights: run it once on an example first."
        )
    if is_gated(model):
        raise PruneError(
            "the model has gates already: use the Pruner that put them there, or start from a "
            "fresh model."
        )


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def check_example(model: nn.Module, example: Example) -> None:
    home = next((tensor.device for _, tensor in named_tensors(model)), None)
    args, kwargs = as_call(example)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and not value.numel():
            raise PruneError("the example inputs are empty: give at least one example of each.")
        if isinstance(value, Tensor) and home is not None and value.device != home:
            raise PruneError(
                f"the example inputs are on {value.device}, the model is on {home}: move the "
                f"example to the model's device."
            )


# --- what is called open has been seen to be ------------------------------------------------------


def _prove(inspection: Inspection, compare_outputs: bool) -> Graph:
    graph = inspection()
    if not graph.prunable:
        return graph
    trial = Trial(inspection.model, inspection.example)
    if graph.channel_counts:
        graph = _rewrite_channel_counts(inspection, graph)
    graph = _let_no_width_decide(inspection, _let_code_follow(inspection, graph, trial), trial)
    if (
        graph.prunable
        and compare_outputs
        and trial.cut(graph, trial_plan(graph, 0), compare_outputs=True)
    ):
        graph = _hold_one_by_one(inspection, graph, trial)
    return _let_close(inspection, graph, trial, compare_outputs)


def _rewrite_channel_counts(inspection: Inspection, graph: Graph) -> Graph:
    """Code that counts channels is re-emitted, or its channels stay: a trial is no proof here."""
    ours = {
        path for path, module in inspection.modules.items() if type(module) is nn.MultiheadAttention
    }
    inspection.rewrite(
        op.module for op in graph.channel_counts if op.module not in ours
    )  # has other code anyway
    graph = inspection()
    names = graph.owners
    for op, units in graph.channel_counts.items():
        if op.module not in inspection.rewritten and op.module not in ours:
            for unit in set(units.flatten().tolist()) - {FROZEN}:
                inspection.held[names[unit]] = f"code that counts channels, in {op.where}"
    return inspection() if inspection.held else graph


_ATTEMPTS = 60


def _let_code_follow(inspection: Inspection, graph: Graph, trial: Trial) -> Graph:
    """Until a trial cut does what it should: change numbers, re-emit code, or hold a group."""
    for _ in range(_ATTEMPTS):
        found = _first_deviation(inspection, graph, trial)
        if found is None:
            return graph
        changed = (
            (found.hint and _adapt(inspection, graph, trial, replace(found, op=found.hint)))
            or (found.op and _adapt(inspection, graph, trial, found))
            or _hold(inspection, graph, found)
        )
        if not changed:
            break
        graph = changed
    return _hold_one_by_one(inspection, graph, trial)


def _let_no_width_decide(inspection: Inspection, graph: Graph, trial: Trial) -> Graph:
    """Re-emit code that compares widths, with the way it takes now, or hold what it compares."""
    for _ in range(_ATTEMPTS):
        reader = WidthReader(
            inspection.model, graph, [trial_plan(graph, seed) for seed in range(_PLANS)]
        )
        found = next(reader.changing(), None)
        if found is None:
            more = {min(plans) for plans in reader.telling() if inspection.seeds.isdisjoint(plans)}
            inspection.seeds |= more
            return _let_code_follow(inspection, graph, trial) if more else graph
        new = _with_code_in(inspection, graph, found.module)
        if new is None:
            why = f"code that decides by the number of channels, in {found.where}"
            inspection.held.update(dict.fromkeys(reader.groups(found), why))
            new = inspection()
        graph = _let_code_follow(inspection, new, trial)
    return _hold_one_by_one(inspection, graph, trial)


def _first_deviation(inspection: Inspection, graph: Graph, trial: Trial) -> Deviation | None:
    """What goes wrong; every plan is run in one mode, and in the other if these differ."""
    for turn, seed in enumerate(sorted(inspection.seeds) if graph.prunable else ()):
        plan = trial_plan(graph, seed)
        found = trial.cut(graph, plan, mode=turn % 2) and trial.cut(graph, plan)
        if found is not None:
            return replace(found, seed=seed)
    return None


def _better(graph: Graph, trial: Trial, before: Deviation, telling: Iterable[int] = ()) -> bool:
    """True if the same trial gets further than it did, and no telling one stops there."""
    for seed in (before.seed, *telling):
        found = trial.cut(graph, trial_plan(graph, seed))
        if found is not None and (found.op is None or found.index <= before.index):
            return False
    return True


def _adapt(inspection: Inspection, graph: Graph, trial: Trial, found: Deviation) -> Graph | None:
    return _change_numbers(inspection, graph, trial, found) or _re_emit(
        inspection, graph, trial, found
    )


def _change_numbers(
    inspection: Inspection, graph: Graph, trial: Trial, found: Deviation
) -> Graph | None:
    """Let a whole number of the module, such as the number of heads, follow a width."""
    assert found.op is not None
    path = found.op.module
    if path in inspection.rewritten or isinstance(inspection.modules[path], (nn.Linear, _ConvNd)):
        return None  # (the latter follow their weights)
    before, seeds = inspection.size_attributes, inspection.seeds
    mine = before.get(path, {})
    options = [
        (name, place, telling)
        for name, value in vars(inspection.modules[path]).items()
        if type(value) is int and value > 1 and name not in mine
        for place, telling in _distinct(graph, path, value)
    ]
    for tried in [*([option] for option in options), options]:
        places = {**mine, **{name: place for name, place, _ in tried}}
        inspection.size_attributes = {
            **before,
            **dict.fromkeys(_alike(inspection, graph, path), places),
        }
        telling = set().union(*(telling for _, _, telling in tried))
        graph = replace(graph, size_attributes=inspection.following())
        if tried and _better(graph, trial, found, telling):
            inspection.seeds = seeds | telling
            return graph
    inspection.size_attributes = before
    return None


def _alike(inspection: Inspection, graph: Graph, path: str) -> list[str]:
    """Modules of the same class that perform the same operations."""

    def form(other: str) -> list[Any]:
        ops = graph.ops_in(other)
        return [(op.name, [len(value.shape) for value in op.tensors()]) for op in ops]

    return [other for other in inspection.like(path) if form(other) == form(path)]


_PLANS = 16


def _distinct(graph: Graph, path: str, size: int) -> list[tuple[Location, set[int]]]:
    """Places in a module that have this width but shrink differently, and plans that tell why."""
    plans = [graph.settle(graph.alive(trial_plan(graph, seed))) for seed in range(_PLANS)]
    found: dict[tuple[int, ...], Location] = {}
    for place in graph.locations(path, size):
        found.setdefault(tuple(graph.width(path, place, alive) for alive in plans), place)
    return [
        (place, {next(k for k in range(_PLANS) if mine[k] != other[k])
                 for other in found if other != mine})
        for mine, place in found.items()
    ]  # fmt: skip


def _re_emit(inspection: Inspection, graph: Graph, trial: Trial, found: Deviation) -> Graph | None:
    assert found.op is not None
    before = inspection.rewritten
    new = _with_code_of(inspection, graph, found.op)
    if new is not None and _better(new, trial, found):
        return new
    inspection.set_rewritten(before)
    return None


def _with_code_of(inspection: Inspection, graph: Graph, op: Op) -> Graph | None:
    return _with_code_in(inspection, graph, op.module)


def _with_code_in(inspection: Inspection, graph: Graph, module: str) -> Graph | None:
    """The graph with the code of all modules of this class re-emitted, if that works out."""
    before = inspection.rewritten
    try:
        if inspection.rewrite(path for path in inspection.like(module) if graph.ops_in(path)):
            return inspection()
    except PruneError:  # what they give each other has another form now
        inspection.set_rewritten(before)
    return None


def _hold(inspection: Inspection, graph: Graph, found: Deviation) -> Graph | None:
    """Keep the channels whole that pass the line of code which does not follow, or its module."""
    for names in (
        _passing(inspection, graph, found),
        _passing(inspection, graph, found, everywhere=True),
    ):
        if names:
            why = f"the model's code does not follow when it shrinks: {found}"
            inspection.held.update(dict.fromkeys(names, why))
            break
    else:
        return None
    return inspection()


def _passing(
    inspection: Inspection, graph: Graph, found: Deviation, everywhere: bool = False
) -> list[str]:
    """The open groups that pass the line of code at which something went wrong, or its module."""
    if found.op is None:
        return []
    names, units = graph.owners, set[int]()
    for path in inspection.like(found.op.module):
        for op in graph.ops_in(path):
            if everywhere or op.line == found.op.line:
                units |= _open_units(graph, op)
    return list(dict.fromkeys(names[unit] for unit in sorted(units)))


def _open_units(graph: Graph, op: Op) -> set[int]:
    layers = [layer for value in op.tensors() for layer in graph.values.get(value, [])]
    return {unit for layer in layers for unit in layer.unique().tolist()} - {FROZEN}


def _hold_one_by_one(inspection: Inspection, graph: Graph, trial: Trial) -> Graph:
    """The last resort: every group that cannot be cut alone stays, and if need be all."""
    plan = trial_plan(graph, 0)
    for name in graph.prunable:
        alone = trial.cut(graph, {name: plan[name]}, compare_outputs=True)
        if alone:
            inspection.held[name] = f"the model's code does not follow when it shrinks: {alone}"
    graph = inspection()
    rest = graph.prunable and trial.cut(graph, trial_plan(graph, 0), compare_outputs=True)
    if rest:
        inspection.held.update(
            dict.fromkeys(graph.prunable, f"could not be shown to be exact: {rest}")
        )
        graph = inspection()
    return graph


def _let_close(inspection: Inspection, graph: Graph, trial: Trial, compare_outputs: bool) -> Graph:
    """Which groups can close entirely; pools refuse to run on no channels, unless re-emitted."""
    known = len(inspection.minimum)
    for _ in range(_ATTEMPTS):
        found = graph.prunable and trial.cut(graph, _closed(graph), compare_outputs=compare_outputs)
        if not found:
            break
        before, code = len(inspection.minimum), inspection.rewritten
        new = found.op and _with_code_of(inspection, graph, found.op)
        if new:
            further = trial.cut(new, _closed(new), compare_outputs=compare_outputs)
            if not further or further.index > found.index:
                graph = new
                continue
            inspection.set_rewritten(code)
            graph = inspection()
        for name in _passing(inspection, graph, found):
            if not graph.groups[name].minimum:
                why = f"keeps a channel, as the model's code needs one: {found}"
                inspection.minimum[name], graph.groups[name].minimum = why, 1
        if len(inspection.minimum) == before:
            for name in graph.prunable:
                inspection.minimum.setdefault(name, "keeps a channel, to be safe")
            break
    return graph if len(inspection.minimum) == known else inspection()


def trial_plan(graph: Graph, seed: int) -> Plan:
    """A random part of every open group: half of some, more of others."""
    generator = torch.Generator("cpu").manual_seed(seed)
    plan = {}
    for name, group in graph.prunable.items():
        order = torch.randperm(group.size, generator=generator, device="cpu")
        share = torch.rand(1, generator=generator, device="cpu").item() if seed else 0.5
        least = max(group.minimum, 2 if group.size > 2 else 1)
        # The first plans cut every group. Later ones leave narrow groups whole now and then, by
        # which groups of the same width are told apart.
        count = int(group.size * share) if seed < 3 else round(group.size * share)
        plan[name] = sorted(order[: max(least, count)].tolist())
    return plan


def _closed(graph: Graph) -> Plan:
    """All groups closed that may be, and half of the others."""
    half = trial_plan(graph, 0)
    return {name: half[name] if group.minimum else [] for name, group in graph.prunable.items()}
