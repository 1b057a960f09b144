"""Count the MACs of an operation by torch's own formulas (1 multiply-add = 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, shape_wrapper


def _fused_attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *rest: object, **options: object
) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _with_vector(*shapes: object, **options: object) -> int:
    return 2 * max(math.prod(shape) for shape in shapes if isinstance(shape, torch.Size))


# Formulas that torch lacks: the fused attention for CPUs, and products of a matrix and a vector.
# Which kernel runs depends on strides and on requires_grad, so a narrower model may take another.
MISSING_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_attention,
    **{getattr(torch.ops.aten, name): _with_vector for name in ("mv", "addmv", "dot", "vdot")},
}
_WRAPPED = {func: shape_wrapper(formula) for func, formula in MISSING_FORMULAS.items()}


def macs_of(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object
) -> int:
    """Return the MACs of a call, or 0 for operations without a formula."""
    packet = func._overloadpacket
    formula = _WRAPPED.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    by_shape = getattr(formula, "__wrapped__", None)  # skips torch's search for tensors in trees
    if by_shape and isinstance(out, Tensor) and not kwargs:
        shapes = (x.shape if isinstance(x, Tensor) else x for x in args)
        return int(by_shape(*shapes, out_shape=out.shape)) // 2
    return int(formula(*args, **kwargs, out_val=out)) // 2
