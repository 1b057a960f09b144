"""The optimizers of a run: the one that trains the gates, and those of other parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from ..validation.optimizers import raw_optimizers
from .parameter_groups import ParameterGroup
from .step_check import StepCheck, note_step
from .stepper import Stepper


class Attachment:
    """The optimizers that a pruner knows, and the learning rate of its gates.

    Args:
        stepper: Holds the gates.

    Attributes:
        optimizer: The optimizer that trains the gates, or None before `attach`.
        check: Checks that the model, the pruner and the optimizer are at the same step.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.optimizer: Optimizer | None = None
        self.check = StepCheck()
        self._stepper = stepper
        self._others: tuple[Optimizer, ...] = ()
        self._rate: float | None = None  # what `param_groups` returned last for the gates

    def attach(self, optimizer: Optimizer, others: Iterable[Optimizer], step: int) -> None:
        """Remember the optimizer that trains the gates, and those of other parameters."""
        self.optimizer, self._others = optimizer, tuple(others)
        self.check.attached(self._gate_group(optimizer), step)

    def expect_rate(self, rate: float) -> None:
        """Remember the learning rate of the gates, for steps without an attached optimizer."""
        self._rate = rate

    @property
    def knows_rate(self) -> bool:
        """Whether `param_groups` was called."""
        return self._rate is not None

    def gate_lr(self) -> float | Tensor:
        """Return the gates' learning rate: a tensor if the optimizer's step is captured."""
        if self.optimizer is None:
            return self._rate or 0.0
        rate: float | Tensor = self._gate_group(self.optimizer)["lr"]
        return rate

    def optimizers(self, more: object = ()) -> list[Optimizer]:
        """Return the attached optimizers, followed by those that the user passes."""
        given = list(more) if isinstance(more, Iterable) else [more]
        found = [one for one in (self.optimizer, *self._others, *given) if one is not None]
        return list(dict.fromkeys(raw_optimizers(found, "compact")))

    def check_step(self, step: int) -> None:
        """Raise a `PruneError` unless the optimizer is at this step, too."""
        group = None if self.optimizer is None else self._gate_group(self.optimizer)
        self.check(step, group)

    def note_step(self, step: int) -> None:
        """Store the number of steps in the state of the optimizer."""
        if self.optimizer is not None:
            note_step(self._gate_group(self.optimizer), step)

    def _gate_group(self, optimizer: Optimizer) -> ParameterGroup:
        """Return the parameter group that holds the (first) gates."""
        first = id(self._stepper.alphas[0])
        for group in optimizer.param_groups:
            if any(id(p) == first for p in group["params"]):
                return group
        raise AssertionError("attach made sure that the optimizer holds the gates")
