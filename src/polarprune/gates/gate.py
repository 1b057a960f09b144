"""The gate with differentiable polarization: g_ε(α) = α² / (α² + ε)   (eq. 2 of the paper).

At α = 0 the gate is exactly 0 for every ε, and so is its slope 2αε/(α²+ε)²: a closed gate gets no
gradient. As ε decays, every other gate tends to 1.
"""

from __future__ import annotations

import threading
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..rewriting.weighted_norms import weight_of
from ..torch_internals.markers import gate_part
from ..validation.gates import check_gate, check_gate_input
from .folding import spread

ALPHA_START, EPS_START = 1.0, 0.1


def gate_value(alpha: Tensor, eps: Tensor | float) -> Tensor:
    """Return g_ε(α) = α² / (α² + ε)."""
    square = alpha * alpha
    return square / (square + eps)


def gate_slope(alpha: Tensor, eps: Tensor | float) -> Tensor:
    """Return dg/dα = 2αε / (α² + ε)²."""
    return 2 * alpha * eps / (alpha * alpha + eps) ** 2


@gate_part
class Gate(nn.Module):
    """Multiply each channel of the input by its gate g(α) = α² / (α² + ε), between 0 and 1.

    `alpha` is a learned parameter with one number for each channel, and starts at 1. `eps` is a
    buffer that starts at 0.1; a schedule decays it. A channel whose α is 0 is closed: its gate is 0
    and its gradient is 0. `Pruner` installs and controls gates automatically. Use this module to
    add a gate by hand.

    Args:
        size: Number of channels, at least 1.
        axis: Axis of the input that holds the channels.
        dtype: Floating-point dtype of α and ε. The input may have another dtype.

    Raises:
        PruneError: If an argument has the wrong type or value, or if the input of a call is not a
            floating-point tensor with `size` channels along `axis`.

    Example:
        >>> import torch
        >>> import polarprune as pp
        >>> gate = pp.Gate(3)
        >>> with torch.no_grad():
        ...     _ = gate.alpha.copy_(torch.tensor([0.0, 0.3, 1.0]))
        >>> gate(torch.ones(1, 3, 4, 4)).shape
        torch.Size([1, 3, 4, 4])
        >>> [round(value, 3) for value in gate.values().tolist()]
        [0.0, 0.474, 0.909]
        >>> _ = gate.eps.fill_(5e-8)
        >>> [round(value, 3) for value in gate.values().tolist()]
        [0.0, 1.0, 1.0]
    """

    alpha: nn.Parameter
    eps: Tensor

    def __init__(self, size: int, axis: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        check_gate(size, axis, dtype)
        self.axis = axis
        self.alpha = nn.Parameter(torch.full((size,), ALPHA_START, dtype=dtype))
        self.register_buffer("eps", torch.tensor(EPS_START, dtype=dtype))

    def values(self) -> Tensor:
        """Return the gates of all channels, between 0 and 1.

        Returns:
            One value g(α) for each channel, differentiable with respect to `alpha`.

        Example:
            >>> import torch
            >>> import polarprune as pp
            >>> gate = pp.Gate(2)
            >>> with torch.no_grad():
            ...     _ = gate.alpha.copy_(torch.tensor([0.0, 0.1]))
            >>> [round(value, 3) for value in gate.values().tolist()]
            [0.0, 0.091]
        """
        return gate_value(self.alpha, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply every channel of `x` by its gate.

        Args:
            x: A floating-point tensor with `size` channels along `axis`.

        Returns:
            The product, with the shape and the dtype of `x`.

        Raises:
            PruneError: If `x` is not such a tensor.

        Example:
            >>> import torch
            >>> import polarprune as pp
            >>> gate = pp.Gate(2)
            >>> _ = gate.eps.fill_(1.0)
            >>> gate(torch.ones(1, 2)).tolist()
            [[0.5, 0.5]]
        """
        check_gate_input(x, len(self.alpha), self.axis)
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return x * self.values().to(x.dtype).reshape(shape)


class ReadyWeights(Protocol):
    """The part of `FusedGates` that a gated weight uses: results that were computed together."""

    def take(self, slot: int, weight: Tensor) -> Tensor | None:
        """Return the gated weight at index `slot`, or None if it is not computed yet."""

    def values_for(self, slot: int, weight: Tensor) -> list[Tensor] | None:
        """Return the values of its gates, or None if they are not computed yet."""


@gate_part
class GateVector(nn.Module):
    """The gates of some channels as one vector, with which a norm weights its means.

    Args:
        gates: The gates that occur along the axis.
        units: For every channel, its index in the concatenated gates; -1 for a frozen channel.
    """

    units: Tensor

    def __init__(self, gates: list[Gate], units: Tensor) -> None:
        super().__init__()
        self.gates = nn.ModuleList(gates)
        self.register_buffer("units", units, persistent=False)

    def forward(self) -> Tensor:
        """Return the weight of every channel."""
        return weight_of(spread(torch.cat(values_of(self.gates)), self.units, 0, 1))


@gate_part
class GatedWeight(nn.Module):
    """A parametrization that multiplies the gates of the input channels into the weight.

    W·(g ⊙ x) = (W ⊙ g)·x, and weights usually have fewer elements than activations.

    Args:
        gates: The gates that occur along the axis.
        units: For every index along the axis, its index in the concatenated gates; -1 for a frozen
            channel, whose factor is 1.
        axis: Axis of the weight that reads the gated channels.
    """

    units: Tensor

    def __init__(self, gates: list[Gate], units: Tensor, axis: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(gates)
        self.axis = axis
        # With a single gate whose channels are in order, the values need no indexing.
        self.simple = len(gates) == 1 and torch.equal(
            units, torch.arange(len(gates[0].alpha), device=units.device)
        )
        self.register_buffer("units", units, persistent=False)
        self.fused: ReadyWeights | None = None  # set by `fuse_gates` if that is faster
        self.slot = 0  # the index of this weight in `fused`
        self._skipped_by = 0  # the thread that gates the input of the layer instead

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight multiplied by its gates."""
        if not torch.compiler.is_compiling():
            if self._skipped_by == threading.get_ident():
                self._skipped_by = 0
                return weight
            ready = None if self.fused is None else self.fused.take(self.slot, weight)
            if ready is not None:
                return ready
        return weight * self.factors(self.axis, weight, weight)

    def skip_once(self) -> None:
        """Let this thread read the weight once without gates: it has gated the input instead."""
        self._skipped_by = threading.get_ident()

    def skip_no_more(self) -> None:
        """Undo `skip_once` if the weight was not read."""
        self._skipped_by = 0

    def factors(self, axis: int, tensor: Tensor, weight: Tensor) -> Tensor:
        """Return the factors of a tensor with the gated channels along `axis`.

        Args:
            axis: The axis of the channels.
            tensor: The weight, or the input of its layer.
            weight: The weight, by which results that were computed together are found.
        """
        ready = None
        if self.fused is not None and not torch.compiler.is_compiling():
            ready = self.fused.values_for(self.slot, weight)
        values = values_of(self.gates) if ready is None else ready
        laid = values[0] if self.simple else spread(torch.cat(values), self.units, 0, 1)
        return factors_along(axis, laid.to(tensor.dtype), tensor)


class GatedList(ParametrizationList):
    """A list of parametrizations that usually has one: a `GatedWeight`, which it calls directly.

    This takes a third of the time that torch's own list takes. A network reads every weight at
    every step.
    """

    def forward(self) -> Tensor:
        """Return the parametrized weight."""
        if len(self._modules) > 1 or torch.compiler.is_compiling():
            return super().forward()
        return cast(GatedWeight, self._modules["0"]).forward(self.original)


def factors_along(axis: int, factors: Tensor, tensor: Tensor) -> Tensor:
    """Return one factor for each index along an axis, shaped to broadcast with a tensor.

    Along axis 1 of a contiguous tensor, factors are repeated for all inner axes. On a CPU, a
    product with such a row is faster than one that broadcasts over inner axes, and so is the sum
    over rows in the backward pass.
    """
    shape = [1] * tensor.dim()
    shape[axis] = -1
    laid, inner = factors.reshape(shape), tensor.shape[2:]
    if axis == 1 and inner.numel() > 1 and tensor.is_contiguous():
        return laid.expand(1, -1, *inner).contiguous()
    return laid


def values_of(gates: nn.ModuleList) -> list[Tensor]:
    """Return the values of every gate."""
    return [cast(Gate, gate).values() for gate in gates]
