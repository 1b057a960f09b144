"""Follow the labels through all tapes, then take the decisions that need all of them.

A rule sees one operation at a time. Where an operation leaves a choice (remove whole rows or the
same columns of every row?), the rule only notes it. When every operation has been followed, this
module decides, so that afterwards

- no label is left undecided,
- every cut is rectangular: a layer of labels varies along one axis of a tensor only,
- the cost of every operation depends on at most two prunable widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..tracing.tape import Tape
from .labels import Axis, Labels, support
from .layout import varies
from .propagation import Choice, Flow
from .reasons import BLOCKS, HEADS_AS_WHOLE, because


def follow(tapes: Sequence[Tape], flow: Flow, keep: Iterable[tuple[str, str]]) -> None:
    """Send labels through the tapes, freeze what the user keeps, and take all decisions.

    Args:
        tapes: The traced runs.
        flow: The labels so far; they are joined and frozen in place.
        keep: Names of tensors to freeze, each with the pattern of `keep=` that named it.
    """
    for tape in tapes:
        flow.run(tape)
    _freeze_kept(flow, keep)
    for choice in flow.choices:
        _choose_rows_or_columns(flow, choice)
    _join_or_freeze_pending(flow)
    _make_rectangular(flow)
    _limit_to_two_factors(flow)


def _freeze_kept(flow: Flow, keep: Iterable[tuple[str, str]]) -> None:
    """Freeze all labels of the tensors that the user keeps."""
    axes: dict[str, list[Axis]] = {}
    for axis in flow.labels.axes:
        axes.setdefault(axis.tensor, []).append(axis)
    for tensor, pattern in keep:
        remedy = "remove this pattern to prune these channels"
        why = because(None, f"kept by keep={pattern!r}", remedy=remedy)
        for axis in axes.get(tensor, []):
            flow.labels.freeze(torch.arange(axis.start, axis.start + axis.size), why)


# --- rows or columns ---


def _choose_rows_or_columns(flow: Flow, choice: Choice) -> None:
    """Where a weight reads channels in blocks, remove columns or rows, to leave more units."""
    columns, rows = (_units_left(flow, choice, columns=one) for one in (True, False))
    op = choice.contraction.op
    if columns >= rows:
        vector = flow.labels.flatten_onto(choice.layer, (choice.axis,)).flatten()
        flow.labels.join(vector, choice.inner)
        fact = "these channels are read in blocks, and columns of the blocks are pruned instead"
        flow.labels.freeze(choice.passed, because(op, fact, remedy=BLOCKS))
    else:
        flow.labels.join(choice.layer, choice.passed)
        choice.contraction.sites.clear()
        fact = "reads a part of every head, and entire heads are pruned"
        flow.labels.freeze(choice.inner, because(op, fact, remedy=HEADS_AS_WHOLE))


def _units_left(flow: Flow, choice: Choice, *, columns: bool) -> int:
    """Count the units that could be pruned after this choice: not frozen, and read by a layer.

    The joins are tried on a copy of the labels, in which every component is one label.
    """
    root = flow.labels.roots()
    frozen = flow.labels.reasons(root)[0] >= 0
    trial, units = Labels(), root[choice.layer]
    trial.fresh(flow.labels.count)
    if columns:
        vector = trial.flatten_onto(units, (choice.axis,)).flatten()
        trial.join(vector, root[choice.inner])
    else:
        trial.join(units, root[choice.passed])
    for item in flow.pending_joins:  # these will most likely be joined later
        if _varies_along(root[item.wide], item.narrow):
            trial.join(root[item.wide], root[item.narrow])
    new = trial.roots()[root]
    prunable = torch.zeros_like(frozen)
    read = [choice.inner] if columns else [s for x in flow.contractions for s in x.sites]
    prunable[new[torch.cat(read)]] = True
    prunable[new[frozen.nonzero().flatten()]] = False
    return int(prunable[new[choice.layer].unique()].sum())


def _varies_along(units: Tensor, narrow: Tensor) -> bool:
    """Return True if the units vary along one of the axes along which `narrow` varies."""
    return any(varies(units, axis) for axis in support(narrow))


# --- labels along one axis that met labels along several ---


def _join_or_freeze_pending(flow: Flow) -> None:
    """Join labels along one axis with labels along several axes, or freeze the former.

    Example: queries have labels (head, position in the head), and rotary embeddings scale every
    position. Joining them would tie all heads together. Where whole heads are the units, the
    labels do not vary along the position, and the positions are frozen instead.
    """
    root = flow.labels.roots()
    for item in flow.pending_joins:
        if _varies_along(root[item.wide], item.narrow):
            flow.labels.join(item.wide, item.narrow)
        else:
            fact = "shared by all heads, or other units of several channels,"
            remedy = "the units are pruned, not the channels inside of them"
            flow.labels.freeze(item.narrow, because(item.op, fact, remedy=remedy))


# --- rectangular cuts ---


def _make_rectangular(flow: Flow) -> None:
    """Where labels vary along several axes, make whole slices along one of them the units."""
    changed = True
    while changed:
        root = flow.labels.roots()
        changed = False
        for layer in flow.multi_axis_layers:
            units = root[layer]
            axes = [axis for axis in support(layer) if varies(units, axis)]
            if len(axes) > 1:
                flow.labels.flatten_onto(layer, (_best_axis(units, axes),))
                changed = True


def _best_axis(units: Tensor, axes: list[int]) -> int:
    """Return the axis that leaves most units when the labels are joined along all others."""

    def units_left(axis: int) -> int:
        trial = Labels()
        trial.fresh(int(units.max()) + 1)
        trial.flatten_onto(units, (axis,))
        return int(trial.roots()[units].unique().numel())

    return max(axes, key=units_left)


# --- the cost is quadratic ---


def _limit_to_two_factors(flow: Flow) -> None:
    """Freeze all but two factors of every contraction, since the cost model is quadratic."""
    wide = [item for item in flow.contractions if len(item.factors) > 2]
    if not wide:
        return
    root = flow.labels.roots()
    frozen = flow.labels.reasons(root)[0] >= 0
    for item in wide:
        units = [root[factor] for factor in item.factors]
        prunable = [k for k, mine in enumerate(units) if not bool(frozen[mine].all())]
        for number in prunable[2:]:
            fact = "the third prunable factor of a product of channels"
            remedy = "freeze another one by keep=[...] to prune this one"
            flow.labels.freeze(item.factors[number], because(item.op, fact, remedy=remedy))
            frozen[units[number]] = True
