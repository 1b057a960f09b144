"""Run a graph node by node: no Python text is made of it, so nothing in a file becomes code.

Every node is one closure that reads its arguments from a list of slots and writes its result into
another slot. A slot is emptied after its last use, so that memory is freed as early as it would be
in plain Python code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import PruneError
from .size_limits import TooMuch, Watch, can_be_watched, signature

Step = Callable[[list[Any]], None]
_MODULE, _INPUTS = 0, 1  # slots: the module, its inputs


def runner(graph: fx.Graph, *, from_file: bool = False) -> Callable[..., Any]:
    """The graph as a function of the module and the values of the placeholders, in order.

    `from_file`: memory that is not initialized is zeroed, calls that would make tensors out of
    proportion to the inputs are refused, and what fails is one PruneError with the node.
    """
    plan = _Plan(from_file)
    for node in sorted(graph.nodes, key=lambda node: node.op != "placeholder"):
        plan.add(node)
    template, result = plan.slots, plan.result
    steps = plan.steps()
    guard = _Guard(plan.calls, steps) if from_file else None

    def run(module: nn.Module | None, *inputs: Any) -> Any:
        slots = template.copy()
        slots[_MODULE] = module
        slots[_INPUTS : _INPUTS + len(inputs)] = inputs
        if guard is None or torch.compiler.is_compiling():
            for step in steps:
                step(slots)
        else:
            guard.run(module, inputs, slots)
        return slots[result]

    return run


@dataclass
class _Call:
    """One thing to do: which function, the slots of its arguments, the slot of its result."""

    function: Callable[..., Any]
    given: list[int]
    names: tuple[str, ...]  # of the last ones of `given`, which are passed by keyword
    result: int
    node: fx.Node | None = None
    spent: tuple[int, ...] = ()  # slots that are not read after it

    @property
    def child(self) -> str:
        """The module that it calls, or nothing."""
        return str(self.node.target) if self.node and self.node.op == "call_module" else ""


@dataclass
class _Plan:
    """The slots and the calls of a graph."""

    from_file: bool
    slots: list[Any] = field(default_factory=lambda: [None])  # what is in them at the start
    calls: list[_Call] = field(default_factory=list)
    where: dict[fx.Node, int] = field(default_factory=dict)
    result: int = _MODULE

    def add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.where[node] = self._slot()
        elif node.op == "output":
            self.result = self._place(node.args[0])
        else:
            first = [_MODULE] if node.op in ("call_module", "get_attr") else []
            given = first + [self._place(item) for item in node.args]
            given += [self._place(item) for item in node.kwargs.values()]
            self.where[node] = self._call(self._function(node), given, tuple(node.kwargs), node)

    def _function(self, node: fx.Node) -> Callable[..., Any]:
        """What to call for a node."""
        target: Any = node.target
        if node.op in ("call_module", "get_attr"):
            return (_child if node.op == "call_module" else _tensor)(target)
        if self.from_file:
            target = _ZEROED.get(target, target)
        return _method(target) if node.op == "call_method" else _CHECKED.get(target, target)

    def steps(self) -> list[Step]:
        last = {slot: k for k, call in enumerate(self.calls) for slot in (*call.given, call.result)}
        kept = {_MODULE, self.result}
        for k, call in enumerate(self.calls):
            used = {*call.given, call.result}
            call.spent = tuple(slot for slot in used if last[slot] == k and slot not in kept)
        return [_step(call) for call in self.calls]

    def _slot(self, value: Any = None) -> int:
        self.slots.append(value)
        return len(self.slots) - 1

    def _call(
        self,
        function: Any,
        given: list[int],
        names: tuple[str, ...] = (),
        node: fx.Node | None = None,
    ) -> int:
        result = self._slot()
        self.calls.append(_Call(function, given, names, result, node))
        return result

    def _place(self, value: Any) -> int:
        """The slot of an argument; containers are made anew in every run."""
        if isinstance(value, fx.Node):
            return self.where[value]
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return self._call(slice, [self._place(part) for part in parts])
        if isinstance(value, dict):
            keys = tuple(value)
            return self._call(_dict_of(keys), [self._place(value[key]) for key in keys])
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return self._call(_sequence_of(value), [self._place(item) for item in value])
        return self._slot(value)


def _dict_of(keys: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda *items: dict(zip(keys, items, strict=True))


def _sequence_of(value: Sequence[Any]) -> Callable[..., Any]:
    if isinstance(value, list):
        return lambda *items: list(items)
    kind = type(value)
    return kind if hasattr(kind, "_fields") else lambda *items: items


def _step(call: _Call) -> Step:
    """The call as a closure; those without keywords and with few arguments are by far the most."""
    function, given, result, spent = call.function, call.given, call.result, call.spent
    positional = len(given) - len(call.names)
    if call.names:
        names = call.names

        def step(slots: list[Any]) -> None:
            values = [slots[k] for k in given]
            named = dict(zip(names, values[positional:], strict=True))
            slots[result] = function(*values[:positional], **named)
            for k in spent:
                slots[k] = None

    elif positional == 1:
        (only,) = given

        def step(slots: list[Any]) -> None:
            slots[result] = function(slots[only])
            for k in spent:
                slots[k] = None

    elif positional == 2:
        one, two = given

        def step(slots: list[Any]) -> None:
            slots[result] = function(slots[one], slots[two])
            for k in spent:
                slots[k] = None

    else:

        def step(slots: list[Any]) -> None:
            slots[result] = function(*[slots[k] for k in given])
            for k in spent:
                slots[k] = None

    return step


# --- graphs from a file ---------------------------------------------------------------------------


@dataclass
class _Guard:
    """Runs the steps of a graph that came from a file, under watch if the inputs have new sizes."""

    calls: list[_Call]
    steps: list[Step]
    seen: set[Any] = field(default_factory=set)  # signatures of inputs

    def run(self, module: nn.Module | None, inputs: Sequence[Any], slots: list[Any]) -> None:
        sizes, number = signature(inputs), 0
        watch = None
        if sizes not in self.seen and can_be_watched(inputs):
            watch = Watch(module, inputs)
        try:
            for number, step in enumerate(self.steps):
                if watch is None:
                    step(slots)
                else:
                    self._watched(watch, self.calls[number], step, slots)
        except Exception as error:
            self._report(self.calls[number:], module, error)
            raise
        if watch is not None and not watch.by_data and sizes is not None:
            self.seen = {*self.seen, sizes} if len(self.seen) < _REMEMBERED else {sizes}

    def _watched(self, watch: Watch, call: _Call, step: Step, slots: list[Any]) -> None:
        if call.node is None or call.child:  # a container, or the model's own code
            step(slots)
        else:
            watch.before(call.node.target, [slots[k] for k in call.given])
            with watch:
                step(slots)
        watch.after(call.result, slots[call.result], call.spent, call.child)

    def _report(self, calls: list[_Call], module: nn.Module | None, error: Exception) -> None:
        """Raises what Python and torch raise for arguments that do not fit as a PruneError.

        What the code of a child raises on purpose, and errors that have a class of their own (as
        when memory runs out), stay what they are.
        """
        node = next((call.node for call in calls if call.node), None)  # containers have the next
        name = f"node {node.name} ({_shown(node.target)})" if node else "output"
        where = f"{type(module).__name__}, {name}"
        if type(error) is TooMuch:
            raise PruneError(f"{where}: {error}") from error
        if type(error) in (_OF_CHILDREN if calls[0].child else _OF_CALLS):
            first = (str(error).strip().splitlines() or [""])[0][:300]
            raise PruneError(
                f"{where}: the stored code of this module failed: {type(error).__name__}: {first} "
                f"(The input has another form than the example, or the file was forged.)"
            ) from error


_REMEMBERED = 1000  # sizes of inputs
_OF_CHILDREN = (RuntimeError, TypeError, IndexError)
_OF_CALLS = (
    *_OF_CHILDREN, ValueError, KeyError, AttributeError, AssertionError, NotImplementedError,
    ZeroDivisionError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip


def _shown(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


# --- what a node calls ----------------------------------------------------------------------------


def _method(name: str) -> Callable[..., Any]:
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(owner, _OWNERS):
            raise PruneError(f"{name}: called on {type(owner).__name__}, which is no tensor.")
        return getattr(owner, name)(*args, **kwargs)

    return call


def _child(path: str) -> Callable[..., Any]:
    *parents, leaf = path.split(".")

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        for name in parents:
            module = module._modules[name]
        return module._modules[leaf](*args, **kwargs)

    return call


def _tensor(path: str) -> Callable[..., Any]:
    *parents, leaf = path.split(".")

    def read(module: Any) -> Any:
        for name in parents:
            module = module._modules[name]
        return getattr(module, leaf)

    return read


def read_attribute(owner: Any, name: str) -> Any:
    """`owner.shape` and the like."""
    if not isinstance(owner, _OWNERS):
        raise PruneError(f"{name}: read from {type(owner).__name__}, which is no tensor.")
    found = getattr(owner, name)
    if callable(found):
        raise PruneError(f"{name}: is a method of {type(owner).__name__}, no value.")
    return found


def write_item(owner: Any, index: Any, item: Any) -> None:
    """`owner[index] = item`, for tensors."""
    if not isinstance(owner, Tensor):
        raise PruneError(f"an item is written into {type(owner).__name__}, which is no tensor.")
    owner[index] = item


_OWNERS = (Tensor, tuple, list, dict, torch.dtype, torch.device, int, float, torch.SymInt)
_CHECKED: dict[Any, Callable[..., Any]] = {getattr: read_attribute, operator.setitem: write_item}
_ZEROED: dict[Any, Any] = {
    torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, "new_empty": "new_zeros",
}  # fmt: skip


# --- functions of ours that occur in graphs -------------------------------------------------------


def expect_pieces(found: Any, example: int) -> None:
    expect(len(found), example)


def expect(found: Any, example: Any) -> None:
    """Code branched on a size, or went on with it as a number: another one needs other code."""
    if found != example:
        raise PruneError(
            f"the forward of this module was rewritten for the sizes of the example: it expects "
            f"{example} and got {str(found)[:200]}. Trace with an example of the size in use."
        )


def one_channel(x: Tensor) -> Tensor:
    """Zeros of the shape of `x` with one channel: many kernels refuse to run on none."""
    return x.new_zeros(x.shape[0], 1, *x.shape[2:])


def no_channel(x: Tensor) -> Tensor:
    return x[:, :0]


def one_point(x: Tensor) -> Tensor:
    return x[:1]
