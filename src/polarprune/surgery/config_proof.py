"""Update the config of a pruned model to its sizes, if a model built from it is equal.

`save_pretrained` writes a model's config beside its weights. If the config still has the original
sizes, `from_pretrained` cannot load that folder. So the config gets the pruned sizes. If no config
gives them, `save_pretrained` raises an error.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..errors import PruneError, reason_given
from ..torch_internals.markers import attached_recipe
from ..torch_internals.refused_methods import allow_method, refuse_method
from ..tracing.model_state import Example
from .config_entries import Key, is_config, parts_of, set_entry, values_in
from .config_models import Config, plain_class, with_weights_of
from .config_sizes import ConfigSearch
from .precision import StaysDouble, in_double
from .proof import deviation, difference

_SAVE = "save_pretrained"
CLOSE, _EXACT = 1e-5, 1e-10  # in the model's precision, and in float64
REMEDY = "polarprune.save stores any pruned model."
_FREEZE = "Freeze these channels with keep=[...]"


def update_config(model: nn.Module, example: Example | None) -> None:
    """Give the config of a pruned model its true sizes, or make `save_pretrained` raise an error.

    Args:
        model: A pruned model, which is changed in place.
        example: Inputs on which a model that is built from the config is compared with this one;
            without them, `save_pretrained` raises an error.
    """
    recipe = attached_recipe(model) or {}
    if not recipe.get("slices") or not any(map(_can_save, model.modules())):
        return
    try:
        config = fitting_config(model, example)
    except PruneError as error:
        _refuse(model, f"{error}. {REMEDY}")
    except Exception as error:  # classes of users may raise anything when they are built
        _refuse(model, f"{type(model).__name__} cannot be built: {error!r}. {REMEDY}")
    else:
        set_config(model, config)


def fitting_config(model: nn.Module, example: Example | None) -> Config:
    """Return a config from which the class of a pruned model builds an equal model.

    Raises:
        PruneError: If there is none. The message has no full stop at its end.
    """
    family = plain_class(model).__name__
    if not is_config(getattr(model, "config", None)):
        raise PruneError(f"{family} is not built from a config that could hold the pruned sizes")
    if example is None:
        raise PruneError(
            f"the config of this {family} has the sizes before pruning, with which from_pretrained "
            f"cannot load the folder. Use save_pretrained(model, folder, example) of "
            f"polarprune.integrations.transformers"
        )
    return _closest(model, example)


def _closest(model: nn.Module, example: Example) -> Config:
    """Return the config that gives the smallest difference, if that is only rounding."""
    best, found, failure = float("inf"), None, ""
    for config in ConfigSearch(model).configs():
        try:
            gap = _gap(model, config, example)
        except PruneError as error:  # sizes that fit the tensors need not fit each other
            failure = failure or str(error)
            continue
        if found is None or gap < best:
            best, found = gap, config
        if best == 0:
            return found
    if found is None:
        raise PruneError(failure)
    if best > CLOSE or not _equal_in_double(model, found, example):
        raise PruneError(_difference_explained(model, found, best))
    return found


def _gap(model: nn.Module, config: Config, example: Example) -> float:
    """Return by how much the outputs of a model that is built from a config differ.

    Raises:
        PruneError: If the model does not run.
    """
    try:
        return difference(model, with_weights_of(model, config), example, training=False)
    except Exception as error:  # whatever the code of the class raises
        raise PruneError(
            f"{_as_built(model, config)} does not run: {reason_given(error)}. {_FREEZE}"
        ) from error


def _equal_in_double(model: nn.Module, config: Config, example: Example) -> bool:
    """Return whether a difference is rounding: other heads may change little, too."""
    model, example = in_double(model, example)
    with StaysDouble():
        return _gap(model, config, example) <= _EXACT


def _difference_explained(model: nn.Module, config: Config, gap: float) -> str:
    """Say which number the code of the class computes from the sizes in its config."""
    built = with_weights_of(model, config)
    names = [name for name, value in _constants(model) if _differs(value, built, name)]
    cause = f", perhaps because of {names[0]}" if names else ""
    return (
        f"{_as_built(model, config)} has the right shapes, but its outputs differ "
        f"{deviation(gap)}{cause}. {_FREEZE}"
    )


def _as_built(model: nn.Module, config: Config) -> str:
    """Name the class, and the entries of the config that were changed."""
    changed = [".".join(map(str, key)) for key in changed_entries(model.config, config)]
    family = plain_class(model).__name__
    return f"{family} built with {', '.join(changed) or 'its config'} as pruned"


def _constants(model: nn.Module) -> list[tuple[str, object]]:
    """Return the constant tensors and the numbers that modules hold, integers last."""
    stored = model.state_dict().keys()
    tensors = [(name, x) for name, x in model.named_buffers() if name not in stored]
    held = [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (float, int)
    ]
    return [*tensors, *sorted(held, key=lambda pair: isinstance(pair[1], int))]


def _differs(value: object, built: nn.Module, name: str) -> bool:
    """Return whether the module of the same path in another model holds another value."""
    path, _, leaf = name.rpartition(".")
    other = getattr(built.get_submodule(path), leaf, None)
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape != other.shape or not torch.equal(value, other)
    return bool(value != other)


# --- changing a model -----------------------------------------------------------------------------


def changed_entries(old: Config, new: Config) -> dict[Key, int]:
    """Return the integers in a config that differ from those in another one."""
    before, after = dict(values_in(old)), dict(values_in(new))
    return {k: v for k, v in after.items() if type(v) is int and before.get(k) != v}


def set_config(model: nn.Module, config: Config) -> None:
    """Copy the integers of a config into the configs of a model and its modules, in place."""
    changed = changed_entries(model.config, config)
    parts = list(parts_of(model.config))
    held = [getattr(module, "config", None) for module in model.modules()]
    others = {id(one): one for one in held if is_config(one)}
    for (_, old), (_, new) in zip(parts, parts_of(copy.deepcopy(config)), strict=True):
        old.__dict__.update({k: x for k, x in vars(new).items() if not is_config(x)})
        others.pop(id(old), None)
    for other in others.values():  # an encoder may hold a copy of the whole config
        twins = [key for key, part in parts if type(part) is type(other)]
        for key, value in changed.items():
            if len(twins) == 1 and key[: len(twins[0])] == twins[0]:
                set_entry(other, key[len(twins[0]) :], value)
    for module in model.modules():
        allow_method(module, _SAVE)


def _can_save(module: nn.Module) -> bool:
    return callable(getattr(type(module), _SAVE, None))


def _refuse(model: nn.Module, reason: str) -> None:
    for module in filter(_can_save, model.modules()):
        refuse_method(module, _SAVE, f"{_SAVE}: {reason}")
