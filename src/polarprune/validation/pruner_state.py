"""Check the state of a pruner before any part of it is loaded.

First the structure: keys, types, shapes and dtypes must match the pruner that loads the state. Then
the values: they must be in range, and the parts must be consistent with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from ..errors import PruneError
from .numbers import is_number

if TYPE_CHECKING:
    from ..channels.graph import Graph

State = dict[str, Any]  # the parts of a pruner's state, by name: tensors and plain data
_Values = float | Tensor
_Range = tuple[_Values, Callable[[_Values], bool]]  # a value, and whether it is in range

_REMEDY = "Pass the dict that pruner.state_dict() returned"


def check_state(state: object, own: State, graph: Graph, deadline: int) -> State:
    """Return a state if a pruner can resume from it.

    Args:
        state: The state to load.
        own: The present state of the pruner that loads it.
        graph: The graph of the pruner's model.
        deadline: The step at which the budget is met, or 0 if there is no budget.

    Raises:
        PruneError: If the state does not fit this pruner, or if its parts contradict each other.
    """
    if not isinstance(state, dict):
        raise PruneError(
            f"load_state_dict: got {_short(state)}. {_REMEDY}. To resume from a file, read it with "
            f"torch.load first."
        )
    _check_keys("the state", state, own)
    _check_run(state, own)
    _check_groups(state, own)
    for key in own.keys() - {"settings", "schedule", "alpha", "present", "history"}:
        _check_structure(key, state[key], own[key])
    _check_numbers(state, own, deadline)
    _check_present(state, graph)
    _check_history(state["history"], own["history"][0], state["step"])
    return state


def _refuse(part: str, problem: str) -> NoReturn:
    """Raise the error for one part of a state."""
    raise PruneError(f"load_state_dict: {part} {problem}. {_REMEDY}. Nothing was changed.")


def _short(value: object) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_keys(part: str, state: State, own: State) -> None:
    """Require the same keys."""
    missing = [key for key in own if key not in state]
    if missing:
        _refuse(part, f"has no {missing[0]!r}")
    unknown = [key for key in state if key not in own]
    if unknown:
        _refuse(part, f"has the unknown key {_short(unknown[0])}")


def _check_run(state: State, own: State) -> None:
    """Require the settings and the schedule of this pruner."""
    for key in ("settings", "schedule"):
        given = state[key]
        if not isinstance(given, dict):
            _refuse(key, f"is {_short(given)}, not a dict")
        plain = all(isinstance(value, (bool, Real, str)) for value in given.values())
        if not plain or given != own[key]:
            theirs, mine = (
                _differing(one, other) if plain else one
                for one, other in ((given, own[key]), (own[key], given))
            )
            raise PruneError(
                f"load_state_dict: the state comes from a run with {key} {_short(theirs)}, but "
                f"this pruner has {_short(mine)}. Build the Pruner with the same {key}. Nothing "
                f"was changed."
            )


def _differing(one: State, other: State) -> dict[str, object]:
    """Return the entries of `one` that `other` does not have, or has with another value."""
    return {key: value for key, value in one.items() if key not in other or other[key] != value}


def _check_groups(state: State, own: State) -> None:
    """Require the gates and the channels of this model."""
    alpha, present = state["alpha"], state["present"]
    if not isinstance(alpha, dict):
        _refuse("alpha", f"is {_short(alpha)}, not a dict")
    for name, value in (*alpha.items(), ("present", present)):
        if not isinstance(value, Tensor):
            _refuse(str(name), f"is {_short(value)}, not a tensor")
    shapes = [{name: a.shape for name, a in s["alpha"].items()} for s in (state, own)]
    if shapes[0] != shapes[1] or present.shape != own["present"].shape:
        _refuse_model()
    for name, value in alpha.items():
        _check_structure(f"alpha of {name}", value, own["alpha"][name])
    _check_structure("present", present, own["present"])
    if bool((present.cpu() & ~own["present"].cpu()).any()):
        raise PruneError(
            "load_state_dict: the state has channels that compact() has removed from this model. "
            "Build the model and the Pruner again, and load the state into these. Nothing was "
            "changed."
        )


def _refuse_model() -> NoReturn:
    """Raise the error for the state of another model."""
    raise PruneError(
        "load_state_dict: the groups of the state differ from those of this model. Build the "
        "Pruner with the same fresh model, example, keep=[...], rules={...} and norms. Nothing was "
        "changed."
    )


def _check_structure(part: str, value: object, own: object) -> None:
    """Require the same keys, types, shapes and dtypes, and finite numbers."""
    if isinstance(own, Tensor):
        _check_tensor(part, value, own)
    elif isinstance(own, dict):
        if not isinstance(value, dict):
            _refuse(part, f"is {_short(value)}, not a dict")
        _check_keys(part, value, own)
        for key, inner in own.items():
            _check_structure(f"{part}[{key!r}]", value[key], inner)
    elif isinstance(own, bool):
        if not isinstance(value, bool):
            _refuse(part, f"is {_short(value)}, not True or False")
    elif not _is_number(value, Integral if isinstance(own, int) else Real):
        _refuse(part, f"is {_short(value)}, not a finite number")


def _is_number(value: object, kind: type = Real) -> TypeGuard[float]:
    """Return whether a value is a finite number of this kind, and not a bool."""
    return isinstance(value, kind) and is_number(value)


def _check_tensor(part: str, value: object, own: Tensor) -> None:
    """Require a dense tensor with the same shape and dtype, and finite values."""
    if not isinstance(value, Tensor):
        _refuse(part, f"is {_short(value)}, not a tensor")
    if value.shape != own.shape:
        _refuse(part, f"has the shape {list(value.shape)} instead of {list(own.shape)}")
    if value.dtype != own.dtype:
        _refuse(part, f"has the dtype {value.dtype} instead of {own.dtype}")
    if value.is_meta or value.layout != torch.strided:
        _refuse(part, f"is not a dense tensor with values ({value.layout} on {value.device})")
    if not bool(value.isfinite().all()):
        _refuse(part, "has values that are NaN or infinite")


def _check_numbers(state: State, own: State, deadline: int) -> None:
    """Check the ranges of values. Their structure was checked before."""
    steps, step = own["settings"]["steps"], state["step"]
    stepper = state["stepper"]
    if not 0 <= step <= steps:
        _refuse("step", f"is {step}, not between 0 and {steps}")
    if state["landed"] != (0 < deadline <= step):
        _refuse("landed", f"is {state['landed']} at step {step}")
    if not 0 < state["compacted"] <= 1:
        _refuse("compacted", f"is {state['compacted']}, not a fraction above 0 and up to 1")
    parts: dict[str, _Range] = {
        **{f"stepper[{k!r}]": (stepper[k], _is_not_negative) for k in ("scale", "shrink", "worth")},
        **{f"landing[{k!r}]": (value, _is_not_negative) for k, value in state["landing"].items()},
        **_latency_parts(state.get("latency")),
    }
    for part, (value, holds) in parts.items():
        if not holds(value):
            _refuse(part, "has values out of range")


def _is_positive(value: _Values) -> bool:
    """Return whether all numbers are above 0."""
    return bool((torch.as_tensor(value) > 0).all())


def _is_not_negative(value: _Values) -> bool:
    """Return whether all numbers are 0 or above."""
    return bool((torch.as_tensor(value) >= 0).all())


def _latency_parts(latency: State | None) -> dict[str, _Range]:
    """Return the values of the latency model with their ranges; none if latency has no limit."""
    if latency is None:
        return {}
    model = latency["model"]
    return {
        "latency['last']": (latency["last"], _is_positive),
        **{
            f"latency['model'][{key!r}]": (model[key], _is_positive)
            for key in ("whole", "steps", "scale")
        },
        "latency['model']['coefs']": (model["coefs"], _is_not_negative),
    }


def _check_present(state: State, graph: Graph) -> None:
    """Require that removed channels are closed, and that every group has its minimum."""
    present = state["present"].cpu()
    for name, group in graph.prunable.items():
        mine = present[group.offset : group.offset + group.size]
        if int(mine.sum()) < group.minimum:
            kept, minimum = int(mine.sum()), group.minimum
            _refuse("present", f"keeps {kept} channels of {name}, which needs at least {minimum}")
        if bool((state["alpha"][name].cpu()[~mine] != 0).any()):
            _refuse(f"alpha of {name}", "is not zero for channels that were removed")
    if not torch.equal(graph.without_unread(present), present):
        _refuse("present", "keeps channels that no layer reads")


def _check_history(history: object, own: State, step: int) -> None:
    """Require rows like `own`, in the order of their steps, none after the present step."""
    if not isinstance(history, list) or not history:
        _refuse("history", f"is {_short(history)}, not a list of rows")
    last = -1
    for number, row in enumerate(history):
        part = f"history[{number}]"
        if not isinstance(row, dict):
            _refuse(part, f"is {_short(row)}, not a dict")
        _check_keys(part, row, own)
        for key, value in row.items():
            _check_entry(f"{part}[{key!r}]", value, own[key])
        if not last < row["step"] <= step:
            order = f"steps must increase from row to row and not exceed {step}"
            _refuse(f"{part}['step']", f"is {row['step']}, but {order}")
        last = row["step"]


def _check_entry(part: str, value: object, own: object) -> None:
    """Require that an entry of a row is a non-negative number, or a histogram if `own` is one."""
    if not isinstance(own, list):
        if not _is_number(value) or value < 0:
            _refuse(part, f"is {_short(value)}, not a non-negative number")
        return
    bins = value if isinstance(value, list) and len(value) == len(own) else [None]
    if not all(_is_number(one, Integral) and one >= 0 for one in bins):
        _refuse(part, f"is {_short(value)}, not a histogram of {len(own)} bins")
