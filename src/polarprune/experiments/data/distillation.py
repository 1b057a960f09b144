"""The loss of classifiers, with or without a teacher (Hinton et al., 2015)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..settings import Settings


def classification_loss(
    logits: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
) -> Tensor:
    """Return the cross entropy, mixed with the distance from the teacher's logits.

    Args:
        logits: Logits of the model, N × classes.
        target: Class of each example.
        teacher: Logits of the teacher, or None.
        settings: `label_smoothing`, `distill` (the teacher's share) and `temperature`.
    """
    logits = logits.float()
    loss = F.cross_entropy(logits, target, label_smoothing=settings.label_smoothing)
    if teacher is None:
        return loss
    distance = teacher_distance(logits, teacher, settings.temperature, "batchmean")
    return mixed(loss, distance, settings)


def teacher_distance(logits: Tensor, teacher: Tensor, temperature: float, reduction: str) -> Tensor:
    """Return the KL divergence between the softened probabilities of teacher and model."""
    own = F.log_softmax(logits.float() / temperature, 1)
    wanted = F.log_softmax(teacher.float() / temperature, 1)
    return F.kl_div(own, wanted, reduction=reduction, log_target=True)


def mixed(loss: Tensor, distance: Tensor, settings: Settings) -> Tensor:
    """Return loss and distance in the shares that `distill` sets; T² keeps the gradient's scale."""
    t = settings.temperature
    return (1 - settings.distill) * loss + settings.distill * t * t * distance
