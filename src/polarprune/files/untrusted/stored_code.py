"""Check stored code against the small model: what it reads and calls exists and can be called.

Which nodes are allowed is decided earlier, by `decode` in `rewriting.stored_graphs` and the names
in `rewriting.allowed_calls`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

from torch import fx, nn

from ...rewriting.captured_forward import CapturedForward
from ...rewriting.node_names import describe
from ...rewriting.size_limits import asks_too_much
from ...rewriting.stored_graphs import decode
from ...surgery.recipe import Recipe
from .require import require


def check_code(recipe: Recipe, small: nn.Module) -> None:
    """Check that stored code uses only what the small model has, with fitting arguments.

    Raises:
        PruneError: With the module and the operation that do not fit.
    """
    for path, data in recipe.rewired.items():
        module, code = small.get_submodule(path), decode(data)
        if code.form is None:
            _check_argument_names(module, code)
        for node in _nodes(code):
            _check_node(path, module, node)
        for node in _nodes(code):
            if node.op in ("call_module", "get_attr"):
                _check_target(path, module, node)


def _nodes(code: CapturedForward) -> Iterator[fx.Node]:
    return (node for graph in code.graphs.values() for node in graph.nodes)


def _check_argument_names(module: nn.Module, code: CapturedForward) -> None:
    """Check that code that takes its arguments by name has those of the class."""
    wanted = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [str(n.target) for n in code.graphs["train"].nodes if n.op == "placeholder"]
    known = all(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in wanted)
    fits = not known or names == [one.name for one in wanted]
    require(fits, f"{type(module).__name__} takes other arguments")


def _check_node(path: str, module: nn.Module, node: fx.Node) -> None:
    much = asks_too_much(node.target, node.args, dict(node.kwargs))
    require(not much, f"{path}: {describe(node)} asks for too many elements")
    child = _submodule(module, str(node.target)) if node.op == "call_module" else None
    fits = child is None or _can_be_called(child, node.args, node.kwargs)
    require(fits, f"{path}: {describe(node)} is called with other arguments")


def _check_target(path: str, module: nn.Module, node: fx.Node) -> None:
    """Check that the module that a node calls, or the tensor that it reads, exists."""
    target = str(node.target)
    if node.op == "call_module":
        exists = _submodule(module, target) is not None
    else:
        owner = _submodule(module, target.rpartition(".")[0])
        exists = owner is not None and _holds(owner, target.rpartition(".")[2])
    require(exists, f"{path or 'the model'} has no {target!r}")


def _can_be_called(child: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a call fits the signature of `forward`; True if hooks may change the call."""
    direct = type(child).__call__ is nn.Module.__call__ and not child._forward_pre_hooks
    if not direct or hasattr(child.forward, "__wrapped__"):
        return True
    try:
        signature = inspect.signature(child.forward)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _submodule(module: nn.Module | None, path: str) -> nn.Module | None:
    """Follow a path through `_modules` alone, which runs no code of the user's class."""
    for name in path.split(".") if path else []:
        module = None if module is None else module._modules.get(name)
    return module


def _holds(owner: nn.Module, name: str) -> bool:
    """Return True for a tensor, and for the number of groups, which convolutions read."""
    tensors = {**owner._parameters, **owner._buffers}
    return tensors.get(name) is not None or (
        name == "groups" and type(vars(owner).get(name)) is int
    )
