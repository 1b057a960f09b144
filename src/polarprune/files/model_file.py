"""Saving and loading small models: safetensors, with the recipe as JSON in its metadata.

A file holds tensors and plain data, nothing that runs. Loading rebuilds the small model from a
fresh instance of the original class: no tracing, no example, no pickle. What a file says is checked
in `untrusted` before anything is built from it.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import PruneError
from ..rewriting.parametrizations import make_plain
from ..rewriting.remove_branches import without_branches, write_down
from ..rewriting.stored_graphs import decode, encode
from ..surgery.apply import check_shapes, cut_copy
from ..surgery.recipe import OTHER_MODEL, RECIPE, Recipe
from ..tracing.copying import copy_model
from ..tracing.model_state import named_tensors
from ..validation.arguments import check_path
from .untrusted import (
    BLANK,
    check_aliases,
    check_amount,
    check_code,
    check_computed,
    check_recipe,
    demand,
    is_intact,
    parsed,
    printable,
    recipe_of,
    same_kind,
    signed,
)

_KEY = "polarprune"
_WANTED = "Give a file that polarprune.save wrote."
_VERSION = 2
_NAMES, _BYTES = 100, 2**30  # tensors in a file, and bytes of it, that are few for any model
_PARTS = {"version", "recipe", "aliases", "card"}  # and, since version 2, "sha256"


def save(model: nn.Module, path: str | Path, *, card: dict[str, Any] | None = None) -> None:
    """Write a model that `export` or `shrink` made to a safetensors file.

    `card` is plain data about it, whatever the user wants to know later (`read_card`).
    """
    check_path("save", path)
    if card is not None and not isinstance(card, dict):
        raise PruneError(f"save: card is a {type(card).__name__}; give a dict of plain data.")
    model = getattr(model, "_orig_mod", model)  # inside torch.compile: its names are the class's
    recipe = getattr(model, RECIPE, None)
    if recipe is None:
        raise PruneError(
            f"save: {type(model).__name__} was not made by export() or shrink(); a plain model "
            f"needs no recipe: use safetensors.torch.save_model."
        )
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise PruneError(f"save: {name} is no tensor (get_extra_state); files hold only these.")
        if tensor.is_meta:
            raise PruneError(f"save: {name} is on the meta device and has no values; save the "
                             f"model before it goes there.")  # fmt: skip
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor.detach().contiguous().clone()
    content = {"version": _VERSION, "sha256": BLANK, "recipe": recipe, "aliases": aliases,
               "card": card or {}}  # fmt: skip
    try:
        text = json.dumps(content, allow_nan=False)
        written = parsed(text)["recipe"]  # what is saved can be loaded
    except (TypeError, ValueError, RecursionError, PruneError) as error:
        raise PruneError(
            f"save: {path} cannot be written: {error}. Give plain data as card: texts, finite "
            f"numbers, lists and dicts of them."
        ) from error
    try:
        check_amount(written)
    except PruneError as error:
        raise PruneError(f"save: {path} could not be loaded again: {error}.") from error
    try:
        write_tensors(tensors, Path(path), {_KEY: signed(text, tensors)})
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise PruneError(
            f"save: {path} cannot be written: {error}. What is there is kept as it was: make room, "
            f"or give another path."
        ) from error


def write_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """All of it or nothing, and with the permissions of any new file: safetensors' own are for the
    owner alone."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.touch()
        mode = new.stat().st_mode
        save_file(tensors, str(new), metadata=metadata)
        new.chmod(mode)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def load(path: str | Path, *, model: nn.Module) -> nn.Module:
    """The saved small model, built on `model`: a fresh instance of the original class.

    The file is checked against the model; nothing in it is run, and the model is not changed.
    """
    check_path("load", path)
    if not isinstance(model, nn.Module):
        raise PruneError(f"load: model={reprlib.repr(model)}; give an instance, as model=Net().")
    if any(tensor.is_meta for _, tensor in named_tensors(model)):
        raise PruneError("load: the model is on the meta device; give one that holds its weights.")
    text = _text(path)
    content, tensors = _content(text, path), _tensors(path, model)
    if content["version"] > 1 and not is_intact(text, content["sha256"], tensors):
        raise PruneError(f"load: {path} is damaged: its checksum is another one. Copy it again.")
    try:
        check_aliases(content["aliases"], tensors)
        tensors.update({name: tensors[same] for name, same in content["aliases"].items()})
        small = _built(content, model)
    except PruneError as error:
        what = printable(str(error))
        raise PruneError(f"load: {path} is damaged, or of another model: {what}") from error
    except Exception as error:  # whatever a file may lead to
        raise _damaged(path, error) from error
    _fill(small, tensors, path)
    return small


def _built(content: dict[str, Any], model: nn.Module) -> nn.Module:
    """The small model, with the weights of the one that was given."""
    data = content["recipe"]
    check_amount(data)
    recipe = recipe_of(_current(data, model) if content["version"] == 1 else data)
    check_computed(recipe, model)
    base = make_plain(copy_model(model), recipe.computed) if recipe.computed else model
    check_shapes(base, recipe.shapes, OTHER_MODEL)
    check_recipe(recipe, base)
    small = cut_copy(base, recipe, from_file=True)
    check_code(recipe, small)
    return small


def _fill(small: nn.Module, tensors: dict[str, Tensor], path: str | Path) -> None:
    """Put the tensors of the file in place, where they fit."""
    wanted = small.state_dict()
    missing = sorted(set(wanted) - set(tensors), key=list(wanted).index)
    unexpected = [
        name
        for name, tensor in tensors.items()
        if name not in wanted
        or not isinstance(wanted[name], Tensor)
        or wanted[name].shape != tensor.shape
        or not same_kind(tensor.dtype, wanted[name].dtype)
    ]
    if missing or unexpected:
        raise PruneError(
            f"load: {path} does not fit this model: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}. Give a fresh instance of the class that was pruned."
        )
    for name, tensor in named_tensors(small):
        if name in tensors:
            tensor.data = tensor.data.to(tensors[name].dtype)  # the file decides
    small.load_state_dict(tensors)


def _current(data: Any, model: nn.Module) -> dict[str, Any]:
    """A recipe of version 1 as one of version 2.

    Version 1 named the nodes of a block that lost branches, of a graph that torch.fx traces from
    the class; version 2 holds the graph without the branches, and the names of what went too.
    """
    demand(type(data) is dict and type(data.get("rewired")) is dict, "the recipe is malformed")
    recipe = {**Recipe().to_json(), **data, "rewired": dict(data["rewired"])}
    vanished = recipe.pop("vanished", None)
    demand(type(vanished) is dict, "the recipe is malformed")
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, edits in vanished.items():
        demand(path in modules and type(edits) is list, f"there is no module {path!r}")
        code = decode(recipe["rewired"][path]) if path in recipe["rewired"] else None
        graph = code.graphs["train"] if code else write_down(modules[path])
        demand(graph is not None, f"{path} is of another class")
        names = {node.name for node in graph.nodes} if graph else set()
        for edit in edits:
            fine = edit in ({"node": edit["node"], how: True} for how in ("vector", "spread"))
            demand(fine and edit["node"] in names, f"{path} is of another class")
        code, recipe["removed"][path] = without_branches(modules[path], code, edits)
        recipe["rewired"][path] = encode(code)
    return recipe


def read_card(path: str | Path) -> dict[str, Any]:
    """What `save(..., card=...)` put beside the model."""
    check_path("read_card", path)
    card: dict[str, Any] = _content(_text(path), path)["card"]
    return card


def _content(text: str, path: str | Path) -> dict[str, Any]:
    """The metadata: the parts it has to have, of a version that is known."""
    try:
        content = parsed(text)
        version = content["version"]
        if type(version) is int and version > _VERSION:
            raise PruneError("it was written by a newer polarprune; update it")
        demand(type(version) is int and version >= 1, f"there is no version {version!r}")
        parts = _PARTS | {"sha256"} if version > 1 else _PARTS
        demand(content.keys() == parts and type(content["card"]) is dict, "parts are missing")
        return dict(content)
    except PruneError as error:
        raise PruneError(f"load: {path}: {error}.") from error
    except Exception as error:  # whatever may be in a file
        raise _damaged(path, error) from error


def _text(path: str | Path) -> str:
    if not Path(path).is_file():
        raise PruneError(f"load: there is no file {path}. {_WANTED}")
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
    except Exception as error:  # SafetensorError, OSError, and what its parser may raise
        raise PruneError(f"load: {path} is not a safetensors file: {error}. {_WANTED}") from error
    if text is None:
        raise PruneError(
            f"load: {path} holds no recipe; it was not written by polarprune.save. {_WANTED}"
        )
    return str(text)


def _tensors(path: str | Path, model: nn.Module) -> dict[str, Tensor]:
    own = [tensor for tensor in model.state_dict().values() if isinstance(tensor, Tensor)]
    try:
        with safe_open(str(path), framework="pt") as file:
            fits = len(file.keys()) <= _NAMES + 2 * len(own)
        fits &= Path(path).stat().st_size <= _BYTES + 64 * sum(tensor.nbytes for tensor in own)
        if not fits:
            raise PruneError(
                f"load: {path} is far too large for this model. Give a fresh instance of the class "
                f"that was pruned."
            )
        tensors: dict[str, Tensor] = load_file(str(path))
    except PruneError:
        raise
    except Exception as error:  # types that this torch does not have
        raise _damaged(path, error) from error
    return tensors


def _damaged(path: str | Path, error: Exception) -> PruneError:
    return PruneError(f"load: the recipe in {path} is damaged, or of another model: {error!r}.")
