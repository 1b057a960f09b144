"""`RunSettings`: the goal of a pruning run and its other settings, which do not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..validation.arguments import check_settings, plain_multiple, plain_uniform
from ..validation.schedule import check_schedule
from .schedule import Schedule


@dataclass(frozen=True)
class RunSettings:
    """The goal of a run and how it gets there.

    Args:
        limits: The budgets, as fractions of the original; empty with `lam`.
        lam: λ of the paper's plain mode, or None.
        steps: The number of optimizer steps.
        multiple_of: Every kept width is a multiple of this number; "auto" depends on the group.
        uniform: True, or patterns of names of the groups that keep equally many channels.
        schedule: How ε and the cost decrease over the steps.
    """

    limits: dict[str, float]
    lam: float | None
    steps: int
    multiple_of: int | str
    uniform: bool | tuple[str, ...]
    schedule: Schedule

    @property
    def deadline(self) -> int:
        """The step at which the budget is met, or 0 without a budget."""
        return self.schedule.deadline(self.steps) if self.lam is None else 0

    def as_data(self) -> dict[str, float | str]:
        """Return all settings except the schedule as plain data, for states and reports."""
        goal: dict[str, float] = self.limits if self.lam is None else {"lam": self.lam}
        same = self.uniform if isinstance(self.uniform, bool) else ", ".join(self.uniform)
        uniform = {"uniform": same} if same else {}  # states of earlier versions lack it
        return {**goal, "steps": self.steps, "multiple_of": self.multiple_of, **uniform}


def checked_settings(
    budgets: Mapping[str, float | None],
    lam: float | None,
    steps: int,
    multiple_of: int | str,
    uniform: bool | str | Iterable[str],
    schedule: Schedule,
) -> RunSettings:
    """Return the settings that a user passed, as plain data that a checkpoint can hold.

    Raises:
        PruneError: If a value is wrong, or the goal is missing or given twice.
    """
    check_schedule(schedule, Schedule)
    limits = check_settings(budgets, lam, steps, multiple_of)
    return RunSettings(
        limits=limits,
        lam=None if lam is None else float(lam),
        steps=int(steps),
        multiple_of=plain_multiple(multiple_of, lam),
        uniform=plain_uniform(uniform, lam),
        schedule=schedule,
    )
