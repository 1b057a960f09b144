"""Gates with differentiable polarization: g_ε(α) = α² / (α² + ε)   (eq. 2 of the paper).

At α = 0 the gate is exactly 0 for every ε and its slope 2αε/(α²+ε)² is 0: a closed gate gets no
gradient. As ε decays, every other gate tends to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .groups import Graph, stays
from .norms import weigh, weight_of
from .surgery import spread
from .tape import named_tensors

ALPHA_START, EPS_START = 1.0, 0.1


def gate_value(alpha: Tensor, eps: Tensor | float) -> Tensor:
    """g_ε(α) = α² / (α² + ε)"""
    square = alpha * alpha
    return square / (square + eps)


class Gate(nn.Module):
    """One gate vector: α is learned, ε is set from outside. Multiplies the channels of its input.

    Args:
        size: how many channels.
        axis: of the input, along which the channels lie.

    >>> Gate(3)(torch.ones(1, 3)).allclose(torch.tensor(1 / 1.1))
    True
    """

    is_gate = True
    alpha: nn.Parameter
    eps: Tensor

    def __init__(self, size: int, axis: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.axis = axis
        self.alpha = nn.Parameter(torch.full((size,), ALPHA_START, dtype=dtype))
        self.register_buffer("eps", torch.tensor(EPS_START, dtype=dtype))

    def values(self) -> Tensor:
        """The gates, between 0 and 1."""
        return gate_value(self.alpha, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return x * self.values().to(x.dtype).reshape(shape)


class GateVector(nn.Module):
    """The gates of some channels as one vector: weights for the means of a norm over them."""

    is_gate = True
    units: Tensor

    def __init__(self, gates: list[Gate], units: Tensor) -> None:
        super().__init__()
        self.gates = nn.ModuleList(gates)
        self.register_buffer("units", units, persistent=False)

    def forward(self) -> Tensor:
        values: list[Tensor] = [gate.values() for gate in self.gates]  # type: ignore[operator]
        return weight_of(spread(torch.cat(values), self.units, 0, 1))


class GatedWeight(nn.Module):
    """W·(g ⊙ x) = (W ⊙ g)·x: the gates of the incoming channels, multiplied into the weight."""

    is_gate = True
    units: Tensor

    def __init__(self, gates: list[Gate], units: Tensor, axis: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(gates)
        self.axis = axis
        simple = len(gates) == 1 and torch.equal(
            units, torch.arange(len(gates[0].alpha), device=units.device)
        )
        self.simple = simple
        self.register_buffer("units", units, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        values: list[Tensor] = [gate.values() for gate in self.gates]  # type: ignore[operator]
        if self.simple:
            shape = [1] * weight.dim()
            shape[self.axis] = -1
            return weight * values[0].to(weight.dtype).reshape(shape)
        laid = spread(torch.cat(values), self.units, self.axis, weight.dim())
        return weight * laid.to(weight.dtype)


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
    for name, axes in sites.items():
        for axis, units in axes.items():
            weight = GatedWeight(*local(units), axis).to(tensors[name].device)
            for owner, leaf in owners[name]:
                parametrize.register_parametrization(owner, leaf, weight)


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
