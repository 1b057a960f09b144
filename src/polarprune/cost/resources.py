"""Compute what a network costs as a function of its widths: R(n) = ½ nᵀQn + bᵀn + c.

n holds the width of each group: the number of its channels that are not closed. The coefficients
are exact. They come from the MACs of the traced operations, as torch counts them, and from the
shapes of the parameters. Memory is the bytes of the parameters plus the bytes of the outputs of all
contractions (such as convolutions) for the example input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..channels.graph import Graph
from ..channels.propagation import Contraction
from ..tracing.model_state import named_tensors


class Resource(Protocol):
    """One resource as a function of the widths."""

    @property
    def measured(self) -> float | None:
        """Return what the original costs if that was measured, or None."""

    def __call__(self, n: Tensor) -> Tensor:
        """Return the cost at the widths `n`."""

    def linear(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q and b, from which the price of a channel follows: Qn + b."""


@dataclass(frozen=True)
class Quadratic:
    """R(n) = ½ nᵀQn + bᵀn + c, in float64, which is exact for integers up to 2⁵³."""

    q: Tensor
    b: Tensor
    c: float
    measured: ClassVar[None] = None  # it is exact

    def __call__(self, n: Tensor) -> Tensor:
        """Return the cost at the widths `n`."""
        n = n.to(self.q)
        return 0.5 * (n @ self.q * n).sum(-1) + n @ self.b + self.c

    def linear(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q and b, from which the price of a channel follows: Qn + b."""
        return self.q, self.b

    def saving(self, n: Tensor) -> Tensor:
        """Return what closing one more channel of each group saves: R(n) - R(n - e_l)."""
        n = n.to(self.q)
        return self.q @ n + self.b - 0.5 * self.q.diagonal()


@dataclass(frozen=True)
class Extra:
    """A tensor that is removed when one of these groups closes entirely.

    The tensor's own channels are in other groups. An example is the first norm of a pre-activation
    block, which is removed together with the branch behind it.
    """

    groups: Tensor
    params: Quadratic
    memory: Quadratic


@dataclass(frozen=True)
class Output:
    """The bytes of a contraction's output: size · Π (u·n + c), or 0 if an input has no channels."""

    size: float
    axes: list[tuple[Tensor, float]]
    reads: list[tuple[Tensor, float]]

    def __call__(self, n: Tensor) -> float:
        """Return the bytes at the widths `n`."""
        if any(float(n @ u) + c == 0 for u, c in self.reads):
            return 0.0
        return self.size * math.prod(float(n @ u) + c for u, c in self.axes)


class Cost:
    """The cost of a network as a function of the widths of its groups.

    Args:
        names: The names of the prunable groups.
        sizes: The number of channels of each group.
        parts: The resources by name: MACs, params and memory.
    """

    def __init__(self, names: list[str], sizes: list[int], parts: Mapping[str, Quadratic]) -> None:
        self.names = names
        self.full = torch.tensor(sizes, dtype=torch.float64)
        self.parts: dict[str, Any] = dict(parts)  # `Resource`; those given here are `Quadratic`
        self.extras: list[Extra] = []
        self.outputs: list[Output] = []

    def original(self) -> dict[str, int]:
        """Return the cost of the network before pruning; latency is the measured one."""
        known = {key: part.measured for key, part in self.parts.items()}
        measured = {key: round(cost) for key, cost in known.items() if cost is not None}
        return self.at(self.full) | measured

    def at(self, n: Tensor) -> dict[str, int]:
        """Return MACs, params and memory (in bytes) at the widths `n`."""
        n = n.double()
        found = {key: float(part(n)) for key, part in self.parts.items()}
        found["memory"] += sum(output(n) for output in self.outputs)
        for extra in self.extras:
            if bool((n[extra.groups] == 0).any()):
                found["params"] -= float(extra.params(n))
                found["memory"] -= float(extra.memory(n))
        return {key: round(value) for key, value in found.items()}

    def share(self, n: Tensor) -> dict[str, float]:
        """Return the cost at the widths `n` as a fraction of the original cost."""
        original = self.original()
        return {key: value / max(original[key], 1) for key, value in self.at(n).items()}

    def prices(self, n: Tensor | None = None) -> dict[str, tuple[float, float]]:
        """Return for each group the fractions of MACs and of params that its next channel saves."""
        n = self.full if n is None else n
        original = self.original()
        macs = self.parts["macs"].saving(n) / max(original["macs"], 1)
        params = self.parts["params"].saving(n) / max(original["params"], 1)
        pairs = zip(macs.tolist(), params.tolist(), strict=True)
        return dict(zip(self.names, pairs, strict=True))


class _Sum:
    """Add up terms coef · Π (u·n + c), each a product over at most two axes with prunable units."""

    def __init__(self, graph: Graph) -> None:
        sizes = torch.tensor([g.size for g in graph.prunable.values()], dtype=torch.long)
        size = len(sizes)
        owner = torch.arange(size).repeat_interleave(sizes)
        self.owner = torch.cat(
            [owner, torch.tensor([size])]
        )  # the last entry is the owner of frozen units
        self.sizes = sizes.double()
        self.q = torch.zeros(size, size, dtype=torch.float64)
        self.b = torch.zeros(size, dtype=torch.float64)
        self.c = 0.0
        self._known: dict[int, tuple[Tensor, Tensor, float]] = {}

    def linear(self, units: Tensor) -> tuple[Tensor, float]:
        """Return u and c of an axis: at the widths n, it has u·n prunable and c frozen entries."""
        if id(units) not in self._known:
            counts = torch.bincount(self.owner[units], minlength=len(self.sizes) + 1).double()
            self._known[id(units)] = units, counts[:-1] / self.sizes, float(counts[-1])
        return self._known[id(units)][1:]

    def add(self, coef: float, axes: list[Tensor]) -> None:
        """Add the term coef · Π (u·n + c) over the axes."""
        prunable = []
        for axis in axes:
            u, frozen = self.linear(axis)
            if frozen == axis.numel():
                coef *= frozen
            else:
                prunable.append((u, frozen))
        assert len(prunable) <= 2, "a cost of higher degree than two"
        if not prunable:
            self.c += coef
        elif len(prunable) == 1:
            self.b += coef * prunable[0][0]
            self.c += coef * prunable[0][1]
        else:
            self._add_product(coef, *prunable)

    def _add_product(
        self, coef: float, one: tuple[Tensor, float], two: tuple[Tensor, float]
    ) -> None:
        """Add the term coef · (u·n + cu) · (v·n + cv)."""
        (u, cu), (v, cv) = one, two
        rows, columns = u.nonzero().flatten(), v.nonzero().flatten()  # an axis has few groups
        product = coef * torch.outer(u[rows], v[columns])
        self.q[rows[:, None], columns] += product
        self.q[columns[:, None], rows] += product.T
        self.b += coef * (u * cv + v * cu)
        self.c += coef * cu * cv

    def done(self) -> Quadratic:
        """Return the sum of all terms."""
        return Quadratic(self.q, self.b, self.c)


def measure(model: nn.Module, graph: Graph) -> Cost:
    """Return the cost model of a traced network, from its first tape (the run in eval mode)."""
    macs, outputs = _count_operations(graph)
    sums: dict[int, _Sum] = {}  # by the bytes of an element
    for name, tensor in model.named_parameters():
        size = tensor.element_size()
        sums[size] = sums.get(size) or _Sum(graph)
        sums[size].add(*_term(graph, name, tensor))
    parts = {
        "macs": macs,
        "params": _total(graph, [(1, part) for part in sums.values()]),
        "memory": _total(graph, list(sums.items())),
    }
    cost = Cost(list(graph.prunable), [g.size for g in graph.prunable.values()], parts)
    cost.outputs = outputs
    return cost


def _count_operations(graph: Graph) -> tuple[Quadratic, list[Output]]:
    """Return the MACs of all operations, and the outputs of the contractions."""
    macs = _Sum(graph)
    first = dict.fromkeys(graph.tapes[0].counted_ops)
    counted, outputs = set(), []
    for item in graph.contractions:
        if item.op in first:
            counted.add(item.op)
            size = math.prod(factor.numel() for factor in item.factors)
            macs.add(item.op.macs / size, item.factors)
            outputs.append(_output(graph, item, macs))
    for op in first:
        if op.macs and op not in counted:
            macs.add(op.macs, [])
    return macs.done(), outputs


def add_extras(model: nn.Module, graph: Graph, dropped: Mapping[str, set[str]]) -> None:
    """Add to the cost model the tensors that are removed when a group closes entirely.

    Args:
        model: The traced model.
        graph: Its graph, whose cost model is changed.
        dropped: For each group, the names of these tensors.
    """
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
    """Return the size of a tensor as a product: the fixed factor, and the axes that have units."""
    axes = graph.axes.get(name, {})
    stay = math.prod(size for axis, size in enumerate(tensor.shape) if axis not in axes)
    return stay, list(axes.values())


def _total(graph: Graph, parts: list[tuple[int, _Sum]]) -> Quadratic:
    """Return the sum of the parts, each multiplied by its factor."""
    total = _Sum(graph)
    for times, part in parts:
        total.q += times * part.q
        total.b += times * part.b
        total.c += times * part.c
    return total.done()


def _output(graph: Graph, item: Contraction, total: _Sum) -> Output:
    """Return the memory of a contraction's output as a function of the widths."""
    value = item.op.outs[0]
    axes = [layer.flatten() for layer in graph.values.get(value, [])]
    size = value.itemsize * math.prod(value.shape) / math.prod(axis.numel() for axis in axes)
    return Output(
        size, [total.linear(axis) for axis in axes], [total.linear(f) for f in item.factors]
    )
