"""Means, variances and norms over channels, weighted by a vector g along one axis.

Every function takes the weights and the axis of the channels first, and then the arguments of the
function of torch that it replaces. With g = 1 it computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Dims = int | list[int] | tuple[int, ...]


def weighted_mean(g: Tensor, axis: int, x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """Return Σ g x / Σ g over `dim`, which includes `axis`."""
    return (x * _along(g, axis, x)).mean(dim, keepdim) * (g.numel() / g.sum()).to(x.dtype)


def _along(g: Tensor, axis: int, x: Tensor) -> Tensor:
    """Return the weights in a shape that broadcasts along one axis of `x`."""
    shape = [1] * x.dim()
    shape[axis] = -1
    return g.to(x.dtype).reshape(shape)


def _mean(
    g: Tensor, axis: int, x: Tensor, dim: Dims, keepdim: bool = False, **unused: object
) -> Tensor:
    return weighted_mean(g, axis, x, dim, keepdim)


def _var_mean(
    g: Tensor,
    axis: int,
    x: Tensor,
    dim: Dims,
    unbiased: bool | None = True,
    keepdim: bool = False,
    correction: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted variance and mean, with Bessel's correction for Σ g channels."""
    correction = int(unbiased is not False) if correction is None else correction
    mean = weighted_mean(g, axis, x, dim, True)
    var = weighted_mean(g, axis, (x - mean).square(), dim, True)
    count = x.numel() / mean.numel() * (g.sum() / g.numel()).to(x.dtype)
    var = var * count / (count - correction).clamp(min=1e-6)
    return (var, mean) if keepdim else (_squeezed(var, dim), _squeezed(mean, dim))


def _squeezed(x: Tensor, dim: Dims) -> Tensor:
    return x.squeeze(dim) if isinstance(dim, int) else x.squeeze(tuple(dim))


def _var(
    g: Tensor,
    axis: int,
    x: Tensor,
    dim: Dims,
    unbiased: bool | None = True,
    keepdim: bool = False,
    correction: int | None = None,
) -> Tensor:
    return _var_mean(g, axis, x, dim, unbiased, keepdim, correction)[0]


def _sum(
    g: Tensor, axis: int, x: Tensor, dim: Dims, keepdim: bool = False, **unused: object
) -> Tensor:
    return (x * _along(g, axis, x)).sum(dim, keepdim)


def _normalize(
    g: Tensor,
    axis: int,
    x: Tensor,
    p: float = 2.0,
    dim: Dims = 1,
    eps: float = 1e-12,
    **unused: object,
) -> Tensor:
    """Divide by the length of a vector, to which a closed channel adds nothing."""
    powers = (x.abs() ** p * _along(g, axis, x)).sum(dim, keepdim=True)
    return x / (powers ** (1 / p)).clamp(min=eps)


def _layer_norm(
    g: Tensor,
    axis: int,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *unused: object,
    **unused_too: object,
) -> Tensor:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    x = _standardized(g, axis, x, dims, eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _standardized(g: Tensor, axis: int, x: Tensor, dims: list[int], eps: float) -> Tensor:
    """Subtract the weighted mean, and divide by the weighted standard deviation."""
    x = x - weighted_mean(g, axis, x, dims, True)
    return x * torch.rsqrt(weighted_mean(g, axis, x.square(), dims, True) + eps)


def _rms_norm(
    g: Tensor,
    axis: int,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    x = x * torch.rsqrt(weighted_mean(g, axis, x.square(), dims, True) + eps)
    return x if weight is None else x * weight


def _group_norm(
    g: Tensor,
    axis: int,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *unused: object,
) -> Tensor:
    """Normalize over one group. With more, entire groups are removed and need no weights."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    x = _standardized(g, axis, x, list(range(1, x.dim())), eps)
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


# Function or method of torch -> its weighted form.
WEIGHTED: dict[object, Callable[..., object]] = {
    **dict.fromkeys(("mean", torch.mean), _mean),
    **dict.fromkeys(("sum", torch.sum), _sum),
    **dict.fromkeys(("var", torch.var), _var),
    torch.var_mean: _var_mean,
    F.normalize: _normalize,
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _layer_norm),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm),
    **dict.fromkeys((F.group_norm, torch.group_norm), _group_norm),
}
