"""Check the model and the gates of a run, before it is inspected, compacted or exported."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..errors import PruneError

if TYPE_CHECKING:
    from ..channels.graph import Graph

_LATE = 0.9  # an export before this fraction of the steps is early
_REMEDY = (
    "Continue training. Is pruner.attach(optimizer) called, and is steps the number of optimizer "
    "steps that are actually taken?"
)


def check_graph(where: str, model: object, graph: object, kind: type[Graph]) -> None:
    """Require a module, and a graph that `trace` returned; `kind` is its class."""
    if not isinstance(model, nn.Module):
        raise PruneError(f"{where}: the model is a {type(model).__name__}; give a torch.nn.Module.")
    if not isinstance(graph, kind):
        raise PruneError(
            f"{where}: the graph is a {type(graph).__name__}; give what "
            f"polarprune.trace(model, example) returned."
        )


def check_prunable(graph: Graph) -> None:
    """Require at least one prunable group."""
    if not graph.prunable:
        reasons = dict.fromkeys([*graph.notes, *(g.reason for g in graph.groups.values())])
        norms = f"norms=True may make {graph.with_norms} channels prunable. "
        raise PruneError(
            "no prunable channels: every group is frozen ("
            + ("; ".join(list(reasons)[:3]) or "there are no groups")
            + "). "
            + (norms if graph.with_norms else "")
            + "Print polarprune.trace(model, example) for the whole list."
        )


def check_minimum(graph: Graph, kept_units: Tensor) -> None:
    """Refuse a plan that keeps fewer channels than a group needs."""
    for name, group in graph.prunable.items():
        left = int(kept_units[group.offset : group.offset + group.size].sum())
        if left < group.minimum:
            raise PruneError(
                f"{name}: the plan keeps {left} channels, but the group needs at least "
                f"{group.minimum}: with fewer, the input no longer reaches the output, or the "
                f"model's code does not run. Keep more channels; print(graph) shows the reason."
            )


def check_finite(gates: Mapping[str, nn.Parameter], flat: Tensor) -> None:
    """Refuse gates that are NaN or infinite; `flat` holds them and what else must be finite."""
    if not bool(flat.isfinite().all()):
        bad = [name for name, alpha in gates.items() if not bool(alpha.isfinite().all())]
        what = (
            f"{bad[0]}: its gate has become NaN or infinite ({len(bad)} groups)"
            if bad
            else "the gates: their steps have become NaN or infinite"
        )
        raise PruneError(
            f"{what}. The training has diverged: lower the learning rate or clip gradients, and "
            f"start again from the last checkpoint."
        )


def check_step_by_hand(attached: object, *, rate_known: bool) -> None:
    """Refuse `pruner.step()` after `attach`, and with `lam=` before the learning rate is known."""
    if attached is not None:
        raise PruneError(
            "step: an optimizer is attached, and its step moves the gates already. Remove the call "
            "of pruner.step(), or that of pruner.attach(optimizer). Nothing was changed."
        )
    if not rate_known:
        raise PruneError(
            "step: with lam= the pruner has to know the gates' learning rate: build the "
            "optimizer with pruner.param_groups(lr=...), and attach it."
        )


def check_done(
    limits: Mapping[str, float],
    share: Mapping[str, float],
    step: int,
    steps: int,
    deadline: int,
) -> None:
    """Refuse an export before the budget is met.

    Args:
        limits: The budgets; empty with `lam`.
        share: The share of each resource that is left.
        step: Optimizer steps done.
        steps: Optimizer steps announced.
        deadline: The step at which the budget will be met, or 0 if it has been.
    """
    taken = f"{step} of {steps} steps were taken"
    now = ", ".join(f"{key} {share[key]:.3f} (budget {limit})" for key, limit in limits.items())
    if limits and deadline:
        raise PruneError(
            f"export: the budget is not met yet: {now}; {taken}, and it is met at step "
            f"{deadline}. {_REMEDY}"
        )
    if not limits and step < steps:
        raise PruneError(f"export: {taken}. {_REMEDY}")
    if any(share[key] > limit for key, limit in limits.items() if key != "latency"):
        raise PruneError(
            f"export: the budget is not met: {now}, though {taken}. The gates were changed from "
            f"outside after they had closed: load the pruner's own state too."
        )


def check_no_other_weights(model: object) -> None:
    """Refuse to export other weights than those of a sharded model."""
    if model is not None:
        raise PruneError(
            "export: the model is sharded by fully_shard, so no other weights can be given. "
            "Write them to a full state dict and load that into a plain model with a Pruner."
        )


def check_same_gates(known: Tensor, found: Tensor) -> None:
    """Refuse an export of gates that are not those after the pruner's last step."""
    if not bool((known == found).all()):
        raise PruneError(
            "export: the gates were changed from outside after the last step. Load the pruner's "
            "own state too, with pruner.load_state_dict."
        )


def warn_of_early_export(step: int, steps: int) -> None:
    """Warn if a model is exported long before the end of its training."""
    if step < _LATE * steps:
        warnings.warn(
            f"export: {step} of {steps} steps were taken. The budget is met, but the weights have "
            f"not adapted to the widths yet. Continue training; if this is the end, set steps to "
            f"the number of optimizer steps that are actually taken.",
            stacklevel=4,
        )


def warn_of_more_steps(steps: int) -> None:
    """Warn at the first step after the announced number of steps."""
    warnings.warn(
        f"steps: {steps} steps were announced and all are done; gates stay as they are from now "
        f"on, and steps are not counted. Set steps = epochs * len(loader) (optimizer steps, not "
        f"batches, if gradients are accumulated); to train on at full speed, export first and "
        f"train the small model.",
        stacklevel=6,
    )


def check_weights(model: nn.Module) -> None:
    """Refuse weights without values, or with NaN or infinite values."""
    lost = [name for name, p in model.named_parameters() if p.is_meta]
    if lost:
        raise PruneError(
            f"export: {lost[0]} is on the meta device and has no values. Build the model again, "
            f"and load the last checkpoint."
        )
    bad = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    if bad:
        raise PruneError(
            f"export: {bad[0]} has values that are NaN or infinite ({len(bad)} weights do). The "
            f"training has diverged: go back to a checkpoint before that."
        )


def check_unchanged(names: Sequence[str]) -> None:
    """Refuse to compact a model whose plain attributes changed since it was traced."""
    if names:
        raise PruneError(
            f"compact: {names[0]} changed since tracing, but the rewritten forward still uses the "
            f"old value. Nothing was changed; continue training without compact()."
        )
