"""What a Pruner is asked for and given, checked before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import PruneError
from .groups import Graph
from .schedule import Schedule


def check_settings(
    wanted: dict[str, float | None],
    lam: float | None,
    steps: int,
    multiple_of: int = 1,
    compact: str | None = None,
    schedule: Any = Schedule(),
    keep: Any = (),
) -> dict[str, float]:
    if not isinstance(schedule, Schedule):
        raise PruneError(f"schedule={schedule!r}: give a polarprune.Schedule(...).")
    names = [keep] if isinstance(keep, str) else keep
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise PruneError(f"keep={keep!r}: give names of modules, as keep=['head', 'layer4.*'].")
    if compact not in (None, "auto"):
        raise PruneError(f'compact={compact!r}: give "auto", or call pruner.compact() yourself.')
    limits = {key: value for key, value in wanted.items() if value is not None}
    if lam is not None and limits:
        raise PruneError(
            f"conflicting settings: lam={lam} leaves the ratio open, {' and '.join(limits)} set "
            f"it. Give a budget or lam, not both."
        )
    if lam is None and not limits:
        raise PruneError("no goal: give a budget (macs=0.5, params=0.3) or lam=...")
    for key, value in limits.items():
        if not isinstance(value, Real) or not 0 < value < 1:
            raise PruneError(
                f"{key}={value!r}: a budget is a fraction of the original, between 0 and 1 "
                f"(macs=0.5 is half of the MACs)."
            )
    if lam is not None and not (isinstance(lam, (int, float)) and 0 < lam < math.inf):
        raise PruneError(f"lam={lam!r}: must be positive and finite.")
    if not _whole(steps):
        raise PruneError(f"steps={steps!r}: give the number of optimizer steps of the training.")
    if not _whole(multiple_of):
        raise PruneError(f"multiple_of={multiple_of!r}: must be a positive whole number.")
    return {key: float(value) for key, value in limits.items()}


def _whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1


def check_prunable(graph: Graph) -> None:
    if not graph.open:
        reasons = dict.fromkeys(g.reason for g in graph.groups.values()) or ["there are none"]
        raise PruneError(
            "no prunable channels: every group stays whole ("
            + "; ".join(list(reasons)[:3])
            + "). Print polarprune.trace(model, example) for the whole list."
        )


def check_optimizers(given: Iterable[Any]) -> None:
    for one in given:
        if not isinstance(one, Optimizer):
            raise PruneError(
                f"attach: {type(one).__name__} is not a torch.optim.Optimizer; attach to the raw "
                f"optimizer inside it."
            )


def check_gates(
    gates: dict[str, nn.Parameter], mine: Iterable[Tensor], optimizer: Optimizer
) -> None:
    """The optimizer has to hold the gates that the pruner put in, without weight decay."""
    if any(alpha is not own for alpha, own in zip(gates.values(), mine, strict=True)):
        raise PruneError(
            "attach: the gates are other tensors than the pruner put in; load weights before the "
            "Pruner is built, or without assign=True."
        )
    if any(alpha.dtype.itemsize < 4 for alpha in gates.values()):
        raise PruneError(
            "attach: the gates are in half precision, too coarse for their steps; bring the model "
            "to its precision before the Pruner is built (gates then stay in float32)."
        )
    names = {id(alpha): name for name, alpha in gates.items()}
    remedy = "build the optimizer with pruner.param_groups(lr=..., weight_decay=...)"
    found = set()
    for group in optimizer.param_groups:
        held = {id(p) for p in group["params"]} & set(names)
        found |= held
        if held and group.get("weight_decay", 0) != 0:
            raise PruneError(
                f"attach: gates (for one, of {names[min(held)]}) are in a parameter group with "
                f"weight decay {group['weight_decay']}, which would close them all: {remedy}."
            )
    if len(found) < len(names):
        raise PruneError(f"attach: the optimizer does not hold the gates: {remedy}.")


def check_state(state: dict[str, Any], own: dict[str, Any]) -> None:
    """A state to go on from, beside the one of the pruner that is to take it over."""
    missing = own.keys() - state.keys()
    if missing:
        raise PruneError(
            f"load_state_dict: the state has no {sorted(missing)[0]!r}: give what "
            f"pruner.state_dict() returned. Nothing was changed."
        )
    sizes = [{name: len(alpha) for name, alpha in s["alpha"].items()} for s in (state, own)]
    if sizes[0] != sizes[1] or bool((state["present"].cpu() & ~own["present"]).any()):
        raise PruneError(
            "load_state_dict: the state has other groups than this model; build the Pruner with "
            "the same fresh model, example, keep=[...], rules={...} and norms."
        )
    if state["settings"] != own["settings"]:
        raise PruneError(
            f"load_state_dict: the state is of a run with {state['settings']}, this pruner has "
            f"{own['settings']}; build it with the same settings."
        )


def check_finite(gates: dict[str, nn.Parameter], flat: Tensor) -> None:
    if not bool(flat.isfinite().all()):
        bad = [name for name, alpha in gates.items() if not bool(alpha.isfinite().all())]
        raise PruneError(
            f"{bad[0]}: its gate has become NaN or infinite ({len(bad)} groups). The training has "
            f"diverged: lower the learning rate or clip gradients, and start again from the last "
            f"checkpoint."
        )
