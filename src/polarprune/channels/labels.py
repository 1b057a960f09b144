"""Labels: integers that say which channel an element of a tensor belongs to.

A tensor carries *layers*. A layer is an int64 tensor with the tensor's number of axes, each axis
either of full size or of size 1 where the label does not vary along it. A weight has one layer for
each axis; an activation usually has one, along its channels. Labels that are joined live and die
together. All joins are collected and resolved at once (`roots`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WIDE = 1 << 31  # two labels as one number


@dataclass(frozen=True)
class Axis:
    """One axis of a parameter or buffer, and the range of labels it was given."""

    tensor: str
    axis: int
    start: int
    size: int


class Labels:
    """Hands out labels and keeps what is said about them: joined, or frozen for a reason."""

    def __init__(self) -> None:
        self.count = 0
        self.axes: list[Axis] = []
        self._pairs: list[Tensor] = []  # joined since roots were looked for
        self._root = torch.arange(0)
        self._joined: dict[Any, tuple[Tensor, Tensor]] = {}  # by where they lie, kept there
        self._frozen: list[tuple[Tensor, str]] = []
        self.binding = True  # else nothing is frozen

    def fresh(self, size: int) -> Tensor:
        self.count += size
        return torch.arange(self.count - size, self.count)

    def of_tensor(self, name: str, shape: tuple[int, ...]) -> list[Tensor]:
        """A fresh label for each index of each axis; an axis of one has nothing to lose."""
        layers = []
        for axis, size in enumerate(shape):
            if size > 1:
                self.axes.append(Axis(name, axis, self.count, size))
                layers.append(along(self.fresh(size), axis, len(shape)))
        return layers

    def join(self, left: Tensor, right: Tensor) -> None:
        """Element by element after broadcasting; the next tape often says the same once more."""
        key = (_place(left), _place(right))
        if key[0] != key[1] and key not in self._joined:
            self._joined[key] = left, right
            a, b = torch.broadcast_tensors(left, right)
            self._pairs.append((a * _WIDE + b).flatten())

    def freeze(self, layer: Tensor, reason: str) -> None:
        if self.binding:
            self._frozen.append((compress(layer).flatten(), reason))

    def flatten_onto(self, layer: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Join along all axes but these, and give the layer back as it varies along these only."""
        first = layer
        for axis in range(layer.dim()):
            if axis not in axes:
                first = first.narrow(axis, 0, 1)
        self.join(layer, first)
        return first

    def roots(self) -> Tensor:
        """For every label the smallest label it is joined with (connected components)."""
        root = torch.cat([self._root, torch.arange(len(self._root), self.count)])
        if self._pairs:
            pairs = torch.cat(self._pairs).unique()
            root = _connected(root, pairs // _WIDE, pairs % _WIDE)
        self._pairs, self._root = [], root
        return root

    def reasons(self, root: Tensor) -> tuple[Tensor, list[str]]:
        """For every component the number of the reason that froze it first, or -1; the reasons."""
        texts = list(dict.fromkeys(reason for _, reason in self._frozen))
        numbers = {reason: number for number, reason in enumerate(texts)}
        first = torch.full((self.count,), -1)
        for labels, reason in reversed(self._frozen):
            first[root[labels]] = numbers[reason]
        return first, texts


def _place(layer: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return layer.data_ptr(), layer.shape, layer.stride()


def _connected(root: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What the roots become when these labels are joined, pair by pair."""
    while len(a):
        low = torch.minimum(root[a], root[b])
        new = root.clone()
        new.scatter_reduce_(0, root[a], low, "amin")
        new.scatter_reduce_(0, root[b], low, "amin")
        while not torch.equal(new, new[new]):
            new = new[new]
        apart = (new[a] != new[b]).nonzero().flatten()  # what is together stays so
        root, a, b = new, a[apart], b[apart]
    return root


def along(vector: Tensor, axis: int, dim: int) -> Tensor:
    """A vector of labels as a layer of a `dim`-dimensional tensor."""
    shape = [1] * dim
    shape[axis] = -1
    return vector.reshape(shape)


def support(layer: Tensor) -> tuple[int, ...]:
    """The axes along which a layer varies."""
    return tuple(axis for axis, size in enumerate(layer.shape) if size > 1)


def compress(layer: Tensor) -> Tensor:
    """Axes along which the labels turn out constant become axes of size 1."""
    for axis in support(layer):  # first what is expanded, for nothing: it may be huge
        if layer.stride(axis) == 0:
            layer = layer.narrow(axis, 0, 1)
    for axis in support(layer):
        first = layer.narrow(axis, 0, 1)
        if bool((layer == first).all()):
            layer = first
    return layer


def reshape(layer: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    """The layer of `tensor.reshape(new)`, expanding only the axes it varies along."""
    grown, target = list(layer.shape), [1] * len(new)
    for ins, outs in _blocks(old, new):
        if any(layer.shape[axis] > 1 for axis in ins):
            for axis in ins:
                grown[axis] = old[axis]
            for axis in outs:
                target[axis] = new[axis]
    return compress(layer.expand(grown).reshape(target))


def _blocks(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of old and new axes that hold the same number of elements."""
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
