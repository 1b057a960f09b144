"""Trace a model, cut a random part of it and compare the two by numbers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import polarprune as pp
from polarprune.channels.graph import Graph
from polarprune.gates.folding import fold
from polarprune.surgery.proof import difference, outputs, prove_equal
from tests.helpers.exact import counted
from tests.helpers.nets import randomise

OUTPUT = "part of the model's output"
Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Cut:
    graph: Graph
    plan: dict[str, list[int]]
    masked: nn.Module
    small: nn.Module


def images(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 3, 8, 8), dtype=torch.float64)


def some_plan(graph: Graph) -> dict[str, list[int]]:
    """Choose a part of every prunable group: at least one channel stays, and at least one goes."""
    widths = {name: int(torch.randint(1, max(g.size, 2), ())) for name, g in graph.prunable.items()}
    return {
        name: sorted(torch.randperm(group.size)[: widths[name]].tolist())
        for name, group in graph.prunable.items()
    }


def cut(
    model: nn.Module, inputs: Inputs, opened: Mapping[str, int], whole: Mapping[str, str]
) -> Cut:
    """Trace, compare with what should be open or whole, cut, and compare by numbers."""
    model = randomise(model).double()
    graph = pp.trace(model, inputs)
    assert {name: group.size for name, group in graph.prunable.items()} == dict(opened)
    reasons = {name: group.reason for name, group in graph.groups.items() if group.frozen}
    assert reasons.keys() == whole.keys()
    assert [name for name in whole if whole[name] not in reasons[name]] == [], reasons
    return cut_at_random(model, graph, inputs)


def cut_at_random(model: nn.Module, graph: Graph, inputs: Inputs) -> Cut:
    plan = some_plan(graph)
    masked = copy.deepcopy(model)
    fold(masked, graph, graph.kept_units(plan).double())
    small = pp.shrink(masked, graph, plan)
    assert prove_equal(masked, small, inputs, 1e-10).differences.keys() == {"eval", "train"}
    for training in (False, True):  # the comparison is of something, and can fail
        assert all(x.isfinite().all() and x.any() for x in outputs(masked, inputs, training=True))
        assert difference(model, small, inputs, training=training) > 1e-6
    _comes_back(model, small, inputs)
    claimed = graph.cost.at(torch.tensor([len(kept) for kept in plan.values()]))
    assert counted(small, inputs) == {key: claimed[key] for key in ("macs", "params")}
    return Cut(graph, plan, masked, small)


def _comes_back(model: nn.Module, small: nn.Module, inputs: Inputs) -> None:
    """Save a small model, and load it into a model with other weights."""
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*fresh.parameters(), *fresh.buffers()):
            if tensor.is_floating_point():
                tensor.zero_()
    with tempfile.TemporaryDirectory() as folder:
        pp.save(small, f"{folder}/small.safetensors")
        again = pp.load(f"{folder}/small.safetensors", model=fresh)
    assert difference(small, again, inputs, training=False) == 0


def trains(model: nn.Module, inputs: Inputs) -> None:
    """Check that every parameter that requires a gradient gets one."""
    model = copy.deepcopy(model).train()
    out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    loss = sum((x - 1).square().mean() for x in tree_leaves(out))
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
