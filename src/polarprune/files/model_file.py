"""`save` and `load`: a small model as safetensors, with its recipe as JSON in the metadata.

A file holds tensors and plain data, nothing that runs. Loading builds the small model from a fresh
instance of the original class: no tracing, no example input, no pickle.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import PruneError
from ..plain_data import JsonObject
from ..rewriting.parametrizations import make_plain
from ..surgery.apply import cut_copy
from ..surgery.config_proof import update_config
from ..surgery.recipe import OTHER_MODEL, check_shapes
from ..torch_internals.markers import attached_recipe, uncompiled
from ..tracing.copying import copy_model
from ..tracing.model_state import named_tensors
from ..validation.arguments import check_path
from .old_versions import upgraded
from .untrusted.checksum import BLANK, is_intact, signed
from .untrusted.json_text import parse_json, printable
from .untrusted.metadata import (
    NEWEST_VERSION,
    check_aliases,
    check_code_amount,
    check_parts,
    typed_recipe,
)
from .untrusted.recipe import check_computed, check_recipe
from .untrusted.stored_code import check_code
from .untrusted.tensors import check_file_size, check_fit
from .writing import write_tensors

_KEY = "polarprune"
_REMEDY = "Give a file that polarprune.save wrote."

# --- saving ---------------------------------------------------------------------------------------


def save(model: nn.Module, path: str | Path, *, card: JsonObject | None = None) -> None:
    """Write a small model to a safetensors file.

    Args:
        model: A model that `Pruner.export` or `shrink` returned. It may be wrapped by
            `torch.compile`.
        path: The file to write. It is replaced only after all of the new file is written.
        card: Your own notes about the model, as plain data: strings, finite numbers, lists and
            dicts. `load` ignores them.

    Returns:
        None.

    Raises:
        PruneError: If the model was not made by polarprune, if it or the card holds something
            that a file cannot hold, or if the file cannot be written.

    Example:
        >>> import tempfile, torch, polarprune as pp
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> small = pp.shrink(model, pp.trace(model, torch.zeros(1, 4)), {"0": [0, 3, 5]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pp.save(small, f"{folder}/small.safetensors", card={"accuracy": 0.93})
    """
    check_path("save", path)
    if card is not None and not isinstance(card, dict):
        raise PruneError(f"save: card is a {type(card).__name__}; give a dict of plain data.")
    model = uncompiled(model)  # inside torch.compile: the names of the class
    recipe = attached_recipe(model)
    if recipe is None:
        raise PruneError(
            f"save: {type(model).__name__} was not made by export() or shrink(). A model that was "
            f"not pruned needs no recipe: use safetensors.torch.save_model."
        )
    tensors, aliases = _stored_tensors(model)
    text = _metadata(recipe, aliases, card or {}, path)
    try:
        write_tensors(tensors, Path(path), {_KEY: signed(text, tensors)})
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise PruneError(
            f"save: {path} cannot be written: {error}. The file that was there is unchanged: free "
            f"some space, or give another path."
        ) from error


def _stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to store, and for each further name of one of them the first name."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, tensor in model.state_dict().items():
        _check_storable(name, tensor)
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and memory in seen:
            aliases[name] = seen[memory]
        else:
            seen[memory] = name
            tensors[name] = tensor.detach().contiguous().clone()
    return tensors, aliases


def _check_storable(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise PruneError(
            f"save: {name} is not a tensor (get_extra_state); a file can only hold tensors."
        )
    if value.is_meta:
        raise PruneError(
            f"save: {name} is on the meta device and has no values; save the model before you "
            f"move it there."
        )


def _metadata(recipe: object, aliases: dict[str, str], card: JsonObject, path: str | Path) -> str:
    """Return the metadata with a blank checksum, after checking that `load` would accept them."""
    content = {
        "version": NEWEST_VERSION,
        "sha256": BLANK,
        "recipe": recipe,
        "aliases": aliases,
        "card": card,
    }
    try:
        text = json.dumps(content, allow_nan=False)
        written = parse_json(text)["recipe"]
    except (TypeError, ValueError, RecursionError, PruneError) as error:
        raise PruneError(
            f"save: {path} cannot be written: {error}. Give plain data as card: strings, finite "
            f"numbers, lists and dicts of them."
        ) from error
    try:
        check_code_amount(written)
    except PruneError as error:
        raise PruneError(f"save: {path} could not be loaded again: {error}.") from error
    return text


# --- loading --------------------------------------------------------------------------------------


def load(path: str | Path, *, model: nn.Module) -> nn.Module:
    """Return the small model that a file holds.

    The file is checked against `model` first (`polarprune.files.untrusted`); nothing in it is run.

    Args:
        path: A file that `save` wrote.
        model: A fresh instance of the original, unpruned class. It is not changed.

    Returns:
        A new model with the widths and the weights of the file.

    Raises:
        PruneError: If the file is missing, damaged, or does not fit `model`.

    Example:
        >>> import tempfile, torch, polarprune as pp
        >>> def make_model():
        ...     return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> model = make_model()
        >>> small = pp.shrink(model, pp.trace(model, torch.zeros(1, 4)), {"0": [0, 3, 5]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pp.save(small, f"{folder}/small.safetensors")
        ...     loaded = pp.load(f"{folder}/small.safetensors", model=make_model())
        >>> loaded
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): Linear(in_features=3, out_features=2, bias=True)
        )
        >>> torch.equal(loaded[1].weight, small[1].weight)
        True
    """
    _check_arguments(path, model)
    text = _read_metadata(path)
    content, tensors = _parse_metadata(text, path), _read_tensors(path, model)
    if content["version"] > 1 and not is_intact(text, content["sha256"], tensors):
        raise PruneError(f"load: {path} is damaged: its checksum does not match. Copy it again.")
    try:
        check_aliases(content["aliases"], tensors)
        tensors.update({name: tensors[same] for name, same in content["aliases"].items()})
        small = _build(content, model)
    except PruneError as error:
        reason = printable(str(error))
        raise PruneError(
            f"load: {path} is damaged or belongs to another model: {reason}"
        ) from error
    except Exception as error:  # a file may lead to any exception
        raise _damaged(path, error) from error
    check_fit(tensors, small.state_dict(), path)
    _fill(small, tensors)
    update_config(small, None)
    return small


def _check_arguments(path: str | Path, model: nn.Module) -> None:
    check_path("load", path)
    if not isinstance(model, nn.Module):
        raise PruneError(
            f"load: model={reprlib.repr(model)}; give an instance, such as model=Net()."
        )
    if any(tensor.is_meta for _, tensor in named_tensors(model)):
        raise PruneError("load: the model is on the meta device; give one that holds its weights.")


def _build(content: JsonObject, model: nn.Module) -> nn.Module:
    """Return the small model with the weights of the model that was passed."""
    data = content["recipe"]
    check_code_amount(data)
    recipe = typed_recipe(upgraded(data, content["version"], model))
    check_computed(recipe, model)
    base = make_plain(copy_model(model), recipe.computed) if recipe.computed else model
    check_shapes(base, recipe.shapes, OTHER_MODEL)
    check_recipe(recipe, base)
    small = cut_copy(base, recipe, from_file=True)
    check_code(recipe, small)
    return small


def _fill(small: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors of the file into the model, with the precision of the file."""
    for name, tensor in named_tensors(small):
        if name in tensors:
            tensor.data = tensor.data.to(tensors[name].dtype)
    small.load_state_dict(tensors)


def read_card(path: str | Path) -> JsonObject:
    """Return the notes that `save(..., card=...)` stored.

    Raises:
        PruneError: If the file is missing or was not written by `save`.
    """
    check_path("read_card", path)
    card: JsonObject = _parse_metadata(_read_metadata(path), path)["card"]
    return card


# --- reading --------------------------------------------------------------------------------------


def _read_metadata(path: str | Path) -> str:
    if not Path(path).is_file():
        raise PruneError(f"load: there is no file {path}. {_REMEDY}")
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
    except Exception as error:  # SafetensorError, OSError, and whatever its parser raises
        raise PruneError(f"load: {path} is not a safetensors file: {error}. {_REMEDY}") from error
    if text is None:
        raise PruneError(
            f"load: {path} holds no recipe; it was not written by polarprune.save. {_REMEDY}"
        )
    return str(text)


def _parse_metadata(text: str, path: str | Path) -> JsonObject:
    try:
        return check_parts(parse_json(text))
    except PruneError as error:
        raise PruneError(f"load: {path}: {error}.") from error
    except Exception as error:  # the text may hold anything
        raise _damaged(path, error) from error


def _read_tensors(path: str | Path, model: nn.Module) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            count = len(file.keys())
        check_file_size(Path(path), count, model)
        tensors: dict[str, Tensor] = load_file(str(path))
    except PruneError:
        raise
    except Exception as error:  # for example a type that this version of torch does not have
        raise _damaged(path, error) from error
    return tensors


def _damaged(path: str | Path, error: Exception) -> PruneError:
    return PruneError(
        f"load: the recipe in {path} is damaged or belongs to another model: {error!r}."
    )
