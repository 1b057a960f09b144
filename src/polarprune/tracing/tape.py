"""The tape: every ATen operation of one run, in order.

A tape holds facts only: operations, shapes, and the module and source line of each operation. What
an operation means for channels is decided in `channels`. `op_recorder` makes the tape; nothing
changes it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from .schemas import is_mutable, name_of, reads_data
from .watched_sizes import Decision, Expression

# A module of the model, and the name of a node in the graph that its forward was captured as.
NodeKey = tuple[str, str]


@dataclass(eq=False)
class Value:
    """A tensor that a run touched: its shape and where it came from, not its contents."""

    shape: tuple[int, ...]
    name: str = ""  # of a parameter or buffer
    stride: tuple[int, ...] = ()
    itemsize: int = 4
    base: Value | None = None  # the tensor that it is a view of
    data: Tensor | None = None  # kept for small integer tensors (possibly indices) and constants
    is_integer: bool = False  # True for booleans, too

    @property
    def root(self) -> Value:
        """The tensor that owns the memory."""
        return self.base or self

    def axis(self, given: int) -> int:
        """Return a non-negative axis. For a tensor without axes, torch accepts 0 and -1."""
        return given % max(len(self.shape), 1)

    def __str__(self) -> str:
        """Describe the tensor in a message."""
        return f"{self.name!r}" if self.name else f"a tensor of shape {self.shape}"


@dataclass(eq=False)
class Op:
    """One operation. In `args` and `kwargs`, a `Value` replaces each tensor."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value]
    module: str
    line: str = "?"
    macs: int = 0
    seeded: bool = False  # it draws from a generator that the model's code seeds

    @cached_property
    def name(self) -> str:
        """The name without namespace and overload, as in `add`."""
        return name_of(self.func)

    @property
    def where(self) -> str:
        """The module and the source line, for messages."""
        return f"{self.module or 'model'} ({self.line})"

    def inputs(self) -> list[Value]:
        """Return all tensors among the arguments."""
        return self._inputs

    @cached_property
    def _inputs(self) -> list[Value]:
        return [value for item in (*self.args, *self.kwargs.values()) for value in _values_in(item)]

    def tensors(self) -> list[Value]:
        """Return all tensors that it reads, then those that it returns."""
        return [*self._inputs, *self.outs]


def _values_in(tree: object) -> list[Value]:
    if isinstance(tree, Value):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [value for item in tree for value in _values_in(item)]
    return []


@dataclass(frozen=True, eq=False)
class Nodes:
    """What the nodes of captured graphs returned in a run, and when.

    Attributes:
        values: The tensors that a node returned first.
        numbers: The number, if it returned one.
        positions: How many operations had been recorded by then.
    """

    values: Mapping[NodeKey, list[Value]]
    numbers: Mapping[NodeKey, int | float]
    positions: Mapping[NodeKey, int]


@dataclass(frozen=True, eq=False)
class Tape:
    """The operations of one run, in order, and the tensors that leave the run.

    Attributes:
        ops: The operations.
        inputs: The tensors of the example.
        outputs: The tensors that the model returned; none if the run failed.
        read_values: Tensors whose values Python code read.
        stored_values: Tensors that were not returned, but are still referenced.
        decisions: Comparisons of sizes in the model's code.
        rounded: Numbers computed from sizes that were rounded, or are no longer watched.
        example_ops: The operations after these compute a token with a cache.
        generates: True if a cache that the model returned is not an output.
        failed_in: The module in which the run raised.
        has_values: True if every operation was computed, not only its shape (see `shape_only`).
        needs_values: True if placeholder values reached something that depends on values.
        unchecked_modules: The results of these modules may be wrong where nothing reads them.
        nodes: What captured graphs returned, if forwards ran them.
    """

    ops: Sequence[Op]
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    read_values: Sequence[Value]
    stored_values: Sequence[Value]
    decisions: Sequence[Decision]
    rounded: Sequence[Expression]
    example_ops: int | None
    generates: bool
    failed_in: str | None
    has_values: bool
    needs_values: bool
    unchecked_modules: frozenset[str]
    nodes: Nodes

    @cached_property
    def final_values(self) -> set[Value]:
        """Tensors that leave the run, or whose values decide which operations it performs."""
        return {*self.outputs, *self.read_values, *self.stored_values}

    @cached_property
    def checked_values(self) -> set[Value]:
        """Tensors that a relevant operation reads, final values, and results that nothing reads."""
        read = {value for op in self.relevant_ops for value in op.inputs()} | self.final_values
        unread = (op.outs[:1] for op in self.relevant_ops if read.isdisjoint(op.outs))
        return read.union(*unread)

    @cached_property
    def depends_on_data(self) -> bool:
        """True if a shape or a number in the run comes from the values in a tensor."""
        return any(op.func.namespace != "aten" or values_read_by(op) for op in self.ops)

    @cached_property
    def relevant_ops(self) -> list[Op]:
        """Operations that must compute the right result after a cut.

        These are all operations except some whose results are discarded: those that torch's own
        layers discard, as `nn.MultiheadAttention` does with its attention weights, and elements
        along an axis of which code reads nothing but the shape, as in `x[:, :, -1]`.
        """
        discarded = self._unread_selections()
        return _leading_to(
            self.ops,
            self.final_values,
            lambda op: op.module not in self.unchecked_modules and op not in discarded,
        )

    def _unread_selections(self) -> set[Op]:
        """Return the operations that pick one index of an axis, and whose results nothing reads."""
        read = {value for op in self.ops for value in op.inputs()} | self.final_values
        return {op for op in self.ops if op.name == "select" and read.isdisjoint(op.outs)}

    @property
    def counted_ops(self) -> Sequence[Op]:
        """The operations of the run on the example, which make up the cost."""
        return self.ops[: self.example_ops]

    @property
    def further_ops(self) -> Sequence[Op]:
        """The operations that compute one more token with the cache of the example's run."""
        return [] if self.example_ops is None else self.ops[self.example_ops :]


def unused_values(ops: Sequence[Op], used: Iterable[Value]) -> Iterator[Value]:
    """Yield the results of operations on which none of the used values depends."""
    leading = set(_leading_to(ops, set(used), lambda op: False))
    return (value for op in ops if op not in leading for value in op.outs)


def _leading_to(ops: Sequence[Op], final: set[Value], always: Callable[[Op], bool]) -> list[Op]:
    """Return the operations that `final` depends on, mutable ones, and those to keep always."""
    needed, found = set(final), []
    for op in reversed(ops):
        if always(op) or is_mutable(op.func) or not needed.isdisjoint(op.outs):
            found.append(op)
            needed.update(op.inputs())
            needed.update(value.base for value in op.inputs() if value.base is not None)
    return found[::-1]


def values_read_by(op: Op) -> list[Value]:
    """Return the inputs whose values become a Python number or an output shape."""
    if op.name == "index":  # by boolean masks; integer indices leave the shape alone
        return [value for value in op.inputs()[1:] if value.is_integer and value.itemsize == 1]
    return op.inputs() if reads_data(op.func) else []
