"""Where the units of prunable groups occur: in parameters, and in every tensor of the traced runs.

A *unit* is the smallest set of channels that can be removed. Units of prunable groups are numbered
from 0; `FROZEN` marks indices that belong to no prunable group. A *layer* is an integer tensor of
units that broadcasts to the shape of a traced tensor (see `labels.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..tracing.tape import Op, Tape, Value
from .labels import support
from .propagation import Contraction, Statistic

# The unit number of an index that belongs to no prunable group. It is -1 on purpose: vectors that
# are indexed by units get one more element at the end, which holds the value for frozen indices.
FROZEN = -1

OpAxis = tuple[int, int, int]  # index of an operation of a module, index of its tensor, axis
# Where a width occurs: there, or on an axis of a parameter or buffer, by its name in the model.
Location = OpAxis | tuple[str, int]
AxisUnits = dict[str, dict[int, Tensor]]  # tensor name -> axis -> unit of each index


class _KeptCache:
    """Caches the results of `Layout.kept` for the last set of units."""

    def __init__(self) -> None:
        # Units and their results are replaced together: several threads may use one graph.
        self._last: tuple[Tensor | None, dict[tuple[int, ...], Tensor]] = (None, {})

    def for_units(self, kept_units: Tensor) -> dict[tuple[int, ...], Tensor]:
        """Return the results for `kept_units`, and drop those for other units."""
        last = self._last
        if last[0] is not kept_units:
            last = self._last = (kept_units, {})
        return last[1]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where units occur. It is built once from the labels and never changed.

    Equal tensors of units are shared, so that what is cached by `id` holds for all of them.

    Attributes:
        axes: The unit of each index along the axes of parameters and buffers.
        sites: The same, only for the axes at which gates act.
        contractions: Operations that merge channels, with units in place of labels.
        shapes: The original shapes of parameters and buffers.
        values: The layers of every traced tensor.
        tapes: The traced runs: eval mode first, then train mode if that runs.
        fillings: Tensors of zeros, ones or noise, which fit any width.
        channel_counts: Operations with arguments that count channels, as in `x[:, :8]`, and the
            units of their input.
        statistics: Means over prunable channels, which weighted norms must replace.
    """

    axes: AxisUnits
    sites: AxisUnits
    contractions: list[Contraction]
    shapes: dict[str, tuple[int, ...]]
    values: dict[Value, list[Tensor]]
    tapes: tuple[Tape, ...]
    fillings: frozenset[Value] = frozenset()
    channel_counts: dict[Op, Tensor] = field(default_factory=dict)
    statistics: tuple[Statistic, ...] = ()

    # --- operations and widths inside a module ---

    @cached_property
    def _ops(self) -> dict[str, list[Op]]:
        found: dict[str, list[Op]] = {}
        for op in (op for tape in self.tapes for op in tape.ops):
            found.setdefault(op.module, []).append(op)
        return found

    def ops_in(self, path: str) -> list[Op]:
        """Return the operations that a module performs itself, without those of its children."""
        return self._ops.get(path, [])

    def width(self, path: str, location: Location, kept_units: Tensor) -> int:
        """Return the size at a location in a module if only the units in `kept_units` are left."""
        if len(location) == 2:
            name, axis = location
            units = self.axes.get(name, {}).get(axis)
            return self.shapes[name][axis] if units is None else int(stays(units, kept_units).sum())
        number, tensor, axis = location
        ops = self.ops_in(path)
        seen = ops[number].tensors() if number < len(ops) else []
        if tensor >= len(seen) or axis >= len(seen[tensor].shape):
            return 0  # the location belongs to another tape; a trial cut rejects it
        value = seen[tensor]
        kept = self.kept(value, axis, kept_units)
        return value.shape[axis] if kept is None else int(kept.sum())

    def locations(self, path: str, size: int) -> list[OpAxis]:
        """Return the axes of tensors in a module that have this size and prunable channels.

        Of several with the same layers, which shrink alike, it returns the first.
        """
        found: dict[tuple[int, ...], OpAxis] = {}
        for number, op in enumerate(self.ops_in(path)):
            for tensor, value in enumerate(op.tensors()):
                layers = tuple(map(id, self.values.get(value, [])))
                for axis, width in enumerate(value.shape):
                    new = width == size and (axis, *layers) not in found
                    if new and self._is_prunable(value, axis):
                        found[axis, *layers] = (number, tensor, axis)
        return list(found.values())

    def _is_prunable(self, value: Value, axis: int) -> bool:
        """Return True if a tensor has prunable units that vary along an axis."""
        return any(
            units.shape[axis] > 1 and has_prunable(units) for units in self.values.get(value, [])
        )

    # --- what is left of a tensor ---

    def kept(self, value: Value, axis: int, kept_units: Tensor) -> Tensor | None:
        """Return which indices along an axis stay, or None if no unit varies along it."""
        layers = [units for units in self.values.get(value, []) if axis in self._axes_of(units)]
        answers = self._kept_cache.for_units(kept_units)
        key = (axis, *map(id, layers))
        if layers and key not in answers:
            left = [
                stays(units, kept_units).movedim(axis, 0).reshape(units.shape[axis], -1).any(1)
                for units in layers
            ]
            answers[key] = torch.stack(left).all(0)
        return answers.get(key)

    def shape(self, value: Value, kept_units: Tensor) -> tuple[int, ...] | None:
        """Return the shape that is left; None for fillings, which take any shape."""
        if value in self.fillings and not self.values.get(value):
            return None
        kept = [self.kept(value, axis, kept_units) for axis in range(len(value.shape))]
        return tuple(
            size if left is None else int(left.sum())
            for size, left in zip(value.shape, kept, strict=True)
        )

    @cached_property
    def _kept_cache(self) -> _KeptCache:
        return _KeptCache()

    @cached_property
    def _varying_axes(self) -> dict[int, tuple[int, ...]]:
        """Cache of `_axes_of`, by the id of the layer."""
        return {}

    def _axes_of(self, units: Tensor) -> tuple[int, ...]:
        """Return the axes along which a layer holds different units."""
        if id(units) not in self._varying_axes:
            axes = support(units)
            found = tuple(axis for axis in axes if len(axes) == 1 or varies(units, axis))
            self._varying_axes[id(units)] = found or axes[-1:]
        return self._varying_axes[id(units)]

    # --- what a cut leaves empty or unread ---

    def emptied(self, kept_units: Tensor) -> set[tuple[str, int]]:
        """Return the axes (tensor name, axis) along which no index is left."""
        named_axes, (numbers, units) = self._flat_axes
        left = torch.zeros(len(named_axes), dtype=torch.bool, device="cpu")
        left[numbers[stays(units, kept_units)]] = True
        return {named_axes[number] for number in (~left).nonzero().flatten().tolist()}

    @cached_property
    def _flat_axes(self) -> tuple[list[tuple[str, int]], tuple[Tensor, Tensor]]:
        named_axes = [(name, axis) for name, axes in self.axes.items() for axis in axes]
        return named_axes, _flat([[self.axes[name][axis]] for name, axis in named_axes])

    def unread(self, kept_units: Tensor, needed: Tensor) -> Tensor:
        """Return the units in `kept_units` that only contractions without an output read.

        Units in `needed` are never among them.
        """
        (makers, made), (readers, read), always_busy = self._contraction_units
        busy = always_busy.clone()
        busy[makers[stays(made, kept_units)]] = True
        useful = needed.clone()
        useful[read[busy[readers]]] = True
        return kept_units & ~useful

    @cached_property
    def _contraction_units(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Number the contractions: which units they make, which they read at gated sites.

        The last tensor marks contractions that make no unit: their outputs always stay.
        """
        # The tape of the other mode and further calls of a layer repeat contractions.
        items = {
            (*map(id, item.makes), 0, *map(id, item.sites)): item for item in self.contractions
        }
        makers, made = _flat([item.makes for item in items.values()])
        readers, read = _flat([item.sites for item in items.values()])
        gated = read != FROZEN
        ends = [not item.makes for item in items.values()]
        always_busy = torch.tensor(ends, dtype=torch.bool, device="cpu")
        return (makers, made), (readers[gated], read[gated]), always_busy

    def merged(self, owners: Tensor) -> tuple[AxisUnits, list[Contraction]]:
        """Return axes and contractions with `owners[unit]` in place of units, each once."""
        known: dict[int, Tensor] = {}

        def merge(units: Tensor) -> Tensor:
            if id(units) not in known:
                known[id(units)] = torch.unique(owners[units])
            return known[id(units)]

        axes = {
            name: {axis: merge(units) for axis, units in mine.items()}
            for name, mine in self.axes.items()
        }
        contractions = [
            Contraction(item.op, [], list(map(merge, item.sites)), list(map(merge, item.makes)))
            for item in self.contractions
        ]
        return axes, contractions


def _flat(vectors: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate lists of vectors; return the list number of every element, and the elements."""
    numbers = [number for number, mine in enumerate(vectors) for _ in mine]
    flat = [vector.flatten() for mine in vectors for vector in mine]
    if not flat:
        return (torch.empty(0, dtype=torch.long, device="cpu"),) * 2
    sizes = torch.tensor([len(vector) for vector in flat], device="cpu")
    return torch.tensor(numbers, device="cpu").repeat_interleave(sizes), torch.cat(flat)


def stays(units: Tensor, kept_units: Tensor) -> Tensor:
    """Return for every index whether its unit is in `kept_units`; frozen indices always stay."""
    frozen = units == FROZEN
    return kept_units[units] | frozen if len(kept_units) else frozen


def varies(units: Tensor, axis: int) -> bool:
    """Return True if a layer holds different units (or labels) along an axis."""
    return bool((units != units.narrow(axis, 0, 1)).any())


def has_prunable(units: Tensor) -> bool:
    """Return True if some index belongs to a prunable group."""
    return bool((units != FROZEN).any())
