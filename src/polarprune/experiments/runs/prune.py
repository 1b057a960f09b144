"""`prune`: run any method, polarprune or another one, from a baseline to a card."""

from __future__ import annotations

from torch import nn

from ..methods.base import ComparedMethod, Limits
from ..methods.model_cost import cost_of
from ..methods.table import ALL_METHODS, check
from .calibration import recalibrate
from .card import Pruned
from .files import Json
from .run import Run
from .trainer import Trainer
from .weights import copy_weights


def prune(run: Run, baseline: nn.Module, method: str = "gdp", **limits: float) -> Json:
    """Prune a baseline to a budget, and return the card of the run.

    Args:
        run: The run, which has settings, data and folder.
        baseline: The trained network; it is not changed.
        method: "gdp", which is polarprune, or a key of `ALL_METHODS`.
        **limits: Budgets as shares of the original cost, or `lam` for "gdp".
    """
    check(method, limits, run.settings.uniform)
    if method == "gdp":
        return run.prune(baseline, **limits)
    settings = run.settings
    score = run.score(baseline)
    teacher = baseline if settings.distill else None
    compared = _trained(run, baseline, method, teacher, limits)
    full = compared.trained_model()
    if settings.recalibrate:
        recalibrate(full, run.batches, settings.recalibrate)
    small = compared.cut(full)
    before, after = (cost_of(one, run.data.example()) for one in (full, small))
    over = [key for key, limit in limits.items() if after[key] > limit * before[key]]
    assert not over, f"{method}: above its budget of {over}"
    pruned = Pruned(full, small, run.per_example(before), run.per_example(after))
    return run.finish(run.card(method, limits, score, pruned), small, teacher)


def _trained(
    run: Run, baseline: nn.Module, method: str, teacher: nn.Module | None, limits: Limits
) -> ComparedMethod:
    """Train a copy of the baseline with a method."""
    settings = run.settings
    model = copy_weights(run.new_network(), baseline)
    steps = settings.epochs * run.batches.per_epoch
    compared = ALL_METHODS[method](model, run.data.example(), settings, steps, limits)
    trainer = Trainer(
        model,
        run.batches,
        settings,
        epochs=settings.epochs,
        lr=settings.lr,
        method=compared,
        teacher=teacher,
    )
    run.train("prune", trainer)
    return compared
