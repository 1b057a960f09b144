"""Compute all gates of a network at once, and all gated weights of a small network.

Computed one by one, the gates of each weight take about twenty small kernels a step. On an
accelerator, a small network spends more time on launching these than on computing. `FusedGates`
therefore runs before the network's forward:

- In a small network on an accelerator it computes all gated weights at once, and the layers take
  the finished weights.
- In a network whose weights have more than `LIMIT` elements, this would need too much memory; on a
  CPU, it would cost more time than it saves. There it computes all gates at once, and on a CPU the
  small weights, too. Each layer computes its other weights itself.

The values are the same as those that each layer computes by itself. Each layer does that where
fusing is impossible: in compiled code, for example.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.utils.parametrize import ParametrizationList

from ..torch_internals.class_swaps import set_class
from ..torch_internals.markers import gate_part
from .folding import drop_hooks, drop_hooks_of
from .gate import Gate, GatedList, GatedWeight, gate_slope, gate_value
from .gated_inputs import SMALL_WEIGHT
from .weight_factors import ElementFactors, Factors, RowFactors

LIMIT = 2**24  # elements of weights above which an accelerator computes only gates together
SLOW_TO_LAUNCH = {"cuda", "xpu", "mps"}  # devices on which launching a kernel takes long


@gate_part
class FusedGates:
    """A forward pre-hook of the network; layers then `take` their gated weights.

    Args:
        sites: The parametrized weights, each with one `GatedWeight`. The number of a weight in
            this list is its slot.
    """

    def __init__(self, sites: list[ParametrizationList]) -> None:
        self.sites = sites
        self.parts = [cast(GatedWeight, site[0]) for site in sites]
        found = {id(gate): cast(Gate, gate) for part in self.parts for gate in part.gates}
        self.gates = list(found.values())
        number = {gate: k for k, gate in enumerate(found)}
        self.readers = [[number[id(gate)] for gate in part.gates] for part in self.parts]
        for slot, part in enumerate(self.parts):
            part.fused, part.slot = self, slot
        sizes = torch.tensor([len(gate.alpha) for gate in self.gates], device="cpu")
        self.owner = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
        count = sum(site.original.numel() for site in sites)
        slow = sites[0].original.device.type in SLOW_TO_LAUNCH
        self.by_element = slow and count <= LIMIT
        self.slots = self._slots(slow)  # whose weights are computed together
        self._factors: Factors | None = None
        self._clear()

    def _slots(self, slow: bool) -> list[int]:
        """Return the slots of the weights to compute together."""
        if slow:
            return list(range(len(self.sites))) if self.by_element else []
        pairs = enumerate(zip(self.sites, self.parts, strict=True))
        return [
            slot
            for slot, (site, part) in pairs
            if part.simple and part.axis == 1 and site.original.numel() < SMALL_WEIGHT
        ]

    def _clear(self) -> None:
        """Drop the results of the last forward."""
        self.weights: list[Tensor] = []
        self.values: tuple[Tensor, ...] = ()  # of the gates
        self.ready: dict[int, Tensor] = {}  # gated weights, by slot
        self.alone: set[int] = set()  # slots whose layer computes its weight by itself
        self.running = False  # whether the network's forward is running
        self.learns = False  # whether it records gradients

    def __getstate__(self) -> dict[str, object]:
        """Leave the results of a forward out of copies."""
        other = vars(self) | {"weights": [], "values": (), "ready": {}, "alone": set()}
        return {**other, "_factors": None, "running": False}

    def __call__(self, model: nn.Module, args: object) -> None:
        """Compute the gates, and weights with them, before the network's forward."""
        if torch.compiler.is_compiling():
            return
        self._clear()
        weights: list[Tensor] = [site.original for site in self.sites]
        if not _can_fuse(weights) or (self.by_element and not all(map(_is_dense, weights))):
            return
        alphas = [gate.alpha for gate in self.gates]
        self.owner = self.owner.to(alphas[0].device)
        eps = torch.stack([gate.eps for gate in self.gates])[self.owner]
        self.values = _Values.apply(eps, *alphas)  # type: ignore[no-untyped-call]
        # The sums of rows have a fixed order on a CPU only; the model may have been moved.
        if self.slots and (self.by_element or alphas[0].device.type == "cpu"):
            mine = [weights[slot] for slot in self.slots]
            factors = self._factors_for(mine)
            made = _Multiply.apply(factors, len(alphas), *self.values, *mine)  # type: ignore[no-untyped-call]
            self.ready = dict(zip(self.slots, made, strict=True))
        self.weights, self.learns, self.running = weights, torch.is_grad_enabled(), True

    def _factors_for(self, weights: list[Tensor]) -> Factors:
        """Return the `Factors` of the weights of `slots`."""
        found, readers = self._factors, [self.readers[slot] for slot in self.slots]
        sizes = [len(gate.alpha) for gate in self.gates]
        if not self.by_element:
            found = found or RowFactors(weights, readers, sizes)
        elif not isinstance(found, ElementFactors) or not found.fits(weights):
            found = ElementFactors(weights, self.parts, sizes, readers)
        self._factors = found
        return found

    def end(self) -> None:
        """End a forward. Results that need gradients stay: backward may run parts again."""
        self.running = False
        if not self.learns:
            self._clear()

    def take(self, slot: int, weight: Tensor) -> Tensor | None:
        """Return the gated weight of a slot, or None if its layer has to compute it."""
        return self.ready.get(slot) if self._is_usable(slot, weight) else None

    def values_for(self, slot: int, weight: Tensor) -> list[Tensor] | None:
        """Return the values of the gates of a slot, or None if its layer has to compute them."""
        if not self._is_usable(slot, weight):
            return None
        return [self.values[k] for k in self.readers[slot]]

    def _is_usable(self, slot: int, weight: Tensor) -> bool:
        """Return whether the results of the last forward are those that a layer needs now."""
        if not self.weights or weight is not self.weights[slot]:
            return False
        if not self.running and torch._C._current_graph_task_id() == -1:  # not in backward
            return False
        if torch.is_grad_enabled() != self.learns:
            # torch.utils.checkpoint runs a part without gradients first. Its second run, in
            # backward, has to perform the same operations.
            self.alone.add(slot)
        return slot not in self.alone


@gate_part
class _End:
    """A forward hook that tells `FusedGates` that the network's forward is over."""

    def __init__(self, fused: FusedGates) -> None:
        self.fused = fused

    def __call__(self, model: nn.Module, args: object, out: object) -> None:
        if not torch.compiler.is_compiling():
            self.fused.end()


def fuse_gates(model: nn.Module, sites: list[ParametrizationList]) -> None:
    """Let a network compute the gated weights at these sites together, in place.

    Hooks of an earlier call are replaced.
    """
    drop_hooks(model)
    for site in sites:
        if type(site) is ParametrizationList:
            set_class(site, GatedList)
    sites = [site for site in sites if len(site) == 1 and _has_plain_gates(site)]
    if len(sites) > 1:
        fused = FusedGates(sites)
        model.register_forward_pre_hook(fused)
        model.register_forward_hook(_End(fused), always_call=True)


def unfuse_gates(model: nn.Module) -> None:
    """Let each layer compute its gated weight by itself again, in place."""
    for module in model.modules():
        if isinstance(module, GatedWeight):
            module.fused = None
    drop_hooks_of(model, (FusedGates, _End))


def _has_plain_gates(site: ParametrizationList) -> bool:
    """Return whether all gates compute g(α); a subclass may compute something else."""
    return all(type(gate) is Gate for gate in cast(GatedWeight, site[0]).gates)


def _can_fuse(weights: list[Tensor]) -> bool:
    """Return whether all are plain tensors of one device and type, and no transform is active."""
    return (
        not torch._C._get_tracing_state()
        and not torch._C._are_functorch_transforms_active()
        and len({(weight.device, weight.dtype) for weight in weights}) == 1
        and all(type(weight) in (Tensor, nn.Parameter) for weight in weights)
    )


def _is_dense(weight: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, in any order of axes."""
    reach = sum(
        (size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True)
    )
    return reach + 1 == weight.numel()


class _ValuesContext(FunctionCtx):
    eps: Tensor
    alphas: tuple[Tensor, ...]
    versions: list[int]
    sizes: list[int]


class _Values(torch.autograd.Function):
    """Compute all gates.

    Tensors are stored on `ctx`, not with `save_for_backward`: a first backward pass would free
    those, and the gates may be needed in a second one. `_check` replaces torch's version check.
    """

    @staticmethod
    def forward(ctx: _ValuesContext, eps: Tensor, *alphas: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.eps = [len(alpha) for alpha in alphas], eps
        ctx.alphas, ctx.versions = alphas, [alpha._version for alpha in alphas]
        ctx.set_materialize_grads(False)
        values: tuple[Tensor, ...] = gate_value(torch.cat(alphas), eps).split(ctx.sizes)
        return values

    @staticmethod
    def backward(ctx: _ValuesContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [k for k, grad in enumerate(grads) if grad is not None]
        _check(ctx.alphas, ctx.versions, used)
        slopes = gate_slope(torch.cat(ctx.alphas), ctx.eps).split(ctx.sizes)
        pulls = torch._foreach_mul([grads[k] for k in used], [slopes[k] for k in used])  # type: ignore[misc]
        found: list[Tensor | None] = [None] * len(grads)
        for k, pull in zip(used, pulls, strict=True):
            found[k] = pull
        return (None, *found)


def _check(tensors: Sequence[Tensor], versions: list[int], used: Iterable[int]) -> None:
    """Raise if one of the used tensors was changed in place since the forward pass."""
    if any(tensors[k]._version != versions[k] for k in used):
        raise RuntimeError(
            "a weight or a gate that a gradient needs was changed in place between the forward and "
            "the backward pass. Call backward() before the change."
        )


class _MultiplyContext(FunctionCtx):
    factors: Factors
    values: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    versions: list[int]


class _Multiply(torch.autograd.Function):
    """Multiply weights by their gates. Stores tensors on `ctx` as `_Values` does."""

    @staticmethod
    def forward(
        ctx: _MultiplyContext, factors: Factors, gates: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.factors, ctx.values, ctx.weights = factors, tensors[:gates], tensors[gates:]
        ctx.versions = [weight._version for weight in ctx.weights]
        ctx.set_materialize_grads(False)
        return tuple(torch._foreach_mul(ctx.weights, factors.spread(ctx.values, ctx.weights)))

    @staticmethod
    def backward(ctx: _MultiplyContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        factors, weights = ctx.factors, ctx.weights
        used = [slot for slot, grad in enumerate(grads) if grad is not None]
        _check(weights, ctx.versions, used)
        rows = factors.spread(ctx.values, weights)
        mine = [factors.like(slot, grad) for slot, grad in enumerate(grads) if grad is not None]
        scaled = torch._foreach_mul(mine, [rows[slot] for slot in used])
        products: list[Tensor | None] = [None] * len(weights)
        found: list[Tensor | None] = [None] * (len(ctx.values) + len(weights))
        made = torch._foreach_mul(mine, [weights[slot] for slot in used])
        for slot, grad, product in zip(used, scaled, made, strict=True):
            found[len(ctx.values) + slot], products[slot] = grad, product
        summed = factors.gather(products)
        for gate in {gate for slot in used for gate in factors.readers[slot]}:
            found[gate] = summed[gate].to(ctx.values[gate].dtype)
        return (None, None, *found)
