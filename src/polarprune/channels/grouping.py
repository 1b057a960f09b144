"""From joined labels to groups: what lives and dies together, and what is frozen.

Labels go through the tapes; components of joined labels become units, units with the same
occurrences become groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..tracing.tape import Tape
from .graph import FROZEN, Graph, Group, module_of, varies
from .labels import Axis, Labels, support
from .propagation import AtLeast, Choice, Contraction, Flow, Statistic


def follow(tapes: Sequence[Tape], flow: Flow, keep: Iterable[tuple[str, str]]) -> None:
    """Send labels through the tapes, freeze what `keep` names, and make cuts rectangular."""
    for tape in tapes:
        flow.run(tape)
    for tensor, pattern in keep:
        for axis in flow.labels.axes:
            if axis.tensor == tensor:
                labels = torch.arange(axis.start, axis.start + axis.size)
                flow.labels.freeze(labels, f"kept whole by keep={pattern!r}")
    _choose(flow)
    _decide(flow)
    _make_rectangular(flow)
    _limit(flow)


def _choose(flow: Flow) -> None:
    """Columns or rows, where a weight reads channels in blocks: what leaves more."""
    for choice in flow.choices:
        columns, rows = _left(flow, choice, columns=True), _left(flow, choice, columns=False)
        where = choice.contraction.op.where
        if columns >= rows:
            vector = flow.labels.flatten_onto(choice.layer, (choice.axis,)).flatten()
            flow.labels.join(vector, choice.inner)
            flow.labels.freeze(choice.passed, f"rows of which only columns go in {where}")
        else:
            flow.labels.join(choice.layer, choice.passed)
            choice.contraction.sites.clear()
            flow.labels.freeze(choice.inner, f"reads a part of every head in {where}")


def _left(flow: Flow, choice: Choice, *, columns: bool) -> int:
    """How many units could be pruned after this choice: not frozen, and read by some layer."""
    root = flow.labels.roots()
    frozen = flow.labels.reasons(root)[0] >= 0
    trial, units = Labels(), root[choice.layer]
    trial.fresh(flow.labels.count)
    if columns:
        vector = trial.flatten_onto(units, (choice.axis,)).flatten()
        trial.join(vector, root[choice.inner])
    else:
        trial.join(units, root[choice.passed])
    for wide, narrow in flow.pending_joins:  # what else will be joined, most likely
        if any(varies(root[wide], axis) for axis in support(narrow)):
            trial.join(root[wide], root[narrow])
    new = trial.roots()[root]
    good = torch.zeros_like(frozen)
    read = [choice.inner] if columns else [s for x in flow.contractions for s in x.sites]
    good[new[torch.cat(read)]] = True
    good[new[frozen.nonzero().flatten()]] = False
    return int(good[new[choice.layer].unique()].sum())


def _decide(flow: Flow) -> None:
    """Where labels along one axis met labels along several: join them, or keep that axis whole.

    A scale for every place within a head (rotary positions, a norm of queries) would tie all heads
    together; where heads go as a whole, the places within a head stay.
    """
    root = flow.labels.roots()
    for wide, narrow in flow.pending_joins:
        if any(varies(root[wide], axis) for axis in support(narrow)):
            flow.labels.join(wide, narrow)
        else:
            flow.labels.freeze(narrow, "a place within a unit that goes as a whole")


def _limit(flow: Flow) -> None:
    """A product of three open widths has no place in a quadratic cost: the last of them stays."""
    wide = [item for item in flow.contractions if len(item.factors) > 2]
    root = flow.labels.roots() if wide else torch.tensor(())
    frozen = flow.labels.reasons(root)[0] >= 0 if wide else torch.tensor(())
    for item in wide:
        units = [root[factor] for factor in item.factors]
        for number in [k for k, mine in enumerate(units) if not bool(frozen[mine].all())][2:]:
            why = f"product of two sets of channels in {item.op.where}"
            flow.labels.freeze(item.factors[number], why)
            frozen[units[number]] = True


def _make_rectangular(flow: Flow) -> None:
    """Where labels vary along several axes, let whole slices along one of them be the unit."""
    while True:
        root = flow.labels.roots()
        changed = False
        for layer in flow.multi_axis_layers:
            units = root[layer]
            axes = [axis for axis in support(layer) if varies(units, axis)]
            if len(axes) > 1:
                flow.labels.flatten_onto(layer, (_best_axis(units, axes),))
                changed = True
        if not changed:
            return


def _best_axis(units: Tensor, axes: list[int]) -> int:
    """The axis that leaves most units when all others are joined."""

    def left(axis: int) -> int:
        trial = Labels()
        trial.fresh(int(units.max()) + 1)
        trial.flatten_onto(units, (axis,))
        return int(trial.roots()[units].unique().numel())

    return max(axes, key=left)


def build(tapes: Sequence[Tape], flow: Flow, held: Mapping[str, str]) -> Graph:
    """Components of labels become units, units with the same occurrences become groups.

    `held` names groups that stay whole for a reason that was found out later.
    """
    root = flow.labels.roots()
    reasons = flow.labels.reasons(root)
    consumed = _site_axes(flow)
    produced = _made_axes(flow)
    families = [
        (where, units)
        for where, units in _families(flow.labels, root)
        if any(axis in consumed or axis in produced for axis, _ in where)
    ]
    groups: dict[str, Group] = {}
    position = torch.full((flow.labels.count,), FROZEN)
    offset = 0
    for where, units in families:
        for reason, members in _by_reason(units, where, consumed, produced, reasons):
            group = _group(flow.labels.axes, where, members, reason, consumed, produced, groups)
            if not group.frozen and group.name in held:
                group.frozen, group.reason = True, held[group.name]
            if not group.frozen:
                group.offset, offset = offset, offset + group.size
                position[members] = torch.arange(group.offset, offset)
            groups[group.name] = group
    uneven = _uneven(flow, groups, position[root])
    if uneven:
        return build(tapes, flow, {**held, **uneven})
    return _graph(tapes, flow, groups, position[root], consumed)


def _uneven(flow: Flow, groups: Mapping[str, Group], units: Tensor) -> dict[str, str]:
    """Groups whose units occur differently in an operation, as a slice of a weight makes them."""
    open_ones = [group for group in groups.values() if not group.frozen]
    sizes = torch.tensor([group.size for group in open_ones], dtype=torch.long)
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    whole = {(axis.start, axis.size) for axis in flow.labels.axes}
    found: dict[str, str] = {}
    for item in flow.contractions:
        for labels in item.factors:
            first, last = int(labels[0]), int(labels[-1])
            if (first, labels.numel()) in whole and last - first == labels.numel() - 1:
                continue  # an axis of a weight: there they are alike
            mine = units[labels]
            counts = torch.bincount(mine[mine != FROZEN], minlength=len(owner))
            none = counts.new_zeros(len(sizes))
            low = none.scatter_reduce(0, owner, counts, "amin", include_self=False)
            high = none.scatter_reduce(0, owner, counts, "amax", include_self=False)
            for number in (low != high).nonzero().flatten().tolist():
                why = f"some of its channels cost more than others in {item.op.where}"
                found[open_ones[number].name] = why
    return found


def _site_axes(flow: Flow) -> set[int]:
    return _axes_with(flow.labels, [site for item in flow.contractions for site in item.sites])


def _made_axes(flow: Flow) -> set[int]:
    made = [vector for item in flow.contractions for vector in item.makes]
    return _axes_with(flow.labels, [*made, *flow.embedding_channels])


def _axes_with(labels: Labels, vectors: list[Tensor]) -> set[int]:
    """The numbers of the axes to which these labels were given."""
    if not vectors:
        return set()
    wanted = torch.zeros(labels.count + 1, dtype=torch.long)
    wanted[torch.cat(vectors) + 1] = 1
    before = wanted.cumsum(0)  # how many are wanted, before each label
    starts = torch.tensor([axis.start for axis in labels.axes])
    ends = starts + torch.tensor([axis.size for axis in labels.axes])
    return set((before[ends] > before[starts]).nonzero().flatten().tolist())


Where = tuple[tuple[int, int], ...]  # axes, and how often a unit occurs there


def _families(labels: Labels, root: Tensor) -> list[tuple[Where, Tensor]]:
    """Units that occur on the same axes equally often, with these; by their smallest unit."""
    if not labels.axes:
        return []
    sizes = torch.tensor([axis.size for axis in labels.axes])
    places = [torch.arange(axis.start, axis.start + axis.size) for axis in labels.axes]
    number = torch.arange(len(places)).repeat_interleave(sizes)
    many = len(places) + 1
    pairs, counts = (root[torch.cat(places)] * many + number).unique(return_counts=True)
    units, lengths = (pairs // many).unique_consecutive(return_counts=True)
    most = int(counts.max()) + 1
    kinds = (pairs % many) * most + counts  # unit after unit
    found: dict[tuple[int, ...], list[Tensor]] = {}
    starts = _runs(kinds, lengths)
    pieces = units.tensor_split(starts[1:])
    first = (lengths.cumsum(0) - lengths)[starts].tolist()
    for piece, start, length in zip(pieces, first, lengths[starts].tolist(), strict=True):
        found.setdefault(tuple(kinds[start : start + length].tolist()), []).append(piece)
    return [
        (tuple(divmod(kind, most) for kind in mine), torch.cat(members))
        for mine, members in found.items()
    ]


def _runs(kinds: Tensor, lengths: Tensor) -> Tensor:
    """Where a list differs from the one before it, of lists of these lengths in one vector."""
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    before = torch.arange(len(kinds)) - lengths[owner]  # the same place in a list as long
    new = torch.ones(len(lengths), dtype=torch.bool)
    new[1:] = lengths[1:] != lengths[:-1]
    new[owner[kinds != kinds[before.clamp_min(0)]]] = True
    return new.nonzero().flatten()


def _by_reason(
    units: Tensor,
    where: Where,
    consumed: set[int],
    produced: set[int],
    reasons: tuple[Tensor, list[str]],
) -> Iterator[tuple[str, Tensor]]:
    """Open units first, then the frozen ones, a group for each reason."""
    lacking = ""
    if not any(axis in consumed for axis, _ in where):
        lacking = "no layer merges these channels, so no gate can close them"
    elif not any(axis in produced for axis, _ in where):
        lacking = "no layer makes these channels"
    numbers, texts = reasons[0][units], [*reasons[1], lacking]  # the last: of number -1
    for number in sorted(numbers.unique().tolist(), key=lambda number: texts[number]):
        yield texts[number], units[numbers == number]


def _group(
    axes: list[Axis],
    where: Where,
    members: Tensor,
    reason: str,
    consumed: set[int],
    produced: set[int],
    taken: dict[str, Group],
) -> Group:
    def owner(number: int) -> str:
        return module_of(axes[number].tensor) or axes[number].tensor

    makers = [i for i, _ in where if i in produced]
    producers = [owner(i) for i in makers if i not in consumed] or [owner(i) for i in makers]
    consumers = [owner(i) for i, _ in where if i in consumed]
    base = (producers or consumers)[0]
    name, number = base, 2
    while name in taken:
        name, number = f"{base}#{number}", number + 1
    return Group(
        name=name,
        size=len(members),
        producers=tuple(dict.fromkeys(producers)),
        consumers=tuple(dict.fromkeys(consumers)),
        frozen=bool(reason),
        reason=reason,
    )


def _graph(
    tapes: Sequence[Tape],
    flow: Flow,
    groups: dict[str, Group],
    position: Tensor,
    consumed: set[int],
) -> Graph:
    axes: dict[str, dict[int, Tensor]] = {}
    sites: dict[str, dict[int, Tensor]] = {}
    same: dict[tuple[torch.Size, bytes], Tensor] = {}

    def shared(units: Tensor) -> Tensor:
        """One tensor for all places with these units: what is found out about it holds for all."""
        return same.setdefault((units.shape, units.numpy().tobytes()), units)

    for number, axis in enumerate(flow.labels.axes):
        units = shared(position[axis.start : axis.start + axis.size])
        if bool((units != FROZEN).any()):
            axes.setdefault(axis.tensor, {})[axis.axis] = units
            if number in consumed:
                sites.setdefault(axis.tensor, {})[axis.axis] = units
    known: dict[int, Tensor] = {}  # many tensors share a layer
    for layer in (layer for layers in flow.value_layers.values() for layer in layers):
        if id(layer) not in known:
            known[id(layer)] = shared(position[layer])
    values = {
        value: [known[id(layer)] for layer in layers] for value, layers in flow.value_layers.items()
    }
    contractions = [
        Contraction(
            item.op,
            *(
                [shared(position[v]) for v in part]
                for part in (item.factors, item.sites, item.makes)
            ),
        )
        for item in flow.contractions
    ]
    shapes = {
        value.name: value.shape
        for tape in tapes
        for op in tape.ops
        for value in op.inputs()
        if value.name
    }
    graph = Graph(groups, axes, sites, contractions, shapes, values, list(tapes))
    for op, layer, along in flow.channel_counts:
        units = position[layer]
        if bool((units != FROZEN).any()) and varies(units, along):
            graph.channel_counts[op] = units
    for item in flow.statistics:
        units = position[item.layer]
        if bool((units != FROZEN).any()):
            graph.statistics.append(Statistic(item.op, units))
    for need in flow.at_least:
        _keep_enough(graph, position[need.layer], need)
    graph.unknown, graph.fillings = dict(flow.unknown), set(flow.uniform_values)
    return graph


def _keep_enough(graph: Graph, layer: Tensor, need: AtLeast) -> None:
    """Raise the minimum of the largest groups on an axis until enough channels stay in any plan."""
    units = layer.movedim(need.axis, 0).flatten(1)[:, 0] if layer.dim() > 1 else layer
    certain, names = int((units == FROZEN).sum()), graph.owners
    found = Counter(names[unit] for unit in units.tolist() if unit != FROZEN)
    for name, places in found.most_common():
        if certain >= need.count:
            return
        group, each = graph.groups[name], max(1, places // graph.groups[name].size)
        least = min(group.size, math.ceil((need.count - certain) / each))
        certain += least * each
        if least > group.minimum:
            group.minimum = least
            graph.notes.append(f"{name}: keeps {least} channels: {need.why}")
