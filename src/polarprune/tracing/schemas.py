"""Answer questions about an ATen operation from its schema and tags.

torch declares for every operation which arguments it writes to, whether it returns views, and
whether its result depends on values or on random numbers. The answers are cached: a run asks them
for every operation that it records.
"""

from __future__ import annotations

from functools import cache

import torch
from torch._ops import OpOverload


@cache
def name_of(func: OpOverload) -> str:
    """Return the name without namespace and overload: `aten::add.Tensor` -> `add`."""
    return str(func._schema.name).split("::")[-1]


@cache
def reads_data(func: OpOverload) -> bool:
    """Return True if the values of its inputs become a Python number or an output shape."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)


@cache
def draws_random_numbers(func: OpOverload) -> bool:
    """Return True if it uses a random number generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def returns_views(func: OpOverload) -> bool:
    """Return True if its outputs share memory with its first argument."""
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


@cache
def written_arguments(func: OpOverload) -> list[tuple[int, str]]:
    """Return position and name of the arguments that it writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(k, a.name) for k, a in arguments if a.alias_info and a.alias_info.is_write]


@cache
def reads_shape_only(func: OpOverload) -> bool:
    """Return True for `zeros_like`, `new_zeros` and the like, which ignore the values."""
    return name_of(func).startswith("new_") or name_of(func).endswith("_like")


@cache
def changes_shape_in_place(func: OpOverload) -> bool:
    """Return True for `squeeze_`, `transpose_` and the like."""
    return torch.Tag.inplace_view in func.tags


@cache
def is_mutable(func: OpOverload) -> bool:
    """Return True if it writes to one of its arguments."""
    return bool(func._schema.is_mutable)
