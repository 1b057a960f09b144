"""Check and unwrap optimizers; check gates and copies of the model that users pass to a pruner."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PruneError
from .numbers import is_number

_REMEDY = "build the optimizer with pruner.param_groups(lr=..., weight_decay=...)"


def raw_optimizers(given: Iterable[object], where: str = "attach") -> list[Optimizer]:
    """Return torch optimizers; a wrapper that holds one as `.optimizer` is unwrapped.

    A wrapper may subclass `Optimizer` without supporting hooks, as accelerate's does. The hooks of
    the raw optimizer run for the steps that are actually taken.
    """
    found = []
    for one in given:
        raw = one
        # A scheduler holds an optimizer, too, but no parameter groups.
        while not _has_hooks(raw) and hasattr(raw, "param_groups") and hasattr(raw, "optimizer"):
            raw = raw.optimizer
        if not (isinstance(raw, Optimizer) and _has_hooks(raw)):
            raise PruneError(
                f"{where}: {type(one).__name__} is not a torch.optim.Optimizer; "
                f"{'attach to' if where == 'attach' else 'give'} the raw optimizer inside it."
            )
        found.append(raw)
    return found


def _has_hooks(optimizer: object) -> bool:
    """Return whether step hooks can be registered."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def check_not_attached(optimizer: Optimizer | None) -> None:
    """Refuse a second call of `attach`."""
    if optimizer is not None:
        raise PruneError("attach: this pruner is attached already; one optimizer is enough.")


def check_gates(
    gates: Mapping[str, nn.Parameter],
    own: Iterable[Tensor],
    optimizer: Optimizer,
    others: Iterable[Optimizer],
) -> None:
    """Require that this optimizer alone holds the pruner's gates, without weight decay."""
    if any(alpha is not mine for alpha, mine in zip(gates.values(), own, strict=True)):
        raise PruneError(
            "attach: the gates are other tensors than the pruner installed. Load weights before "
            "the Pruner is built, or without assign=True."
        )
    if any(alpha.dtype.itemsize < 4 for alpha in gates.values()):
        raise PruneError(
            "attach: the gates are in half precision, which is too coarse for their steps. Convert "
            "the model before the Pruner is built; its gates then stay in float32."
        )
    names = {id(alpha): name for name, alpha in gates.items()}
    _check_groups(names, optimizer)
    for other in others:
        held = _held(names, other)
        if held:
            raise PruneError(
                f"attach: two optimizers hold gates (for one, of {names[min(held)]}). Parameters "
                f"of a gated layer include its gates: leave them out of all but the first "
                f"optimizer, or take the parameters of the other ones before the Pruner is built."
            )


def _held(names: Mapping[int, str], optimizer: Optimizer) -> set[int]:
    """Return the ids of the gates that an optimizer holds."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]} & set(names)


def _check_groups(names: Mapping[int, str], optimizer: Optimizer) -> None:
    """Check the parameter groups that hold the gates; `names` maps the id of a gate to its name."""
    found, mixed = set[int](), False
    for group in optimizer.param_groups:
        held = {id(p) for p in group["params"]} & set(names)
        found |= held
        mixed = mixed or 0 < len(held) < len(group["params"])
        if held and group.get("weight_decay", 0) != 0:
            raise PruneError(
                f"attach: gates (for one, of {names[min(held)]}) are in a parameter group with "
                f"weight decay {group['weight_decay']}, which would close them all: {_REMEDY}."
            )
    if len(found) < len(names):
        raise PruneError(f"attach: the optimizer does not hold the gates: {_REMEDY}.")
    if mixed:
        warnings.warn(
            f"attach: gates share a parameter group with weights, and will learn faster than they "
            f"should; {_REMEDY}.",
            stacklevel=5,
        )


def check_rates(lr: object, weight_decay: object, others: Iterable[str]) -> None:
    """Check the arguments of `param_groups`; torch's optimizers accept some wrong ones."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if value is None and name == "weight_decay":
            continue
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_number(number) or number < 0:
            raise PruneError(f"param_groups: {name}={value!r}; give a finite number of at least 0.")
    if "params" in others:
        raise PruneError(
            "param_groups: params=... is not accepted, because all parameters of the model are "
            "included. Call requires_grad_(False) on those that should not be trained."
        )


def check_matches(pattern: object, found: Collection[object]) -> None:
    """Require that a pattern of names for `no_decay` has found parameters."""
    if not found:
        raise PruneError(
            f"param_groups: no parameter matches no_decay={pattern!r}. Names are those of "
            f"model.named_parameters() before the Pruner was built, such as '*.bias'."
        )


def checked_copies(copies: object) -> list[nn.Module]:
    """Return the copies of the gated model, from `pruner.copies` or an argument of `compact`."""
    several = isinstance(copies, Iterable) and not isinstance(copies, nn.Module)
    found = list(copies) if several and isinstance(copies, Iterable) else [copies]
    strange = [one for one in found if not isinstance(one, nn.Module)]
    if strange or not several:
        raise PruneError(
            f"compact: {type((strange or found)[0]).__name__} given as copies; give a list of "
            f"copies of the gated model, such as copies=[AveragedModel(model)]. Nothing was "
            f"changed."
        )
    return [one for one in found if isinstance(one, nn.Module)]


def check_known(optimizers: Sequence[Optimizer], wanted: bool) -> None:
    """Require an optimizer for `compact` once the training has begun."""
    if wanted and not optimizers:
        raise PruneError(
            "compact: the optimizer is unknown, and would continue with the state of the old "
            "shapes. Give it: compact(optimizer=...). Nothing was changed."
        )
