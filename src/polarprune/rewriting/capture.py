"""Record a module's forward as a graph, by running it on the arguments of the example.

The result is a `CapturedForward`, or `Refused` with the reason. Each child of the module becomes a
single node. The module and torch are unchanged afterwards.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ..errors import PruneError
from ..torch_internals.class_swaps import derive_class
from ..torch_internals.patches import factories_replaced, fx_wrap_ignored
from ..tracing.model_state import Args, Example, Kwargs, as_call, restored, without_fused_paths
from .allowed_calls import FACTORIES
from .call_form import encode_form, flatten, rebuild
from .call_matching import form_of
from .captured_forward import PLAIN_TYPES, CapturedForward, Refused
from .side_effects import side_effects_refused
from .stored_graphs import encode_graph
from .value_proxies import ProxiesInArguments, ValueTracer

# Nodes without effect: they can be erased if nothing reads them.
_PURE = (
    getattr,
    operator.getitem,
    "size",
    "dim",
    operator.eq,
    operator.ne,
    operator.lt,
    operator.gt,
    operator.le,
    operator.ge,
    operator.mod,
    operator.floordiv,
    operator.add,
    operator.sub,
    operator.mul,
)


@dataclass
class Captures:
    """The forwards of several modules, by their names: captured, or refused with the reason."""

    captured: dict[str, CapturedForward] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)


def capture_all(model: nn.Module, example: Example, paths: Iterable[str]) -> Captures:
    """Capture the forward of these modules in a run of the model on the example.

    Args:
        model: The model.
        example: Its inputs.
        paths: Names of modules in the model.

    Raises:
        Exception: Whatever the model raises if it does not run on the example.
    """
    paths = list(paths)
    calls, forms = _observed_calls(model, example, paths)
    uncalled = [path for path in paths if path not in calls]
    found = Captures(refused=dict.fromkeys(uncalled, Refused("the example does not call it")))
    # Each module is captured in the state that it had before that run.
    with restored(model, False), without_fused_paths(model):
        for path, call in calls.items():
            one = (
                Refused("the example calls it several times, with different kinds of arguments")
                if len(forms[path]) > 1
                else capture(model.get_submodule(path), *call)
            )
            if isinstance(one, Refused):
                found.refused[path] = one
            else:
                found.captured[path] = one
    return found


def _observed_calls(
    model: nn.Module, example: Example, paths: Iterable[str]
) -> tuple[dict[str, tuple[Args, Kwargs]], dict[str, set[str]]]:
    """Run the model; return the arguments of the first call of each module, and all their forms."""
    calls: dict[str, tuple[Args, Kwargs]] = {}
    forms: dict[str, set[str]] = {}

    def hook(path: str) -> Callable[[nn.Module, Args, Kwargs], None]:
        def remember(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            forms.setdefault(path, set()).add(form_of(args, kwargs))
            calls.setdefault(path, tree_map_only(Tensor, Tensor.clone, (args, kwargs)))

        return remember

    args, kwargs = as_call(example)
    handles: list[RemovableHandle] = []
    try:
        for path in paths:
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(hook(path), with_kwargs=True))
        with restored(model, False), without_fused_paths(model):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls, forms


def capture(module: nn.Module, args: Args, kwargs: Kwargs) -> CapturedForward | Refused:
    """Capture the module's forward for calls like this one.

    Returns:
        The graphs for train and eval mode, or the reason why the forward cannot be captured.
    """
    chosen = vars(module).get("forward")
    if chosen is not None and getattr(chosen, "__self__", None) is not module:
        return Refused("its forward was replaced by a function that is not a method of it")
    leaves, form = flatten((args, kwargs))
    fixed: Kwargs = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, PLAIN_TYPES)}
    graphs = {}
    try:
        encode_form(form)  # raises if the form cannot be stored in a file
        for mode in ("train", "eval"):
            double = copy.copy(module)  # attributes that forward sets stay off the original
            double.training = mode == "train"
            graphs[mode] = _trace(double, (args, kwargs), leaves)
            encode_graph(graphs[mode])  # raises if the graph cannot be stored in a file
    except Exception as error:  # the user's code may raise anything on a proxy
        return Refused(reason_of(error))
    return CapturedForward(form, fixed, graphs)


def reason_of(error: Exception) -> str:
    """Return in one line why an attempt to capture failed."""
    line = (str(error).strip().splitlines() or [""])[0][:200]
    if isinstance(error, PruneError):
        return line
    return f"its code fails while it is captured ({type(error).__name__}: {line})"


def _trace(module: nn.Module, call: tuple[Args, Kwargs], leaves: Sequence[object]) -> fx.Graph:
    """Return the graph of one mode. The module is a copy whose class may be changed."""
    names = [f"x{i}" for i, leaf in enumerate(leaves) if not isinstance(leaf, PLAIN_TYPES)]
    inputs = {
        f"x{i}": leaf.clone() if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)
    }
    tracer = ValueTracer(names, inputs)
    chosen = vars(module).pop("forward", None)  # a method it chose: self.forward = self.other
    body = type(module).forward if chosen is None else chosen.__func__

    def forward(self: nn.Module, *given: object) -> object:
        proxies = dict(zip(names, given, strict=True))
        mine = [proxies.get(f"x{i}", leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = rebuild(call, mine)
        with factories_replaced(FACTORIES, tracer.factory), ProxiesInArguments(tracer):
            return body(self, *args, **kwargs)

    derive_class(module, {"forward": forward})
    with (
        torch.no_grad(),
        fx_wrap_ignored(),
        side_effects_refused(module, lambda: tracer.computing),
    ):
        graph = tracer.trace(module)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in _PURE:
            graph.erase_node(node)
    return graph
