"""Latency as a budget. The clock is a made-up one, exact and the same on every machine."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.cost import stopwatch
from polarprune.cost.budget import Budget
from polarprune.cost.latency import Latency, Terms
from polarprune.cost.timing import ModuleTimer
from tests.helpers.exact import double
from tests.helpers.made_up_clock import IMAGES, Clock, net, sum_of, wound_up
from tests.helpers.nets import NETS, WHOLE_NETS

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return wound_up(Clock(), monkeypatch)


def trained(pruner: pp.Pruner, steps: int, optimizer: Any = None) -> torch.optim.Optimizer:
    if optimizer is None:
        optimizer = torch.optim.SGD(pruner.param_groups(lr=0.01), momentum=0.9)
        pruner.attach(optimizer)
    labels = torch.arange(len(IMAGES))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(pruner.model(IMAGES), labels).backward()
        optimizer.step()
    return optimizer


# --- the model of the time ------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NETS.keys() - WHOLE_NETS))
def test_the_terms_add_up_to_the_macs_that_are_counted(name: str) -> None:
    model, example = NETS[name]()
    graph = pp.trace(model.double(), double(example))  # as in other tests, which share the trace
    terms = Terms(graph)
    steps = torch.ones(len(terms.modules), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    known = {item.op for item in graph.contractions}
    rest = sum(op.macs for op in graph.tapes[0].ops if op not in known)
    for _ in range(3):
        n = torch.ceil(torch.rand(len(graph.prunable), generator=generator) * graph.cost.full)
        macs, size = terms(terms.lengths(n), steps)
        assert float(macs.sum()) + rest == pytest.approx(graph.cost.at(n)["macs"], rel=1e-9)
        assert bool((size >= 0).all()) and float(size.sum()) > 0


def test_stairs_are_found_in_times() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 4, 3))
    graph = pp.trace(model, torch.randn(1, 3, 12, 12))
    found = Latency(Terms(graph), graph.cost.full, 1.0)
    generator = torch.Generator().manual_seed(1)
    widths = torch.randint(1, 65, (40, 2), generator=generator).double()
    stairs = torch.ceil(widths / 16) * 16
    times = torch.stack(
        [2 + 3 * widths[:, 0], 1 + 0.1 * stairs[:, 0] * stairs[:, 1], 5 + 0 * widths[:, 1]], 1
    )
    order = [found.terms.modules.index(name) for name in "012"]
    rows = torch.empty_like(times)
    rows[:, order] = times
    found.fit(widths, rows)
    assert float(found.steps[order[1]]) == 16
    live = found.terms.lengths(widths)
    assert torch.allclose(found.modules(live), rows, rtol=1e-6)
    assert float(found(graph.cost.full)) == pytest.approx(1e6)


def test_a_measured_share_corrects_the_model() -> None:
    graph = pp.trace(net(), IMAGES)
    found = Latency(Terms(graph), graph.cost.full, 1.0)
    found.coefs[1] = 1.0
    half = torch.floor(graph.cost.full / 2)
    found.correct(half, 0.8)
    assert float(found(half)) / found.measured == pytest.approx(0.8)
    graph.cost.parts["latency"] = found
    assert graph.cost.original()["latency"] == found.measured == 1e6  # measured, not modelled
    assert graph.cost.share(half)["latency"] == pytest.approx(0.8)
    other = Latency(Terms(graph), graph.cost.full, 2.0)
    other.load(found.state())
    assert float(other(half)) == float(found(half))


def test_prices_are_what_a_channel_saves_on_average() -> None:
    graph = pp.trace(net(), IMAGES)
    found = Latency(Terms(graph), graph.cost.full, 1.0)
    found.coefs[1] = 1.0  # latency is MACs
    n = graph.cost.full
    q, b = found.linear(n)
    assert not bool(q.any()) and bool((b > 0).all())
    window = torch.ceil(n / 8)
    for group in range(len(n)):
        fewer = n.clone()
        fewer[group] -= window[group]
        saved = float(found(n) - found(fewer)) / float(window[group])
        assert float(b[group]) == pytest.approx(saved, rel=1e-9)


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.8, 0.6, 0.4])
@pytest.mark.parametrize("rest", [0.0, 0.5])
def test_the_budget_is_met(limit: float, rest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wound_up(Clock(rest), monkeypatch)
    model = net()
    whole = clock.total(model)
    pruner = pp.Pruner(model, IMAGES, latency=limit, steps=60)
    trained(pruner, 60)
    share = clock.total(pruner.export()) / whole
    assert 0.94 * limit <= share <= 1.02 * limit
    claimed = pruner.cost()["latency"] / pruner.graph.cost.original()["latency"]
    assert claimed == pytest.approx(share, rel=0.02)
    assert pruner.report().results["latency_ms"]["after"] == pytest.approx(share * whole)
    shown = str(pruner.report())
    assert "latency" in shown and "met" in shown


def test_a_clock_that_changes_its_mind_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wound_up(Clock(slower=1.25), monkeypatch)  # small models are slower than they seemed
    model = net()
    whole = sum_of(model)
    pruner = pp.Pruner(model, IMAGES, latency=0.6, steps=60)
    trained(pruner, 60)
    assert 0.94 * 0.6 <= clock.total(pruner.export()) / whole <= 1.05 * 0.6


def test_several_budgets_hold_at_once(clock: Clock) -> None:
    model = net()
    whole = clock.total(model)
    pruner = pp.Pruner(model, IMAGES, latency=0.5, macs=0.6, params=0.35, steps=60, multiple_of=4)
    trained(pruner, 60)
    small = pruner.export()
    share = pruner.graph.cost.share(pruner._run.widths())
    assert share["macs"] <= 0.6 and share["params"] <= 0.35
    assert clock.total(small) / whole <= 0.5 * 1.02
    assert {"macs", "params", "latency"} <= pruner.history[-1].keys()


def test_closed_channels_may_go_while_it_trains(clock: Clock) -> None:
    model = net()
    whole = clock.total(model)
    pruner = pp.Pruner(model, IMAGES, latency=0.5, steps=60, compact="auto")
    trained(pruner, 60)
    assert clock.total(pruner.export()) / whole <= 0.5 * 1.02


def test_at_equal_macs_a_budget_on_latency_is_faster_than_one_on_macs(clock: Clock) -> None:
    """This clock counts channels in eights: channels that save nothing close only with others."""
    pruner = pp.Pruner(net(), IMAGES, latency=0.5, steps=120)
    trained(pruner, 120)
    pruner.export()
    by_macs = pp.Pruner(net(), IMAGES, macs=pruner.history[-1]["macs"], steps=120)
    trained(by_macs, 120)
    assert clock.total(by_macs.export()) >= 1.1 * clock.total(pruner.export())


def test_a_run_goes_on_from_a_checkpoint(clock: Clock) -> None:
    first = pp.Pruner(net(), IMAGES, latency=0.5, steps=60)
    optimizer = trained(first, 25)
    states = copy.deepcopy((first.state_dict(), first.model.state_dict(), optimizer.state_dict()))
    trained(first, 35, optimizer)
    second = pp.Pruner(net(), IMAGES, latency=0.5, steps=60)
    other = torch.optim.SGD(second.param_groups(lr=0.01), momentum=0.9)
    second.attach(other)
    second.load_state_dict(states[0])
    second.model.load_state_dict(states[1])
    other.load_state_dict(states[2])
    trained(second, 35, other)
    assert first.plan() == second.plan()


def test_a_budget_out_of_reach_is_refused_and_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wound_up(Clock(rest=50.0), monkeypatch)
    model = net()
    before = list(model.state_dict())
    with pytest.raises(pp.PruneError, match=r"latency=0.5 \(the lowest, measured, is 0\.7"):
        pp.Pruner(model, IMAGES, latency=0.5, steps=10)
    assert list(model.state_dict()) == before


def test_a_model_that_is_too_slow_in_the_end_is_not_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = wound_up(Clock(), monkeypatch)
    pruner = pp.Pruner(net(), IMAGES, latency=0.6, steps=40)
    trained(pruner, 40)
    clock.slower = 2.0
    with pytest.raises(pp.PruneError, match=r"the budget is 0\.6"):
        pruner.export()
    clock.slower = 1.0
    pruner.export()


@pytest.mark.parametrize("bad", [0, 1, -0.5, "half"])
def test_what_is_no_fraction_is_refused(bad: Any) -> None:
    with pytest.raises(pp.PruneError, match="latency="):
        pp.Pruner(net(), IMAGES, latency=bad, steps=10)


# --- the real clock -------------------------------------------------------------------------------


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


def test_time_goes_to_the_module_that_takes_it() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(Slow(), nn.ReLU()), nn.Conv2d(4, 2, 3))
    with ModuleTimer(model) as timer:
        model(IMAGES)
    spent: dict[str, float] = {}
    for name, milliseconds in timer.intervals():
        spent[name] = spent.get(name, 0.0) + milliseconds
    assert spent["1.0"] >= 20 and set(spent) == {"", "0", "1", "1.0", "1.1", "2"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_real_models_of_many_widths_are_timed() -> None:
    graph = pp.trace(net(), IMAGES)
    watch = stopwatch.Stopwatch(net(), graph, IMAGES, 0.9)
    watch.runs = 8
    found = watch._fitted(torch.ones_like(graph.cost.full), torch.ones(len(graph.prunable)))
    assert found.measured > 0 and bool((found.coefs >= 0).all())
    assert bool(found.coefs.any()) and math.isfinite(float(found(graph.cost.full)))
    small = Budget(graph, {"macs": 0.5}).lowest_widths()
    assert watch.share(watch.small(small)) > 0


@torch.no_grad()
def test_numbers_do_not_fade_in_a_model_that_was_not_trained() -> None:
    """Denormal numbers make a CPU ten times slower, so a new original must not be timed on them."""
    torch.manual_seed(0)
    layers = [m for _ in range(40) for m in (nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))]
    model = nn.Sequential(*layers)
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.uniform_(module.weight, -0.05, 0.05)
    x = torch.randn(4, 8, 6, 6)
    assert float(model.eval()(x).abs().max()) < 1e-30
    settled = stopwatch._with_batch_statistics(copy.deepcopy(model), x)
    assert not settled.training and float(settled(x).abs().max()) > 1e-3
    tracked = [m.num_batches_tracked for m in model if isinstance(m, nn.BatchNorm2d)]
    assert not any(tracked)  # the user's own is as it was
    again = copy.deepcopy(settled)
    stopwatch._with_batch_statistics(again, x)
    assert torch.equal(again[1].running_mean, settled[1].running_mean)  # trained ones stay


def test_processes_agree_on_what_the_first_measured(tmp_path: Path) -> None:
    assert stopwatch._from_first_process(0.5) == 0.5
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert stopwatch._from_first_process({"a": [1.5]}) == {"a": [1.5]}
    finally:
        torch.distributed.destroy_process_group()
