"""Inputs that differ from the example: other values, another batch size, another picture size.

A proof on the example alone says nothing about code that reads sizes. A model need not accept these
inputs: the caller compares two models on those that the first one accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..tracing.model_state import Example

ANOTHER_BATCH = "another batch size"
_STEP = 32  # pixels: networks halve pictures up to five times


def fresh_inputs(example: Example) -> Iterator[tuple[str, Example]]:
    """Each with its name. Floats are those of the example, in another order: their range stays."""
    example = tree_map_only(Tensor, _shuffled, example)
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        return
    yield "other values", example
    batch = tensors[0].shape[0]
    yield ANOTHER_BATCH, _changed(example, lambda x: _grown(x, 0, 1, batch))
    pictures = [x for x in tensors if x.dim() == 4 and x.is_floating_point()]
    if pictures:
        height, width = pictures[0].shape[2:]
        yield "another picture size", _changed(example, lambda x: _larger(x, height, width))
    for axis in (1, 2) if not pictures else ():
        lengths = {x.shape[axis] for x in tensors if x.dim() > axis}
        if len(lengths) == 1:
            (length,) = lengths
            grow = partial(_grown, axis=axis, more=1, wanted=length)
            yield f"another size of axis {axis}", _changed(example, grow)


def _changed(example: Example, change: Callable[[Tensor], Tensor]) -> Example:
    found: Any = tree_map_only(Tensor, change, example)
    return found  # type: ignore[no-any-return]


def _shuffled(x: Tensor) -> Tensor:
    """Integers stay in their order: they may be indices or lengths. So do sparse tensors."""
    if not x.is_floating_point() or x.layout != torch.strided:
        return x.detach().clone()
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(x.numel(), generator=generator, device="cpu").to(x.device)
    return x.detach().reshape(-1)[order].reshape(x.shape)


def _grown(x: Tensor, axis: int, more: int, wanted: int) -> Tensor:
    """With the first entries once more at the end, if the axis has the wanted size."""
    if x.dim() <= axis or x.shape[axis] != wanted:
        return x
    return torch.cat([x, x.narrow(axis, 0, min(more, wanted))], axis)


def _larger(x: Tensor, height: int, width: int) -> Tensor:
    if x.dim() < 3 or x.shape[-2:] != (height, width):
        return x
    for axis, size in ((-2, height), (-1, width)):
        x = _grown(x, x.dim() + axis, min(size, _STEP), size)
    return x
