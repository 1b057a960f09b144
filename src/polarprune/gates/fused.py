"""Compute all gates of a network at once, and all gated weights of a small network.

Computed one by one, the gates of every weight take some twenty small kernels a step. A small
network on an accelerator waits for launching these longer than it computes. `FusedGates` therefore
runs before the network's forward:

- In a small network it computes all gated weights at once. One vector of all gate values is
  indexed along the elements of all weights (`Layout`), and the layers take the finished weights.
- In a large network (`LIMIT`) the index would need too much memory, and on a CPU more time than it
  saves. There it computes only the gates at once, and each layer multiplies its own weight.

The values are the same as those that each layer computes by itself. Each layer does that where
fusing is impossible: in compiled code, for example.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..torch_internals.markers import gate_part
from .folding import drop_hooks
from .gate import Gate, GatedWeight, gate_slope, gate_value

LIMIT = 2**24  # elements of weights above which only gates are computed together
SLOW_TO_LAUNCH = {"cuda", "xpu", "mps"}  # devices on which launching a kernel takes long
_RUN = 64  # elements that are added up in one row


@gate_part
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
        count = sum(site.original.numel() for site in sites)
        self.large = count > LIMIT or sites[0].original.device.type not in SLOW_TO_LAUNCH
        self._layout: Layout | None = None
        self._clear()

    def _clear(self) -> None:
        """Forget the results of the last forward."""
        self.weights: list[Tensor] = []
        self.ready: tuple[Tensor, ...] = ()  # gated weights; in a large network, gate values
        self.alone: set[int] = set()  # slots whose layer computes its weight by itself
        self.running = False  # whether the network's forward is running
        self.learns = False  # whether it records gradients

    def __getstate__(self) -> dict[str, object]:
        """Leave the results of a forward out of copies."""
        other = vars(self) | {"weights": [], "ready": (), "alone": set(), "_layout": None}
        return {**other, "running": False}

    def __call__(self, model: nn.Module, args: object) -> None:
        """Compute the gated weights (or the gates) before the network's forward."""
        if torch.compiler.is_compiling():
            return
        self._clear()
        weights: list[Tensor] = [site.original for site in self.sites]
        if not _can_fuse(weights):
            return
        alphas = [gate.alpha for gate in self.gates]
        eps = torch.stack([gate.eps for gate in self.gates])
        if self.large:
            self.ready = _Values.apply(eps, *alphas)  # type: ignore[no-untyped-call]
        else:
            if self._layout is None or not self._layout.fits(weights):
                self._layout = Layout(weights, self.parts, self.gates, self.readers)
            self.ready = _Multiply.apply(self._layout, eps, *alphas, *weights)  # type: ignore[no-untyped-call]
        self.weights, self.learns, self.running = weights, torch.is_grad_enabled(), True

    def end(self) -> None:
        """End a forward. Results that need gradients stay: backward may run parts again."""
        self.running = False
        if not self.learns:
            self._clear()

    def take(self, slot: int, weight: Tensor) -> Tensor | None:
        """Return the gated weight of a slot, or None if its layer has to compute it."""
        if not self.ready or weight is not self.weights[slot]:
            return None
        if not self.running and torch._C._current_graph_task_id() == -1:  # not in backward
            return None
        if torch.is_grad_enabled() != self.learns:
            # torch.utils.checkpoint runs a part without gradients first. Its second run, in
            # backward, has to perform the same operations.
            self.alone.add(slot)
        if slot in self.alone:
            return None
        if self.large:
            return self.parts[slot].times(weight, [self.ready[k] for k in self.readers[slot]])
        return self.ready[slot]


@gate_part
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
    sites = [site for site in sites if len(site) == 1 and _has_plain_gates(site)]
    if len(sites) > 1:
        fused = FusedGates(sites)
        model.register_forward_pre_hook(fused)
        model.register_forward_hook(_End(fused), always_call=True)


def _has_plain_gates(site: ParametrizationList) -> bool:
    """Return whether all gates compute g(α); a subclass may compute something else."""
    return all(type(gate) is Gate for gate in cast(GatedWeight, site[0]).gates)


def _can_fuse(weights: list[Tensor]) -> bool:
    """Return whether all are dense tensors of one device and type, and no transform is active."""
    first = weights[0]
    return (
        not torch._C._get_tracing_state()
        and not torch._C._are_functorch_transforms_active()
        and all(
            type(weight) in (Tensor, nn.Parameter)
            and (weight.device, weight.dtype) == (first.device, first.dtype)
            and _is_dense(weight)
            for weight in weights
        )
    )


def _is_dense(weight: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, in any order of axes."""
    reach = sum(
        (size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True)
    )
    return reach + 1 == weight.numel()


class Layout:
    """Which gate belongs to which element of all weights, in the order of memory.

    Gates are numbered over all gate vectors. The number after the last one stands for frozen
    channels, whose factor is 1.

    Attributes:
        readers: For each weight, the gate vectors that it reads.
        forms: Shape and strides of each weight.
        sizes: Number of channels of each gate vector.
        index: For each element of all weights, the number of its gate.
        first, second: Two steps of the sum over the elements of each gate, see `_runs`.
        owner: For each gate, the number of its gate vector.
    """

    def __init__(
        self,
        weights: list[Tensor],
        parts: list[GatedWeight],
        gates: list[Gate],
        readers: list[list[int]],
    ) -> None:
        self.readers = readers
        self.forms = [(weight.shape, weight.stride()) for weight in weights]
        self.device = weights[0].device
        self.sizes = [len(gate.alpha) for gate in gates]
        with torch.device("cpu"):  # whatever the user's default device is
            index = torch.cat(
                [self._index(*one) for one in zip(weights, parts, readers, strict=True)]
            )
            first, second = _runs(index, sum(self.sizes))
            owner = torch.arange(len(gates)).repeat_interleave(torch.tensor(self.sizes))
        self.index, self.first, self.second, self.owner = (
            x.to(self.device) for x in (index, first, second, owner)
        )

    def _index(self, weight: Tensor, part: GatedWeight, reads: list[int]) -> Tensor:
        """Return the number of the gate of each element of one weight, in the order of memory."""
        offsets = _offsets(self.sizes)
        numbers = [torch.arange(self.sizes[gate]) + offsets[gate] for gate in reads]
        numbers.append(torch.tensor([sum(self.sizes)]))  # unit -1: a frozen channel
        shape = [1] * weight.dim()
        shape[part.axis] = -1
        along_axis = torch.cat(numbers)[part.units.cpu()].reshape(shape)
        form = torch.empty_strided(weight.shape, weight.stride(), dtype=torch.long)
        return _flat(form.copy_(along_axis))

    def fits(self, weights: list[Tensor]) -> bool:
        """Return whether the layout was made for weights of these shapes, strides and device."""
        forms = [(weight.shape, weight.stride()) for weight in weights]
        return forms == self.forms and weights[0].device == self.device

    def spread(self, values: Tensor) -> list[Tensor]:
        """Turn one value for each gate into a factor for each element of each weight."""
        wide = torch.cat([values, values.new_ones(1)]).index_select(0, self.index)
        starts = _offsets([shape.numel() for shape, _ in self.forms])
        pairs = zip(self.forms, starts, strict=True)
        return [wide.as_strided(shape, stride, start) for (shape, stride), start in pairs]

    def gather(self, tensors: list[Tensor]) -> Tensor:
        """Return for each gate the sum of all elements that belong to it, over all tensors."""
        for places in (self.first, self.second):
            flat = torch.cat([*map(_flat, tensors), tensors[0].new_zeros(1)])
            tensors = [flat[places].sum(1)]
        return tensors[0]

    def like(self, slot: int, tensor: Tensor) -> Tensor:
        """Return a tensor with the strides of the weight of a slot."""
        shape, stride = self.forms[slot]
        if tensor.stride() == stride:
            return tensor
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )


class _Values(torch.autograd.Function):
    """Compute all gates.

    Tensors are stored on `ctx`, not with `save_for_backward`: a first backward pass would free
    those, and the gates may be needed in a second one. `_check` replaces torch's version check.
    """

    @staticmethod
    def forward(ctx: Any, eps: Tensor, *alphas: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes = [len(alpha) for alpha in alphas]
        ctx.eps = _each(eps, ctx.sizes)
        ctx.alphas, ctx.versions = alphas, [alpha._version for alpha in alphas]
        ctx.set_materialize_grads(False)
        values: tuple[Tensor, ...] = gate_value(torch.cat(alphas), ctx.eps).split(ctx.sizes)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [k for k, grad in enumerate(grads) if grad is not None]
        _check(ctx.alphas, ctx.versions, used)
        slopes = gate_slope(torch.cat(ctx.alphas), ctx.eps).split(ctx.sizes)
        pulls = torch._foreach_mul([grads[k] for k in used], [slopes[k] for k in used])  # type: ignore[misc]
        found: list[Tensor | None] = [None] * len(grads)
        for k, pull in zip(used, pulls, strict=True):
            found[k] = pull
        return (None, *found)


def _each(numbers: Tensor, sizes: list[int]) -> Tensor:
    """Repeat the number of each gate vector for each of its channels, without a device sync."""
    parts = [number.expand(size) for number, size in zip(numbers.unbind(), sizes, strict=True)]
    return torch.cat(parts)


def _check(tensors: Sequence[Tensor], versions: list[int], used: Iterable[int]) -> None:
    """Raise if one of the used tensors was changed in place since the forward pass."""
    if any(tensors[k]._version != versions[k] for k in used):
        raise RuntimeError(
            "a weight or a gate that a gradient needs was changed in place between the forward and "
            "the backward pass. Call backward() before the change."
        )


class _Multiply(torch.autograd.Function):
    """Multiply all weights by their gates. Stores tensors on `ctx` as `_Values` does."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, eps: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(layout.sizes)
        alphas, weights = list(tensors[:count]), list(tensors[count:])
        ctx.layout, ctx.eps = layout, eps
        ctx.alphas, ctx.weights = alphas, weights
        ctx.versions = [tensor._version for tensor in tensors]
        ctx.set_materialize_grads(False)
        values = gate_value(torch.cat(alphas), eps[layout.owner]).to(weights[0].dtype)
        return tuple(torch._foreach_mul(weights, layout.spread(values)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layout, tensors = ctx.layout, [*ctx.alphas, *ctx.weights]
        used = [slot for slot, grad in enumerate(grads) if grad is not None]
        read = {gate for slot in used for gate in layout.readers[slot]}
        _check(tensors, ctx.versions, [*read, *(len(ctx.alphas) + slot for slot in used)])
        flat, eps = torch.cat(ctx.alphas), ctx.eps[layout.owner]
        values = gate_value(flat, eps)  # recomputed, so that it has gradients of its own
        factors = layout.spread(values.to(ctx.weights[0].dtype))
        mine = [layout.like(slot, grads[slot]) for slot in used]
        scaled = torch._foreach_mul(mine, [factors[slot] for slot in used])
        made = torch._foreach_mul(mine, [ctx.weights[slot] for slot in used])
        products = dict(zip(used, made, strict=True))
        parts = [
            products[slot] if slot in products else torch.zeros_like(weight)
            for slot, weight in enumerate(ctx.weights)
        ]
        summed = layout.gather(parts)
        slopes = gate_slope(flat, eps)
        pulls = (summed.to(flat.dtype) * slopes).split(layout.sizes)
        found: list[Tensor | None] = [None] * len(tensors)
        for gate in read:
            found[gate] = pulls[gate]
        for slot, grad in zip(used, scaled, strict=True):
            found[len(ctx.alphas) + slot] = grad
        return (None, None, *found)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as a vector, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _offsets(sizes: list[int]) -> list[int]:
    """Return where each part starts if parts of these sizes are concatenated."""
    return [sum(sizes[:k]) for k in range(len(sizes))]


def _runs(index: Tensor, gates: int) -> tuple[Tensor, Tensor]:
    """Return two index matrices that sum the elements of each gate without atomic additions.

    Row by row, the first adds up to `_RUN` elements of one gate; the second adds all those sums of
    one gate. The order of additions is fixed, so results are the same in every run. An index one
    past the end stands for zero.
    """
    order = index.argsort(stable=True)
    order = order[index[order] < gates]
    label = index[order]
    counts = torch.bincount(label, minlength=gates)
    rank = torch.arange(len(label)) - (counts.cumsum(0) - counts)[label]
    pieces, row = torch.stack([label, rank // _RUN]).unique(dim=1, return_inverse=True)
    first = torch.cat([order, torch.tensor([len(index)])])[_padded(row, pieces.shape[1])]
    return first, _padded(pieces[0], gates)


def _padded(row: Tensor, rows: int) -> Tensor:
    """Return a matrix with the positions of the elements of each row; `row` is sorted.

    Short rows are filled with the position one past the end.
    """
    counts = torch.bincount(row, minlength=rows)
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    matrix = torch.full((rows, int(counts.max())), len(row))
    matrix[row, column] = torch.arange(len(row))
    return matrix
