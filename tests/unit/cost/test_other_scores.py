"""Plans by scores meet the same budget as the learned one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polarprune as pp
from polarprune.cost.budget import Budget
from polarprune.cost.other_scores import (
    magnitude_scores,
    plan_by_score,
    plan_by_threshold,
    random_scores,
)
from tests.helpers.nets import NETS

pytestmark = pytest.mark.usefixtures("shared_traces")


def counted(model, example):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*example)
    return counter.get_total_flops() // 2


def assert_just_under(limits, model, small, example):
    shares = {
        "macs": counted(small, example) / counted(model, example),
        "params": sum(p.numel() for p in small.parameters())
        / sum(p.numel() for p in model.parameters()),
    }
    gaps = [limit - shares[key] for key, limit in limits.items()]
    assert all(gap >= 0 for gap in gaps)
    assert min(gaps) < 0.005


@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2_small"])
@pytest.mark.parametrize("limits", [{"macs": 0.47}, {"params": 0.3}, {"macs": 0.6, "params": 0.6}])
@pytest.mark.parametrize("kind", ["magnitude", "random"])
def test_a_control_plan_lands_just_under_its_budget(name, limits, kind):
    model, example = NETS[name]()
    graph = pp.trace(model, example)
    scores = magnitude_scores(model, graph) if kind == "magnitude" else random_scores(graph, 1)
    plan = plan_by_score(graph, scores, **limits)
    assert_just_under(limits, model, pp.shrink(model, graph, plan), example)


def test_the_magnitude_plan_keeps_the_largest_channels():
    model, example = NETS["conv_bn_relu"]()
    graph = pp.trace(model, example)
    first = next(iter(graph.prunable.values()))
    weight = model.get_submodule(first.producers[0]).weight
    with torch.no_grad():
        weight[3] *= 100
        weight[5] *= 0.001
    plan = plan_by_score(graph, magnitude_scores(model, graph), macs=0.5)
    assert 3 in plan[first.name] and 5 not in plan[first.name]


def test_random_plans_follow_their_seed():
    model, example = NETS["resnet20"]()
    graph = pp.trace(model, example)
    plans = [plan_by_score(graph, random_scores(graph, seed), macs=0.5) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_control_plans_respect_multiples():
    model, example = NETS["resnet20"]()
    graph = pp.trace(model, example)
    plan = plan_by_score(graph, random_scores(graph, 0), macs=0.5, multiple_of=8)
    assert all(len(kept) % 8 == 0 for kept in plan.values())
    small = pp.shrink(model, graph, plan)
    assert counted(small, example) <= 0.5 * counted(model, example)


def test_a_budget_out_of_reach_is_refused():
    model, example = NETS["resnet20"]()
    graph = pp.trace(model, example)
    with pytest.raises(pp.PruneError, match=r"budget out of reach: macs=0\.0001"):
        plan_by_score(graph, random_scores(graph, 0), macs=0.0001)


# --- one threshold for all groups -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2_small"])
@pytest.mark.parametrize("limits", [{"macs": 0.47}, {"params": 0.3}, {"macs": 0.6, "params": 0.6}])
def test_a_threshold_lands_just_under_its_budget(name, limits):
    model, example = NETS[name]()
    graph = pp.trace(model, example)
    plan = plan_by_threshold(graph, random_scores(graph, 1), **limits)
    assert_just_under(limits, model, pp.shrink(model, graph, plan), example)


def test_a_threshold_takes_the_lowest_of_all_groups_and_nothing_more_fits():
    model, example = NETS["resnet20"]()
    graph = pp.trace(model, example)
    scores = random_scores(graph, 3)
    kept = graph.kept_units(plan_by_threshold(graph, scores, macs=0.5))
    must = torch.zeros_like(kept)
    for group in graph.prunable.values():
        own = scores[group.offset : group.offset + group.size].argsort(descending=True)
        must[group.offset + own[: group.minimum]] = True
    free = scores[~must]
    threshold = float(scores[~kept].max())
    assert bool(kept[scores > threshold].all())
    back = kept & ~must & (scores < threshold)  # put back, as what came before was too large
    assert int(back.sum()) < 0.2 * len(free)
    budget = Budget(graph, {"macs": 0.5})
    for unit in (~kept).nonzero().flatten():
        more = kept.clone()
        more[unit] = True
        assert float(budget.excess(budget.widths(more))) > 0


def test_what_scores_nothing_goes_unless_it_must_stay():
    model, example = NETS["resnet20"]()
    graph = pp.trace(model, example)
    scores = torch.ones(graph.units)
    scores[::3] = 0
    kept = graph.kept_units(plan_by_threshold(graph, scores, macs=1.0))
    assert torch.equal(kept, scores > 0)
    plan = plan_by_threshold(graph, torch.zeros(graph.units), macs=1.0)
    assert {name: len(left) for name, left in plan.items()} == {
        name: group.minimum for name, group in graph.prunable.items()
    }


def test_a_threshold_out_of_reach_is_refused():
    model, example = NETS["resnet20"]()
    graph = pp.trace(model, example)
    with pytest.raises(pp.PruneError, match=r"budget out of reach: macs=0\.0001"):
        plan_by_threshold(graph, random_scores(graph, 0), macs=0.0001)
