"""Write a pruned model of transformers as a folder that `from_pretrained` loads without polarprune.

The folder is written beside the target under another name, loaded with the plain class, and
compared with the pruned model. Only then is it renamed to the target.
"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import PruneError, reason_given
from ..surgery.config_entries import is_config
from ..surgery.config_models import Config, convert_constants, plain_class
from ..surgery.config_proof import CLOSE, REMEDY, fitting_config, set_config
from ..surgery.other_inputs import fresh_inputs
from ..surgery.proof import deviation, example_for, outputs, relative_gap
from ..torch_internals.markers import attached_state, uncompiled
from ..torch_internals.refused_methods import allow_method
from ..tracing.model_state import Example, as_call, restored
from ..validation.arguments import check_path

_WHERE = "save_pretrained"
_NEW_TOKENS = 8
_NOT_FOR_GENERATE = ("decoder_", "labels", "use_cache", "past_key_values", "return_dict")


def save_pretrained(
    model: nn.Module,
    save_directory: str | Path,
    example_inputs: Example,
    *,
    processor: Any = None,
    max_shard_size: int | str = "50GB",
) -> None:
    """Write a pruned model of transformers as a folder that `from_pretrained` loads.

    The folder has the config with the pruned sizes, the weights as safetensors, and the generation
    config. Loading it needs transformers, and nothing else. Before the folder is renamed to the
    target, it is loaded and compared with `model`: the outputs on the example and on inputs of
    other values and sizes, and what `generate` returns, with and without a cache.

    The config of `model` gets the pruned sizes, too, so that `model.save_pretrained` works
    afterwards, for example when a `Trainer` fine-tunes the model. Models that `Pruner.export` made
    have these sizes already if a config can hold them.

    Args:
        model: A pruned model of transformers, or a part of a pruned model that is one.
        save_directory: The folder to write. It must be new or empty.
        example_inputs: What the model takes, as for `trace`.
        processor: A tokenizer, image processor or processor to write into the same folder.
        max_shard_size: The size at which the weights are split into several files.

    Raises:
        PruneError: If no config can hold the sizes, if the loaded model is not equal, or if the
            folder cannot be written. No files are left then.

    Example:
        >>> from polarprune.integrations.transformers import save_pretrained
        >>> from transformers import AutoModelForCausalLM
        >>> small = pruner.export()
        >>> save_pretrained(small, "small", example, processor=tokenizer)
        >>> small = AutoModelForCausalLM.from_pretrained("small")
    """
    model, folder = uncompiled(model), _checked(model, save_directory)
    example = example_for(example_inputs, next(model.parameters()), torch.float32)
    try:
        config = fitting_config(model, example)
    except PruneError as error:
        raise PruneError(f"{_WHERE}: {error}. {REMEDY}") from error
    with _new_folder(folder) as new:
        _write(model, config, new, max_shard_size)
        if processor is not None:
            processor.save_pretrained(new)
        _prove(model, new, example)
    set_config(model, config)


def _checked(model: object, save_directory: str | Path) -> Path:
    """Return the folder, after a check of the arguments."""
    check_path(_WHERE, save_directory)
    folder = Path(save_directory)
    kind = type(model).__name__
    if not isinstance(model, nn.Module) or not is_config(getattr(model, "config", None)):
        raise PruneError(
            f"{_WHERE}: {kind} is not a model of transformers; give the part of the pruned model "
            f"that is one, such as small.model, or use polarprune.save."
        )
    if attached_state(model) is not None:
        raise PruneError(f"{_WHERE}: this {kind} has gates; give what pruner.export() returns.")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise PruneError(f"{_WHERE}: {folder} exists; give the name of a new or empty folder.")
    return folder


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, and rename it after the block; leave nothing after an error."""
    nearest = next(one for one in folder.absolute().parents if one.is_dir())
    try:
        with tempfile.TemporaryDirectory(dir=nearest, prefix=f".{folder.name}-") as private:
            new = Path(private) / "new"  # with the permissions of any new folder
            new.mkdir()
            yield new
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.is_dir():
                folder.rmdir()
            shutil.move(new, folder)
    except OSError as error:
        raise PruneError(
            f"{_WHERE}: {folder} cannot be written: {error}. Free some space or give another path."
        ) from error


def _write(model: nn.Module, config: Config, folder: Path, max_shard_size: int | str) -> None:
    """Write the model with another config; the model itself is not changed."""
    twin: Any = copy.copy(model)
    allow_method(twin, "save_pretrained")
    twin.config = copy.deepcopy(config)
    twin.save_pretrained(folder, max_shard_size=max_shard_size)


# --- the proof ------------------------------------------------------------------------------------


def _prove(model: nn.Module, folder: Path, example: Example) -> None:
    """Raise unless the folder loads as a model that equals the pruned one."""
    loaded = _loaded(model, folder)
    for name, inputs in [("the example", example), *fresh_inputs(example)]:
        gap = _gap(model, loaded, inputs, name)
        if gap is not None and not gap <= CLOSE:
            raise PruneError(
                f"{_WHERE}: the model that was loaded differs {deviation(gap)} on {name}; at most "
                f"{CLOSE:.0e} is allowed. Nothing was written. {REMEDY}"
            )
    if getattr(model, "can_generate", bool)():
        _compare_texts(model, loaded, example)


def _loaded(model: Any, folder: Path) -> nn.Module:
    """Load the folder with the plain class, on the device of the model."""
    family: Any = plain_class(model)
    attention = getattr(model.config, "_attn_implementation", None)
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        loaded, found = family.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True, **chosen
        )
    except Exception as error:  # whatever the class raises
        raise PruneError(
            f"{_WHERE}: {family.__name__}.from_pretrained fails: {error!r}. {REMEDY}"
        ) from error
    wrong = {kind: sorted(map(str, keys)) for kind, keys in found.items() if keys}
    if wrong:
        raise PruneError(
            f"{_WHERE}: {family.__name__}.from_pretrained finds {wrong}. Nothing was written. "
            f"{REMEDY}"
        )
    loaded.to(next(model.parameters()).device)
    convert_constants(loaded, model)
    return cast(nn.Module, loaded.eval())


def _gap(model: nn.Module, loaded: nn.Module, inputs: Example, name: str) -> float | None:
    """Return the largest difference of outputs, or None if the pruned model refuses the inputs."""
    try:
        wanted = outputs(model, inputs, training=False)
    except Exception:  # sizes that the model does not support, so there is nothing to compare
        return None
    with _failure_explained(f"does not run on {name}"):
        found = outputs(loaded, inputs, training=False)
    if len(found) != len(wanted):
        return math.inf
    return max(map(relative_gap, wanted, found), default=0.0)


@contextmanager
def _failure_explained(what: str) -> Iterator[None]:
    """Context manager: raise a PruneError if the loaded model fails inside."""
    try:
        yield
    except Exception as error:  # whatever the code of the class raises
        raise PruneError(
            f"{_WHERE}: the model that was loaded {what}: {reason_given(error)}. Nothing was "
            f"written. {REMEDY}"
        ) from error


def _compare_texts(model: nn.Module, loaded: nn.Module, example: Example) -> None:
    """Refuse a loaded model that generates another text, with or without a cache."""
    for cached in (False, True):
        try:
            wanted = _text(model, example, cached)
        except Exception:  # a rewritten forward may not support a cache, an example may lack tokens
            continue
        with _failure_explained(f"does not generate with use_cache={cached}"):
            found = _text(loaded, example, cached)
        if not torch.equal(wanted, found):
            raise PruneError(
                f"{_WHERE}: the model that was loaded generates another text with "
                f"use_cache={cached}. Nothing was written. {REMEDY}"
            )


def _text(model: Any, example: Example, cached: bool) -> Tensor:
    """Return what a model generates from the example."""
    args, kwargs = as_call(example)
    every = {**dict(zip([model.main_input_name], args, strict=False)), **kwargs}
    given = {k: x for k, x in every.items() if not k.startswith(_NOT_FOR_GENERATE)}
    options = {"max_new_tokens": _NEW_TOKENS, "do_sample": False, "num_beams": 1}
    with restored(model, False):
        return cast(Tensor, model.generate(**given, **options, use_cache=cached))
