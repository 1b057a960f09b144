"""`thin` and `reinit`: the controls that do not prune. A small network is trained from scratch.

`thin` scales all widths of the network alike until it meets the budget. `reinit` has the widths
that a pruning run found. The weights of both are initialized like those of the original network.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...analysis.trace import trace
from ...channels.graph import FROZEN, Graph, Plan
from ...cost.budget import Budget
from ...cost.other_scores import plan_by_score
from ...errors import PruneError
from ...plain_data import JsonObject
from ...surgery.apply import shrink
from .base import Limits, Widths, widths_of

FROM_SCRATCH = ("thin", "reinit")


def new_small_network(
    model: nn.Module,
    example: Tensor,
    limits: Limits,
    shapes: JsonObject | None,
    *,
    norms: bool = False,
    multiple_of: int | str = 1,
) -> tuple[nn.Module, Widths]:
    """Return a small network with new weights, and the widths of its groups.

    Args:
        model: A new network of the original widths; its weights are changed.
        example: The input batch that is traced.
        limits: The budget of each resource, as a share of the original cost.
        shapes: Group name -> width and original width, as a card has them; None for `thin`.
        norms: Whether channels that layer norms mix are prunable.
        multiple_of: Every width of `thin` is a multiple of this, or "auto" (see `Pruner`).

    Raises:
        PruneError: The budget is out of reach, or the shapes do not fit the network or the budget.
    """
    graph = trace(model, example, norms=norms)
    if shapes is None:
        plan = plan_of_thin(graph, limits, multiple_of)
    else:
        plan = plan_of_shapes(graph, limits, shapes)
    keep_variances(model, graph, plan)
    return shrink(model, graph, plan), widths_of(graph, plan)


def plan_of_thin(graph: Graph, limits: Limits, multiple_of: int | str = 1) -> Plan:
    """Return a plan in which every group keeps the same share, and at least one channel."""
    same = torch.ones(graph.units)
    graph = graph.with_minimum(dict.fromkeys(graph.prunable, 1))
    return plan_by_score(graph, same, multiple_of=multiple_of, **limits)


def plan_of_shapes(graph: Graph, limits: Limits, shapes: JsonObject) -> Plan:
    """Return a plan with given widths. Which channels it keeps makes no difference: all are new."""
    sizes = {name: group.size for name, group in graph.prunable.items()}
    before = {name: pair[1] for name, pair in shapes.items() if name in sizes}
    if before != sizes:
        other = next(name for name in sizes if before.get(name) != sizes[name])
        raise PruneError(
            f"--shapes: they are of another network: its group {other!r} has {sizes[other]} "
            f"channels here, {before.get(other, 'no')} there. Give the card of a run that pruned "
            f"this network."
        )
    plan = {name: list(range(shapes[name][0])) for name in sizes}
    widths = torch.tensor([len(kept) for kept in plan.values()])
    excess = float(Budget(graph, limits).excess(widths))
    if excess > 0:
        raise PruneError(
            f"--shapes: they are {100 * excess:.2f} points above the budget {limits}. Give the "
            f"card of a run with this budget."
        )
    return plan


@torch.no_grad()
def keep_variances(model: nn.Module, graph: Graph, plan: Plan) -> None:
    """Scale new weights so that every layer keeps the variance of its outputs with fewer inputs.

    Without it, a network without norms would begin with signals that shrink from layer to layer.

    Args:
        model: The network with new weights at its original widths.
        graph: Its graph.
        plan: The channels that will be kept.
    """
    kept_units = graph.kept_units(plan)
    for name, parameter in model.named_parameters():
        for units in graph.sites.get(name, {}).values():
            kept = int((units == FROZEN).sum() + kept_units[units[units != FROZEN]].sum())
            if kept:
                parameter.mul_(math.sqrt(len(units) / kept))
