"""Trace with proxies that carry the values of the example.

The proxies of torch.fx have no values, so code that branches on a size or a type fails. The proxies
here carry the values of the example. Code may branch on them, and the graph contains the branch
that was taken. Sizes that code reads from tensors remain nodes of the graph, so the graph works for
other batch sizes. Where code needs a plain value, an `expect` node checks in every run that the
value is unchanged. For an example with 4 channels,

    if x.shape[1] > 2:
        y = torch.relu(y)

adds the nodes `getattr(x, "shape")`, `getitem(…, 1)`, `gt(…, 2)`, `expect(…, True)` and `relu(y)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, Target
from torch.overrides import TorchFunctionMode

from ..errors import PruneError
from ..torch_internals.patches import OneThreadTracer
from ..tracing.model_state import Args, Kwargs
from ..tracing.source_lines import SOURCE_LINE, user_line
from .installed_forward import is_index_vector
from .node_functions import expect, expect_pieces

Result = TypeVar("Result")

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


class ValueProxy(fx.Proxy):
    """A proxy with the value of its node in the run on the example."""

    value: Any = None
    tracer: ValueTracer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class of the value, so that `isinstance` in the user's code works as usual."""
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        """Record that an attribute is read or a method is called."""
        tracer = self.tracer
        if callable(getattr(self.value, name)):
            return lambda *args, **kwargs: tracer.create_proxy(
                "call_method", name, (self, *args), kwargs
            )
        return tracer.create_proxy("call_function", getattr, (self, name), {})

    def __iter__(self) -> Iterator[Any]:
        """Iterate over proxies of the items of a sequence, or over the keys of a mapping."""
        if isinstance(self.value, Mapping):
            return iter(list(self.value))
        create, count = self.tracer.create_proxy, len(self)
        return iter(
            [create("call_function", operator.getitem, (self, i), {}) for i in range(count)]
        )

    def keys(self) -> Any:
        """Return the keys of a mapping, which are constants."""
        return self.value.keys()

    def _checked(self, result: Result) -> Result:
        """Return a plain value computed from this one, and check this one in every run.

        The code uses the result as a constant, so the graph is valid for this value only.
        """
        if isinstance(self.value, Tensor) or self.node in self.tracer.from_data:
            raise PruneError("its code depends on the values in a tensor")
        self.tracer.create_proxy("call_function", expect, (self, self.value), {})
        return result

    def __len__(self) -> int:
        """Return the length. A node checks the length of a list in every run."""
        if isinstance(self.value, Tensor):
            return int(self.tracer.create_proxy("call_method", "size", (self, 0), {}))
        if not isinstance(self.value, torch.Size):  # every run has the same number of axes
            self.tracer.create_proxy("call_function", expect_pieces, (self, len(self.value)), {})
        return len(self.value)

    def __bool__(self) -> bool:
        """Return the truth value, and check the value in every run."""
        return self._checked(bool(self.value))

    def __index__(self) -> int:
        """Return the value as an index, and check it in every run."""
        return self._checked(int(operator.index(self.value)))

    def __int__(self) -> int:
        """Return the value as an int, and check it in every run."""
        return self._checked(int(self.value))

    def __float__(self) -> float:
        """Return the value as a float, and check it in every run."""
        return self._checked(float(self.value))

    def __round__(self, digits: int | None = None) -> object:
        """Return the rounded value, and check the value in every run."""
        rounded: object = round(self.value, digits)
        return self._checked(rounded)

    def __contains__(self, item: object) -> bool:
        """Return whether the value contains an item, and check the value in every run."""
        return self._checked(item in self.value)

    def __eq__(self, other: Any) -> Any:
        """Compare two values. Shapes are compared size by size, because some sizes are widths."""
        theirs = other.value if is_proxy(other) else other
        if not isinstance(self.value, (tuple, list)) or not isinstance(theirs, (tuple, list)):
            return self.tracer.create_proxy("call_function", operator.eq, (self, other), {})
        pairs = zip(self, other, strict=False)
        return len(self) == len(other) and all(bool(one == another) for one, another in pairs)

    def __ne__(self, other: object) -> Any:
        """Compare two values as `__eq__` does."""
        same = self == other
        if isinstance(same, bool) and isinstance(self.value, (tuple, list)):
            return not same
        return self.tracer.create_proxy("call_function", operator.ne, (self, other), {})

    def __hash__(self) -> int:
        """Return the hash of the value."""
        return hash(self.value)

    def __setitem__(self, index: object, item: object) -> None:
        """Record a write into a part of a tensor."""
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, item), {})


def is_proxy(thing: object) -> TypeGuard[ValueProxy]:
    """Return whether this is a proxy. `isinstance` cannot tell: it sees the class of the value."""
    return type(thing) is ValueProxy


class ValueTracer(OneThreadTracer):
    """Records the graph of a module's forward while it runs the forward on the example.

    A child of the module becomes one node. For an `nn.Sequential`, each of its children does.

    Args:
        names: The names of the placeholders.
        inputs: Their values.
    """

    proxy_buffer_attributes = True

    def __init__(self, names: list[str], inputs: Mapping[str, object]) -> None:
        super().__init__()  # `math` is not traced: math.sqrt(width) returns a plain number
        self.names, self.inputs = names, inputs
        self.values: dict[fx.Node, Any] = {}
        self.from_data: set[fx.Node] = set()  # numbers that depend on the values of a tensor
        self.computing = False  # a node's value is being computed, so nothing is recorded

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a child becomes one node: all children except `nn.Sequential`."""
        return type(m).forward is not nn.Sequential.forward

    def create_args_for_root(
        self, root_fn: Callable[..., object], is_module: bool, concrete_args: object = None
    ) -> tuple[Callable[..., object], list[object]]:
        """Create the placeholders with our names; fx would use the names in the forward."""
        given = [self.create_proxy("placeholder", name, (), {}) for name in self.names]
        return root_fn, [self.root, *given]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a node."""
        return ValueProxy(node, self)

    def create_arg(self, a: object) -> Argument:
        """Return an argument in the form that a node holds, and refuse tensors without a name."""
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
        self,
        kind: str,
        target: Target,
        args: Args,
        kwargs: Kwargs,
        name: str | None = None,
        type_expr: object = None,
        proxy_factory_fn: Callable[[fx.Node], fx.Proxy] | None = None,
    ) -> Any:
        """Add a node and compute its value. Return a proxy, or the value if it is a constant."""
        if target in (operator.getitem, operator.setitem):
            args = (args[0], _as_list(args[1]), *args[2:])
        proxy: Any = super().create_proxy(
            kind, target, args, kwargs, name, type_expr, proxy_factory_fn
        )
        if kind != "placeholder":
            proxy.node.meta[SOURCE_LINE] = user_line()
        value = proxy.value = self.values[proxy.node] = self._compute(proxy.node)
        self._note_data(proxy.node, value)
        if isinstance(value, bool) and target in _COMPARISONS:
            return bool(proxy)
        return value if value is None or isinstance(value, (bool, str)) else proxy

    def _note_data(self, node: fx.Node, value: object) -> None:
        """Note a number that was read from a tensor, or computed from such a number."""
        computed = not isinstance(value, Tensor) and not self.from_data.isdisjoint(
            node.all_input_nodes
        )
        if node.target in ("item", "tolist") or computed:
            self.from_data.add(node)

    def _compute(self, node: fx.Node) -> object:
        """Return the value of a node in the run on the example."""
        before, self.computing = self.computing, True
        try:
            return self._run(node)
        finally:
            self.computing = before

    def _run(self, node: fx.Node) -> object:
        """Run a node on the values of its arguments."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        target = node.target
        if not isinstance(target, str):
            return target(*args, **kwargs)
        if node.op == "placeholder":
            return self.inputs[target]
        if node.op == "get_attr":
            return operator.attrgetter(target)(self.root)
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else None

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> object:
        """Record the call of a child, or run the child while a value is computed."""
        if self.computing:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(
        self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]
    ) -> object:
        """Return a proxy of an attribute, or the attribute while a value is computed."""
        if self.computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def factory(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement for a function such as `torch.zeros` that records the call."""

        def make(*args: object, **kwargs: object) -> object:
            if self.computing:
                return function(*args, **kwargs)
            return self.create_proxy("call_function", function, args, kwargs)

        return make


def _as_list(index: object) -> object:
    """Return an index with constant vectors of integers replaced by lists."""
    if type(index) is tuple:
        return tuple(_as_list(item) for item in index)
    return index.tolist() if type(index) is Tensor and is_index_vector(index) else index


class ProxiesInArguments(TorchFunctionMode):
    """Records calls of torch functions that receive a proxy inside a list or dict."""

    def __init__(self, tracer: ValueTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: Sequence[object] = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        """Record the call if there is a proxy among the arguments."""
        kwargs = kwargs or {}
        if self.tracer.computing or not _holds_proxy((args, kwargs)):
            return func(*args, **kwargs)
        return fx.Proxy.__torch_function__(func, types, tuple(args), kwargs)


def _holds_proxy(tree: object) -> bool:
    """Return whether nested containers hold a proxy."""
    if is_proxy(tree):
        return True
    if isinstance(tree, dict):
        return any(_holds_proxy(item) for item in tree.values())
    if isinstance(tree, slice):
        return any(_holds_proxy(item) for item in (tree.start, tree.stop, tree.step))
    return isinstance(tree, (tuple, list)) and any(_holds_proxy(item) for item in tree)
