"""The part of a report that describes the graph of a model: groups, cost and notes."""

from __future__ import annotations

import torch

from ..channels.graph import Graph, Plan
from ..channels.notes import folded
from ..cost.budget import FAST, multiples
from ..plain_data import JsonObject

_ROUTED = "what the model computes depends on the data: MACs are those of the example's path"


def graph_facts(graph: Graph, plan: Plan) -> JsonObject:
    """Return the fields of a `Report` that follow from a graph and a plan for all its groups."""
    n = torch.tensor([len(plan[name]) for name in graph.prunable], device="cpu")
    return {
        "before": graph.cost.original(),
        "after": graph.cost.at(n),
        "groups": _group_rows(graph, plan),
        "notes": [
            *map(str, folded(graph.notes)),
            *([_ROUTED] if graph.tapes[0].depends_on_data else []),
        ],
    }


def _group_rows(graph: Graph, plan: Plan) -> list[JsonObject]:
    """Return for each group its name, its channels before and after, and why it is frozen.

    A prunable group also has `multiple`: how many of its units make up widths that are fast. If it
    keeps as many channels as other groups, `family` names what they have in common.
    """
    units = dict(zip(graph.prunable, multiples(graph, FAST).tolist(), strict=True))
    families = {name: family for family, names in graph.families.items() for name in names}
    return [
        {
            "name": name,
            "before": group.size,
            "after": len(plan.get(name, range(group.size))),
            "reason": str(group.reason),
            **({} if group.frozen else {"multiple": units[name]}),
            **({"family": families[name]} if name in families else {}),
        }
        for name, group in graph.groups.items()
    ]
