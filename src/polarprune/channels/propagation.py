"""Labels on their way through a tape. What an operation does to them is its rule's business.

A rule is a function `(flow, op) -> None` that reads the layers of the operation's inputs
(`flow.layers`), joins or freezes labels, and sets the layers of its outputs (`flow.set`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..tracing.tape import Op, Tape, Value
from .labels import Labels, support

Rule = Callable[["Flow", Op], None]
_FILLS = ("zero_", "fill_", "bernoulli_", "uniform_", "normal_", "random_")


@dataclass(eq=False)
class Contraction:
    """An operation that merges channels.

    `factors` are the label vectors whose live shares scale its MACs; `sites` are the label vectors,
    belonging to a weight, at which a gate silences the incoming channels; `makes` are the channels
    that come out (none: a single one, which stays).
    """

    op: Op
    factors: list[Tensor]
    sites: list[Tensor]
    makes: list[Tensor]


@dataclass(eq=False)
class Choice:
    """A weight reads channels that vary along the axis it contracts and along others.

    `view(batch, rows, columns)` leaves such channels, and so does a pixel shuffle. Either the same
    columns of every row go, with the inputs of the weight, or whole rows, which then go on as
    `passed`. What leaves more is known when all operations have been seen.
    """

    contraction: Contraction
    layer: Tensor
    axis: int  # the one that is contracted
    inner: Tensor  # of the weight
    passed: Tensor


@dataclass(eq=False)
class AtLeast:
    """So many channels have to stay along an axis of a layer, and why."""

    layer: Tensor
    axis: int
    count: int
    why: str


@dataclass(eq=False)
class Statistic:
    """An operation that takes a mean over channels, which gates can weight."""

    op: Op
    layer: Tensor


@dataclass(eq=False)
class Flow:
    """Labels on their way through a tape."""

    labels: Labels
    rules: Mapping[Any, Rule]
    default: Rule
    contractions: list[Contraction] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    looked_up: list[Tensor] = field(default_factory=list)  # channels that embeddings make
    # numbers that count channels: where, of which layer, along which axis
    channel_counts: list[tuple[Op, Tensor, int]] = field(default_factory=list)
    # a layer that varies along several axes, and one along some of these: decided at the end
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    at_least: list[AtLeast] = field(default_factory=list)
    wide: list[Tensor] = field(default_factory=list)  # layers that vary along several axes
    unknown: dict[str, str] = field(default_factory=dict)  # operation -> where
    norms: Callable[[str], bool] = lambda module: False  # may its means be weighted?
    statistics: list[Statistic] = field(default_factory=list)
    unweighted: bool = False  # a mean that could have been, was not
    _layers: dict[Value, list[Tensor]] = field(default_factory=dict)
    _tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    _uniform: set[Value] = field(default_factory=set)
    _weights: set[Value] = field(default_factory=set)  # parameters that were moved about
    _made: set[Value] = field(default_factory=set)  # in a run, or given to it, or written to

    def run(self, tape: Tape) -> None:
        matter = set(tape.relevant_ops)
        self._made.update(tape.inputs)
        for op in tape.ops:
            rule = self.rules.get(op.func) or self.rules.get(op.func._overloadpacket)
            # What comes of the others is not looked at: they have to run, that is all.
            self.labels.binding = op in matter
            (rule or self.default)(self, op)
            if op.name != "lift_fresh":  # which makes a constant of a number in the code
                self._made.update(value.root for value in op.outs)
            if op.seeded:
                self._fix(op)
            if op.func._schema.is_mutable and torch.Tag.inplace_view not in op.func.tags:
                self._written(op)
        self.labels.binding = True
        for value in tape.outputs:
            self.freeze(value, "part of the model's output")
        for value in tape.stored_values:
            self.freeze(value, "stored by the model's code but not returned, so not compared")
        for value in tape.read_values:
            self.freeze(value, "its values decide what the model's code does")

    def _fix(self, op: Op) -> None:
        """Numbers that are drawn from a seeded generator are a fixed vector, not noise."""
        written = op.func._schema.is_mutable and op.inputs()[:1]
        for value in (*op.inputs(), *op.outs):
            self.freeze(value, f"numbers are drawn with a fixed seed in {op.where}")
        drawn = {value.root for value in (*op.outs, *(written or ()))}
        self._uniform -= {value for value in self._uniform if value.root in drawn}

    def _written(self, op: Op) -> None:
        """Zeros of which a part is overwritten with ones are not alike along every axis."""
        target: Any = op.args[0]
        base = target.base if isinstance(target, Value) else None
        if base is None or math.prod(target.shape) == math.prod(base.shape):
            others = op.inputs()[1:]
            alike = torch.Tag.pointwise in op.func.tags and all(map(self.uniform, others))
            if isinstance(target, Value) and op.name not in _FILLS and not alike:
                own = (target, base)
                self._uniform -= {v for v in self._uniform if v in own or v.base in own[:1]}
            return
        if not any(self.layers(value) for value in op.inputs()[1:]):
            self._uniform -= {value for value in self._uniform if base in (value, value.base)}

    def layers(self, value: Any) -> list[Tensor]:
        if not isinstance(value, Value):
            return []
        if value not in self._layers:
            self._layers[value] = self._of_tensor(value) if value.name else []
        return self._layers[value]

    def _of_tensor(self, value: Value) -> list[Tensor]:
        if value.name not in self._tensors:
            self._tensors[value.name] = self.labels.of_tensor(value.name, value.shape)
        return self._tensors[value.name]

    def known(self, name: str) -> list[Tensor]:
        """The layers of a parameter or buffer, if it was read."""
        return self._tensors.get(name, [])

    def set(self, value: Value, layers: Iterable[Tensor]) -> None:
        kept = []
        for layer in layers:
            if support(layer):
                kept.append(layer)
                if len(support(layer)) > 1:
                    self.wide.append(layer)
            else:
                self.labels.freeze(layer, "a single channel is picked out of its group")
        self._layers[value] = kept

    def on(self, value: Any, axis: int) -> Tensor | None:
        """The layer that varies along this axis, joined along all its other axes."""
        axis = value.axis(axis)
        found = [layer for layer in self.layers(value) if axis in support(layer)]
        if not found:
            return None
        layer = found[0] if len(found) == 1 else self._main(found)
        return self.labels.flatten_onto(layer, (axis,)).flatten()

    def _main(self, layers: list[Tensor]) -> Tensor:
        """Of labels flattened into one axis, the first that a layer makes; the others stay."""
        root = self.labels.roots()
        open_ones = self.labels.reasons(root)[0] < 0
        made = torch.zeros_like(open_ones)
        for vector in (v for item in self.contractions if item.sites for v in item.makes):
            made[root[vector]] = True
        first = next((x for x in layers if bool((made & open_ones)[root[x]].any())), layers[0])
        for layer in layers:
            if layer is not first:
                self.labels.freeze(layer, "lies on one axis with other channels")
        return first

    def weigh(self, op: Op, layer: Tensor) -> bool:
        """Note that a mean over these channels is to be weighted, if that is wanted."""
        if len(support(layer)) > 1:
            return False
        if not self.norms(op.module):
            self.unweighted = True
            return False
        self.statistics.append(Statistic(op, layer))
        return True

    def freeze(self, value: Any, reason: str) -> None:
        for layer in self.layers(value):
            self.labels.freeze(layer, reason)

    def constant(self, value: Any) -> Tensor | None:
        """What is in a vector of integers that the model holds or its code spells out."""
        known = isinstance(value, Value) and value.root not in self._made and len(value.shape) == 1
        data = value.data if known else None
        return None if data is None or data.dtype == torch.bool else data.cpu().long()

    def uniform(self, value: Any) -> bool:
        """True for zeros, ones, noise: every channel is like every other, so any may go."""
        return value in self._uniform

    def pure(self, value: Any) -> bool:
        """True for a parameter, moved about at most: scaling it scales what is computed with it."""
        return bool(value.name) or value in self._weights
