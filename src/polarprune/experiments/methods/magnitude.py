"""`magnitude` and `random`: plain training, then every group keeps the same share of channels."""

from __future__ import annotations

from ...channels.graph import Plan
from ...cost.other_scores import magnitude_scores, random_scores
from .base import PlannedMethod


class Magnitude(PlannedMethod):
    """Keeps the channels with the largest weights."""

    def plan(self) -> Plan:
        return self.keep_same_share(magnitude_scores(self.model, self.graph))


class Random(PlannedMethod):
    """Keeps random channels, drawn with the seed of the run."""

    def plan(self) -> Plan:
        return self.keep_same_share(random_scores(self.graph, self.settings.seed))
