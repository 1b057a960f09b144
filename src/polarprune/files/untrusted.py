"""Checks everything that is read from a file before anything is built from it.

A file may hold any bytes. What `save` would not write for this model is refused with one
`PruneError`: text that is too long or too deep, unknown fields, wrong types, names that the model
does not have, indices out of order or range, sizes that do not follow from them, code that calls
anything outside `allowed_calls`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import instancenorm
from torch.nn.modules.conv import _ConvNd

from ..errors import PruneError
from ..rewriting.captured_forward import CapturedForward
from ..rewriting.parametrizations import parametrized
from ..rewriting.size_limits import asks_too_much
from ..rewriting.stored_graphs import decode, is_identifier, is_path
from ..surgery.recipe import SPATIAL, Recipe, describe_modules
from ..tracing.model_state import named_tensors

BLANK = "0" * 64  # where the checksum goes
_LONGEST, _MOST = 2**26, 2**23  # characters of JSON, and values in it
_CODE = 2**20  # values in stored code: they take more memory than others
_DEEPEST = 64  # containers in containers
_STRINGS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # one that is not closed, too
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def demand(fine: Any, what: str) -> None:
    if not fine:
        raise PruneError(what)


# --- text -----------------------------------------------------------------------------------------


def parsed(text: str) -> Any:
    """JSON, without what Python would accept beyond it."""
    demand(len(text) <= _LONGEST, f"its metadata has {len(text)} characters")
    bare = _STRINGS.sub("", text)
    demand(sum(map(bare.count, "[]{},")) <= _MOST, "its metadata holds too many values")
    brackets = re.findall(r"[][{}]", bare)
    depths = accumulate(1 if bracket in "[{" else -1 for bracket in brackets)
    demand(max(depths, default=0) <= _DEEPEST, "its metadata is nested too deeply")
    return json.loads(
        text, object_pairs_hook=_distinct, parse_constant=_refuse_constant, parse_float=_finite
    )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    demand(len(found) == len(pairs), "a key occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise PruneError(f"{name} is no number")


def _finite(text: str) -> float:
    found = float(text)
    demand(math.isfinite(found), f"{text} is no number")
    return found


def printable(text: str) -> str:
    """Of a message that quotes a file: nothing that a terminal would act on, or could not print."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[:1000])


def signed(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The metadata with the checksum in the place that was left for it."""
    return text.replace(BLANK, _checksum(text, tensors), 1)


def is_intact(text: str, said: Any, tensors: Mapping[str, Tensor]) -> bool:
    """True if the checksum that the metadata say is theirs and that of the tensors."""
    fine = type(said) is str and len(said) == len(BLANK)
    return fine and _checksum(text.replace(said, BLANK, 1), tensors) == said


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Of the metadata, and of the names, types, shapes and bytes of all tensors."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


# --- fields ---------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_name(value: Any) -> bool:
    return type(value) is str and len(value) <= 4096


def _listed(item: Callable[[Any], bool], *, distinct: bool = False) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        fine = type(value) is list and all(item(one) for one in value)
        return fine and (not distinct or len(set(value)) == len(value))

    return check


def _mapped(key: Callable[[Any], bool], item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        fine = type(value) is dict
        return fine and all(key(k) and item(v) for k, v in value.items())

    return check


_sizes = _listed(lambda value: _is_count(value) or (type(value) is int and value == -1))
_counts, _names = _listed(_is_count), _listed(_is_name, distinct=True)
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "shapes": _mapped(_is_name, _counts),
    "slices": _mapped(_is_name, _mapped(str.isdecimal, _counts)),
    "attributes": _mapped(
        _is_name, _mapped(is_identifier, lambda value: _is_count(value) or _sizes(value))
    ),
    "constants": _names,
    "identities": _names,
    "hollow": _names,
    "heads": _mapped(_is_name, _counts),
    "rewired": _mapped(_is_name, lambda value: type(value) is dict),
    "removed": _mapped(_is_name, _listed(is_path, distinct=True)),
    "computed": _names,
    "unread": _names,
}


def recipe_of(data: Any) -> Recipe:
    """A recipe with the fields it has to have, each of the type it has to have."""
    demand(type(data) is dict and data.keys() == _FIELDS.keys(), "the recipe has other fields")
    for name, check in _FIELDS.items():
        demand(check(data[name]), f"{name} in the recipe is malformed")
    return Recipe(**data)


def check_amount(data: Any) -> None:
    """Stored code of one file is not endless."""
    count = 0
    level: list[Any] = [data.get("rewired") if type(data) is dict else None]
    while level:
        count += len(level)
        demand(count <= _CODE, "it holds too much code")
        level = [item for one in level if type(one) in (dict, list)
                 for item in (one.values() if type(one) is dict else one)]  # fmt: skip


def check_aliases(aliases: Any, tensors: Mapping[str, Tensor]) -> None:
    demand(_mapped(_is_name, _is_name)(aliases), "the names of shared tensors are malformed")
    for name, same in aliases.items():
        demand(same in tensors and name not in tensors, f"{name} cannot be the same as {same}")


# --- a recipe against a model ---------------------------------------------------------------------


def check_recipe(recipe: Recipe, model: nn.Module) -> None:
    """Every name is one of the model's, and every number follows from its sizes and the slices.

    `model`: the original, with computed weights as plain ones. Shapes have been compared.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = dict(named_tensors(model))
    _check_slices(recipe, tensors)
    wanted = Recipe(slices=recipe.slices)
    describe_modules(modules, wanted)
    for path in (*recipe.attributes, *recipe.hollow, *recipe.rewired, *recipe.constants,
                 *recipe.identities, *recipe.heads):  # fmt: skip
        demand(path in modules, f"there is no module {path!r}")
    _check_attributes(recipe, wanted, modules)
    _check_replaced(recipe, wanted, modules)
    for name in recipe.unread:
        path = name.rpartition(".")[0]
        read = path not in recipe.rewired and path not in recipe.constants
        demand(name in tensors and not read, f"{name} is no tensor that could go")
    _check_removed(recipe, modules)


def check_computed(recipe: Recipe, model: nn.Module) -> None:
    """`model`: as the user gave it."""
    known = {name for name, *_ in parametrized(model)} | dict(named_tensors(model)).keys()
    strange = [name for name in recipe.computed if name not in known]
    demand(not strange, f"there is no weight {strange[:1]}")


def _check_slices(recipe: Recipe, tensors: Mapping[str, Tensor]) -> None:
    demand(recipe.slices.keys() == recipe.shapes.keys(), "slices and shapes are of other tensors")
    for name, axes in recipe.slices.items():
        for axis, kept in axes.items():
            fine = axis == str(int(axis)) and int(axis) < tensors[name].dim()
            demand(fine, f"{name} has no axis {axis[:20]}")
            ordered = all(one < other for one, other in pairwise(kept))
            size = tensors[name].shape[int(axis)]
            fine = ordered and (not kept or kept[-1] < size)
            demand(fine, f"{name}: the indices along axis {axis} are out of order or range")


def _check_attributes(recipe: Recipe, wanted: Recipe, modules: Mapping[str, nn.Module]) -> None:
    """Those that hold widths, with the values that follow; others hold a number that shrinks."""
    for path, attributes in wanted.attributes.items():
        for name, value in attributes.items():
            found = recipe.attributes.get(path, {}).get(name)
            value = list(value) if isinstance(value, tuple) else value
            demand(found == value, f"{path}.{name} is {found} and should be {value}")
    for path, attributes in recipe.attributes.items():
        for name, value in attributes.items():
            if name in wanted.attributes.get(path, {}):
                continue
            before: Any = vars(modules[path]).get(name)
            if isinstance(modules[path], _SHAPED.get(name, ())):
                fine = (
                    type(value) is list
                    and len(value) == len(before)
                    and all(
                        new == old == -1 or 0 <= new <= old
                        for new, old in zip(value, before, strict=True)
                    )
                    and (
                        vars(modules[path]).get("_parameters", {}).get("weight") is None
                        or value == list(before)
                    )
                )
            else:
                public = type(before) is int and not name.startswith("_")
                follows = public and not isinstance(modules[path], (nn.Linear, _ConvNd))
                smaller = type(value) is int and (value == before or 1 < before > value)
                fine = follows and smaller
            demand(fine, f"{path}.{name} cannot be set to {value}")


_SHAPED: dict[str, Any] = {
    "normalized_shape": (nn.LayerNorm, nn.RMSNorm),
    "unflattened_size": nn.Unflatten,
}


def _check_replaced(recipe: Recipe, wanted: Recipe, modules: Mapping[str, nn.Module]) -> None:
    """Layers with nothing left, and attention with fewer heads."""
    demand(set(recipe.constants) <= set(wanted.constants), "a layer would become a constant")
    for path in recipe.identities:
        bare = isinstance(modules[path], (nn.GroupNorm, instancenorm._InstanceNorm))
        none = bare and 0 in recipe.attributes.get(path, {}).values()
        demand(path in wanted.identities or none, f"{path} would be left out")
    demand(set(wanted.identities) <= set(recipe.identities), "a norm over no channels would stay")
    for path in recipe.hollow:
        demand(isinstance(modules[path], SPATIAL), f"{path} is no pool")
    demand(recipe.heads == wanted.heads, "other heads stay than the slices say")
    for path, heads in recipe.heads.items():
        module = modules[path]
        assert isinstance(module, nn.MultiheadAttention)
        rows = [h * module.head_dim + k for h in heads for k in range(module.head_dim)]
        for name, parts in _projections(module).items():
            all_rows = [rows[k % len(rows)] + k // len(rows) * module.embed_dim
                        for k in range(parts * len(rows))]  # fmt: skip
            whole = list(range(parts * module.embed_dim))
            kept = recipe.slices.get(f"{path}.{name}".lstrip("."), {}).get("0", whole)
            demand(kept == all_rows, f"{path}: only whole heads can go")


def _projections(module: nn.MultiheadAttention) -> dict[str, int]:
    """Tensors whose rows are those of the heads, and how often."""
    if module._qkv_same_embed_dim:
        names = {"in_proj_weight": 3}
    else:
        names = {"q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}
    return {**names, **({"in_proj_bias": 3} if module.in_proj_bias is not None else {})}


def _check_removed(recipe: Recipe, modules: Mapping[str, nn.Module]) -> None:
    for path, children in recipe.removed.items():
        demand(path in recipe.rewired, f"{path} would lose modules that it calls")
        for child in children:
            full = f"{path}.{child}".lstrip(".")
            inside = any(child.startswith(f"{other}.") for other in children)
            demand(full in modules and not inside, f"there is no module {full!r} to remove")


# --- code against a model -------------------------------------------------------------------------


def check_code(recipe: Recipe, small: nn.Module) -> None:
    """Stored code reads and calls only what the small model has, with arguments that this takes."""
    for path, data in recipe.rewired.items():
        module, code = small.get_submodule(path), decode(data)
        if code.form is None:
            _check_names(module, code)
        for node in (node for graph in code.graphs.values() for node in graph.nodes):
            much = asks_too_much(node.target, node.args, dict(node.kwargs))
            demand(not much, f"{path}: {node.name} asks for too many elements")
            child = _inner(module, str(node.target)) if node.op == "call_module" else None
            fits = child is None or _can_be_called(child, node.args, dict(node.kwargs))
            demand(fits, f"{path}: {node.name} calls {node.target} with other arguments")
        for target, called in _targets(code):
            owner = module if called else _inner(module, target.rpartition(".")[0])
            fine = owner is not None and (
                _inner(module, target) is not None if called else _holds(owner, target)
            )
            demand(fine, f"{path or 'the model'} has no {target!r}")


def _check_names(module: nn.Module, code: CapturedForward) -> None:
    """Of code that takes its arguments by name: as the class does."""
    wanted = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [str(n.target) for n in code.graphs["train"].nodes if n.op == "placeholder"]
    known = all(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in wanted)
    fits = not known or names == [one.name for one in wanted]
    demand(fits, f"{type(module).__name__} takes other arguments")


def _can_be_called(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """As far as its signature tells, where nothing comes between a call and `forward`."""
    direct = type(child).__call__ is nn.Module.__call__ and not child._forward_pre_hooks
    if not direct or hasattr(child.forward, "__wrapped__"):
        return True
    try:
        signature = inspect.signature(child.forward)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _targets(code: CapturedForward) -> set[tuple[str, bool]]:
    nodes = [node for graph in code.graphs.values() for node in graph.nodes]
    return {(str(node.target), node.op == "call_module") for node in nodes
            if node.op in ("call_module", "get_attr")}  # fmt: skip


def _inner(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in path.split(".") if path else []:
        module = None if module is None else module._modules.get(name)
    return module


def _holds(owner: nn.Module, target: str) -> bool:
    """A tensor; or the number of groups, which code that computes its weight reads."""
    leaf = target.rpartition(".")[2]
    tensors = {**owner._parameters, **owner._buffers}
    return tensors.get(leaf) is not None or (
        leaf == "groups" and type(vars(owner).get(leaf)) is int
    )


# --- tensors against a model ----------------------------------------------------------------------


def same_kind(found: torch.dtype, wanted: torch.dtype) -> bool:
    """True if a file may hold this type where the model has that: precision is the file's."""
    return found == wanted or (found in _FLOATS and wanted in _FLOATS)
