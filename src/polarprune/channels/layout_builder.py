"""Build a `Layout`: replace labels by units in every parameter, operation and traced tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..tracing.tape import Op, Tape, Value
from .labels import Axis
from .layout import AxisUnits, Layout, has_prunable, varies
from .propagation import Contraction, Flow, Statistic


class _UnitTensors:
    """Turns tensors of labels into tensors of units. Equal results are one object."""

    def __init__(self, unit_of: Tensor) -> None:
        self.unit_of = unit_of
        self._same: dict[tuple[torch.Size, bytes], Tensor] = {}
        self._layers: dict[int, Tensor] = {}

    def of_axis(self, axis: Axis) -> Tensor:
        """Return the units along an axis of a parameter."""
        return self._shared(self.unit_of[axis.start : axis.start + axis.size])

    def of(self, labels: Tensor) -> Tensor:
        """Return the units of these labels."""
        return self._shared(self.unit_of[labels])

    def of_layer(self, layer: Tensor) -> Tensor:
        """Convert a layer. Many traced tensors share one, so it is converted once."""
        if id(layer) not in self._layers:
            self._layers[id(layer)] = self.of(layer)
        return self._layers[id(layer)]

    def _shared(self, units: Tensor) -> Tensor:
        """Return the first tensor of units that equals this one."""
        return self._same.setdefault((units.shape, units.numpy().tobytes()), units)


def build_layout(
    tapes: Sequence[Tape], flow: Flow, unit_of: Tensor, consumed: Collection[int]
) -> Layout:
    """Build the layout of the units of prunable groups.

    Args:
        tapes: The traced runs.
        flow: The labels of all tensors in them.
        unit_of: The unit of every label, or `FROZEN`.
        consumed: The indices of the axes at which contractions read channels.
    """
    units = _UnitTensors(unit_of)
    every = dict(enumerate(flow.labels.axes))
    return Layout(
        axes=_axis_units(every, units),
        sites=_axis_units({k: axis for k, axis in every.items() if k in consumed}, units),
        contractions=[_in_units(item, units) for item in flow.contractions],
        shapes=_shapes(tapes),
        values={
            value: [units.of_layer(layer) for layer in layers]
            for value, layers in flow.value_layers.items()
        },
        tapes=tuple(tapes),
        fillings=frozenset(flow.uniform_values),
        channel_counts=_channel_counts(flow, unit_of),
        statistics=_statistics(flow, unit_of),
    )


def _axis_units(axes: Mapping[int, Axis], units: _UnitTensors) -> AxisUnits:
    """Return the units along those axes that have prunable ones."""
    found: AxisUnits = {}
    for axis in axes.values():
        mine = units.of_axis(axis)
        if has_prunable(mine):
            found.setdefault(axis.tensor, {})[axis.axis] = mine
    return found


def _in_units(item: Contraction, units: _UnitTensors) -> Contraction:
    """Return a contraction with units in place of labels."""
    parts = (item.factors, item.sites, item.makes)
    return Contraction(item.op, *([units.of(vector) for vector in part] for part in parts))


def _shapes(tapes: Sequence[Tape]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters and buffers that an operation reads."""
    values: Iterator[Value] = (v for tape in tapes for op in tape.ops for v in op.inputs())
    return {value.name: value.shape for value in values if value.name}


def _channel_counts(flow: Flow, unit_of: Tensor) -> dict[Op, Tensor]:
    """Return the operations whose arguments count prunable channels, with their units."""
    found = {}
    for op, layer, axis in flow.channel_counts:
        units = unit_of[layer]
        if has_prunable(units) and varies(units, axis):
            found[op] = units
    return found


def _statistics(flow: Flow, unit_of: Tensor) -> tuple[Statistic, ...]:
    """Return the means over prunable channels, with their units."""
    found = [Statistic(item.op, unit_of[item.layer]) for item in flow.statistics]
    return tuple(item for item in found if has_prunable(item.layer))
