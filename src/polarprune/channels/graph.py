"""Groups: the channels that live and die together, where they occur, and what a plan leaves.

A *unit* is one component of joined labels: the smallest thing that can be removed. A *group* is
the set of units that occur on the same axes equally often: they have the same producers, the same
consumers and the same price.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PruneError
from ..tracing.tape import Op, Tape, Value
from .labels import support
from .propagation import Contraction, Statistic

if TYPE_CHECKING:
    from ..cost.resources import Cost
    from ..rewriting.captured_forward import CapturedForward
    from ..rewriting.weight_graphs import ForwardWeight

Plan = dict[str, list[int]]
Location = tuple[int, int, int]  # operation in a module, tensor of it, axis
FROZEN = -1  # stands for "belongs to no open group" in a vector of units


@dataclass
class Group:
    """Channels that share one gate vector."""

    name: str
    size: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    frozen: bool = False
    reason: str = ""
    minimum: int = 0  # how many units must stay
    offset: int = 0  # of its first unit among all open units

    def __str__(self) -> str:
        state = f"whole: {self.reason}" if self.frozen else f"at least {self.minimum} stay"
        return f"{self.name}: {self.size} channels, {state}"


@dataclass
class Graph:
    """What `trace` found: groups, where they occur, and what everything costs."""

    groups: dict[str, Group]
    axes: dict[str, dict[int, Tensor]]  # tensor -> axis -> unit of each index, or FROZEN
    sites: dict[str, dict[int, Tensor]]  # the same for the axes at which gates act
    contractions: list[Contraction]  # with units in place of labels
    shapes: dict[str, tuple[int, ...]]
    values: dict[Value, list[Tensor]] = field(repr=False)
    tapes: list[Tape] = field(repr=False)
    channel_counts: dict[Op, Tensor] = field(
        default_factory=dict, repr=False
    )  # code that counts channels
    fillings: set[Value] = field(default_factory=set, repr=False)  # zeros, ones, noise
    # modules that take means over open channels: these, and what the module computes with weights
    statistics: list[Statistic] = field(default_factory=list, repr=False)
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)
    weighted: dict[str, CapturedForward] = field(default_factory=dict, repr=False)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    with_norms: int = 0  # how many more channels norms=True may open
    # what modules with a rewritten forward held when they were traced
    held: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    computed: list[str] = field(default_factory=list, repr=False)  # weights, by parametrizations
    forward_weights: dict[str, ForwardWeight] = field(
        default_factory=dict, repr=False
    )  # layers that compute theirs
    # module -> attributes of it that hold a width, and where in the module that width occurs
    size_attributes: dict[str, dict[str, Location]] = field(default_factory=dict, repr=False)
    rewritten: dict[str, CapturedForward] = field(
        default_factory=dict, repr=False
    )  # captured forwards
    cost: Cost = field(default=None, repr=False)  # type: ignore[assignment]

    @property
    def prunable(self) -> dict[str, Group]:
        return {name: group for name, group in self.groups.items() if not group.frozen}

    @property
    def units(self) -> int:
        return sum(group.size for group in self.prunable.values())

    @property
    def owners(self) -> list[str]:
        """The group of every open unit."""
        return [name for name, group in self.prunable.items() for _ in range(group.size)]

    def alive(self, plan: Plan) -> Tensor:
        """One truth value a unit, from a plan; groups it does not name stay whole."""
        alive = torch.ones(self.units, dtype=torch.bool, device="cpu")
        groups = self.prunable
        if not isinstance(plan, Mapping):
            raise PruneError(f"plan: {type(plan).__name__} given, where a dict of lists is wanted.")
        for name, indices in plan.items():
            group = groups.get(name)
            if group is None:
                raise PruneError(
                    f"plan: there is no open group {name!r}. Open groups: {', '.join(groups)}."
                )
            kept = _indices(name, indices)
            if not all(0 <= index < group.size for index in kept):
                raise PruneError(f"plan: group {name!r} has channels 0 to {group.size - 1} only.")
            alive[group.offset : group.offset + group.size] = False
            alive[[group.offset + index for index in kept]] = True
        return alive

    def settle(self, alive: Tensor) -> Tensor:
        """Without the units that are read only by layers of which nothing is left.

        No group falls below its minimum, if it was not below it before.
        """
        (makers, made), (readers, read), open_ended = self._wires
        needed = torch.zeros_like(alive)
        for group in self.prunable.values():
            if group.minimum:
                left = alive[group.offset : group.offset + group.size].nonzero().flatten()
                needed[group.offset + left[: group.minimum]] = True
        while True:
            busy = open_ended.clone()
            busy[makers[stays(made, alive)]] = True
            useful = needed.clone()
            useful[read[busy[readers]]] = True
            if bool((useful | ~alive).all()):
                return alive
            alive = alive & useful

    @cached_property
    def _wires(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Contractions, by number, and the units they make and read; which ones make no unit."""
        makers, made = _flat([item.makes for item in self.contractions])
        readers, read = _flat([item.sites for item in self.contractions])
        gated = read != FROZEN
        ends = [not item.makes for item in self.contractions]
        open_ended = torch.tensor(ends, dtype=torch.bool, device="cpu")
        return (makers, made), (readers[gated], read[gated]), open_ended

    def outline(self) -> Graph:
        """The same with one unit for each group: enough where groups close entirely or not."""
        names = list(self.prunable)
        owner = [number for number, name in enumerate(names) for _ in range(self.groups[name].size)]
        owners = torch.tensor([*owner, FROZEN], device="cpu")

        known: dict[int, Tensor] = {}

        def few(units: Tensor) -> Tensor:
            if id(units) not in known:
                known[id(units)] = torch.unique(owners[units])
            return known[id(units)]

        def of_axes(tensors: dict[str, dict[int, Tensor]]) -> dict[str, dict[int, Tensor]]:
            return {name: {k: few(u) for k, u in axes.items()} for name, axes in tensors.items()}

        groups = {k: replace(self.groups[k], size=1, offset=n) for n, k in enumerate(names)}
        contractions = [
            Contraction(item.op, [], [few(u) for u in item.sites], [few(u) for u in item.makes])
            for item in self.contractions
        ]
        return replace(self, groups=groups, axes=of_axes(self.axes), contractions=contractions)

    def emptied(self, alive: Tensor) -> set[tuple[str, int]]:
        """The axes of tensors along which nothing is left."""
        places, (numbers, units) = self._places
        left = torch.zeros(len(places), dtype=torch.bool, device="cpu")
        left[numbers[stays(units, alive)]] = True
        return {places[number] for number in (~left).nonzero().flatten().tolist()}

    @cached_property
    def _places(self) -> tuple[list[tuple[str, int]], tuple[Tensor, Tensor]]:
        places = [(name, axis) for name, axes in self.axes.items() for axis in axes]
        return places, _flat([[self.axes[name][axis]] for name, axis in places])

    @cached_property
    def _recent(self) -> tuple[Tensor | None, dict[tuple[int, ...], Tensor]]:
        """What is left along an axis of some layers, for the last question."""
        return None, {}

    @cached_property
    def _known_axes(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def _ops(self) -> dict[str, list[Op]]:
        found: dict[str, list[Op]] = {}
        for op in (op for tape in self.tapes for op in tape.ops):
            found.setdefault(op.module, []).append(op)
        return found

    def ops_in(self, path: str) -> list[Op]:
        """The operations that a module performs itself, not by its children."""
        return self._ops.get(path, [])

    def width(self, path: str, location: Location, alive: Tensor) -> int:
        """How wide a tensor inside a module is."""
        number, tensor, axis = location
        ops = self.ops_in(path)
        seen = ops[number].tensors() if number < len(ops) else []
        if tensor >= len(seen) or axis >= len(seen[tensor].shape):
            return 0  # another tape: a trial will show that this place is none
        value = seen[tensor]
        kept = self.kept(value, axis, alive)
        return value.shape[axis] if kept is None else int(kept.sum())

    def locations(self, path: str, size: int) -> list[Location]:
        """Where in a module a tensor has this width and open channels."""
        return [
            (number, tensor, axis)
            for number, op in enumerate(self.ops_in(path))
            for tensor, value in enumerate(op.tensors())
            for axis, width in enumerate(value.shape)
            if width == size and self._is_open(value, axis)
        ]

    def _is_open(self, value: Value, axis: int) -> bool:
        return any(
            units.shape[axis] > 1 and bool((units != FROZEN).any())
            for units in self.values.get(value, [])
        )

    def kept(self, value: Value, axis: int, alive: Tensor) -> Tensor | None:
        """Which indices along an axis of a tensor stay, or None if no label varies along it."""
        layers = [units for units in self.values.get(value, []) if axis in self._axes_of(units)]
        if self._recent[0] is not alive:
            self._recent = alive, {}
        key = (axis, *map(id, layers))
        if layers and key not in self._recent[1]:
            left = [
                stays(units, alive).movedim(axis, 0).reshape(units.shape[axis], -1).any(1)
                for units in layers
            ]
            self._recent[1][key] = torch.stack(left).all(0)
        return self._recent[1].get(key)

    def _axes_of(self, units: Tensor) -> tuple[int, ...]:
        """The axes along which there are different units."""
        if id(units) not in self._known_axes:
            axes = support(units)
            found = tuple(axis for axis in axes if len(axes) == 1 or varies(units, axis))
            self._known_axes[id(units)] = found or axes[-1:]
        return self._known_axes[id(units)]

    def shape(self, value: Value, alive: Tensor) -> tuple[int, ...] | None:
        """What is left of its shape; None for fillings, which are as wide as they must be."""
        if value in self.fillings and not self.values.get(value):
            return None
        kept = [self.kept(value, axis, alive) for axis in range(len(value.shape))]
        return tuple(
            size if left is None else int(left.sum())
            for size, left in zip(value.shape, kept, strict=True)
        )

    def __str__(self) -> str:
        return table(self)


def _flat(vectors: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """All elements in one vector, and with each the number of the list it comes from."""
    numbers = [number for number, mine in enumerate(vectors) for _ in mine]
    flat = [vector.flatten() for mine in vectors for vector in mine]
    if not flat:
        return (torch.empty(0, dtype=torch.long, device="cpu"),) * 2
    sizes = torch.tensor([len(vector) for vector in flat], device="cpu")
    return torch.tensor(numbers, device="cpu").repeat_interleave(sizes), torch.cat(flat)


def stays(units: Tensor, alive: Tensor) -> Tensor:
    """Which of these are alive; what belongs to no open group always is."""
    return torch.cat([alive, alive.new_ones(1)])[units]


def varies(units: Tensor, axis: int) -> bool:
    return bool((units != units.narrow(axis, 0, 1)).any())


def plan_of(graph: Graph, alive: Tensor) -> Plan:
    """Group name -> indices of the units that are alive."""
    return {
        name: alive[group.offset : group.offset + group.size].nonzero().flatten().tolist()
        for name, group in graph.prunable.items()
    }


def _indices(name: str, given: Any) -> list[int]:
    kept = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(kept, Iterable) or isinstance(kept, str):
        raise PruneError(f"plan: group {name!r} is given {given!r}, where a list is wanted.")
    found = list(kept)
    if not all(isinstance(index, Integral) and not isinstance(index, bool) for index in found):
        raise PruneError(
            f"plan: group {name!r} is given {str(found[:3])[1:-1]}, …; give the indices of the "
            f"channels to keep, as [0, 2, 5] (of a mask: mask.nonzero().flatten())."
        )
    return [int(index) for index in found]


def module_of(tensor: str) -> str:
    """The module that owns a parameter: `layer1.conv.weight` -> `layer1.conv`."""
    return tensor.rpartition(".")[0]


def table(graph: Graph) -> str:
    """The groups as a person reads them; a price is what one channel saves."""
    head = ("group", "channels", "MACs", "params", "also made by", "read by", "state")
    rows: list[tuple[str, ...]] = [head]
    prices = graph.cost.prices() if graph.cost else {}
    for group in graph.groups.values():
        stays = f", at least {group.minimum} stay" if group.minimum else ""
        others = tuple(maker for maker in group.producers if maker != group.name)
        rows.append((
            group.name, str(group.size),
            *(f"{share:.3%}" for share in prices.get(group.name, ())),
            *([] if group.name in prices else ["", ""]),
            _few(others), _few(group.consumers),
            f"whole: {group.reason}" if group.frozen else f"open{stays}",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(w) if k in (1, 2, 3) else cell.ljust(w)
                       for k, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in rows]  # fmt: skip
    lines.insert(1, "  ".join("-" * w for w in widths[:-1]))
    total = graph.cost.original() if graph.cost else {}
    summary = [f"{key}: {value:,.0f}" for key, value in total.items()]
    opened = sum(group.size for group in graph.prunable.values())
    closed = sum(group.size for group in graph.groups.values() if group.frozen)
    lines += ["", f"{opened} channels open, {closed} whole; " + ", ".join(summary)]
    lines += [f"unknown operation: {name} in {where}" for name, where in graph.unknown.items()]
    lines += [f"note: {note}" for note in graph.notes]
    if graph.with_norms:
        lines.append(
            f"note: norms=True may open {graph.with_norms} more channels, which norms or means mix"
        )
    return "\n".join(lines)


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:1]) + (f" +{len(names) - 1}" if len(names) > 1 else "")
