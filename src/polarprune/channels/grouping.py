"""Form units from joined labels, and groups from units.

    labels   every index of every axis of every parameter has one; rules have joined them
    units    components of joined labels: the smallest thing that can be removed
    groups   units that occur on the same axes equally often: they share producers, consumers,
             price, and one gate vector

A component of labels is named by its *root*, its smallest label. Axes are numbered in the order in
which they got their labels (`Labels.axes`); a unit *occurs* on an axis as often as that axis holds
labels of its component. The units of prunable groups are renumbered from 0, group after group, and
`Layout` keeps these numbers only.

Networks have many labels, so pairs of integers are packed into one (`a * stride + b` with
`b < stride`) and sorted with `torch.unique`: sorting the packed numbers sorts by `a`, then by `b`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..tracing.tape import Tape
from .graph import Graph, Group, module_of
from .labels import Axis, Labels
from .layout import FROZEN
from .layout_builder import build_layout
from .notes import Note
from .propagation import AtLeast, Flow
from .reasons import NO_REASON, OUTPUT, Reason, because


def build(tapes: Sequence[Tape], flow: Flow, frozen: Mapping[str, Reason]) -> Graph:
    """Build the graph of groups from labels that have been followed through the tapes.

    Args:
        tapes: The traced runs.
        flow: The labels, after `label_decisions.follow`.
        frozen: Groups that later findings froze, and why.

    Returns:
        A graph without cost and without rewrites; minimums are set only where operations need
        several channels.
    """
    formed = _form_groups(flow, frozen)
    uneven = _uneven_groups(flow, formed)
    if uneven:
        return build(tapes, flow, {**frozen, **uneven})
    layout = build_layout(tapes, flow, formed.unit_of, formed.consumed)
    graph = Graph(formed.groups, layout, unknown=dict(flow.unknown))
    return _with_required_channels(graph, flow.at_least, formed.unit_of)


# --- units to groups ------------------------------------------------------------------------------

Occurrences = tuple[tuple[int, int], ...]  # (index of an axis, how often a unit occurs there)


@dataclass(frozen=True)
class _Alike:
    """Units with the same occurrences. `roots` names them, in ascending order of the first."""

    occurrences: Occurrences
    roots: Tensor


@dataclass(frozen=True)
class _Roles:
    """Which axes make channels and which merge them."""

    axes: list[Axis]
    consumed: set[int]  # indices of axes at which contractions read channels
    produced: set[int]  # indices of axes from which channels come

    def matter(self, alike: _Alike) -> bool:
        """Return True if a layer makes or merges these units."""
        return any(axis in self.consumed | self.produced for axis, _ in alike.occurrences)

    def lacking(self, alike: _Alike) -> Reason:
        """Return why a unit without any other reason is frozen; empty if it is prunable."""
        if not any(axis in self.consumed for axis, _ in alike.occurrences):
            return because(
                None,
                "no layer merges these channels, so no gate can close them",
                remedy="let a layer with a weight read them",
            )
        if not any(axis in self.produced for axis, _ in alike.occurrences):
            return because(
                None,
                "no layer makes these channels: they come from a plain parameter or a buffer",
                remedy="make them by a layer",
            )
        return NO_REASON

    def producers(self, alike: _Alike) -> list[str]:
        """Return the modules that make these units, without those that also merge them."""
        makers = [axis for axis, _ in alike.occurrences if axis in self.produced]
        only = [self._owner(axis) for axis in makers if axis not in self.consumed]
        return only or [self._owner(axis) for axis in makers]

    def consumers(self, alike: _Alike) -> list[str]:
        """Return the modules that merge these units."""
        return [self._owner(axis) for axis, _ in alike.occurrences if axis in self.consumed]

    def _owner(self, axis: int) -> str:
        """Return the module of an axis; the name of the tensor if the root module owns it."""
        return module_of(self.axes[axis].tensor) or self.axes[axis].tensor


@dataclass(frozen=True)
class _Formed:
    """The groups, and the unit of every label (`FROZEN` if it belongs to no prunable group)."""

    groups: dict[str, Group]
    unit_of: Tensor
    consumed: set[int]


def _form_groups(flow: Flow, frozen: Mapping[str, Reason]) -> _Formed:
    """Sort units into groups and number the units of prunable groups."""
    root = flow.labels.roots()
    reasons = flow.labels.reasons(root)
    roles = _Roles(flow.labels.axes, _consumed_axes(flow), _produced_axes(flow))
    groups: dict[str, Group] = {}
    unit_of_root = torch.full((flow.labels.count,), FROZEN)
    offset = 0
    for alike in filter(roles.matter, _alike(flow.labels, root)):
        for reason, members in _split_by_reason(alike, reasons, roles.lacking(alike)):
            group = _group(roles, alike, len(members), reason, groups)
            if not group.frozen and group.name in frozen:
                group = replace(group, frozen=True, reason=frozen[group.name])
            if not group.frozen:
                group = replace(group, offset=offset)
                offset += group.size
                unit_of_root[members] = torch.arange(group.offset, offset)
            groups[group.name] = group
    return _Formed(groups, unit_of_root[root], roles.consumed)


def _group(
    roles: _Roles, alike: _Alike, size: int, reason: Reason, taken: Mapping[str, Group]
) -> Group:
    """Make a group, named after its first producer; a number is added where that is taken."""
    producers, consumers = roles.producers(alike), roles.consumers(alike)
    base = (producers or consumers)[0]
    name, number = base, 2
    while name in taken:
        name, number = f"{base}#{number}", number + 1
    makers, readers = (tuple(dict.fromkeys(names)) for names in (producers, consumers))
    return Group(name, size, makers, readers, frozen=bool(reason), reason=reason)


def _split_by_reason(
    alike: _Alike, reasons: tuple[Tensor, list[Reason]], lacking: Reason
) -> Iterator[tuple[Reason, Tensor]]:
    """Split a set of units: the prunable ones first, then those of each reason, by its text.

    Units of different outputs stay together, with the reason of the first.

    Args:
        alike: The units.
        reasons: The number of the reason of every root, or -1, and the reasons.
        lacking: The reason of number -1: as the last one it has that index. An empty text sorts
            first.
    """
    numbers, every = reasons[0][alike.roots], [*reasons[1], lacking]
    present = sorted(numbers.unique().tolist(), key=lambda number: every[number])
    outputs = [number for number in present if every[number].fact == OUTPUT]
    for number in outputs[1:]:
        numbers[numbers == number] = outputs[0]
    for number in present:
        members = alike.roots[numbers == number]
        if len(members):
            yield every[number], members


def _alike(labels: Labels, root: Tensor) -> list[_Alike]:
    """Sort units into sets with the same occurrences, ordered by their smallest unit.

    The occurrences of a unit become a short list of integers, its *signature*; all signatures lie
    in one vector, unit after unit. Neighbouring units mostly have the same signature, so Python
    reads a signature only where it differs from the one before.
    """
    if not labels.axes:
        return []
    units, lengths, signatures, stride = _signatures(labels, root)
    firsts = _where_lists_change(signatures, lengths)
    starts = (lengths.cumsum(0) - lengths)[firsts].tolist()
    found: dict[tuple[int, ...], list[Tensor]] = {}
    runs = zip(units.tensor_split(firsts[1:]), starts, lengths[firsts].tolist(), strict=True)
    for run, start, length in runs:
        signature = tuple(signatures[start : start + length].tolist())
        found.setdefault(signature, []).append(run)
    return [
        _Alike(tuple(divmod(packed, stride) for packed in signature), torch.cat(runs_of_units))
        for signature, runs_of_units in found.items()
    ]


def _signatures(labels: Labels, root: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return all units, the lengths of their signatures, the signatures, and their stride.

    An element of a signature packs the index of an axis and the unit's count on that axis:
    `axis * stride + count`.
    """
    sizes = torch.tensor([axis.size for axis in labels.axes])
    labels_on_axes = [torch.arange(axis.start, axis.start + axis.size) for axis in labels.axes]
    axis_numbers = torch.arange(len(sizes)).repeat_interleave(sizes)
    # Pack (unit, axis) and count equal pairs: sorted by unit, then by axis.
    many = len(sizes) + 1
    packed = root[torch.cat(labels_on_axes)] * many + axis_numbers
    pairs, counts = packed.unique(return_counts=True)
    units, lengths = (pairs // many).unique_consecutive(return_counts=True)
    stride = int(counts.max()) + 1
    return units, lengths, (pairs % many) * stride + counts, stride


def _where_lists_change(elements: Tensor, lengths: Tensor) -> Tensor:
    """Return the indices of the lists that differ from the list before them; 0 is one of them.

    The lists lie one after another in `elements`; `lengths` says how long each is. If a list is as
    long as the one before, the element that lies `length` before is its counterpart there.
    """
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    counterpart = torch.arange(len(elements)) - lengths[owner]
    differs = torch.ones(len(lengths), dtype=torch.bool)  # the first has nothing before it
    differs[1:] = lengths[1:] != lengths[:-1]
    differs[owner[elements != elements[counterpart.clamp_min(0)]]] = True
    return differs.nonzero().flatten()


# --- which axes make and merge channels -----------------------------------------------------------


def _consumed_axes(flow: Flow) -> set[int]:
    """Return the indices of the axes at which contractions read channels."""
    return _axes_with(flow.labels, [site for item in flow.contractions for site in item.sites])


def _produced_axes(flow: Flow) -> set[int]:
    """Return the indices of the axes from which channels of contractions and embeddings come."""
    made = [vector for item in flow.contractions for vector in item.makes]
    return _axes_with(flow.labels, [*made, *flow.embedding_channels])


def _axes_with(labels: Labels, vectors: list[Tensor]) -> set[int]:
    """Return the indices of the axes that own one of these labels.

    `before[k]` counts the wanted labels below k, so an axis with the labels from `start` to `end`
    owns one if the counts at both ends differ.
    """
    if not vectors:
        return set()
    wanted = torch.zeros(labels.count + 1, dtype=torch.long)
    wanted[torch.cat(vectors) + 1] = 1
    before = wanted.cumsum(0)
    starts = torch.tensor([axis.start for axis in labels.axes])
    ends = starts + torch.tensor([axis.size for axis in labels.axes])
    return set((before[ends] > before[starts]).nonzero().flatten().tolist())


# --- groups whose units do not cost the same ------------------------------------------------------


def _uneven_groups(flow: Flow, formed: _Formed) -> dict[str, Reason]:
    """Return groups whose units occur unequally often in an operation, and why this freezes them.

    A slice of a weight makes such groups. On whole axes of parameters all units of a group occur
    equally often, by the definition of a group, so these are skipped.
    """
    prunable = [group for group in formed.groups.values() if not group.frozen]
    sizes = torch.tensor([group.size for group in prunable], dtype=torch.long)
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    whole_axes = {(axis.start, axis.size) for axis in flow.labels.axes}
    found: dict[str, Reason] = {}
    for item in flow.contractions:
        for labels in item.factors:
            first, last = int(labels[0]), int(labels[-1])
            if (first, labels.numel()) in whole_axes and last - first == labels.numel() - 1:
                continue
            for number in _unequal_counts(formed.unit_of[labels], owner, sizes):
                found[prunable[number].name] = because(
                    item.op,
                    "some of these channels cost more than others",
                    remedy="use a separate weight there instead of a slice of one",
                )
    return found


def _unequal_counts(units: Tensor, owner: Tensor, sizes: Tensor) -> list[int]:
    """Return the indices of the groups of which some units occur more often in `units`."""
    present, counts = units[units != FROZEN].unique(return_counts=True)
    numbers, group = owner[present].unique(return_inverse=True)
    none = counts.new_zeros(len(numbers))
    low = none.scatter_reduce(0, group, counts, "amin", include_self=False)
    high = none.scatter_reduce(0, group, counts, "amax", include_self=False)
    missing = torch.bincount(group, minlength=len(numbers)) != sizes[numbers]
    found: list[int] = numbers[(low != high) | missing].tolist()
    return found


# --- operations that need several channels --------------------------------------------------------


def _with_required_channels(graph: Graph, needs: Sequence[AtLeast], unit_of: Tensor) -> Graph:
    """Raise minimums so that in every plan enough channels stay for all operations."""
    minimum: dict[str, int] = {}
    notes = []
    for need in needs:
        for name, least in _required(graph, unit_of[need.layer], need):
            if least > minimum.get(name, 0):
                minimum[name] = least
                notes.append(Note(f"keeps at least {least} channels: {need.why}", [name]))
    return replace(graph.with_minimum(minimum), notes=tuple(notes))


def _required(graph: Graph, layer: Tensor, need: AtLeast) -> Iterator[tuple[str, int]]:
    """Yield the largest groups on an axis, with a minimum each, until enough channels stay."""
    units = layer.movedim(need.axis, 0).flatten(1)[:, 0] if layer.dim() > 1 else layer
    certain, names = int((units == FROZEN).sum()), graph.owners
    found = Counter(names[unit] for unit in units.tolist() if unit != FROZEN)
    for name, occurrences in found.most_common():
        if certain >= need.count:
            return
        size = graph.groups[name].size
        channels_per_unit = max(1, occurrences // size)
        least = min(size, math.ceil((need.count - certain) / channels_per_unit))
        certain += least * channels_per_unit
        yield name, least
