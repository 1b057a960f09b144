"""The latency model: the time of a forward pass as a function of the widths.

The time of a layer is not proportional to its MACs: calls and memory traffic take time, and kernels
work on 8 or 16 channels at once. The model therefore has for every module a time

    t(n) = a + b · MACs(n) + c · bytes(n),    widths rounded up to the step that fits best,

which is fitted to measured times of models of many widths (`stopwatch`). The sum over the modules
gives the shape of the latency. Its scale is corrected whenever a model of the present widths is
timed beside the original, because modules overlap or wait for each other.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..channels.graph import FROZEN, Graph
from ..tracing.tape import Value

STEPS = (1, 4, 8, 16, 32, 64, 128)  # numbers of channels that a kernel may process at once
_MACS, _BYTES = 0, 1  # kinds of terms
# What a checkpoint stores, under its key there.
_FITTED = {"whole": "measured", "steps": "steps", "coefs": "coefs", "scale": "scale"}


class _Axes:
    """Number the different channel axes; axis k has u[k]·n + c[k] channels at widths n.

    Axis 0 always has length 1: it pads lists of axes to the same length.
    """

    def __init__(self, graph: Graph) -> None:
        groups = list(graph.prunable.values())
        self._owner = torch.tensor([i for i, g in enumerate(groups) for _ in range(g.size)])
        self._sizes = torch.tensor([g.size for g in groups], dtype=torch.float64)
        self._numbers: dict[bytes, int] = {}
        self.u: list[Tensor] = []
        self.c: list[float] = []
        self._number(torch.tensor([FROZEN]))

    def numbers(self, layers: list[Tensor]) -> list[int]:
        """Return the numbers of these axes, each given by the units along it."""
        return [self._number(layer) for layer in layers]

    def _number(self, units: Tensor) -> int:
        units = units.flatten()
        key = units.numpy().tobytes()
        if key not in self._numbers:
            mine = units[units != FROZEN]
            counts = torch.bincount(self._owner[mine], minlength=len(self._sizes)).double()
            self._numbers[key] = len(self.u)
            self.u.append(counts / self._sizes)
            self.c.append(float(units.numel() - mine.numel()))
        return self._numbers[key]


@dataclass
class _TermList:
    """The terms while they are collected: one entry of each list for each term."""

    slot: list[int] = field(default_factory=list)  # 2 · module + kind
    coef: list[float] = field(default_factory=list)
    axes: list[list[int]] = field(default_factory=list)
    needs: list[list[int]] = field(default_factory=list)

    def add(self, module: int, kind: int, coef: float, axes: list[int], needs: list[int]) -> None:
        """Add the term coef · Π (lengths of `axes`), zero if one of `needs` has no channels."""
        self.slot.append(2 * module + kind)
        self.coef.append(coef)
        self.axes.append(axes)
        self.needs.append(needs)


class Terms:
    """MACs and bytes of every module, as sums of products of widths."""

    def __init__(self, graph: Graph) -> None:
        self.modules: list[str] = []
        axes = _Axes(graph)
        terms = _collect_terms(graph, axes, self.modules)
        self.u, self.c = torch.stack(axes.u), torch.tensor(axes.c, dtype=torch.float64)
        self.slot = torch.tensor(terms.slot)
        self.coef = torch.tensor(terms.coef, dtype=torch.float64)
        self.axes, self.needs = _padded(terms.axes), _padded(terms.needs)

    def __call__(self, lengths: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the MACs and the bytes of every module.

        Args:
            lengths: Lengths of all axes, as `lengths` returns them: [..., axes].
            steps: For each module, the number of channels that its kernel processes at once.
        """
        step = steps[self.slot // 2].unsqueeze(-1)
        wide = lengths[..., self.axes]
        wide = torch.where(self.axes > 0, torch.ceil(wide / step - 1e-9) * step, wide)
        runs = (lengths[..., self.needs] > 1e-9).all(-1)
        each = self.coef * wide.prod(-1) * runs
        total = each.new_zeros(*each.shape[:-1], 2 * len(self.modules))
        total = total.index_add(-1, self.slot, each)
        return total[..., _MACS::2], total[..., _BYTES::2]

    def lengths(self, n: Tensor) -> Tensor:
        """Return the length of every axis at widths `n`."""
        return n.double() @ self.u.T + self.c


def _collect_terms(graph: Graph, axes: _Axes, modules: list[str]) -> _TermList:
    """Return the terms of all operations in the eval-mode tape; add their modules to `modules`."""
    found = _TermList()
    contractions = {item.op: item for item in graph.contractions}
    counted = set(graph.tapes[0].counted_ops)
    for op in graph.tapes[0].relevant_ops:
        if op not in counted or not op.outs or any(value.base is not None for value in op.outs):
            continue  # a view takes no time
        if op.module not in modules:
            modules.append(op.module)
        module = modules.index(op.module)
        item = contractions.get(op)
        needs = axes.numbers(item.factors) if item else _bytes_of(graph, op.outs[0], axes)[1]
        if item:
            size = math.prod(factor.numel() for factor in item.factors)
            found.add(module, _MACS, op.macs / size, needs, needs)
        for value in op.tensors():
            found.add(module, _BYTES, *_bytes_of(graph, value, axes), needs)
    return found


def _bytes_of(graph: Graph, value: Value, axes: _Axes) -> tuple[float, list[int]]:
    """Return the bytes for each combination of channels, and the axes on which these lie."""
    layers = graph.values.get(value) or list(graph.axes.get(value.name, {}).values())
    combinations = math.prod(layer.numel() for layer in layers)
    bytes_each = value.itemsize * math.prod(value.shape) / max(combinations, 1)
    return bytes_each, axes.numbers(layers)


def _padded(rows: list[list[int]]) -> Tensor:
    """Return the rows as one matrix; axis 0, of length 1, fills short rows."""
    longest = max(map(len, rows), default=1) or 1
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


class Latency:
    """Nanoseconds as a function of the widths: a resource of `Cost`, beside MACs and params.

    Attributes:
        measured: Latency of the original, in nanoseconds.
        steps: For each module, the number of channels that its kernel processes at once.
        coefs: a, b and c of each module: [3, modules].
        scale: Measured share of the original's latency, divided by the sum over modules.
    """

    def __init__(self, terms: Terms, full: Tensor, milliseconds: float) -> None:
        self.terms, self.full = terms, full.double()
        self.measured = 1e6 * milliseconds
        count = len(terms.modules)
        self.steps = torch.ones(count, dtype=torch.float64)
        self.coefs = torch.zeros(3, count, dtype=torch.float64)
        self.scale = torch.ones((), dtype=torch.float64)

    def fit(self, widths: Tensor, times: Tensor) -> None:
        """Fit the step and the coefficients of every module to times [samples, modules]."""
        lengths = self.terms.lengths(widths)
        best = torch.full_like(self.steps, math.inf)
        for step in STEPS:
            macs, size = self.terms(lengths, torch.full_like(self.steps, float(step)))
            runs = (size > 0).double()
            for k in range(len(best)):
                features = torch.stack([runs[:, k], macs[:, k], size[:, k]])
                coefs, error = _least_squares(features, times[:, k])
                # A staircase has one parameter more, so it has to fit clearly better.
                if error < best[k] * (0.95 if step > 1 else 1):
                    best[k], self.steps[k], self.coefs[:, k] = error, step, coefs

    def modules(self, lengths: Tensor) -> Tensor:
        """Return the time of each module, in the unit of the times that were fitted."""
        macs, size = self.terms(lengths, self.steps)
        parts = torch.stack([(size > 0).double(), macs, size], -2)
        return (self.coefs * parts).sum(-2)

    def share(self, lengths: Tensor) -> Tensor:
        """Return the share of the original's latency, for lengths of axes."""
        original = self.modules(self.terms.lengths(self.full)).sum()
        return self.scale * self.modules(lengths).sum(-1) / original

    def __call__(self, n: Tensor) -> Tensor:
        """Return the latency at widths `n`, in nanoseconds."""
        return self.measured * self.share(self.terms.lengths(n))

    def linear(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q and b of the price Qn + b of a channel; here Q is 0.

        The price is the mean saving over an eighth of the group's width. A single channel may save
        nothing, although the next step of the staircase is near.
        """
        n = n.double()
        window = torch.minimum(torch.ceil(self.full / 8).clamp_min(1), n.clamp_min(1))
        now = self.terms.lengths(n)
        fewer = (now - window.unsqueeze(1) * self.terms.u.T).clamp_min(0)
        saved = (self.share(now) - self.share(fewer)).clamp_min(0)
        return torch.zeros(len(n), len(n), dtype=torch.float64), self.measured * saved / window

    def correct(self, n: Tensor, share: float) -> None:
        """Scale the model so that it gives this measured share at widths `n`."""
        self.scale *= share / float(self.share(self.terms.lengths(n)))

    def state(self) -> dict[str, float | Tensor]:
        """Return what was fitted, for a checkpoint."""
        return copy.deepcopy({key: getattr(self, name) for key, name in _FITTED.items()})

    def load(self, state: Mapping[str, float | Tensor]) -> None:
        """Restore what `state` returned."""
        found = copy.deepcopy(dict(state))
        vars(self).update({name: found[key] for key, name in _FITTED.items()})


def _least_squares(features: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return non-negative coefficients of [features, samples], and their squared error.

    All subsets of the features are tried. A larger subset has to reduce the error by 2 %.
    """
    best, error = torch.zeros(len(features), dtype=torch.float64), float(target.square().sum())
    for size in range(1, len(features) + 1):
        for chosen in itertools.combinations(range(len(features)), size):
            own = features[list(chosen)].T
            scale = own.abs().amax(0).clamp_min(1e-30)
            found = torch.linalg.lstsq(own / scale, target.unsqueeze(1), driver="gelsd").solution
            found = found.squeeze(1) / scale
            left = float((own @ found - target).square().sum())
            if bool((found >= 0).all()) and left < 0.98 * error:
                best, error = torch.zeros_like(best), left
                best[list(chosen)] = found
    return best, error
