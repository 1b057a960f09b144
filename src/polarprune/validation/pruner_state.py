"""Check the state of a pruner as a whole, before any of it is applied.

The form comes first: keys, types, shapes and dtypes must be those of the pruner that loads the
state. Then the values: ranges, and whether the parts fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..errors import PruneError

if TYPE_CHECKING:
    from ..channels.graph import Graph

_SOURCE = "give what pruner.state_dict() returned. Nothing was changed."


def check_state(state: Any, own: dict[str, Any], graph: Graph, deadline: int) -> None:
    """Refuse a state that the pruner with the state `own` cannot resume from.

    `deadline` is the step at which the budget is met, or 0 if there is none.
    """
    if not isinstance(state, dict):
        raise PruneError(
            f"load_state_dict: {_short(state)}; give what pruner.state_dict() returned (a file of "
            f"it has to be read first: torch.load)."
        )
    _check_keys("the state", state, own)
    _check_run(state, own)
    _check_groups(state, own)
    for key in own.keys() - {"settings", "schedule", "alpha", "present", "history"}:
        _check_form(key, state[key], own[key])
    _check_numbers(state, own, deadline)
    _check_present(state, graph)
    _check_history(state["history"], own["history"][0], state["step"])


def _refuse(part: str, problem: str) -> NoReturn:
    raise PruneError(f"load_state_dict: {part} {problem}: {_SOURCE}")


def _short(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_keys(part: str, state: Mapping[Any, Any], own: Mapping[str, Any]) -> None:
    missing = [key for key in own if key not in state]
    if missing:
        _refuse(part, f"has no {missing[0]!r}")
    unknown = [key for key in state if key not in own]
    if unknown:
        _refuse(part, f"has {_short(unknown[0])}, which is unknown")


def _check_run(state: dict[str, Any], own: dict[str, Any]) -> None:
    """Require the settings of this pruner."""
    for key in ("settings", "schedule"):
        given = state[key]
        if not isinstance(given, dict):
            _refuse(key, f"is {_short(given)}")
        plain = all(isinstance(value, (bool, Real, str)) for value in given.values())
        if not plain or given != own[key]:
            theirs, mine = (
                _apart(one, other) if plain else one
                for one, other in ((given, own[key]), (own[key], given))
            )
            raise PruneError(
                f"load_state_dict: the state is of a run with {key} {_short(theirs)}, this pruner "
                f"has {_short(mine)}; build it with the same. Nothing was changed."
            )


def _apart(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `one` that `other` lacks or has with another value."""
    return {key: value for key, value in one.items() if key not in other or other[key] != value}


def _check_groups(state: dict[str, Any], own: dict[str, Any]) -> None:
    """Require the gates and channels of this model."""
    alpha, present = state["alpha"], state["present"]
    if not isinstance(alpha, dict):
        _refuse("alpha", f"is {_short(alpha)}")
    for name, value in (*alpha.items(), ("present", present)):
        if not isinstance(value, Tensor):
            _refuse(str(name), f"is {_short(value)}, not a tensor")
    shapes = [{name: a.shape for name, a in s["alpha"].items()} for s in (state, own)]
    if shapes[0] != shapes[1] or present.shape != own["present"].shape:
        _refuse_model()
    for name, value in alpha.items():
        _check_form(f"alpha of {name}", value, own["alpha"][name])
    _check_form("present", present, own["present"])
    if bool((present.cpu() & ~own["present"].cpu()).any()):
        _refuse_model()


def _refuse_model() -> NoReturn:
    raise PruneError(
        "load_state_dict: the state has other groups than this model; build the Pruner with the "
        "same fresh model, example, keep=[...], rules={...} and norms. Nothing was changed."
    )


def _check_form(part: str, value: Any, own: Any) -> None:
    """Require the same keys, types, shapes and dtypes, and finite numbers."""
    if isinstance(own, Tensor):
        _check_tensor(part, value, own)
    elif isinstance(own, dict):
        if not isinstance(value, dict):
            _refuse(part, f"is {_short(value)}, not a dict")
        _check_keys(part, value, own)
        for key, inner in own.items():
            _check_form(f"{part}[{key!r}]", value[key], inner)
    elif isinstance(own, bool):
        if not isinstance(value, bool):
            _refuse(part, f"is {_short(value)}, not True or False")
    elif not _is_number(value, Integral if isinstance(own, int) else Real):
        _refuse(part, f"is {_short(value)}, not a finite number")


def _is_number(value: Any, kind: Any = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


def _check_tensor(part: str, value: Any, own: Tensor) -> None:
    if not isinstance(value, Tensor):
        _refuse(part, f"is {_short(value)}, not a tensor")
    if value.shape != own.shape:
        _refuse(part, f"has the shape {list(value.shape)} instead of {list(own.shape)}")
    if value.dtype != own.dtype:
        _refuse(part, f"is of {value.dtype} instead of {own.dtype}")
    if value.is_meta or value.layout != torch.strided:
        _refuse(part, f"is on {value.device} as {value.layout} and holds no values")
    if not bool(value.isfinite().all()):
        _refuse(part, "has values that are NaN or infinite")


def _check_numbers(state: dict[str, Any], own: dict[str, Any], deadline: int) -> None:
    """Check the ranges of values whose form was checked."""
    steps, step = own["settings"]["steps"], state["step"]
    stepper = state["stepper"]
    if not 0 <= step <= steps:
        _refuse("step", f"is {step}, not within 0 and {steps}")
    if state["landed"] != (0 < deadline <= step):
        _refuse("landed", f"is {state['landed']} at step {step}")
    if not 0 < state["compacted"] <= 1:
        _refuse("compacted", f"is {state['compacted']}, not a share")
    parts = {
        **{f"stepper[{k!r}]": (stepper[k], _is_not_negative) for k in ("scale", "shrink", "worth")},
        **{f"landing[{k!r}]": (value, _is_not_negative) for k, value in state["landing"].items()},
        **_latency_parts(state.get("latency")),
    }
    for part, (value, holds) in parts.items():
        if not holds(value):
            _refuse(part, "has values out of range")


def _is_positive(value: Any) -> bool:
    return bool((torch.as_tensor(value) > 0).all())


def _is_not_negative(value: Any) -> bool:
    return bool((torch.as_tensor(value) >= 0).all())


def _latency_parts(
    latency: dict[str, Any] | None,
) -> dict[str, tuple[Any, Callable[[Any], bool]]]:
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


def _check_present(state: dict[str, Any], graph: Graph) -> None:
    """Require that removed channels are closed, and that needed channels are present."""
    present = state["present"].cpu()
    for name, group in graph.prunable.items():
        mine = present[group.offset : group.offset + group.size]
        if int(mine.sum()) < group.minimum:
            _refuse("present", f"leaves {int(mine.sum())} channels of {name}, which needs more")
        if bool((state["alpha"][name].cpu()[~mine] != 0).any()):
            _refuse(f"alpha of {name}", "is not zero for channels that were removed")
    if not torch.equal(graph.settle(present), present):
        _refuse("present", "keeps channels that no layer reads")


def _check_history(history: Any, own: dict[str, Any], step: int) -> None:
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
            _refuse(f"{part}['step']", f"is {row['step']}, after step {last} in a run of {step}")
        last = row["step"]


def _check_entry(part: str, value: Any, own: Any) -> None:
    """Check an entry of a row: a number from 0 on, or a histogram."""
    if not isinstance(own, list):
        if not _is_number(value) or value < 0:
            _refuse(part, f"is {_short(value)}, not a number from 0 on")
        return
    bins = isinstance(value, list) and len(value) == len(own)
    if not bins or not all(_is_number(one, Integral) and one >= 0 for one in value):
        _refuse(part, f"is {_short(value)}, not a histogram of {len(own)} bins")
