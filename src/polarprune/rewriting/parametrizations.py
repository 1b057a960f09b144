"""Weights that torch's parametrizations compute: weight norm, spectral norm, and others.

A parametrization may mix channels, so channels are not followed through it: the computed weight
counts as a parameter. Gates are multiplied into the computed weight. In a pruned model it is a
plain parameter with the last computed value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import cast

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..channels.notes import Note
from ..torch_internals.class_swaps import drop_member, leave_derived_class
from ..torch_internals.markers import is_gate_part
from ..tracing.copying import copy_model

_HOOKS = {WeightNorm: "weight_norm", SpectralNorm: "spectral_norm"}


class ComputedWeight(nn.Module):
    """A parametrization that polarprune registers for a weight that a layer's forward computed.

    Attributes:
        unread: Tensors of the layer that only this parametrization reads. They are removed with it.
    """

    unread: list[str]

    def learns(self) -> bool:
        """Return whether a tensor besides the weight is trained."""
        raise NotImplementedError


def is_gated(module: nn.Module) -> bool:
    """Return whether a module, or a part of it, belongs to a gate."""
    return any(is_gate_part(part) for part in module.modules())


def parametrized(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, ParametrizationList]]:
    """Yield every parametrized tensor: name, module, attribute, and its parametrizations."""
    for path, module in list(model.named_modules()):
        if "parametrizations" not in module._modules:  # faster than torch's check
            continue
        if parametrize.is_parametrized(module) and "parametrizations" not in path.split("."):
            for leaf, parts in list(_lists(module).items()):
                found = cast(ParametrizationList, parts)
                yield f"{path}.{leaf}" if path else leaf, module, leaf, found


def _lists(module: nn.Module) -> nn.ModuleDict:
    """Return the parametrizations of a module by the attribute that they compute."""
    return cast(nn.ModuleDict, module.parametrizations)


def computed(model: nn.Module) -> list[str]:
    """Return the names of weights that something other than a gate computes."""
    return [name for name, _, _, parts in parametrized(model) if not _only_gates(parts)]


def _only_gates(parts: ParametrizationList) -> bool:
    return all(is_gate_part(part) for part in parts)


def make_plain(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Replace these computed weights by plain parameters with their values, in place."""
    wanted = set(names)
    found = [item for item in parametrized(model) if item[0] in wanted] if wanted else []
    uses = Counter(id(held) for item in found for held in item[-1]._parameters.values())
    by_itself = {name: _only_gates(p) and uses[id(p.original)] == 1 for name, *_, p in found}
    others = [item for item in found if not by_itself[item[0]]]
    # Compute all of these before anything changes: one weight may be computed from another, or
    # share its tensor with another.
    values = [_value(module, leaf, parts) for _, module, leaf, parts in others]
    for (_, module, leaf, parts), value in zip(others, values, strict=True):
        _replace_by_value(module, leaf, parts, value)
    for name, module, leaf, parts in found:  # one after the other, to save memory
        if by_itself[name]:
            _replace_by_value(module, leaf, parts, _value(module, leaf, parts))
    return model


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model with plain weights, or the model if it has no computed ones."""
    names = computed(model)
    return make_plain(copy_model(model), names) if names else model


def _value(module: nn.Module, leaf: str, parts: nn.Module) -> Tensor:
    """Return the weight in eval mode: in train mode, spectral norm changes at every access."""
    modes = [(part, part.training) for part in parts.modules()]
    parts.eval()
    try:
        weight: Tensor = getattr(module, leaf)
        return weight.detach().clone()
    finally:
        for part, mode in modes:
            part.training = mode


def _replace_by_value(
    module: nn.Module, leaf: str, parts: ParametrizationList, value: Tensor
) -> None:
    """Remove the parametrizations of one tensor.

    torch's `remove_parametrizations` edits the class, which a copy shares with its original.
    """
    tensor = _plain_tensor(parts, value)
    lists = _lists(module)
    del lists[leaf]
    if len(lists):
        drop_member(module, leaf)
    else:
        leave_derived_class(module)
        del module._modules["parametrizations"]
    _put_first(module, leaf, tensor)
    ours = [part for part in parts if isinstance(part, ComputedWeight)]
    for name in {name for part in ours for name in part.unread}:
        delattr(module, name)


def _plain_tensor(parts: ParametrizationList, value: Tensor) -> Tensor:
    """Return the tensor that replaces a computed one."""
    if _only_gates(parts):  # keep the object: other modules may share it
        original = parts.original
        original.data = value
        return original
    originals = [held for held in parts._parameters.values() if held is not None]
    learns = any(held.requires_grad for held in originals)
    learns |= any(part.learns() for part in parts if isinstance(part, ComputedWeight))
    return nn.Parameter(value, learns) if originals else value


def _put_first(module: nn.Module, leaf: str, tensor: Tensor) -> None:
    """Register a tensor before all others, as layers register their weight first."""
    if isinstance(tensor, nn.Parameter):
        parameters = dict(module._parameters)
        module._parameters.clear()
        module._parameters.update({leaf: tensor, **parameters})
    else:
        buffers = dict(module._buffers)
        module._buffers.clear()
        module._buffers.update({leaf: tensor, **buffers})


def by_hooks(model: nn.Module) -> list[Note]:
    """Return a note for each kind of weight that torch's older functions compute in a hook."""
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook) in _HOOKS:
                found.setdefault(_HOOKS[type(hook)], []).append(path or "the model")
    return [
        Note(
            f"torch.nn.utils.{name} computes the weight in a hook, where channels are not "
            f"followed; use torch.nn.utils.parametrizations.{name}, which computes the same weight "
            f"and can be pruned",
            paths,
        )
        for name, paths in found.items()
    ]


def settle_weights(model: nn.Module) -> None:
    """Compute weights as in eval mode, whatever the mode of the model."""
    for _, _, _, parts in parametrized(model):
        parts.eval()
