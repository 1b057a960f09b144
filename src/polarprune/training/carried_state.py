"""Store the state of a pruner in the `state_dict` of its model.

Frameworks store the states of the model and of the optimizer, and do not know about a pruner. Three
hooks of the model therefore add one entry to its state dict, remove it when such a dict is loaded,
and check the loaded gates. A copy of the model keeps the hooks, but they only pass the entry on: a
copy has no state of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from ..errors import PruneError
from ..rewriting.parametrizations import is_gated, parametrized
from ..torch_internals.markers import STATE, attach_state, is_gate_part
from ..validation.pruner_state import State
from .state_bytes import decode, encode


class Run(Protocol):
    """What the hooks need of a pruning run. `Resuming` implements it."""

    def current_state(self) -> State:
        """Return the state to store."""

    def entry_size(self) -> int:
        """Return the least number of bytes of the header of the stored state."""

    def shared_entry(self, entry: object) -> object:
        """Return the stored state, from another process if only that one has read it."""

    def resume(self, state: object) -> None:
        """Check a state, and continue from it."""

    def check_loaded_gates(self) -> None:
        """Compare the gates with the state after a state dict was loaded."""

    def add_copy(self, source: nn.Module, copy: nn.Module) -> None:
        """Register a deep copy of the gated model, or of a copy of it."""


class CarriedState:
    """The hooks of a gated model, or of a copy of one.

    Args:
        model: The gated model.
        run: The run of the model; None in a copy.
        origin: The run of the original model.
    """

    def __init__(
        self, model: nn.Module | None, run: Run | None, origin: weakref.ref[Run] | None
    ) -> None:
        self.run, self.origin = run, origin
        self.model = None if model is None else weakref.ref(model)

    def __call__(
        self, module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object
    ) -> None:
        """Add the entry to a state dict, in which no tensor of a gate shares memory."""
        _separate_gates(state, prefix)
        if self.run is not None:
            found = self.run.current_state()
            device = next(iter(found["alpha"].values())).device
            state[prefix + STATE] = encode(found, device, self.run.entry_size())

    def before_load(
        self, module: nn.Module, state: dict[str, Tensor], prefix: str, *others: object
    ) -> None:
        """Remove the entry from a state dict, and give the model its widths."""
        _check_has_gates(module, state, prefix)
        entry: object = state.pop(prefix + STATE, None)
        if entry is None and self.run is not None:
            _check_no_wrapper(state, prefix)
        _give_all_names(module, state, prefix)
        if self.run is not None:
            entry = self.run.shared_entry(entry)
            if entry is not None:
                self.run.resume(decode(entry))

    def after_load(self, module: nn.Module, keys: object) -> None:
        """Check the gates that were loaded."""
        if self.run is not None:
            self.run.check_loaded_gates()

    def inert(self) -> CarriedState:
        """Return hooks for a copy that the pruner does not follow."""
        return CarriedState(None, None, None)

    def leave(self, module: nn.Module) -> None:
        """Remove these hooks from a module."""
        tables: tuple[dict[int, Callable[..., object]], ...] = (
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        )
        for table in tables:
            for key, hook in list(table.items()):
                hook = getattr(hook, "hook", hook)  # torch wraps those that get the module
                if hook is self or getattr(hook, "__self__", None) is self:
                    del table[key]
        vars(module).pop(STATE, None)

    def __deepcopy__(self, memo: dict[int, object]) -> CarriedState:
        """Return the hooks of a copy, and register the copy with the pruner."""
        original = None if self.model is None else self.model()
        run = None if self.origin is None else self.origin()
        model = memo.get(id(original))
        if run is None or original is None or not isinstance(model, nn.Module):
            return self.inert()
        run.add_copy(original, model)
        return CarriedState(model, None, self.origin)

    def __reduce__(self) -> tuple[object, ...]:
        """Leave the pruner out of pickles."""
        return CarriedState, (None, None, None)


def _separate_gates(state: dict[str, Tensor], prefix: str) -> None:
    """Copy tensors of gates that a state dict holds under several names: safetensors needs that.

    Parameters themselves (`keep_vars=True`) stay.
    """
    seen: set[int] = set()
    for key, tensor in state.items():
        if key.startswith(prefix) and ".gates." in key and not tensor.requires_grad:
            if tensor.data_ptr() in seen:
                state[key] = tensor.clone()
            seen.add(tensor.data_ptr())


def _check_has_gates(model: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
    """Refuse weights of the model without gates; with `strict=False`, torch would skip them."""
    for name, _, _, parts in parametrized(model):
        if prefix + name in state and is_gated(parts):
            raise PruneError(
                f"load_state_dict: {prefix}{name} is a weight of the model without gates. Load "
                f"such weights before the Pruner is built, or load the state of a gated model. "
                f"Nothing was changed."
            )


def _check_no_wrapper(state: dict[str, Tensor], prefix: str) -> None:
    """Refuse the state of a wrapper; with `strict=False`, torch would skip all of it."""
    for key in state:
        if key.startswith(prefix) and key.endswith(f".{STATE}"):
            more = key.removeprefix(prefix).removesuffix(STATE)
            raise PruneError(
                f"load_state_dict: the names in this state begin with {more!r}, because it is the "
                f"state of a wrapper of the model. Load it into the wrapper, or remove that "
                f"prefix. Nothing was changed."
            )


def _give_all_names(model: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
    """Add the other names of gates of which a state dict has one.

    A gate is in the model as often as weights read it; `torch.distributed.checkpoint` spreads the
    first of its names only.
    """
    names: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if is_gate_part(module) and (module._parameters or module._buffers):
            names.setdefault(module, []).append(f"{prefix}{path}.")
    for module, stems in names.items():
        for leaf in (*module._parameters, *module._buffers):
            held = [state[stem + leaf] for stem in stems if stem + leaf in state]
            for stem in stems if held else []:
                state.setdefault(stem + leaf, held[0])


def carry_state(model: nn.Module, run: Run) -> None:
    """Add the state of a run to the state dict of its model."""
    hooks = CarriedState(model, run, weakref.ref(run))
    attach_state(model, hooks)
    model.register_state_dict_post_hook(hooks)
    model.register_load_state_dict_pre_hook(hooks.before_load)
    model.register_load_state_dict_post_hook(hooks.after_load)
