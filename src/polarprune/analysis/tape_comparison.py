"""Compare the run of a cut model with the run of the original, operation by operation.

A correct cut performs the same operations in the same order. Every tensor has the shape that the
labels predict, and every other argument of an operation has the predicted value. A scale that the
code computes from a width shows up here as an argument of the wrong value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..channels.graph import Graph
from ..rewriting.resize_calls import padding
from ..surgery.recipe import Recipe
from ..tracing.tape import Op, Tape, Value

Skipped = Callable[[str], bool]  # module path -> True if its operations are not compared

_COPIES = ("clone", "contiguous", "detach", "alias")  # depend on memory layout
_IMPLIED = {  # arguments that follow from the shapes of tensors
    "size",
    "shape",
    "split_size",
    "split_sizes",
    "sizes",
    "normalized_shape",
    "N",
    "C",
    "HxW",
    "groups",
    "generator",
    "output_size",
    "memory_format",
}


@dataclass(frozen=True)
class Mismatch:
    """The first operation at which a cut model does not do what the graph predicts.

    Attributes:
        why: What differs.
        op: The operation of the original run, if one can be named.
        index: The number of that operation: how far the cut model got.
        seed: The seed of the plan that was tried.
        ran: True if the cut model ran to the end.
        excusable: True if the outputs may still be equal, because the order of operations depends
            on the data, or torch computes the same result in another way.
        hint: An excusable mismatch before this one, which may be the cause.
    """

    why: str
    op: Op | None = None
    index: int = 0
    seed: int = 0
    ran: bool = True
    excusable: bool = False
    hint: Op | None = None

    def __str__(self) -> str:
        return f"{self.why} in {self.op.where}" if self.op else self.why


@dataclass(frozen=True, eq=False)
class TapeComparison:
    """The run of the original and of a cut model, and the units that the cut keeps."""

    graph: Graph
    kept_units: Tensor
    before: Tape
    after: Tape
    skipped: Skipped

    def first_mismatch(self) -> Mismatch | None:
        """Compare operation by operation as far as both runs go, then the output shapes."""
        matter = set(self.before.relevant_ops)
        index = 0
        for (index, old), (_, new) in zip(*self._operations(), strict=False):
            if old.name.removeprefix("_unsafe_") != new.name.removeprefix("_unsafe_"):
                why = f"the cut model computes {new.name} in place of {old.name}"
                return Mismatch(why, old, index, excusable=True)
            why = self._difference(old, new) if old in matter else ""
            if why:
                excusable = self._leaves_one_channel(old) or self.before.depends_on_data
                return Mismatch(why, old, index, excusable=excusable)
        shapes = [value.shape for value in self.before.outputs]
        if self.after.outputs and shapes != [value.shape for value in self.after.outputs]:
            why = "the outputs have different shapes"
            return Mismatch(why, None, index, excusable=self.before.depends_on_data)
        return None

    def _operations(self) -> tuple[list[tuple[int, Op]], list[tuple[int, Op]]]:
        """Return the compared operations of the original and of the cut model."""
        return _compared(self.before, self.skipped), _compared(self.after, self.skipped)

    def unmatched_end(self) -> Mismatch | None:
        """Find an operation at the end of one run that the other did not perform."""
        old, new = self._operations()
        done = min(len(old), len(new))
        missing = [(k, op) for k, op in old[done:] if op in set(self.before.relevant_ops)]
        added = [op for _, op in new[done:] if op in set(self.after.relevant_ops)]
        if missing:
            index, op = missing[0]
            return Mismatch(f"the cut model does not compute {op.name}", op, index, excusable=True)
        if added:
            mine = [op for op in self.before.ops if op.module == added[0].module]
            why = f"the cut model computes one more {added[0].name} at the end"
            last = (mine or self.before.ops)[-1]
            return Mismatch(why, last, len(self.before.ops), excusable=True)
        return None

    def stop(self, why: str) -> Mismatch:
        """Return a mismatch at the operation that a run which failed did not reach."""
        done = sum(op.module == self.after.failed_in for op in self.after.ops)
        mine = [k for k, op in enumerate(self.before.ops) if op.module == self.after.failed_in]
        if not mine:
            return Mismatch(why)
        number = mine[min(done, len(mine) - 1)]
        return Mismatch(why, self.before.ops[number], number)

    def _leaves_one_channel(self, op: Op) -> bool:
        """Return True if one of several channels is left: torch may use another kernel then."""
        return any(
            new == 1 < old
            for value in op.tensors()
            for old, new in zip(
                value.shape, self.graph.shape(value, self.kept_units) or (), strict=False
            )
        )

    def _difference(self, old: Op, new: Op) -> str:
        """Return how an operation differs from the prediction; empty if it does not."""
        for a, b in zip(old.outs, new.outs, strict=False):
            wanted = (
                self.graph.shape(a, self.kept_units) if a in self.before.checked_values else None
            )
            if wanted is not None and wanted != b.shape:
                return f"{old.name} returns shape {list(b.shape)}, expected {list(wanted)}"
        counts_channels = self.graph.values.get(old.outs[0]) if old.outs else None
        is_constant = old.name == "lift_fresh" and not counts_channels
        if is_constant and not _same_constant(old.args[0].data, new.args[0].data):
            return "a constant has a different value"
        given = _plain_arguments(new)
        for name, before in _plain_arguments(old).items():
            expected = self._expected(old, name, before)
            if not _same(expected, given.get(name)):
                return f"{old.name} is called with {name}={given.get(name)}, expected {expected}"
        return ""

    def _expected(self, op: Op, name: str, before: object) -> object:
        """Return what an argument should be after the cut: most stay, some count channels."""
        if op.name == "constant_pad_nd" and name == "pad" and isinstance(before, (list, tuple)):
            return padding(self.graph, self.kept_units, op.outs[0], list(before))
        if (op.name, name) not in _COUNTING or not isinstance(before, int):
            return before
        kept = self.graph.kept(op.args[0], _axis_counted_on(op), self.kept_units)
        if kept is None:
            return before
        if op.name == "native_group_norm":
            return before if before == 1 else before * int(kept.sum()) // len(kept)
        return int(kept[:before].sum())


# Arguments that count channels, and so change with a cut.
_COUNTING = {("slice", "start"), ("select", "index"), ("native_group_norm", "group")}


def _axis_counted_on(op: Op) -> int:
    """Return the axis of its first input on which such an argument counts."""
    if op.name == "native_group_norm":
        return 1
    axis: int = op.args[1] if len(op.args) > 1 else 0
    return axis % len(op.args[0].shape) if op.name == "select" else axis


def replaced_modules(recipe: Recipe) -> Skipped:
    """Return a test for modules that a cut replaces by others, which are not compared."""
    paths = {*recipe.constants, *recipe.identities, *recipe.hollow, *recipe.heads, *recipe.removed}

    @cache
    def skipped(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[:k]) in paths for k in range(len(parts) + 1))

    return skipped


def _compared(tape: Tape, skipped: Skipped) -> list[tuple[int, Op]]:
    """Return the operations of a run that are compared, with their numbers."""
    return [
        (k, op)
        for k, op in enumerate(tape.ops)
        if op.name not in _COPIES and not skipped(op.module)
    ]


def _plain_arguments(op: Op) -> dict[str, object]:
    """Return the arguments that are not tensors and do not follow from the shapes of tensors."""
    given = {**dict(zip(_argument_names(op.func), op.args, strict=False)), **op.kwargs}
    found = {
        name: value
        for name, value in given.items()
        if name not in _IMPLIED and not _holds_tensors(value)
    }
    if op.name == "slice":  # the end follows from the size of the result
        size = op.args[0].shape[found.get("dim", 0)]
        found["start"] = slice(found.get("start"), None).indices(size)[0]
        found.pop("end", None)
    elif op.name == "select":
        found["index"] %= op.args[0].shape[found["dim"]]
    elif "stride" in op.name:
        found.pop("stride", None)
    if isinstance(found.get("dim"), int) and op.inputs():
        found["dim"] %= max(1, len(op.inputs()[0].shape))
    return found


@cache
def _argument_names(func: torch._ops.OpOverload) -> list[str]:
    """Return the names of an operation's arguments. Reading a schema is slow, hence the cache."""
    return [argument.name for argument in func._schema.arguments]


def _holds_tensors(value: object) -> bool:
    """Return True for a traced tensor, or a list that holds one."""
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, Value)


def _same_constant(a: Tensor | None, b: Tensor | None) -> bool:
    """Compare two constants; None stands for contents that were not recorded."""
    return a is None or b is None or (a.shape == b.shape and bool(torch.equal(a, b)))


def _same(a: object, b: object) -> bool:
    """Compare two arguments; NaN equals NaN."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)
