"""The groups of a model as rows of a report."""

from __future__ import annotations

from ..channels.graph import Graph, Plan
from ..cost.budget import FAST, multiples


def group_rows(graph: Graph, plan: Plan) -> list[dict[str, object]]:
    """Return for each group its name, its channels before and after, and why it is frozen.

    A prunable group also has `multiple`: how many of its units make up widths that are fast.
    """
    units = dict(zip(graph.prunable, multiples(graph, FAST).tolist(), strict=True))
    return [
        {
            "name": name,
            "before": group.size,
            "after": len(plan.get(name, range(group.size))),
            "reason": group.reason if group.frozen else "",
            **({} if group.frozen else {"multiple": units[name]}),
        }
        for name, group in graph.groups.items()
    ]
