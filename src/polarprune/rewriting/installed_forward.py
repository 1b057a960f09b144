"""Make a module run a captured forward.

The module becomes an instance of a subclass of its own class, whose forward runs the graphs. Plain
numbers that the original code read from `self` are constants in the graphs, so the subclass
refuses to change them. Copies and pickles of the module run the same graphs: the pickle holds them
as plain data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PruneError
from ..torch_internals.class_swaps import set_class, subclass
from ..torch_internals.markers import class_origin, set_class_origin, set_source_graph
from ..tracing.model_state import Args, Kwargs
from ..tracing.recorder import Forward
from .call_matching import graph_arguments
from .captured_forward import CapturedForward
from .interpreter import runner
from .stored_graphs import decode, encode

LONGEST_INDEX = 4096  # entries of a vector of integers that a graph may hold as a constant


class ForwardClass:
    """A subclass of a module's class whose forward runs captured graphs.

    No module defines the subclass, so pickle stores what it was made from instead: the original
    class by its name, and the graphs as plain data, which are checked when they are read.

    Args:
        base: The class of the module, or the `ForwardClass` that it is itself.
        captured: The graphs to run.
        from_file: The graphs come from a file: run them with limits on memory (see `runner`).
        integers_free: Allow other integers, such as widths, as attributes of the module.
        path: The name of the module, for messages.
    """

    def __init__(
        self,
        base: type[nn.Module] | ForwardClass,
        captured: CapturedForward,
        from_file: bool,
        integers_free: bool,
        path: str = "",
    ) -> None:
        self.base, self.captured, self.path = base, captured, path
        self.from_file, self.integers_free = from_file, integers_free
        family: type[nn.Module] = base.made if isinstance(base, ForwardClass) else base
        owner = f"{path} ({family.__name__})" if path else family.__name__
        forward = _forward_of(captured, owner, from_file)
        with suppress(TypeError, ValueError):  # torch.export reads the signature
            forward.__signature__ = inspect.signature(family.forward)  # type: ignore[attr-defined]
        members: dict[str, object] = {
            "forward": forward,
            "__setattr__": _setter(family, integers_free, path),
            "__reduce_ex__": lambda module, protocol: self._reduced(module, protocol),
        }
        self.made: type[nn.Module] = subclass(family, members)
        set_class_origin(self.made, self)

    def _reduced(self, module: nn.Module, protocol: int) -> object:
        """Return what pickle and `copy` need to make a module of this class again."""
        standard = object.__reduce_ex__(module, max(protocol, 2))
        if type(module) is not self.made or not isinstance(standard, tuple):
            return standard  # of a further subclass, such as that of a parametrized module
        return (_new_module, (self,), *standard[2:])

    def __deepcopy__(self, memo: object) -> ForwardClass:
        return self  # copied modules share their class

    def __reduce__(self) -> tuple[object, ...]:
        flags = self.from_file, self.integers_free, self.path
        return _from_data, (self.base, encode(self.captured), *flags)


def _from_data(
    base: type[nn.Module] | ForwardClass,
    data: object,
    from_file: bool,
    integers_free: bool,
    path: str = "",
) -> ForwardClass:
    """Return the class whose pickle holds these data, which are checked first."""
    return ForwardClass(base, decode(data), from_file, integers_free, path)


def _new_module(family: ForwardClass) -> nn.Module:
    """Return a module without attributes, which pickle and copies fill."""
    return family.made.__new__(family.made)


def with_forward(
    module: nn.Module,
    captured: CapturedForward,
    *,
    path: str = "",
    from_file: bool = False,
    integers_free: bool = False,
) -> nn.Module:
    """Make the module run the captured graphs, in place, and return it.

    Assigning another value to a plain attribute raises a PruneError afterwards: the new forward
    would not read it.

    Args:
        module: The module, or one of the same class with other widths.
        captured: The graphs to run.
        path: The name of the module, for messages.
        from_file: The graphs come from a file: run them with limits on memory (see `runner`).
        integers_free: Allow other integers, such as widths, as attributes.
    """
    origin = class_origin(type(module))
    base = origin if isinstance(origin, ForwardClass) else type(module)
    made = ForwardClass(base, captured, from_file, integers_free, path).made
    set_class(module, made)
    vars(module).pop("forward", None)  # an instance attribute would hide the method of the class
    return module


def _forward_of(captured: CapturedForward, owner: str, from_file: bool) -> Forward:
    """Return a `forward(self, *args, **kwargs)` that runs the captured graphs."""
    functions = {
        mode: runner(graph, owner=owner, from_file=from_file)
        for mode, graph in captured.graphs.items()
    }
    count, by_name = captured.positional_count, captured.form is None
    inputs_of = _inputs_by_name(captured) if by_name else _inputs_by_form(captured, owner)

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        function = functions["train" if self.training else "eval"]
        if len(args) == count and not kwargs:  # a fast path, which torch.compile can follow
            return function(self, *args)
        return function(self, *inputs_of(self, args, kwargs))

    if captured.form is None:
        set_source_graph(forward, captured.graphs["train"])
    return forward


def _inputs_by_form(
    captured: CapturedForward, owner: str
) -> Callable[[nn.Module, Args, Kwargs], list[object]]:
    """Return a function that finds the inputs of the graph by the structure of a call."""
    return lambda module, args, kwargs: graph_arguments(captured, module, args, kwargs, owner)


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


def _setter(
    family: type[nn.Module], integers_free: bool, path: str
) -> Callable[[nn.Module, str, Any], None]:
    """Return a `__setattr__` that refuses changes which a rewritten forward would ignore."""
    named = f"this module ({path})" if path else "this module"

    def set_unless_fixed(self: nn.Module, name: str, value: Any) -> None:
        known = plain_attributes(self)
        free = integers_free and type(value) is int
        if name in known and value != known[name] and not free:
            raise PruneError(
                f"{family.__name__}.{name} = {value!r}: the forward of {named} was rewritten "
                f"with {known[name]!r} and does not read the attribute any more. Set it before "
                f"pruning."
            )
        family.__setattr__(self, name, value)

    return set_unless_fixed


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
    """Return the attributes of a module that are numbers, booleans or strings."""
    kinds = (bool, int, float, str)
    return {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k != "training"}
