"""What users ask for and give, checked before anything is changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PruneError
from .numbers import is_number

if TYPE_CHECKING:
    from ..channels.graph import Graph
    from ..channels.propagation import Flow, Rule
    from ..tracing.tape import Op


def check_settings(
    wanted: dict[str, float | None],
    lam: float | None,
    steps: int,
    multiple_of: int = 1,
    compact: str | None = None,
    keep: Any = (),
) -> dict[str, float]:
    keep_patterns(keep)
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
        if not is_number(value) or not 0 < value < 1:
            raise PruneError(
                f"{key}={value!r}: a budget is a fraction of the original, between 0 and 1 "
                f"(macs=0.5 is half of the MACs)."
            )
    if lam is not None and not (isinstance(lam, (int, float)) and is_number(lam) and lam > 0):
        raise PruneError(f"lam={lam!r}: must be positive and finite.")
    if not _whole(steps) or steps >= _MANY:
        raise PruneError(f"steps={steps!r}: give the number of optimizer steps of the training.")
    if not _whole(multiple_of):
        raise PruneError(f"multiple_of={multiple_of!r}: must be a positive whole number.")
    return {key: float(value) for key, value in limits.items()}


def keep_patterns(keep: Any) -> tuple[str, ...]:
    names = (keep,) if isinstance(keep, str) else keep
    names = tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(name, str) for name in names):
        given = ", ".join(type(name).__name__ for name in names)
        raise PruneError(
            f"keep: {given} given; give names of modules, as keep=['head', 'layer4.*'] "
            f"(model.named_modules() lists them)."
        )
    return names


def checked_rules(rules: Any) -> dict[Any, Rule]:
    """Rules of the user's own; what one of them raises is said to come from it."""
    if rules is None:
        return {}
    if not isinstance(rules, Mapping):
        raise PruneError(f"rules={rules!r}: give a dict, as rules={{torch.ops.my.swish: rule}}.")
    for operation, rule in rules.items():
        if not isinstance(operation, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            raise PruneError(f"rules: {operation!r} is no operation; give torch.ops.my.swish.")
        if not callable(rule):
            raise PruneError(f"rules: {rule!r} is no rule for {operation}; give a function of "
                             f"(flow, op), as docs/rules.md says.")  # fmt: skip
    return {operation: _guarded(rule) for operation, rule in rules.items()}


def _guarded(rule: Rule) -> Rule:
    def guarded(flow: Flow, op: Op) -> None:
        try:
            rule(flow, op)
        except PruneError:
            raise
        except Exception as error:
            raise PruneError(
                f"rules: the rule for {op.func} fails in {op.where}: {error!r}. Correct the rule, "
                f"or leave it out: the channels are then frozen."
            ) from error

    return guarded


def check_graph(where: str, model: Any, graph: Any, kind: type[Graph]) -> None:
    if not isinstance(model, nn.Module):
        raise PruneError(f"{where}: the model is a {type(model).__name__}; give a torch.nn.Module.")
    if not isinstance(graph, kind):
        raise PruneError(
            f"{where}: the graph is a {type(graph).__name__}; give what "
            f"polarprune.trace(model, example) returned."
        )


def check_schedule(schedule: Any, kind: type) -> None:
    if not isinstance(schedule, kind):
        raise PruneError(f"schedule={schedule!r}: give a polarprune.Schedule(...).")


def check_path(where: str, path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise PruneError(f"{where}: path={path!r}; give the name of a file.")


_MANY = 2**53  # floats count no further


def _whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1


def check_prunable(graph: Graph) -> None:
    if not graph.prunable:
        reasons = dict.fromkeys([*graph.notes, *(g.reason for g in graph.groups.values())])
        raise PruneError(
            "no prunable channels: every group stays whole ("
            + ("; ".join(list(reasons)[:3]) or "there are none")
            + "). "
            + (f"norms=True may open {graph.with_norms} channels. " if graph.with_norms else "")
            + "Print polarprune.trace(model, example) for the whole list."
        )


def check_optimizers(given: Iterable[Any], where: str = "attach") -> None:
    for one in given:
        if not isinstance(one, Optimizer):
            raise PruneError(
                f"{where}: {type(one).__name__} is not a torch.optim.Optimizer; "
                f"{'attach to' if where == 'attach' else 'give'} the raw optimizer inside it."
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
    found, mixed = set[int](), False
    for group in optimizer.param_groups:
        held = {id(p) for p in group["params"]} & set(names)
        found |= held
        mixed = mixed or 0 < len(held) < len(group["params"])
        if held and group.get("weight_decay", 0) != 0:
            raise PruneError(
                f"attach: gates (for one, of {names[min(held)]}) are in a parameter group with "
                f"weight decay {group['weight_decay']}, which would close them all: {remedy}."
            )
    if len(found) < len(names):
        raise PruneError(f"attach: the optimizer does not hold the gates: {remedy}.")
    if mixed:
        warnings.warn(f"attach: gates are in one parameter group with weights, and will learn "
                      f"faster than they should; {remedy}.", stacklevel=3)  # fmt: skip


def check_rates(lr: Any, weight_decay: Any, others: Iterable[str]) -> None:
    """What `param_groups` is given: torch's optimizers let some of it pass."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if value is None and name == "weight_decay":
            continue
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_number(number) or number < 0:
            raise PruneError(f"param_groups: {name}={value!r}; give a finite number from 0 on.")
    if "params" in others:
        raise PruneError(
            "param_groups: params=...; leave it out, as all parameters of the model are taken: "
            "those that are not to learn get requires_grad_(False)."
        )


def checked_copies(copies: Any) -> list[nn.Module]:
    """Of the gated model: `pruner.copies`, or what `compact` is given."""
    several = isinstance(copies, Iterable) and not isinstance(copies, nn.Module)
    found = list(copies) if several else [copies]
    strange = [one for one in found if not isinstance(one, nn.Module)]
    if strange or not several:
        raise PruneError(
            f"compact: {type((strange or found)[0]).__name__} given as copies; give a list of "
            f"copies of the gated model, as copies=[AveragedModel(model)]. Nothing was changed."
        )
    return found


def check_finite(gates: dict[str, nn.Parameter], flat: Tensor) -> None:
    if not bool(flat.isfinite().all()):
        bad = [name for name, alpha in gates.items() if not bool(alpha.isfinite().all())]
        what = (f"{bad[0]}: its gate has become NaN or infinite ({len(bad)} groups)" if bad
                else "the gates: their steps have become NaN or infinite")  # fmt: skip
        raise PruneError(
            f"{what}. The training has diverged: lower the learning rate or clip gradients, and "
            f"start again from the last checkpoint."
        )


def check_known(optimizers: list[Optimizer], wanted: bool) -> None:
    if wanted and not optimizers:
        raise PruneError(
            "compact: the optimizer is not known, and would go on with the state of the old "
            "shapes: give it, as compact(optimizer=...). Nothing was changed."
        )


def check_done(
    limits: dict[str, float], share: dict[str, float], step: int, steps: int, deadline: int
) -> None:
    """`deadline` is the step at which a budget will be met, or 0 if it has been."""
    taken = f"{step} of {steps} steps were taken"
    now = ", ".join(f"{key} {share[key]:.3f} (budget {limit})" for key, limit in limits.items())
    remedy = (
        "Train on; is pruner.attach(optimizer) called, and steps set to the number of optimizer "
        "steps that are really taken?"
    )
    if limits and deadline:
        raise PruneError(
            f"export: the budget is not met yet: {now}; {taken}, and it is met at step "
            f"{deadline}. {remedy}"
        )
    if not limits and step < steps:
        raise PruneError(f"export: {taken}. {remedy}")
    if any(share[key] > limit for key, limit in limits.items() if key != "latency"):
        raise PruneError(
            f"export: the budget is not met: {now}, though {taken}. The gates were changed from "
            f"outside after they had closed: load the pruner's own state too."
        )


def check_weights(model: nn.Module) -> None:
    lost = [name for name, p in model.named_parameters() if p.is_meta]
    if lost:
        raise PruneError(f"export: {lost[0]} is on the meta device and has no values: build the "
                         f"model anew, and load the last checkpoint.")  # fmt: skip
    bad = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    if bad:
        raise PruneError(
            f"export: {bad[0]} has values that are NaN or infinite ({len(bad)} weights do). The "
            f"training has diverged: go back to a checkpoint before that."
        )


def check_unchanged(names: list[str]) -> None:
    if names:
        raise PruneError(
            f"compact: {names[0]} is another number than when the model was traced, and code that "
            f"is rewritten would go on with that. Nothing was changed; train on without compact()."
        )
