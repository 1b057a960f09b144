"""Sort the parameters of a gated model into the groups that an optimizer gets."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..validation.optimizers import check_matches

_GATED = re.compile(r"parametrizations\.(\w+)\.original\d*$")
NoDecay = bool | str | Iterable[str]
ParameterGroup = dict[str, Any]  # as an optimizer takes it


def weight_groups(
    model: nn.Module,
    gates: Iterable[nn.Parameter],
    options: Mapping[str, object],
    no_decay: NoDecay,
) -> list[ParameterGroup]:
    """Return the groups of all parameters but the gates.

    Args:
        model: The gated model.
        gates: α of all gates.
        options: Options of every group, such as the learning rate.
        no_decay: What gets a group of its own, without weight decay (see `Pruner.param_groups`).

    Returns:
        One group, or two if `no_decay` selects anything.
    """
    mine = {id(alpha) for alpha in gates}
    weights = [(name, p) for name, p in model.named_parameters() if id(p) not in mine]
    spared = _not_decayed(weights, no_decay)
    groups = [{"params": [p for _, p in weights if id(p) not in spared], **options}]
    if spared:
        others = [p for _, p in weights if id(p) in spared]
        groups.append({"params": others, **options, "weight_decay": 0.0})
    return groups


def _not_decayed(weights: list[tuple[str, nn.Parameter]], no_decay: NoDecay) -> set[int]:
    """Return the ids of the parameters that are not decayed."""
    if isinstance(no_decay, bool):
        return {id(p) for _, p in weights if no_decay and p.dim() < 2}
    patterns = [no_decay] if isinstance(no_decay, str) else no_decay
    spared = set[int]()
    for pattern in patterns:
        found = {id(p) for name, p in weights if fnmatch.fnmatch(_as_before(name), pattern)}
        check_matches(pattern, found)
        spared |= found
    return spared


def _as_before(name: str) -> str:
    """Return the name that a parameter had before it was gated."""
    return _GATED.sub(r"\1", name)
