"""Make a module run a captured forward.

The module becomes an instance of a subclass of its own class, whose forward runs the graphs. Plain
numbers that the original code read from `self` are constants in the graphs, so the subclass
refuses to change them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PruneError
from ..torch_internals.class_swaps import derive_class
from ..torch_internals.markers import set_source_graph
from .call_matching import Args, Kwargs, graph_arguments
from .captured_forward import CapturedForward
from .interpreter import runner

LONGEST_INDEX = 4096  # entries of a vector of integers that a graph may hold as a constant
Forward = Callable[..., object]


def with_forward(
    module: nn.Module, captured: CapturedForward, *, from_file: bool = False
) -> nn.Module:
    """Make the module run the captured graphs, in place, and return it.

    Args:
        module: The module, or one of the same class with other widths.
        captured: The graphs to run.
        from_file: The graphs come from a file: run them with limits on memory (see `runner`).
    """
    return with_method(module, forward_of(captured, from_file=from_file))


def forward_of(captured: CapturedForward, *, from_file: bool = False) -> Forward:
    """Return a `forward(self, *args, **kwargs)` that runs the captured graphs."""
    functions = {mode: runner(g, from_file=from_file) for mode, g in captured.graphs.items()}
    count = captured.positional_count
    inputs_of = _inputs_by_name(captured) if captured.form is None else _inputs_by_form(captured)

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        function = functions["train" if self.training else "eval"]
        if len(args) == count and not kwargs:  # the short way, which torch.compile can follow
            return function(self, *args)
        return function(self, *inputs_of(self, args, kwargs))

    if captured.form is None:
        set_source_graph(forward, captured.graphs["train"])
    return forward


def _inputs_by_form(captured: CapturedForward) -> Callable[[nn.Module, Args, Kwargs], list[object]]:
    """Return a function that finds the inputs of the graph by the structure of a call."""
    return lambda module, args, kwargs: graph_arguments(captured, module, args, kwargs)


def _inputs_by_name(captured: CapturedForward) -> Callable[[nn.Module, Args, Kwargs], list[object]]:
    """Return a function that finds the inputs of the graph by the names of its placeholders."""
    inputs = [node for node in captured.graphs["train"].nodes if node.op == "placeholder"]
    names = [str(node.target) for node in inputs]
    defaults: Kwargs = {str(node.target): node.args[0] for node in inputs if node.args}

    def arguments(module: nn.Module, args: Args, kwargs: Kwargs) -> list[object]:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        twice = [name for name in names[: len(args)] if name in kwargs]
        if len(args) > len(names) or twice or sorted(given) != sorted(names):
            raise TypeError(f"{type(module).__name__} takes the arguments {', '.join(names)}")
        return [given[name] for name in names]

    return arguments


def with_method(module: nn.Module, forward: Forward, *, integers_free: bool = False) -> nn.Module:
    """Give the module this forward through a subclass of its class, in place, and return it.

    Assigning another value to a plain attribute raises a PruneError afterwards: the new forward
    would not read it. `integers_free` allows other integers, such as widths.
    """
    family = type(module)
    vars(module).pop("forward", None)  # an instance attribute would hide the method of the class

    def set_unless_fixed(self: nn.Module, name: str, value: Any) -> None:
        known = plain_attributes(self)
        free = integers_free and type(value) is int
        if name in known and value != known[name] and not free:
            raise PruneError(
                f"{family.__name__}.{name} = {value!r}: the forward of this module was rewritten "
                f"with {known[name]!r} and does not read the attribute any more. Set it before "
                f"pruning."
            )
        family.__setattr__(self, name, value)

    with suppress(TypeError, ValueError):  # torch.export reads the signature
        forward.__signature__ = inspect.signature(family.forward)  # type: ignore[attr-defined]
    derive_class(module, {"forward": forward, "__setattr__": set_unless_fixed})
    return module


def fixed_values(module: nn.Module) -> dict[str, object]:
    """Return all attributes of a module that are constants in its rewritten forward."""
    held = (*vars(module).items(), *module._buffers.items())
    orders = {name: value.tolist() for name, value in held if is_index_vector(value)}
    return {**plain_attributes(module), **orders}


def is_index_vector(value: object) -> bool:
    """Return whether a value is a short vector of integers, which a graph holds as a list."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() > LONGEST_INDEX:
        return False
    return value.dtype == torch.int64 and not value.is_meta


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return the numbers, truth values and texts that a module holds."""
    kinds = (bool, int, float, str)
    return {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k != "training"}
