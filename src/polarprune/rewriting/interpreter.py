"""Run a graph node by node, without generating Python source, so nothing in a file becomes code.

Each node becomes a closure that reads its arguments from a list of slots and writes its result into
another slot. For `relu(x + y)`, with the module in slot 0 and the inputs in slots 1 and 2:

    slots[3] = add(slots[1], slots[2])
    slots[4] = relu(slots[3])

A slot is cleared after its last use, so memory is freed as early as in ordinary Python code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from ..errors import PruneError
from .size_limits import TooMuch, Watch, can_be_watched, signature

Slots: TypeAlias = list[object]
Function: TypeAlias = Callable[..., object]
Step: TypeAlias = Callable[[Slots], None]
_MODULE_SLOT, _FIRST_INPUT_SLOT = 0, 1


def runner(graph: fx.Graph, *, from_file: bool = False) -> Callable[..., Any]:
    """Return a function of a module and its inputs that runs a graph.

    Args:
        graph: The graph to run.
        from_file: The graph comes from a file that may be forged. Uninitialized memory is then
            zeroed, calls that would create tensors out of proportion to the inputs are refused,
            and a call that fails raises a PruneError that names the node.
    """
    program = _Program(from_file)
    for node in sorted(graph.nodes, key=lambda node: node.op != "placeholder"):
        program.add(node)
    initial_slots, result = program.slots, program.result
    steps = program.steps()
    guard = _Guard(program.calls, steps) if from_file else None

    def run(module: nn.Module | None, *inputs: object) -> object:
        slots = initial_slots.copy()
        slots[_MODULE_SLOT] = module
        slots[_FIRST_INPUT_SLOT : _FIRST_INPUT_SLOT + len(inputs)] = inputs
        if guard is None or torch.compiler.is_compiling():
            for step in steps:
                step(slots)
        else:
            guard.run(module, inputs, slots)
        return slots[result]

    return run


@dataclass
class _Call:
    """One call: the function, the slots of its arguments, and the slot of its result."""

    function: Function
    arguments: list[int]
    keywords: tuple[str, ...]  # names of the last arguments, which are passed by keyword
    result: int
    node: fx.Node | None = None
    released: tuple[int, ...] = ()  # slots that no later call reads

    @property
    def child(self) -> str:
        """Return the path of the module that this call runs, or "" for any other call."""
        return str(self.node.target) if self.node and self.node.op == "call_module" else ""


@dataclass
class _Program:
    """The slots and the calls of a graph."""

    from_file: bool
    slots: Slots = field(default_factory=lambda: [None])  # their values at the start of a run
    calls: list[_Call] = field(default_factory=list)
    slot_of_node: dict[fx.Node, int] = field(default_factory=dict)
    result: int = _MODULE_SLOT

    def add(self, node: fx.Node) -> None:
        """Add the slots and the calls of a node."""
        if node.op == "placeholder":
            self.slot_of_node[node] = self._new_slot()
        elif node.op == "output":
            self.result = self._slot_of(node.args[0])
        else:
            first = [_MODULE_SLOT] if node.op in ("call_module", "get_attr") else []
            arguments = first + [self._slot_of(item) for item in node.args]
            arguments += [self._slot_of(item) for item in node.kwargs.values()]
            function, keywords = self._function(node), tuple(node.kwargs)
            self.slot_of_node[node] = self._add_call(function, arguments, keywords, node)

    def _function(self, node: fx.Node) -> Function:
        """Return the function that runs a node."""
        target = node.target
        if node.op == "call_module":
            return _child_caller(str(target))
        if node.op == "get_attr":
            return _attribute_reader(str(target))
        if self.from_file:
            target = _ZEROED.get(target, target)
        if isinstance(target, str):
            return _method_caller(target)
        return _CHECKED.get(target, target)

    def steps(self) -> list[Step]:
        """Return the calls as closures that clear each slot after its last use."""
        last_use = {
            slot: number
            for number, call in enumerate(self.calls)
            for slot in (*call.arguments, call.result)
        }
        kept = {_MODULE_SLOT, self.result}
        for number, call in enumerate(self.calls):
            used = {*call.arguments, call.result} - kept
            call.released = tuple(slot for slot in used if last_use[slot] == number)
        return [_step(call) for call in self.calls]

    def _new_slot(self, value: object = None) -> int:
        """Append a slot and return its index."""
        self.slots.append(value)
        return len(self.slots) - 1

    def _add_call(
        self,
        function: Function,
        arguments: list[int],
        keywords: tuple[str, ...] = (),
        node: fx.Node | None = None,
    ) -> int:
        """Append a call and return the slot of its result."""
        result = self._new_slot()
        self.calls.append(_Call(function, arguments, keywords, result, node))
        return result

    def _slot_of(self, value: object) -> int:
        """Return the slot of an argument. Every run builds its own containers."""
        if isinstance(value, fx.Node):
            return self.slot_of_node[value]
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return self._add_call(slice, [self._slot_of(part) for part in parts])
        if isinstance(value, dict):
            keys = tuple(value)
            return self._add_call(_dict_maker(keys), [self._slot_of(value[key]) for key in keys])
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return self._add_call(_sequence_maker(value), [self._slot_of(item) for item in value])
        return self._new_slot(value)


def _dict_maker(keys: tuple[Hashable, ...]) -> Function:
    """Return a function that builds a dict with these keys from its values."""
    return lambda *items: dict(zip(keys, items, strict=True))


def _sequence_maker(value: Sequence[object]) -> Function:
    """Return a function that builds a list, tuple or named tuple like this one from its items."""
    if isinstance(value, list):
        return lambda *items: list(items)
    kind = type(value)
    return kind if hasattr(kind, "_fields") else lambda *items: items


def _step(call: _Call) -> Step:
    """Return a call as a closure; the most frequent forms get one that builds no lists."""
    if not call.keywords and len(call.arguments) == 1:
        return _step_with_one_argument(call)
    if not call.keywords and len(call.arguments) == 2:
        return _step_with_two_arguments(call)
    return _step_with_any_arguments(call)


def _step_with_any_arguments(call: _Call) -> Step:
    """Return the step of a call with any number of positional and keyword arguments."""
    function, result, released = call.function, call.result, call.released
    arguments, keywords = call.arguments, call.keywords
    positional = len(arguments) - len(keywords)

    def step(slots: Slots) -> None:
        values = [slots[k] for k in arguments]
        named = dict(zip(keywords, values[positional:], strict=True))
        slots[result] = function(*values[:positional], **named)
        for k in released:
            slots[k] = None

    return step


def _step_with_one_argument(call: _Call) -> Step:
    """Return the step of a call with one positional argument."""
    function, (only,), result, released = call.function, call.arguments, call.result, call.released

    def step(slots: Slots) -> None:
        slots[result] = function(slots[only])
        for k in released:
            slots[k] = None

    return step


def _step_with_two_arguments(call: _Call) -> Step:
    """Return the step of a call with two positional arguments."""
    function, result, released = call.function, call.result, call.released
    first, second = call.arguments

    def step(slots: Slots) -> None:
        slots[result] = function(slots[first], slots[second])
        for k in released:
            slots[k] = None

    return step


# --- graphs from a file ---------------------------------------------------------------------------


@dataclass
class _Guard:
    """Runs a graph that came from a file, and watches its memory when the inputs have new sizes."""

    calls: list[_Call]
    steps: list[Step]
    seen: set[Hashable] = field(default_factory=set)  # signatures of inputs

    def run(self, module: nn.Module | None, inputs: Sequence[object], slots: Slots) -> None:
        """Run all steps on the slots, and report a failure as a PruneError."""
        sizes, number = signature(inputs), 0
        watch = None
        if sizes not in self.seen and can_be_watched(inputs):
            watch = Watch(module, inputs)
        try:
            for number, step in enumerate(self.steps):
                if watch is None:
                    step(slots)
                else:
                    self._run_watched(watch, self.calls[number], step, slots)
        except Exception as error:
            self._report(self.calls[number:], module, error)
            raise
        if watch is not None and not watch.by_data and sizes is not None:
            self.seen = {*self.seen, sizes} if len(self.seen) < _MAX_SEEN else {sizes}

    def _run_watched(self, watch: Watch, call: _Call, step: Step, slots: Slots) -> None:
        """Run one step, and refuse it if it needs too much memory."""
        if call.node is None or call.child:  # builds a container, or runs the model's own code
            step(slots)
        else:
            watch.before(call.node.target, [slots[k] for k in call.arguments])
            with watch:
                step(slots)
        watch.after(call.result, slots[call.result], call.released, call.child)

    def _report(self, calls: list[_Call], module: nn.Module | None, error: Exception) -> None:
        """Raise a PruneError for an error that Python and torch raise for unsuitable arguments.

        Other errors pass unchanged: those that the code of a child raises on purpose, and those
        with a class of their own, such as `torch.OutOfMemoryError`.
        """
        # A call that builds a container has no node. The next call with a node uses the container.
        node = next((call.node for call in calls if call.node), None)
        name = f"node {node.name} ({_target_name(node.target)})" if node else "output"
        where = f"{type(module).__name__}, {name}"
        if type(error) is TooMuch:
            raise PruneError(f"{where}: {error}") from error
        if type(error) in (_CHILD_ERRORS if calls[0].child else _CALL_ERRORS):
            first_line = (str(error).strip().splitlines() or [""])[0][:300]
            raise PruneError(
                f"{where}: the stored code of this module failed: {type(error).__name__}: "
                f"{first_line} (Check that the input has the same form as the example. If it has, "
                f"the file may be forged.)"
            ) from error


_MAX_SEEN = 1000  # signatures of inputs that are remembered
_CHILD_ERRORS = (RuntimeError, TypeError, IndexError)
_ARGUMENT_ERRORS = (ValueError, KeyError, AttributeError, AssertionError, NotImplementedError)
_LIMIT_ERRORS = (ZeroDivisionError, OverflowError, RecursionError, MemoryError)
_CALL_ERRORS = (*_CHILD_ERRORS, *_ARGUMENT_ERRORS, *_LIMIT_ERRORS)


def _target_name(target: object) -> str:
    """Return the name of a node's target, for messages."""
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


# --- what a node calls ----------------------------------------------------------------------------


def _method_caller(name: str) -> Function:
    """Return a function that calls this method of its first argument."""

    def call(owner: object, *args: object, **kwargs: object) -> object:
        if not isinstance(owner, _ALLOWED_OWNERS):
            raise PruneError(f"{name}: called on {type(owner).__name__}, which is not a tensor.")
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
        raise PruneError(f"{name}: read from {type(owner).__name__}, which is not a tensor.")
    found: object = getattr(owner, name)
    if callable(found):
        raise PruneError(f"{name}: this is a method of {type(owner).__name__}, not a value.")
    return found


def write_item(owner: object, index: Any, item: Any) -> None:
    """Run `owner[index] = item`, or raise a PruneError if the owner is not a tensor."""
    if not isinstance(owner, Tensor):
        raise PruneError(f"an item is written into {type(owner).__name__}, which is not a tensor.")
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


class OtherSizes(PruneError):
    """Raised by a rewritten forward whose code depends on the sizes that the example has."""


def expect_pieces(found: Sized, example: int) -> None:
    """Check that a sequence still has the length that it had for the example."""
    expect(len(found), example)


def expect(found: object, example: object) -> None:
    """Check that a value is still the one of the example.

    The traced code branched on it or used it as a constant, so the graph is valid for it only.
    """
    if found != example:
        raise OtherSizes(
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
