"""`BestWeights`: the weights of the epoch with the best score, for networks that overfit."""

from __future__ import annotations

import copy

from ..methods.base import ComparedMethod
from .trainer import Trainer, TrainerState


class BestWeights:
    """Keeps the state of a trainer's model at its best score, and restores it at the end.

    Nothing is kept before a pruner has met its budget, or for a method that cuts at the end.

    Args:
        higher_is_better: Whether a higher score is better.
    """

    def __init__(self, higher_is_better: bool) -> None:
        self.sign = 1 if higher_is_better else -1
        self.state: TrainerState = {}

    def offer(self, score: float, trainer: Trainer) -> None:
        """Keep the weights if there is none with a better score.

        Args:
            score: Their score.
            trainer: The trainer of the model.
        """
        pruner, method = trainer.pruner, trainer.method
        if (pruner is not None and not pruner.landed) or isinstance(method, ComparedMethod):
            return
        if not self.state or self.sign * (score - self.state["score"]) > 0:
            kept = copy.deepcopy(trainer.weights())
            self.state = {"score": score, "done": trainer.done, "weights": kept}

    def restore(self, trainer: Trainer) -> None:
        """Restore the best weights, if any were kept.

        Args:
            trainer: The trainer of the model.
        """
        if self.state:
            trainer.load_weights(self.state["weights"])
