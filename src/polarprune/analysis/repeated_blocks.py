"""Find groups at the same position of repeated blocks, which `uniform=` makes equally wide.

A *block* is a module with at least two layers, in a `ModuleList`, `Sequential` or `ModuleDict`,
under a name with a number: `layers.0` or `denselayer1`. The position of a group is its name with a
star for the numbers of the blocks that it is in: `layers.*.mlp.up_proj`. Groups at the same
position, in blocks of the same classes and with equally many units, are a *family*. Patterns name
families instead: all groups with names that match, if they have equally many units.

A family has one width, so its minimums have to agree. Three things could make widths differ:

- A group of the same position is frozen. Then the others keep all of their channels, too.
- A group of the family carries the signal and has to keep a channel. Then all of them do.
- A group closes because the layer that reads it has closed, which may not happen in the other
  blocks. So the layers that read the family keep a channel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..channels.graph import FROZEN, Graph, Group, module_of
from ..channels.notes import Note
from ..channels.propagation import Contraction
from ..validation.plans import check_uniform

_LAYERS = 2  # with weight matrices, in a module that counts as a block
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Families = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class _Position:
    """Where a group is in its blocks, or the pattern that its name matches."""

    name: str
    classes: tuple[type, ...] = ()  # of the blocks


def with_families(graph: Graph, model: nn.Module, uniform: bool | Sequence[str]) -> Graph:
    """Return the graph with the families that `uniform` asks for, each with one minimum.

    Args:
        graph: The graph of the model.
        model: The model.
        uniform: True, or patterns of names of groups; False leaves the graph as it is.

    Raises:
        PruneError: If there is no family, or none for one of the patterns.
    """
    if not uniform:
        return graph
    if isinstance(uniform, bool):
        positions = _in_blocks(graph, _blocks(model))
    else:
        positions = _by_pattern(graph, uniform)
    sets = _of_one_size(graph, positions)
    found = {position.name for (position, _), names in sets.items() if len(names) > 1}
    check_uniform(uniform, found, graph.prunable)
    graph = _with_pinned(replace(graph, families=_named(sets)), positions, sets)
    return _with_equal_minimums(graph.with_minimum(_behind_families(graph)))


# --- positions ------------------------------------------------------------------------------------


def _blocks(model: nn.Module) -> dict[str, type]:
    """Return the classes of all blocks by their paths."""
    return {
        f"{path}.{name}" if path else name: type(child)
        for path, module in model.named_modules()
        if isinstance(module, _CONTAINERS)
        for name, child in module.named_children()
        if re.search(r"\d", name) and _count_layers(child) >= _LAYERS
    }


def _count_layers(module: nn.Module) -> int:
    """Return how many modules in a module own a weight matrix, whatever computes it."""
    return len({_owner(name) for name, tensor in module.named_parameters() if tensor.dim() > 1})


def _owner(name: str) -> str:
    """Return the module of a parameter, or the one whose weight it parametrizes."""
    path, parametrized, _ = name.partition("parametrizations.")
    return path.rstrip(".") if parametrized else module_of(name)


def _in_blocks(graph: Graph, blocks: Mapping[str, type]) -> dict[str, _Position]:
    """Return the position of every group that is inside of a block."""
    found = {}
    for name, group in graph.groups.items():
        path, mark, number = name.partition("#")
        around = [part for part in _prefixes(path) if part in blocks]
        if around and all(_is_inside(maker, around[-1]) for maker in group.producers):
            shown = _with_stars(path, around) + mark + number
            found[name] = _Position(shown, tuple(blocks[part] for part in around))
    return found


def _prefixes(path: str) -> list[str]:
    """Return the paths of all modules around a module, and its own: a, a.b, a.b.c."""
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _is_inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def _with_stars(path: str, blocks: Iterable[str]) -> str:
    """Return a path with stars for the numbers in the names of these blocks."""
    parts = path.split(".")
    for block in blocks:
        own = block.count(".")
        parts[own] = re.sub(r"\d+", "*", parts[own])
    return ".".join(parts)


def _by_pattern(graph: Graph, patterns: Sequence[str]) -> dict[str, _Position]:
    """Return for every group the first pattern that its name matches."""
    matching = {
        name: next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        for name in graph.groups
    }
    return {name: _Position(pattern) for name, pattern in matching.items() if pattern is not None}


# --- families -------------------------------------------------------------------------------------

_Sets = dict[tuple[_Position, int], list[str]]


def _of_one_size(graph: Graph, positions: Mapping[str, _Position]) -> _Sets:
    """Return the prunable groups of every position and size."""
    found: _Sets = {}
    for name, group in graph.prunable.items():
        if name in positions:
            found.setdefault((positions[name], group.size), []).append(name)
    return found


def _named(sets: _Sets) -> Families:
    """Return the sets with several groups by name; a number is added where a name is taken."""
    found: Families = {}
    for (position, _), names in sets.items():
        name, number = position.name, 2
        while name in found:
            name, number = f"{position.name}#{number}", number + 1
        if len(names) > 1:
            found[name] = tuple(names)
    return found


# --- minimums that hold for whole families --------------------------------------------------------


def _with_pinned(graph: Graph, positions: Mapping[str, _Position], sets: _Sets) -> Graph:
    """Let groups keep all channels if a group of their position is frozen, and note why."""
    minimum, notes = {}, []
    for (position, size), names in sets.items():
        there = [group for name, group in graph.groups.items() if positions.get(name) == position]
        frozen = [group for group in there if group.frozen and _is_as_wide(graph, group, names[0])]
        for name in names if frozen else ():
            minimum[name] = size
            notes.append(Note(_why_pinned(size, frozen[0]), [name]))
    return replace(graph.with_minimum(minimum), notes=(*graph.notes, *notes))


def _is_as_wide(graph: Graph, frozen: Group, name: str) -> bool:
    """Return whether a frozen group has the units of a prunable one, or could have.

    Frozen channels are not always joined to heads, so the layers are compared, too.
    """
    shapes = [graph.shapes.get(f"{_layer(one)}.weight") for one in (frozen.name, name)]
    alike = shapes[0] is not None and shapes[0] == shapes[1]
    return frozen.size == graph.groups[name].size or (
        alike and all(_layer(one) != _layer(frozen.name) for one in graph.prunable)
    )


def _layer(name: str) -> str:
    """Return the layer that a group is named after: `a.qkv` for `a.qkv#2`."""
    return name.partition("#")[0]


def _why_pinned(size: int, frozen: Group) -> str:
    return (
        f"keeps all {size} channels, because widths are uniform and {frozen.name} is frozen: "
        f"{frozen.reason}"
    )


def _with_equal_minimums(graph: Graph) -> Graph:
    """Give all groups of a family the largest of their minimums."""
    return graph.with_minimum(
        {
            name: max(graph.groups[one].minimum for one in names)
            for names in graph.families.values()
            for name in names
        }
    )


def _behind_families(graph: Graph) -> dict[str, int]:
    """Return minimums with which no layer behind some groups of a family loses all channels.

    A group closes when all of its readers are left without outputs (`Graph.without_unread`). The
    groups of a family do that together if the groups behind them do: if those are of the same
    families.
    """
    readers = _Readers(graph)
    minimum: dict[str, int] = {}
    for names in graph.families.values():
        if len({readers.behind(name) for name in names}) > 1:
            for name in names:
                for group, least in readers.least_behind(name).items():
                    minimum[group] = max(least, minimum.get(group, 0))
    return minimum


class _Readers:
    """Knows for every group the contractions that read it, and the groups that these make."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.names = graph, list(graph.prunable)
        sizes = torch.tensor([group.size for group in graph.prunable.values()], device="cpu")
        self.owners = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
        self.family = {name: key for key, names in graph.families.items() for name in names}
        self.made: dict[str, list[dict[str, int] | None]] = {name: [] for name in graph.prunable}
        for item in graph.contractions:
            made = self._made(item)
            for name in self._count(item.sites):
                self.made[name].append(made)

    def _made(self, item: Contraction) -> dict[str, int] | None:
        """Return how many units of each group a contraction makes; None if some always stay."""
        always = not item.makes or any(bool((units == FROZEN).any()) for units in item.makes)
        return None if always else self._count(item.makes)

    def _count(self, vectors: list[Tensor]) -> dict[str, int]:
        """Return how many different units of each group are in vectors of units."""
        if not vectors:
            return {}
        units = torch.cat([vector.flatten() for vector in vectors]).unique()
        groups, counts = self.owners[units[units != FROZEN]].unique(return_counts=True)
        names = (self.names[number] for number in groups.tolist())
        return dict(zip(names, counts.tolist(), strict=True))

    def behind(self, name: str) -> frozenset[object]:
        """Return what has to close entirely before a group does; nothing if it never has to.

        Groups for which this is equal close together.
        """
        found = self.made[name]
        if None in found:
            return frozenset()
        return frozenset(frozenset(map(self._whole, made.items())) for made in found if made)

    def _whole(self, made: tuple[str, int]) -> object:
        """Return the family of a group; if only a part of a group is made, something unequal."""
        group, count = made
        is_whole = count == self.graph.groups[group].size
        return self.family.get(group, ("group", group)) if is_whole else object()

    def least_behind(self, name: str) -> dict[str, int]:
        """Return minimums with which the first reader of a group keeps an output."""
        made = next(iter(self.made[name]), None)
        if made is None or None in self.made[name]:
            return {}
        return {group: self.graph.groups[group].size - count + 1 for group, count in made.items()}
