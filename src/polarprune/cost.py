"""The resource model: R(n) = ½ nᵀQn + bᵀn + c over the live widths n of the groups.

Exact, in whole numbers: the coefficients are read off the traced operations (MACs, as torch's own
counter has them) and the shapes of parameters. Memory is the bytes of the parameters and of what
the merging operations put out for the example input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .flow import Contraction
from .groups import WHOLE, Graph
from .tape import named_tensors

RESOURCES = ("macs", "params", "memory")


@dataclass(frozen=True)
class Quadratic:
    """R(n) = ½ nᵀQn + bᵀn + c, in float64 (whole numbers up to 2⁵³ are exact)."""

    q: Tensor
    b: Tensor
    c: float

    def __call__(self, n: Tensor) -> Tensor:
        n = n.to(self.q)
        return 0.5 * (n @ self.q * n).sum(-1) + n @ self.b + self.c

    def saving(self, n: Tensor) -> Tensor:
        """What closing one more unit of each group saves: R(n) - R(n - e_l), exactly."""
        n = n.to(self.q)
        return self.q @ n + self.b - 0.5 * self.q.diagonal()


@dataclass(frozen=True)
class Extra:
    """A tensor that goes when one of these groups closes entirely, though its own channels stay.

    (The first norm of a pre-activation block, when the branch behind it is taken out.)
    """

    groups: Tensor
    params: Quadratic
    memory: Quadratic


@dataclass(frozen=True)
class Output:
    """What a merging operation puts out: bytes · Π (u·n + c), or nothing if it reads nothing."""

    size: float
    axes: list[tuple[Tensor, float]]
    reads: list[tuple[Tensor, float]]

    def __call__(self, n: Tensor) -> float:
        if any(float(n @ u) + c == 0 for u, c in self.reads):
            return 0.0
        return self.size * math.prod(float(n @ u) + c for u, c in self.axes)


class Cost:
    """What the network costs, as a function of how many channels of each group are alive."""

    def __init__(self, names: list[str], sizes: list[int], parts: Mapping[str, Quadratic]) -> None:
        self.names = names
        self.full = torch.tensor(sizes, dtype=torch.float64)
        self.parts = dict(parts)
        self.extras: list[Extra] = []
        self.outputs: list[Output] = []

    def original(self) -> dict[str, int]:
        return self.at(self.full)

    def at(self, n: Tensor) -> dict[str, int]:
        """MACs, params and memory (bytes) at live widths `n`."""
        n = n.double()
        found = {key: float(part(n)) for key, part in self.parts.items()}
        found["memory"] += sum(output(n) for output in self.outputs)
        for extra in self.extras:
            if bool((n[extra.groups] == 0).any()):
                found["params"] -= float(extra.params(n))
                found["memory"] -= float(extra.memory(n))
        return {key: round(value) for key, value in found.items()}

    def share(self, n: Tensor) -> dict[str, float]:
        whole = self.original()
        return {key: value / max(whole[key], 1) for key, value in self.at(n).items()}

    def prices(self, n: Tensor | None = None) -> dict[str, tuple[float, float]]:
        """Group -> share of MACs and of params that its next channel saves."""
        n = self.full if n is None else n
        whole = self.original()
        macs = self.parts["macs"].saving(n) / max(whole["macs"], 1)
        params = self.parts["params"].saving(n) / max(whole["params"], 1)
        pairs = zip(macs.tolist(), params.tolist(), strict=True)
        return dict(zip(self.names, pairs, strict=True))


class _Sum:
    """Adds up terms coef · Π (u·n + c), each a product of at most two axes."""

    def __init__(self, graph: Graph) -> None:
        sizes = torch.tensor([g.size for g in graph.open.values()], dtype=torch.long)
        self.owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        self.sizes = sizes.double()
        size = len(sizes)
        self.q = torch.zeros(size, size, dtype=torch.float64)
        self.b = torch.zeros(size, dtype=torch.float64)
        self.c = 0.0

    def linear(self, units: Tensor) -> tuple[Tensor, float]:
        """How an axis shrinks with the widths: u (per group, per unit) and what stays."""
        mine = units[units != WHOLE]
        counts = torch.bincount(self.owner[mine], minlength=len(self.sizes)).double()
        return counts / self.sizes, float(units.numel() - mine.numel())

    def add(self, coef: float, axes: list[Tensor]) -> None:
        live = [axis for axis in axes if bool((axis != WHOLE).any())]
        assert len(live) <= 2, "a cost of higher degree than two"
        coef *= math.prod(axis.numel() for axis in axes if not bool((axis != WHOLE).any()))
        if not live:
            self.c += coef
            return
        u, cu = self.linear(live[0])
        if len(live) == 1:
            self.b += coef * u
            self.c += coef * cu
            return
        v, cv = self.linear(live[1])
        self.q += coef * (torch.outer(u, v) + torch.outer(v, u))
        self.b += coef * (u * cv + v * cu)
        self.c += coef * cu * cv

    def done(self) -> Quadratic:
        return Quadratic(self.q, self.b, self.c)


def measure(model: nn.Module, graph: Graph) -> Cost:
    """The cost model of a traced network (of its first tape: the run in eval mode)."""
    macs, params, memory = _Sum(graph), _Sum(graph), _Sum(graph)
    first = set(graph.tapes[0].ops)
    counted, outputs = set(), []
    for item in graph.contractions:
        if item.op in first:
            counted.add(item.op)
            size = math.prod(factor.numel() for factor in item.factors)
            macs.add(item.op.macs / size, item.factors)
            outputs.append(_output(graph, item, memory))
    for op in graph.tapes[0].ops:
        if op.macs and op not in counted:
            macs.add(op.macs, [])
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in named_tensors(model):
        axes = _axes(graph, name, tensor)
        if name in parameters:
            params.add(1, axes)
            memory.add(tensor.element_size(), axes)
    parts = {"macs": macs.done(), "params": params.done(), "memory": memory.done()}
    cost = Cost(list(graph.open), [g.size for g in graph.open.values()], parts)
    cost.outputs = outputs
    return cost


def add_extras(model: nn.Module, graph: Graph, dropped: Mapping[str, set[str]]) -> None:
    """Take note of the tensors that go when a group closes entirely (group -> their names)."""
    names = list(graph.open)
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in named_tensors(model):
        groups = [names.index(group) for group, tensors in dropped.items() if name in tensors]
        if groups:
            params, memory = _Sum(graph), _Sum(graph)
            axes = _axes(graph, name, tensor)
            params.add(name in parameters, axes)
            memory.add(tensor.element_size() * (name in parameters), axes)
            graph.cost.extras.append(Extra(torch.tensor(groups), params.done(), memory.done()))


def _axes(graph: Graph, name: str, tensor: Tensor) -> list[Tensor]:
    whole = [torch.full((size,), WHOLE) for size in tensor.shape]
    return [graph.axes.get(name, {}).get(axis, whole[axis]) for axis in range(tensor.dim())]


def _output(graph: Graph, item: Contraction, total: _Sum) -> Output:
    value = item.op.outs[0]
    axes = [layer.flatten() for layer in graph.values.get(value, [])]
    size = value.itemsize * math.prod(value.shape) / math.prod(axis.numel() for axis in axes)
    return Output(
        size, [total.linear(axis) for axis in axes], [total.linear(f) for f in item.factors]
    )
