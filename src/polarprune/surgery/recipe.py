"""A recipe: everything that has to be done to a model of the original class, as plain data.

And what a recipe says about the modules that torch has: which of their attributes hold widths, and
what stands in for them when nothing is left. All of it follows from the slices, so that a recipe
from a file can be checked against them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm, padding, pooling

from ..channels.graph import module_of

OTHER_MODEL = (
    "The recipe belongs to another model; give a fresh instance of the class and settings that "
    "were pruned."
)


@dataclass
class Recipe:
    """Everything that has to be done to a model of the original class."""

    shapes: dict[str, list[int]] = field(default_factory=dict)  # of the tensors, before
    slices: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # tensor -> axis -> kept
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)  # layers with nothing to read or to make
    identities: list[str] = field(default_factory=list)  # norms and the like over no channels
    hollow: list[str] = field(default_factory=list)  # pools and the like over no channels
    heads: dict[str, list[int]] = field(default_factory=dict)  # of attention that lost some
    rewired: dict[str, Any] = field(default_factory=dict)  # module -> its rewritten forward
    removed: dict[str, list[str]] = field(default_factory=dict)  # module -> children not called now
    computed: list[str] = field(default_factory=list)  # weights that become plain ones
    unread: list[str] = field(default_factory=list)  # what they were computed from

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def _first_names(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Of tensors that several modules hold: the name by which they are known."""
    names: dict[int, list[str]] = {}
    for tables in ("_parameters", "_buffers"):
        for path, module in modules.items():
            for leaf, tensor in getattr(module, tables).items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(f"{path}.{leaf}" if path else leaf)
    return {name: mine[0] for mine in names.values() for name in mine[1:]}


SPATIAL = (
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    nn.Upsample,
    padding._ReflectionPadNd,
    padding._ReplicationPadNd,
)
_NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm, nn.PReLU)


def describe_modules(modules: dict[str, nn.Module], recipe: Recipe) -> None:
    """Write down what the slices mean for the modules whose tensors they cut."""
    first = _first_names(modules)
    tied = [name for name, other in first.items() if other in recipe.slices]
    for path in dict.fromkeys(module_of(name) for name in (*recipe.slices, *tied)):
        _describe(path, modules[path], recipe, first)


def _describe(path: str, module: nn.Module, recipe: Recipe, first: dict[str, str]) -> None:
    """Attributes of the modules that torch has; others read the sizes of their tensors."""
    if isinstance(module, nn.MultiheadAttention):
        rows = _kept_rows(path, module, recipe)
        recipe.heads[path] = list(dict.fromkeys(row // module.head_dim for row in rows))
        return
    changed = recipe.attributes.setdefault(path, {})
    for attribute, size in _sizes(path, module, recipe, first).items():
        changed[attribute] = size
        if size == 0 and isinstance(module, (conv._ConvNd, nn.Linear)):
            recipe.constants.append(path)
        elif size == 0 and isinstance(module, _NORMS):
            recipe.identities.append(path)
    recipe.constants = list(dict.fromkeys(recipe.constants))
    recipe.identities = list(dict.fromkeys(recipe.identities))
    if not changed:
        del recipe.attributes[path]


def _kept_rows(path: str, module: nn.MultiheadAttention, recipe: Recipe) -> list[int]:
    """Which channels of the queries are left."""
    name = f"{path}.in_proj_weight" if module._qkv_same_embed_dim else f"{path}.q_proj_weight"
    rows = recipe.slices.get(name, {}).get("0", range(module.embed_dim))
    return [row for row in rows if row < module.embed_dim]


def describe_bare_norm(path: str, module: nn.Module, width: int | None, recipe: Recipe) -> None:
    """A norm that has no parameters still counts its channels."""
    if width is None:
        return
    if isinstance(module, nn.GroupNorm):
        groups = width * module.num_groups // module.num_channels
        recipe.attributes[path] = {"num_channels": width, "num_groups": groups}
    else:
        recipe.attributes[path] = {"num_features": width}
    if width == 0 and path not in recipe.identities:
        recipe.identities.append(path)


def _sizes(path: str, module: nn.Module, recipe: Recipe, first: dict[str, str]) -> dict[str, Any]:
    """New values of the attributes that hold widths."""

    def kept(tensor: str, axis: int, before: int) -> list[int]:
        stem = f"{path}.{tensor}" if path else tensor
        name = first.get(stem, stem)
        return recipe.slices.get(name, {}).get(str(axis), list(range(before)))

    def now(tensor: str, axis: int, before: int) -> int:
        return len(kept(tensor, axis, before))

    if isinstance(module, conv._ConvNd):
        lead, rest = "out_channels", "in_channels"
        if isinstance(module, conv._ConvTransposeNd):
            lead, rest = rest, lead
        before, groups = getattr(module, lead), module.groups
        leading = kept("weight", 0, before)
        per_group = now("weight", 1, getattr(module, rest) // groups)
        if groups > 1:
            groups = _groups(groups, before // groups, leading)
        return {lead: len(leading), rest: per_group * groups, "groups": groups}
    if isinstance(module, nn.Linear):
        return {
            "out_features": now("weight", 0, module.out_features),
            "in_features": now("weight", 1, module.in_features),
        }
    if isinstance(module, nn.GroupNorm):
        size = now("weight", 0, module.num_channels)
        per_group = module.num_channels // module.num_groups
        return {"num_channels": size, "num_groups": max(1, size // per_group) if size else 0}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        sizes = tuple(
            now("weight", axis, size) for axis, size in enumerate(module.normalized_shape)
        )
        return {"normalized_shape": sizes}
    if isinstance(module, (batchnorm._BatchNorm, instancenorm._InstanceNorm)):
        tensor = "weight" if module.affine else "running_mean"
        return {"num_features": now(tensor, 0, module.num_features)}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": now("weight", 0, module.num_parameters)}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return {"embedding_dim": now("weight", 1, module.embedding_dim)}
    return {}


def _groups(groups: int, width: int, kept: list[int]) -> int:
    """How many convolution groups are left: whole ones go, or the same columns of each."""
    left = set(kept)
    whole = all(
        len({index in left for index in range(g * width, (g + 1) * width)}) == 1
        for g in range(groups)
    )
    return len(kept) // width if whole else groups
