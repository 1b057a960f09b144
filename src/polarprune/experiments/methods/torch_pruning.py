"""`torch-pruning`: the groups, importance, regularizer and cutting of the Torch-Pruning library.

Its own regularizer reads numbers back to the CPU and takes longer than a training step. The same
formula is implemented here with a few large kernels; a test compares the two.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from ...channels.graph import FROZEN
from ...cost.other_scores import UnitNorms
from ...errors import PruneError
from ..networks.transformers import Attention
from .base import ComparedMethod, Groups
from .model_cost import cost_of

_STRONGEST = 16.0  # `alpha` of its regularizer: least channel over largest channel of a group
_TOLERANCE = 1e-4  # of the pruning ratio: finer than one channel of these networks


class _Dependency(Protocol):
    layer: nn.Module
    pruning_fn: object


class _Member(Protocol):
    """A layer in a group; its channels `idxs` belong to those of the first layer, `root_idxs`."""

    dep: _Dependency
    idxs: Sequence[int]
    root_idxs: Sequence[int]


class _Pruner(Protocol):
    """The part of Torch-Pruning's GroupNormPruner that is used here."""

    _groups: Sequence[Sequence[_Member]]

    def step(self) -> object: ...


class TorchPruning(ComparedMethod):
    """GroupNormPruner with global pruning by group magnitude."""

    def set_up(self) -> None:
        self.norms, self.group_index = self._channel_norms(self._pruner(self.model, 0.5))
        self.groups = int(self.group_index.max()) + 1

    def _pruner(self, model: nn.Module, ratio: float) -> _Pruner:
        tp = _library()
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        pruner: _Pruner = tp.pruner.GroupNormPruner(
            model,
            self.example,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            reg=self.own.torch_pruning,
            global_pruning=True,
            pruning_ratio=ratio,
            num_heads={attention.qkv: attention.heads for attention in attentions},
            ignored_layers=[[m for m in model.modules() if isinstance(m, nn.Linear)][-1]],
        )
        return pruner

    def _channel_norms(self, pruner: _Pruner) -> tuple[UnitNorms, Tensor]:
        """Return the norms of all channels of its groups, and the group of each channel."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        axes: dict[str, dict[int, Tensor]] = {}
        owners: list[int] = []
        for number, group in enumerate(pruner._groups):
            for member, weight, axis in _weights(group):
                own = axes.setdefault(names[id(weight)], {})
                channels = own.setdefault(axis, torch.full((weight.shape[axis],), FROZEN))
                channels[list(member.idxs)] = len(owners) + torch.tensor(list(member.root_idxs))
            owners += [number] * len(group[0].idxs)
        norms = UnitNorms(self.model, len(owners), axes)
        return norms, torch.tensor(owners, device=self.device)

    def param_groups(self, model: nn.Module, lr: float, weight_decay: float) -> Groups:
        return super().param_groups(model, lr, self.own.torch_pruning_decay)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add the regularizer's gradient: 16 times as strong for the least channels of a group."""

        def of_group(kind: str, values: Tensor) -> Tensor:
            zeros = values.new_zeros(self.groups)
            found = zeros.scatter_reduce(0, self.group_index, values, kind, include_self=False)
            return found[self.group_index]

        squares = self.norms.squares()
        size = (squares / of_group("mean", squares)).sqrt()
        largest, least = of_group("amax", size), of_group("amin", size)
        strength = _STRONGEST ** ((largest - size) / (largest - least))
        self.norms.pull(self.own.torch_pruning * strength.nan_to_num(0.0, 0.0, 0.0))

    def cut(self, model: nn.Module) -> nn.Module:
        """Return the model cut by the least pruning ratio that meets the budget."""
        original = cost_of(model, self.example)
        low, high, found = 0.0, 1.0, None
        while high - low > _TOLERANCE:
            ratio = (low + high) / 2
            small = copy.deepcopy(model)
            self._pruner(small, ratio).step()
            left = cost_of(small, self.example)
            if all(left[key] <= limit * original[key] for key, limit in self.limits.items()):
                high, found = ratio, small
            else:
                low = ratio
        if found is None:
            raise PruneError(f"torch-pruning: no pruning ratio meets the budget {self.limits}.")
        return found


def _library() -> ModuleType:
    try:
        import torch_pruning
    except ImportError as error:
        raise PruneError(
            "torch-pruning is not installed: pip install polarprune[controls]"
        ) from error
    library: ModuleType = torch_pruning
    return library


def _weights(group: Sequence[_Member]) -> Iterator[tuple[_Member, Tensor, int]]:
    """Yield the layers of a group that are regularized, with their weight and its axis."""
    tp = _library()
    axes = {
        tp.prune_conv_out_channels: 0,
        tp.prune_linear_out_channels: 0,
        tp.prune_conv_in_channels: 1,
        tp.prune_linear_in_channels: 1,
        tp.prune_batchnorm_out_channels: 0,
    }
    for member in group:
        layer, axis = member.dep.layer, axes.get(member.dep.pruning_fn)
        if axis is None or layer.weight is None:
            continue
        if getattr(layer, "groups", 1) > 1 or getattr(layer, "transposed", False):
            raise PruneError(f"torch-pruning: {layer} is not supported in this comparison.")
        assert isinstance(layer.weight, Tensor)
        yield member, layer.weight, axis
