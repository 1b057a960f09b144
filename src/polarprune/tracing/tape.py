"""What a run of a model did: every ATen operation, in order; and how a model is run.

A tape holds facts only (operations, shapes, which module and source line); what they mean for
channels is `rules`' job. `recorder` writes it.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..torch_internals.patches import fused_kernels_off
from .watched_sizes import SizeLog

Mark = Callable[[str, Any], None]
Shim = Callable[[nn.Module, Mark], Callable[..., Any]]
Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(eq=False)
class Value:
    """A tensor that was seen: where it came from and its shape, not its contents."""

    shape: tuple[int, ...]
    name: str = ""  # of a parameter or buffer
    stride: tuple[int, ...] = ()
    itemsize: int = 4
    base: Value | None = None  # what it is a view of
    data: Tensor | None = None  # kept for small integer tensors (they may be indices), constants
    is_integer: bool = False  # or boolean

    @property
    def root(self) -> Value:
        return self.base or self

    def axis(self, given: int) -> int:
        """An axis counted from the front. torch takes 0 and -1 for tensors without axes, too."""
        return given % max(len(self.shape), 1)


@dataclass(eq=False)
class Op:
    """One operation. In `args` and `kwargs` a `Value` stands where a tensor stood."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value]
    module: str
    line: str = "?"
    macs: int = 0
    seeded: bool = False  # it draws from a generator that the model's code seeds

    @cached_property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def where(self) -> str:
        return f"{self.module or 'model'} ({self.line})"

    def inputs(self) -> list[Value]:
        return self._inputs

    @cached_property
    def _inputs(self) -> list[Value]:
        return [value for item in (*self.args, *self.kwargs.values()) for value in _values_in(item)]

    def tensors(self) -> list[Value]:
        """All that it reads and all that it gives."""
        return [*self._inputs, *self.outs]


def _values_in(tree: Any) -> list[Value]:
    if isinstance(tree, Value):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [value for item in tree for value in _values_in(item)]
    return []


@cache
def name_of(func: Any) -> str:
    return str(func._schema.name).split("::")[-1]


@dataclass(eq=False)
class Tape:
    """The operations of one run, in order, and what came out."""

    ops: list[Op] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    told: list[Value] = field(default_factory=list)  # what Python code read values of, or shapes
    marks: dict[tuple[str, str], list[Value]] = field(default_factory=dict)
    marked_numbers: dict[tuple[str, str], int | float] = field(default_factory=dict)
    ends: dict[tuple[str, str], int] = field(default_factory=dict)  # operations before each mark
    sizes: SizeLog = field(default_factory=SizeLog)  # what Python code did with sizes
    broken: str | None = None  # the module in which the run failed
    computed: bool = False  # with all values, not only the shapes
    looked: bool = False  # something came of values that were made up
    stored: list[Value] = field(default_factory=list)  # not returned, but still there after the run
    excused: set[str] = field(default_factory=set)  # modules whose unread results may be anything

    @cached_property
    def ends_in(self) -> set[Value]:
        """What comes out of a run, or decides the way it takes."""
        return {*self.outputs, *self.told, *self.stored}

    @cached_property
    def needed(self) -> set[Value]:
        """Tensors that an output depends on, and results that nobody reads."""
        read = {value for op in self.that_matter for value in op.inputs()} | self.ends_in
        unread = (op.outs[:1] for op in self.that_matter if read.isdisjoint(op.outs))
        return read.union(*unread)

    @cached_property
    def depends_on_data(self) -> bool:
        """True if some shape or number in the run comes from the values in a tensor."""
        return any(op.func.namespace != "aten" or tells(op) for op in self.ops)

    @cached_property
    def that_matter(self) -> list[Op]:
        """Operations that have to run rightly after a cut: all but some that torch's own layers
        throw away, as `nn.MultiheadAttention` does with the weights of its heads."""
        return self._leading_to(self.ends_in, lambda op: op.module not in self.excused)

    def unread(self) -> Iterator[Value]:
        """What was computed though neither an output nor the way of the run depends on it."""
        leading = set(self._leading_to({*self.outputs, *self.told}, lambda op: False))
        return (value for op in self.ops if op not in leading for value in op.outs)

    def _leading_to(self, ends: set[Value], also: Callable[[Op], bool]) -> list[Op]:
        """Operations that these values depend on, those that write into something, and others."""
        needed, found = set(ends), []
        for op in reversed(self.ops):
            if also(op) or op.func._schema.is_mutable or not needed.isdisjoint(op.outs):
                found.append(op)
                needed.update(op.inputs())
                needed.update(value.base for value in op.inputs() if value.base is not None)
        return found[::-1]


def tells(op: Op) -> list[Value]:
    """The tensors whose values become a number or a shape."""
    if op.name == "index":
        return [
            value for value in op.inputs()[1:] if value.is_integer and value.itemsize == 1
        ]  # masks
    return op.inputs() if _is_telling(op.func) else []


@cache
def _is_telling(func: Any) -> bool:
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers; a tensor that has two names is given once."""
    modules = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
    for tables in ([m._parameters for _, m in modules], [m._buffers for _, m in modules]):
        seen: set[int] = set()
        for (stem, _), table in zip(modules, tables, strict=True):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield stem + name, tensor


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy. Activations that a module still holds come along without their history, and
    scripted functions as they are: torch copies neither."""
    memo = {} if memo is None else memo
    for module in model.modules():
        for key, held in vars(module).items():
            empty = isinstance(held, (dict, list, tuple, set)) and not held
            if empty or held is None or isinstance(held, (bool, int, str)) or key in _TABLES:
                continue  # as most are
            for leaf in tree_leaves(held):
                if isinstance(leaf, Tensor) and not leaf.is_leaf:
                    memo.setdefault(id(leaf), leaf.detach().clone())
                elif isinstance(leaf, torch.jit.ScriptFunction):
                    memo[id(leaf)] = leaf
    new = copy.deepcopy(model, memo)
    for module in new.modules():
        _rebind(vars(module), memo)
    return new


def _rebind(held: dict[Any, Any], memo: dict[int, Any]) -> None:
    """Functions, such as hooks, that know parts of a model are to know those of its copy."""
    for key, value in held.items():
        if isinstance(value, FunctionType) and (value.__closure__ or value.__defaults__):
            held[key] = _rebound(value, memo)
        elif isinstance(value, dict) and key in _HOOKS:
            _rebind(value, memo)


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an empty one
        return function
    given = function.__defaults__ or ()
    known = [memo.get(id(value), value) for value in (*cells, *given)]
    if all(map(is_, known, (*cells, *given))):
        return function
    closure, defaults = tuple(map(CellType, known[: len(cells)])), tuple(known[len(cells) :])
    code, name = function.__code__, function.__name__
    new = FunctionType(code, function.__globals__, name, defaults or None, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    return new


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")


def as_call(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `model(...)` takes, as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


@contextmanager
def untouched(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Run the model inside without a trace: mode, buffers and random state are put back.

    So is what a forward remembers: code that is written down later computes it then, too. And
    hooks, which some libraries put in as the model first runs.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    values = [
        (value, value.copy() if value else None)  # most are empty
        for held, _ in attributes
        for key, value in held.items()
        if isinstance(value, (dict, list)) and key != "_modules"
    ]
    tensors = [tensor for _, tensor in named_tensors(model)]
    memory = [(tensor, tensor.data) for tensor in tensors]
    # a train() of the user's own may write weights, as where low-rank corrections are merged
    own = any(type(module).train is not nn.Module.train for module in model.modules())
    kept = [t for t in tensors if own or not isinstance(t, nn.Parameter)]
    buffers = [(t, t.detach().clone()) for t in kept]
    if training is not None:
        model.train(training)
    gpus = {t.device.index or 0 for t in tensors if t.is_cuda}
    dice, numpy = random.getstate(), sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(sorted(gpus)), torch.no_grad():
            yield
    finally:
        random.setstate(dice)
        if numpy:
            numpy.random.set_state(numbers)
        for table, entries in attributes:
            table.clear()
            table.update(entries)
        for value, content in values:
            if value:
                value.clear()
            if content:
                value.extend(content) if isinstance(value, list) else value.update(content)
        for tensor, old in memory:
            if tensor.data_ptr() != old.data_ptr() or tensor.shape != old.shape:
                tensor.data = old
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def empty_slots(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Attributes that hold nothing yet: state that a forward keeps may come to lie there."""
    return [
        (module, key)
        for module in model.modules()
        for table in (vars(module), module._buffers)
        for key, value in table.items()
        if value is None or (type(value) in (dict, list) and not value and key not in _OWN)
    ]


_OWN = frozenset(vars(nn.Module()))  # the tables that torch's modules have


def clear_slots(slots: list[tuple[nn.Module, str]]) -> list[tuple[dict[str, Any], str, Any]]:
    """Empty them of what a run left there: of a batch that is over, as wide as the model was."""
    kept: list[tuple[dict[str, Any], str, Any]] = [
        (table, key, table[key])
        for module, key in slots
        for table in (vars(module), module._buffers)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(table.get(key)))
    ]
    for table, key, held in kept:
        table[key] = held.__class__() if isinstance(held, (dict, list)) else None
    return kept


@contextmanager
def emptied(slots: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """The same for a while."""
    kept = clear_slots(slots)
    try:
        yield
    finally:
        for table, key, value in kept:
            table[key] = value


def on_host() -> AbstractContextManager[Any]:
    """Whatever the user's default is, labels live on the host."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Attention in eval mode takes an opaque fused path otherwise, and so do recurrent layers."""
    with fused_kernels_off(model.modules()):
        yield


def tensors_in(out: Any) -> list[Tensor]:
    """All tensors in what a model returned: in containers, and in the fields of plain objects."""
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = [out]
    while waiting:
        for leaf in tree_leaves(waiting.pop(0)):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif id(leaf) not in seen and not isinstance(leaf, nn.Module):
                seen.add(id(leaf))
                waiting.append(_inside(leaf))
    return found


def _inside(leaf: Any) -> list[Any]:
    """What an object holds that torch does not take for a container."""
    if isinstance(leaf, (str, bytes)) or callable(leaf):
        return list(leaf.values()) if isinstance(leaf, Mapping) else []
    held = list(getattr(leaf, "__dict__", {}).values())
    for family in type(leaf).__mro__:
        slots = vars(family).get("__slots__", ())
        held += [getattr(leaf, k, None) for k in ([slots] if isinstance(slots, str) else slots)]
    if isinstance(leaf, Mapping):
        return [*held, *leaf.values()]
    return [*held, *leaf] if isinstance(leaf, (list, tuple, set, frozenset)) else held
