"""Every run ends at most half a point below its budget, and never above it; and how it does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.cost.budget import Budget
from tests.helpers.nets import NETS, digits_resnet, mobilenetv2_small, resnet20
from tests.helpers.training import alphas, batches, prune, sgd, share, train

pytestmark = pytest.mark.usefixtures("shared_traces")
CLOSE = 0.005  # half a point
MODELS = ["resnet20", "mobilenetv2"]
IMAGE = (2, 3, 16, 16)


def build(name: str, width: int = 8) -> nn.Module:
    torch.manual_seed(1)
    return resnet20(width) if name == "resnet20" else mobilenetv2_small()


@pytest.fixture(scope="module", params=MODELS)
def graph(request: pytest.FixtureRequest) -> Any:
    return pp.trace(build(request.param, width=16), torch.randn(IMAGE))


def is_polarized(pruner: pp.Pruner) -> bool:
    values = torch.cat([gate.values() for gate in pruner.gates.values()])
    return bool(((values == 0) | (values > 0.5)).all())


# --- trainings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("name", MODELS)
def test_a_macs_budget_is_met_within_half_a_point(name: str, budget: float) -> None:
    pruner = prune(build(name), 20, macs=budget)
    assert budget - CLOSE < share(pruner)["macs"] <= budget
    assert is_polarized(pruner)


@pytest.mark.parametrize("budget", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", MODELS)
def test_a_params_budget_is_met_within_half_a_point(name: str, budget: float) -> None:
    pruner = prune(build(name), 20, params=budget)
    assert budget - CLOSE < share(pruner)["params"] <= budget
    assert is_polarized(pruner)


@pytest.mark.parametrize(("macs", "params"), [(0.5, 0.5), (0.3, 0.8), (0.9, 0.2)])
@pytest.mark.parametrize("name", MODELS)
def test_two_budgets_are_both_met_and_one_of_them_closely(
    name: str, macs: float, params: float
) -> None:
    left = share(prune(build(name), 20, macs=macs, params=params))
    assert left["macs"] <= macs and left["params"] <= params
    assert left["macs"] > macs - CLOSE or left["params"] > params - CLOSE


def kept_widths(small: nn.Module) -> dict[str, int]:
    """Return the channels in and out of every layer, except the image and the classes."""
    layers = {n: m for n, m in small.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    found = {}
    for name, layer in layers.items():
        conv = isinstance(layer, nn.Conv2d)
        found[f"{name} in"] = layer.in_channels if conv else layer.in_features
        found[f"{name} out"] = layer.out_channels if conv else layer.out_features
    first, last = next(iter(layers)), list(layers)[-1]
    del found[f"{first} in"], found[f"{last} out"]
    return found


@pytest.mark.parametrize("multiple", [2, 4, 8])
@pytest.mark.parametrize("goal", [{"macs": 0.3}, {"macs": 0.6, "params": 0.4}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_kept_width_is_a_multiple_and_the_budget_is_met(
    name: str, goal: dict[str, float], multiple: int
) -> None:
    pruner = prune(build(name, width=16), 10, **goal, multiple_of=multiple)
    left = share(pruner)
    assert all(left[key] <= limit for key, limit in goal.items())
    odd = {n: w for n, w in kept_widths(pruner.export()).items() if w % multiple}
    assert not odd


def cheapest_block(budget: Budget, n: Tensor) -> float:
    """Return the lowest cost of one more block of any group."""
    wider = n + torch.diag(budget.multiple.double())
    there = wider.diagonal() <= budget.cost.full
    return float((budget.excess(wider) - budget.excess(n))[there].min())


@pytest.mark.parametrize("multiple", [4, 8, 16])
@pytest.mark.parametrize("goal", [0.5, 0.3])
@pytest.mark.parametrize("name", ["digits", "resnet20", "mobilenetv2"])
def test_no_more_stays_unused_than_the_cheapest_block_or_half_a_point(
    name: str, goal: float, multiple: int
) -> None:
    torch.manual_seed(1)
    digits = name == "digits"
    model = digits_resnet(16) if digits else build(name, width=16)
    shape = {"channels": 1, "size": 8} if digits else {"size": 8}
    pruner = prune(model, 40, macs=goal, multiple_of=multiple, **shape)
    n = pruner.budget.widths(alphas(pruner))
    unused = goal - share(pruner)["macs"]
    assert 0 <= unused < max(CLOSE, cheapest_block(pruner.budget, n))


def test_plain_mode_keeps_to_multiples_too() -> None:
    pruner = prune(digits_resnet(8), 40, channels=1, size=8, lam=100.0, multiple_of=4)
    assert int((alphas(pruner) == 0).sum()) > 0
    assert not {n: w for n, w in kept_widths(pruner.export()).items() if w % 4}


def test_a_larger_lam_prunes_more_or_equal() -> None:
    left = []
    for lam in (0.01, 80.0, 160.0, 10_000.0):
        torch.manual_seed(1)
        pruner = prune(digits_resnet(8), 40, channels=1, size=8, lam=lam)
        assert is_polarized(pruner)
        left.append(share(pruner)["macs"])
    assert left == sorted(left, reverse=True)
    assert left[0] == 1
    assert left[-1] < 0.2


OPTIMIZERS: dict[str, Callable[[pp.Pruner], torch.optim.Optimizer]] = {
    "sgd": lambda pruner: sgd(pruner, lr=0.2),
    "adam": lambda pruner: torch.optim.Adam(pruner.param_groups(lr=0.02)),
}


def follow(pruner: pp.Pruner, optimizer: torch.optim.Optimizer, data: Any) -> list[Tensor]:
    """Train, and return α after every step."""
    pruner.attach(optimizer)
    seen = [alphas(pruner)]
    train(pruner.model, optimizer, data, lambda: seen.append(alphas(pruner)))
    return seen


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "budget"), [("resnet20", 0.3), ("mobilenetv2", 0.6)])
def test_on_the_way_no_gate_reopens_and_the_cost_never_undershoots(
    name: str, budget: float, optimizer: str
) -> None:
    data = batches(40)
    pruner = pp.Pruner(build(name), torch.randn(IMAGE), macs=budget, steps=40)
    seen = follow(pruner, OPTIMIZERS[optimizer](pruner), data)
    costs = [pruner.graph.cost.share(pruner.budget.widths(alpha))["macs"] for alpha in seen]
    assert min(costs) > budget - CLOSE
    assert costs[-1] <= budget
    for earlier, later in itertools.pairwise(seen):
        assert bool((later[earlier == 0] == 0).all())
    assert is_polarized(pruner)


def test_gates_close_before_the_deadline_and_none_after_it() -> None:
    pruner = pp.Pruner(build("resnet20"), torch.randn(IMAGE), macs=0.5, steps=60)
    seen = follow(pruner, sgd(pruner), batches(60))
    live = [int((alpha != 0).sum()) for alpha in seen]
    assert live[0] > live[29] > live[30] == live[-1]


def test_the_budget_holds_when_the_host_looks_only_now_and_then() -> None:
    """Above 400 steps the host skips some: nothing may overshoot in between."""
    model, _ = NETS["mlp_batch_norm"]()
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(8, 10, generator=generator), torch.randint(5, (8,), generator=generator))
        for _ in range(1300)
    ]
    pruner = pp.Pruner(model, data[0][0], macs=0.5, steps=1300)
    whole, least = pruner.cost()["macs"], []
    optimizer = sgd(pruner, lr=0.02)
    pruner.attach(optimizer)
    train(model, optimizer, data, lambda: least.append(pruner.cost()["macs"] / whole))
    assert len(pruner.history) < 500
    assert least[-1] <= 0.5
    assert min(least) == least[-1]
    assert least[-1] > 0.5 - max(price for price, _ in pruner.graph.cost.prices().values())


def test_whole_groups_close_and_the_spine_keeps_a_channel() -> None:
    for name in MODELS:
        pruner = prune(build(name), 16, macs=0.011)  # with a channel of each it would be more
        groups = pruner.graph.prunable
        kept = {name: len(channels) for name, channels in pruner.plan().items()}
        assert any(kept[name] == 0 for name, group in groups.items() if not group.minimum)
        assert all(kept[name] >= 1 for name, group in groups.items() if group.minimum)
        small = pruner.export()
        assert torch.isfinite(small(torch.randn(IMAGE))).all()


def test_one_step_is_enough_to_land() -> None:
    for steps in (1, 2, 3):
        pruner = prune(digits_resnet(8), steps, channels=1, size=8, macs=0.5)
        assert share(pruner)["macs"] <= 0.5


# --- what cannot be reached -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [{}, {"keep": ["1", "4.2"]}, {"multiple_of": 8}, {"multiple_of": 4, "keep": ["3"]}],
    ids=str,
)
@pytest.mark.parametrize("goal", ["macs", "params"])
def test_an_unreachable_budget_is_refused_with_the_lowest_which_is_accepted(
    goal: str, setting: dict[str, Any]
) -> None:
    example = torch.randn(2, 1, 8, 8)
    model = digits_resnet(8)
    with pytest.raises(pp.PruneError, match="budget out of reach") as refusal:
        pp.Pruner(model, example, steps=4, **{goal: 0.0001}, **setting)
    found = re.search(rf"{goal}=0.0001 \(the lowest is (0\.\d+)\)", str(refusal.value))
    assert found
    lowest = float(found[1])
    with pytest.raises(pp.PruneError, match="out of reach"):
        pp.Pruner(model, example, steps=4, **{goal: lowest - 0.0001}, **setting)
    pruner = prune(model, 4, channels=1, size=8, **{goal: lowest}, **setting)
    assert lowest - 0.0002 < share(pruner)[goal] <= lowest
    pruner.export()


def test_all_budgets_out_of_reach_are_named() -> None:
    with pytest.raises(pp.PruneError, match=r"macs=0\.001 \(.*\), params=0\.001 \(.*multiple_of"):
        pp.Pruner(digits_resnet(8), torch.randn(2, 1, 8, 8), macs=0.001, params=0.001, steps=4)


# --- landing, without a training ------------------------------------------------------------------


def random_alpha(budget: Budget, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.randn(len(budget.owner), generator=generator, dtype=torch.float64)
    closed = torch.rand(len(alpha), generator=generator) < 0.1
    alpha[closed] = 0
    for group, least in enumerate(budget.minimum.tolist()):
        mine = (budget.owner == group).nonzero().flatten()
        alpha[mine[:least]] = 1
    return alpha


@pytest.mark.parametrize("limits", [{"macs": 0.5}, {"macs": 0.13}, {"params": 0.3}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_landing_only_closes_and_ends_just_under_the_budget(
    graph: Any, limits: dict[str, float], seed: int
) -> None:
    budget = Budget(graph, limits)
    alpha = random_alpha(budget, seed)
    before = alpha.clone()
    landed = budget.land(alpha)
    assert torch.equal(alpha, before)
    assert -CLOSE < float(budget.excess(budget.widths(landed))) <= 0
    assert bool(((landed == 0) | (landed == alpha)).all())
    assert bool((budget.widths(landed) >= budget.minimum).all())


def test_landing_leaves_alone_what_is_under_the_budget(graph: Any) -> None:
    budget = Budget(graph, {"macs": 0.95})
    alpha = Budget(graph, {"macs": 0.3}).land(random_alpha(budget, 0))
    assert torch.equal(budget.land(alpha), alpha)


def test_landing_closes_the_smallest_of_a_group_first(graph: Any) -> None:
    budget = Budget(graph, {"macs": 0.4})
    alpha = random_alpha(budget, 1)
    landed = budget.land(alpha)
    for group in range(len(budget.minimum)):
        mine = (budget.owner == group) & (alpha != 0)
        gone, left = alpha[mine & (landed == 0)].abs(), landed[mine & (landed != 0)].abs()
        if len(gone) and len(left):
            assert float(gone.max()) <= float(left.min())


@pytest.mark.parametrize("multiple", [2, 4, 8])
def test_landing_ends_on_multiples(graph: Any, multiple: int) -> None:
    budget = Budget(graph, {"macs": 0.4}, multiple)
    for seed in range(3):
        n = budget.widths(budget.land(random_alpha(budget, seed)))
        assert float(budget.excess(n)) <= 0
        assert bool((n % budget.multiple == 0).all())
        assert bool((n >= budget.minimum).all())


@pytest.mark.parametrize("multiple", [1, 4, 8, 16])
@pytest.mark.parametrize("limits", [{"macs": 0.5}, {"macs": 0.6, "params": 0.3}], ids=str)
def test_no_block_that_landing_closes_would_fit(
    graph: Any, limits: dict[str, float], multiple: int
) -> None:
    budget = Budget(graph, limits, multiple)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        alpha = torch.rand(len(budget.owner), generator=generator, dtype=torch.float64) + 0.1
        n, most = budget.widths(budget.land(alpha)), budget.widths(alpha)
        wider = n + torch.diag(budget.multiple.double())
        could = wider.diagonal() <= most
        assert bool(could.any())
        assert float(budget.excess(n)) <= 0
        assert bool((budget.excess(wider)[could] > 0).all())


def test_nothing_that_landing_closes_could_have_stayed() -> None:
    """The block that ends the excess may save so much that others need not have closed."""
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    budget = Budget(pp.trace(model, torch.randn(2, 64)), {"params": 0.3}, 16)
    for seed in range(10):
        alpha = torch.rand(128, generator=torch.Generator().manual_seed(seed)).double() + 0.1
        alpha[(torch.arange(128) % 64) >= 32] = 0  # half of each
        n = budget.widths(budget.land(alpha))
        assert sorted(n.tolist()) == [16, 32]


def test_the_first_blocks_that_close_are_the_cheapest_in_alpha_for_what_they_save(
    graph: Any,
) -> None:
    budget = Budget(graph, {"macs": 0.5})
    blocks = budget.blocks(random_alpha(budget, 2))
    assert torch.equal(blocks.key, blocks.key.sort().values)
    assert int(blocks.count.sum()) == int((blocks.member >= 0).sum())
