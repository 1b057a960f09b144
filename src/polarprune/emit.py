"""A module's forward, written down as a graph that can be edited, stored and run again.

torch.fx traces with proxies that know nothing, so code that looks at a size or a type fails. The
proxies here know the value they stand for: code may branch on it, and the way that was taken is
written down. Sizes that are read from tensors stay readings, so another batch works as well. The
children of the module stay opaque. A graph is stored as plain data (JSON), functions by name.
"""

from __future__ import annotations

import builtins
import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils import _pytree as pytree

from .errors import PruneError

_PLAIN = (bool, str, float, torch.dtype, torch.device, type(None))
_FACTORIES = {
    name: getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
                 "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros")
}  # fmt: skip


@dataclass
class Emission:
    """What a module computes for a call of one form, in train and in eval mode."""

    form: str  # of the arguments, as torch's pytree writes it
    fixed: dict[str, Any]  # arguments that are no tensors: number of the leaf -> value
    graphs: dict[str, fx.Graph]  # "train", "eval"

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of the graph, from those of a call."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        if pytree.treespec_dumps(form) != self.form or any(
            type(leaves[int(number)]) is not type(value) or leaves[int(number)] != value
            for number, value in self.fixed.items()
        ):
            raise PruneError(
                "called in another form than in the example, for which the code was re-emitted. "
                "Trace with an example of the form in use."
            )
        return [leaf for i, leaf in enumerate(leaves) if str(i) not in self.fixed]

    @property
    def only(self) -> fx.Graph | None:
        """The graph, if both modes have the same."""
        train, evaluated = self.graphs["train"], self.graphs["eval"]
        return train if str(train) == str(evaluated) else None


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What two calls must have in common for one graph to do."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    return f"{form} {[leaf if isinstance(leaf, _PLAIN) else type(leaf) for leaf in leaves]}"


# --- tracing --------------------------------------------------------------------------------------


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

    def __hash__(self) -> int:
        return hash(self.value)

    def __setitem__(self, index: Any, item: Any) -> None:
        tracer: Any = self.tracer
        tracer.create_proxy("call_function", operator.setitem, (self, index, item), {})


class _Tracer(fx.Tracer):
    """Runs the module while it writes down; children are opaque, containers are not."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs
        self.values: dict[fx.Node, Any] = {}
        self.from_data: set[fx.Node] = set()  # numbers that were read out of a tensor
        self.running = False  # a node is being computed: nothing is written down

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward

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
        known: Any = super().create_proxy(kind, target, args, kwargs, *more, **named)
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


_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


def expect_pieces(found: Any, example: int) -> None:
    expect(len(found), example)


def expect(found: Any, example: Any) -> None:
    """Code branched on a size, or went on with it as a number: another one needs other code."""
    if found != example:
        raise PruneError(
            f"the code of this module was re-emitted for the sizes of the example ({example} in "
            f"one place, where {found} is found now). Trace with an example of the size in use."
        )


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

    for name, function in _FACTORIES.items():
        setattr(torch, name, written(function))
    try:
        yield
    finally:
        for name, function in _FACTORIES.items():
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


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Emission | None:
    """The module's forward for calls like this one, or None if it cannot be written down."""
    if "forward" in vars(module):
        return None  # replaced by the user; the class has another
    leaves, form = pytree.tree_flatten((args, kwargs))
    fixed = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, _PLAIN)}
    graphs = {}
    try:
        written = pytree.treespec_dumps(form)
        for mode in ("train", "eval"):
            double = copy.copy(module)  # what forward remembers must not end up in the module
            double.training = mode == "train"
            graphs[mode] = _trace(double, leaves, form)
            _encode_graph(graphs[mode])  # can it be stored?
    except Exception:  # whatever the user's code does with a proxy
        return None
    return Emission(written, fixed, graphs)


def _trace(module: nn.Module, leaves: list[Any], form: pytree.TreeSpec) -> fx.Graph:
    names = [f"x{i}" for i, leaf in enumerate(leaves) if not isinstance(leaf, _PLAIN)]
    family = type(module)

    def call(self: nn.Module, given: dict[str, Any]) -> Any:
        mine = [given.get(f"x{i}", leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(mine, form)
        with _factories(tracer), _Functions(tracer):
            return family.forward(self, *args, **kwargs)

    listed = ", ".join(names)
    pairs = ", ".join(f"{name}={name}" for name in names)
    forward = eval(f"lambda self, {listed}: call(self, dict({pairs}))", {"call": call})
    module.__class__ = type(family.__name__, (family,), {"forward": forward})
    inputs = {f"x{i}": leaf.clone() if isinstance(leaf, Tensor) else leaf
              for i, leaf in enumerate(leaves)}  # fmt: skip
    tracer = _Tracer(inputs)
    with torch.no_grad(), _nothing_wrapped():
        graph = tracer.trace(module)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in _READINGS:
            graph.erase_node(node)
    return graph


_READINGS = (getattr, operator.getitem, "size", "dim", operator.eq, operator.ne, operator.lt,
             operator.gt, operator.le, operator.ge, operator.mod, operator.floordiv,
             operator.add, operator.sub, operator.mul)  # fmt: skip


def one_channel(x: Tensor) -> Tensor:
    """Zeros of the shape of `x` with one channel: many kernels refuse to run on none."""
    return x.new_zeros(x.shape[0], 1, *x.shape[2:])


def no_channel(x: Tensor) -> Tensor:
    return x[:, :0]


# --- running --------------------------------------------------------------------------------------


def with_forward(module: nn.Module, emission: Emission) -> nn.Module:
    """The same module, of a subclass of its class that computes what the graphs say."""
    functions = {mode: compiled(graph) for mode, graph in emission.graphs.items()}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return functions["train" if self.training else "eval"](self, *emission.leaves(args, kwargs))

    return with_method(module, forward)


def with_method(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    family = type(module)
    module.__class__ = type(family.__name__, (family,), {"forward": forward})
    return module


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of the module and its arguments."""
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(code.src, space)
    function: Callable[..., Any] = space["forward"]
    return function


# --- storing --------------------------------------------------------------------------------------


def encode(emission: Emission) -> dict[str, Any]:
    """As plain data."""
    graphs = {mode: _encode_graph(graph) for mode, graph in emission.graphs.items()}
    fixed = {number: _encode(value) for number, value in emission.fixed.items()}
    return {"form": emission.form, "fixed": fixed, **graphs}


def decode(data: dict[str, Any]) -> Emission:
    try:
        graphs = {mode: _decode_graph(data[mode]) for mode in ("train", "eval")}
        fixed = {number: _decode(value, {}) for number, value in data["fixed"].items()}
        return Emission(data["form"], fixed, graphs)
    except PruneError:
        raise
    except Exception as error:  # whatever may be in a file
        raise PruneError(f"stored code is damaged: {error!r}. Nothing was loaded.") from error


def _encode_graph(graph: fx.Graph) -> list[Any]:
    return [
        [node.name, node.op, _name_of(node), _encode(node.args), _encode(dict(node.kwargs))]
        for node in graph.nodes
    ]


def _decode_graph(data: list[Any]) -> fx.Graph:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for name, kind, target, args, kwargs in data:
        _check_words(name, kind, target, args, kwargs)
        nodes[name] = graph.create_node(
            kind,
            function_named(target) if kind == "call_function" else target,
            tuple(_decode(args, nodes)),
            _decode(kwargs, nodes),
            name,
        )
    return graph


def _check_words(name: str, kind: str, target: str, args: Any, kwargs: Any) -> None:
    """A graph from a file becomes code: names must be names, methods those of tensors."""
    words = [name, *target.split("."), *kwargs["dict"]]
    if kind == "call_function" and target == "builtins.getattr":
        words.append(args["tuple"][1])
    method = kind != "call_method" or (hasattr(Tensor, target) and target[0] != "_")
    kinds = ("placeholder", "get_attr", "call_module", "call_method", "call_function", "output")
    if not (kind in kinds and method) or not all(
        isinstance(word, str) and f"_{word}".isidentifier() and not word.startswith("__")
        for word in words
    ):
        raise PruneError(f"the file holds code that is not understood ({name}): not loaded.")


_SPACES: dict[str, Any] = {
    "torch": torch, "F": F, "nn": torch._C._nn, "Tensor": Tensor, "linalg": torch.linalg,
    "fft": torch.fft, "special": torch.special,
}  # fmt: skip
_OPERATORS = (
    "abs add and_ eq floordiv ge getitem gt iadd iand ifloordiv imatmul imod imul index inv invert "
    "ior ipow isub itruediv ixor le lt matmul mod mul ne neg not_ or_ pos pow setitem sub truediv "
    "xor"
)
_OTHERS = {
    "builtins.getattr": builtins.getattr,
    "polarprune.one_channel": one_channel,
    "polarprune.no_channel": no_channel,
    "polarprune.expect": expect,
    "polarprune.expect_pieces": expect_pieces,
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
}


def _known_functions() -> dict[str, Any]:
    """Functions that may occur in a stored graph: they compute, and touch no file."""
    allowed = {f for group in get_overridable_functions().values() for f in group}
    allowed |= set(_FACTORIES.values())
    found = dict(_OTHERS)
    for space, home in _SPACES.items():
        for name in dir(home):
            function = getattr(home, name, None)
            try:
                if callable(function) and function in allowed:
                    found[f"{space}.{name}"] = function
            except TypeError:
                continue
    return found


_FUNCTIONS = _known_functions()
_NAMES = {id(function): name for name, function in _FUNCTIONS.items()}


def function_named(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise PruneError(f"the file asks for a function {name!r} that is not known: not loaded.")
    return _FUNCTIONS[name]


def _name_of(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if id(node.target) not in _NAMES:
        raise PruneError(f"{node.target} cannot be stored by name")
    return _NAMES[id(node.target)]


_KINDS = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [_encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {str(key): _encode(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encode(item) for item in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, family in _KINDS.items():
        if isinstance(value, family):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise PruneError(f"{value!r} cannot be stored")


def _decode(data: Any, nodes: dict[str, fx.Node]) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, held),) = data.items()
    if kind == "node":
        return nodes[held]
    if kind in ("tuple", "list", "immutable_list"):
        items = [_decode(item, nodes) for item in held]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: _decode(item, nodes) for key, item in held.items()}
    if kind == "slice":
        return slice(*[_decode(item, nodes) for item in held])
    if kind == "ellipsis":
        return Ellipsis
    if kind == "device":
        return torch.device(held)
    if kind == "float":
        return float(held)
    found = getattr(torch, held, None)
    if not isinstance(found, _KINDS.get(kind, ())):
        raise PruneError(f"the file holds a {kind} {held!r} that is not known: not loaded.")
    return found
