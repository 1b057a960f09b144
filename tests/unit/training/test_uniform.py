"""Uniform widths: repeated blocks keep the same number of channels, and the budget is met."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from tests.helpers.made_up_clock import Clock, wound_up
from tests.helpers.repeated_nets import NETS, data, made, widths
from tests.helpers.resuming import assert_same
from tests.helpers.training import alphas, prune, same_state, share, snapshot

pytestmark = pytest.mark.usefixtures("shared_traces")
STEPS, CLOSE = 24, 0.005


def setup(name: str, **settings: Any) -> tuple[pp.Pruner, torch.optim.Optimizer]:
    model, example = made(name)
    settings = {"macs": 0.5, "steps": STEPS, "uniform": True, **settings}
    pruner = pp.Pruner(model, example, **settings)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)
    pruner.attach(optimizer)
    return pruner, optimizer


def learn(
    pruner: pp.Pruner,
    optimizer: torch.optim.Optimizer,
    name: str,
    first: int = 0,
    last: int = STEPS,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    pruner.model.train()
    for inputs, labels in data(name, STEPS)[first:last]:
        optimizer.zero_grad()
        weight = next(pruner.model.parameters())
        F.cross_entropy(pruner.model(inputs.to(weight.dtype)), labels).backward()
        optimizer.step()
        after_step()


def run(name: str, **settings: Any) -> pp.Pruner:
    pruner, optimizer = setup(name, **settings)
    learn(pruner, optimizer, name)
    return pruner


def assert_uniform(pruner: pp.Pruner) -> None:
    found = widths(pruner)
    assert found and all(len(one) == 1 for one in found.values()), found


def cheapest_block(pruner: pp.Pruner, n: Tensor) -> float:
    """Return the lowest cost of one more block of any family."""
    budget = pruner.budget
    wider = n + budget.families.totals(torch.diag(budget.multiple.double()))
    there = (wider <= budget.cost.full).all(1)
    return float((budget.excess(wider) - budget.excess(n))[there].min())


@pytest.mark.parametrize("settings", [{}, {"multiple_of": 8}, {"params": 0.4}], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_widths_are_uniform_and_no_more_stays_unused_than_a_block(
    name: str, settings: dict[str, Any]
) -> None:
    if name == "bottlenecks" and "multiple_of" in settings:
        settings = {"multiple_of": 2}  # its families are narrower than 8: all or nothing
    pruner = run(name, **settings)
    assert_uniform(pruner)
    left, limits = share(pruner), pruner.limits
    assert all(left[key] <= limit for key, limit in limits.items())
    unused = min(limit - left[key] for key, limit in limits.items())
    n = pruner.budget.widths(alphas(pruner))
    assert unused < max(CLOSE, cheapest_block(pruner, n))
    assert bool((n % pruner.budget.multiple == 0).all())
    pruner.export()


def test_channels_of_a_family_differ_and_their_number_does_not() -> None:
    pruner = run(name := "grouped queries")
    plan, families = pruner.plan(), pruner.graph.families
    several = [[plan[name] for name in names] for names in families.values()]
    assert any(kept != found[0] for found in several for kept in found)
    free = run(name, uniform=False)
    own = {family: {len(free.plan()[name]) for name in names} for family, names in families.items()}
    assert any(len(found) > 1 for found in own.values())  # left alone, they would not be uniform


def test_grouped_queries_keep_a_whole_ratio() -> None:
    small = run("grouped queries").export()
    sizes = {(b.attention.q.out_features, b.attention.k.out_features) for b in small.blocks}
    assert len(sizes) == 1
    queries, keys = sizes.pop()
    assert queries == 2 * keys and keys % 6 == 0  # heads of six channels


def test_a_llama_of_transformers_is_uniform() -> None:
    from benchmarks.measure.import_torchvision import import_torchvision

    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16,
        use_cache=False,
    )
    model, words = LlamaForCausalLM(config), torch.randint(50, (4, 8))
    pruner = pp.Pruner(model, {"input_ids": words[:2]}, params=0.6, steps=12, uniform=True)
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=1e-3))
    pruner.attach(optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
    assert_uniform(pruner)
    assert list(widths(pruner)) == [
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.mlp.gate_proj",
    ]
    layers = pruner.export().model.layers
    heads = [layer.self_attn for layer in layers]
    sizes = {(one.q_proj.out_features, one.k_proj.out_features) for one in heads}
    assert len(sizes) == 1 and all(queries == 2 * keys for queries, keys in sizes)


def test_patterns_leave_other_positions_free() -> None:
    pruner = run("grouped queries", uniform=iter(["blocks.*.mlp.0"]))
    assert list(widths(pruner)) == ["blocks.*.mlp.0"]
    assert_uniform(pruner)
    assert pruner.report().settings["uniform"] == "blocks.*.mlp.0"


def test_at_every_step_widths_differ_by_what_shrinks_at_most() -> None:
    """Gates of a block are selected together, and reach zero in the same window."""
    pruner, optimizer = setup("vision transformer", steps=STEPS, macs=0.3)
    rates = pruner._run.stepper

    def check() -> None:
        remaining = torch.where(rates.shrink.cpu() > 0, 0, alphas(pruner).double())
        n = pruner.budget.widths(remaining)
        for family in range(len(pruner.budget.families.first)):
            assert len(n[pruner.budget.families.number == family].unique()) == 1

    learn(pruner, optimizer, "vision transformer", after_step=check)
    assert share(pruner)["macs"] <= 0.3


@pytest.mark.parametrize("name", ["resnet", "bottlenecks"])
def test_a_family_closes_entirely_or_not_at_all(name: str) -> None:
    lowest = pp.Pruner(*made(name), macs=0.9, steps=STEPS, uniform=True)
    n = lowest.budget.lowest_widths()
    least = float(lowest.budget.cost.parts["macs"](n)) / lowest.budget.original["macs"]
    pruner = run(name, macs=least + 1e-3)
    assert_uniform(pruner)
    assert {0} in widths(pruner).values()
    pruner.export()


def test_a_family_with_a_frozen_group_stays_whole() -> None:
    pruner = run("grouped queries", keep="blocks.1.mlp.0", macs=0.8)
    plan = pruner.plan()
    assert len(plan["blocks.0.mlp.0"]) == len(plan["blocks.2.mlp.0"]) == 40
    assert_uniform(pruner)
    assert "blocks.0.mlp.0 (and 1 more): keeps all 40 channels" in str(pruner.report())


def test_a_budget_that_pinned_families_put_out_of_reach_is_refused() -> None:
    said = r"budget out of reach: params=0\.3 .*, or leave uniform out\."
    with pytest.raises(pp.PruneError, match=said):
        setup("grouped queries", params=0.3, macs=None, keep="blocks.1.mlp.0")


def test_a_latency_is_met_with_uniform_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wound_up(Clock(), monkeypatch)
    model, _ = made("resnet")
    whole = clock.total(model)
    pruner = prune(model, 20, size=8, latency=0.6, uniform=True)
    assert clock.total(pruner.export()) / whole <= 0.6 * 1.02
    assert_uniform(pruner)


# --- compaction and resuming ----------------------------------------------------------------------


def test_compacting_in_the_middle_changes_nothing() -> None:
    name, plans = "grouped queries", []
    for compacts in (False, True):
        model, example = made(name)
        pruner = pp.Pruner(model.double(), example.double(), macs=0.4, steps=STEPS, uniform=True)
        optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)
        pruner.attach(optimizer)
        learn(pruner, optimizer, name, 0, 12)
        if compacts:
            pruner.compact()
            assert pruner.compactions == 1
        learn(pruner, optimizer, name, 12)
        plans.append(pruner.plan())
    assert plans[0] == plans[1]
    assert_uniform(pruner)


def test_a_resumed_run_is_bit_equal_and_uniform() -> None:
    settings = {"compact": "auto", "macs": 0.4}
    whole, optimizer = setup("resnet", **settings)
    learn(whole, optimizer, "resnet", 0, 11)
    states = copy.deepcopy((whole.model.state_dict(), optimizer.state_dict()))
    learn(whole, optimizer, "resnet", 11)
    again, other = setup("resnet", **settings)
    again.model.load_state_dict(states[0])
    other.load_state_dict(states[1])
    learn(again, other, "resnet", 11)
    assert_same(again.state_dict(), whole.state_dict())
    assert same_state(snapshot(again.model), snapshot(whole.model))
    assert again.compactions
    assert_uniform(again)
    again.export()


def test_a_state_with_uniform_widths_is_refused_by_a_run_without() -> None:
    state = setup("resnet")[0].state_dict()
    pruner = setup("resnet", uniform=False)[0]
    with pytest.raises(pp.PruneError, match=r"settings \{'uniform': True\}"):
        pruner.load_state_dict(state)


# --- what users see -------------------------------------------------------------------------------


def test_a_report_says_that_widths_are_uniform() -> None:
    report = setup("resnet")[0].report()
    assert report.settings["uniform"] is True
    assert "uniform widths in 2 families of groups" in str(report)
    rows = {row["name"]: row.get("family") for row in report.groups}
    assert rows["1.0.conv1"] == rows["1.1.conv1"] == "*.*.conv1" and rows["0.0"] is None
    assert "uniform: *.*.conv1#2" in report.to_markdown().replace("\\", "")
    assert "uniform" not in str(setup("resnet", uniform=False)[0].report())


def test_networks_without_repeated_blocks_are_refused_and_unchanged() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    before = snapshot(model)
    with pytest.raises(pp.PruneError, match="uniform=True: no two prunable groups"):
        pp.Pruner(model, torch.zeros(2, 6), macs=0.5, steps=4, uniform=True)
    assert same_state(before, snapshot(model))
