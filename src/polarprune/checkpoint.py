"""Saving and loading small models: safetensors, with the recipe as JSON in its metadata.

A file holds tensors and plain data, nothing that runs. Loading rebuilds the small model from a
fresh instance of the original class: no tracing, no example, no pickle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .errors import PruneError
from .settings import check_path
from .surgery import RECIPE, Recipe, apply
from .tape import copied, named_tensors

_KEY = "polarprune"
_VERSION = 1


def save(model: nn.Module, path: str | Path, *, card: dict[str, Any] | None = None) -> None:
    """Write a model that `export` or `shrink` made to a safetensors file.

    `card` is plain data about it, whatever the user wants to know later (`read_card`).
    """
    check_path("save", path)
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
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor.detach().contiguous().clone()
    content = {"version": _VERSION, "recipe": recipe, "aliases": aliases, "card": card or {}}
    try:
        write_tensors(tensors, Path(path), {_KEY: json.dumps(content)})
    except (OSError, TypeError, KeyError, ValueError, SafetensorError) as error:
        raise PruneError(f"save: {path} cannot be written: {error!r}.") from error


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
    """The saved small model, built on `model`: a fresh instance of the original class."""
    check_path("load", path)
    if not isinstance(model, nn.Module):
        raise PruneError(f"load: model={model!r}; give an instance, as model=Net().")
    recipe, aliases = _read(_content(path), path)
    try:
        small = apply(copied(model), recipe)
        tensors = load_file(str(path))
        tensors.update({name: tensors[same] for name, same in aliases.items()})
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise _damaged(path, error) from error
    wanted = small.state_dict()
    missing = sorted(set(wanted) - set(tensors), key=list(wanted).index)
    unexpected = [
        name
        for name, tensor in tensors.items()
        if name not in wanted or wanted[name].shape != tensor.shape
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
    return small


def read_card(path: str | Path) -> dict[str, Any]:
    """What `save(..., card=...)` put beside the model."""
    card: dict[str, Any] = _content(path).get("card", {})
    return card


def _content(path: str | Path) -> dict[str, Any]:
    if not Path(path).is_file():
        raise PruneError(f"load: there is no file {path}.")
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
    except SafetensorError as error:
        raise PruneError(f"load: {path} is not a safetensors file: {error}.") from error
    if text is None:
        raise PruneError(f"load: {path} holds no recipe; it was not written by polarprune.save.")
    try:
        content = json.loads(text)
        if content["version"] > _VERSION:
            raise PruneError(f"load: {path} was written by a newer polarprune; update it.")
        return dict(content)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _read(content: dict[str, Any], path: str | Path) -> tuple[Recipe, dict[str, str]]:
    try:
        return Recipe(**content["recipe"]), content["aliases"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: str | Path, error: Exception) -> PruneError:
    return PruneError(f"load: the recipe in {path} is damaged, or of another model: {error!r}.")
