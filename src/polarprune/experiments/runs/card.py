"""`make_card`: the results of a run as plain data."""

from __future__ import annotations

import dataclasses

from torch import nn

from ..data.task import Task
from ..methods.base import Limits
from ..networks.table import has_classes
from ..settings import Settings, finite
from .files import Json

Cost = dict[str, int]  # "macs" of one example and "params"


@dataclasses.dataclass(frozen=True)
class Pruned:
    """A trained model before and after its channels are removed, and the cost of both."""

    full: nn.Module
    small: nn.Module
    cost_before: Cost
    cost_after: Cost


def make_card(
    settings: Settings, data: Task, method: str, limits: Limits, baseline: float, pruned: Pruned
) -> Json:
    """Score the model before and after removal and return what a card says about it.

    Args:
        settings: Settings of the run; stored under "recipe".
        data: What the models are scored on.
        method: "gdp" or another method.
        limits: The budget.
        baseline: Score of the baseline.
        pruned: The models and their costs.
    """
    full, small = data.answers(pruned.full), data.answers(pruned.small)
    before, after = pruned.cost_before, pruned.cost_after
    table = [
        _row(data, "baseline", baseline, before),
        _row(data, "before removal", data.score(full), before),
        _row(data, "after removal", data.score(small), after),
    ]
    trained_on, scored_on = data.counts
    return {
        "network": settings.network,
        **({"classes": data.classes} if has_classes(settings.network) else {}),
        "method": method,
        "budget": limits,
        "table": table,
        "measure": data.measure,
        data.measure: table[-1][data.measure],
        "macs": after["macs"],
        "macs_share": after["macs"] / before["macs"],
        "params": after["params"],
        "params_share": after["params"] / before["params"],
        "scored_on": scored_on,
        "trained_on": trained_on,
        "identical_predictions": data.same(full, small),
        **data.details(small),
        "recipe": finite(dataclasses.asdict(settings)),
    }


def _row(data: Task, stage: str, score: float, cost: Cost) -> Json:
    return {"stage": stage, data.measure: score, "macs": cost["macs"], "params": cost["params"]}
