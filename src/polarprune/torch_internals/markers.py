"""Every mark that polarprune attaches to an object, and those of others that it reads.

A mark is an attribute that says something about a class, a function or a module that its type does
not say: this hook belongs to a gate, this forward was made from that graph. The names of all marks
of polarprune start with `polarprune_`, so that they do not clash with names of the user. The marks
of others are those of `torch.compile` and of accelerate.

Objects of libraries that polarprune does not import, such as the config of a model, a logger or a
wrapped optimizer, are recognised by the attributes that their users know. That is done where they
come in: `surgery/config_entries.py`, `integrations/loggers.py` and `validation/optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from torch import fx, nn

Marked = TypeVar("Marked")

_GATE = "polarprune_is_gate"
_EXPOSED = "polarprune_exposed"
_SOURCE = "polarprune_code"
_RECIPE = "polarprune_recipe"
_ORIGIN = "polarprune_origin"
_RUN = "polarprune_run"
STATE = "polarprune_state"  # also the name of the entry in the model's state dict


def gate_part(thing: Marked) -> Marked:
    """Mark a class or a hook as a part of gates, which export removes. Usable as a decorator."""
    setattr(thing, _GATE, True)
    return thing


def is_gate_part(thing: object) -> bool:
    """Return whether a module or a hook was marked with `gate_part`."""
    return bool(getattr(thing, _GATE, False))


def mark_weight_exposed(module: nn.Module) -> None:
    """Note that a parametrization now computes the weight that this module's forward computed."""
    setattr(type(module), _EXPOSED, True)


def is_weight_exposed(module: nn.Module) -> bool:
    """Return whether `mark_weight_exposed` was called for this module, or for its original."""
    return bool(getattr(type(module), _EXPOSED, False))


def set_source_graph(forward: Callable[..., object], graph: fx.Graph) -> None:
    """Attach to a forward the graph that it runs: fx cannot trace the forward itself again."""
    setattr(forward, _SOURCE, graph)


def source_graph(forward: object) -> fx.Graph | None:
    """Return the graph that `set_source_graph` attached to a forward, or None."""
    graph = getattr(forward, _SOURCE, None)
    return graph if isinstance(graph, fx.Graph) else None


def set_class_origin(family: type[nn.Module], origin: object) -> None:
    """Record how a generated class was made, so that pickle can store it.

    Args:
        family: The class.
        origin: An object that pickle can store and that makes such a class again.
    """
    setattr(family, _ORIGIN, origin)


def class_origin(family: type[nn.Module]) -> object | None:
    """Return what `set_class_origin` attached to this class itself, not to a parent, or None."""
    return vars(family).get(_ORIGIN)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` returned this module, or `module.compile()` ran."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def uncompiled(model: Marked) -> Marked:
    """Return the module inside of what `torch.compile` returned, or the module itself."""
    inner: Marked = getattr(model, "_orig_mod", model)
    return inner


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate loads the weights of this module only while it runs."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(one, "offload", False) for one in hooks)


def attach_recipe(model: nn.Module, recipe: Mapping[str, object]) -> None:
    """Attach to a pruned model the recipe that made it, as plain data; `save` stores it."""
    setattr(model, _RECIPE, recipe)


def attached_recipe(model: object) -> dict[str, object] | None:
    """Return the recipe that `attach_recipe` attached to a model, or None."""
    recipe: dict[str, object] | None = getattr(model, _RECIPE, None)
    return recipe


def attach_run(model: nn.Module, run: Mapping[str, object]) -> None:
    """Attach to the model in a checkpoint of Ultralytics what a run needs to resume."""
    setattr(model, _RUN, run)


def attached_run(model: object) -> dict[str, Any] | None:
    """Return what `attach_run` attached to a model, or None."""
    run: dict[str, Any] | None = getattr(model, _RUN, None)
    return run


def detach_run(model: nn.Module) -> None:
    """Undo `attach_run`."""
    delattr(model, _RUN)


class StateHooks(Protocol):
    """The hooks that put the state of a pruner into the state dict of its gated model."""

    def inert(self) -> StateHooks:
        """Return hooks for a copy of the model that the pruner does not follow."""

    def leave(self, module: nn.Module) -> None:
        """Remove these hooks from a module."""


def attach_state(model: nn.Module, hooks: StateHooks) -> None:
    """Attach to a gated model the hooks of its state dict.

    Tools that look up the keys of a state dict in the model find an attribute under this name.
    """
    setattr(model, STATE, hooks)


def attached_state(model: nn.Module) -> StateHooks | None:
    """Return the hooks that `attach_state` attached to a model, or None."""
    hooks: StateHooks | None = vars(model).get(STATE)
    return hooks
