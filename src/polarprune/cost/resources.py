"""The resource model: R(n) = ½ nᵀQn + bᵀn + c over the live widths n of the groups.

Exact, in whole numbers: the coefficients are read off the traced operations (MACs, as torch's own
counter has them) and the shapes of parameters. Memory is the bytes of the parameters and of what
the merging operations put out for the example input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..channels.graph import Graph
from ..channels.propagation import Contraction
from ..tracing.model_state import named_tensors


class Part(Protocol):
    """One resource as a function of the widths."""

    def __call__(self, n: Tensor) -> Tensor: ...

    def linear(self, n: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Quadratic:
    """R(n) = ½ nᵀQn + bᵀn + c, in float64 (whole numbers up to 2⁵³ are exact)."""

    q: Tensor
    b: Tensor
    c: float

    def __call__(self, n: Tensor) -> Tensor:
        n = n.to(self.q)
        return 0.5 * (n @ self.q * n).sum(-1) + n @ self.b + self.c

    def linear(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """Q and b of the price of a channel, Qn + b."""
        return self.q, self.b

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
        self.parts: dict[str, Any] = dict(parts)  # name -> Part
        self.extras: list[Extra] = []
        self.outputs: list[Output] = []

    def original(self) -> dict[str, int]:
        measured = {k: round(p.whole) for k, p in self.parts.items() if hasattr(p, "whole")}
        return self.at(self.full) | measured

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
        sizes = torch.tensor([g.size for g in graph.prunable.values()], dtype=torch.long)
        size = len(sizes)
        owner = torch.arange(size).repeat_interleave(sizes)
        self.owner = torch.cat([owner, torch.tensor([size])])  # the last: of what stays
        self.sizes = sizes.double()
        self.q = torch.zeros(size, size, dtype=torch.float64)
        self.b = torch.zeros(size, dtype=torch.float64)
        self.c = 0.0
        self._known: dict[int, tuple[Tensor, Tensor, float]] = {}

    def linear(self, units: Tensor) -> tuple[Tensor, float]:
        """How an axis shrinks with the widths: u (per group, per unit) and what stays."""
        if id(units) not in self._known:
            counts = torch.bincount(self.owner[units], minlength=len(self.sizes) + 1).double()
            self._known[id(units)] = units, counts[:-1] / self.sizes, float(counts[-1])
        return self._known[id(units)][1:]

    def add(self, coef: float, axes: list[Tensor]) -> None:
        live = []
        for axis in axes:
            u, whole = self.linear(axis)
            if whole == axis.numel():
                coef *= whole
            else:
                live.append((u, whole))
        assert len(live) <= 2, "a cost of higher degree than two"
        if not live:
            self.c += coef
            return
        u, cu = live[0]
        if len(live) == 1:
            self.b += coef * u
            self.c += coef * cu
            return
        v, cv = live[1]
        rows, columns = u.nonzero().flatten(), v.nonzero().flatten()  # few of many groups
        product = coef * torch.outer(u[rows], v[columns])
        self.q[rows[:, None], columns] += product
        self.q[columns[:, None], rows] += product.T
        self.b += coef * (u * cv + v * cu)
        self.c += coef * cu * cv

    def done(self) -> Quadratic:
        return Quadratic(self.q, self.b, self.c)


def measure(model: nn.Module, graph: Graph) -> Cost:
    """The cost model of a traced network (of its first tape: the run in eval mode)."""
    macs = _Sum(graph)
    first = set(graph.tapes[0].ops)
    counted, outputs = set(), []
    for item in graph.contractions:
        if item.op in first:
            counted.add(item.op)
            size = math.prod(factor.numel() for factor in item.factors)
            macs.add(item.op.macs / size, item.factors)
            outputs.append(_output(graph, item, macs))
    for op in graph.tapes[0].ops:
        if op.macs and op not in counted:
            macs.add(op.macs, [])
    sums: dict[int, _Sum] = {}  # by the bytes of an element
    for name, tensor in model.named_parameters():
        size = tensor.element_size()
        sums[size] = sums.get(size) or _Sum(graph)
        sums[size].add(*_term(graph, name, tensor))
    parts = {
        "macs": macs.done(),
        "params": _total(graph, [(1, part) for part in sums.values()]),
        "memory": _total(graph, list(sums.items())),
    }
    cost = Cost(list(graph.prunable), [g.size for g in graph.prunable.values()], parts)
    cost.outputs = outputs
    return cost


def add_extras(model: nn.Module, graph: Graph, dropped: Mapping[str, set[str]]) -> None:
    """Take note of the tensors that go when a group closes entirely (group -> their names)."""
    names = list(graph.prunable)
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in named_tensors(model):
        groups = [names.index(group) for group, tensors in dropped.items() if name in tensors]
        if groups:
            part, size = _Sum(graph), tensor.element_size()
            if name in parameters:
                part.add(*_term(graph, name, tensor))
            params, memory = part.done(), _total(graph, [(size, part)])
            graph.cost.extras.append(Extra(torch.tensor(groups), params, memory))


def _term(graph: Graph, name: str, tensor: Tensor) -> tuple[int, list[Tensor]]:
    """The elements of a tensor as a product: what stays, and the axes along which units go."""
    axes = graph.axes.get(name, {})
    stay = math.prod(size for axis, size in enumerate(tensor.shape) if axis not in axes)
    return stay, list(axes.values())


def _total(graph: Graph, parts: list[tuple[int, _Sum]]) -> Quadratic:
    total = _Sum(graph)
    for times, part in parts:
        total.q += times * part.q
        total.b += times * part.b
        total.c += times * part.c
    return total.done()


def _output(graph: Graph, item: Contraction, total: _Sum) -> Output:
    value = item.op.outs[0]
    axes = [layer.flatten() for layer in graph.values.get(value, [])]
    size = value.itemsize * math.prod(value.shape) / math.prod(axis.numel() for axis in axes)
    return Output(
        size, [total.linear(axis) for axis in axes], [total.linear(f) for f in item.factors]
    )
