"""Find the function that runs a node of a graph, and define those that only graphs call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sized
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ..errors import PruneError

Function: TypeAlias = Callable[..., object]


class OtherSizes(PruneError):
    """Raised by a rewritten forward whose code depends on the sizes that the example has."""


class CallError(PruneError):
    """Says what is wrong with a call in a graph; `interpreter` adds the module and the line.

    Attributes:
        located: The class of the error with the module and the line.
    """

    located: type[PruneError] = PruneError


class _SizesDiffer(CallError):
    located = OtherSizes


def function_of(node: fx.Node, *, from_file: bool) -> Function:
    """Return the function that runs a node.

    The first argument of the function is the module if the node calls a submodule or reads an
    attribute.

    Args:
        node: The node.
        from_file: The graph comes from a file: return zeros for uninitialized memory.
    """
    target = node.target
    if node.op == "call_module":
        return _child_caller(str(target))
    if node.op == "get_attr":
        return _attribute_reader(str(target))
    if from_file:
        target = _ZEROED.get(target, target)
    if isinstance(target, str):
        return _method_caller(target)
    return _CHECKED.get(target, target)


def _method_caller(name: str) -> Function:
    """Return a function that calls this method of its first argument."""

    def call(owner: object, *args: object, **kwargs: object) -> object:
        if not isinstance(owner, _ALLOWED_OWNERS):
            raise CallError(f"{name}: called on {type(owner).__name__}, which is not a tensor.")
        return getattr(owner, name)(*args, **kwargs)

    return call


def _child_caller(path: str) -> Function:
    """Return a function that calls the child at this path of its first argument."""
    *parents, leaf = path.split(".")

    def call(module: Any, *args: object, **kwargs: object) -> object:
        for name in parents:
            module = module._modules[name]
        return module._modules[leaf](*args, **kwargs)

    return call


def _attribute_reader(path: str) -> Function:
    """Return a function that reads the parameter or buffer at this path of a module."""
    *parents, leaf = path.split(".")

    def read(module: Any) -> object:
        for name in parents:
            module = module._modules[name]
        return getattr(module, leaf)

    return read


def read_attribute(owner: object, name: str) -> object:
    """Return an attribute of a tensor, such as `shape`.

    Raises:
        PruneError: The owner is neither a tensor nor one of the other types that stored code may
            use, or the attribute is a method.
    """
    if not isinstance(owner, _ALLOWED_OWNERS):
        raise CallError(f"{name}: read from {type(owner).__name__}, which is not a tensor.")
    found: object = getattr(owner, name)
    if callable(found):
        raise CallError(f"{name}: this is a method of {type(owner).__name__}, not a value.")
    return found


def write_item(owner: object, index: Any, item: Any) -> None:
    """Run `owner[index] = item`, or raise a PruneError if the owner is not a tensor."""
    if not isinstance(owner, Tensor):
        raise CallError(f"an item is written into {type(owner).__name__}, which is not a tensor.")
    owner[index] = item


_ALLOWED_OWNERS = (Tensor, tuple, list, dict, torch.dtype, torch.device, int, float, torch.SymInt)
_CHECKED: dict[Function, Function] = {getattr: read_attribute, operator.setitem: write_item}
_ZEROED: dict[Function | str, Function | str] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    "new_empty": "new_zeros",
}


# --- our own functions that graphs may call -------------------------------------------------------
# Files store their names, and may pass their arguments by keyword: do not rename either.


def expect_pieces(found: Sized, example: int) -> None:
    """Check that a sequence still has the length that it had for the example."""
    expect(len(found), example)


def expect(found: object, example: object) -> None:
    """Check that a value is still the one of the example.

    The traced code branched on this value or used it as a constant, so the graph is valid for this
    value only.
    """
    if found != example:
        raise _SizesDiffer(
            f"the forward of this module was rewritten for the sizes of the example: it expects "
            f"{example} but got {str(found)[:200]}. Trace with an example of the size in use."
        )


def one_channel(x: Tensor) -> Tensor:
    """Return zeros with the shape of `x`, but one channel; many kernels refuse zero channels."""
    return x.new_zeros(x.shape[0], 1, *x.shape[2:])


def no_channel(x: Tensor) -> Tensor:
    """Return `x` without any of its channels."""
    return x[:, :0]


def one_point(x: Tensor) -> Tensor:
    """Return the first item of `x` along its first axis, and keep the axis."""
    return x[:1]
