"""Compares two models, and masks the removed channels of a model.

Nothing here uses the engine's own proof, folding or cutting.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from polarprune.channels.graph import Graph, Plan

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout}
_DRAWS = {
    torch.rand,
    torch.randn,
    torch.rand_like,
    torch.randn_like,
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
}


class Quiet(TorchFunctionMode):
    """A mode without dropout and noise, because models of other widths draw other numbers.

    What a seeded generator draws is the same in every run, and stays.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        out = func(*args, **kwargs)
        return out.fill_(0.3) if func in _DRAWS and kwargs.get("generator") is None else out


def run(model: nn.Module, inputs: tuple[Tensor, ...], *, training: bool = False) -> list[Tensor]:
    with Quiet(), torch.no_grad():
        out = model.train(training)(*inputs)
    return [leaf.detach().clone() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest relative difference.

    Large constants do not count for the scale of the others; infinities and NaN have to be equal.
    """
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return math.inf
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.double(), b.double()
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return math.inf
        if not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)):
            return math.inf
        a, b = a[finite], b[finite]
        if a.numel():
            usual = a[a.abs() < 1e8]
            scale = float(usual.abs().max()) if usual.numel() else 0.0
            size = a.abs().clamp_min(max(scale, 1e-12))
            worst = max(worst, float(((a - b).abs() / size).max()))
    return worst


# --- silenced by hand -----------------------------------------------------------------------------


def masked(model: nn.Module, graph: Graph, plan: Plan) -> nn.Module | None:
    """Write zeros where layers read removed channels, in place, and return the model.

    None where a mask cannot be laid on from outside: norms and weights that code of the model
    computes by itself.
    """
    model.eval()  # in train mode spectral norms take a step whenever a mask is put on
    kept_units = torch.ones(graph.units + 1, dtype=torch.bool)
    for name, kept in plan.items():
        group = graph.groups[name]
        kept_units[group.offset : group.offset + group.size] = False
        kept_units[[group.offset + index for index in kept]] = True
    for name, axes in graph.sites.items():
        for axis, units in axes.items():
            if not _silence(model, name, axis, kept_units[units]):
                return None
    settled = torch.cat([graph.without_unread(kept_units[:-1]), kept_units[-1:]])
    for path, units in graph.weights.items():
        norm = model.get_submodule(path)
        if not isinstance(norm, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
            return None
        new = MaskedNorm(norm, settled[units])
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, new)
    for module in model.modules() if graph.weights else ():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else a fused path goes round its norms
    return model


def _silence(model: nn.Module, name: str, axis: int, kept: Tensor) -> bool:
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return False
    value = getattr(owner, leaf, None)
    if not isinstance(value, Tensor):
        return False
    shape = [1] * value.dim()
    shape[axis] = -1
    factor = kept.to(value.dtype).reshape(shape)
    if parametrize.is_parametrized(owner, leaf):
        parametrize.register_parametrization(owner, leaf, _Times(factor))
    else:
        with torch.no_grad():
            value.mul_(factor)
    return True


class _Times(nn.Module):
    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


class MaskedNorm(nn.Module):
    """A layer, RMS or group norm over only the channels that are left."""

    def __init__(self, norm: nn.Module, kept: Tensor) -> None:
        super().__init__()
        self.norm, self.kept = norm, kept
        self.eps = norm.eps  # torch's encoder layers ask for it

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self.norm
        if isinstance(norm, nn.GroupNorm):
            parts = x.unflatten(1, (norm.num_groups, -1))
            kept = self.kept.view(norm.num_groups, -1, *[1] * (x.dim() - 2))
            dims = tuple(range(2, parts.dim()))
            y = _standard(parts, kept, dims, norm.eps, centre=True).flatten(1, 2)
            shape = (1, -1, *[1] * (x.dim() - 2))
            return y if norm.weight is None else y * norm.weight.view(shape) + norm.bias.view(shape)
        shape = norm.normalized_shape
        dims = tuple(range(-len(shape), 0))
        rms = isinstance(norm, nn.RMSNorm)
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        y = _standard(x, self.kept.expand(shape), dims, eps, centre=not rms)
        y = y if norm.weight is None else y * norm.weight
        return y if getattr(norm, "bias", None) is None else y + norm.bias


def _standard(x: Tensor, kept: Tensor, dims: Any, eps: float, centre: bool) -> Tensor:
    weight = kept.to(x.dtype).expand_as(x)
    count = weight.sum(dims, keepdim=True).clamp_min(1)
    mean = (x * weight).sum(dims, keepdim=True) / count if centre else 0.0
    variance = ((x - mean).square() * weight).sum(dims, keepdim=True) / count
    return (x - mean) * torch.rsqrt(variance + eps)
