"""Write a module's forward down as a graph, by running it.

torch.fx traces with proxies that know nothing, so code that looks at a size or a type fails. The
proxies here know the value they stand for: code may branch on it, and the way that was taken is
written down. Sizes that are read from tensors stay readings, so another batch works as well; where
code goes on with a size as a plain number, the graph checks it (`expect`). The children of the
module stay opaque.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import PruneError
from ..tracing.model_state import Example, as_call, restored, without_fused_paths
from ..tracing.source_lines import SOURCE_LINE, user_line
from .allowed_calls import FACTORIES
from .captured_forward import LONGEST, PLAIN, CapturedForward, form_of, nothing_lost
from .interpreter import expect, expect_pieces
from .stored_graphs import encode_graph


def capture_all(
    model: nn.Module, example: Example, paths: Iterable[str]
) -> dict[str, CapturedForward]:
    """What these modules compute in a run on the example, where that can be written down."""
    calls: dict[str, tuple[Any, Any]] = {}
    forms: dict[str, set[str]] = {}

    def hook(path: str) -> Any:
        def remember(module: nn.Module, args: Any, kwargs: Any) -> None:
            forms.setdefault(path, set()).add(form_of(args, kwargs))
            calls.setdefault(path, pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs)))

        return remember

    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook(path), with_kwargs=True)
        for path in paths
    ]
    found: dict[str, CapturedForward] = {}
    args, kwargs = as_call(example)
    try:
        with restored(model, False), without_fused_paths(model):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    with restored(model, False), without_fused_paths(model):  # as if the run before had not been
        for path, call in calls.items():
            several = len(forms[path]) > 1
            captured = None if several else capture(model.get_submodule(path), *call)
            if captured is not None:
                found[path] = captured
    return found


class _Known(fx.Proxy):
    """A proxy that knows its value."""

    value: Any = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        tracer: Any = self.tracer
        if callable(found):
            return lambda *args, **kwargs: tracer.create_proxy(
                "call_method", name, (self, *args), kwargs
            )
        return tracer.create_proxy("call_function", getattr, (self, name), {})

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.value, Mapping):
            return iter(list(self.value))
        return iter([operator.getitem(self, i) for i in range(len(self))])

    def keys(self) -> Any:
        return self.value.keys()

    def _said(self, result: Any) -> Any:
        """A plain value that code goes on with: another one later would take another way."""
        tracer: Any = self.tracer
        if isinstance(self.value, Tensor) or self.node in tracer.from_data:
            raise PruneError("code that depends on the values in a tensor")
        tracer.create_proxy("call_function", expect, (self, self.value), {})
        return result

    def __len__(self) -> int:
        if isinstance(self.value, Tensor):
            return int(self.size(0))
        if not isinstance(self.value, torch.Size):  # a tensor always has as many axes, but
            self.tracer.create_proxy("call_function", expect_pieces, (self, len(self.value)), {})
        return len(self.value)

    def __bool__(self) -> bool:
        return bool(self._said(bool(self.value)))

    def __index__(self) -> int:
        return int(self._said(operator.index(self.value)))

    def __int__(self) -> int:
        return int(self._said(int(self.value)))

    def __float__(self) -> float:
        return float(self._said(float(self.value)))

    def __round__(self, digits: Any = None) -> Any:
        return self._said(round(self.value, digits))

    def __contains__(self, item: Any) -> bool:
        return bool(self._said(item in self.value))

    def __eq__(self, other: Any) -> Any:
        """Of two shapes, size by size: some of them may be widths."""
        theirs = other.value if type(other) is _Known else other
        if not isinstance(self.value, (tuple, list)) or not isinstance(theirs, (tuple, list)):
            return self.tracer.create_proxy("call_function", operator.eq, (self, other), {})
        pairs = zip(self, other, strict=False)
        return len(self) == len(other) and all(bool(one == another) for one, another in pairs)

    def __ne__(self, other: Any) -> Any:
        same = self == other
        if isinstance(same, bool) and isinstance(self.value, (tuple, list)):
            return not same
        return self.tracer.create_proxy("call_function", operator.ne, (self, other), {})

    def __hash__(self) -> int:
        return hash(self.value)

    def __setitem__(self, index: Any, item: Any) -> None:
        tracer: Any = self.tracer
        tracer.create_proxy("call_function", operator.setitem, (self, index, item), {})


class _Tracer(fx.Tracer):
    """Runs the module while it writes down; children are opaque, containers are not."""

    proxy_buffer_attributes = True

    def __init__(self, names: list[str], inputs: dict[str, Any]) -> None:
        none: Any = ()  # math.sqrt(width) is a number like any other
        super().__init__(autowrap_modules=none)
        self.names, self.inputs = names, inputs
        self.values: dict[fx.Node, Any] = {}
        self.from_data: set[fx.Node] = set()  # numbers that were read out of a tensor
        self.running = False  # a node is being computed: nothing is written down

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """The names of the placeholders are ours: the forward takes any number of arguments."""
        given = [self.create_proxy("placeholder", name, (), {}) for name in self.names]
        return root_fn, [self.root, *given]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Known(node, self)

    def create_arg(self, a: Any) -> Any:
        if type(a) is _Known:
            return a.node
        if isinstance(a, torch.Size):
            return tuple(a)
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            raise PruneError("a tensor of unknown origin")
        return super().create_arg(a)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any,
                     **named: Any) -> Any:  # fmt: skip
        if target in (operator.getitem, operator.setitem):
            args = (args[0], _spelled_out(args[1]), *args[2:])
        known: Any = super().create_proxy(kind, target, args, kwargs, *more, **named)
        known.node.meta[SOURCE_LINE] = user_line()
        before, self.running = self.running, True
        try:
            value = self._compute(known.node)
        finally:
            self.running = before
        self.values[known.node] = known.value = value
        sources = set(known.node.all_input_nodes)
        if target in ("item", "tolist") or (
            not isinstance(value, Tensor) and sources & self.from_data
        ):
            self.from_data.add(known.node)
        if isinstance(value, bool) and target in _COMPARISONS:
            return bool(known)
        return value if value is None or isinstance(value, (bool, str)) else known

    def _compute(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        target: Any = node.target
        if node.op == "placeholder":
            return self.inputs[target]
        if node.op == "get_attr":
            return operator.attrgetter(target)(self.root)
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs) if node.op == "call_function" else None

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.running:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _spelled_out(index: Any) -> Any:
    """Vectors of integers that the code holds somewhere, as lists."""
    if type(index) is tuple:
        return tuple(_spelled_out(item) for item in index)
    vector = type(index) is Tensor and index.dim() == 1 and index.numel() <= LONGEST
    return index.tolist() if vector and index.dtype == torch.int64 else index


_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


class _Functions(TorchFunctionMode):
    """Functions that are given a known value somewhere among their arguments."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tracer.running or not _any_known((args, kwargs)):
            return func(*args, **kwargs)
        return fx.Proxy.__torch_function__(func, types, args, kwargs)


@contextmanager
def _factories(tracer: _Tracer) -> Iterator[None]:
    """torch.zeros(n) and the like do not accept proxies of sizes: replaced while tracing."""

    def written(function: Any) -> Any:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            if tracer.running:
                return function(*args, **kwargs)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return make

    for name, function in FACTORIES.items():
        setattr(torch, name, written(function))
    try:
        yield
    finally:
        for name, function in FACTORIES.items():
            setattr(torch, name, function)


@contextmanager
def _nothing_wrapped() -> Iterator[None]:
    """fx.wrap hides functions of the user from fx; here their code is what matters."""
    wrapped: dict[Any, Any] = getattr(_symbolic_trace, "_wrapped_fns_to_patch", {})
    before = dict(wrapped)
    wrapped.clear()
    try:
        yield
    finally:
        wrapped.update(before)


def _any_known(tree: Any) -> bool:
    if type(tree) is _Known:
        return True
    if isinstance(tree, dict):
        return any(_any_known(item) for item in tree.values())
    if isinstance(tree, slice):
        return any(_any_known(item) for item in (tree.start, tree.stop, tree.step))
    return isinstance(tree, (tuple, list)) and any(_any_known(item) for item in tree)


def capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CapturedForward | None:
    """The module's forward for calls like this one, or None if it cannot be written down."""
    chosen = vars(module).get("forward")
    if chosen is not None and getattr(chosen, "__self__", None) is not module:
        return None  # replaced by the user, with code that may belong to anything
    leaves, form = pytree.tree_flatten((args, kwargs))
    fixed = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, PLAIN)}
    graphs = {}
    try:
        written = pytree.treespec_dumps(form)
        for mode in ("train", "eval"):
            double = copy.copy(module)  # what forward remembers must not end up in the module
            double.training = mode == "train"
            graphs[mode] = _trace(double, leaves, form)
            encode_graph(graphs[mode])  # can it be stored?
    except Exception:  # whatever the user's code does with a proxy
        return None
    return CapturedForward(written, fixed, graphs)


def _trace(module: nn.Module, leaves: list[Any], form: pytree.TreeSpec) -> fx.Graph:
    names = [f"x{i}" for i, leaf in enumerate(leaves) if not isinstance(leaf, PLAIN)]
    family = type(module)
    chosen = vars(module).pop("forward", None)  # a method that it chose: self.forward = self.other
    body = family.forward if chosen is None else chosen.__func__

    def call(self: nn.Module, given: dict[str, Any]) -> Any:
        mine = [given.get(f"x{i}", leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(mine, form)
        with _factories(tracer), _Functions(tracer):
            return body(self, *args, **kwargs)

    def forward(self: nn.Module, *given: Any) -> Any:
        return call(self, dict(zip(names, given, strict=True)))

    module.__class__ = type(family.__name__, (family,), {"forward": forward})
    inputs = {f"x{i}": leaf.clone() if isinstance(leaf, Tensor) else leaf
              for i, leaf in enumerate(leaves)}  # fmt: skip
    tracer = _Tracer(names, inputs)
    with torch.no_grad(), _nothing_wrapped(), nothing_lost(module, lambda: tracer.running):
        graph = tracer.trace(module)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in _READINGS:
            graph.erase_node(node)
    return graph


_READINGS = (getattr, operator.getitem, "size", "dim", operator.eq, operator.ne, operator.lt,
             operator.gt, operator.le, operator.ge, operator.mod, operator.floordiv,
             operator.add, operator.sub, operator.mul)  # fmt: skip
