"""Let integer attributes follow a cut even if the traced forward does not read them.

Other code may read them: another forward that an exporter installs, a method, a report. An integer
follows a width if it equals that width in every module of its class. The tensors that the module's
own code handles come first, then those of its children, and so on. If several of them equal the
integer, but a cut changes them in different ways, another forward of the class may show which one
is meant. Otherwise the integer is not changed, and a note tells the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules import container

from ..channels.graph import Graph, Location
from ..channels.notes import Note
from ..rewriting.captured_forward import Refused
from .attribute_reads import attributes_read
from .inspection import Inspection
from .other_forwards import OtherForwards
from .repairs import PLANS
from .trial_cuts import TrialCuts, trial_plan, trial_units

# An axis in every module of a class: of an operation's tensor (three integers), of a parameter by
# its name in the module, or of an input of the model.
_Key = tuple[int, int, int] | tuple[str, int]
_Choice = dict[str, Location]  # module -> the width that the integer follows there
_INPUT = "input "  # no name of a parameter contains a space
_CONTAINERS = (nn.Module, *(getattr(container, name) for name in container.__all__))
# By torch's convention, integers with these names do not count channels.
_NO_WIDTHS = {"kernel_size", "stride", "padding", "output_padding", "dilation", "scale_factor"}


@dataclass(frozen=True)
class _Attribute:
    """An integer attribute of the modules of a class."""

    name: str
    values: Mapping[str, int]  # module -> value

    def __str__(self) -> str:
        path, value = next(iter(self.values.items()))
        return f"{path + '.' if path else ''}{self.name} = {value}"


def follow_unread_attributes(inspection: Inspection, graph: Graph) -> Graph:
    """Return a graph in which integers that held a width follow it, with a note on unclear ones.

    Trial cuts confirm that the model does not use these integers for something else.
    """
    if not graph.prunable:
        return graph
    sizes, certain = _Sizes(graph), list[tuple[str, _Choice]]()
    others, doubtful = OtherForwards(inspection.model, inspection.example), list[_Attribute]()
    attributes = list(_attributes(inspection, graph))
    held = {(path, attribute.name) for _, attribute in attributes for path in attribute.values}
    read = attributes_read(inspection.model, inspection.example, held)
    if isinstance(read, Refused):
        text = (
            f"a cut does not change integers such as {attributes[0][1]}, because it could not be "
            f"found out which of them the forward reads ({read}); check them after a cut"
        )
        return replace(graph, notes=(*graph.notes, Note(text)))
    for family, attribute in attributes:
        if any((path, attribute.name) in read for path in attribute.values):
            continue
        found = sizes.choices(attribute)
        if len(found) > 1:
            tried = [_following(graph, [(attribute.name, choice)]) for choice in found]
            known = others.only_fitting(family, tried)
            doubtful += [attribute] * (known is None)
            found = [] if known is None else [found[known]]
        certain += [(attribute.name, choice) for choice in found if choice]
    graph = _confirmed(inspection, graph, certain)
    return replace(graph, notes=(*graph.notes, *_note(doubtful)))


def _attributes(
    inspection: Inspection, graph: Graph
) -> Iterator[tuple[type[nn.Module], _Attribute]]:
    """Yield the integers that may be widths, each with the class that has it.

    Layers of torch are skipped: their class determines which integers a cut changes.
    """
    families: dict[type[nn.Module], list[str]] = {}
    for path, module in inspection.modules.items():
        if not _is_layer_of_torch(module):
            families.setdefault(type(module), []).append(path)
    for family, paths in families.items():
        held = {path: _integers(inspection.modules[path]) for path in paths}
        for name in dict.fromkeys(name for mine in held.values() for name in mine):
            values = {path: mine[name] for path, mine in held.items() if name in mine}
            followed = any(name in graph.size_attributes.get(path, {}) for path in values)
            if max(values.values()) > 1 and not followed:
                yield family, _Attribute(name, values)


def _is_layer_of_torch(module: nn.Module) -> bool:
    """Return whether the class of this module determines which integers a cut changes."""
    bases = [base for base in type(module).__mro__ if base not in _CONTAINERS]
    return any(base.__module__.startswith("torch.nn.") for base in bases)


def _integers(module: nn.Module) -> dict[str, int]:
    held = [(name, x) for name, x in vars(module).items() if not name.startswith("_")]
    return {name: x for name, x in held if type(x) is int and name not in _NO_WIDTHS}


def _following(graph: Graph, choices: Iterable[tuple[str, _Choice]]) -> Graph:
    """Return a graph in which these integers follow these widths."""
    found = dict(graph.size_attributes)
    for name, choice in choices:
        for path, location in choice.items():
            found[path] = {**found.get(path, {}), name: location}
    return graph.with_size_attributes(found)


def _confirmed(
    inspection: Inspection, graph: Graph, choices: Iterable[tuple[str, _Choice]]
) -> Graph:
    """Return a graph with the integers that trial cuts accept, because outputs stay the same."""
    trial, choices = TrialCuts(inspection.model, inspection.example), list(choices)
    for tried in [choices, *([choice] for choice in choices)] if choices else []:
        new = _following(graph, tried)
        plans = (trial_plan(new, seed) for seed in sorted(inspection.findings.seeds))
        if not any(trial.mismatch(new, plan, mode=k % 2) for k, plan in enumerate(plans)):
            if tried is choices:
                return new
            graph = new
    return graph


def _note(doubtful: Iterable[_Attribute]) -> list[Note]:
    """Return one note that lists the attributes that may be widths, if there are any."""
    listed = ", ".join(map(str, doubtful))
    why = "equal to several sizes, so a cut leaves them; code outside of the forward may read them"
    return [Note(why, [listed])] if listed else []


class _Sizes:
    """The sizes in the modules of a graph, and what several plans leave of them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._plans = [trial_units(graph, seed) for seed in range(PLANS)]
        self._inputs = [value.shape for tape in graph.tapes for value in tape.inputs]
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}  # of the tensors in each module
        for name, shape in graph.shapes.items():
            parts = name.split(".")
            for k in range(len(parts)):
                inside = self._shapes.setdefault(".".join(parts[:k]), {})
                inside[".".join(parts[k:])] = shape

    def choices(self, attribute: _Attribute) -> list[_Choice]:
        """Return the different ways in which an integer may follow widths; {} if it stays."""
        found: dict[tuple[int, ...], _Choice] = {}
        for key in self._nearest_keys(attribute):
            widths, choice = list[int](), _Choice()
            for path, value in attribute.values.items():
                mine = self._widths(path, key, value)
                widths += mine
                if set(mine) != {value}:
                    choice[path] = _location(path, key)
            found.setdefault(tuple(widths), choice)
        return list(found.values())

    def _nearest_keys(self, attribute: _Attribute) -> list[_Key]:
        """Return the axes with this size in all modules, at the least depth that has any."""
        deepest = max(len(name.split(".")) for name in self.graph.shapes)
        inputs = set.intersection(*(set(self._in_inputs(x)) for x in attribute.values.values()))
        for depth in range(deepest):
            equal = [set(self._at(depth, path, x)) for path, x in attribute.values.items()]
            keys = set.intersection(*equal)
            if keys:
                return sorted(keys | inputs, key=str)
        return []

    def _at(self, depth: int, path: str, value: int) -> Iterator[_Key]:
        """Yield the axes of this size: of the operations of a module, or of tensors below it."""
        for number, op in enumerate(self.graph.ops_in(path) if depth == 0 else ()):
            for k, tensor in enumerate(op.tensors()):
                axes = (axis for axis, size in enumerate(tensor.shape) if size == value)
                yield from ((number, k, axis) for axis in axes)
        for name, shape in self._shapes.get(path, {}).items():
            if name.count(".") == depth:
                yield from ((name, axis) for axis, size in enumerate(shape) if size == value)

    def _in_inputs(self, value: int) -> Iterator[_Key]:
        """Yield the axes of this size of the inputs of the model, which no cut changes."""
        for k, shape in enumerate(self._inputs):
            yield from ((_INPUT + str(k), axis) for axis, x in enumerate(shape) if x == value)

    def _widths(self, path: str, key: _Key, value: int) -> list[int]:
        """Return what every plan leaves of an axis."""
        if isinstance(key[0], str) and key[0].startswith(_INPUT):
            return [value] * len(self._plans)
        location = _location(path, key)
        return [self.graph.width(path, location, kept_units) for kept_units in self._plans]


def _location(path: str, key: _Key) -> Location:
    """Return where a module of the class has this axis."""
    if len(key) == 3:
        return key
    return (f"{path}.{key[0]}" if path else key[0], key[1])
