"""The proximal step: closed forms against brute force, Algorithm 1 against a plain loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from polarprune.training.proximal import (
    hard_threshold,
    prices,
    prox_l0,
    prox_l1,
    soft_threshold,
    widths,
)

# The paper's convergence example: f(x, y) = ½((x-u)² + (y-v)²) + c‖x‖₀‖y‖₀
TARGET = torch.tensor([0.1, 0.2, -0.3, 0.5, 0.6], dtype=torch.float64)
OWNER = torch.tensor([0, 0, 1, 1, 1])
Q = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
B = torch.zeros(2, dtype=torch.float64)
C = 0.01
INITS = {
    "init1": torch.tensor([0.1, 0.8, 0.7, 0.3, 0.8], dtype=torch.float64),
    "init2": torch.tensor([0.4, 0.1, 0.7, 0.5, 0.0], dtype=torch.float64),
}
SETTLED = torch.tensor([0.07, 0.17, -0.28, 0.48, 0.58], dtype=torch.float64)


def objective(alpha: Tensor) -> float:
    n = widths(alpha, OWNER, 2)
    return float(0.5 * ((alpha - TARGET) ** 2).sum() + C * n[0] * n[1])


def problem(seed: int, groups: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a random α, its owners and a random symmetric resource model with diagonal terms."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(groups).repeat_interleave(3 + seed % 4)
    alpha = torch.randn(len(owner), generator=generator, dtype=torch.float64)
    q = torch.rand(groups, groups, generator=generator, dtype=torch.float64)
    return alpha, owner, q + q.T, torch.rand(groups, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.05, 0.3, 1.0])
def test_soft_threshold_is_the_argmin(beta: float) -> None:
    alpha = torch.linspace(-1.5, 1.5, 61, dtype=torch.float64)
    grid = torch.linspace(-2, 2, 4001, dtype=torch.float64)[:, None]

    def loss(x: Tensor) -> Tensor:
        return 0.5 * (x - alpha) ** 2 + beta * x.abs()

    closed = soft_threshold(alpha, torch.tensor(beta))
    assert bool((loss(closed) <= loss(grid).amin(0) + 1e-12).all())
    assert torch.allclose(closed, grid[loss(grid).argmin(0), 0], atol=1e-3)
    assert torch.equal(closed == 0, alpha.abs() <= beta)


@pytest.mark.parametrize("beta", [0.0, 0.05, 0.3, 1.0])
def test_hard_threshold_is_the_argmin(beta: float) -> None:
    alpha = torch.linspace(-1.5, 1.5, 61, dtype=torch.float64)
    grid = torch.linspace(-2, 2, 4001, dtype=torch.float64)[:, None]
    grid[grid.abs() < 1e-9] = 0

    def loss(x: Tensor) -> Tensor:
        return 0.5 * (x - alpha) ** 2 + beta * (x != 0)

    closed = hard_threshold(alpha, torch.tensor(beta))
    assert bool((loss(closed) <= loss(grid).amin(0) + 1e-12).all())
    moved = closed != alpha
    assert bool((closed[moved] == 0).all())


def test_widths_count_what_is_not_exactly_zero() -> None:
    alpha = torch.tensor([0.0, 1e-30, -2.0, 0.0, 0.0])
    assert widths(alpha, OWNER, 2).tolist() == [1, 1]


def test_prices_are_the_slope_of_the_cost() -> None:
    _, _, q, b = problem(0)
    n = torch.tensor([3.0, 1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    (0.5 * n @ q @ n + b @ n).backward()
    assert torch.allclose(prices(n.detach(), q, b), n.grad)


def algorithm_1(
    alpha: list[float], owner: list[int], q: Tensor, b: Tensor, scale: float, sweeps: int, rule: str
) -> list[float]:
    """Compute the paper's loop entry by entry."""
    now = list(alpha)
    for _ in range(sweeps):
        live = [
            sum(a != 0 for a, o in zip(now, owner, strict=True) if o == k) for k in range(len(b))
        ]
        new = []
        for a, o in zip(alpha, owner, strict=True):
            beta = scale * (sum(float(q[o, k]) * live[k] for k in range(len(b))) + float(b[o]))
            if rule == "l1":
                new.append(a - beta if a >= beta else a + beta if a <= -beta else 0.0)
            else:
                new.append(a if a * a > 2 * beta else 0.0)
        now = new
    return now


@pytest.mark.parametrize("sweeps", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_sweeps_are_those_of_algorithm_1(seed: int, sweeps: int) -> None:
    alpha, owner, q, b = problem(seed)
    for scale in (0.001, 0.02, 0.1):
        for rule, prox in (("l1", prox_l1), ("l0", prox_l0)):
            wanted = algorithm_1(alpha.tolist(), owner.tolist(), q, b, scale, sweeps, rule)
            found = prox(alpha, owner, q, b, scale, sweeps=sweeps)
            assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("prox", [prox_l1, prox_l0])
def test_the_step_is_pure_and_keeps_the_dtype(prox) -> None:
    alpha, owner, q, b = problem(1)
    single = alpha.float()
    before = single.clone()
    assert prox(single, owner, q, b, 0.1, sweeps=3).dtype == torch.float32
    assert torch.equal(single, before)


@pytest.mark.parametrize("prox", [prox_l1, prox_l0])
def test_a_scale_of_zero_moves_nothing(prox) -> None:
    alpha, owner, q, b = problem(2)
    assert torch.equal(prox(alpha, owner, q, b, 0.0, sweeps=3), alpha)


@pytest.mark.parametrize("init", INITS)
def test_the_papers_example_settles_within_two_sweeps(init: str) -> None:
    path = [INITS[init]]
    for sweeps in range(1, 7):
        path.append(prox_l1(TARGET, OWNER, Q, B, C, sweeps=sweeps, start=INITS[init]))
    assert torch.allclose(path[2], SETTLED, atol=1e-12)
    assert all(torch.equal(path[2], later) for later in path[3:])


def test_the_first_sweep_counts_the_live_entries_of_the_start() -> None:
    """init2 has 2 live entries in y: β_x = 0.01·2, where init1 gives 0.01·3."""
    first = [prox_l1(TARGET, OWNER, Q, B, C, start=start)[:2].tolist() for start in INITS.values()]
    assert first == [pytest.approx([0.07, 0.17]), pytest.approx([0.08, 0.18])]
    assert prox_l0(TARGET * 10, OWNER, Q, B, C, start=TARGET * 0).tolist() == (TARGET * 10).tolist()


@pytest.mark.parametrize("init", INITS)
def test_the_papers_example_comes_down_to_its_value(init: str) -> None:
    """½(2·0.03² + 3·0.02²) + 0.01·2·3 = 0.0615."""
    values = [objective(INITS[init])]
    for sweeps in range(1, 5):
        alpha = prox_l1(TARGET, OWNER, Q, B, C, sweeps=sweeps, start=INITS[init])
        values.append(objective(alpha))
    assert values[0] > values[1]
    assert values[-1] == pytest.approx(0.0615, abs=1e-12)


def test_both_initialisations_settle_at_the_same_point() -> None:
    ends = [prox_l1(TARGET, OWNER, Q, B, C, sweeps=10, start=start) for start in INITS.values()]
    assert torch.equal(*ends)


def test_where_it_settles_need_not_be_the_global_optimum() -> None:
    """The paper says so, too. The global minimum is at x = 0: ½(0.1² + 0.2²) = 0.025."""
    supports = itertools.product((0.0, 1.0), repeat=5)
    best = min(objective(TARGET * torch.tensor(s, dtype=torch.float64)) for s in supports)
    assert best == pytest.approx(0.025)
    assert best < objective(SETTLED)
    for start in INITS.values():
        assert objective(prox_l0(TARGET, OWNER, Q, B, C, sweeps=3, start=start)) == pytest.approx(
            best
        )


def steps_to_close(prox, start: float, beta: float, limit: int = 100) -> int:
    """Return after how many steps an α without gradient is zero; `limit` if never."""
    owner, q = torch.tensor([0]), torch.zeros(1, 1, dtype=torch.float64)
    alpha = torch.tensor([start], dtype=torch.float64)
    for step in range(limit):
        if float(alpha) == 0:
            return step
        alpha = prox(alpha, owner, q, torch.tensor([beta], dtype=torch.float64), 1.0)
    return limit


def test_the_l0_step_never_moves_large_entries_and_takes_small_ones_at_once() -> None:
    """The paper: the ℓ0 step "is very sensitive to initialization of α"."""
    beta = 0.02
    edge = (2 * beta) ** 0.5
    for start in (1.01 * edge, 0.5, 1.0, -2.0):
        assert steps_to_close(prox_l0, start, beta) == 100
    for start in (0.99 * edge, 0.1, -0.01):
        assert steps_to_close(prox_l0, start, beta) == 1


def test_the_l1_step_shrinks_every_entry_whatever_its_start() -> None:
    for start, steps in ((0.011, 1), (0.11, 6), (0.51, 26), (-1.01, 51)):
        assert steps_to_close(prox_l1, start, 0.02) == steps
    alpha, owner, q, b = problem(0)
    small = prox_l1(alpha, owner, q, b, 1e-6)
    assert bool((small.abs() < alpha.abs()).all())
