"""Propagate labels through a tape, operation by operation.

What an operation does to labels is decided by its rule: a function `(flow, op) -> None` that reads
the layers of the operation's inputs (`flow.layers`), joins or freezes labels (`flow.labels`), and
sets the layers of its outputs (`flow.set`). An operation without a rule goes to `flow.default`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tracing.schemas import changes_shape_in_place, is_mutable
from ..tracing.tape import Op, Tape, Value
from .labels import Labels, support
from .reasons import OUTPUT, POINTWISE, Origin, Reason, because

Rule = Callable[["Flow", Op], None]
_FILLS = ("zero_", "fill_", "bernoulli_", "uniform_", "normal_", "random_")


@dataclass(eq=False)
class Contraction:
    """An operation that merges channels by a weight.

    Attributes:
        op: The operation.
        factors: Vectors of labels. The MACs of the operation are proportional to the share of
            labels that remain in each of them.
        sites: Vectors of labels along the input axis of a weight, where a gate can close the
            incoming channels.
        makes: Vectors of labels of the output channels. If it is empty, the operation has a single
            output channel, which is frozen.
    """

    op: Op
    factors: list[Tensor]
    sites: list[Tensor]
    makes: list[Tensor]


@dataclass(eq=False)
class Choice:
    """A weight that reads channels which vary along the contracted axis and along other axes.

    `view(batch, rows, columns)` and a pixel shuffle create such channels. There are two ways to
    prune them. Either the same columns are removed from every row, together with the inputs of the
    weight. Or entire rows are removed, which continue as `passed`. `label_decisions` chooses the
    way that leaves more prunable units, when all operations are known.
    """

    contraction: Contraction
    layer: Tensor
    axis: int  # the contracted one
    inner: Tensor  # labels along the input axis of the weight
    passed: Tensor


@dataclass(eq=False)
class PendingJoin:
    """A layer along several axes that met one along some of these, and the operation."""

    wide: Tensor
    narrow: Tensor
    op: Op | None


@dataclass(eq=False)
class AtLeast:
    """A number of channels that must remain along an axis of a layer, and why."""

    layer: Tensor
    axis: int
    count: int
    why: str


@dataclass(eq=False)
class Statistic:
    """An operation that computes a mean over channels, which gates can weight."""

    op: Op
    layer: Tensor


class Flow:
    """The labels of all tensors while they are sent through tapes.

    Rules read labels with `layers` and `on`, and write them with `set`, `labels.join` and
    `labels.freeze`. What cannot be decided at one operation they note with the methods at the end.

    Args:
        labels: The labels, which are joined and frozen in place.
        rules: The rule of every operation that has one, by overload or by overload packet.
        default: The rule of all other operations.
        norms: Returns whether means over channels in a module may be weighted.
    """

    def __init__(
        self,
        labels: Labels,
        rules: Mapping[object, Rule],
        default: Rule,
        norms: Callable[[str], bool] = lambda module: False,
    ) -> None:
        self.labels = labels
        self._rules, self._default, self._norms = rules, default, norms
        # What rules note, for `label_decisions`, `grouping` and `layout_builder`.
        self.contractions: list[Contraction] = []
        self.choices: list[Choice] = []
        self.embedding_channels: list[Tensor] = []
        self.channel_counts: list[tuple[Op, Tensor, int]] = []  # operation, layer and its axis
        self.pending_joins: list[PendingJoin] = []
        self.at_least: list[AtLeast] = []
        self.multi_axis_layers: list[Tensor] = []  # vary along several axes
        self.unknown: dict[str, str] = {}  # operation without a rule -> where
        self.statistics: list[Statistic] = []
        self.unweighted = False  # a mean was frozen that gates could weight
        # The labels of tensors.
        self.value_layers: dict[Value, list[Tensor]] = {}
        self.uniform_values: set[Value] = set()  # see `is_uniform`
        self._named_layers: dict[str, list[Tensor]] = {}  # of parameters, buffers
        self._moved_weights: set[Value] = set()  # views and copies of parameters
        self._created: set[Value] = set()  # in a run, passed to it, or written to
        self._producers: dict[Value, Op] = {}
        self._inputs: set[Value] = set()
        self._current: Op | None = None

    # --- running ---

    def run(self, tape: Tape) -> None:
        """Apply the rule of every operation, then freeze what leaves the run."""
        relevant = set(tape.relevant_ops)
        self._created.update(tape.inputs)
        self._inputs.update(tape.inputs)
        for op in tape.ops:
            # The results of the other operations are discarded: they only have to run.
            self.labels.binding = op in relevant
            self._apply(op)
        self.labels.binding = True
        self._freeze_final_values(tape)

    def _apply(self, op: Op) -> None:
        self._current = op
        self._producers.update((value, op) for value in op.outs if value not in op.inputs())
        rule = self._rules.get(op.func) or self._rules.get(op.func._overloadpacket)
        (rule or self._default)(self, op)
        if op.name != "lift_fresh":  # it turns a number in the code into a constant
            self._created.update(value.root for value in op.outs)
        if op.seeded:
            self._freeze_seeded(op)
        if is_mutable(op.func) and not changes_shape_in_place(op.func):
            self._update_uniform(op)

    def _freeze_final_values(self, tape: Tape) -> None:
        for value in tape.outputs:
            # The only output needs no description.
            named = self.describe(value) if len(tape.outputs) > 1 else None
            self.freeze(value, because(None, OUTPUT, tensor=named))
        for value in tape.stored_values:
            fact = "stored by the model's code but not returned, so it cannot be compared"
            remedy = "return it, or do not keep it after forward"
            self.freeze(value, because(None, fact, tensor=self.describe(value), remedy=remedy))
        for value in tape.read_values:
            fact, remedy = (
                "its values decide what the model's code does",
                "use torch.where in place of Python's if",
            )
            self.freeze(value, because(None, fact, tensor=self.describe(value), remedy=remedy))

    def _freeze_seeded(self, op: Op) -> None:
        """Freeze the channels that are combined with seeded random numbers.

        They are the same in every run, so they are a fixed vector, not noise.
        """
        reason = because(
            op,
            f"{op.name} draws numbers with a fixed seed",
            remedy="set the seed outside the model",
        )
        for value in (*op.inputs(), *op.outs):
            self.freeze(value, reason)
        written = op.inputs()[:1] if is_mutable(op.func) else []
        drawn = {value.root for value in (*op.outs, *written)}
        self._unmark_uniform(lambda value: value.root in drawn)

    def _update_uniform(self, op: Op) -> None:
        """Drop the mark of uniform tensors that are overwritten in part, or with other values."""
        target: object = op.args[0]
        if not isinstance(target, Value):
            return
        base = target.base
        if base is None or math.prod(target.shape) == math.prod(base.shape):
            alike = torch.Tag.pointwise in op.func.tags and all(
                map(self.is_uniform, op.inputs()[1:])
            )
            if op.name not in _FILLS and not alike:
                self._unmark_uniform(lambda v: v in (target, base) or v.base is target)
        elif not any(self.layers(value) for value in op.inputs()[1:]):
            self.unmark_uniform(base)

    def _unmark_uniform(self, condition: Callable[[Value], bool]) -> None:
        self.uniform_values -= {value for value in self.uniform_values if condition(value)}

    # --- what rules read ---

    def layers(self, value: object) -> list[Tensor]:
        """Return the layers of a tensor. Parameters and buffers get theirs at the first call."""
        if not isinstance(value, Value):
            return []
        if value not in self.value_layers:
            self.value_layers[value] = self._labelled(value) if value.name else []
        return self.value_layers[value]

    def _labelled(self, value: Value) -> list[Tensor]:
        if value.name not in self._named_layers:
            self._named_layers[value.name] = self.labels.of_tensor(value.name, value.shape)
        return self._named_layers[value.name]

    def named_layers(self, name: str) -> list[Tensor]:
        """Return the layers of a parameter or buffer, if an operation read it."""
        return self._named_layers.get(name, [])

    def on(self, value: Value, axis: int) -> Tensor | None:
        """Return the labels along an axis as a vector, or None if no layer varies along it.

        A layer that varies along other axes as well is joined along these.
        """
        axis = value.axis(axis)
        found = [layer for layer in self.layers(value) if axis in support(layer)]
        if not found:
            return None
        layer = found[0] if len(found) == 1 else self._main_layer(found, value)
        return self.labels.flatten_onto(layer, (axis,)).flatten()

    def _main_layer(self, layers: list[Tensor], value: Value) -> Tensor:
        """Choose one of several layers on one axis, and freeze the others.

        Prefers the first layer with prunable channels that a contraction makes.
        """
        root = self.labels.roots()
        prunable = self.labels.reasons(root)[0] < 0
        made = torch.zeros_like(prunable)
        for vector in (v for item in self.contractions if item.sites for v in item.makes):
            made[root[vector]] = True
        first = next((x for x in layers if bool((made & prunable)[root[x]].any())), layers[0])
        for layer in layers:
            if layer is not first:
                self.labels.freeze(layer, self._here("shares an axis with other channels", value))
        return first

    def constant_index(self, value: object) -> Tensor | None:
        """Return the contents of an integer vector that the model holds or its code spells out."""
        if not isinstance(value, Value) or value.root in self._created or len(value.shape) != 1:
            return None
        data = value.data
        return None if data is None or data.dtype == torch.bool else data.cpu().long()

    def is_uniform(self, value: Value) -> bool:
        """Return True for zeros, ones and noise: all channels are alike, so any can be removed."""
        return value in self.uniform_values

    def is_weight(self, value: Value) -> bool:
        """Return True for a parameter or buffer, or a view or copy of one.

        Scaling it scales what is computed from it, so a gate can be multiplied into it.
        """
        return bool(value.name) or value in self._moved_weights

    def describe(self, value: Value) -> Origin:
        """Say in a few words where a tensor comes from, for a reason."""
        shape = f"of shape {value.shape}"
        op = self._producers.get(value)
        if value.name:
            return Origin(f"{value.name!r} {shape}")
        if value.root in self._inputs:
            return Origin(f"an input of the model {shape}")
        if op is None or op.name == "lift_fresh":
            return Origin(f"a constant tensor {shape}", is_constant=True)
        return Origin(f"the result {shape} of {op.name} in {op.where}", op.module)

    def _here(self, fact: str, value: Value) -> Reason:
        return because(self._current, fact, tensor=self.describe(value), remedy=POINTWISE)

    # --- what rules write ---

    def set(self, value: Value, layers: Iterable[Tensor]) -> None:
        """Set the layers of a tensor. A layer that does not vary freezes its only channel."""
        kept = []
        for layer in layers:
            if support(layer):
                kept.append(layer)
                if len(support(layer)) > 1:
                    self.multi_axis_layers.append(layer)
            else:
                fact = "a single channel is picked out of its group"
                self.labels.freeze(layer, self._here(fact, value))
        self.value_layers[value] = kept

    def freeze(self, value: object, reason: str) -> None:
        """Freeze all channels of a tensor."""
        for layer in self.layers(value):
            self.labels.freeze(layer, reason)

    def mark_uniform(self, value: Value) -> None:
        """Note that all channels of a tensor are alike."""
        self.uniform_values.add(value)

    def unmark_uniform(self, base: Value) -> None:
        """Note that the channels of a tensor and of its views are no longer all alike."""
        self._unmark_uniform(lambda value: base in (value, value.base))

    def set_moved(self, op: Op, source: Value, results: Iterable[Iterable[Tensor]]) -> None:
        """Set the layers of an operation's outputs, which hold elements of `source` unchanged."""
        for out, layers in zip(op.outs, results, strict=True):
            self.set(out, layers)
            if self.is_uniform(source):
                self.mark_uniform(out)
            if self.is_weight(source):
                self._moved_weights.add(out)

    # --- what rules note, to be decided when all operations are known ---

    def add_contraction(self, contraction: Contraction) -> None:
        """Note an operation that merges channels by a weight."""
        self.contractions.append(contraction)

    def add_factors(self, vectors: Iterable[Tensor]) -> None:
        """Note further labels on whose number the MACs of the last contraction depend."""
        last = self.contractions[-1]
        last.factors = [*last.factors, *vectors]

    def add_choice(self, choice: Choice) -> None:
        """Note a weight that reads channels of which rows or columns may be removed."""
        self.contractions.append(choice.contraction)
        self.choices.append(choice)

    def add_embedding(self, channels: Tensor) -> None:
        """Note labels of channels that an embedding makes."""
        self.embedding_channels.append(channels)

    def count_channels(self, op: Op, layer: Tensor, axis: int) -> None:
        """Note an operation with arguments that count channels, as in `x[:, :8]`."""
        self.channel_counts.append((op, layer, axis))

    def join_later(self, wide: Tensor, narrow: Tensor) -> None:
        """Note that a layer along several axes met one along some of these."""
        self.pending_joins.append(PendingJoin(wide, narrow, self._current))

    def require(self, layer: Tensor, axis: int, count: int, why: str) -> None:
        """Note that some channels must remain along an axis of a layer, and why."""
        self.at_least.append(AtLeast(layer, axis, count, why))

    def note_unknown(self, op: Op) -> None:
        """Note an operation without a rule, unless its result is discarded."""
        if self.labels.binding:
            self.unknown.setdefault(str(op.func), op.where)

    def weight_mean(self, op: Op, layer: Tensor) -> bool:
        """Note that gates weight a mean over these channels. Return False if they cannot."""
        if len(support(layer)) > 1:
            return False
        if not self._norms(op.module):
            self.unweighted = True
            return False
        self.statistics.append(Statistic(op, layer))
        return True
