"""Where gates go: before every layer that merges open channels, as factors of its weight."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .bank import put_bank
from .gates import Gate, GatedWeight, GateVector
from .groups import Graph, stays
from .norms import weigh
from .tape import named_tensors


def install(model: nn.Module, graph: Graph) -> dict[str, Gate]:
    """Put a gate before every layer that merges open channels, in place."""
    like = next(tensor for tensor in model.parameters() if tensor.is_floating_point())
    dtype = torch.promote_types(like.dtype, torch.float32)
    gates = {
        name: Gate(group.size, dtype=dtype).to(like.device) for name, group in graph.open.items()
    }
    place(model, graph, gates, torch.ones(graph.units, dtype=torch.bool, device="cpu"))
    return gates


def place(model: nn.Module, graph: Graph, gates: dict[str, Gate], alive: Tensor) -> None:
    """Put gates into a model that has the units that are alive."""
    tensors = dict(named_tensors(model))
    home = next(iter(gates.values())).alpha.device

    def local(units: Tensor) -> tuple[list[Gate], Tensor]:
        return _local(graph, gates, units[stays(units, alive)], alive)

    weigh(model, graph, lambda units: GateVector(*local(units)).to(home))
    sites = {name: axes for name, axes in graph.sites.items() if name in tensors}
    owners = {name: _owners(model, tensors[name]) for name in sites}
    alone = []  # weights with one place and one axis of gates
    for name, axes in sites.items():
        gated = [(axis, *local(units)) for axis, units in axes.items()]
        gated = [item for item in gated if item[1]]  # else only channels are left that stay
        for axis, mine, units in gated:
            weight = GatedWeight(mine, units, axis).to(tensors[name].device)
            for owner, leaf in owners[name]:
                parametrize.register_parametrization(owner, leaf, weight)
        if len(gated) == len(axes) == len(owners[name]) == 1:
            alone.append(cast(Any, owner).parametrizations[leaf])
    put_bank(model, alone)


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
    for name, group in graph.open.items():
        mine = (units >= group.offset) & (units < group.offset + group.size)
        if bool(mine.any()):
            before = int(alive[: group.offset].sum())
            local[mine] = rank[units[mine]] - before + start
            needed.append(gates[name])
            start += int(alive[group.offset : group.offset + group.size].sum())
    return needed, local
