"""λη follows what holds the gates: the path is held, and what is held least goes first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polarprune as pp
from conftest import share
from nets import resnet20
from polarprune.gates import PEAK, edge, gate_slope, gate_value

STEPS, BUDGET = 2000, 0.5
CHANNEL = 0.04  # of the MACs: the dearest channel of this network


def fresh(steps: int = STEPS) -> pp.Pruner:
    torch.manual_seed(1)
    return pp.Pruner(resnet20(16), torch.randn(2, 3, 16, 16), macs=BUDGET, steps=steps)


@torch.no_grad()
def step(pruner: pp.Pruner, gains: Tensor) -> None:
    """As after a step on a loss of which only this is known: what it gains when a gate opens."""
    sizes = [len(gate.alpha) for gate in pruner.gates.values()]
    for gate, gain in zip(pruner.gates.values(), gains.split(sizes), strict=True):
        assert gate.speed is not None
        gate.alpha += gain * gate.speed * gate_slope(gate.alpha, gate.eps)
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


def test_the_path_is_held_to_two_channels_however_hard_the_loss_holds_the_gates(
    run: tuple[pp.Pruner, Tensor],
) -> None:
    pruner, _ = run
    for row in rows_before_the_deadline(pruner):
        wanted = BUDGET + (1 - BUDGET) * pruner.schedule.path(row["step"], STEPS)  # type: ignore[arg-type]
        assert abs(row["macs"] - wanted) < 2 * CHANNEL, row["step"]


def test_a_channel_is_left_to_be_closed_at_the_deadline(run: tuple[pp.Pruner, Tensor]) -> None:
    pruner, _ = run
    assert rows_before_the_deadline(pruner)[-1]["macs"] < BUDGET + CHANNEL
    assert BUDGET - 0.005 < share(pruner)["macs"] <= BUDGET


@pytest.mark.parametrize("run", [1.0, 30.0, 300.0], indirect=True)
def test_what_the_loss_holds_least_for_its_price_is_gone(run: tuple[pp.Pruner, Tensor]) -> None:
    pruner, gains = run
    prices = torch.tensor([macs for macs, _ in pruner.graph.cost.prices().values()])
    worth = gains / prices[pruner.budget.owner]
    gone = (pruner._flat() == 0)[worth.argsort()].double()
    quarter = len(gone) // 4
    assert float(gone[:quarter].sum()) > 0.8 * float(gone.sum())


def test_live_gates_are_open_at_the_end_and_none_waits(run: tuple[pp.Pruner, Tensor]) -> None:
    pruner, _ = run
    values = torch.cat([gate.values().detach() for gate in pruner.gates.values()])
    assert bool(((values == 0) | (values > 0.95)).all())


def test_gates_wait_at_the_edge_for_their_turn() -> None:
    pruner = fresh()
    for _ in range(STEPS // 8):  # nothing holds them, and few have to close yet
        pruner.step()
    alpha, eps = pruner._flat(), pruner.schedule.eps(STEPS // 8, STEPS)
    waiting = int(((alpha - edge(eps)).abs() < 1e-2).sum())
    assert waiting > 0.9 * len(alpha)
    assert 0 < int((alpha == 0).sum()) < 0.05 * len(alpha)


@pytest.mark.parametrize("eps", [0.1, 1e-3, 5e-8])
def test_the_edge_is_where_the_slope_peaks_and_the_gate_is_a_quarter(eps: float) -> None:
    at = torch.tensor(edge(eps), dtype=torch.float64)
    assert float(gate_value(at, eps)) == pytest.approx(0.25)
    assert float(gate_slope(at, eps)) == pytest.approx(PEAK / eps**0.5)
    around = at * torch.linspace(0.5, 2, 301, dtype=torch.float64)
    assert float(gate_slope(around, eps).max()) <= PEAK / eps**0.5 * (1 + 1e-12)


def test_no_gate_moves_by_more_than_the_cap_in_one_step_whatever_pushes_it() -> None:
    pruner = fresh()
    cap = pruner.schedule.cap(STEPS)
    for number in range(40):
        before = pruner._flat()
        with torch.no_grad():
            for gate in pruner.gates.values():
                gate.alpha += 0.3 * (-1) ** number
        pruner.step()
        moved = (pruner._flat() - before).abs().max()
        assert cap / 2 < float(moved) <= cap * (1 + 1e-4)


def moved_by_the_loss(rate: float, **aim: float) -> tuple[pp.Pruner, float]:
    """How far the gates went in a hundred steps that push at them, at this rate, each its way."""
    torch.manual_seed(1)
    pruner = pp.Pruner(
        resnet20(16), torch.randn(2, 3, 16, 16), steps=STEPS, **(aim or {"macs": BUDGET})
    )  # type: ignore[arg-type]
    pushes = torch.randn(pruner.graph.units).split(
        [len(gate.alpha) for gate in pruner.gates.values()]
    )
    pruner.param_groups(lr=1.0)
    before = pruner._flat()
    for _ in range(100):
        with torch.no_grad():
            for gate, push in zip(pruner.gates.values(), pushes, strict=True):
                gate.alpha += rate * push
        pruner.step()
    moved = pruner._flat() - before
    assert float(torch.corrcoef(torch.stack([moved, torch.cat(pushes)]))[0, 1]) > 0.8
    return pruner, float(moved.std())


def test_the_loss_has_its_say_at_any_rate_the_gates_learn_at() -> None:
    """A small rate must not leave the choice of channels to their price alone."""
    cap = fresh().schedule.cap(STEPS)
    (slow, at_slow), (quick, at_quick) = (moved_by_the_loss(rate * cap) for rate in (0.01, 0.5))
    assert at_slow == pytest.approx(at_quick, rel=0.05)
    assert 0.3 * 100 * cap < at_slow < 100 * cap
    assert float(slow._stepper.pace) == pytest.approx(float(quick._stepper.pace) / 50, rel=0.05)


def test_where_the_strength_is_given_steps_are_as_long_as_the_optimizer_makes_them() -> None:
    cap = fresh().schedule.cap(STEPS)
    (slow, at_slow), (_, at_quick) = (
        moved_by_the_loss(rate * cap, lam=1e-12) for rate in (0.01, 0.5)
    )
    assert at_quick == pytest.approx(50 * at_slow, rel=0.1)
    assert float(slow._stepper.pace) == 0


def test_after_the_deadline_steps_are_as_long_as_the_optimizer_makes_them() -> None:
    pruner = fresh(200)
    for _ in range(150):
        pruner.step()
    live = pruner._flat() != 0
    before = pruner._flat()
    with torch.no_grad():
        for gate in pruner.gates.values():
            gate.alpha += 1e-6
    pruner.step()
    moved = (pruner._flat() - before)[live & (before.abs() > 0.1)]
    assert len(moved) > 0
    assert float(moved.max()) < 2e-6


def test_a_resumed_run_goes_on_exactly() -> None:
    first, steps = fresh(200), 200
    gains = torch.exp(torch.randn(first.graph.units)) * 30 / steps
    for _ in range(50):
        step(first, gains)
    assert bool((first._controller.hold > 0).any())
    second = fresh(200)
    second.load_state_dict(first.state_dict())
    for number in range(40):
        step(first, gains)
        step(second, gains)
        assert torch.equal(first._flat(), second._flat()), number
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
    pruner._stepper.put(before)
    q, b = pruner.budget.combined(pruner.budget.widths(before))
    beta = (q @ pruner.budget.widths(before) + b)[pruner.budget.owner].float()
    pulled = pruner._stepper.pulled.clone()  # all but those that have to stay
    assert int(pulled.sum()) > 0.9 * len(pulled)
    pruner.step()
    after = pruner._flat()
    wanted = (before - beta).clamp_min(0) if relaxed else before * (before**2 > 2 * beta)
    gone = wanted == 0
    assert 0 < int(gone.sum()) < len(gone)
    assert torch.equal((after == 0)[pulled], gone[pulled])
    assert after[pulled].allclose(wanted[pulled], atol=2e-3)
    assert torch.equal(after[~pulled], before[~pulled])
