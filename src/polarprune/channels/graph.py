"""`Graph`: the result of `trace`, made of frozen parts.

- `groups`: sets of channels that share one gate vector. A *unit* is the smallest set of channels
  that can be removed; a *group* holds the units that occur on the same axes equally often, so they
  have the same producers, the same consumers and the same price.
- `layout`: where the units occur in parameters and in traced tensors.
- `rewrites`: which modules need new code, new attributes or plain weights after a cut.
- `resources`: the cost as a function of the widths.

Each part is made by one module. Later findings make a new `Graph` with `dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..tracing.tape import Op, Tape, Value
from ..validation.plans import checked_plan
from .group_table import state_of, table
from .layout import FROZEN, AxisUnits, Layout, Location, OpAxis, stays, varies
from .notes import Note
from .propagation import Contraction, Statistic
from .reasons import NO_REASON, Reason

if TYPE_CHECKING:
    from ..cost.resources import Cost
    from ..rewriting.captured_forward import CapturedForward
    from ..rewriting.weight_graphs import ForwardWeight

__all__ = [
    "FROZEN",
    "Graph",
    "Group",
    "Location",
    "OpAxis",
    "Plan",
    "Rewrites",
    "module_of",
    "plan_of",
    "stays",
    "varies",
]

Plan = dict[str, list[int]]  # group name -> the channels to keep


@dataclass(frozen=True)
class Group:
    """Channels that are pruned by one gate vector, one gate for each unit.

    Attributes:
        name: The first module that produces the channels; `name#2` if that is taken.
        size: The number of units.
        producers: The modules whose outputs these channels are.
        consumers: The modules that merge these channels.
        frozen: True if no channel of the group can be pruned.
        reason: Why the group is frozen; empty if it is prunable.
        minimum: How many units must stay.
        offset: The number of its first unit among the units of all prunable groups.
    """

    name: str
    size: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    frozen: bool = False
    reason: Reason = NO_REASON
    minimum: int = 0
    offset: int = 0

    @property
    def units(self) -> slice:
        """The units of a prunable group among those of all prunable groups."""
        return slice(self.offset, self.offset + self.size)

    def __str__(self) -> str:
        return f"{self.name}: {self.size} channels, {state_of(self)}"


@dataclass(frozen=True, eq=False)
class Rewrites:
    """What changes in a cut or gated model besides the shapes of its parameters.

    Attributes:
        rewritten: Modules whose forward is replaced by a captured graph.
        size_attributes: Module -> attribute -> the location whose width the attribute must equal.
        weights: Modules with weighted norms, and the units that weight their statistics.
        weighted: The captured forward of these modules, with weighted statistics.
        computed: Names of weights that parametrizations compute.
        forward_weights: Layers that compute their weight in their own forward.
        held: The constants that the rewritten modules held when they were traced.
    """

    rewritten: dict[str, CapturedForward] = field(default_factory=dict)
    size_attributes: dict[str, dict[str, Location]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    weighted: dict[str, CapturedForward] = field(default_factory=dict)
    computed: list[str] = field(default_factory=list)
    forward_weights: dict[str, ForwardWeight] = field(default_factory=dict)
    held: dict[str, dict[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Graph:
    """The result of `trace`: groups of channels, where they occur, and what they cost.

    Attributes:
        groups: All groups by name, prunable and frozen ones.
        layout: Where the units of prunable groups occur.
        rewrites: What else changes in a cut model.
        unknown: Operations without a rule, and where they occur; they freeze their channels.
        notes: Remarks for the user, one sentence each.
        count_with_norms: Returns how many more channels `norms=True` may make prunable.
        families: Sets of groups that keep equally many units, by the position that they share.
        resources: The cost model; None while the graph is being built. Users read `cost`.
    """

    groups: dict[str, Group]
    layout: Layout = field(repr=False)
    rewrites: Rewrites = field(default_factory=Rewrites, repr=False)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    families: dict[str, tuple[str, ...]] = field(default_factory=dict)
    count_with_norms: Callable[[], int] = field(default=int, repr=False)
    resources: Cost | None = field(default=None, repr=False)

    @cached_property
    def with_norms(self) -> int:
        """How many more channels `norms=True` may make prunable; counted when it is asked for."""
        return self.count_with_norms()

    @property
    def prunable(self) -> dict[str, Group]:
        """The groups that can be pruned, in the order of their units."""
        return {name: group for name, group in self.groups.items() if not group.frozen}

    @property
    def units(self) -> int:
        """The number of units in all prunable groups."""
        return sum(group.size for group in self.prunable.values())

    @property
    def owners(self) -> list[str]:
        """The name of the group of every prunable unit."""
        return [name for name, group in self.prunable.items() for _ in range(group.size)]

    @property
    def cost(self) -> Cost:
        """What the network costs as a function of the widths of its groups."""
        assert self.resources is not None, "the graph is still being built"
        return self.resources

    # --- copies with one part changed ---

    def with_minimum(self, minimum: Mapping[str, int]) -> Graph:
        """Return a graph in which the named groups keep at least that many units."""
        groups = {
            name: replace(group, minimum=max(group.minimum, minimum.get(name, 0)))
            for name, group in self.groups.items()
        }
        return replace(self, groups=groups)

    def with_size_attributes(self, found: Mapping[str, Mapping[str, Location]]) -> Graph:
        """Return a graph in which these attributes of modules follow widths."""
        return replace(
            self,
            rewrites=replace(self.rewrites, size_attributes={k: dict(v) for k, v in found.items()}),
        )

    def outline(self) -> Graph:
        """Return a graph with one unit for each group, to ask which groups close entirely."""
        names = list(self.prunable)
        numbers = [
            number for number, group in enumerate(self.prunable.values()) for _ in range(group.size)
        ]
        owners = torch.tensor([*numbers, FROZEN], device="cpu")
        axes, contractions = self.layout.merged(owners)
        groups = {k: replace(self.groups[k], size=1, offset=n) for n, k in enumerate(names)}
        layout = replace(self.layout, axes=axes, contractions=contractions)
        return replace(self, groups=groups, layout=layout)

    # --- from plans to units ---

    def kept_units(self, plan: Plan) -> Tensor:
        """Return a boolean vector that is True for the units a plan keeps.

        Args:
            plan: Group names and the channels to keep. Other groups keep all channels.

        Raises:
            PruneError: The plan names a group or a channel that is not prunable.
        """
        groups = self.prunable
        kept_units = torch.ones(self.units, dtype=torch.bool, device="cpu")
        sizes = {name: group.size for name, group in groups.items()}
        for name, kept in checked_plan(plan, sizes).items():
            mine = kept_units[groups[name].units]
            mine[:] = False
            mine[torch.tensor(kept, dtype=torch.long, device="cpu")] = True
        return kept_units

    def without_unread(self, kept_units: Tensor) -> Tensor:
        """Return `kept_units` without the units whose readers have no output channels left.

        Removing a layer's outputs makes its inputs useless, so this repeats until nothing changes.
        No group falls below its minimum, unless it was below it before.
        """
        needed = torch.zeros_like(kept_units)
        for group in self.prunable.values():
            if group.minimum:
                left = kept_units[group.units].nonzero().flatten()
                needed[group.offset + left[: group.minimum]] = True
        while bool((unread := self.layout.unread(kept_units, needed)).any()):
            kept_units = kept_units & ~unread
        return kept_units

    # --- the parts, by the names that other packages use ---

    @property
    def axes(self) -> AxisUnits:
        """The unit of each index along the axes of parameters and buffers."""
        return self.layout.axes

    @property
    def sites(self) -> AxisUnits:
        """The same as `axes`, only for the axes at which gates act."""
        return self.layout.sites

    @property
    def contractions(self) -> list[Contraction]:
        """The operations that merge channels, with their units."""
        return self.layout.contractions

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The original shapes of parameters and buffers."""
        return self.layout.shapes

    @property
    def values(self) -> dict[Value, list[Tensor]]:
        """The layers of units of every traced tensor."""
        return self.layout.values

    @property
    def tapes(self) -> tuple[Tape, ...]:
        """The traced runs: eval mode first, then train mode if that runs."""
        return self.layout.tapes

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The means over prunable channels, which weighted norms must replace."""
        return self.layout.statistics

    def ops_in(self, path: str) -> list[Op]:
        """Return the operations that a module performs itself, without those of its children."""
        return self.layout.ops_in(path)

    def width(self, path: str, location: Location, kept_units: Tensor) -> int:
        """Return the size at a location in a module if only the units in `kept_units` are left."""
        return self.layout.width(path, location, kept_units)

    def kept(self, value: Value, axis: int, kept_units: Tensor) -> Tensor | None:
        """Return which indices along an axis stay, or None if no unit varies along it."""
        return self.layout.kept(value, axis, kept_units)

    def shape(self, value: Value, kept_units: Tensor) -> tuple[int, ...] | None:
        """Return the shape of a tensor that is left; None if it takes any shape."""
        return self.layout.shape(value, kept_units)

    def emptied(self, kept_units: Tensor) -> set[tuple[str, int]]:
        """Return the axes (tensor name, axis) along which no index is left."""
        return self.layout.emptied(kept_units)

    @property
    def rewritten(self) -> dict[str, CapturedForward]:
        """The modules whose forward is replaced by a captured graph."""
        return self.rewrites.rewritten

    @property
    def size_attributes(self) -> dict[str, dict[str, Location]]:
        """By module and attribute: the location whose width the attribute must equal."""
        return self.rewrites.size_attributes

    @property
    def weights(self) -> dict[str, Tensor]:
        """The units that weight the statistics of each module with weighted norms."""
        return self.rewrites.weights

    @property
    def weighted(self) -> dict[str, CapturedForward]:
        """The captured forward of these modules, with weighted statistics."""
        return self.rewrites.weighted

    @property
    def computed(self) -> list[str]:
        """The names of weights that parametrizations compute."""
        return self.rewrites.computed

    @property
    def forward_weights(self) -> dict[str, ForwardWeight]:
        """The layers that compute their weight in their own forward."""
        return self.rewrites.forward_weights

    def __str__(self) -> str:
        return table(self)


def plan_of(graph: Graph, kept_units: Tensor) -> Plan:
    """Return the plan that keeps the units in `kept_units`."""
    return {
        name: kept_units[group.units].nonzero().flatten().tolist()
        for name, group in graph.prunable.items()
    }


def module_of(tensor: str) -> str:
    """Return the module that owns a parameter: `layer1.conv.weight` -> `layer1.conv`."""
    return tensor.rpartition(".")[0]
