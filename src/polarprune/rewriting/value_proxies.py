"""Proxies that know the value they stand for, and the tracer that makes them.

torch.fx traces with proxies that know nothing, so code that branches on a size or a type fails.
The proxies here carry the value of the example. Code may branch on it; the graph holds the branch
that was taken. Sizes that code reads from tensors stay nodes of the graph, so the graph works for
another batch size. Where code turns a size into a plain number, a node `expect` checks in every
run that it is still the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ..errors import PruneError
from ..torch_internals.patches import OneThreadTracer
from ..tracing.source_lines import SOURCE_LINE, user_line
from .installed_forward import is_index_vector
from .interpreter import expect, expect_pieces

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


class ValueProxy(fx.Proxy):
    """A proxy that knows its value."""

    value: Any = None
    tracer: ValueTracer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the value, so that `isinstance` in the user's code gives its answer."""
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        """Write down that an attribute is read or a method is called."""
        tracer = self.tracer
        if callable(getattr(self.value, name)):
            return lambda *args, **kwargs: tracer.create_proxy(
                "call_method", name, (self, *args), kwargs
            )
        return tracer.create_proxy("call_function", getattr, (self, name), {})

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items of the value, each a proxy; over the keys of a mapping."""
        if isinstance(self.value, Mapping):
            return iter(list(self.value))
        create, count = self.tracer.create_proxy, len(self)
        return iter(
            [create("call_function", operator.getitem, (self, i), {}) for i in range(count)]
        )

    def keys(self) -> Any:
        """Return the keys of a mapping, which are constants."""
        return self.value.keys()

    def _checked(self, result: Any) -> Any:
        """Return a plain value that code continues with, and check it in every run.

        Another value would need another graph.
        """
        if isinstance(self.value, Tensor) or self.node in self.tracer.from_data:
            raise PruneError("its code depends on the values in a tensor")
        self.tracer.create_proxy("call_function", expect, (self, self.value), {})
        return result

    def __len__(self) -> int:
        """Return the length; that of a list is checked in every run."""
        if isinstance(self.value, Tensor):
            return int(self.tracer.create_proxy("call_method", "size", (self, 0), {}))
        if not isinstance(self.value, torch.Size):  # the number of axes never changes
            self.tracer.create_proxy("call_function", expect_pieces, (self, len(self.value)), {})
        return len(self.value)

    def __bool__(self) -> bool:
        return bool(self._checked(bool(self.value)))

    def __index__(self) -> int:
        return int(self._checked(operator.index(self.value)))

    def __int__(self) -> int:
        return int(self._checked(int(self.value)))

    def __float__(self) -> float:
        return float(self._checked(float(self.value)))

    def __round__(self, digits: int | None = None) -> object:
        return self._checked(round(self.value, digits))

    def __contains__(self, item: object) -> bool:
        return bool(self._checked(item in self.value))

    def __eq__(self, other: Any) -> Any:
        """Compare; two shapes size by size, because some sizes may be widths."""
        theirs = other.value if is_proxy(other) else other
        if not isinstance(self.value, (tuple, list)) or not isinstance(theirs, (tuple, list)):
            return self.tracer.create_proxy("call_function", operator.eq, (self, other), {})
        pairs = zip(self, other, strict=False)
        return len(self) == len(other) and all(bool(one == another) for one, another in pairs)

    def __ne__(self, other: Any) -> Any:
        """Compare, as `__eq__` does."""
        same = self == other
        if isinstance(same, bool) and isinstance(self.value, (tuple, list)):
            return not same
        return self.tracer.create_proxy("call_function", operator.ne, (self, other), {})

    def __hash__(self) -> int:
        return hash(self.value)

    def __setitem__(self, index: object, item: object) -> None:
        """Write down a write into a part of a tensor."""
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, item), {})


def is_proxy(thing: object) -> TypeGuard[ValueProxy]:
    """Return whether this is a proxy; `isinstance` cannot tell, as it sees the value's class."""
    return type(thing) is ValueProxy


class ValueTracer(OneThreadTracer):
    """Runs a module's forward while it writes down the graph.

    Children of the module are single nodes, except for `nn.Sequential`, whose children are.

    Args:
        names: The names of the placeholders.
        inputs: Their values.
    """

    proxy_buffer_attributes = True

    def __init__(self, names: list[str], inputs: Mapping[str, object]) -> None:
        super().__init__()  # without `math`: math.sqrt(width) is a number like any other
        self.names, self.inputs = names, inputs
        self.values: dict[fx.Node, Any] = {}
        self.from_data: set[fx.Node] = set()  # numbers that were read out of a tensor
        self.computing = False  # the value of a node is being computed: nothing is written down

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Trace through containers only."""
        return type(m).forward is not nn.Sequential.forward

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: object = None
    ) -> tuple[Any, list[Any]]:
        """Create the placeholders; fx would name them after the arguments of the forward."""
        given = [self.create_proxy("placeholder", name, (), {}) for name in self.names]
        return root_fn, [self.root, *given]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a node."""
        return ValueProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """Turn an argument into what a node holds, and refuse tensors that have no name."""
        if is_proxy(a):
            return a.node
        if isinstance(a, torch.Size):
            return tuple(a)
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            raise PruneError(
                "its code uses a tensor that is neither an input nor a parameter or buffer"
            )
        return super().create_arg(a)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any
    ) -> Any:
        """Add a node, compute its value, and return a proxy, or the value if it is plain."""
        if target in (operator.getitem, operator.setitem):
            args = (args[0], _as_list(args[1]), *args[2:])
        proxy: Any = super().create_proxy(kind, target, args, kwargs, *more, **named)
        proxy.node.meta[SOURCE_LINE] = user_line()
        value = proxy.value = self.values[proxy.node] = self._compute(proxy.node)
        self._note_data(proxy.node, value)
        if isinstance(value, bool) and target in _COMPARISONS:
            return bool(proxy)
        return value if value is None or isinstance(value, (bool, str)) else proxy

    def _note_data(self, node: fx.Node, value: object) -> None:
        """Note that a number was read out of a tensor, or computed from such a number."""
        computed = not isinstance(value, Tensor) and not self.from_data.isdisjoint(
            node.all_input_nodes
        )
        if node.target in ("item", "tolist") or computed:
            self.from_data.add(node)

    def _compute(self, node: fx.Node) -> Any:
        """Return the value of a node in the run on the example."""
        before, self.computing = self.computing, True
        try:
            return self._run(node)
        finally:
            self.computing = before

    def _run(self, node: fx.Node) -> Any:
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

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Write down the call of a child, or run it while a value is computed."""
        if self.computing:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(
        self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]
    ) -> object:
        """Return a proxy of a parameter, or the parameter while a value is computed."""
        if self.computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def factory(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement for `torch.zeros` and the like that writes down the call."""

        def make(*args: object, **kwargs: object) -> object:
            if self.computing:
                return function(*args, **kwargs)
            return self.create_proxy("call_function", function, args, kwargs)

        return make


def _as_list(index: object) -> object:
    """Return an index in which vectors of integers that the code holds are lists."""
    if type(index) is tuple:
        return tuple(_as_list(item) for item in index)
    return index.tolist() if type(index) is Tensor and is_index_vector(index) else index


class ProxiesInArguments(TorchFunctionMode):
    """Writes down functions of torch that get a proxy inside a list or dict of arguments."""

    def __init__(self, tracer: ValueTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Write down the call if a proxy is among the arguments."""
        kwargs = kwargs or {}
        if self.tracer.computing or not _holds_proxy((args, kwargs)):
            return func(*args, **kwargs)
        return fx.Proxy.__torch_function__(func, types, tuple(args), kwargs)


def _holds_proxy(tree: object) -> bool:
    """Return whether a proxy is in these containers."""
    if is_proxy(tree):
        return True
    if isinstance(tree, dict):
        return any(_holds_proxy(item) for item in tree.values())
    if isinstance(tree, slice):
        return any(_holds_proxy(item) for item in (tree.start, tree.stop, tree.step))
    return isinstance(tree, (tuple, list)) and any(_holds_proxy(item) for item in tree)
