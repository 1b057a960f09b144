"""Weights that are computed: weight norm, spectral norm, all that torch's `parametrize` holds.

What computes them may mix channels, so it is not followed: such a weight counts as a parameter of
its own. Gates are multiplied into what was computed; and in a model that is cut, it is a plain
parameter with the value that it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..tracing.copying import copy_model

_HOOKS = {WeightNorm: "weight_norm", SpectralNorm: "spectral_norm"}


def is_gated(module: nn.Module) -> bool:
    return any(getattr(part, "is_gate", False) for part in module.modules())


def parametrized(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Name, module, attribute and parametrizations of every tensor that has some."""
    for path, module in list(model.named_modules()):
        if parametrize.is_parametrized(module) and "parametrizations" not in path.split("."):
            for leaf, parts in list(module.parametrizations.items()):
                yield f"{path}.{leaf}" if path else leaf, module, leaf, parts


def computed(model: nn.Module) -> list[str]:
    """The names of weights that are computed, by more than gates."""
    return [
        name
        for name, _, _, parts in parametrized(model)
        if not all(getattr(part, "is_gate", False) for part in parts)
    ]


def make_plain(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Make these weights plain ones that have the values they have now, in place."""
    wanted = set(names)
    found = [item for item in parametrized(model) if item[0] in wanted] if wanted else []
    values = [_value(module, leaf, parts) for _, module, leaf, parts in found]  # before any changes
    for (_, module, leaf, parts), value in zip(found, values, strict=True):
        _fold_in(module, leaf, parts, value)
    return model


def plain_copy(model: nn.Module) -> nn.Module:
    """The model, or, if it computes weights, a copy that does not."""
    names = computed(model)
    return make_plain(copy_model(model), names) if names else model


def _value(module: nn.Module, leaf: str, parts: nn.Module) -> Tensor:
    """As in eval mode: in train mode spectral norm takes a step whenever it is looked at."""
    modes = [(part, part.training) for part in parts.modules()]
    parts.eval()
    try:
        return getattr(module, leaf).detach().clone()  # type: ignore[no-any-return]
    finally:
        for part, mode in modes:
            part.training = mode


def _fold_in(module: nn.Module, leaf: str, parts: Any, value: Tensor) -> None:
    """torch's `remove_parametrizations` edits the class, which copies share with the original."""
    only_gates = all(getattr(part, "is_gate", False) for part in parts)
    originals = [held for held in parts._parameters.values() if held is not None]
    if only_gates:  # the same object: it may be tied to others
        tensor = parts.original
        tensor.data = value
    else:
        learns = any(held.requires_grad for held in originals)
        learns |= any(part.learns() for part in parts if hasattr(part, "learns"))
        tensor = nn.Parameter(value, learns) if originals else value
    lists: Any = module.parametrizations
    del lists[leaf]
    family = type(module)
    rest = {key: item for key, item in vars(family).items() if key != leaf}
    if len(lists):
        module.__class__ = type(family.__name__, family.__bases__, rest)
    else:
        module.__class__ = family.__bases__[0]
        del module._modules["parametrizations"]
    table: Any = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
    others = dict(table)
    table.clear()
    table.update({leaf: tensor, **others})  # where it stood: weights come first
    for name in {name for part in parts for name in getattr(part, "unread", ())}:
        delattr(module, name)


def by_hooks(model: nn.Module) -> list[str]:
    """Weights that older functions of torch compute, which leave no place for a gate."""
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook) in _HOOKS:
                found.setdefault(_HOOKS[type(hook)], []).append(path or "the model")
    return [
        f"{paths[0]} (and {len(paths) - 1} more): torch.nn.utils.{name} computes the weight in a "
        f"hook, where channels are not followed; torch.nn.utils.parametrizations.{name} does the "
        f"same in a way that can be pruned"
        for name, paths in found.items()
    ]


def settle_weights(model: nn.Module) -> None:
    """Weights are to be what they are in eval mode, whatever the mode of the model."""
    for _, _, _, parts in parametrized(model):
        parts.eval()
