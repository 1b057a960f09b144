"""`slimming`: ℓ1 on the scales of batch norms (Liu et al., 2017), one threshold for all scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...channels.graph import Plan
from ...cost.other_scores import scale_scores
from ...errors import PruneError
from .base import PlannedMethod


class Slimming(PlannedMethod):
    """Adds λ Σ |γ| over the scales γ of all batch norms to the loss."""

    def set_up(self) -> None:
        super().set_up()
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        self.scales: list[Tensor] = [norm.weight for norm in norms if norm.affine]
        if not self.scales:
            raise PruneError(
                "slimming: this network has no batch norms with scales. Choose another method."
            )

    def penalty(self) -> Tensor:
        return self.own.slimming * torch.cat(self.scales).abs().sum()

    def plan(self) -> Plan:
        return self.keep_above_threshold(scale_scores(self.model, self.graph))
