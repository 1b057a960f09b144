"""Find the groups that must keep a channel so that the input still reaches every output.

Closing a whole group is harmless where the signal can take another path (a skip connection, another
branch). For each output we search the path from the inputs that needs the fewest groups; each
group on that path keeps a channel. A group that every path needs is on this one, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..tracing.tape import Op, Tape, Value
from .graph import FROZEN, Graph

Path = frozenset[str]  # the prunable groups that a path from the inputs needs
Paths = dict[tuple[Value, str], Path]  # (tensor, group that carries the signal in it) -> best path
_ALWAYS = ""  # in place of a group: channels that always stay carry the signal


def carrying_groups(graph: Graph) -> set[str]:
    """Return the groups that carry the signal from the inputs to the outputs."""
    return {name for tape in graph.tapes for path in _shortest_paths(graph, tape) for name in path}


def _shortest_paths(graph: Graph, tape: Tape) -> list[Path]:
    """Return for each output that the inputs reach the smallest set of groups found for it.

    One pass over the tape suffices: an operation comes after those that make its inputs.
    """
    carriers = _Carriers(graph)
    merging = {item.op for item in graph.contractions}
    best: Paths = {(value, _ALWAYS): frozenset() for value in tape.inputs}
    for op in tape.ops:
        for source in op.inputs():
            if not source.name:  # a parameter carries no signal
                _pass_on(op, source, op in merging, carriers, best)
    paths = []
    for value in tape.outputs:
        reached = [best[value, name] for name in carriers(value) if (value, name) in best]
        if reached:
            paths.append(min(reached, key=len))
    return paths


def _pass_on(op: Op, source: Value, merges: bool, carriers: _Carriers, best: Paths) -> None:
    """Extend the paths to `source` by one operation.

    A contraction carries the signal from any group into any other. Other operations keep it in its
    group; from channels that always stay it may go anywhere.
    """
    for name in carriers(source):
        path = best.get((source, name))
        if path is None:
            continue
        for out in _written(op):
            for target in carriers(out):
                if merges or name in (_ALWAYS, target):
                    _improve(best, (out, target), path)


def _written(op: Op) -> list[Value]:
    """Return the outputs of an operation; a write into a view also reaches the base tensor."""
    if not op.func._schema.is_mutable:
        return op.outs
    return [*op.outs, *(value.base for value in op.outs if value.base is not None)]


def _improve(best: Paths, state: tuple[Value, str], path: Path) -> None:
    """Store a path if it needs fewer groups than the one that is known."""
    path = path | {state[1]} if state[1] != _ALWAYS else path
    if state not in best or len(path) < len(best[state]):
        best[state] = path


def attention_groups(graph: Graph) -> set[str]:
    """Return the groups of heads in fused attention, where torch needs one head.

    Before torch 2.13, fused attention over no heads crashed the process.
    """
    if TorchVersion(torch.__version__) >= "2.13":
        return set()
    fused = [item for item in graph.contractions if "scaled_dot_product" in item.op.name]
    units = {unit for item in fused for factor in item.factors for unit in factor.tolist()}
    names = graph.owners
    return {names[unit] for unit in units - {FROZEN}}


class _Carriers:
    """Answers which groups can carry a signal in a tensor (`_ALWAYS` for frozen channels)."""

    def __init__(self, graph: Graph) -> None:
        sizes = torch.tensor([group.size for group in graph.prunable.values()], dtype=torch.long)
        self.graph = graph
        self.names = [*graph.prunable, _ALWAYS]  # at index FROZEN (-1): the last
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        self.owner = torch.cat([owner, torch.tensor([len(sizes)])])
        self.known: dict[int, list[str]] = {}

    def __call__(self, value: Value) -> list[str]:
        """Return the groups with channels in a tensor."""
        layers = self.graph.values.get(value, [])
        if len(layers) == 1:
            return self._in_layer(layers[0])
        # Of several layers, ignore those that hold frozen channels only.
        found = [names for names in map(self._in_layer, layers) if names != [_ALWAYS]]
        return list(dict.fromkeys(name for names in found for name in names)) or [_ALWAYS]

    def _in_layer(self, layer: Tensor) -> list[str]:
        if id(layer) not in self.known:
            found = torch.zeros(len(self.names), dtype=torch.bool)
            found[self.owner[layer.flatten()]] = True
            self.known[id(layer)] = [self.names[k] for k in found.nonzero().flatten().tolist()]
        return self.known[id(layer)]
