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

from ..channels.graph import WHOLE, Graph, Place, Plan
from ..channels.propagation import Rule
from ..channels.rules.table import RULES
from ..cost.resources import add_extras
from ..errors import PruneError
from ..rewriting.emission import baked_in
from ..rewriting.forward_weights import all_baked, find
from ..rewriting.parametrizations import by_hooks, computed, is_gated
from ..rewriting.remove_branches import dropped_with, remembering
from ..tracing.tape import (
    Example,
    Op,
    as_call,
    named_tensors,
    on_host,
)
from ..validation.arguments import checked_rules, keep_patterns
from .inspection import Look
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
    return survey(model, example_inputs, keep=keep, rules=rules, norms=norms, numbers=bool(rules))


def survey(
    model: nn.Module,
    example: Example,
    *,
    keep: str | Iterable[str] = (),
    rules: Mapping[Any, Rule] | None = None,
    norms: bool = False,
    numbers: bool = False,
) -> Graph:
    """`trace`; with `numbers`, outputs of trial cuts are compared too, before training starts."""
    patterns, own = keep_patterns(keep), checked_rules(rules)
    if not isinstance(norms, bool):
        raise PruneError(f"norms={norms!r}: give True or False.")
    check_model(model)
    check_example(model, example)
    inline, hooks = find(model, example), by_hooks(model)
    names = computed(model) + [f"{path}.{one.leaf}" for path, one in inline.items()]
    model = all_baked(model, inline)
    look = Look(model, example, patterns, {**RULES, **own}, norms)
    with remembering(), _few_collections():
        graph = _prove(look, numbers)
        closable = [name for name, group in graph.open.items() if not group.minimum]
        with on_host():
            add_extras(model, graph, dropped_with(model, graph, closable))
    graph.with_norms = look.more_with_norms(graph)
    graph.computed, graph.inline = names, inline
    graph.notes += hooks
    graph.held = {path: baked_in(model.get_submodule(path)) for path in graph.rewired}
    return graph


def changed(graph: Graph, model: nn.Module) -> list[str]:
    """Plain numbers that re-emitted code would go on with, though the model has others now."""
    return [
        f"{path}.{name}"
        for path, held in graph.held.items()
        for name, now in baked_in(model.get_submodule(path)).items()
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


def _prove(look: Look, numbers: bool) -> Graph:
    graph = look()
    if not graph.open:
        return graph
    trial = Trial(look.model, look.example)
    if graph.baked:
        graph = _unbake(look, graph)
    graph = _let_no_width_decide(look, _let_code_follow(look, graph, trial), trial)
    if graph.open and numbers and trial.cut(graph, trial_plan(graph, 0), numbers=True):
        graph = _hold_one_by_one(look, graph, trial)
    return _let_close(look, graph, trial, numbers)


def _unbake(look: Look, graph: Graph) -> Graph:
    """Code that counts channels is re-emitted, or its channels stay: a trial is no proof here."""
    ours = {path for path, module in look.modules.items() if type(module) is nn.MultiheadAttention}
    look.rewire(op.module for op in graph.baked if op.module not in ours)  # has other code anyway
    graph = look()
    names = graph.owners
    for op, units in graph.baked.items():
        if op.module not in look.rewired and op.module not in ours:
            for unit in set(units.flatten().tolist()) - {WHOLE}:
                look.held[names[unit]] = f"code that counts channels, in {op.where}"
    return look() if look.held else graph


_ATTEMPTS = 60


def _let_code_follow(look: Look, graph: Graph, trial: Trial) -> Graph:
    """Until a trial cut does what it should: change numbers, re-emit code, or hold a group."""
    for _ in range(_ATTEMPTS):
        found = _first_deviation(look, graph, trial)
        if found is None:
            return graph
        changed = (
            (found.hint and _adapt(look, graph, trial, replace(found, op=found.hint)))
            or (found.op and _adapt(look, graph, trial, found))
            or _hold(look, graph, found)
        )
        if not changed:
            break
        graph = changed
    return _hold_one_by_one(look, graph, trial)


def _let_no_width_decide(look: Look, graph: Graph, trial: Trial) -> Graph:
    """Re-emit code that compares widths, with the way it takes now, or hold what it compares."""
    for _ in range(_ATTEMPTS):
        reader = WidthReader(look.model, graph, [trial_plan(graph, seed) for seed in range(_PLANS)])
        found = next(reader.changing(), None)
        if found is None:
            more = {min(plans) for plans in reader.telling() if look.seeds.isdisjoint(plans)}
            look.seeds |= more
            return _let_code_follow(look, graph, trial) if more else graph
        new = _with_code_in(look, graph, found.module)
        if new is None:
            why = f"code that decides by the number of channels, in {found.where}"
            look.held.update(dict.fromkeys(reader.groups(found), why))
            new = look()
        graph = _let_code_follow(look, new, trial)
    return _hold_one_by_one(look, graph, trial)


def _first_deviation(look: Look, graph: Graph, trial: Trial) -> Deviation | None:
    """What goes wrong; every plan is run in one mode, and in the other if these differ."""
    for turn, seed in enumerate(sorted(look.seeds) if graph.open else ()):
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


def _adapt(look: Look, graph: Graph, trial: Trial, found: Deviation) -> Graph | None:
    return _change_numbers(look, graph, trial, found) or _re_emit(look, graph, trial, found)


def _change_numbers(look: Look, graph: Graph, trial: Trial, found: Deviation) -> Graph | None:
    """Let a whole number of the module, such as the number of heads, follow a width."""
    assert found.op is not None
    path = found.op.module
    if path in look.rewired or isinstance(look.modules[path], (nn.Linear, _ConvNd)):
        return None  # (the latter follow their weights)
    before, seeds = look.numbers, look.seeds
    mine = before.get(path, {})
    options = [
        (name, place, telling)
        for name, value in vars(look.modules[path]).items()
        if type(value) is int and value > 1 and name not in mine
        for place, telling in _distinct(graph, path, value)
    ]
    for tried in [*([option] for option in options), options]:
        places = {**mine, **{name: place for name, place, _ in tried}}
        look.numbers = {**before, **dict.fromkeys(_alike(look, graph, path), places)}
        telling = set().union(*(telling for _, _, telling in tried))
        graph = replace(graph, numbers=look.following())
        if tried and _better(graph, trial, found, telling):
            look.seeds = seeds | telling
            return graph
    look.numbers = before
    return None


def _alike(look: Look, graph: Graph, path: str) -> list[str]:
    """Modules of the same class that perform the same operations."""

    def form(other: str) -> list[Any]:
        ops = graph.ops_in(other)
        return [(op.name, [len(value.shape) for value in op.tensors()]) for op in ops]

    return [other for other in look.like(path) if form(other) == form(path)]


_PLANS = 16


def _distinct(graph: Graph, path: str, size: int) -> list[tuple[Place, set[int]]]:
    """Places in a module that have this width but shrink differently, and plans that tell why."""
    plans = [graph.settle(graph.alive(trial_plan(graph, seed))) for seed in range(_PLANS)]
    found: dict[tuple[int, ...], Place] = {}
    for place in graph.places(path, size):
        found.setdefault(tuple(graph.width(path, place, alive) for alive in plans), place)
    return [
        (place, {next(k for k in range(_PLANS) if mine[k] != other[k])
                 for other in found if other != mine})
        for mine, place in found.items()
    ]  # fmt: skip


def _re_emit(look: Look, graph: Graph, trial: Trial, found: Deviation) -> Graph | None:
    assert found.op is not None
    before = look.rewired
    new = _with_code_of(look, graph, found.op)
    if new is not None and _better(new, trial, found):
        return new
    look.set_rewired(before)
    return None


def _with_code_of(look: Look, graph: Graph, op: Op) -> Graph | None:
    return _with_code_in(look, graph, op.module)


def _with_code_in(look: Look, graph: Graph, module: str) -> Graph | None:
    """The graph with the code of all modules of this class re-emitted, if that works out."""
    before = look.rewired
    try:
        if look.rewire(path for path in look.like(module) if graph.ops_in(path)):
            return look()
    except PruneError:  # what they give each other has another form now
        look.set_rewired(before)
    return None


def _hold(look: Look, graph: Graph, found: Deviation) -> Graph | None:
    """Keep the channels whole that pass the line of code which does not follow, or its module."""
    for names in (_passing(look, graph, found), _passing(look, graph, found, everywhere=True)):
        if names:
            why = f"the model's code does not follow when it shrinks: {found}"
            look.held.update(dict.fromkeys(names, why))
            break
    else:
        return None
    return look()


def _passing(look: Look, graph: Graph, found: Deviation, everywhere: bool = False) -> list[str]:
    """The open groups that pass the line of code at which something went wrong, or its module."""
    if found.op is None:
        return []
    names, units = graph.owners, set[int]()
    for path in look.like(found.op.module):
        for op in graph.ops_in(path):
            if everywhere or op.line == found.op.line:
                units |= _open_units(graph, op)
    return list(dict.fromkeys(names[unit] for unit in sorted(units)))


def _open_units(graph: Graph, op: Op) -> set[int]:
    layers = [layer for value in op.tensors() for layer in graph.values.get(value, [])]
    return {unit for layer in layers for unit in layer.unique().tolist()} - {WHOLE}


def _hold_one_by_one(look: Look, graph: Graph, trial: Trial) -> Graph:
    """The last resort: every group that cannot be cut alone stays, and if need be all."""
    plan = trial_plan(graph, 0)
    for name in graph.open:
        alone = trial.cut(graph, {name: plan[name]}, numbers=True)
        if alone:
            look.held[name] = f"the model's code does not follow when it shrinks: {alone}"
    graph = look()
    rest = graph.open and trial.cut(graph, trial_plan(graph, 0), numbers=True)
    if rest:
        look.held.update(dict.fromkeys(graph.open, f"could not be shown to be exact: {rest}"))
        graph = look()
    return graph


def _let_close(look: Look, graph: Graph, trial: Trial, numbers: bool) -> Graph:
    """Which groups can close entirely; pools refuse to run on no channels, unless re-emitted."""
    known = len(look.minimum)
    for _ in range(_ATTEMPTS):
        found = graph.open and trial.cut(graph, _closed(graph), numbers=numbers)
        if not found:
            break
        before, code = len(look.minimum), look.rewired
        new = found.op and _with_code_of(look, graph, found.op)
        if new:
            further = trial.cut(new, _closed(new), numbers=numbers)
            if not further or further.index > found.index:
                graph = new
                continue
            look.set_rewired(code)
            graph = look()
        for name in _passing(look, graph, found):
            if not graph.groups[name].minimum:
                why = f"keeps a channel, as the model's code needs one: {found}"
                look.minimum[name], graph.groups[name].minimum = why, 1
        if len(look.minimum) == before:
            for name in graph.open:
                look.minimum.setdefault(name, "keeps a channel, to be safe")
            break
    return graph if len(look.minimum) == known else look()


def trial_plan(graph: Graph, seed: int) -> Plan:
    """A random part of every open group: half of some, more of others."""
    generator = torch.Generator("cpu").manual_seed(seed)
    plan = {}
    for name, group in graph.open.items():
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
    return {name: half[name] if group.minimum else [] for name, group in graph.open.items()}
