"""Find the settings with which the result of a pruning run can be written as a folder.

A config has one number for all blocks, some numbers stand for several sizes, and some are refused.
There is no table of families here: every group, with those at the same position of other blocks, is
tried with several widths (`ConfigTrials`). Groups that no config can express alone are tried
together with others of the same size, and get one width if that helps. The rest is frozen, with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from torch import nn

from ..analysis.repeated_blocks import with_families
from ..analysis.trace import survey
from ..channels.graph import Graph
from ..cost.budget import Budget
from ..errors import PruneError
from ..surgery.config_trials import ConfigTrials
from ..tracing.model_state import Example

_MOST_WIDTHS = 64  # of a family; more are tried at equal distances
_MOST_TOGETHER = 6  # families of one size that are tried together
_AUTO = "auto"
Family = tuple[str, ...]  # groups that keep equally many units


def folder_settings(
    model: nn.Module,
    example_inputs: Example,
    *,
    keep: str | Iterable[str] = (),
    norms: bool = False,
    multiple_of: int | str = _AUTO,
    min_channels: int = 1,
) -> dict[str, Any]:
    """Return arguments of `Pruner` with which `save_pretrained` can write the result.

    The model is traced, and then tried with other widths, without cutting it: on the meta device,
    models of any size take seconds, and no memory.

    Args:
        model: A model of transformers.
        example_inputs: What the model takes, as for `Pruner`.
        keep: As for `Pruner`.
        norms: As for `Pruner`.
        multiple_of: As for `Pruner`. With "auto", a larger multiple is chosen if configs refuse
            other widths, and if more can be removed with it.
        min_channels: As for `Pruner`; at least 1, because no config can leave out a layer.

    Returns:
        These arguments, `uniform`, and `frozen`: the groups that a config cannot express, and why.

    Raises:
        PruneError: If nothing is left to prune, or the model cannot be traced.

    Example:
        >>> import polarprune as pp
        >>> from polarprune.integrations.transformers import folder_settings
        >>> settings = folder_settings(model, example)
        >>> pruner = pp.Pruner(model, example, params=0.5, steps=steps, **settings)
    """
    keep = [keep] if isinstance(keep, str) else list(keep)
    given = {"keep": keep, "norms": norms, "min_channels": max(1, min_channels)}
    graph = survey(model, example_inputs, **given)  # type: ignore[arg-type]
    trials = ConfigTrials(model, example_inputs, graph)
    with suppress(PruneError):  # no blocks that repeat
        graph = with_families(graph, model, uniform=True)
    best = _Choice(graph, trials, multiple_of)
    if multiple_of == _AUTO:
        for multiple in sorted(best.multiples):
            best = max(best, _Choice(graph, trials, multiple), key=_Choice.removable)
    if not best.families:
        raise PruneError(
            f"folder_settings: no config of {type(trials.part).__name__} can express the sizes of "
            f"a pruned model: {next(iter(best.frozen.values()), 'no channel is prunable')}"
        )
    found = {**given, "multiple_of": best.multiple_of, **best.settings()}
    return {name: value for name, value in found.items() if value not in ({}, [], False, _AUTO)}


class _Choice:
    """The families that a config can express with one `multiple_of`, and why not the others.

    Attributes:
        families: The families to prune; those that were joined have one width.
        frozen: The groups to freeze, and why.
        multiples: Larger multiples, with which a frozen family could be pruned.
    """

    def __init__(self, graph: Graph, trials: ConfigTrials, multiple_of: int | str) -> None:
        self.graph, self.trials, self.multiple_of = graph, trials, multiple_of
        self.widths = _allowed_widths(graph, multiple_of)
        self.multiples: set[int] = set()
        every = [family for family in _families(graph) if self.widths[family[0]]]
        why = {family: self._why_not(family) for family in every}
        self.families = [family for family in every if not why[family]]
        self.joined = list(self._joined([family for family in every if why[family]]))
        self.families += self.joined
        self._leave_out_conflicts(why)
        left = {name for family in self.families for name in family}
        self.frozen = {
            name: _explained(reason)
            for family, reason in why.items()
            for name in family
            if name not in left
        }

    def removable(self) -> float:
        """Return how many parameters are removed at the least widths."""
        least = {name: self.widths[name][0] for family in self.families for name in family}
        cost, groups = self.graph.cost, self.graph.prunable
        n = cost.full.clone()
        for number, name in enumerate(groups):
            n[number] = least.get(name, groups[name].size)
        return float(cost.parts["params"](cost.full) - cost.parts["params"](n))

    def settings(self) -> dict[str, Any]:
        """Return the arguments `uniform` and `frozen` of `Pruner`."""
        needed = [family for family in self.families if len(family) > 1 and self._is_tied(family)]
        blocks = {names: key for key, names in self.graph.families.items()}
        simple = all(family in blocks for family in needed) and needed == [
            family for family in self.families if len(family) > 1
        ]
        patterns = [_pattern(self.graph, family) or blocks[family] for family in needed]
        return {"uniform": simple if simple and needed else patterns, "frozen": self.frozen}

    # --- families, one by one ---

    def _why_not(self, family: Family) -> str:
        """Return why no config can express all widths of a family; empty if one can."""
        refused = self._refused(family, self.widths[family[0]])
        if refused:
            self.multiples |= self._better_multiples(family)
        return refused

    def _refused(self, family: Family, widths: Sequence[int]) -> str:
        """Return why no config can express these widths of a family; empty if one can."""
        try:
            found: dict[int, Any] = {}
            for width in (widths[-1], widths[len(widths) // 2]):
                given = dict.fromkeys(family, width)
                found[width] = self.trials.config_for(given, runs=not found)
        except PruneError as error:
            return str(error)
        return next(iter(self.trials.refused_widths(found, widths).values()), "")

    def _better_multiples(self, family: Family) -> set[int]:
        """Return the smallest larger multiple with which a config can express this family."""
        size, widths = self.graph.groups[family[0]].size, self.widths[family[0]]
        step = size - widths[-1]
        for multiple in range(2 * step, size // 2 + 1, step) if step > 1 else ():
            if size % multiple == 0 and not self._refused(family, range(multiple, size, multiple)):
                return {multiple}
        return set()

    def _is_tied(self, family: Family) -> bool:
        """Return whether a config cannot express different widths of the groups of a family."""
        size, widths = self.graph.groups[family[0]].size, self.widths[family[0]]
        given = dict.fromkeys(family, widths[len(widths) // 2])
        return bool(self.trials.refusal({**given, family[0]: size}, runs=False))

    # --- families together ---

    def _joined(self, families: list[Family]) -> Iterator[Family]:
        """Yield sets of families that a config can express if all of them have one width."""
        sizes: dict[tuple[int, ...], list[Family]] = {}
        for family in families:
            size = self.graph.groups[family[0]].size
            sizes.setdefault((size, *self.widths[family[0]]), []).append(family)
        for alike in sizes.values():
            for chosen in self._chosen_together(alike[:_MOST_TOGETHER]):
                yield tuple(name for family in chosen for name in family)

    def _chosen_together(self, alike: list[Family]) -> Iterator[tuple[Family, ...]]:
        """Yield the largest sets of families of one size that can be joined."""
        left = list(alike)
        for count in range(len(alike), 1, -1):
            for some in combinations(alike, count):
                names = tuple(name for family in some for name in family)
                possible = set(some) <= set(left) and _pattern(self.graph, names)
                if possible and not self._refused(names, self.widths[names[0]]):
                    yield some
                    left = [family for family in left if family not in some]

    def _leave_out_conflicts(self, why: dict[Family, str]) -> None:
        """Leave out families that a config can express alone, but not with the others."""
        if not self.trials.refusal(self._different_widths(self.families)):
            return
        chosen: list[Family] = []
        for family in self.families:
            conflict = self.trials.refusal(self._different_widths([*chosen, family]))
            if conflict:
                why[family] = conflict
            else:
                chosen.append(family)
        self.families = chosen

    def _different_widths(self, families: list[Family]) -> dict[str, int]:
        """Return widths of all groups; those of different families differ if possible."""
        found = {}
        for number, family in enumerate(families):
            widths = self.widths[family[0]]
            found.update(dict.fromkeys(family, widths[(len(widths) // 2 + number) % len(widths)]))
        return found


def _allowed_widths(graph: Graph, multiple_of: int | str) -> dict[str, list[int]]:
    """Return the widths below its size that a pruner may give to each group."""
    budget, found = Budget(graph, {"params": 0.5}, multiple_of), {}
    both = zip(budget.minimum.tolist(), budget.multiple.tolist(), strict=True)
    for (name, group), (least, multiple) in zip(graph.prunable.items(), both, strict=True):
        widths = [*range(least, group.size, multiple)]
        step = -(-len(widths) // _MOST_WIDTHS) or 1
        found[name] = [*reversed(widths[::-1][::step])]  # with the largest
    return found


def _families(graph: Graph) -> Iterator[Family]:
    """Yield the families of a graph, and all other prunable groups as families of one."""
    yield from graph.families.values()
    named = {name for names in graph.families.values() for name in names}
    yield from ((name,) for name in graph.prunable if name not in named)


def _pattern(graph: Graph, names: Sequence[str]) -> str:
    """Return a pattern that matches the names of these groups and no others; empty if none does."""
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    pattern = ".".join(one[0] if len(set(one)) == 1 else "*" for one in columns)
    matching = [name for name in graph.groups if fnmatchcase(name, pattern)]
    return pattern if sorted(matching) == sorted(names) else ""


def _explained(why: str) -> str:
    """Return a reason for the table of groups, with what to do about it."""
    fact = why.partition(". ")[0]
    return (
        f"a config cannot express this width: {fact}; without this entry of frozen=, it is pruned, "
        f"and polarprune.save stores the result"
    )
