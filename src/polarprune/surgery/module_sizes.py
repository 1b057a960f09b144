"""Update the attributes of torch's own modules that hold widths, such as `out_channels`.

Everything here follows from the slices of a recipe. A recipe that was read from a file can
therefore be checked against its own slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm, padding, pooling

from ..channels.graph import module_of
from .recipe import NewAttributes, Recipe

# Layers without parameters whose kernels may refuse an input without channels.
SPATIAL = (
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    nn.Upsample,
    padding._ReflectionPadNd,
    padding._ReplicationPadNd,
)
_NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm, nn.PReLU)


def describe_modules(modules: dict[str, nn.Module], recipe: Recipe) -> None:
    """Add to `recipe` what its slices change in the modules whose tensors are sliced."""
    first_names = _first_names(modules)
    tied = [name for name, first in first_names.items() if first in recipe.slices]
    for path in dict.fromkeys(module_of(name) for name in (*recipe.slices, *tied)):
        kept = _KeptIndices(path, recipe.slices, first_names)
        _describe(path, modules[path], kept, recipe)


def describe_norm_without_parameters(
    path: str, module: nn.GroupNorm | instancenorm._InstanceNorm, width: int, recipe: Recipe
) -> None:
    """Add to `recipe` the new width of a norm that has no parameters but counts its channels."""
    if isinstance(module, nn.GroupNorm):
        groups = width * module.num_groups // module.num_channels
        recipe.attributes[path] = {"num_channels": width, "num_groups": groups}
    else:
        recipe.attributes[path] = {"num_features": width}
    if width == 0 and path not in recipe.identities:
        recipe.identities.append(path)


@dataclass(frozen=True)
class _KeptIndices:
    """Look up which indices of one module's tensors are kept."""

    path: str
    slices: Mapping[str, Mapping[str, list[int]]]
    first_names: Mapping[str, str]

    def _kept(self, tensor: str, axis: int) -> list[int] | None:
        name = f"{self.path}.{tensor}" if self.path else tensor
        name = self.first_names.get(name, name)
        return self.slices.get(name, {}).get(str(axis))

    def of(self, tensor: str, axis: int, size: int) -> list[int]:
        """Return the kept indices along an axis that had `size` entries."""
        kept = self._kept(tensor, axis)
        return list(range(size)) if kept is None else kept

    def count(self, tensor: str, axis: int, size: int) -> int:
        """Return how many indices are kept along an axis that had `size` entries."""
        kept = self._kept(tensor, axis)
        return size if kept is None else len(kept)


def _first_names(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Map every further name of a tensor that several modules hold to its first name."""
    names: dict[int, list[str]] = {}
    for tables in ("_parameters", "_buffers"):
        for path, module in modules.items():
            for leaf, tensor in getattr(module, tables).items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(f"{path}.{leaf}" if path else leaf)
    return {name: mine[0] for mine in names.values() for name in mine[1:]}


def _describe(path: str, module: nn.Module, kept: _KeptIndices, recipe: Recipe) -> None:
    """Add the new attributes of one module, and its replacement if it has no channels left.

    Modules that are not torch's own get no attributes: they read the sizes of their tensors.
    """
    if isinstance(module, nn.MultiheadAttention):
        rows = _kept_query_rows(module, kept)
        recipe.heads[path] = list(dict.fromkeys(row // module.head_dim for row in rows))
        return
    sizes = _sizes(module, kept)
    if sizes or recipe.attributes.get(path):
        recipe.attributes.setdefault(path, {}).update(sizes)
    if 0 in sizes.values():
        if isinstance(module, (conv._ConvNd, nn.Linear)) and path not in recipe.constants:
            recipe.constants.append(path)
        elif isinstance(module, _NORMS) and path not in recipe.identities:
            recipe.identities.append(path)


def _kept_query_rows(module: nn.MultiheadAttention, kept: _KeptIndices) -> list[int]:
    """Return the channels of the queries that are kept."""
    name = "in_proj_weight" if module._qkv_same_embed_dim else "q_proj_weight"
    rows = kept.of(name, 0, module.embed_dim)
    return [row for row in rows if row < module.embed_dim]


def _sizes(module: nn.Module, kept: _KeptIndices) -> NewAttributes:
    """Return the new values of the attributes that hold widths."""
    if isinstance(module, conv._ConvNd):
        return _convolution_sizes(module, kept)
    if isinstance(module, nn.Linear):
        return {
            "out_features": kept.count("weight", 0, module.out_features),
            "in_features": kept.count("weight", 1, module.in_features),
        }
    if isinstance(module, nn.PReLU):
        return {"num_parameters": kept.count("weight", 0, module.num_parameters)}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return {"embedding_dim": kept.count("weight", 1, module.embedding_dim)}
    return _norm_sizes(module, kept)


def _norm_sizes(module: nn.Module, kept: _KeptIndices) -> NewAttributes:
    """Return the new widths of a norm; nothing for any other module."""
    if isinstance(module, nn.GroupNorm):
        size = kept.count("weight", 0, module.num_channels)
        per_group = module.num_channels // module.num_groups
        return {"num_channels": size, "num_groups": max(1, size // per_group) if size else 0}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        shape = enumerate(module.normalized_shape)
        return {"normalized_shape": [kept.count("weight", axis, size) for axis, size in shape]}
    if isinstance(module, (batchnorm._BatchNorm, instancenorm._InstanceNorm)):
        tensor = "weight" if module.affine else "running_mean"
        return {"num_features": kept.count(tensor, 0, module.num_features)}
    return {}


def _convolution_sizes(module: conv._ConvNd, kept: _KeptIndices) -> NewAttributes:
    """Return the new numbers of channels and of groups of a convolution.

    Axis 0 of the weight counts all output channels, axis 1 the input channels of one group; in a
    transposed convolution it is the other way round.
    """
    first, second = "out_channels", "in_channels"
    if isinstance(module, conv._ConvTransposeNd):
        first, second = second, first
    before, groups = getattr(module, first), module.groups
    kept_first = kept.of("weight", 0, before)
    per_group = kept.count("weight", 1, getattr(module, second) // groups)
    if groups > 1:
        groups = _remaining_groups(groups, before // groups, kept_first)
    return {first: len(kept_first), second: per_group * groups, "groups": groups}


def _remaining_groups(groups: int, width: int, kept: list[int]) -> int:
    """Return how many groups of a convolution remain.

    Either entire groups are removed, or the same channels of every group.
    """
    present = set(kept)
    entire = all(
        len({index in present for index in range(g * width, (g + 1) * width)}) == 1
        for g in range(groups)
    )
    return len(kept) // width if entire else groups
