"""`prune`: run any method, polarprune or another one, from a baseline to a card.

`train_small` trains a small network from scratch, to compare with.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...errors import PruneError
from ...plain_data import JsonObject
from ..methods.base import ComparedMethod, Limits, Widths
from ..methods.from_scratch import FROM_SCRATCH, new_small_network
from ..methods.model_cost import cost_of
from ..methods.table import ALL_METHODS, check
from .calibration import recalibrate
from .card import Pruned
from .run import Run
from .training_cost import costs_of_file
from .weights import copy_weights, load_initial_weights


def prune(run: Run, baseline: nn.Module, method: str = "gdp", **limits: float) -> JsonObject:
    """Prune a baseline to a budget, and return the card of the run.

    Args:
        run: The run, which has settings, data and folder.
        baseline: The trained network; it is not changed.
        method: "gdp", which is polarprune, or another one of `NAMES`.
        **limits: Budgets as shares of the original cost, or `lam` for "gdp".
    """
    check(method, limits, run.settings.uniform)
    if method in FROM_SCRATCH:
        return train_small(run, baseline, method, limits)
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
    card = run.card(method, limits, score, pruned)
    if compared.widths:
        card["widths"] = compared.widths
    return run.finish(card, small, teacher)


def _trained(
    run: Run, baseline: nn.Module, method: str, teacher: nn.Module | None, limits: Limits
) -> ComparedMethod:
    """Train a copy of the baseline with a method."""
    settings = run.settings
    model = copy_weights(run.new_network(), baseline)
    steps = settings.epochs * run.batches.per_epoch
    compared = ALL_METHODS[method](model, run.data.example(), settings, steps, limits)
    trainer = run.trainer(model, settings.epochs, settings.lr, method=compared, teacher=teacher)
    run.train("prune", trainer)
    return compared


def train_small(
    run: Run,
    baseline: nn.Module,
    method: str,
    limits: Limits,
    start: Path | None = None,
    shapes: JsonObject | None = None,
) -> JsonObject:
    """Train a small network from scratch, and return the card of the run.

    Args:
        run: The run, which has settings, data and folder.
        baseline: The network of the original widths: the teacher, if there is one.
        method: "thin" or "reinit".
        limits: Budgets as shares of the original cost.
        start: File of weights to begin with, instead of new ones.
        shapes: For "reinit", group name -> width and original width.
    """
    if method == "reinit" and shapes is None:
        raise PruneError("reinit: give the widths of a pruned network with --shapes FILE.")
    settings, teacher = run.settings, baseline if run.settings.distill else None
    run.seed("scratch")
    small, widths = small_network(run, limits, shapes)
    if start is not None:
        load_initial_weights(small, start)
        run.costs["scratch_start"] = sum(costs_of_file(start).values())
    together = settings.baseline_epochs + settings.epochs + settings.tune_epochs
    epochs = settings.scratch_epochs or together
    run.train("scratch", run.trainer(small, epochs, settings.baseline_lr, teacher=teacher))
    before, after = (run.per_example(cost_of(m, run.data.example())) for m in (baseline, small))
    card = run.card(method, limits, run.score(baseline), Pruned(None, small, before, after))
    return run.finish({**card, "widths": widths}, small, teacher)


def small_network(
    run: Run, limits: Limits, shapes: JsonObject | None = None
) -> tuple[nn.Module, Widths]:
    """Return a small network with new weights, and its widths.

    Args:
        run: The run, which has settings and data.
        limits: Budgets as shares of the original cost.
        shapes: For "reinit", group name -> width and original width; None for "thin".
    """
    model, settings = run.new_network(), run.settings
    norms, multiple = settings.norms, settings.multiple_of
    example = run.data.example()
    return new_small_network(model, example, limits, shapes, norms=norms, multiple_of=multiple)
