"""Install gates in every layer that reads prunable channels, as factors of its weight.

A gate is a parametrization of the weight (`GatedWeight`), so the user's modules keep their names
and their code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from ..surgery.precision import in_double
from ..surgery.proof import difference
from ..torch_internals.class_swaps import set_class
from ..torch_internals.markers import gate_part
from ..torch_internals.parallel import in_group, is_distributed, skip_in_fully_shard
from ..tracing.model_state import Example, named_tensors
from .folding import plain
from .fused import fuse_gates
from .gate import ALPHA_START, Gate, GatedWeight, GateVector
from .gated_inputs import gate_small_inputs

# A module and the name of a parameter or buffer in it.
_Owner = tuple[nn.Module, str]
# Given the units along an axis: the gates of the axis, and the index of each unit among them.
_LocalGates = Callable[[Tensor], tuple[list[Gate], Tensor]]


def install(model: nn.Module, graph: Graph, example: Example) -> dict[str, Gate]:
    """Install a gate in every layer that reads prunable channels, in place.

    Args:
        model: The model to change.
        graph: The graph of the model.
        example: Inputs on which the gates are checked.

    Returns:
        The gate of each prunable group, by the name of the group.

    Raises:
        PruneError: If gates cannot be installed or have no effect. The model is unchanged then.
    """
    gates = make_gates(model, graph)
    with undone_on_error(model):
        expose(model, graph.forward_weights)
        insert_gates(model, graph, gates, torch.ones(graph.units, dtype=torch.bool, device="cpu"))
        _check(model, graph, gates, example)
    return gates


def make_gates(model: nn.Module, graph: Graph) -> dict[str, Gate]:
    """Return an open gate for each prunable group, on the device of the model."""
    like = next(tensor for tensor in model.parameters() if tensor.is_floating_point())
    dtype = torch.promote_types(like.dtype, torch.float32)
    gates = {
        name: Gate(group.size, dtype=dtype).to(like.device)
        for name, group in graph.prunable.items()
    }
    if in_group():
        for gate in gates.values():
            skip_in_fully_shard(gate)
    return gates


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager: after an exception or Ctrl-C, restore all modules.

    Raises:
        PruneError: In place of any other exception; Ctrl-C stays a `KeyboardInterrupt`.
    """
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    tables = [(v, dict(v)) for _, _, own in before for v in own.values() if isinstance(v, dict)]
    try:
        yield
    except BaseException as error:
        for module, family, own in before:
            set_class(module, family)
            vars(module).clear()
            vars(module).update(own)
        for table, entries in tables:
            table.clear()
            table.update(entries)
        if isinstance(error, PruneError) or not isinstance(error, Exception):
            raise
        raise PruneError(
            f"gates cannot be installed in this model: {error!r}. Freeze the affected part with "
            f"keep=[...]. Nothing was changed."
        ) from error


def _check(model: nn.Module, graph: Graph, gates: dict[str, Gate], example: Example) -> None:
    """Raise if gates have no effect.

    Gates get random values. The output must then change as it does when the gates are multiplied
    into the weights.
    """
    weighted = torch.cat([torch.arange(0), *(units.flatten() for units in graph.weights.values())])
    generator = torch.Generator("cpu").manual_seed(0)
    for name, group in graph.prunable.items():
        mine = torch.arange(group.offset, group.offset + group.size)
        # Weighted norms are exact for gates of 0 and 1 only, so their groups keep the start value.
        if not bool(torch.isin(mine, weighted).any()):
            drawn = torch.rand(group.size, generator=generator, device="cpu") + 0.2
            gates[name].alpha.data.copy_(drawn)
    try:
        if not _alike(model, plain, example) and _alike(model, lambda same: same, example):
            raise PruneError(
                "gates have no effect in this model: it does not read weights from the modules "
                "that hold them (but from a list, a partial function or a custom train(), for "
                "example). Read weights from the module, or freeze it with keep=[...]. Nothing was "
                "changed."
            )
    finally:
        for gate in gates.values():
            gate.alpha.data.fill_(ALPHA_START)


def _alike(model: nn.Module, changed: Callable[[nn.Module], nn.Module], example: Example) -> bool:
    """Return whether a change makes no difference, in the model's own precision or in float64."""
    if difference(model, changed(model), example, training=False) < _CLOSE:
        return True
    double, inputs = in_double(model, example)
    return difference(double, changed(double), inputs, training=False) < _CLOSE


_CLOSE = 1e-4


def insert_gates(
    model: nn.Module, graph: Graph, gates: dict[str, Gate], kept_units: Tensor
) -> None:
    """Install gates in a model from which channels may have been removed.

    Args:
        model: The model to change.
        graph: The graph of the original model.
        gates: The gate of each prunable group, with the channels that the model still has.
        kept_units: For every unit of the graph, whether the model still has it.
    """
    tensors = dict(named_tensors(model))
    home = next(iter(gates.values())).alpha.device

    def local(units: Tensor) -> tuple[list[Gate], Tensor]:
        return _local(graph, gates, units[stays(units, kept_units)], kept_units)

    weigh(model, graph, lambda units: GateVector(*local(units)).to(home))
    # Weights that a parametrization of the user computes are not in `tensors`.
    made = {name: [(module, leaf)] for name, module, leaf, _ in parametrized(model)}
    sites = [name for name in graph.sites if name in tensors or name in made]
    owners = {name: made.get(name) or _owners(model, tensors[name]) for name in sites}
    counts = {name: _gate_weight(owners[name], graph.sites[name], local) for name in sites}
    fusible = [name for name in sites if name not in made and len(owners[name]) == 1]
    fusible = [name for name in fusible if counts[name] == len(graph.sites[name]) == 1]
    fuse_gates(model, [_parametrizations(*owners[name][0]) for name in fusible])
    for name in fusible:
        owner, leaf = owners[name][0]
        if leaf == "weight":
            gate_small_inputs(owner, _parametrizations(owner, leaf))
    open_encoders(model)
    _detach_after_forward({owner for name in sites for owner, _ in owners[name]})


def _gate_weight(owners: list[_Owner], axes: dict[int, Tensor], local: _LocalGates) -> int:
    """Register the gates of a weight in all of its owners; return the number of gated axes."""
    gated = [(axis, *local(units)) for axis, units in axes.items()]
    gated = [item for item in gated if item[1]]  # an axis may have only frozen channels left
    own = next(tensor for _, tensor in named_tensors(owners[0][0]))
    for axis, gates, units in gated:
        weight = GatedWeight(gates, units, axis).to(own.device)
        for owner, leaf in owners:  # a part of a weight cannot be multiplied for a test
            unsafe = is_distributed(own)
            parametrize.register_parametrization(owner, leaf, weight, unsafe=unsafe)
    return len(gated)


def _parametrizations(owner: nn.Module, leaf: str) -> ParametrizationList:
    """Return the parametrizations of a tensor."""
    return cast(ParametrizationList, cast(nn.ModuleDict, owner.parametrizations)[leaf])


def _detach_after_forward(owners: set[nn.Module]) -> None:
    """Register the hook of recurrent layers that detaches their weights after a forward."""
    for owner in owners:
        if isinstance(owner, nn.RNNBase):
            owner.register_forward_hook(_detach_weights)


@gate_part
def _detach_weights(module: nn.RNNBase, args: object, out: object) -> None:
    """Detach the weights that a recurrent layer stores.

    `copy.deepcopy` does not accept tensors that have an autograd graph.
    """
    weights = module._flat_weights
    module._flat_weights = [None if weight is None else weight.detach() for weight in weights]


def _owners(model: nn.Module, tensor: Tensor) -> list[_Owner]:
    """Return every module that holds a tensor, with its name there; a tied weight has several."""
    return [
        (module, leaf)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for leaf, held in table.items()
        if held is tensor
    ]


def _local(
    graph: Graph, gates: dict[str, Gate], units: Tensor, kept_units: Tensor
) -> tuple[list[Gate], Tensor]:
    """Return the gates that an axis needs, and the index of each unit in these gates.

    The indices count through the concatenated gates. A unit without a gate gets -1.
    """
    needed: list[Gate] = []
    local = torch.full_like(units, -1)
    # The index of a unit among those that the model still has.
    rank = torch.cumsum(kept_units, 0) - 1
    start = 0
    for name, group in graph.prunable.items():
        mine = (units >= group.offset) & (units < group.offset + group.size)
        if bool(mine.any()):
            before = int(kept_units[: group.offset].sum())
            local[mine] = rank[units[mine]] - before + start
            needed.append(gates[name])
            start += int(kept_units[group.offset : group.offset + group.size].sum())
    return needed, local
