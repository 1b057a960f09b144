"""The cost of a model, counted by running it: no trace of the model is needed."""

from __future__ import annotations

from torch import Tensor, nn

from ...surgery.proof import count_macs


def cost_of(model: nn.Module, example: Tensor) -> dict[str, int]:
    """Return the MACs on an example batch, and the number of parameters."""
    params = sum(parameter.numel() for parameter in model.parameters())
    return {"macs": count_macs(model, example), "params": params}
