"""`make_card`: the results of a run as plain data."""

from __future__ import annotations

import dataclasses

from torch import nn

from ...plain_data import JsonObject
from ..data.task import Task
from ..methods.base import Limits
from ..networks.table import has_classes
from ..settings import Settings, finite

CostOfAnExample = dict[str, int]  # "macs" of one example and "params"


@dataclasses.dataclass(frozen=True)
class Pruned:
    """A trained model before and after its channels are removed, and the cost of both.

    `full` is None for a small network that was trained from scratch.
    """

    full: nn.Module | None
    small: nn.Module
    cost_before: CostOfAnExample
    cost_after: CostOfAnExample


def make_card(
    settings: Settings, data: Task, method: str, limits: Limits, baseline: float, pruned: Pruned
) -> JsonObject:
    """Score the model before and after removal and return what a card says about it.

    Args:
        settings: Settings of the run; stored under "recipe".
        data: What the models are scored on.
        method: "gdp" or another method.
        limits: The budget.
        baseline: Score of the baseline.
        pruned: The models and their costs.
    """
    before, after = pruned.cost_before, pruned.cost_after
    small = data.answers(pruned.small)
    table, same = [_row(data, "baseline", baseline, before)], {}
    if pruned.full is not None:
        full = data.answers(pruned.full)
        table.append(_row(data, "before removal", data.score(full), before))
        same = {"identical_predictions": data.same(full, small)}
    stage = "after training" if pruned.full is None else "after removal"
    table.append(_row(data, stage, data.score(small), after))
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
        **same,
        **data.details(small),
        "recipe": finite(dataclasses.asdict(settings)),
    }


def _row(data: Task, stage: str, score: float, cost: CostOfAnExample) -> JsonObject:
    return {"stage": stage, data.measure: score, "macs": cost["macs"], "params": cost["params"]}
