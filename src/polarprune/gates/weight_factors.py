"""Expand gates to factors of the weights that read them, and sum gradients back to the gates.

There are two ways, with the same results up to the order of sums:

- `ElementFactors` indexes one vector of all gates along the elements of all weights. This takes few
  kernels, which matters on an accelerator.
- `RowFactors` has a row of factors for each weight, which broadcasts. This uses little memory,
  which matters on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..tracing.model_state import on_host
from .gate import GatedWeight

_RUN = 64  # elements that are added up in one row


class Factors(Protocol):
    """Which gates belong to which elements of some weights.

    Attributes:
        readers: For each weight, the gate vectors that it reads.
    """

    readers: list[list[int]]

    def spread(self, values: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Turn the values of each gate vector into factors that broadcast with each weight."""

    def gather(self, products: list[Tensor | None]) -> dict[int, Tensor]:
        """Return for each gate vector the sums of the elements that belong to its gates.

        Args:
            products: For each weight, a tensor of its shape, or None if it counts as zero. Vectors
                that only such weights read may be missing in the result.
        """

    def like(self, slot: int, tensor: Tensor) -> Tensor:
        """Return a tensor of the shape of a weight in a form that `gather` takes."""


class RowFactors:
    """Rows of factors for weights that read one gate vector, in order, along axis 1.

    Args:
        weights: The weights; only their shapes are used.
        readers: For each weight, its gate vector as the only element of a list.
        sizes: Number of channels of each gate vector.
    """

    def __init__(self, weights: list[Tensor], readers: list[list[int]], sizes: list[int]) -> None:
        self.readers, self.sizes = readers, sizes
        self.forms = [(1, *weight.shape[1:]) for weight in weights]
        self.strides = [_strides(form) for form in self.forms]
        self.counts = [math.prod(form) for form in self.forms]
        self.starts = _offsets(self.counts)
        offsets, pieces = _offsets(sizes), []
        for (gate,), form in zip(readers, self.forms, strict=True):
            numbers = torch.arange(form[1], device="cpu") + offsets[gate]
            pieces.append(numbers.repeat_interleave(math.prod(form[2:])))
        self.index = torch.cat(pieces)  # for each element of all rows, the number of its gate

    def spread(self, values: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return a row of factors for each weight."""
        self.index = self.index.to(weights[0].device)
        rows = torch.cat([*values]).to(weights[0].dtype).index_select(0, self.index)
        views = zip(self.forms, self.strides, self.starts, strict=True)
        return [rows.as_strided(form, stride, start) for form, stride, start in views]

    def gather(self, products: list[Tensor | None]) -> dict[int, Tensor]:
        """Sum over rows first, then over the elements of each channel."""
        some = next(product for product in products if product is not None)
        rows = [
            some.new_zeros(count) if product is None else product.sum(0).reshape(-1)
            for product, count in zip(products, self.counts, strict=True)
        ]
        summed = some.new_zeros(sum(self.sizes)).index_add(0, self.index, torch.cat(rows))
        return dict(enumerate(summed.split(self.sizes)))

    def like(self, slot: int, tensor: Tensor) -> Tensor:
        """Return the tensor itself, because any strides are allowed."""
        return tensor


class ElementFactors:
    """The gate of each element of all weights, in the order of memory.

    Gates are numbered over all gate vectors. The number after the last one stands for frozen
    channels, whose factor is 1.

    Attributes:
        readers: For each weight, the gate vectors that it reads.
        forms: Shape and strides of each weight.
        sizes: Number of channels of each gate vector.
        index: For each element of all weights, the number of its gate.
        first, second: Two steps of the sum over the elements of each gate, see `_runs`.
    """

    def __init__(
        self,
        weights: list[Tensor],
        parts: list[GatedWeight],
        sizes: list[int],
        readers: list[list[int]],
    ) -> None:
        self.readers, self.sizes = readers, sizes
        self.forms = [(weight.shape, weight.stride()) for weight in weights]
        self.device = weights[0].device
        with on_host():
            index = torch.cat(
                [self._index(*one) for one in zip(weights, parts, readers, strict=True)]
            )
            first, second = _runs(index, sum(self.sizes))
        self.index, self.first, self.second = (x.to(self.device) for x in (index, first, second))

    def _index(self, weight: Tensor, part: GatedWeight, reads: list[int]) -> Tensor:
        """Return the number of the gate of each element of one weight, in the order of memory."""
        offsets = _offsets(self.sizes)
        numbers = [torch.arange(self.sizes[gate]) + offsets[gate] for gate in reads]
        numbers.append(torch.tensor([sum(self.sizes)]))  # unit -1: a frozen channel
        shape = [1] * weight.dim()
        shape[part.axis] = -1
        along_axis = torch.cat(numbers)[part.units.cpu()].reshape(shape)
        form = torch.empty_strided(weight.shape, weight.stride(), dtype=torch.long)
        return _flat(form.copy_(along_axis))

    def fits(self, weights: list[Tensor]) -> bool:
        """Return whether this was made for weights of these shapes, strides and device."""
        forms = [(weight.shape, weight.stride()) for weight in weights]
        return forms == self.forms and weights[0].device == self.device

    def spread(self, values: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Turn one value for each gate into a factor for each element of each weight."""
        flat = torch.cat([*values, values[0].new_ones(1)]).to(weights[0].dtype)
        wide = flat.index_select(0, self.index)
        starts = _offsets([shape.numel() for shape, _ in self.forms])
        pairs = zip(self.forms, starts, strict=True)
        return [wide.as_strided(shape, stride, start) for (shape, stride), start in pairs]

    def gather(self, products: list[Tensor | None]) -> dict[int, Tensor]:
        """Return for each gate the sum of all elements that belong to it, over all weights."""
        some = next(product for product in products if product is not None)
        tensors = [
            self._zeros(slot, some) if product is None else product
            for slot, product in enumerate(products)
        ]
        for positions in (self.first, self.second):
            flat = torch.cat([*map(_flat, tensors), some.new_zeros(1)])
            tensors = [flat[positions].sum(1)]
        return dict(enumerate(tensors[0].split(self.sizes)))

    def _zeros(self, slot: int, some: Tensor) -> Tensor:
        shape, stride = self.forms[slot]
        return torch.empty_strided(shape, stride, dtype=some.dtype, device=some.device).zero_()

    def like(self, slot: int, tensor: Tensor) -> Tensor:
        """Return a tensor with the strides of the weight of a slot."""
        shape, stride = self.forms[slot]
        if tensor.stride() == stride:
            return tensor
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as a vector, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _offsets(sizes: list[int]) -> list[int]:
    """Return where each part starts if parts of these sizes are concatenated."""
    return [sum(sizes[:k]) for k in range(len(sizes))]


def _runs(index: Tensor, gates: int) -> tuple[Tensor, Tensor]:
    """Return two index matrices that sum the elements of each gate without atomic additions.

    Row by row, the first adds up to `_RUN` elements of one gate; the second adds all those sums of
    one gate. The order of additions is fixed, so results are the same in every run. An index one
    past the end stands for zero.
    """
    order = index.argsort(stable=True)
    order = order[index[order] < gates]
    label = index[order]
    counts = torch.bincount(label, minlength=gates)
    rank = torch.arange(len(label)) - (counts.cumsum(0) - counts)[label]
    pieces, row = torch.stack([label, rank // _RUN]).unique(dim=1, return_inverse=True)
    first = torch.cat([order, torch.tensor([len(index)])])[_padded(row, pieces.shape[1])]
    return first, _padded(pieces[0], gates)


def _padded(row: Tensor, rows: int) -> Tensor:
    """Return a matrix with the positions of the elements of each row; `row` is sorted.

    Short rows are filled with the position one past the end.
    """
    counts = torch.bincount(row, minlength=rows)
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    matrix = torch.full((rows, int(counts.max())), len(row))
    matrix[row, column] = torch.arange(len(row))
    return matrix
