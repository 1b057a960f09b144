"""All gates of a network at once.

One by one, every weight takes some twenty small operations a step for its gates, and on an
accelerator a small network waits for these more than it computes. So when a network is called,
one vector of all gates is laid out along all weights, and they are multiplied together; the layers
find their weights ready. In a large network they find their gates ready, and multiply themselves:
a layout of all weights would be felt, four operations for each of them are not. The values are
those that each would compute by itself, and each does where this cannot be: in compiled code, and
on the CPU (where it does not pay).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..surgery.apply import drop_hooks
from ..torch_internals.markers import gate_part
from .gate import Gate, GatedWeight, gate_slope, gate_value

LIMIT = 2**24  # elements of weights that are laid out
SLOW_TO_LAUNCH = {"cuda", "xpu", "mps"}
_RUN = 64  # elements that are added in one go


@gate_part
class FusedGates:
    """Called before the network is; `take` then gives out what is ready."""

    def __init__(self, sites: list[ParametrizationList]) -> None:
        self.sites = sites
        self.parts: list[GatedWeight] = [site[0] for site in sites]  # type: ignore[misc]
        found: dict[int, Any] = {id(gate): gate for part in self.parts for gate in part.gates}
        self.gates: list[Gate] = list(found.values())
        place = {gate: k for k, gate in enumerate(found)}
        self.readers = [[place[id(gate)] for gate in part.gates] for part in self.parts]
        for slot, part in enumerate(self.parts):
            part.fused, part.slot = self, slot
        self.large = sum(site.original.numel() for site in sites) > LIMIT
        self._layout: Layout | None = None
        self._clear()

    def _clear(self) -> None:
        self.weights: list[Tensor] = []
        self.ready: tuple[Tensor, ...] = ()  # these with gates; in a large network, the gates
        self.alone: set[int] = set()  # read without gradients in a run that has them
        self.running = self.learns = False

    def __getstate__(self) -> dict[str, Any]:
        """For copies: what is ready belongs to one run."""
        other = vars(self) | {"weights": [], "ready": (), "alone": set(), "_layout": None}
        return {**other, "running": False}

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._clear()
        weights: list[Tensor] = [site.original for site in self.sites]
        if not _together(weights):
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
        """The network has been called. A backward pass may run parts of it again."""
        self.running = False
        if not self.learns:
            self._clear()

    def take(self, slot: int, weight: Tensor) -> Tensor | None:
        """A weight with its gates, if it is ready."""
        if not self.ready or weight is not self.weights[slot]:
            return None
        if not self.running and torch._C._current_graph_task_id() == -1:  # not in a backward pass
            return None
        if torch.is_grad_enabled() != self.learns:
            self.alone.add(slot)  # checkpoints do that, and have to see it again in the second run
        if slot in self.alone:
            return None
        if self.large:
            return self.parts[slot].times(weight, [self.ready[k] for k in self.readers[slot]])
        return self.ready[slot]


@gate_part
class _End:
    def __init__(self, bank: FusedGates) -> None:
        self.fused = bank

    def __call__(self, model: nn.Module, args: Any, out: Any) -> None:
        if not torch.compiler.is_compiling():
            self.fused.end()


def fuse_gates(model: nn.Module, sites: list[ParametrizationList]) -> None:
    """Let a network compute gates or weights together; a bank that it had is replaced."""
    drop_hooks(model)
    sites = [site for site in sites if len(site) == 1 and _polarize(site)]
    if len(sites) > 1:
        bank = FusedGates(sites)
        model.register_forward_pre_hook(bank)
        model.register_forward_hook(_End(bank), always_call=True)


def _polarize(site: ParametrizationList) -> bool:
    """Other gates have other values and slopes: each weight asks for them itself."""
    return all(type(gate) is Gate for gate in site[0].gates)  # type: ignore[union-attr]


def _together(weights: list[Tensor]) -> bool:
    """True if these are ordinary tensors of one kind, in an ordinary run."""
    first = weights[0]
    return (
        first.device.type in SLOW_TO_LAUNCH
        and not torch._C._get_tracing_state()
        and not torch._C._are_functorch_transforms_active()
        and all(
            type(weight) in (Tensor, nn.Parameter)
            and (weight.device, weight.dtype) == (first.device, first.dtype)
            and _is_dense(weight)
            for weight in weights
        )
    )


def _is_dense(weight: Tensor) -> bool:
    reach = sum(
        (size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True)
    )
    return reach + 1 == weight.numel()


class Layout:
    """Which gate belongs to which element of the weights, in the order of memory."""

    def __init__(
        self,
        weights: list[Tensor],
        parts: list[GatedWeight],
        gates: list[Gate],
        readers: list[list[int]],
    ) -> None:
        self.readers = readers
        with torch.device("cpu"):  # whatever the user's default is
            self._build(weights, parts, gates)

    def _build(self, weights: list[Tensor], parts: list[GatedWeight], gates: list[Gate]) -> None:
        self.forms = [(weight.shape, weight.stride()) for weight in weights]
        self.device = weights[0].device
        self.sizes = [len(gate.alpha) for gate in gates]
        offsets = dict(zip(map(id, gates), _offsets(self.sizes), strict=True))
        laid = []
        for weight, part in zip(weights, parts, strict=True):
            known = [torch.arange(len(g.alpha)) + offsets[id(g)] for g in part.gates]  # type: ignore[arg-type]
            known.append(torch.tensor([sum(self.sizes)]))  # FROZEN: the last entry, which is 1
            shape = [1] * weight.dim()
            shape[part.axis] = -1
            units = torch.cat(known)[part.units.cpu()].reshape(shape)
            form = torch.empty_strided(weight.shape, weight.stride(), dtype=torch.long)
            laid.append(_flat(form.copy_(units)))
        index = torch.cat(laid)
        first, second = _runs(index, sum(self.sizes))
        owner = torch.arange(len(gates)).repeat_interleave(torch.tensor(self.sizes))
        self.index, self.first, self.second, self.owner = (
            x.to(self.device) for x in (index, first, second, owner)
        )

    def fits(self, weights: list[Tensor]) -> bool:
        forms = [(weight.shape, weight.stride()) for weight in weights]
        return forms == self.forms and weights[0].device == self.device

    def spread(self, values: Tensor) -> list[Tensor]:
        """One number for each gate -> factors of the form of each weight."""
        wide = torch.cat([values, values.new_ones(1)]).index_select(0, self.index)
        starts = _offsets([shape.numel() for shape, _ in self.forms])
        pairs = zip(self.forms, starts, strict=True)
        return [wide.as_strided(shape, stride, start) for (shape, stride), start in pairs]

    def gather(self, tensors: list[Tensor]) -> Tensor:
        """Of tensors of those forms -> the sum of all elements that belong to each gate."""
        for places in (self.first, self.second):
            flat = torch.cat([*map(_flat, tensors), tensors[0].new_zeros(1)])
            tensors = [flat[places].sum(1)]
        return tensors[0]

    def like(self, slot: int, tensor: Tensor) -> Tensor:
        """A tensor in the memory order of a weight."""
        shape, stride = self.forms[slot]
        if tensor.stride() == stride:
            return tensor
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )


class _Values(torch.autograd.Function):
    """All gates. Nothing is kept that a first backward pass would free for a second."""

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
    """One number for each gate -> one for each channel of it; nothing is read back."""
    parts = [number.expand(size) for number, size in zip(numbers.unbind(), sizes, strict=True)]
    return torch.cat(parts)


def _check(tensors: Sequence[Tensor], versions: list[int], used: Iterable[int]) -> None:
    if any(tensors[place]._version != versions[place] for place in used):
        raise RuntimeError(
            "a weight or a gate that a gradient needs was changed in place between the forward and "
            "the backward pass"
        )


class _Multiply(torch.autograd.Function):
    """Weights times gates. Nothing is kept that a first backward pass would free for a second."""

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
        values = gate_value(flat, eps)  # has gradients itself in a second pass
        factors = layout.spread(values.to(ctx.weights[0].dtype))
        mine = [layout.like(slot, grads[slot]) for slot in used]
        scaled = torch._foreach_mul(mine, [factors[slot] for slot in used])
        made = torch._foreach_mul(mine, [ctx.weights[slot] for slot in used])
        products = dict(zip(used, made, strict=True))
        summed = layout.gather([
            products[slot] if slot in products else torch.zeros_like(weight)
            for slot, weight in enumerate(ctx.weights)
        ])  # fmt: skip
        slopes = gate_slope(flat, eps)
        pulls = (summed.to(flat.dtype) * slopes).split(layout.sizes)
        found: list[Tensor | None] = [None] * len(tensors)
        for gate in read:
            found[gate] = pulls[gate]
        for slot, grad in zip(used, scaled, strict=True):
            found[len(ctx.alphas) + slot] = grad
        return (None, None, *found)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _offsets(sizes: list[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]


def _runs(index: Tensor, gates: int) -> tuple[Tensor, Tensor]:
    """Rows of elements of one gate each, and rows of such rows: sums that need no atomics."""
    order = index.argsort(stable=True)
    order = order[index[order] < gates]
    label = index[order]
    counts = torch.bincount(label, minlength=gates)
    rank = torch.arange(len(label)) - (counts.cumsum(0) - counts)[label]
    pieces, row = torch.stack([label, rank // _RUN]).unique(dim=1, return_inverse=True)
    first = torch.cat([order, torch.tensor([len(index)])])[_padded(row, pieces.shape[1])]
    return first, _padded(pieces[0], gates)


def _padded(row: Tensor, rows: int) -> Tensor:
    """Where the elements of each row are (sorted); short rows are filled with one past the end."""
    counts = torch.bincount(row, minlength=rows)
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    matrix = torch.full((rows, int(counts.max())), len(row))
    matrix[row, column] = torch.arange(len(row))
    return matrix
