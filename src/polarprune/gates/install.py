"""Install gates: before every layer that merges prunable channels, as factors of its weight.

A gate is a parametrization of the weight (`GatedWeight`), so the user's modules, their names and
their code stay as they are.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from ..channels.graph import Graph, stays
from ..errors import PruneError
from ..rewriting.forward_weights import expose
from ..rewriting.parametrizations import parametrized
from ..rewriting.weighted_norms import open_encoders, weigh
from ..surgery.proof import difference, in_double
from ..torch_internals.class_swaps import set_class
from ..torch_internals.markers import gate_part
from ..tracing.model_state import Example, named_tensors
from .folding import plain
from .fused import fuse_gates
from .gate import ALPHA_START, Gate, GatedWeight, GateVector


def install(model: nn.Module, graph: Graph, example: Example) -> dict[str, Gate]:
    """Install a gate before every layer that merges prunable channels, in place.

    Returns:
        Group name -> its gate.

    Raises:
        PruneError: If gates cannot be installed or have no effect. The model is unchanged then.
    """
    like = next(tensor for tensor in model.parameters() if tensor.is_floating_point())
    dtype = torch.promote_types(like.dtype, torch.float32)
    gates = {
        name: Gate(group.size, dtype=dtype).to(like.device)
        for name, group in graph.prunable.items()
    }
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    tables = [(v, dict(v)) for _, _, own in before for v in own.values() if isinstance(v, dict)]
    try:
        expose(model, graph.forward_weights)
        insert_gates(model, graph, gates, torch.ones(graph.units, dtype=torch.bool, device="cpu"))
        _check(model, graph, gates, example)
    except Exception as error:
        for module, family, own in before:
            set_class(module, family)
            vars(module).clear()
            vars(module).update(own)
        for table, entries in tables:
            table.clear()
            table.update(entries)
        if isinstance(error, PruneError):
            raise
        raise PruneError(
            f"gates cannot be installed in this model: {error!r}. Freeze the part in question "
            f"with keep=[...]. Nothing was changed."
        ) from error
    return gates


def _check(model: nn.Module, graph: Graph, gates: dict[str, Gate], example: Example) -> None:
    """Raise unless random gates change the output as multiplying them into the weights does."""
    weighted = torch.cat([torch.arange(0), *(units.flatten() for units in graph.weights.values())])
    generator = torch.Generator("cpu").manual_seed(0)
    for name, group in graph.prunable.items():
        mine = torch.arange(group.offset, group.offset + group.size)
        if not bool(torch.isin(mine, weighted).any()):  # weighted norms agree at 0 and 1 only
            drawn = torch.rand(group.size, generator=generator, device="cpu") + 0.2
            gates[name].alpha.data.copy_(drawn)
    try:
        if not _alike(model, plain(model), example) and _alike(model, model, example):
            raise PruneError(
                "gates have no effect in this model: it reads weights past the modules that hold "
                "them (through a list, a partial function or its own train(), for example). Read "
                "them from the module, or freeze it with keep=[...]. Nothing was changed."
            )
    finally:
        for gate in gates.values():
            gate.alpha.data.fill_(ALPHA_START)


def _alike(one: nn.Module, other: nn.Module, example: Example) -> bool:
    """Return whether two models agree, in their own precision or in float64."""
    if difference(one, other, example, training=False) < _CLOSE:
        return True
    (one, double), (other, _) = in_double(one, example), in_double(other, example)
    return difference(one, other, double, training=False) < _CLOSE


_CLOSE = 1e-4


def insert_gates(model: nn.Module, graph: Graph, gates: dict[str, Gate], alive: Tensor) -> None:
    """Install gates in a model that has the units that are `alive`; others were removed."""
    tensors = dict(named_tensors(model))
    home = next(iter(gates.values())).alpha.device

    def local(units: Tensor) -> tuple[list[Gate], Tensor]:
        return _local(graph, gates, units[stays(units, alive)], alive)

    weigh(model, graph, lambda units: GateVector(*local(units)).to(home))
    # weights that a parametrization of the user computes
    made = {name: [(module, leaf)] for name, module, leaf, _ in parametrized(model)}
    sites = {name: axes for name, axes in graph.sites.items() if name in tensors or name in made}
    owners = {name: made.get(name) or _owners(model, tensors[name]) for name in sites}
    simple = []  # weights that one module holds and that have gates along one axis
    for name, axes in sites.items():
        gated = [(axis, *local(units)) for axis, units in axes.items()]
        gated = [item for item in gated if item[1]]  # an axis may have only frozen channels left
        for axis, mine, units in gated:
            weight = GatedWeight(mine, units, axis).to(getattr(*owners[name][0]).device)
            for owner, leaf in owners[name]:
                parametrize.register_parametrization(owner, leaf, weight)
        if len(gated) == len(axes) == len(owners[name]) == 1 and name not in made:
            tables = cast(nn.ModuleDict, owner.parametrizations)
            simple.append(cast(ParametrizationList, tables[leaf]))
    fuse_gates(model, simple)
    open_encoders(model)
    for owner in {owner for name in sites for owner, _ in owners[name]}:
        if isinstance(owner, nn.RNNBase):
            owner.register_forward_hook(_let_go)


@gate_part
def _let_go(module: nn.RNNBase, args: object, out: object) -> None:
    """Detach the weights that a recurrent layer stores: tensors with a graph cannot be copied."""
    weights = module._flat_weights
    module._flat_weights = [None if weight is None else weight.detach() for weight in weights]


def _owners(model: nn.Module, tensor: Tensor) -> list[tuple[nn.Module, str]]:
    """Return every module and name that holds a tensor; a tied weight has several."""
    return [
        (module, leaf)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for leaf, held in table.items()
        if held is tensor
    ]


def _local(
    graph: Graph, gates: dict[str, Gate], units: Tensor, alive: Tensor
) -> tuple[list[Gate], Tensor]:
    """Return the gates that an axis needs, and for each of its units the index among them.

    A unit without a gate gets -1.
    """
    needed: list[Gate] = []
    local = torch.full_like(units, -1)
    rank = torch.cumsum(alive, 0) - 1  # index among the units that are alive
    start = 0
    for name, group in graph.prunable.items():
        mine = (units >= group.offset) & (units < group.offset + group.size)
        if bool(mine.any()):
            before = int(alive[: group.offset].sum())
            local[mine] = rank[units[mine]] - before + start
            needed.append(gates[name])
            start += int(alive[group.offset : group.offset + group.size].sum())
    return needed, local
