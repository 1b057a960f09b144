"""What has been found out about a model so far, as frozen data.

`Inspection` builds a graph under its findings. A new finding makes a new `Findings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..channels.graph import Location
from ..channels.reasons import Reason
from ..rewriting.captured_forward import CapturedForward, Refused
from ..tracing.generation import CannotContinue

Attributes = Mapping[str, Mapping[str, Location]]  # module -> attribute -> the width it follows
Captured = Mapping[str, CapturedForward]


@dataclass(frozen=True, eq=False)
class Findings:
    """What is known about a model besides what a run shows.

    Attributes:
        frozen: Groups that trial cuts or the caller froze, and why.
        must_keep: Groups that cannot close entirely, and why.
        seeds: The seeds of the plans that trial cuts use.
        attributes: The integer attributes of modules that follow a width.
        rewritten: Modules whose forward was captured, which is resized for every cut.
        refused: Modules whose forward cannot be captured.
        failed: Modules with which the model did not run, or got no further, once rewritten.
        norm_code: The code of modules that take means over channels.
        unweightable: Modules whose means over channels cannot be weighted.
        not_continuing: Why a cache counts as an output; None if it does not.
    """

    frozen: Mapping[str, Reason] = field(default_factory=dict)
    must_keep: Mapping[str, str] = field(default_factory=dict)
    seeds: frozenset[int] = frozenset((1, 2))
    attributes: Attributes = field(default_factory=dict)
    rewritten: Captured = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    failed: Mapping[str, Refused] = field(default_factory=dict)
    norm_code: Captured = field(default_factory=dict)
    unweightable: Mapping[str, Refused] = field(default_factory=dict)
    not_continuing: CannotContinue | None = None

    def with_frozen(self, names: Iterable[str], why: Reason) -> Findings:
        """Return the findings with these groups frozen for a reason."""
        return replace(self, frozen={**self.frozen, **dict.fromkeys(names, why)})

    def with_must_keep(self, names: Iterable[str], why: str) -> Findings:
        """Return the findings with groups that keep a channel for a reason."""
        return replace(self, must_keep={**self.must_keep, **dict.fromkeys(names, why)})

    def with_seeds(self, seeds: Iterable[int]) -> Findings:
        """Return the findings with more plans for trial cuts."""
        return replace(self, seeds=self.seeds.union(seeds))

    def with_refused(self, refused: Mapping[str, Refused]) -> Findings:
        """Return the findings with more refusals; the first of a module counts."""
        return replace(self, refused={**refused, **self.refused})

    def followed(self, attributes: Attributes) -> dict[str, dict[str, Location]]:
        """Return those of these attributes that are read: captured forwards do not read theirs."""
        items = attributes.items()
        return {path: dict(mine) for path, mine in items if path not in self.rewritten}
