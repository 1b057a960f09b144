"""Check the arguments of `Pruner`, `trace`, `save` and `load` before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import PruneError
from .numbers import is_count, is_number

if TYPE_CHECKING:
    from ..channels.propagation import Flow, Rule
    from ..tracing.tape import Op

_MOST_STEPS = 2**53  # floats hold every integer up to here


def check_settings(
    wanted: Mapping[str, float | None],
    lam: float | None,
    steps: int,
    multiple_of: int | str = "auto",
) -> dict[str, float]:
    """Check the goal and the other settings of a run; return the budgets that were given.

    Args:
        wanted: The budget for each resource, or None.
        lam: λ of the paper's plain mode, or None.
        steps: The number of optimizer steps.
        multiple_of: Every kept width is a multiple of this number.

    Raises:
        PruneError: If a value is wrong, or the goal is missing or given twice.
    """
    limits = {key: value for key, value in wanted.items() if value is not None}
    _check_goal(limits, lam)
    if not is_count(steps) or steps >= _MOST_STEPS:
        raise PruneError(f"steps={steps!r}: give the number of optimizer steps of the training.")
    if multiple_of != "auto" and not is_count(multiple_of):
        raise PruneError(f'multiple_of={multiple_of!r}: give a positive integer, or "auto".')
    return {key: float(value) for key, value in limits.items()}


def check_compact(compact: object) -> None:
    """Require None or "auto" as the `compact` argument of `Pruner`."""
    if compact not in (None, "auto"):
        raise PruneError(f'compact={compact!r}: give "auto", or call pruner.compact() yourself.')


def plain_multiple(multiple_of: int | str, lam: float | None) -> int | str:
    """Return a checked `multiple_of` as plain data; "auto" is 1 with a fixed λ."""
    if isinstance(multiple_of, str):
        return multiple_of if lam is None else 1
    return int(multiple_of)


def plain_uniform(uniform: object, lam: float | None) -> bool | tuple[str, ...]:
    """Return `uniform` as plain data: True, False, or patterns of names of groups."""
    if isinstance(uniform, bool):
        found: bool | tuple[str, ...] = uniform
    else:
        given = (uniform,) if isinstance(uniform, str) else uniform
        found = tuple(given) if isinstance(given, Iterable) else ()
        if not found or not all(isinstance(pattern, str) and pattern for pattern in found):
            raise PruneError(
                f"uniform={uniform!r}: give True, or patterns of names of groups, such as "
                f"uniform=['layers.*.mlp.up_proj', 'block*.conv1']."
            )
    if found and lam is not None:
        raise PruneError(
            "conflicting settings: with lam= every channel closes by itself, so widths cannot be "
            "uniform. Give a budget (macs=0.5, params=0.3) in place of lam, or leave uniform out."
        )
    return found


def _check_goal(limits: Mapping[str, float], lam: float | None) -> None:
    """Require either budgets between 0 and 1, or a positive λ."""
    if lam is not None and limits:
        raise PruneError(
            f"conflicting settings: lam={lam} leaves the ratio open, {' and '.join(limits)} "
            f"{'sets' if len(limits) == 1 else 'set'} it. Give a budget or lam, not both."
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


def keep_patterns(keep: object) -> tuple[str, ...]:
    """Return the patterns of module names as a tuple."""
    names = (keep,) if isinstance(keep, str) else keep
    found = tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(name, str) for name in found):
        given = ", ".join(type(name).__name__ for name in found)
        raise PruneError(
            f"keep: {given} given; give names of modules, such as keep=['head', 'layer4.*'] "
            f"(model.named_modules() lists them)."
        )
    return found


def check_keep(pattern: str, hits: Sequence[object]) -> None:
    """Refuse a pattern of `keep` that matches nothing."""
    if not hits:
        raise PruneError(
            f"keep: no module with parameters matches {pattern!r}. Names are as in "
            f"model.named_modules(); * matches anything."
        )


def check_tracing(norms: object, min_channels: object) -> None:
    """Refuse other settings of `trace` and `Pruner` than a bool and a number of channels."""
    if not isinstance(norms, bool):
        raise PruneError(f"norms={norms!r}: give True or False.")
    if type(min_channels) is not int or min_channels < 0:
        raise PruneError(f"min_channels={min_channels!r}: give a number of channels, 0 or more.")


def checked_reasons(frozen: object) -> dict[str, str]:
    """Return names of groups with the reasons why they are frozen."""
    found = frozen or {}
    if not isinstance(found, Mapping) or not all(
        isinstance(one, str) for one in (*found, *found.values())
    ):
        raise PruneError(
            f"frozen={frozen!r}: give a dict from names of groups to reasons, as "
            f"frozen={{'layer1.0.conv1': 'the config has no number for it'}}."
        )
    return dict(found)


def checked_rules(rules: object) -> dict[object, Rule]:
    """Return the user's rules; an error that a rule raises names the rule."""
    if rules is None:
        return {}
    if not isinstance(rules, Mapping):
        raise PruneError(
            f"rules={rules!r}: give a dict, such as rules={{torch.ops.my.swish: rule}}."
        )
    for operation, rule in rules.items():
        if not isinstance(operation, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            raise PruneError(f"rules: {operation!r} is not an operation; give torch.ops.my.swish.")
        if not callable(rule):
            raise PruneError(
                f"rules: {rule!r} is not a rule for {operation}; give a function of (flow, op), as "
                f"docs/rules.md says."
            )
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
                f"or omit it to freeze the channels."
            ) from error

    return guarded


def check_keywords(where: str, positional: Iterable[object]) -> None:
    """Refuse positional arguments of a method that accepts only keywords."""
    for one in positional:
        raise PruneError(
            f"{where}: got {type(one).__name__} as a positional argument. Give arguments by name: "
            f"{where}(model=average) or {where}(verify=False)."
        )


def check_path(where: str, path: object) -> None:
    """Require the name of a file."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise PruneError(f"{where}: path={path!r}; give the name of a file.")


def check_new_file(file: Path, endings: Iterable[str]) -> None:
    """Require the name of a file with one of these endings, in a folder that exists."""
    if file.suffix not in endings:
        raise PruneError(f"{file}: give a name that ends in {' or '.join(endings)}.")
    if file.is_dir() or not file.parent.is_dir():
        what = "that is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise PruneError(f"{file}: {what}; give another path.")


def check_snapshots(count: object) -> None:
    """Require a number of rows that has room for the first and the last."""
    if not is_count(count) or count < 2:
        raise PruneError(f"snapshots: count={count!r}; give an integer of at least 2.")


def check_history(rows: Sequence[object]) -> None:
    """Require a report with a history."""
    if not rows:
        raise PruneError(
            "save_gate_histogram: the report has no history; take it from pruner.report()."
        )
