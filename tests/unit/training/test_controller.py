"""The cost follows its path, and gates with the least worth per price close first."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import polarprune as pp
from polarprune.gates.gate import gate_slope
from tests.helpers.nets import resnet20
from tests.helpers.training import share

pytestmark = pytest.mark.usefixtures("shared_traces")

STEPS, BUDGET = 2000, 0.5
CHANNEL = 0.04  # of the MACs: the dearest channel of this network


def fresh(steps: int = STEPS) -> pp.Pruner:
    torch.manual_seed(1)
    return pp.Pruner(resnet20(16), torch.randn(2, 3, 16, 16), macs=BUDGET, steps=steps)


@torch.no_grad()
def step(pruner: pp.Pruner, gains: Tensor) -> None:
    """Take a step on a loss of which only the gain from opening each gate is known."""
    sizes = [len(gate.alpha) for gate in pruner.gates.values()]
    for gate, gain in zip(pruner.gates.values(), gains.split(sizes), strict=True):
        gate.alpha += gain * gate_slope(gate.alpha, gate.eps)
    pruner.step()


def resisted(strength: float) -> tuple[pp.Pruner, Tensor]:
    pruner = fresh()
    gains = torch.exp(torch.randn(pruner.graph.units)) * strength / STEPS
    for _ in range(STEPS):
        step(pruner, gains)
    return pruner, gains


@pytest.fixture(scope="module", params=[0.0, 1.0, 30.0, 300.0])
def run(request: pytest.FixtureRequest) -> tuple[pp.Pruner, Tensor]:
    return resisted(request.param)


def rows_before_the_deadline(pruner: pp.Pruner) -> list[dict[str, float]]:
    deadline = pruner.schedule.deadline(STEPS)
    return [row for row in pruner.history if row["step"] < deadline]


def test_the_path_is_held_to_one_channel_however_hard_the_loss_holds_the_gates(
    run: tuple[pp.Pruner, Tensor],
) -> None:
    pruner, _ = run
    for row in rows_before_the_deadline(pruner):
        wanted = BUDGET + (1 - BUDGET) * pruner.schedule.path(row["step"], STEPS)  # type: ignore[arg-type]
        assert abs(row["macs"] - wanted) < CHANNEL, row["step"]


def test_nothing_is_left_to_be_closed_at_the_deadline(run: tuple[pp.Pruner, Tensor]) -> None:
    pruner, _ = run
    assert pruner.landing == {"gates": 0, "macs": 0.0}
    assert BUDGET - 0.005 < share(pruner)["macs"] <= BUDGET


@pytest.mark.parametrize("run", [1.0, 30.0, 300.0], indirect=True)
def test_what_the_loss_needs_least_for_its_price_is_gone(run: tuple[pp.Pruner, Tensor]) -> None:
    pruner, gains = run
    prices = torch.tensor([macs for macs, _ in pruner.graph.cost.prices().values()])
    worth = gains.square() / prices[pruner.budget.owner]
    gone = (pruner._run.stepper.last() == 0)[worth.argsort()].double()
    half = len(gone) // 2
    assert float(gone[:half].sum()) > 0.8 * float(gone.sum())


def test_only_a_few_gates_are_half_open_at_a_time(run: tuple[pp.Pruner, Tensor]) -> None:
    pruner, _ = run
    assert max(row["between"] for row in pruner.history) < 0.05 * pruner.graph.units
    values = torch.cat([gate.values().detach() for gate in pruner.gates.values()])
    assert bool(((values == 0) | (values > 0.95)).all())


def test_a_gate_that_closes_is_closed_within_the_window_whatever_the_loss_does() -> None:
    pruner = fresh()
    window = pruner.schedule.window_of(STEPS)
    while not bool((pruner._run.stepper.shrink > 0).any()):
        pruner.step()
    chosen = pruner._run.stepper.shrink > 0
    for number in range(window):
        assert not bool((pruner._run.stepper.last() == 0)[chosen].all()), number
        with torch.no_grad():
            for gate in pruner.gates.values():
                gate.alpha += 0.3  # the loss wants them open
        pruner.step()
    assert bool((pruner._run.stepper.last() == 0)[chosen].all())


def test_no_other_gate_moves_by_more_than_the_cap_in_one_step_whatever_pushes_it() -> None:
    pruner = fresh()
    cap = pruner.schedule.cap(STEPS)
    for number in range(40):
        before, alone = pruner._run.stepper.last(), pruner._run.stepper.shrink == 0
        with torch.no_grad():
            for gate in pruner.gates.values():
                gate.alpha += 0.3 * (-1) ** number
        pruner.step()
        moved = (pruner._run.stepper.last() - before).abs()[alone].max()
        assert cap / 2 < float(moved) <= cap * (1 + 1e-4)


def test_the_worth_of_a_gate_is_what_the_loss_loses_without_it_to_first_order() -> None:
    """Compare with finite differences of the loss by the gates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    pruner = pp.Pruner(model, x, macs=0.5, steps=10_000)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=1e-9))
    pruner.attach(optimizer)
    (gate,) = pruner.gates.values()
    values, moved = gate.values().detach(), []
    for k in range(8):
        losses = []
        for change in (1e-6, -1e-6):
            aim = values.clone()
            aim[k] += change
            alpha = (aim / (1 - aim) * gate.eps).sqrt()
            with torch.no_grad():
                kept = gate.alpha.clone()
                gate.alpha.copy_(alpha)
                losses.append(model(x).square().mean())
                gate.alpha.copy_(kept)
        moved.append(float(values[k] * (losses[0] - losses[1]) / 2e-6))
    model(x).square().mean().backward()
    optimizer.step()
    wanted = torch.tensor(moved, dtype=torch.float64).square()
    torch.testing.assert_close(pruner._run.stepper.worth, wanted, rtol=1e-5, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*the cost does not follow its path")  # said before
def test_gates_that_were_changed_from_outside_are_closed_at_the_deadline_with_a_warning() -> None:
    pruner = fresh(100)
    for number in range(50):
        with torch.no_grad():
            pruner._run.stepper.shrink.zero_()  # nothing closes by itself
        if number < 49:
            pruner.step()
    with pytest.warns(UserWarning, match=r"gates with .* of the MACs were closed at once"):
        pruner.step()
    assert pruner.landing["gates"] > 10 and pruner.landing["macs"] > 0.1
    assert share(pruner)["macs"] <= BUDGET


def test_a_run_of_any_length_lands_without_a_cut() -> None:
    for steps in (1, 2, 3, 4, 7, 10, 40, 99):
        pruner = fresh(steps)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(steps):
                pruner.step()
        assert BUDGET - 0.01 < share(pruner)["macs"] <= BUDGET, steps


def test_a_resumed_run_goes_on_exactly() -> None:
    first, steps = fresh(200), 200
    gains = torch.exp(torch.randn(first.graph.units)) * 30 / steps
    for _ in range(50):
        step(first, gains)
    assert bool((first._run.stepper.worth > 0).any())
    second = fresh(200)
    second.load_state_dict(first.state_dict())
    for number in range(40):
        step(first, gains)
        step(second, gains)
        assert torch.equal(first._run.stepper.last(), second._run.stepper.last()), number
    assert first.history == second.history


# --- where gates begin, and the norm as it is -----------------------------------------------------


def test_gates_begin_where_the_schedule_says() -> None:
    schedule = pp.Schedule(eps_start=0.02, alpha_start=0.5)
    pruner = pp.Pruner(
        resnet20(16), torch.randn(2, 3, 16, 16), macs=BUDGET, steps=STEPS, schedule=schedule
    )
    for gate in pruner.gates.values():
        assert torch.equal(gate.alpha.detach(), torch.full_like(gate.alpha, 0.5))
        assert torch.allclose(gate.values(), torch.tensor(0.25 / 0.27))
    for name in ("alpha_start", "max_shrink"):
        with pytest.raises(pp.PruneError, match=name):
            pp.Schedule(**{name: 0.0})


@pytest.mark.parametrize("relaxed", [True, False])
def test_the_norm_as_it_is_leaves_large_gates_alone_and_takes_small_ones(relaxed: bool) -> None:
    """α² ≤ 2β vanishes (as fast as α may move), all others stay: what the paper found fragile."""
    torch.manual_seed(1)
    schedule = pp.Schedule(relaxed=relaxed, max_shrink=1e6)
    pruner = pp.Pruner(resnet20(16), torch.randn(2, 3, 16, 16), lam=1.0, steps=9, schedule=schedule)
    pruner.param_groups(lr=10.0)  # of the gates: 1
    before = torch.rand(pruner.graph.units) / 3 + 0.01
    pruner._run.stepper.put(before)
    q, b = pruner.budget.combined(pruner.budget.widths(before))
    beta = (q @ pruner.budget.widths(before) + b)[pruner.budget.owner].float()
    pulled = pruner._run.stepper.pulled.clone()  # all but those that have to stay
    assert int(pulled.sum()) > 0.9 * len(pulled)
    pruner.step()
    after = pruner._run.stepper.last()
    wanted = (before - beta).clamp_min(0) if relaxed else before * (before**2 > 2 * beta)
    gone = wanted == 0
    assert 0 < int(gone.sum()) < len(gone)
    assert torch.equal((after == 0)[pulled], gone[pulled])
    assert after[pulled].allclose(wanted[pulled], atol=2e-3)
    assert torch.equal(after[~pulled], before[~pulled])
