"""Groups of a family close together: blocks, landing and rounding keep their widths equal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import polarprune as pp
from polarprune.analysis.trace import survey
from polarprune.channels.graph import Graph
from polarprune.cost.budget import Budget
from polarprune.cost.families import FamilyIndex
from polarprune.cost.other_scores import plan_by_score, random_scores
from tests.helpers.nets import digits_resnet
from tests.helpers.repeated_nets import NETS, made

GRAPHS: dict[str, Graph] = {}
LIMITS = [{"macs": 0.5}, {"macs": 0.3, "params": 0.6}]


def traced(name: str) -> Graph:
    if name not in GRAPHS:
        GRAPHS[name] = survey(*made(name), uniform=True)
    return GRAPHS[name]


def random_gates(budget: Budget, seed: int, closed: float = 0.0) -> Tensor:
    """Return α without equal values; `closed` closes that share of every family."""
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.rand(len(budget.owner), generator=generator, dtype=torch.float64) + 0.1
    for group in range(len(budget.minimum)):
        mine = (budget.owner == group).nonzero().flatten()
        most = len(mine) - int(budget.minimum[group])
        alpha[mine[: int(closed * most)]] = 0
    return alpha


def slow_blocks(budget: Budget, alpha: Tensor) -> dict[tuple[int, int], tuple[float, set[int]]]:
    """Return (family, number) -> the key of a block and its gates, channel by channel."""
    families, widths = budget.families, budget.widths(alpha)
    price = budget.price(widths)
    found: dict[tuple[int, int], tuple[float, set[int]]] = {}
    for family in range(len(families.first)):
        groups = (families.number == family).nonzero().flatten().tolist()
        level = int(min(widths[group] for group in groups))
        blocks: dict[int, set[int]] = defaultdict(set)
        tops: dict[int, float] = defaultdict(float)
        for group in groups:
            mine = [k for k in (budget.owner == group).nonzero().flatten().tolist() if alpha[k]]
            mine = sorted(mine, key=lambda k: -float(alpha[k]))[:level]
            for place, gate in enumerate(mine):
                if place < budget.minimum[group]:
                    continue
                number = place // int(budget.multiple[group])
                blocks[number].add(gate)
                if place % int(budget.multiple[group]) == 0:
                    scarcity = float(budget.cost.full[group]) / (place + 1)
                    tops[number] += float(alpha[gate]) * scarcity
        cost = sum(float(price[group]) for group in groups)
        found |= {(family, n): (tops[n] / cost, gates) for n, gates in blocks.items()}
    return found


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("name", ["no families", *NETS])
def test_blocks_are_those_of_a_slow_count(name: str, multiple: int) -> None:
    plain = name == "no families"
    graph = pp.trace(digits_resnet(8), torch.randn(2, 1, 8, 8)) if plain else traced(name)
    budget = Budget(graph, {"macs": 0.5}, multiple)
    for alpha in (random_gates(budget, 0), random_gates(budget, 1, closed=0.3)):
        blocks = budget.blocks(alpha)
        expected = slow_blocks(budget, alpha)
        assert len(blocks.family) == len(expected)
        assert blocks.key.tolist() == sorted(blocks.key.tolist())
        gates = {frozenset(gates): key for key, gates in expected.values()}
        for number, key in enumerate(blocks.key.tolist()):
            mine = frozenset((blocks.member == number).nonzero().flatten().tolist())
            assert gates[mine] == pytest.approx(key, rel=1e-12)
    assert not len(budget.blocks(torch.zeros_like(alpha)).family)


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("name", NETS)
def test_widths_after_blocks_are_those_without_their_gates(name: str, multiple: int) -> None:
    budget = Budget(traced(name), {"macs": 0.5}, multiple)
    alpha = random_gates(budget, 2)
    blocks, n = budget.blocks(alpha), budget.widths(alpha)
    for count in range(0, len(blocks.family) + 1, 3):
        left = torch.where((blocks.member >= 0) & (blocks.member < count), 0, alpha)
        assert torch.equal(budget.after(n, blocks, count), budget.widths(left))


def assert_uniform(budget: Budget, n: Tensor) -> None:
    for family in range(len(budget.families.first)):
        assert len(n[budget.families.number == family].unique()) == 1


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_landing_is_uniform_and_no_block_of_a_family_would_fit(
    name: str, limits: dict[str, float], multiple: int
) -> None:
    budget = Budget(traced(name), limits, multiple)
    for seed in range(5):
        alpha = random_gates(budget, seed, closed=0.1 * (seed % 2))
        landed = budget.land(alpha)
        n, most = budget.widths(landed), budget.widths(alpha)
        assert bool(((landed == 0) | (landed == alpha)).all())
        assert float(budget.excess(n)) <= 0
        assert bool((n >= budget.minimum).all())
        assert bool(((n % budget.multiple == 0) | (n == most)).all())
        assert_uniform(budget, n)
        wider = n + budget.families.totals(torch.diag(budget.multiple.double()))
        could = (wider <= most).all(1)
        assert bool((budget.excess(wider)[could] > 0).all())


@pytest.mark.parametrize("name", NETS)
def test_landing_closes_the_least_important_of_each_group(name: str) -> None:
    budget = Budget(traced(name), {"macs": 0.5})
    alpha = random_gates(budget, 3)
    landed = budget.land(alpha)
    for group in range(len(budget.minimum)):
        mine = budget.owner == group
        gone, left = alpha[mine & (landed == 0)], landed[mine & (landed != 0)]
        assert not len(gone) or not len(left) or float(gone.max()) < float(left.min())


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("name", NETS)
def test_widths_that_differ_are_equal_after_the_landing(name: str, multiple: int) -> None:
    """A group may be narrower for a while, or after gates were changed from outside."""
    for limits in ({"macs": 0.5}, {"macs": 0.99}):
        budget = Budget(traced(name), limits, multiple)
        alpha = random_gates(budget, 4)
        narrow = (budget.owner == 1).nonzero().flatten()
        alpha[narrow[int(budget.minimum[1]) + 1 :]] = 0
        blocks = budget.blocks(alpha)
        for family in range(len(budget.families.first)):  # equally many channels of each group
            mine = budget.families.number[budget.owner] == family
            counts = torch.bincount(budget.owner[mine & (blocks.member >= 0)])
            assert len(counts[counts > 0].unique()) <= 1
        n = budget.widths(budget.land(alpha))
        assert float(budget.excess(n)) <= 0
        assert_uniform(budget, n)


def test_a_family_has_the_largest_minimum_and_the_common_multiple() -> None:
    graph = traced("resnet")
    families = {"both": ("1.0.conv1", "1.1.conv1")}
    graph = replace(graph.with_minimum({"1.1.conv1": 3}), families=families)
    budget = Budget(graph, {"macs": 0.5}, 2)
    first, second = (list(graph.prunable).index(name) for name in families["both"])
    assert budget.minimum[first] == budget.minimum[second] == 4
    budget = Budget(graph, {"macs": 0.5})
    found = budget._one_multiple(torch.arange(1, len(graph.prunable) + 1))
    assert found[first] == found[second]
    assert found[first] % (first + 1) == 0 and found[first] % (second + 1) == 0


def test_the_price_of_a_family_is_that_of_all_of_its_groups() -> None:
    """A family with twice the groups, of equal prices and worth, closes no earlier."""
    graph = traced("vision transformer")
    one, two = (f"blocks.{k}.mlp.0" for k in (0, 1))
    budget = Budget(replace(graph, families={"two": (one, two)}), {"params": 0.5})
    blocks = budget.blocks(torch.ones(graph.units, dtype=torch.float64))
    third = budget.families.number[list(graph.prunable).index("blocks.2.mlp.0")]
    joined = budget.families.number[list(graph.prunable).index(one)]
    keys = [blocks.key[blocks.family == family] for family in (joined, third)]
    assert torch.allclose(*keys)


@pytest.mark.parametrize("name", NETS)
def test_plans_by_other_scores_are_uniform_too(name: str) -> None:
    graph = traced(name)
    plan = plan_by_score(graph, random_scores(graph, 0), macs=0.6)
    for names in graph.families.values():
        assert len({len(plan[one]) for one in names}) == 1


def test_values_are_converted_between_groups_and_families() -> None:
    families = FamilyIndex(["a", "b", "c", "d"], [("a", "c")])
    assert families.number.tolist() == [0, 1, 0, 2] and families.first.tolist() == [0, 1, 3]
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert families.totals(values).tolist() == [4, 2, 4]
    assert families.least(values).tolist() == [1, 2, 4]
    assert families.most(values).tolist() == [3, 2, 4]
    rows = torch.tensor([[5.0, 6.0, 7.0], [8.0, 9.0, 1.0]])
    assert families.of_groups(rows).tolist() == [[5, 6, 5, 7], [8, 9, 8, 1]]
    alone = FamilyIndex(["a", "b"], [])
    assert alone.totals(values) is values and alone.of_groups(values) is values
