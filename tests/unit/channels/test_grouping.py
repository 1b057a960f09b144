"""Labels become units, units become groups; the graph that holds them is never changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.channels.graph import FROZEN, Graph, plan_of
from tests.helpers.exact import traced

SOME = [
    "residual_projection",
    "c2f_split",
    "resnext",
    "pixel_unshuffle",
    "densenet_list",
    "shuffle_dynamic",
    "flatten_module",
    "group_norm_four",
    "shared_conv",
]


def occurrences(graph: Graph) -> list[dict[tuple[str, int], int]]:
    """Count one by one on which axes every unit occurs, and how often."""
    found: list[dict[tuple[str, int], int]] = [{} for _ in range(graph.units)]
    for tensor, axes in graph.axes.items():
        for axis, units in axes.items():
            for unit, count in Counter(units.tolist()).items():
                if unit != FROZEN:
                    found[unit][tensor, axis] = count
    return found


@pytest.mark.parametrize("name", SOME)
def test_units_of_a_group_occur_on_the_same_axes_equally_often(name: str) -> None:
    graph = traced(name)
    found = occurrences(graph)
    assert found and all(found)
    for group in graph.prunable.values():
        assert all(mine == found[group.offset] for mine in found[group.units])


@pytest.mark.parametrize("name", SOME)
def test_units_of_different_groups_occur_differently(name: str) -> None:
    graph = traced(name)
    found = occurrences(graph)
    signatures = {frozenset(found[group.offset].items()) for group in graph.prunable.values()}
    assert len(signatures) == len(graph.prunable)


@pytest.mark.parametrize("name", SOME)
def test_units_are_numbered_group_after_group(name: str) -> None:
    graph = traced(name)
    assert graph.owners == [name for name, g in graph.prunable.items() for _ in range(g.size)]
    ends = [group.units.stop for group in graph.prunable.values()]
    starts = [group.units.start for group in graph.prunable.values()]
    assert starts == [0, *ends[:-1]] and ends[-1] == graph.units


@pytest.mark.parametrize("name", SOME)
def test_only_axes_of_consumers_are_sites(name: str) -> None:
    graph = traced(name)
    readers = {reader for group in graph.prunable.values() for reader in group.consumers}
    assert {tensor.rpartition(".")[0] or tensor for tensor in graph.sites} == readers
    for tensor, axes in graph.sites.items():
        assert all(units is graph.axes[tensor][axis] for axis, units in axes.items())


def test_three_layers_worked_out_by_hand() -> None:
    """Eight channels between two layers: a group of eight units, on three axes."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = pp.trace(model, torch.randn(1, 4))
    units = list(range(8))
    found = {
        tensor: {k: u.tolist() for k, u in axes.items()} for tensor, axes in graph.axes.items()
    }
    assert found == {"0.weight": {0: units}, "0.bias": {0: units}, "2.weight": {1: units}}
    assert list(graph.sites) == ["2.weight"]
    group = graph.groups["0"]
    assert (group.producers, group.consumers, group.size) == (("0",), ("2",), 8)


class Alternating(nn.Module):
    """One layer makes channels for two readers, in the order a, b, a, b."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.a, self.b = nn.Linear(3, 8), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x)
        a, b = (torch.cat([h[:, k : k + 2], h[:, k + 4 : k + 6]], 1) for k in (0, 2))
        return self.a(a.relu()) + self.b(b.tanh())


def test_units_of_two_groups_may_alternate_on_an_axis() -> None:
    model, x = Alternating().double(), torch.randn(5, 3, dtype=torch.float64)
    graph = pp.trace(model, x)
    first, second = (group for group in graph.prunable.values() if "both" in group.producers)
    assert (first.consumers, second.consumers) == (("a",), ("b",))
    axis = graph.axes["both.weight"][0].tolist()
    assert axis[0:2] + axis[4:6] == list(range(8)[first.units])
    assert axis[2:4] + axis[6:8] == list(range(8)[second.units])


# --- the graph ------------------------------------------------------------------------------------


def test_a_graph_cannot_be_changed() -> None:
    graph = traced("residual_projection")
    parts: list[tuple[Any, str]] = [
        (graph, "notes"),
        (graph.groups["0.0"], "minimum"),
        (graph.layout, "axes"),
        (graph.rewrites, "rewritten"),
    ]
    for part, name in parts:
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)


def test_minimums_are_raised_in_a_copy_and_never_lowered() -> None:
    graph = traced("residual_projection")
    before = {name: group.minimum for name, group in graph.groups.items()}
    raised = graph.with_minimum({"0.0": 3, "1.conv1": 2})
    assert {name: group.minimum for name, group in graph.groups.items()} == before
    assert raised.groups["0.0"].minimum == 3 and raised.groups["1.conv1"].minimum == 2
    assert raised.with_minimum({"0.0": 1}).groups == raised.groups
    assert raised.layout is graph.layout and raised.cost is graph.cost


@pytest.mark.parametrize("name", SOME)
def test_a_plan_and_its_units_say_the_same(name: str) -> None:
    graph = traced(name)
    plan = {name: list(range(0, group.size, 3)) for name, group in graph.prunable.items()}
    kept_units = graph.kept_units(plan)
    assert plan_of(graph, kept_units) == plan
    assert int(kept_units.sum()) == sum(map(len, plan.values()))


def test_shapes_follow_the_plan_that_is_asked_about() -> None:
    """Answers are cached for one plan at a time."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = pp.trace(model, torch.randn(3, 4))
    (relu,) = (op.outs[0] for op in graph.tapes[0].ops if op.name == "relu")
    for kept in ([0], [0, 1, 2], [1], []):
        assert graph.shape(relu, graph.kept_units({"0": kept})) == (3, len(kept))
