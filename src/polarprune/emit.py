"""A module's forward as a graph that can be edited, run, and stored as plain data.

How a graph is made is `capture`'s business. Stored, functions stand by name, from a list of those
that compute and touch nothing else: a graph from a file becomes code.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import get_overridable_functions
from torch.utils import _pytree as pytree

from .errors import PruneError

PLAIN = (bool, str, float, torch.dtype, torch.device, type(None))
FACTORIES = {
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

    def leaves(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of the graph, from those of a call, however they are written."""
        for call in spellings(type(module).forward, args, kwargs):
            leaves, form = pytree.tree_flatten(call)
            if pytree.treespec_dumps(form) == self.form and all(
                type(leaves[int(number)]) is type(value) and leaves[int(number)] == value
                for number, value in self.fixed.items()
            ):
                return [leaf for i, leaf in enumerate(leaves) if str(i) not in self.fixed]
        raise PruneError(
            f"{type(module).__name__}: called in another form than in the example, for which the "
            f"code was re-emitted. Trace with an example of the form in use."
        )

    @property
    def simple(self) -> int | None:
        """How many arguments it takes, if these are tensors one after the other."""
        count = sum(node.op == "placeholder" for node in self.graphs["train"].nodes)
        _, form = pytree.tree_flatten(((0,) * count, {}))
        return count if not self.fixed and pytree.treespec_dumps(form) == self.form else None

    @property
    def only(self) -> fx.Graph | None:
        """The graph, if both modes have the same."""
        train, evaluated = self.graphs["train"], self.graphs["eval"]
        return train if str(train) == str(evaluated) else None


def spellings(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A call of a method, and others that mean the same: by place, by name, with or without what is
    as by default."""
    yield args, kwargs
    parameters = list(inspect.signature(function).parameters.values())[1:]
    plain = all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
    if not plain or len(args) > len(parameters):
        return
    given = {**{one.name: value for one, value in zip(parameters, args, strict=False)}, **kwargs}
    full = {one.name: given.get(one.name, one.default) for one in parameters}
    if not given.keys() <= full.keys() or any(v is inspect.Parameter.empty for v in full.values()):
        return  # not a call that the method would take
    short = {one.name: full[one.name] for one in parameters
             if not _alike(full[one.name], one.default)}  # fmt: skip
    for some in (short, full):
        listed = list(some.items())
        for count in range(len(some) + 1):
            if [name for name, _ in listed[:count]] == [one.name for one in parameters[:count]]:
                yield tuple(value for _, value in listed[:count]), dict(listed[count:])


def _alike(one: Any, other: Any) -> bool:
    plain = isinstance(one, (*PLAIN, int)) and type(one) is type(other)
    return one is other or (plain and bool(one == other))


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What two calls must have in common for one graph to do."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    return f"{form} {[leaf if isinstance(leaf, PLAIN) else type(leaf) for leaf in leaves]}"


# --- code that a graph cannot hold ----------------------------------------------------------------


@contextmanager
def nothing_lost(module: nn.Module, busy: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raises where the module's code, run inside to be written down, does what no graph holds:
    it switches gradients or autocast, calls a torch.autograd.Function, throws Python's dice, or
    leaves something on self.

    A table that it looks for first, and makes only if it is not there, is no loss: it is made anew.
    While `busy()` other code runs (that of children), which is not written down.
    """
    tables = (vars(module), module._buffers, module._parameters)
    before = [(table, dict(table)) for table in tables]
    held: list[Any] = [(x, x.copy()) for key, x in vars(module).items()
                       if type(x) in (list, dict) and key[0] != "_"]  # fmt: skip
    own = [(kind, name, vars(kind)[name]) for kind, name in _SWITCHES]
    dice = random.getstate()
    for kind, name, method in own:
        setattr(kind, name, _refusing(method, busy))
    try:
        with _looked_for(module) as first:
            yield
        lost = [len(x) != len(old) for x, old in held if isinstance(x, list)]
        for table, old in before:
            changed = [k for k in {*table, *old} if not _same(table.get(k), old.get(k))]
            lost += [table is not tables[0] or k not in first or _number(table.get(k))
                     for k in changed]  # fmt: skip
        if any(lost) or random.getstate() != dice:
            raise PruneError("code that leaves something on self, or throws dice")
    finally:
        random.setstate(dice)
        for kind, name, method in own:
            setattr(kind, name, method)
        for table, old in (*before, *held):
            table.clear()
            table.update(old) if isinstance(table, dict) else table.extend(old)


@contextmanager
def _looked_for(module: nn.Module) -> Iterator[set[str]]:
    """The attributes that code inside reads before it sets them."""
    first, written, family = set[str](), set[str](), type(module)

    def read(self: nn.Module, name: str) -> Any:
        if name not in written:
            first.add(name)
        return family.__getattribute__(self, name)

    def write(self: nn.Module, name: str, value: Any) -> None:
        written.add(name)
        family.__setattr__(self, name, value)

    watched = {"__getattribute__": read, "__setattr__": write}
    with suppress(Exception):  # a class that minds being derived from
        module.__class__ = type(family.__name__, (family,), watched)
    try:
        yield first
    finally:
        module.__class__ = family


_SWITCHES = (
    (torch.autocast, "__enter__"), (torch.inference_mode, "__enter__"),
    (torch.no_grad, "__enter__"), (torch.enable_grad, "__enter__"),
    (torch.set_grad_enabled, "__init__"), (torch.autograd.Function, "apply"),
)  # fmt: skip


def _refusing(method: Any, busy: Callable[[], bool]) -> Any:
    inner = getattr(method, "__func__", method)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not busy():
            raise PruneError(f"code with {inner.__qualname__}")
        return inner(*args, **kwargs)

    return classmethod(wrapper) if isinstance(method, classmethod) else wrapper


def _number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _same(one: Any, other: Any) -> bool:
    return one is other or (_number(one) and _number(other) and one == other)


# --- running --------------------------------------------------------------------------------------


def with_forward(module: nn.Module, emission: Emission) -> nn.Module:
    """The same module, of a subclass of its class that computes what the graphs say."""
    return with_method(module, forward_of(emission))


def forward_of(emission: Emission) -> Callable[..., Any]:
    functions = {mode: compiled(graph) for mode, graph in emission.graphs.items()}
    simple = emission.simple

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = functions["train" if self.training else "eval"]
        if len(args) == simple and not kwargs:  # nothing that torch.compile would stumble on
            return function(self, *args)
        return function(self, *emission.leaves(self, args, kwargs))

    return forward


def with_method(
    module: nn.Module, forward: Callable[..., Any], *, widths_change: bool = False
) -> nn.Module:
    """Of a subclass of its class that has this forward; numbers that it would not look at may not
    change, or whole numbers only."""
    family = type(module)
    vars(module).pop("forward", None)  # a method that it chose would come before its class

    def set_unless_baked(self: nn.Module, name: str, value: Any) -> None:
        known = numbers_in(self)
        free = widths_change and type(value) is int
        if name in known and value != known[name] and not free:
            raise PruneError(
                f"{family.__name__}.{name} = {value!r}: the code of this module was re-emitted "
                f"with {known[name]!r}, and would go on with that. Set it before."
            )
        family.__setattr__(self, name, value)

    with suppress(TypeError, ValueError):  # torch.export goes by it
        forward.__signature__ = inspect.signature(family.forward)  # type: ignore[attr-defined]
    methods = {"forward": forward, "__setattr__": set_unless_baked}
    module.__class__ = type(family.__name__, (family,), methods)
    return module


def numbers_in(module: nn.Module) -> dict[str, Any]:
    """Plain values that a module holds, which its code may read."""
    kinds = (bool, int, float, str)
    return {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k != "training"}


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of the module and its arguments."""
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(code.src, space)
    function: Callable[..., Any] = space["forward"]
    return function


# --- functions that occur in graphs ---------------------------------------------------------------


def expect_pieces(found: Any, example: int) -> None:
    expect(len(found), example)


def expect(found: Any, example: Any) -> None:
    """Code branched on a size, or went on with it as a number: another one needs other code."""
    if found != example:
        raise PruneError(
            f"the code of this module was re-emitted for the sizes of the example ({example} in "
            f"one place, where {found} is found now). Trace with an example of the size in use."
        )


def one_channel(x: Tensor) -> Tensor:
    """Zeros of the shape of `x` with one channel: many kernels refuse to run on none."""
    return x.new_zeros(x.shape[0], 1, *x.shape[2:])


def no_channel(x: Tensor) -> Tensor:
    return x[:, :0]


# --- storing --------------------------------------------------------------------------------------


def encode(emission: Emission) -> dict[str, Any]:
    """As plain data."""
    graphs = {mode: encode_graph(graph) for mode, graph in emission.graphs.items()}
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


def encode_graph(graph: fx.Graph) -> list[Any]:
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
    allowed |= set(FACTORIES.values())
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
