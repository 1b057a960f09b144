"""`lasso`: group lasso over all weights that belong to a channel, one threshold for all norms."""

from __future__ import annotations

import torch
from torch import Tensor

from ...channels.graph import Plan
from ...cost.other_scores import UnitNorms
from .base import HISTOGRAM_BINS, PlannedMethod


class Lasso(PlannedMethod):
    """Adds λ Σ √size · ‖w‖ to the loss; a weight counts for every channel that it belongs to.

    The threshold is on ‖w‖. On ‖w‖/√size it would remove the wide layers first, whose weights are
    smaller from the start.
    """

    def set_up(self) -> None:
        super().set_up()
        self.norms = UnitNorms(self.model, self.graph.units, self.graph.axes)

    def penalty(self) -> Tensor:
        return self.own.lasso * (self.norms.sizes.sqrt() * self.norms()).sum()

    def log_entries(self) -> dict[str, object]:
        """Return a histogram of ‖w‖ / size with the largest scaled to 1, as the paper draws it."""
        norms = (self.norms() / self.norms.sizes).detach().float()
        return {"norms": torch.histc(norms / norms.max(), HISTOGRAM_BINS, 0, 1).int().tolist()}

    def plan(self) -> Plan:
        return self.keep_above_threshold(self.norms().detach())
