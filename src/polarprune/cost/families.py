"""Families: sets of groups that keep equally many units, because blocks repeat (`uniform=`).

A group that is in no such set is a family of its own. Values exist for each group, or for each
family; `FamilyIndex` converts them. Where no family has several groups, both are the same, and
nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class FamilyIndex:
    """The families of a model, in the order of their first groups.

    Args:
        names: The names of all prunable groups.
        together: For each family with several groups, their names.

    Attributes:
        number: For every group, the number of its family.
        first: For every family, the number of its first group.
        sizes: For every family, how many groups it has.
        several: Whether some family has several groups.
    """

    def __init__(self, names: Sequence[str], together: Iterable[Sequence[str]]) -> None:
        first = {name: family[0] for family in together for name in family}
        leaders = [first.get(name, name) for name in names]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(leaders))}
        self.number = torch.tensor([numbers[name] for name in leaders], dtype=torch.long)
        self.first = torch.tensor([names.index(name) for name in numbers], dtype=torch.long)
        self.sizes = torch.bincount(self.number, minlength=len(numbers))
        self.several = len(numbers) < len(names)

    def of_groups(self, values: Tensor) -> Tensor:
        """Return for every group the value of its family; families lie along the last axis."""
        return values[..., self.number] if self.several else values

    def totals(self, values: Tensor) -> Tensor:
        """Return for every family the sum over its groups, which lie along the first axis."""
        if not self.several:
            return values
        sums = values.new_zeros(len(self.first), *values.shape[1:])
        return sums.index_add(0, self.number, values)

    def least(self, values: Tensor) -> Tensor:
        """Return for every family the least of the values of its groups."""
        return self._extreme(values, "amin")

    def most(self, values: Tensor) -> Tensor:
        """Return for every family the largest of the values of its groups."""
        return self._extreme(values, "amax")

    def _extreme(self, values: Tensor, which: str) -> Tensor:
        if not self.several:
            return values
        found = values.new_zeros(len(self.first))
        return found.scatter_reduce(0, self.number, values, which, include_self=False)


class GroupLimits(Protocol):
    """The part of a `Budget` that `FamilyLimits` uses."""

    families: FamilyIndex
    multiple: Tensor
    minimum: Tensor

    def excess(self, n: Tensor) -> Tensor:
        """Return how far above its limit the worst resource is."""


class FamilyLimits:
    """A budget as a function of the widths of families, in which all groups are equally wide."""

    def __init__(self, limits: GroupLimits) -> None:
        self._limits = limits
        self.multiple = limits.multiple[limits.families.first]
        self.minimum = limits.minimum[limits.families.first]

    def excess(self, n: Tensor) -> Tensor:
        """Return how far above its limit the worst resource is, at these widths of families."""
        return self._limits.excess(self._limits.families.of_groups(n))
