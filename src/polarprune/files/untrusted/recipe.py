"""Check a recipe against the user's model: every name exists, every number follows from sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.modules import instancenorm
from torch.nn.modules.conv import _ConvNd

from ...rewriting.parametrizations import parametrized
from ...surgery.module_sizes import SPATIAL, describe_modules
from ...surgery.recipe import Recipe
from ...tracing.model_state import named_tensors
from .require import require

Modules = Mapping[str, nn.Module]
# Attributes that hold a shape instead of a width, and the classes that have them.
_SHAPE_ATTRIBUTES: dict[str, tuple[type[nn.Module], ...]] = {
    "normalized_shape": (nn.LayerNorm, nn.RMSNorm),
    "unflattened_size": (nn.Unflatten,),
}


def check_computed(recipe: Recipe, model: nn.Module) -> None:
    """Check that every computed weight exists in the model, as the user passed it."""
    known = {name for name, *_ in parametrized(model)} | dict(named_tensors(model)).keys()
    unknown = [name for name in recipe.computed if name not in known]
    require(not unknown, f"the model has no weight {unknown[:1]}")


def check_recipe(recipe: Recipe, model: nn.Module) -> None:
    """Check that every name exists in the model, and that every number follows from its sizes.

    Args:
        recipe: The recipe, with fields of the right types and shapes that fit the model.
        model: The original model, with its computed weights as plain parameters.

    Raises:
        PruneError: If the recipe does anything that no plan for this model would lead to.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = dict(named_tensors(model))
    _check_slices(recipe, tensors)
    expected = Recipe(slices=recipe.slices)
    describe_modules(modules, expected)
    _check_paths(recipe, modules)
    _check_expected_attributes(recipe, expected)
    _check_other_attributes(recipe, expected, modules)
    _check_constants(recipe, expected, modules)
    _check_heads(recipe, expected, modules)
    _check_unread(recipe, tensors)
    _check_removed(recipe, modules)


def _check_slices(recipe: Recipe, tensors: Mapping[str, Tensor]) -> None:
    """Check that indices increase and stay within their axis, so that tensors only shrink."""
    same = recipe.slices.keys() == recipe.shapes.keys()
    require(same, "slices and shapes belong to different tensors")
    for name, axes in recipe.slices.items():
        for axis, kept in axes.items():
            exists = axis == str(int(axis)) and int(axis) < tensors[name].dim()
            require(exists, f"{name} has no axis {axis[:20]}")
            ordered = all(one < other for one, other in pairwise(kept))
            size = tensors[name].shape[int(axis)]
            fine = ordered and (not kept or kept[-1] < size)
            require(fine, f"{name}: the indices along axis {axis} are out of order or range")


def _check_paths(recipe: Recipe, modules: Modules) -> None:
    parts = ("attributes", "hollow", "rewired", "constants", "identities", "heads")
    for path in (path for part in parts for path in getattr(recipe, part)):
        require(path in modules, f"the model has no module {path!r}")


# --- attributes -----------------------------------------------------------------------------------


def _check_expected_attributes(recipe: Recipe, expected: Recipe) -> None:
    """Check that attributes that hold widths have the values that follow from the slices."""
    for path, attributes in expected.attributes.items():
        for name, value in attributes.items():
            found = recipe.attributes.get(path, {}).get(name)
            value = list(value) if isinstance(value, tuple) else value
            require(found == value, f"{path}.{name} is {found} and should be {value}")


def _check_other_attributes(recipe: Recipe, expected: Recipe, modules: Modules) -> None:
    """Check that all other attributes hold a number or a shape that can only get smaller."""
    for path, attributes in recipe.attributes.items():
        for name, value in attributes.items():
            if name not in expected.attributes.get(path, {}):
                fine = _may_be_set(modules[path], name, value)
                require(fine, f"{path}.{name} cannot be set to {value}")


def _may_be_set(module: nn.Module, name: str, value: object) -> bool:
    before = vars(module).get(name)
    if isinstance(module, _SHAPE_ATTRIBUTES.get(name, ())):
        assert isinstance(before, Sequence)
        return _is_smaller_shape(module, value, list(before))
    # All widths of linear layers and convolutions were checked as expected attributes.
    if name.startswith("_") or isinstance(module, (nn.Linear, _ConvNd)):
        return False
    if type(before) is not int:
        return False
    return type(value) is int and (value == before or 1 < before > value)


def _is_smaller_shape(module: nn.Module, value: object, before: list[int]) -> bool:
    if type(value) is not list or len(value) != len(before):
        return False
    smaller = all(
        new == old == -1 or 0 <= new <= old for new, old in zip(value, before, strict=True)
    )
    weighted = vars(module).get("_parameters", {}).get("weight") is not None
    return smaller and (not weighted or value == before)


# --- modules --------------------------------------------------------------------------------------


def _check_constants(recipe: Recipe, expected: Recipe, modules: Modules) -> None:
    """Check that only layers without any channel left are replaced."""
    require(
        set(recipe.constants) <= set(expected.constants),
        "a layer that keeps channels would become a constant",
    )
    for path in recipe.identities:
        norm = isinstance(modules[path], (nn.GroupNorm, instancenorm._InstanceNorm))
        empty = norm and 0 in recipe.attributes.get(path, {}).values()
        require(path in expected.identities or empty, f"{path} would be left out")
    complete = set(expected.identities) <= set(recipe.identities)
    require(complete, "a norm without channels would stay")
    for path in recipe.hollow:
        require(isinstance(modules[path], SPATIAL), f"{path} is not a pooling layer")


def _check_heads(recipe: Recipe, expected: Recipe, modules: Modules) -> None:
    """Check that attention loses complete heads, in all of its projections."""
    require(recipe.heads == expected.heads, "the heads do not follow from the slices")
    for path, heads in recipe.heads.items():
        module = modules[path]
        assert isinstance(module, nn.MultiheadAttention)
        rows = [h * module.head_dim + k for h in heads for k in range(module.head_dim)]
        for name, parts in _projections(module).items():
            wanted = [row + part * module.embed_dim for part in range(parts) for row in rows]
            every = list(range(parts * module.embed_dim))
            kept = recipe.slices.get(f"{path}.{name}".lstrip("."), {}).get("0", every)
            require(kept == wanted, f"{path}: attention can only lose complete heads")


def _projections(module: nn.MultiheadAttention) -> dict[str, int]:
    """Return the tensors whose rows belong to heads, and how many projections each holds."""
    if module._qkv_same_embed_dim:
        names = {"in_proj_weight": 3}
    else:
        names = {"q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}
    return {**names, **({"in_proj_bias": 3} if module.in_proj_bias is not None else {})}


def _check_unread(recipe: Recipe, tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors are removed only where the code that read them is replaced."""
    for name in recipe.unread:
        path = name.rpartition(".")[0]
        replaced = path in recipe.rewired or path in recipe.constants
        require(name in tensors and replaced, f"the tensor {name} cannot be removed")


def _check_removed(recipe: Recipe, modules: Modules) -> None:
    """Check that modules are removed only where the code that called them is replaced."""
    for path, children in recipe.removed.items():
        require(path in recipe.rewired, f"{path} would lose modules that it calls")
        for child in children:
            full = f"{path}.{child}".lstrip(".")
            inside = any(child.startswith(f"{other}.") for other in children)
            require(full in modules and not inside, f"there is no module {full!r} to remove")
