"""Find by brute force which channels belong together: perturb one slice, and see what changes.

Nothing here knows the engine. A network runs under a dispatch mode. Where an operation contracts
channels with a parameter (a matrix product, a convolution), its result is replaced by that of an
undisturbed run: so a disturbance spreads through everything between two such layers, and no
further. Each slice of each parameter is disturbed in turn; the input channels of layers that move
belong to it, and everything that is so connected lives and dies together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
Slice = tuple[str, int, int]  # parameter, axis, index
OUTPUT: Slice = ("the output", 0, 0)
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv}


@dataclass
class Contraction:
    """The product of a layer: where its channels lie in what it reads, and in its parameter."""

    name: str  # of the parameter
    reads: Tensor
    axis: int  # of what it reads
    columns: list[Slice | None]  # for each channel that it reads, the slice of the parameter
    makes: int  # the axis of the parameter that makes channels
    result: Tensor


@dataclass
class Watch(TorchDispatchMode):
    """The first run records contractions; the other runs find out what changes at them."""

    named: dict[int, tuple[str, Tensor]]  # storage -> parameter
    first: list[Contraction] = field(default_factory=list)
    disturbed: tuple[str, int] | None = None  # parameter, axis
    moved: set[Slice] = field(default_factory=set)
    place: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        seen = self._contraction(func, args)
        if seen is None:
            return func(*args, **kwargs)
        if self.disturbed is None:
            seen.result = func(*args, **kwargs)
            seen.reads = seen.reads.clone()
            self.first.append(seen)
            return seen.result.clone()
        before = self.first[self.place]
        self.place += 1
        self._look(before, seen.reads)
        name, axis = self.disturbed
        ours = any(self._name(arg) == name for arg in args if isinstance(arg, Tensor))
        if not ours or (before.name == name and before.makes != axis):
            return before.result.clone()
        undisturbed = [before.reads if arg is seen.reads else arg for arg in args]
        return func(*undisturbed, **kwargs)

    def _look(self, before: Contraction, now: Tensor) -> None:
        rest = [axis for axis in range(now.dim()) if axis != before.axis]
        changed = (
            (now != before.reads).movedim(before.axis, 0).flatten(1).any(1)
            if rest
            else (now != before.reads)
        )
        for index in changed.nonzero().flatten().tolist():
            column = before.columns[index]
            self.moved.add(column or (f"input of {before.name}", before.axis, index))

    def _name(self, tensor: Tensor) -> str | None:
        found = self.named.get(tensor.untyped_storage().data_ptr())
        return found[0] if found else None

    def _contraction(self, func: Any, args: Any) -> Contraction | None:
        packet = func.overloadpacket
        if packet is aten.convolution:
            return self._convolution(args)
        if packet not in _PRODUCTS:
            return None
        one, two = args[1:3] if packet in (aten.addmm, aten.baddbmm, aten.addmv) else args[:2]
        if (self._name(one) is None) == (self._name(two) is None):
            return None  # two activations, as in attention
        weight, reads = (two, one) if self._name(two) else (one, two)
        inner = -2 if weight is two and two.dim() > 1 else weight.dim() - 1
        outer = -1 if inner == -2 else -2
        axis = reads.dim() - 1 if weight is two else max(reads.dim() - 2, 0)
        held, start = self._along(weight, inner % weight.dim())
        made = self._along(weight, outer % weight.dim())[0] if weight.dim() > 1 else -1
        name = str(self._name(weight))
        columns = [(name, held, start + k) for k in range(reads.shape[axis])]
        return Contraction(name, reads, axis, list(columns), made, reads)

    def _convolution(self, args: Any) -> Contraction | None:
        reads, weight, transposed, groups = args[0], args[1], args[6], args[8]
        name = self._name(weight)
        if name is None or 1 < groups == reads.shape[1]:
            return None  # depth-wise: channels pass one by one
        held, made = (0, 1) if transposed else (1, 0)
        if groups > 1 and transposed:
            made = -1  # an index along that axis is a channel of every group
        columns: list[Slice | None] = [
            (name, held, k) if groups == 1 or transposed else None for k in range(reads.shape[1])
        ]
        return Contraction(name, reads, 1, columns, made, reads)

    def _along(self, view: Tensor, axis: int) -> tuple[int, int]:
        """Return the axis of the parameter that a view's axis is, and where the view begins."""
        whole = self.named[view.untyped_storage().data_ptr()][1]
        stride = view.stride(axis)
        for own in range(whole.dim()):
            if whole.stride(own) == stride and whole.shape[own] >= view.shape[axis]:
                offset = view.storage_offset() - whole.storage_offset()
                return own, offset // stride % whole.shape[own]
        raise AssertionError("a view of a parameter that is no part of it")


class Oracle:
    """The sets of slices that can only be removed together, for a model on one example."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...] | dict[str, Tensor]) -> None:
        self.model, self.inputs = model, inputs
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.tensors = {name: x for name, x in tensors if x.is_floating_point() and x.numel() > 1}
        named = {
            x.untyped_storage().data_ptr(): (name, x.detach()) for name, x in self.tensors.items()
        }
        self._parents: dict[Slice, Slice] = {}
        first = Watch(named)
        self._outputs = self._run(first)
        self.contractions = first.first
        for name, tensor in self.tensors.items():
            for axis in self._axes(name, tensor):
                self._disturb_all(named, name, axis)

    def components(self) -> list[set[Slice]]:
        found: dict[Slice, set[Slice]] = {}
        for one in self._parents:
            found.setdefault(self._root(one), set()).add(one)
        return list(found.values())

    def _axes(self, name: str, tensor: Tensor) -> list[int]:
        """Return the axes that make channels; all axes if the parameter is no layer's weight."""
        owner = self.model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            return [1]
        mine = [item for item in self.contractions if item.name == name]
        if mine:
            return sorted({item.makes for item in mine if item.makes >= 0})
        if isinstance(owner, nn.modules.conv._ConvNd):
            return [0]
        return [axis for axis, size in enumerate(tensor.shape) if size > 1]

    def _disturb_all(self, named: Any, name: str, axis: int) -> None:
        tensor = self.tensors[name]
        moved = [self._disturb(named, name, axis, k) for k in range(tensor.shape[axis])]
        layer = any(item.name == name for item in self.contractions)
        if not layer and len(moved) > 1 and all(mine == moved[0] for mine in moved):
            return  # no axis of channels, or all of them are mixed, which the layers' axes show
        for index, mine in enumerate(moved):
            for other in mine:
                self._join((name, axis, index), other)

    def _disturb(self, named: Any, name: str, axis: int, index: int) -> set[Slice]:
        found: set[Slice] = set()
        part = self.tensors[name].detach().select(axis, index)
        before = part.clone()
        for step in (3.0, -3.0):
            watch = Watch(named, self.contractions, (name, axis))
            try:
                with torch.no_grad():
                    part.add_(step * (0.5 + torch.rand(part.shape, dtype=part.dtype)))
                outputs = self._run(watch)
            finally:
                with torch.no_grad():
                    part.copy_(before)
            found |= watch.moved
            if any(not torch.equal(a, b) for a, b in zip(outputs, self._outputs, strict=True)):
                found.add(OUTPUT)
        return found

    def _run(self, watch: Watch) -> list[Tensor]:
        with torch.no_grad(), _no_fused_path(), watch:
            given = self.inputs
            out = self.model(**given) if isinstance(given, dict) else self.model(*given)
        return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]

    def _root(self, one: Slice) -> Slice:
        self._parents.setdefault(one, one)
        while self._parents[one] != one:
            one = self._parents[one]
        return one

    def _join(self, one: Slice, other: Slice) -> None:
        self._parents[self._root(one)] = self._root(other)


@contextmanager
def _no_fused_path() -> Iterator[None]:
    """Turn off torch's fused attention, inside which nothing can be observed."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
