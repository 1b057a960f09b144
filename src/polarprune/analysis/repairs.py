"""Repair code that does not adapt to fewer channels: resize attributes, or capture the forward.

When a trial cut fails in a module, there are two repairs. An integer attribute of the module (the
number of heads, a split size) may have to follow a width. Otherwise the forward of the module is
captured as a graph, whose constants are computed for every cut. A repair is kept only if the same
trial cut gets further with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..channels.graph import Graph, Location, OpAxis
from ..errors import PruneError
from .inspection import Inspection
from .tape_comparison import Mismatch
from .trial_cuts import TrialCuts, trial_plan, trial_units

PLANS = 16  # plans that are computed, without running the model, to distinguish widths
Option = tuple[str, OpAxis, set[int]]  # attribute, the width it may follow, distinguishing seeds


def repair(inspection: Inspection, graph: Graph, trial: TrialCuts, found: Mismatch) -> Graph | None:
    """Repair the module in which a mismatch occurs; return the new graph, or None."""
    return _resize_attributes(inspection, graph, trial, found) or _capture(
        inspection, graph, trial, found
    )


def _obstacle(
    graph: Graph, trial: TrialCuts, before: Mismatch, more_seeds: Iterable[int] = ()
) -> Mismatch | None:
    """Return what keeps a trial cut from getting further than before, if anything does.

    The trial cuts of other seeds have to get further, too.
    """
    for seed in (before.seed, *more_seeds):
        found = trial.mismatch(graph, trial_plan(graph, seed))
        if found is not None and (found.op is None or found.index <= before.index):
            return found
    return None


# --- attributes that follow a width ---------------------------------------------------------------


def _resize_attributes(
    inspection: Inspection, graph: Graph, trial: TrialCuts, found: Mismatch
) -> Graph | None:
    """Let an integer attribute of the module, such as the number of heads, follow a width.

    Each option is tried alone, then all of them together.
    """
    assert found.op is not None
    path = found.op.module
    if path in inspection.findings.rewritten or isinstance(
        inspection.modules[path], (nn.Linear, _ConvNd)
    ):
        return None  # layers of torch are resized with their weights anyway
    known = inspection.findings
    mine, alike = known.attributes.get(path, {}), _alike(inspection, graph, path)
    options = _options(inspection, graph, path, mine)
    for tried in [*([option] for option in options), options]:
        locations = {**mine, **{name: location for name, location, _ in tried}}
        attributes = {**known.attributes, **dict.fromkeys(alike, locations)}
        seeds = set().union(*(distinguishing for _, _, distinguishing in tried))
        new = graph.with_size_attributes(known.followed(attributes))
        if tried and not _obstacle(new, trial, found, seeds):
            inspection.follow_attributes(attributes)
            inspection.try_seeds(seeds)
            return new
    return None


def _options(
    inspection: Inspection, graph: Graph, path: str, taken: Mapping[str, Location]
) -> list[Option]:
    """Return the integer attributes of a module, each with every width that it may follow."""
    plans = [trial_units(graph, seed) for seed in range(PLANS)]
    return [
        (name, location, distinguishing)
        for name, value in vars(inspection.modules[path]).items()
        if type(value) is int and value > 1 and name not in taken
        for location, distinguishing in _distinct_widths(graph, path, value, plans)
    ]


def _alike(inspection: Inspection, graph: Graph, path: str) -> list[str]:
    """Return the modules of the same class that perform the same operations."""

    def form(other: str) -> list[tuple[str, list[int]]]:
        ops = graph.ops_in(other)
        return [(op.name, [len(value.shape) for value in op.tensors()]) for op in ops]

    return [other for other in inspection.same_class(path) if form(other) == form(path)]


def _distinct_widths(
    graph: Graph, path: str, size: int, plans: list[Tensor]
) -> list[tuple[OpAxis, set[int]]]:
    """Return locations in a module that have this size now but shrink differently.

    Each comes with the seeds of plans that distinguish it from the others: for each other location
    the first plan that leaves different widths at the two.
    """
    found: dict[tuple[int, ...], OpAxis] = {}
    for location in graph.layout.locations(path, size):
        widths = tuple(graph.width(path, location, kept_units) for kept_units in plans)
        found.setdefault(widths, location)
    return [
        (location, {_first_difference(mine, other) for other in found if other != mine})
        for mine, location in found.items()
    ]


def _first_difference(mine: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the index at which two tuples differ first."""
    return next(k for k, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)


# --- captured forwards ----------------------------------------------------------------------------


def _capture(
    inspection: Inspection, graph: Graph, trial: TrialCuts, found: Mismatch
) -> Graph | None:
    """Capture the forward of the module; return the new graph if the trial gets further."""
    assert found.op is not None
    before = inspection.findings.rewritten
    path = found.op.module
    new = with_captured_class(inspection, graph, path)
    if new is None:
        return None
    obstacle = _obstacle(new, trial, found)
    if obstacle is None:
        return new
    inspection.note_failure(path, no_further(obstacle))
    inspection.use_rewritten(before)
    return None


def no_further(obstacle: Mismatch) -> str:
    """Return why a captured forward is not used."""
    return f"a trial cut gets no further with the captured one: {obstacle}"


def with_captured_class(inspection: Inspection, graph: Graph, module: str) -> Graph | None:
    """Capture the forward of all modules of this one's class; return the new graph, or None."""
    before = inspection.findings.rewritten
    used = (path for path in inspection.same_class(module) if graph.ops_in(path))
    try:
        if inspection.rewrite(used):
            return inspection.inspect()
    except PruneError as error:  # with captured forwards, the modules no longer fit together
        inspection.note_failure(module, str(error))
        inspection.use_rewritten(before)
    return None
