"""ε and the cost over a training run."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

import polarprune as pp

STEPS = [1, 2, 3, 7, 10, 99, 1000]


@pytest.mark.parametrize("steps", STEPS)
def test_eps_goes_from_a_tenth_to_5e_minus_8(steps: int) -> None:
    schedule = pp.Schedule()
    assert schedule.eps(0, steps) == 0.1
    assert schedule.eps(steps, steps) == pytest.approx(5e-8, rel=1e-12)
    assert schedule.eps(10 * steps, steps) == schedule.eps(steps, steps)


def test_eps_decays_by_the_same_factor_every_step() -> None:
    values = [pp.Schedule().eps(step, 50) for step in range(51)]
    factors = [later / earlier for earlier, later in itertools.pairwise(values)]
    assert factors == pytest.approx([5e-7 ** (1 / 50)] * 50)


@pytest.mark.parametrize(("decay", "times"), [(0.96, 350), (0.9, 140), (0.97, 60_000 // 120)])
def test_the_papers_recipes_end_within_a_decade_of_the_default(decay: float, times: int) -> None:
    end = pp.Schedule().eps_start * decay**times
    assert abs(math.log10(end / pp.Schedule().eps_end)) < 1


def test_the_papers_recipe_can_be_set() -> None:
    schedule = pp.Schedule(eps_end=0.1 * 0.96**350)
    for epoch in (1, 100, 349):
        assert schedule.eps(epoch, 350) == pytest.approx(0.1 * 0.96**epoch)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("start", "done"), [(0.0, 0.5), (0.2, 0.9), (0.0, 1.0), (0.9, 1.0)])
def test_the_path_goes_down_from_one_to_zero(start: float, done: float, steps: int) -> None:
    schedule = pp.Schedule(start=start, done=done)
    path = [schedule.path(step, steps) for step in range(steps + 1)]
    assert path[0] == 1
    assert all(earlier >= later for earlier, later in itertools.pairwise(path))
    assert path[schedule.begins(steps)] == 1
    assert path[schedule.deadline(steps) :] == [0] * (steps + 1 - schedule.deadline(steps))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("start", "done"), [(0.0, 1e-9), (0.0, 0.5), (0.5, 0.5001), (0.99, 1.0)])
def test_the_deadline_is_a_step_of_the_run(start: float, done: float, steps: int) -> None:
    schedule = pp.Schedule(start=start, done=done)
    assert 0 <= schedule.begins(steps) < schedule.deadline(steps) <= steps


@pytest.mark.parametrize("steps", STEPS)
def test_a_gate_closes_within_a_fiftieth_of_the_steps_and_at_least_one(steps: int) -> None:
    assert pp.Schedule().window_of(steps) == max(1, round(steps / 50))
    assert pp.Schedule(memory=0.1).memory_of(steps) == max(20, round(steps / 10))


def test_eps_falls_by_a_factor_every_so_many_steps() -> None:
    schedule = pp.Schedule.paper(decay=0.5, every=10)
    assert [schedule.eps(step, 100) for step in (0, 9, 10, 19, 20, 99)] == [
        0.1,
        0.1,
        0.05,
        0.05,
        0.025,
        0.1 * 0.5**9,
    ]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"eps_start": -0.1}, "eps_start=-0.1"),
        ({"eps_start": math.nan}, "eps_start=nan"),
        ({"eps_end": 0.0}, "eps_end=0.0 must satisfy 0 < eps_end <= eps_start"),
        ({"eps_end": 0.2}, "eps_end=0.2 must satisfy 0 < eps_end <= eps_start"),
        ({"eps_end": math.inf}, "eps_end=inf"),
        ({"start": 0.5, "done": 0.5}, "done=0.5 must satisfy 0 <= start < done <= 1"),
        ({"done": 1.5}, "start=0.0, done=1.5 must satisfy 0 <= start < done <= 1"),
        ({"start": -0.1}, "start=-0.1"),
        ({"window": 0.0}, "window=0.0 must be positive"),
        ({"memory": 0.0}, "memory=0.0 must be positive"),
        ({"floor": -1.0}, "floor=-1.0"),
        ({"decay": 1.5}, "decay=1.5 must be at most 1"),
        ({"every": 0}, "every=0 must be positive"),
        ({"max_shrink": 0.0}, "max_shrink=0.0 must be positive"),
        ({"max_shrink": math.nan}, "max_shrink=nan"),
        ({"sweeps": 0}, "sweeps=0 must be positive"),
        ({"gate_lr": -1.0}, "gate_lr=-1.0"),
    ],
    ids=str,
)
def test_bad_numbers_are_refused_by_name(bad: dict[str, float], named: str) -> None:
    with pytest.raises(pp.PruneError, match=f"Schedule: .*{named}.*Correct these numbers"):
        pp.Schedule(**bad)


def test_all_bad_numbers_are_named_at_once() -> None:
    with pytest.raises(pp.PruneError, match=r"eps_end=0.0.*done=2.0"):
        pp.Schedule(eps_end=0.0, done=2.0)


def test_a_schedule_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        pp.Schedule().done = 0.7
