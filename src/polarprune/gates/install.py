"""Where gates go: before every layer that merges open channels, as factors of its weight."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..channels.graph import Graph, stays
from ..errors import PruneError
from ..rewriting.forward_weights import expose
from ..rewriting.parametrizations import parametrized
from ..rewriting.weighted_norms import open_encoders, weigh
from ..surgery.apply import plain
from ..surgery.proof import difference, in_double
from ..tracing.model_state import Example, named_tensors
from .fused import fuse_gates
from .gate import ALPHA_START, Gate, GatedWeight, GateVector


def install(model: nn.Module, graph: Graph, example: Example) -> dict[str, Gate]:
    """Put a gate before every layer that merges open channels, in place."""
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
            module.__class__ = family
            vars(module).clear()
            vars(module).update(own)
        for table, entries in tables:
            table.clear()
            table.update(entries)
        if isinstance(error, PruneError):
            raise
        raise PruneError(
            f"gates cannot be put into this model: {error!r}. Leave the part in question whole "
            f"with keep=[...]. Nothing was changed."
        ) from error
    return gates


def _check(model: nn.Module, graph: Graph, gates: dict[str, Gate], example: Example) -> None:
    """Gates of any value do what multiplying them into the weights does, or training is in vain."""
    weighted = torch.cat([torch.arange(0), *(units.flatten() for units in graph.weights.values())])
    generator = torch.Generator("cpu").manual_seed(0)
    for name, group in graph.prunable.items():
        mine = torch.arange(group.offset, group.offset + group.size)
        if not bool(torch.isin(mine, weighted).any()):  # norms want gates to be 0 or 1
            drawn = torch.rand(group.size, generator=generator, device="cpu") + 0.2
            gates[name].alpha.data.copy_(drawn)
    try:
        if not _alike(model, plain(model), example) and _alike(model, model, example):
            raise PruneError(
                "gates do not act in this model: it reads weights past the modules that hold them "
                "(as a list, a partial function or a train() of its own may do). Remedy: read them "
                "from the module, or leave it whole with keep=[...]. Nothing was changed."
            )
    finally:
        for gate in gates.values():
            gate.alpha.data.fill_(ALPHA_START)


def _alike(one: nn.Module, other: nn.Module, example: Example) -> bool:
    if difference(one, other, example, training=False) < _CLOSE:
        return True
    (one, double), (other, _) = in_double(one, example), in_double(other, example)
    return difference(one, other, double, training=False) < _CLOSE


_CLOSE = 1e-4


def insert_gates(model: nn.Module, graph: Graph, gates: dict[str, Gate], alive: Tensor) -> None:
    """Put gates into a model that has the units that are alive."""
    tensors = dict(named_tensors(model))
    home = next(iter(gates.values())).alpha.device

    def local(units: Tensor) -> tuple[list[Gate], Tensor]:
        return _local(graph, gates, units[stays(units, alive)], alive)

    weigh(model, graph, lambda units: GateVector(*local(units)).to(home))
    made = {name: [(module, leaf)] for name, module, leaf, _ in parametrized(model)}  # computed
    sites = {name: axes for name, axes in graph.sites.items() if name in tensors or name in made}
    owners = {name: made.get(name) or _owners(model, tensors[name]) for name in sites}
    alone = []  # weights with one place and one axis of gates
    for name, axes in sites.items():
        gated = [(axis, *local(units)) for axis, units in axes.items()]
        gated = [item for item in gated if item[1]]  # else only channels are left that stay
        for axis, mine, units in gated:
            weight = GatedWeight(mine, units, axis).to(getattr(*owners[name][0]).device)
            for owner, leaf in owners[name]:
                parametrize.register_parametrization(owner, leaf, weight)
        if len(gated) == len(axes) == len(owners[name]) == 1 and name not in made:
            alone.append(cast(Any, owner).parametrizations[leaf])
    fuse_gates(model, alone)
    open_encoders(model)
    for owner in {owner for name in sites for owner, _ in owners[name]}:
        if isinstance(owner, nn.RNNBase):
            owner.register_forward_hook(_let_go)


def _let_go(module: Any, args: Any, out: Any) -> None:
    """torch's recurrent layers hold on to what they computed with, which cannot be copied."""
    module._flat_weights = [weight.detach() for weight in module._flat_weights]


_let_go.is_gate = True  # type: ignore[attr-defined]


def _owners(model: nn.Module, tensor: Tensor) -> list[tuple[nn.Module, str]]:
    """All places where a tensor is held: tied weights have several."""
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
    """The gates that an axis needs, and its units counted among these (-1: no gate)."""
    needed: list[Gate] = []
    local = torch.full_like(units, -1)
    rank = torch.cumsum(alive, 0) - 1  # among the units that are alive
    start = 0
    for name, group in graph.prunable.items():
        mine = (units >= group.offset) & (units < group.offset + group.size)
        if bool(mine.any()):
            before = int(alive[: group.offset].sum())
            local[mine] = rank[units[mine]] - before + start
            needed.append(gates[name])
            start += int(alive[group.offset : group.offset + group.size].sum())
    return needed, local
