"""Upgrade recipes of older file versions to the current one, while a file is loaded.

Version 1 named the nodes of a block that lost branches, in a graph that torch.fx traces from the
user's class. Version 2 holds the graph without these branches, and the names of the removed
modules. Version 1 has no checksum, either.

Versions 1 and 2 describe the arguments of a call in the notation of torch, which may change between
versions of torch. Version 3 has a notation of its own, and the source lines of nodes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..plain_data import JsonObject
from ..rewriting.call_form import decode_form, encode_form
from ..rewriting.captured_forward import Refused
from ..rewriting.remove_branches import without_branches
from ..rewriting.stored_graphs import decode, encode
from ..rewriting.symbolic_graphs import editable_graph
from ..surgery.recipe import Recipe
from .untrusted.require import require


def upgraded(data: Any, version: int, model: nn.Module) -> Any:
    """Return a recipe of any version as one of the current version.

    Args:
        data: The recipe as it was read; its fields are checked afterwards.
        version: The version of the file.
        model: The user's model.

    Raises:
        PruneError: If the recipe cannot be upgraded.
    """
    if version == 1:
        data = _upgrade_version_1(data, model)
    return _upgrade_version_2(data) if version < 3 else data


def _upgrade_version_2(data: Any) -> Any:
    """Return a recipe of version 2 with the forms of calls in our own notation."""
    rewired = data.get("rewired") if type(data) is dict else None
    if type(rewired) is not dict:
        return data  # refused when the types of its fields are checked
    return {**data, "rewired": {path: _with_own_form(code) for path, code in rewired.items()}}


def _with_own_form(code: Any) -> Any:
    """Return a stored forward with the form of its call in our own notation."""
    if type(code) is not dict or type(code.get("form")) is not str:
        return code
    return {**code, "form": encode_form(decode_form(code["form"]))}


def _upgrade_version_1(data: Any, model: nn.Module) -> JsonObject:
    """Return a recipe of version 1 as one of version 2.

    Args:
        data: The recipe as it was read; its fields are checked afterwards.
        model: The user's model, whose blocks are traced where a recipe removes branches.

    Raises:
        PruneError: If the recipe is malformed, or names nodes that the model does not have.
    """
    well_formed = type(data) is dict and type(data.get("rewired")) is dict
    require(well_formed, "the recipe is malformed")
    recipe = {**Recipe().to_json(), **data, "rewired": dict(data["rewired"])}
    vanished = recipe.pop("vanished", None)
    require(type(vanished) is dict, "the recipe is malformed")
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, edits in vanished.items():
        known = path in modules and type(edits) is list
        require(known, f"the model has no module {path!r}")
        _remove_branches(recipe, path, modules[path], edits)
    return recipe


def _remove_branches(
    recipe: JsonObject, path: str, module: nn.Module, edits: list[JsonObject]
) -> None:
    """Replace the edits of one block by its graph without the branches."""
    stored = recipe["rewired"].get(path)
    code = decode(stored) if path in recipe["rewired"] else None
    graph = code.graphs["train"] if code else editable_graph(module)
    require(not isinstance(graph, Refused), f"{path} is of another class")
    names = set() if isinstance(graph, Refused) else {node.name for node in graph.nodes}
    for edit in edits:
        forms = ({"node": edit["node"], how: True} for how in ("vector", "spread"))
        require(edit in forms and edit["node"] in names, f"{path} is of another class")
    code, recipe["removed"][path] = without_branches(module, code, edits)
    recipe["rewired"][path] = encode(code)
