"""Run a model and put everything back: modes, buffers, attributes and random states."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..torch_internals.patches import fused_kernels_off
from .schemas import written_arguments

Example = Tensor | tuple[object, ...] | list[Any] | Mapping[str, object]
Args = tuple[object, ...]  # of a call, by position
Kwargs = dict[str, object]  # of a call, by keyword
Slot = tuple[nn.Module, str]  # a module and the name of an attribute or buffer
Held = tuple[dict[str, Any], str, object]  # a table, a key in it, and what was there


# --- inputs and outputs ---------------------------------------------------------------------------


def as_call(example: Example) -> tuple[Args, Kwargs]:
    """Return the positional and keyword arguments with which the model is called."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def tensors_in(out: object, without: object = None) -> list[Tensor]:
    """Return all tensors in an output: in containers, and in the fields of plain objects.

    Args:
        out: The output.
        without: An object in it whose tensors are left out.
    """
    found: list[Tensor] = []
    seen = {id(without)}
    waiting = [out]
    while waiting:
        for leaf in tree_leaves(waiting.pop(0), is_leaf=lambda held: held is without):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif id(leaf) not in seen and not isinstance(leaf, nn.Module):
                seen.add(id(leaf))
                waiting.append(_contents(leaf))
    return found


def _contents(leaf: object) -> list[object]:
    """Return what an object holds that torch's pytree does not treat as a container."""
    if isinstance(leaf, (str, bytes)) or callable(leaf):
        return list(leaf.values()) if isinstance(leaf, Mapping) else []
    held = list(getattr(leaf, "__dict__", {}).values())
    for family in type(leaf).__mro__:
        slots = vars(family).get("__slots__", ())
        held += [getattr(leaf, k, None) for k in ([slots] if isinstance(slots, str) else slots)]
    if isinstance(leaf, Mapping):
        return [*held, *leaf.values()]
    return [*held, *leaf] if isinstance(leaf, (list, tuple, set, frozenset)) else held


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers. A tensor with two names is yielded once."""
    modules = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
    for tables in ([m._parameters for _, m in modules], [m._buffers for _, m in modules]):
        seen: set[int] = set()
        for (stem, _), table in zip(modules, tables, strict=True):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield stem + name, tensor


# --- putting everything back ----------------------------------------------------------------------


@contextmanager
def restored(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Context manager: run the model inside, without gradients, and restore its state afterwards.

    Restores attributes, hooks, modes, buffers and random states. Attributes matter because a
    forward may cache results in them, and hooks because some libraries register theirs when the
    model first runs.

    The random generators of torch, Python and NumPy belong to the process. Another thread that
    draws numbers meanwhile draws them from the run's seed, and they are reset under it.

    Args:
        model: The model that runs inside.
        training: The mode to run it in; None leaves the mode as it is.
    """
    state, generators = _ModelState(model), _RandomState()
    gpus = {tensor.device.index or 0 for tensor, _ in state.memory if tensor.is_cuda}
    try:
        with torch.random.fork_rng(sorted(gpus)):
            if training is not None:
                state.train(model, training)
            with torch.no_grad():
                yield
    finally:
        generators.restore()
        state.restore()


class _ModelState:
    """Everything about a model that a run may change. Weights are copied only where needed."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.attributes = [(vars(module), dict(vars(module))) for module in modules]
        self.containers: list[tuple[Any, Any]] = [
            (held, held.copy() if held else None)  # most are empty
            for table, _ in self.attributes
            for key, held in table.items()
            if isinstance(held, (dict, list)) and key != "_modules"
        ]
        tensors = [tensor for _, tensor in named_tensors(model)]
        self.memory = [(tensor, tensor.data) for tensor in tensors]
        buffers = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        with torch.no_grad():
            self.contents = [(tensor, tensor.clone()) for tensor in buffers]

    def train(self, model: nn.Module, training: bool) -> None:
        """Set the mode. A custom `train` may write weights, for example to merge adapters."""
        modules = list(model.modules())
        if all(type(module).train is nn.Module.train for module in modules):
            for module in modules:  # as `train` does it, but faster
                if module.training != training:
                    module.training = training
            return
        written = _SavesWrites(tensor for tensor, _ in self.memory)
        try:
            with written:
                model.train(training)
        finally:
            self.contents += written.saved

    def restore(self) -> None:
        """Put everything back in place."""
        for table, entries in self.attributes:
            table.clear()
            table.update(entries)
        for held, before in self.containers:
            if held:
                held.clear()
            if before:
                held.extend(before) if isinstance(held, list) else held.update(before)
        for tensor, old in self.memory:
            if tensor.data_ptr() != old.data_ptr() or tensor.shape != old.shape:
                tensor.data = old
        with torch.no_grad():
            for tensor, content in self.contents:
                tensor.copy_(content)


class _SavesWrites(TorchDispatchMode):
    """Save tensors before something writes to them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: list[tuple[Tensor, Tensor]] = []
        self._waiting: dict[int, list[Tensor]] = {}  # key: the address of their memory
        for tensor in tensors:
            if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
                self.saved.append((tensor, tensor.detach().clone()))
            else:
                self._waiting.setdefault(_memory(tensor), []).append(tensor)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Save what the operation overwrites, then perform it."""
        kwargs = kwargs or {}
        for position, name in written_arguments(func):
            given = args[position] if position < len(args) else kwargs.get(name)
            for tensor in (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)):
                for own in self._waiting.pop(_memory(tensor), ()):
                    self.saved.append((own, own.detach().clone()))
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _RandomState:
    """The state of Python's generator, and of NumPy's if NumPy was imported."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), sys.modules.get("numpy")
        self.numpy_state = self.numpy.random.get_state() if self.numpy else None

    def restore(self) -> None:
        """Set both generators back."""
        random.setstate(self.python)
        if self.numpy:
            self.numpy.random.set_state(self.numpy_state)


# --- attributes that a forward fills --------------------------------------------------------------


def empty_slots(model: nn.Module) -> list[Slot]:
    """Return the attributes that hold nothing yet, where a forward may keep state later."""
    return [
        (module, key)
        for module in model.modules()
        for table in (vars(module), module._buffers)
        for key, held in table.items()
        if held is None or (type(held) in (dict, list) and not held and key not in _TORCH_TABLES)
    ]


_TORCH_TABLES = frozenset(vars(nn.Module()))


def clear_slots(slots: list[Slot]) -> list[Held]:
    """Empty the slots of tensors that a run left there, and return what was removed.

    Such tensors belong to a batch that is over, and have the widths that the model had then.
    """
    removed: list[Held] = [
        (table, key, table[key])
        for module, key in slots
        for table in (vars(module), module._buffers)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(table.get(key)))
    ]
    for table, key, held in removed:
        table[key] = held.__class__() if isinstance(held, (dict, list)) else None
    return removed


@contextmanager
def slots_cleared(slots: list[Slot]) -> Iterator[None]:
    """Context manager: clear the slots, and put their contents back afterwards."""
    removed = clear_slots(slots)
    try:
        yield
    finally:
        for table, key, held in removed:
            table[key] = held


# --- torch's settings -----------------------------------------------------------------------------


def on_host() -> AbstractContextManager[object]:
    """Context manager: create tensors on the CPU, whatever the user's default device is."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def without_fused_paths(model: nn.Module) -> Iterator[None]:
    """Context manager: run attention and recurrent layers operation by operation.

    In eval mode both take a fused path otherwise, inside which channels cannot be followed.
    """
    with fused_kernels_off(model.modules()):
        yield
