"""Give the gates a parameter group of their own in an optimizer that a framework has made."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from ..training.pruner import Pruner


def separate_gates(pruner: Pruner, optimizer: Optimizer, *, taken: bool = False) -> bool:
    """Move the gates into a group that learns at a tenth of the rate, without weight decay.

    Call it before schedulers are made. Whatever rate a scheduler sets, the gates' rate stays a
    fixed fraction of the rate of the weights.

    Args:
        pruner: Its gates are moved.
        optimizer: Holds weights of the pruner's model, and perhaps gates among them.
        taken: Another optimizer has the gates; this one only loses those that it holds.

    Returns:
        Whether this optimizer has the gates now. It does not get them if it holds no weights of the
        pruner's model.
    """
    take_gates_out(pruner, optimizer)
    weights = None if taken else _group_of_weights(pruner.model, optimizer)
    if weights is None:
        return False
    fraction, rate = pruner.schedule.gate_lr, optimizer.param_groups[weights]["lr"]
    gates = pruner.param_groups(float(rate))[-1]
    optimizer.add_param_group({**gates, "lr": rate * fraction})
    index = len(optimizer.param_groups) - 1

    def follow(given: Optimizer, args: object, kwargs: object) -> None:
        """Set the gates' rate; a scheduler may have set another one."""
        rate = given.param_groups[weights]["lr"]
        if not isinstance(rate, Tensor):
            given.param_groups[index]["lr"] = rate * fraction

    optimizer.register_step_pre_hook(follow)
    return True


def take_gates_out(pruner: Pruner, optimizer: Optimizer) -> None:
    """Remove the gates from all groups of an optimizer."""
    gates = {id(gate.alpha) for gate in pruner.gates.values()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in gates]


def _group_of_weights(model: nn.Module, optimizer: Optimizer) -> int | None:
    """Return the first group that holds weights of the model, or None."""
    mine = {id(p) for p in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        if any(id(p) in mine for p in group["params"]):
            return index
    return None
