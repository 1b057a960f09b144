"""Gates with differentiable polarization: g_ε(α) = α² / (α² + ε)   (eq. 2 of the paper).

At α = 0 the gate is exactly 0 for every ε and its slope 2αε/(α²+ε)² is 0: a closed gate gets no
gradient. As ε decays, every other gate tends to 1.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PruneError
from ..rewriting.weighted_norms import weight_of
from ..surgery.apply import spread
from ..torch_internals.markers import gate_part

ALPHA_START, EPS_START = 1.0, 0.1


def gate_value(alpha: Tensor, eps: Tensor | float) -> Tensor:
    """g_ε(α) = α² / (α² + ε)"""
    square = alpha * alpha
    return square / (square + eps)


def gate_slope(alpha: Tensor, eps: Tensor | float) -> Tensor:
    """dg/dα = 2αε / (α² + ε)²"""
    return 2 * alpha * eps / (alpha * alpha + eps) ** 2


@gate_part
class Gate(nn.Module):
    """One gate vector: α is learned, ε is set from outside. Multiplies the channels of its input.

    Args:
        size: how many channels.
        axis: of the input, along which the channels lie.

    >>> Gate(3)(torch.ones(1, 3)).allclose(torch.tensor(1 / 1.1))
    True
    """

    alpha: nn.Parameter
    eps: Tensor

    def __init__(self, size: int, axis: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        _check(size, axis, dtype)
        self.axis = axis
        self.alpha = nn.Parameter(torch.full((size,), ALPHA_START, dtype=dtype))
        self.register_buffer("eps", torch.tensor(EPS_START, dtype=dtype))

    def values(self) -> Tensor:
        """The gates, between 0 and 1."""
        return gate_value(self.alpha, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return x * self.values().to(x.dtype).reshape(shape)

    def _check_input(self, x: Any) -> None:
        """What would broadcast, or round gates to 0 and 1, is refused, too."""
        given, size = type(x).__name__, len(self.alpha)
        if isinstance(x, Tensor):
            fits = -x.dim() <= self.axis < x.dim() and x.shape[self.axis] == size
            if fits and (x.is_floating_point() or x.is_complex()):
                return
            given = f"{x.dtype} of shape {list(x.shape)}"
        raise PruneError(
            f"Gate: the input is {given}; give a tensor of floating-point numbers with {size} "
            f"channels along axis {self.axis}, or build Gate(size, axis) for it."
        )


def _check(size: Any, axis: Any, dtype: Any) -> None:
    whole = [isinstance(n, Integral) and not isinstance(n, bool) for n in (size, axis)]
    if not whole[0] or size < 1:
        raise PruneError(f"Gate: size={size!r}; give the number of channels, at least 1.")
    if not whole[1]:
        raise PruneError(f"Gate: axis={axis!r}; give the axis of the channels, a whole number.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PruneError(f"Gate: dtype={dtype!r}; give a floating-point type, as torch.float32.")


@gate_part
class GateVector(nn.Module):
    """The gates of some channels as one vector: weights for the means of a norm over them."""

    units: Tensor

    def __init__(self, gates: list[Gate], units: Tensor) -> None:
        super().__init__()
        self.gates = nn.ModuleList(gates)
        self.register_buffer("units", units, persistent=False)

    def forward(self) -> Tensor:
        values: list[Tensor] = [gate.values() for gate in self.gates]  # type: ignore[operator]
        return weight_of(spread(torch.cat(values), self.units, 0, 1))


@gate_part
class GatedWeight(nn.Module):
    """W·(g ⊙ x) = (W ⊙ g)·x: the gates of the incoming channels, multiplied into the weight."""

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
        self.fused: Any = None  # computes the weights of a network together, where that pays
        self.slot = 0

    def forward(self, weight: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and self.fused is not None:
            ready: Tensor | None = self.fused.take(self.slot, weight)
            if ready is not None:
                return ready
        return self.times(weight, [gate.values() for gate in self.gates])  # type: ignore[operator]

    def times(self, weight: Tensor, values: list[Tensor]) -> Tensor:
        """The weight with these values of its gates."""
        if self.simple:
            shape = [1] * weight.dim()
            shape[self.axis] = -1
            return weight * values[0].to(weight.dtype).reshape(shape)
        laid = spread(torch.cat(values), self.units, self.axis, weight.dim())
        return weight * laid.to(weight.dtype)
