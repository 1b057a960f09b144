"""Labels: integers that say which channel an element of a tensor belongs to.

A tensor carries *layers*. A layer is an int64 tensor with as many axes as the tensor. Each axis has
either the full size, or size 1 if the label does not vary along it. A weight has one layer for each
axis; an activation usually has one, along its channels. Joined labels belong to the same unit: they
are removed together. Joins are collected and resolved all at once (`Labels.roots`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .reasons import Reason

_MOST_LABELS = 1 << 31  # a pair (a, b) is stored as the int64 a * _MOST_LABELS + b

MemoryKey = tuple[int, torch.Size, tuple[int, ...]]  # address, shape and stride of a layer


@dataclass(frozen=True)
class Axis:
    """One axis of a parameter or buffer, and the range of labels it received."""

    tensor: str
    axis: int
    start: int
    size: int


class Labels:
    """Creates labels, and records which labels are joined, and which are frozen and why."""

    def __init__(self) -> None:
        self.count = 0
        self.axes: list[Axis] = []
        self.binding = True  # while False, `freeze` has no effect
        self._pairs: list[Tensor] = []  # joined since the last call of `roots`
        self._root = torch.arange(0)
        # Holds the layers as well, so that their addresses are not reused.
        self._joined: dict[tuple[MemoryKey, MemoryKey], tuple[Tensor, Tensor]] = {}
        self._frozen: list[tuple[Tensor, Reason]] = []

    def fresh(self, size: int) -> Tensor:
        """Return a vector of `size` new labels."""
        self.count += size
        return torch.arange(self.count - size, self.count)

    def of_tensor(self, name: str, shape: tuple[int, ...]) -> list[Tensor]:
        """Return layers with a new label for each index of each axis that is longer than 1."""
        layers = []
        for axis, size in enumerate(shape):
            if size > 1:
                self.axes.append(Axis(name, axis, self.count, size))
                layers.append(along(self.fresh(size), axis, len(shape)))
        return layers

    def join(self, left: Tensor, right: Tensor) -> None:
        """Join labels element by element, after broadcasting.

        The second tape usually repeats the joins of the first. They are skipped.
        """
        key = (_memory_key(left), _memory_key(right))
        if key[0] != key[1] and key not in self._joined:
            self._joined[key] = left, right
            a, b = torch.broadcast_tensors(left, right)
            self._pairs.append((a * _MOST_LABELS + b).flatten())

    def freeze(self, layer: Tensor, reason: str) -> None:
        """Freeze all labels of a layer, and those they are joined with."""
        if self.binding:
            self._frozen.append((compress(layer).flatten(), Reason(reason)))

    def flatten_onto(self, layer: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Join along all axes except `axes`, and return the layer that varies along `axes` only."""
        first = layer
        for axis in range(layer.dim()):
            if axis not in axes:
                first = first.narrow(axis, 0, 1)
        self.join(layer, first)
        return first

    def roots(self) -> Tensor:
        """Return for every label the smallest label it is joined with (connected components)."""
        root = torch.cat([self._root, torch.arange(len(self._root), self.count)])
        if self._pairs:
            pairs = torch.cat(self._pairs).unique()
            root = _connected(root, pairs // _MOST_LABELS, pairs % _MOST_LABELS)
        self._pairs, self._root = [], root
        return root

    def reasons(self, root: Tensor) -> tuple[Tensor, list[Reason]]:
        """Return why labels are frozen.

        Args:
            root: The result of `roots`.

        Returns:
            For every root the number of the reason that froze it first, or -1; and the reasons.
        """
        different = list(dict.fromkeys(reason for _, reason in self._frozen))
        numbers = {reason: number for number, reason in enumerate(different)}
        first = torch.full((self.count,), -1)
        for labels, reason in reversed(self._frozen):
            first[root[labels]] = numbers[reason]
        return first, different


def _memory_key(layer: Tensor) -> MemoryKey:
    return layer.data_ptr(), layer.shape, layer.stride()


def _connected(root: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the roots after joining `a` and `b` element by element.

    Each round replaces the roots of both ends by the smaller one and then follows roots to the end.
    Later rounds skip the pairs that are connected by then.
    """
    while len(a):
        low = torch.minimum(root[a], root[b])
        new = root.clone()
        new.scatter_reduce_(0, root[a], low, "amin")
        new.scatter_reduce_(0, root[b], low, "amin")
        while not torch.equal(new, new[new]):
            new = new[new]
        apart = (new[a] != new[b]).nonzero().flatten()
        root, a, b = new, a[apart], b[apart]
    return root


def along(vector: Tensor, axis: int, dim: int) -> Tensor:
    """Return a vector of labels as a layer that varies along one axis.

    Args:
        vector: A label for each index of the axis.
        axis: The axis.
        dim: How many axes the tensor has.

    Returns:
        The labels with size 1 along all other axes.

    Example:
        >>> from polarprune.rules import along
        >>> along(torch.arange(8), 1, 4).shape
        torch.Size([1, 8, 1, 1])
    """
    shape = [1] * dim
    shape[axis] = -1
    return vector.reshape(shape)


def support(layer: Tensor) -> tuple[int, ...]:
    """Return the axes along which a layer varies.

    Args:
        layer: A layer of labels.

    Returns:
        The axes, in their order.

    Example:
        >>> from polarprune.rules import support
        >>> support(torch.zeros(1, 8, 1, 1))
        (1,)
    """
    return tuple(axis for axis, size in enumerate(layer.shape) if size > 1)


def with_leading_axes(layer: Tensor, dim: int) -> Tensor:
    """Return the layer with axes of size 1 in front, as broadcasting adds them."""
    return layer.reshape((1,) * (dim - layer.dim()) + tuple(layer.shape))


def compress(layer: Tensor) -> Tensor:
    """Reduce axes along which the labels are constant to size 1."""
    for axis in support(layer):  # expanded axes first: they cost nothing, and may be huge
        if layer.stride(axis) == 0:
            layer = layer.narrow(axis, 0, 1)
    for axis in support(layer):
        first = layer.narrow(axis, 0, 1)
        if bool((layer == first).all()):
            layer = first
    return layer


def reshape(layer: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    """Return the layer of `tensor.reshape(new)`. Only axes along which it varies are expanded."""
    grown, target = list(layer.shape), [1] * len(new)
    for ins, outs in _blocks(old, new):
        if any(layer.shape[axis] > 1 for axis in ins):
            for axis in ins:
                grown[axis] = old[axis]
            for axis in outs:
                target[axis] = new[axis]
    return compress(layer.expand(grown).reshape(target))


def _blocks(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return the shortest runs of old and new axes that hold the same number of elements."""
    blocks, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        ins, outs = [], []
        if i < len(old):
            ins.append(i)
            i += 1
        if j < len(new):
            outs.append(j)
            j += 1
        while (a := math.prod(old[k] for k in ins)) != (b := math.prod(new[k] for k in outs)):
            if a < b:
                ins.append(i)
                i += 1
            else:
                outs.append(j)
                j += 1
        blocks.append((ins, outs))
    return blocks
