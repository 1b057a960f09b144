"""Skip expensive operations: return placeholders with the right shape instead of results.

A tape holds shapes, not values, and nearly all of a run's time goes into convolutions, matrix
products and attention. If integers are computed from placeholders, or if the model's code reads
them, the recorder notices and the run is repeated with every operation computed.

`PLACEHOLDERS` maps an operation to a function of the zeros to take and of its arguments. It returns
None where it is not certain of the result's shape or memory layout. Then the operation itself runs,
and raises its own error for arguments that do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._ops import OpOverload


class Zeros:
    """Returns tensors that share one piece of memory: nothing reads their values."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def of(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a tensor of this shape, with the dtype and on the device of another."""
        size, kind = math.prod(shape), (like.dtype, like.device)
        if kind not in self._memory or self._memory[kind].numel() < size:
            self._memory[kind] = like.new_zeros(size)
        return self._memory[kind][:size].view(shape)

    def release(self) -> None:
        """Free the memory."""
        self._memory.clear()


def _plain(*tensors: Tensor) -> bool:
    """Return True for non-empty ordinary float tensors of one dtype on one device."""
    first = tensors[0]
    kind = (first.dtype, first.device)
    return first.is_floating_point() and all(
        (t.dtype, t.device) == kind and t.numel() > 0 and type(t) in (Tensor, nn.Parameter)
        for t in tensors
    )


def _windows(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return how many windows of a convolution or pooling fit along each spatial axis."""
    return [
        (size + 2 * pad - gap * (width - 1) - 1) // step + 1
        for size, width, step, pad, gap in zip(
            sizes, kernel, stride, padding, dilation, strict=True
        )
    ]


def _convolution(
    zeros: Zeros,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor | None:
    dim = x.dim()
    if transposed or weight.dim() != dim or len(stride) != dim - 2 or len(padding) != dim - 2:
        return None
    made, read, *kernel = weight.shape
    if x.shape[1] != read * groups or made % groups or not _plain(x, weight):
        return None
    if not (x.is_contiguous() and weight.is_contiguous()):
        return None  # the result may be channels last
    if bias is not None and (bias.shape != (made,) or not _plain(x, bias)):
        return None
    space = _windows(x.shape[2:], kernel, stride, padding, dilation)
    return zeros.of(x, (x.shape[0], made, *space)) if min(space) > 0 else None


def _mm(zeros: Zeros, left: Tensor, right: Tensor) -> Tensor | None:
    (rows, inner), (other, columns) = left.shape, right.shape
    return zeros.of(left, (rows, columns)) if inner == other and _plain(left, right) else None


def _addmm(
    zeros: Zeros, bias: Tensor, left: Tensor, right: Tensor, **scales: object
) -> Tensor | None:
    fits = bias.shape == right.shape[1:] and _plain(bias, left)
    return _mm(zeros, left, right) if fits else None


def _bmm(zeros: Zeros, left: Tensor, right: Tensor) -> Tensor | None:
    (batch, rows, inner), (more, other, columns) = left.shape, right.shape
    fits = batch == more and inner == other and _plain(left, right)
    return zeros.of(left, (batch, rows, columns)) if fits else None


def _attention(
    zeros: Zeros, query: Tensor, key: Tensor, value: Tensor, *args: object, **options: object
) -> tuple[Tensor, Tensor] | None:
    batch, heads, length, size = query.shape
    same = key.shape == value.shape and key.shape == (batch, heads, key.shape[2], size)
    if not same or args or options.keys() - {"scale"} or not _plain(query, key, value):
        return None
    sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    lengths = query.new_zeros((batch, length, heads), dtype=sums).transpose(1, 2)
    return torch.zeros_like(query), lengths


def _batch_norm(
    zeros: Zeros,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    *numbers: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the input as the result. Running statistics are restored after a run in any case."""
    given = [tensor for tensor in (weight, bias, mean, variance) if tensor is not None]
    sizes = x.shape[1:2]
    if not (_plain(x, *given) and x.is_contiguous() and all(t.shape == sizes for t in given)):
        return None
    sizes = sizes if training else torch.Size((0,))
    return x.detach(), x.new_zeros(sizes), x.new_zeros(sizes)


def _max_pool(
    zeros: Zeros,
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor] | None:
    every = [list(p) * (2 // len(p)) for p in (size, stride or size, padding, dilation)]
    if ceil_mode or x.dim() != 4 or not (_plain(x) and x.is_contiguous()):
        return None
    space = _windows(x.shape[2:], *every)
    if min(space) <= 0 or any(2 * pad > kernel for kernel, _, pad, _ in zip(*every, strict=True)):
        return None
    out = zeros.of(x, (*x.shape[:2], *space))
    return out, out.new_zeros((), dtype=torch.long).expand(out.shape).contiguous()


def _cat(zeros: Zeros, tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    others = {(t.dim(), t.shape[:dim], t.shape[dim + 1 :]) for t in tensors}
    plain = _plain(*tensors) and all(t.is_contiguous() for t in tensors)
    if not (plain and len(others) == 1 and 0 <= dim < first.dim()):
        return None
    wide = sum(t.shape[dim] for t in tensors)
    return zeros.of(first, (*first.shape[:dim], wide, *first.shape[dim + 1 :]))


def _in_place(zeros: Zeros, x: Tensor, *others: Tensor, **scales: object) -> Tensor | None:
    """Return the target as it is: its shape does not change."""
    if not all(isinstance(other, Tensor) and other.shape == x.shape for other in others):
        return None
    return x if _plain(x, *others) else None


_aten = torch.ops.aten
PLACEHOLDERS: dict[OpOverload, Callable[..., Tensor | tuple[Tensor, ...] | None]] = {
    _aten.convolution.default: _convolution,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.max_pool2d_with_indices.default: _max_pool,
    _aten.cat.default: _cat,
    _aten.relu_.default: _in_place,
    _aten.add_.Tensor: _in_place,
}
