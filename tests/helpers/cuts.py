"""Cut models by plans of many kinds and compare them with the masked original, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from polarprune.channels.graph import Graph, Plan
from polarprune.gates.folding import fold

Body = Callable[[Any, Tensor], Any]


class Body2d(nn.Module):
    """Two convolutions and a linear layer; `body` runs after the first convolution."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)
        self.c = nn.Linear(12, 5)
        self.body = body
        self.double().eval()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.a(x))

    def rest(self, h: Tensor) -> Tensor:
        """What every body ends with."""
        found: Tensor = self.c(F.relu(self.b(h)).mean((2, 3)))
        return found


def images(batch: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch * 100 + size)
    return torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)


def plans(graph: Graph) -> Iterator[Plan]:
    """Yield plans: one channel, all but the first or the last, equal widths, random parts."""
    groups = graph.prunable.values()
    for kept in (lambda n: [n - 1], lambda n: range(1, n), lambda n: range(n - 1)):
        yield {g.name: list(kept(g.size)) or [0] for g in groups}
    for width in (2, 3, 4, 6, 8):
        yield {g.name: list(range(g.size))[-width:] for g in groups}
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        plan = {}
        for g in groups:
            count = int(torch.randint(1, g.size + 1, (), generator=generator))
            plan[g.name] = sorted(torch.randperm(g.size, generator=generator)[:count].tolist())
        yield plan


def masked(model: nn.Module, graph: Graph, plan: Plan) -> nn.Module:
    model = copy.deepcopy(model)
    fold(model, graph, graph.kept_units(plan).double())
    return model


@torch.no_grad()
def worst(model: nn.Module, graph: Graph, *inputs: Tensor) -> float:
    """Return the largest difference of cut models from the masked model.

    The first input is the example. Others may be refused by rewritten code, and where the original
    does not run there is nothing to compare.
    """
    found = 0.0
    for plan in plans(graph):
        small, whole = pp.shrink(model, graph, plan), masked(model, graph, plan)
        for number, x in enumerate(inputs):
            try:
                wanted = whole(x)
            except RuntimeError:
                assert number, "the model runs on its example"
                continue
            try:
                given = small(x)
            except pp.PruneError as refused:
                assert number and "rewritten for the sizes" in str(refused), refused
                continue
            for a, b in zip(_tensors(wanted), _tensors(given), strict=True):
                assert a.shape == b.shape, (plan, a.shape, b.shape)
                found = max(found, float((a - b).abs().max()) / max(1.0, float(a.abs().max())))
    return found


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [x for item in out for x in _tensors(item)]


def reasons(graph: Graph) -> str:
    """Return the reason of each frozen group."""
    return "\n".join(f"{g.name}: {g.reason}" for g in graph.groups.values() if g.frozen)
