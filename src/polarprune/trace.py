"""`trace`: look at a model. Groups, coupling, cost, what is frozen and why; nothing is changed.

What the rules say is not taken on trust: before a group is called open, half of its channels (and,
where that is allowed, all of them) are cut from a copy, and the copy is compared with the masked
original. Code that does not follow is re-emitted (`rewire`), and where that fails as well the
group stays whole, with the reason.
"""

from __future__ import annotations

import copy
import fnmatch
import io
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn

from .cost import add_extras, measure
from .errors import PruneError
from .flow import Flow, Rule
from .groups import WHOLE, Graph, Plan, build, follow, module_of
from .labels import Labels
from .proof import in_double, prove_equal
from .rewire import BAKED, as_graph, shim
from .rules import RULES, by_tag
from .spine import hold_spine
from .surgery import apply, dropped_with, fold, is_gated, write_recipe
from .tape import Example, Tape, as_call, named_tensors, record

_TOLERANCE = 1e-8  # in float64, where a right cut differs by 1e-15 and a wrong one by 1e-3


def trace(
    model: nn.Module,
    example_inputs: Example,
    *,
    keep: str | Iterable[str] = (),
    rules: Mapping[Any, Rule] | None = None,
) -> Graph:
    """Follow every channel of `model` by running it once on `example_inputs`.

    `keep`: patterns of module names to leave whole (`"layer4.*"`).
    `rules`: rules for operations that are not known, `{torch.ops.…: rule}`.
    """
    check_model(model)
    check_example(model, example_inputs)
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    look = _Look(model, example_inputs, patterns, {**RULES, **(rules or {})})
    graph = look()
    if graph.open and not any(p.is_meta for p in model.parameters()):
        graph = _prove(look, graph)
    closable = [name for name, group in graph.open.items() if not group.minimum]
    with torch.device("cpu"):
        add_extras(model, graph, {name: dropped_with(model, graph, name) for name in closable})
    return graph


def check_model(model: nn.Module) -> None:
    """Refuse wrappers: gates have to be installed before these, not after."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise PruneError(f"the model is a {name}; give a torch.nn.Module.")
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
        if isinstance(value, Tensor) and home is not None and value.device != home:
            raise PruneError(
                f"the example inputs are on {value.device}, the model is on {home}: move the "
                f"example to the model's device."
            )


class _Look:
    """One look at the model; repeated when something has to be treated differently."""

    def __init__(
        self, model: nn.Module, example: Example, keep: tuple[str, ...], rules: Mapping[Any, Rule]
    ) -> None:
        self.model, self.example, self.keep, self.rules = model, example, keep, rules
        self.rewired: tuple[str, ...] = ()
        self.held: dict[str, str] = {}  # group -> why it stays whole
        self.minimum: dict[str, str] = {}  # group -> why it cannot close entirely
        self.notes: list[str] = []

    def __call__(self) -> Graph:
        tapes = self._tapes()
        with torch.device("cpu"):  # whatever the user's default is, labels live on the host
            return self._graph(tapes)

    def _graph(self, tapes: list[Tape]) -> Graph:
        flow = Flow(Labels(), self.rules, by_tag)
        follow(tapes, flow, self._kept())
        graph = build(tapes, flow, self.held)
        graph.rewired = self.rewired
        graph.notes = [*self.notes, *(f"{g}: {why}" for g, why in self.minimum.items())]
        hold_spine(graph)
        for name in self.minimum:
            graph.groups[name].minimum = 1
        graph.cost = measure(self.model, graph)
        return graph

    def _tapes(self) -> list[Tape]:
        shims = dict.fromkeys(self.rewired, shim)
        tapes = [record(self.model, self.example, training=False, shims=shims)]
        self.notes = []
        try:
            tapes.append(record(self.model, self.example, training=True, shims=shims))
        except PruneError as error:
            self.notes = [f"followed in eval mode only; train mode did not run: {error}"]
        return tapes

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


def _prove(look: _Look, graph: Graph) -> Graph:
    """Cut copies of the model until what is called open has been seen to be."""
    trial = _Trial(look)
    if graph.baked:
        graph = _unbake(look, graph)
    if trial.halves(graph) or trial.failure(graph, _closed(graph)):
        look.rewired = tuple(dict.fromkeys((*look.rewired, *_rewirable(look.model, graph))))
        graph = look() if look.rewired else graph
    why = trial.halves(graph)
    if why:
        for name in graph.open:
            alone = trial.halves(graph, name)
            if alone:
                look.held[name] = f"the model's code does not follow when it shrinks: {alone}"
        graph = look()
        if graph.open and trial.halves(graph):
            look.held.update(dict.fromkeys(graph.open, f"could not be shown to be exact: {why}"))
            graph = look()
    if trial.failure(graph, _closed(graph)):
        for name, group in graph.open.items():
            alone = "" if group.minimum else trial.failure(graph, {name: []})
            if alone:
                look.minimum[name] = f"keeps a channel, as the model's code needs one: {alone}"
        graph = look()
        if trial.failure(graph, _closed(graph)):
            for name in graph.open:
                look.minimum.setdefault(name, "keeps a channel, to be safe")
            graph = look()
    return graph


def _unbake(look: _Look, graph: Graph) -> Graph:
    """Code that counts channels is re-emitted, or its channels stay: a trial is no proof here."""
    modules = dict(look.model.named_modules())
    names = graph.owners
    for op, units in graph.baked.items():
        if _is_users(modules[op.module]) and as_graph(modules[op.module]) is not None:
            look.rewired = tuple(dict.fromkeys((*look.rewired, op.module)))
        else:
            for unit in set(units.flatten().tolist()) - {WHOLE}:
                look.held[names[unit]] = f"code that counts channels, in {op.where}"
    return look() if look.rewired or look.held else graph


def _is_users(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.")


class _Trial:
    """A copy of the model with random weights, in float64, to cut and compare."""

    def __init__(self, look: _Look) -> None:
        try:
            self.model, self.example = in_double(look.model, look.example)
            record(self.model, self.example, training=False)
            self.tolerance = _TOLERANCE
        except PruneError:  # code that insists on float32
            self.model, self.example = copy.deepcopy(look.model), look.example
            self.tolerance = 1e-4
        _shake(self.model)

    def halves(self, graph: Graph, name: str = "") -> str:
        """Cut half of every group (or of one); several times where code was re-emitted."""
        for seed in range(3 if graph.rewired else 1):
            plan = _half(graph, seed)
            why = self.failure(graph, {name: plan[name]} if name else plan)
            if why:
                return why
        return ""

    def failure(self, graph: Graph, plan: Plan) -> str:
        """What is wrong with this cut; empty if nothing."""
        masked = copy.deepcopy(self.model)
        fold(masked, graph, graph.alive(plan).double())
        try:
            cut = apply(copy.deepcopy(masked), write_recipe(masked, graph, plan))
            with redirect_stderr(io.StringIO()):  # fx prints what fails in re-emitted code
                prove_equal(masked, cut, self.example, self.tolerance)
        except PruneError as error:
            return str(error).split("\n")[0].split(". Nothing was")[0]
        return ""


def _shake(model: nn.Module) -> None:
    """Weights that start at zero would hide a wrong cut."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                noise = torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64, device="cpu"
                )
                parameter.add_(noise.to(parameter) * (0.1 * (spread or 1.0)))


def _half(graph: Graph, seed: int = 0) -> Plan:
    """A random half of every open group."""
    generator = torch.Generator("cpu").manual_seed(seed)
    plan = {}
    for name, group in graph.open.items():
        order = torch.randperm(group.size, generator=generator, device="cpu")
        plan[name] = sorted(order[: max(1, group.size // 2)].tolist())
    return plan


def _closed(graph: Graph) -> Plan:
    """All groups closed that may be, and half of the others."""
    half = _half(graph)
    return {name: half[name] if group.minimum else [] for name, group in graph.open.items()}


def _rewirable(model: nn.Module, graph: Graph) -> tuple[str, ...]:
    """Modules of the user that treat sizes as numbers where open channels pass."""
    found = []
    for tape in graph.tapes:
        for op in tape.ops:
            name = op.name.lstrip("_")
            touches = any(
                bool((units != WHOLE).any())
                for value in (*op.inputs(), *op.outs)
                for units in graph.values.get(value, [])
            )
            if touches and any(name.startswith(baked.lstrip("_")) for baked in BAKED):
                found.append(op.module)
    modules = dict(model.named_modules())
    return tuple(
        path
        for path in dict.fromkeys(found)
        if _is_users(modules[path]) and as_graph(modules[path]) is not None
    )
