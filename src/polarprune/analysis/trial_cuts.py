"""Trial cuts: what the rules say is not taken on trust.

A copy of the model is cut and run. It has to perform the same operations in the same order as the
original, every tensor as wide as the labels say, with the same numbers (a scale that is computed
from a width would give itself away here). That takes one run of a small model and no second look
at the weights. Where the order depends on the data, outputs are compared instead, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..channels.graph import Graph, Plan
from ..errors import PruneError
from ..rewriting.resize import padding
from ..surgery.apply import cut_copy, fold, mock_copy, write_recipe
from ..surgery.other_inputs import fresh_inputs
from ..surgery.proof import StaysDouble, in_double, prove_equal
from ..surgery.recipe import Recipe
from ..tracing.copying import copy_model
from ..tracing.model_state import Example
from ..tracing.recorder import attempt, record
from ..tracing.tape import Op, Tape, Value

_TOLERANCE = 1e-8  # in float64, where a right cut differs by 1e-15 and a wrong one by 1e-3
_SINGLE = 1e-4  # in float32


@dataclass(frozen=True)
class Deviation:
    """Where a cut model first does something else than it should."""

    why: str
    op: Op | None = None  # of the original tape
    index: int = 0  # how far it got
    seed: int = 0  # of the plan
    ran: bool = True  # to the end, if not as it should
    excusable: bool = False  # it may be the data, or another way to compute the same
    hint: Op | None = None  # something excusable before it, which may be the cause

    def __str__(self) -> str:
        return f"{self.why} in {self.op.where}" if self.op else self.why


class Trial:
    """Cuts copies of a model and compares."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.model, self.example = model, example
        self._double: tuple[nn.Module, Example, bool] | None = None

    def cut(
        self, graph: Graph, plan: Plan, *, compare_outputs: bool = False, mode: int | None = None
    ) -> Deviation | None:
        """What is wrong with this cut, if anything.

        `compare_outputs`: compare outputs too, on a copy with random weights in float64.
        `mode`: run in eval (0) or train mode (1) only, if the model does the same in both.
        """
        recipe = write_recipe(self.model, graph, plan)
        found = self._structure(graph, plan, recipe, mode if _modes_alike(graph) else None)
        if self._is_meta() or (found is None and not compare_outputs):
            return found
        if found and not (found.ran and found.excusable):
            return found
        return self._numbers(graph, plan, recipe, found)

    def _is_meta(self) -> bool:
        return any(parameter.is_meta for parameter in self.model.parameters())

    def _structure(
        self, graph: Graph, plan: Plan, recipe: Recipe, mode: int | None
    ) -> Deviation | None:
        alive = graph.settle(graph.alive(plan))
        try:
            values = any(tape.has_values for tape in graph.tapes)
            small = mock_copy(self.model, recipe, values=values)
        except PruneError as refused:
            return Deviation(str(refused))
        for training, before in enumerate(graph.tapes):
            if mode not in (None, training):
                continue
            after, error = attempt(
                small,
                self.example,
                training=bool(training),
                with_values=before.has_values,
                brief=True,
            )
            found = _compare(graph, alive, before, after, _replaced(recipe))
            if found is None and after.needs_values and not before.has_values:
                found = Deviation("values decide what is computed", excusable=True)
            if found is None and error is None:
                found = _rest(before, after, _replaced(recipe))
            if error is not None and (found is None or found.excusable):
                said = f"the cut model does not run: {_first_line(error)}"
                hint = found.op if found else None
                return replace(_stop(before, after, said), ran=False, hint=hint)
            if found is not None:
                return replace(found, ran=error is None)
        return None

    def _numbers(
        self, graph: Graph, plan: Plan, recipe: Recipe, found: Deviation | None
    ) -> Deviation | None:
        """The same by outputs; `found` says where, if these differ."""
        model, example, double = self._in_double()
        masked = copy_model(model)
        fold(masked, graph, graph.alive(plan).double())
        try:
            small = cut_copy(masked, recipe)
            with StaysDouble() if double else nullcontext():
                close = _TOLERANCE if double else _SINGLE
                prove_equal(masked, small, example, close, fresh_inputs(example))
        except PruneError as error:
            return found or Deviation(_first_line(error).split(". Nothing was")[0])
        return None

    def _in_double(self) -> tuple[nn.Module, Example, bool]:
        if self._double is None:
            try:
                model, example = in_double(self.model, self.example)
                with StaysDouble():
                    record(model, example, training=False)
                self._double = model, example, True
            except PruneError:  # code that insists on float32
                self._double = copy_model(self.model), self.example, False
            _shake(self._double[0])
        return self._double


def _modes_alike(graph: Graph) -> bool:
    """True if train mode does what eval mode does, but for counting (of batches, in norms)."""
    names = [
        [op.name for op in tape.ops if any(value.shape for value in op.tensors())]
        for tape in graph.tapes
    ]
    return len(names) == 2 and names[0] == names[1]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _shake(model: nn.Module) -> None:
    """Weights that start at zero would hide a wrong cut."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                noise = torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64, device="cpu"
                )
                parameter.add_(noise.to(parameter) * (0.1 * (spread or 1.0)))


# --- one tape against another ---------------------------------------------------------------------


def _replaced(recipe: Recipe) -> Callable[[str], bool]:
    """True for modules whose operations are not compared: they are another module now."""
    paths = {*recipe.constants, *recipe.identities, *recipe.hollow, *recipe.heads, *recipe.removed}

    @cache
    def skipped(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[:k]) in paths for k in range(len(parts) + 1))

    return skipped


_COPIES = ("clone", "contiguous", "detach", "alias")  # made or not, by layout


def _compare(
    graph: Graph, alive: Tensor, before: Tape, after: Tape, skipped: Callable[[str], bool]
) -> Deviation | None:
    matter = set(before.relevant_ops)
    ops = [_compared(tape, skipped) for tape in (before, after)]
    index = 0
    for (index, old), (_, new) in zip(*ops, strict=False):
        if old.name.removeprefix("_unsafe_") != new.name.removeprefix("_unsafe_"):
            why = f"{new.name} is computed where {old.name} was"
            return Deviation(why, old, index, excusable=True)
        why = _differs(graph, alive, before.checked_values, old, new) if old in matter else ""
        if why:
            excusable = _is_single(graph, alive, old) or before.depends_on_data
            return Deviation(why, old, index, excusable=excusable)
    shapes = [value.shape for value in before.outputs]
    if after.outputs and shapes != [value.shape for value in after.outputs]:
        why = "the outputs have other shapes"
        return Deviation(why, None, index, excusable=before.depends_on_data)
    return None


def _compared(tape: Tape, skipped: Callable[[str], bool]) -> list[tuple[int, Op]]:
    return [
        (k, op)
        for k, op in enumerate(tape.ops)
        if op.name not in _COPIES and not skipped(op.module)
    ]


def _rest(before: Tape, after: Tape, skipped: Callable[[str], bool]) -> Deviation | None:
    """Operations at the end of one run that the other did not perform."""
    ops = [_compared(tape, skipped) for tape in (before, after)]
    done = min(map(len, ops))
    missing, added = (
        [(index, op) for index, op in mine[done:] if op in set(tape.relevant_ops)]
        for mine, tape in zip(ops, (before, after), strict=True)
    )
    if missing:
        index, old = missing[0]
        return Deviation(f"{old.name} is not computed any more", old, index, excusable=True)
    if added:
        _, new = added[0]
        here = [op for op in before.ops if op.module == new.module] or before.ops
        why = f"{new.name} is computed in addition at the end"
        return Deviation(why, here[-1], len(before.ops), excusable=True)
    return None


def _stop(before: Tape, after: Tape, why: str) -> Deviation:
    """Where a run that failed would have gone on."""
    done = sum(op.module == after.failed_in for op in after.ops)
    mine = [k for k, op in enumerate(before.ops) if op.module == after.failed_in]
    if not mine:
        return Deviation(why)
    number = mine[min(done, len(mine) - 1)]
    return Deviation(why, before.ops[number], number)


def _is_single(graph: Graph, alive: Tensor, op: Op) -> bool:
    """True if one channel is left of several: torch may compute in another order then."""
    return any(
        new == 1 < old
        for value in op.tensors()
        for old, new in zip(value.shape, graph.shape(value, alive) or (), strict=False)
    )


def _differs(graph: Graph, alive: Tensor, needed: set[Value], old: Op, new: Op) -> str:
    """How an operation of the cut model differs from what it should be; empty if it does not."""
    for a, b in zip(old.outs, new.outs, strict=False):
        wanted = graph.shape(a, alive) if a in needed else None
        if wanted is not None and wanted != b.shape:
            return f"{old.name} gives {list(b.shape)}, where {list(wanted)} are left"
    counted = graph.values.get(old.outs[0]) if old.outs else None  # numbers of channels
    fixed = old.name == "lift_fresh" and not counted
    if fixed and not _same_constant(old.args[0].data, new.args[0].data):
        return "a constant has another value"
    numbers = _numbers_of(new)
    for name, given in _numbers_of(old).items():
        wanted_number = _expected(graph, alive, old, name, given)
        if not _same(wanted_number, numbers.get(name)):
            return f"{old.name} is given {name}={numbers.get(name)}, not {wanted_number}"
    return ""


def _numbers_of(op: Op) -> dict[str, Any]:
    """The arguments that are no tensors and do not follow from the shapes of tensors."""
    given = {**dict(zip(_arguments(op.func), op.args, strict=False)), **op.kwargs}
    found = {
        name: value
        for name, value in given.items()
        if name not in _IMPLIED and not _holds_values(value)
    }
    if op.name == "slice":  # the end follows from the size of what comes out
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
def _arguments(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


_IMPLIED = {"size", "shape", "split_size", "split_sizes", "sizes", "normalized_shape", "N", "C",
            "HxW", "groups", "generator", "output_size", "memory_format"}  # fmt: skip


def _holds_values(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_values(item) for item in value)
    return isinstance(value, Value)


def _same_constant(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or b is None or (a.shape == b.shape and bool(torch.equal(a, b)))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def _expected(graph: Graph, alive: Tensor, op: Op, name: str, given: Any) -> Any:
    """What a number should be after the cut: most stay, some count channels."""
    source: Any = op.args[0] if op.args else None
    if op.name == "slice" and name == "start":
        kept = graph.kept(source, op.args[1] if len(op.args) > 1 else 0, alive)
        return given if kept is None else int(kept[:given].sum())
    if op.name == "select" and name == "index":
        kept = graph.kept(source, op.args[1] % len(source.shape), alive)
        return given if kept is None else int(kept[:given].sum())
    if op.name == "constant_pad_nd" and name == "pad":
        return padding(graph, alive, op.outs[0], given)
    if op.name == "native_group_norm" and name == "group":
        left = graph.kept(source, 1, alive)
        return given if left is None or given == 1 else given * int(left.sum()) // len(left)
    return given
