"""Make inputs that differ from the example in their values, batch size or picture size.

Code of a model may depend on sizes, so two models that agree on the example can differ on other
inputs. A model need not accept all of these inputs. The proof skips those that it refuses, and
notes why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..tracing.model_state import Example

OTHER_VALUES = "other values"
ANOTHER_BATCH = "another batch size"
_STEP = 32  # in pixels; networks halve pictures up to five times


def fresh_inputs(example: Example) -> Iterator[tuple[str, Example]]:
    """Yield inputs that differ from the example, each with its name.

    Floating-point values are those of the example in another order, so their range is the same.

    Args:
        example: The inputs to vary.

    Yields:
        Other values; another batch size; then either another picture size, or another size of
        axis 1 and of axis 2 where all tensors agree on that size.
    """
    example = tree_map_only(Tensor, _shuffled, example)
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        return
    yield OTHER_VALUES, example
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
    """Return the example with a function applied to every tensor."""
    found: Example = tree_map_only(Tensor, change, example)
    return found


def _shuffled(x: Tensor) -> Tensor:
    """Return the values of a tensor in a random order.

    Integers keep their order because they may be indices or lengths. Sparse tensors keep it too.
    """
    if not x.is_floating_point() or x.layout != torch.strided:
        return x.detach().clone()
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(x.numel(), generator=generator, device="cpu").to(x.device)
    return x.detach().reshape(-1)[order].reshape(x.shape)


def _grown(x: Tensor, axis: int, more: int, wanted: int) -> Tensor:
    """Append the first `more` entries to an axis, if the axis has the size `wanted`."""
    if x.dim() <= axis or x.shape[axis] != wanted:
        return x
    return torch.cat([x, x.narrow(axis, 0, min(more, wanted))], axis)


def _larger(x: Tensor, height: int, width: int) -> Tensor:
    """Enlarge a picture by up to `_STEP` pixels a side, if it has this height and width."""
    if x.dim() < 3 or x.shape[-2:] != (height, width):
        return x
    for axis, size in ((-2, height), (-1, width)):
        x = _grown(x, x.dim() + axis, min(size, _STEP), size)
    return x
