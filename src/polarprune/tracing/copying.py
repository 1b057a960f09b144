"""Copy a model, including what `copy.deepcopy` cannot copy."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from operator import is_
from types import CellType, FunctionType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..torch_internals.markers import attached_state

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN: tuple[type, ...] = (dict, OrderedDict)
_TABLES = ("_parameters", "_buffers", "_modules")
Key = TypeVar("Key")


def copy_model(model: nn.Module, memo: dict[int, object] | None = None) -> nn.Module:
    """Return a deep copy of a model.

    torch copies neither activations that a module still holds nor scripted functions. The copy
    holds such activations without their autograd history, and shares scripted functions. The pruner
    of a gated model does not follow the copy.

    Args:
        model: The model to copy.
        memo: The memo of `copy.deepcopy`: maps the id of an object to its copy.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        # Most tables of hooks are empty, and `deepcopy` takes long for each.
        tables = (held for held in vars(module).values() if type(held) in _PLAIN)
        memo.update((id(table), type(table)()) for table in tables if not table)
        hooks = attached_state(module)
        if hooks is not None:
            memo[id(hooks)] = hooks.inert()
        for leaf in _held_leaves(module):
            if isinstance(leaf, Tensor) and not leaf.is_leaf:
                memo.setdefault(id(leaf), leaf.detach().clone())
            elif isinstance(leaf, torch.jit.ScriptFunction):
                memo[id(leaf)] = leaf
    new = copy.deepcopy(model, memo)
    for module in new.modules():
        _rebind_functions(vars(module), memo)
    return new


def _held_leaves(module: nn.Module) -> Iterator[object]:
    """Yield what the attributes of a module hold, except for torch's tables and plain values."""
    for key, held in vars(module).items():
        empty = isinstance(held, (dict, list, tuple, set)) and not held
        if not (empty or held is None or isinstance(held, (bool, int, str)) or key in _TABLES):
            yield from tree_leaves(held)


def _rebind_functions(held: dict[Key, object], memo: dict[int, object]) -> None:
    """Let functions in a copied model, such as hooks, refer to the copy instead of the original."""
    for key, value in held.items():
        if isinstance(value, FunctionType) and (value.__closure__ or value.__defaults__):
            held[key] = _rebound(value, memo)
        elif isinstance(value, dict) and key in _HOOKS:
            _rebind_functions(value, memo)


def _rebound(function: FunctionType, memo: dict[int, object]) -> FunctionType:
    """Return the function with copies in place of the originals in its closure and defaults."""
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an empty cell
        return function
    old = (*cells, *(function.__defaults__ or ()))
    new = [memo.get(id(value), value) for value in old]
    if all(map(is_, new, old)):
        return function
    closure, defaults = tuple(map(CellType, new[: len(cells)])), tuple(new[len(cells) :])
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults or None, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    return copied
