"""Gate the input of a layer instead of its weight, where the input is much smaller.

W·(g ⊙ x) = (W ⊙ g)·x, so both compute the same. With small batches on a CPU, the last layers of a
network have weights that are many times larger than their inputs, and multiplying these would cost
a large part of the step. `GateInput` decides at every call; outside of such a call, the weight of
the layer is the gated one, as always.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..torch_internals.markers import gate_part
from .gate import GatedWeight

SMALL_WEIGHT = 2**16  # elements; multiplying fewer costs less than a hook
_RATIO = 8  # a weight must be this many times larger than the input
# The axis of the channels in the input, counted from the end: inputs may have no batch axis.
_CHANNEL_AXIS: dict[type[nn.Module], int] = {
    nn.Linear: -1,
    nn.Conv1d: -2,
    nn.Conv2d: -3,
    nn.Conv3d: -4,
}
# Forward methods of other packages that compute the same as those of torch.
_LIKE_TORCH = {"timm.layers.linear.Linear.forward"}


@gate_part
class GateInput:
    """A forward pre-hook of a layer: it multiplies the gates into a small input.

    Args:
        site: The parametrized weight of the layer, with one `GatedWeight`.
        axis: The axis of the input that holds the channels.
    """

    def __init__(self, site: ParametrizationList, axis: int) -> None:
        self.site, self.part, self.axis = site, cast(GatedWeight, site[0]), axis

    def __call__(self, layer: nn.Module, args: tuple[object, ...]) -> object:
        """Gate the input if that is cheaper; the weight is then read without gates once."""
        if torch.compiler.is_compiling():  # before sizes are compared, which would add guards
            return None
        if len(args) != 1 or not isinstance(args[0], Tensor) or not self._pays(args[0]):
            return None
        self.part.skip_once()
        x = args[0]
        axis = self.axis % x.dim()  # with a batch axis, rows of factors are faster
        return (x * self.part.factors(axis, x, self.site.original),)

    def _pays(self, x: Tensor) -> bool:
        """Return whether the input is small, and operations are not recorded."""
        weight = self.site.original
        return bool(
            _RATIO * x.numel() <= weight.numel()
            and x.device.type == "cpu"
            and x.dtype == weight.dtype
            and x.dim() >= -self.axis
            and x.shape[self.axis] == weight.shape[self.part.axis]
            and torch.is_grad_enabled()
            and not torch._C._get_tracing_state()
            and not torch._C._are_functorch_transforms_active()
        )


@gate_part
class _End:
    """A forward hook that makes sure that the weight has its gates again."""

    def __init__(self, part: GatedWeight) -> None:
        self.part = part

    def __call__(self, layer: nn.Module, args: object, out: object) -> None:
        self.part.skip_no_more()


def gate_small_inputs(layer: nn.Module, site: ParametrizationList) -> None:
    """Let a layer gate its input when that is cheaper, if it is of a kind that allows it.

    Only layers whose forward is torch's own, or known to be like it, qualify: they read their
    weight exactly once.
    """
    axis = _channel_axis(layer)
    part = site[0]
    if axis is None or len(site) != 1 or cast(GatedWeight, part).axis != 1:
        return
    if site.original.numel() >= SMALL_WEIGHT:
        layer.register_forward_pre_hook(GateInput(site, axis))
        layer.register_forward_hook(_End(cast(GatedWeight, part)), always_call=True)


def _channel_axis(layer: nn.Module) -> int | None:
    """Return the axis of the input's channels, or None if gates cannot be moved to the input."""
    for kind, axis in _CHANNEL_AXIS.items():
        if isinstance(layer, kind):
            known = _is_known(layer, kind) and getattr(layer, "groups", 1) == 1
            return axis if known else None
    return None


def _is_known(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a layer computes what torch's layer of this kind does."""
    forward, inner = type(layer).forward, getattr(kind, "_conv_forward", None)
    name = f"{forward.__module__}.{forward.__qualname__}"
    return (
        "forward" not in vars(layer)
        and (forward is kind.forward or name in _LIKE_TORCH)
        and getattr(type(layer), "_conv_forward", None) is inner
    )
