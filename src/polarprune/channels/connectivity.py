"""Which groups must never close entirely, so that the input still reaches every output.

Closing a group is harmless where something flows around it (a skip connection, another branch).
We look for the way from the inputs to each output that depends on the fewest groups; each group on
it keeps a channel. A group whose loss alone would cut the network is on every way, hence on ours.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..tracing.tape import Op, Tape, Value
from .graph import FROZEN, Graph

Way = frozenset[str]


def hold_spine(graph: Graph) -> None:
    """Set `minimum` to 1 at least on the groups that carry the signal through."""
    for tape in graph.tapes:
        for way in _ways(graph, tape):
            for name in way:
                graph.groups[name].minimum = max(1, graph.groups[name].minimum)


def _ways(graph: Graph, tape: Tape) -> list[Way]:
    """For each output the smallest set of groups that it needs."""
    options = _Options(graph)
    merging = {item.op for item in graph.contractions}
    best: dict[tuple[Value, str], Way] = {(value, ""): frozenset() for value in tape.inputs}
    for op in tape.ops:
        for source in op.inputs():
            if source.name:
                continue
            for option in options(source):
                way = best.get((source, option))
                if way is None:
                    continue
                for out in _written(op):
                    for target in options(out):
                        if op in merging or option in ("", target):
                            _relax(best, (out, target), way)
    ways = []
    for value in tape.outputs:
        reached = [best[value, o] for o in options(value) if (value, o) in best]
        if reached:
            ways.append(min(reached, key=len))
    return ways


def _written(op: Op) -> list[Value]:
    """What an operation puts out; a write into a view reaches what it is a view of."""
    if not op.func._schema.is_mutable:
        return op.outs
    return [*op.outs, *(value.base for value in op.outs if value.base is not None)]


def _relax(best: dict[tuple[Value, str], Way], state: tuple[Value, str], way: Way) -> None:
    way = way | {state[1]} if state[1] else way
    if state not in best or len(way) < len(best[state]):
        best[state] = way


def hold_heads(graph: Graph) -> None:
    """Fused attention over no heads crashed the process in torch 2.11: one head stays."""
    if TorchVersion(torch.__version__) >= "2.13":
        return
    names = graph.owners
    for item in graph.contractions:
        if "scaled_dot_product" in item.op.name:
            for unit in {unit for units in item.factors for unit in units.tolist()} - {FROZEN}:
                group = graph.groups[names[unit]]
                group.minimum = max(1, group.minimum)


class _Options:
    """The groups that can carry a signal in a tensor; "" stands for channels that stay."""

    def __init__(self, graph: Graph) -> None:
        sizes = torch.tensor([group.size for group in graph.prunable.values()], dtype=torch.long)
        self.graph, self.names = graph, [*graph.prunable, ""]  # the last stands for what stays
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        self.owner = torch.cat([owner, torch.tensor([len(sizes)])])
        self.known: dict[int, list[str]] = {}

    def __call__(self, value: Value) -> list[str]:
        layers = self.graph.values.get(value, [])
        if len(layers) == 1:
            return self._of(layers[0])
        found = [names for names in map(self._of, layers) if names != [""]]  # others carry nothing
        return list(dict.fromkeys(name for names in found for name in names)) or [""]

    def _of(self, layer: Tensor) -> list[str]:
        if id(layer) not in self.known:
            found = torch.zeros(len(self.names), dtype=torch.bool)
            found[self.owner[layer.flatten()]] = True
            self.known[id(layer)] = [self.names[k] for k in found.nonzero().flatten().tolist()]
        return self.known[id(layer)]
