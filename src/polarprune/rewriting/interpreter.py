"""Run a graph node by node, without generating Python source, so nothing in a file becomes code.

Each node becomes a closure that reads its arguments from a list of slots and writes its result into
another slot. For `relu(x + y)`, with the module in slot 0 and the inputs in slots 1 and 2:

    slots[3] = add(slots[1], slots[2])
    slots[4] = relu(slots[3])

A slot is cleared after its last use, so memory is freed as early as in ordinary Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from ..errors import PruneError
from .node_functions import CallError, Function, function_of
from .node_names import describe
from .size_limits import Watch, can_be_watched, signature

Slots: TypeAlias = list[object]
Step: TypeAlias = Callable[[Slots], None]
_MODULE_SLOT, _FIRST_INPUT_SLOT = 0, 1


def runner(
    graph: fx.Graph, *, owner: str = "computed weight", from_file: bool = False
) -> Callable[..., Any]:
    """Return a function of a module and its inputs that runs a graph.

    A PruneError that a call raises names the owner, the user's source line and the operation.

    Args:
        graph: The graph to run.
        owner: The name in messages of what runs the graph.
        from_file: The graph comes from a file that may be forged. Uninitialized memory is then
            zeroed, calls that would create tensors out of proportion to the inputs are refused,
            and other errors of a call become a PruneError, too.
    """
    program = _Program(from_file)
    for node in sorted(graph.nodes, key=lambda node: node.op != "placeholder"):
        program.add(node)
    initial_slots, result = program.slots, program.result
    steps = program.steps()
    guard = (_FileGuard if from_file else _Guard)(owner, program.calls, steps)

    def run(module: nn.Module | None, *inputs: object) -> object:
        slots = initial_slots.copy()
        slots[_MODULE_SLOT] = module
        slots[_FIRST_INPUT_SLOT : _FIRST_INPUT_SLOT + len(inputs)] = inputs
        if torch.compiler.is_compiling():
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
            function = function_of(node, from_file=self.from_file)
            keywords = tuple(node.kwargs)
            self.slot_of_node[node] = self._add_call(function, arguments, keywords, node)

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
    """Return a call as a closure, which builds no lists for the most frequent kinds of calls."""
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


# --- errors ---------------------------------------------------------------------------------------


@dataclass
class _Guard:
    """Runs the steps of a graph, and says in errors where they come from."""

    owner: str
    calls: list[_Call]
    steps: list[Step]

    def run(self, module: nn.Module | None, inputs: Sequence[object], slots: Slots) -> None:
        """Run all steps on the slots."""
        number = 0
        try:
            for number in range(len(self.steps)):
                self.steps[number](slots)
        except CallError as error:
            raise error.located(f"{self._where(number)}: {error}") from error

    def _where(self, number: int) -> str:
        """Return the owner, the source line and the operation of a call."""
        # A call that builds a container has no node. The next call with a node uses the container.
        node = next((call.node for call in self.calls[number:] if call.node), None)
        return f"{self.owner}, {describe(node) if node else 'return value'}"


@dataclass
class _FileGuard(_Guard):
    """Runs a graph that came from a file, and watches its memory when the inputs have new sizes."""

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
            self._report(number, error)
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

    def _report(self, number: int, error: Exception) -> None:
        """Raise a PruneError for an error that Python and torch raise for unsuitable arguments.

        Other errors pass unchanged: those that the code of a child raises on purpose, and those
        with a class of their own, such as `torch.OutOfMemoryError`.
        """
        where = self._where(number)
        if isinstance(error, CallError):
            raise error.located(f"{where}: {error}") from error
        if type(error) in (_CHILD_ERRORS if self.calls[number].child else _CALL_ERRORS):
            first_line = (str(error).strip().splitlines() or [""])[0][:300]
            raise PruneError(
                f"{where}: the stored code of this module failed: {type(error).__name__}: "
                f"{first_line} (Check that the inputs have the types and shapes of the example. If "
                f"they do, the file may be forged.)"
            ) from error


_MAX_SEEN = 1000  # signatures of inputs that are remembered
_CHILD_ERRORS = (RuntimeError, TypeError, IndexError)
_ARGUMENT_ERRORS = (ValueError, KeyError, AttributeError, AssertionError, NotImplementedError)
_LIMIT_ERRORS = (ZeroDivisionError, OverflowError, RecursionError, MemoryError)
_CALL_ERRORS = (*_CHILD_ERRORS, *_ARGUMENT_ERRORS, *_LIMIT_ERRORS)
