"""Check before a step that the model, the pruner and the optimizer are from the same checkpoint.

The parameter group of the gates holds the number of the step as one of its options, so that the
state of the optimizer has it, too. torch keeps options that an optimizer does not know.
"""

from __future__ import annotations

from ..errors import PruneError
from .parameter_groups import ParameterGroup

_STEP = "polarprune_step"
_ACCEPT = "to continue as it is now, call pruner.load_state_dict(pruner.state_dict())"


def note_step(group: ParameterGroup, step: int) -> None:
    """Write the number of steps done into the parameter group of the gates."""
    group[_STEP] = step


class StepCheck:
    """Checks that all parts of a run are at the same step after some of them were loaded."""

    def __init__(self) -> None:
        self._foreign_gates = False  # gates were loaded that are not those of the pruner's state
        self._awaits_optimizer = False  # the model's state was loaded, the optimizer's is unknown

    def __call__(self, step: int, group: ParameterGroup | None = None) -> None:
        """Raise unless all parts are of this step.

        Args:
            step: The number of steps that the pruner has counted.
            group: The parameter group of the gates, if an optimizer is attached.
        """
        if self._foreign_gates:
            raise PruneError(
                f"step: gates were loaded into the model without the pruner's state that belongs "
                f"to them, which model.state_dict() contains as 'polarprune_state'. Load that "
                f"whole dict, or call pruner.load_state_dict(state) with what pruner.state_dict() "
                f"returned at the same time; {_ACCEPT}. Nothing was changed."
            )
        other = step if group is None else group.get(_STEP, step)
        if other != step:
            raise PruneError(
                f"step: the model is at step {step}, but the optimizer is at step {other}: only "
                f"one of them was loaded, or they come from different checkpoints. Load the states "
                f"of both from the same checkpoint; {_ACCEPT}. Nothing was changed."
            )
        self._awaits_optimizer = False

    def attached(self, group: ParameterGroup, step: int) -> None:
        """Note that an optimizer was attached, whose state may have been loaded already."""
        group.setdefault(_STEP, 0 if self._awaits_optimizer else step)

    def model_loaded(self) -> None:
        """Expect the optimizer to be loaded, too: now or after it is attached."""
        self._awaits_optimizer = True

    def gates_loaded(self, *, own: bool) -> None:
        """Note whether the gates that were loaded are those of the pruner's state."""
        self._foreign_gates = not own

    def accept(self) -> None:
        """Continue with the present gates and the present optimizer."""
        self._foreign_gates = self._awaits_optimizer = False
