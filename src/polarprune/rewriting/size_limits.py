"""Stored graphs may not take memory out of proportion to their inputs.

`torch.zeros(10**12)` takes a few bytes in a file, and so do forty nodes that each double a tensor.
What constants alone ask for is refused by `load`. For the rest, a graph from a file is watched when
it is run on inputs of sizes that are new: every operation is tried on tensors without memory first.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import PruneError

_BYTES = 2**28  # of one tensor, whatever the inputs are
_TIMES = 256  # and as much again for each byte of the inputs, or of what the module's children give
_ITEMS = 2**17  # in lists and tuples
_CALLS = 2**14  # operations of torch in one call
_DEEPEST = 64  # containers in containers
_PLAIN = (Tensor, nn.Parameter)


# --- constants of a file --------------------------------------------------------------------------


def asks_too_much(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the constants of a stored call alone make more than any call may make."""
    sizes = _SIZES.get(target)
    if sizes is not None:
        asked = tree_leaves(sizes(args, kwargs))
        return 4 * math.prod(float(n) for n in asked if isinstance(n, (int, float))) > _BYTES
    grown = args[1:] if target in _GROWING else ()
    return any(type(leaf) is int and 4 * abs(leaf) > _BYTES for leaf in tree_leaves(grown))


def _all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args or kwargs.get("size")


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("size")


def _next(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("size")


def _in_brackets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, (tuple, list))), ())


def _last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("steps", args[2] if len(args) > 2 else 1)


def _squared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (*args, *args) if len(args) == 1 else args


def _range(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
    if not all(isinstance(n, (int, float)) for n in given):
        return ()
    start, end, step = (0, *given, 1) if len(given) == 1 else (*given, 1)[:3]
    return abs(end - start) / max(abs(step), 1e-30)


Sizes = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_SIZES: dict[Any, Sizes] = {
    **dict.fromkeys((torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn), _all),
    **dict.fromkeys((torch.randperm, torch.full), _first),
    **dict.fromkeys((torch.tril_indices, torch.triu_indices), lambda args, _: args[:2]),
    torch.randint: _in_brackets, torch.linspace: _last, torch.eye: _squared,
    torch.arange: _range, "new_full": _next,
}  # fmt: skip
_GROWING = {
    "new_zeros", "new_ones", "new_empty", "expand", "broadcast_to", torch.broadcast_to, "repeat",
    "tile", torch.tile, "repeat_interleave", torch.repeat_interleave, F.pad, torch._C._nn.pad,
    torch.constant_pad_nd, F.interpolate, F.one_hot, torch._C._nn.one_hot,
    *(getattr(F, f"adaptive_{kind}_pool{n}d") for kind in ("avg", "max") for n in (1, 2, 3)),
}  # fmt: skip


# --- a run ----------------------------------------------------------------------------------------


def signature(inputs: Sequence[Any]) -> Any:
    """Inputs that have the same lead to tensors of the same sizes; None for those that may not."""
    if not all(isinstance(x, (Tensor, int, float, str, type(None))) for x in inputs):
        return None
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in inputs)


def can_be_watched(inputs: Sequence[Any]) -> bool:
    """Not where another tool looks at the operations, and not tensors without memory."""
    looked_at = torch._C._get_tracing_state() or torch._C._len_torch_dispatch_stack()
    if looked_at or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return all(type(x) in _PLAIN and not x.is_meta for x in tensors)


class Watch(TorchDispatchMode):
    """Refuses operations that make too much, before they run, and more than may be kept."""

    def __init__(self, module: nn.Module | None, inputs: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = [*module.parameters(), *module.buffers()] if module is not None else []
        self.least = _BYTES + sum(map(_size, own))
        self.given = sum(_size(x) for x in _leaves(inputs) if isinstance(x, Tensor))
        self.children = set[str]()  # that were called
        self.by_data = False  # sizes or numbers came from the values in a tensor
        self.live, self.uses = 0, Counter[int]()  # bytes that are kept; how often, by place
        self.held: dict[int, dict[int, int]] = {}  # slot -> place in memory -> bytes
        self.left = _CALLS

    @property
    def allowed(self) -> float:
        return self.least + _TIMES * self.given

    def before(self, target: Any, values: Sequence[Any]) -> None:
        """Before a call: what no operation of torch tells, as it is Python's."""
        self.left = _CALLS
        found = list(_leaves(values))
        first = values[0] if values else None
        if target == "tolist" and isinstance(first, Tensor):
            self.by_data = True
            _demand(first.numel() <= _ITEMS, "a long list")
        elif target in _PYTHON and not all(isinstance(value, Tensor) for value in found):
            _demand(_is_small(target, *values), "a large number, text or list")

    def after(self, slot: int, value: Any, spent: Iterable[int], child: str = "") -> None:
        """After a call: what it gave is kept, and what is not needed any more is not.

        `child`: the module that was called. It is the model's own, and may give what it likes; but
        a file could call it again and again.
        """
        places = dict[int, int]()
        for leaf in _leaves([value]):
            _demand(type(leaf) is not int or abs(leaf) <= 2**63, "a large number")
            _demand(type(leaf) is not str or len(leaf) < 2**13, "a long text")
            if type(leaf) in _PLAIN and leaf.layout is torch.strided:
                memory = leaf.untyped_storage()
                places[memory.data_ptr()] = memory.nbytes()
        if child and child not in self.children:
            self.children.add(child)
            self.given = max(self.given, *places.values(), 0)
        self.held[slot] = places
        for place, size in places.items():
            self.uses[place] += 1
            self.live += size if self.uses[place] == 1 else 0
        _demand(self.live <= 2 * self.allowed, f"{self.live:.1e} bytes of memory")
        for old in spent:
            for place, size in self.held.pop(old, {}).items():
                self.uses[place] -= 1
                self.live -= 0 if self.uses[place] else size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.left -= 1
        _demand(self.left > 0, "many operations in one call")
        self.by_data |= _goes_by_data(func, args)
        plain = torch.Tag.pointwise in func.tags and func._overloadpacket not in _INSIDE
        for size in [] if plain and _spread(args) <= self.allowed else _made(func, args, kwargs):
            _demand(size <= self.allowed, f"{size:.1e} bytes of memory")
        return func(*args, **kwargs)


class TooMuch(PruneError):
    """The reason; where it is, `interpret` knows."""


def _demand(fine: bool, what: str) -> None:
    if not fine:
        raise TooMuch(
            f"the stored code asks for {what}, out of proportion to its inputs. The file may have "
            f"been forged; if you trust it, give smaller batches."
        )


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What is in containers; not endless, though one may hold another many times."""
    level, left = list(islice(values, _ITEMS)), _ITEMS
    for _ in range(_DEEPEST):
        inner = []
        for value in level:
            if isinstance(value, (tuple, list)):
                inner.append(value)
            elif isinstance(value, dict):
                inner.append(list(value.values()))
            elif isinstance(value, slice):
                inner.append([value.start, value.stop, value.step])
            else:
                yield value
        level = list(islice(chain.from_iterable(inner), left))
        left -= len(level)
        _demand(left > 0, "a long list")
        if not level:
            return
    _demand(False, "a long list")


# --- Python's operators ---------------------------------------------------------------------------

_PYTHON = {operator.pow, operator.ipow, operator.mul, operator.imul, operator.mod, operator.imod,
           operator.iadd}  # fmt: skip


def _is_small(target: Any, *values: Any) -> bool:
    """Of operators whose result may be much larger than what they are given."""
    if target in (operator.pow, operator.ipow):
        return not all(isinstance(n, int) for n in values) or abs(values[-1]) < 2**10
    if target is operator.iadd:
        return not isinstance(values[-1], Tensor) or values[-1].shape[:1].numel() < _ITEMS
    counts = [len(x) if isinstance(x, (tuple, list)) else x
              for x in values if isinstance(x, (tuple, list, int))]  # fmt: skip
    listed = any(isinstance(value, (tuple, list)) for value in values)
    text = any(isinstance(value, str) for value in values)
    return not text and (not listed or math.prod(counts) < _ITEMS)


# --- torch's operations ---------------------------------------------------------------------------

_aten = torch.ops.aten
_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _goes_by_data(func: Any, args: Any) -> bool:
    masked = func is not _aten.index.Tensor or bool(_masks(args[1]))
    return masked and not _BY_DATA.isdisjoint(func.tags)


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[float]:
    """Bytes of the tensors that an operation will make, as far as they can be told before."""
    if func._overloadpacket in _INSIDE:
        yield float(_INSIDE[func._overloadpacket](*args, **kwargs))
    try:
        args, kwargs = tree_map_only(Tensor, _shadow, (args, kwargs))
        if _takes_device(func):
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": None}
        found = func(*args, **kwargs)
    except Exception as error:  # sizes go by values, or it will fail anyway
        if "overflow" in str(error):
            yield math.inf
        return
    yield from (_size(x) for x in tree_leaves(found) if isinstance(x, Tensor))


def _spread(args: Any) -> float:
    """Bytes of what goes place by place over all tensors, at most: to look closer takes longer."""
    shapes = [x.shape for x in args if isinstance(x, Tensor)]
    axes = range(1, 1 + max(map(len, shapes), default=0))
    return 16.0 * math.prod(max(s[-k] for s in shapes if len(s) >= k) for k in axes)


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "pin_memory" for argument in func._schema.arguments)


def _size(tensor: Tensor) -> float:
    return math.prod(map(float, tensor.shape)) * tensor.element_size()  # which may be too large


def _shadow(tensor: Tensor) -> Tensor:
    """The same without memory."""
    form = tensor.shape, tensor.stride()
    return torch.empty_strided(*form, dtype=tensor.dtype, device="meta")


def _masks(indices: Sequence[Any]) -> list[Tensor]:
    return [x for x in indices if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]


def _places(mask: Tensor) -> float:
    return 8.0 * int(mask.count_nonzero()) * max(1, mask.dim())


def _indexed(x: Tensor, indices: Sequence[Any], *args: Any, **kwargs: Any) -> float:
    """Masks become places first."""
    masks = _masks(indices)
    if not masks:
        return 0.0
    found: list[Any] = []
    for index in indices:
        masked = any(index is mask for mask in masks)
        places = (
            torch.empty(int(index.count_nonzero()), dtype=torch.long, device="meta")
            if masked
            else index
        )
        found += [places] * index.dim() if masked else [places if index is None else _shadow(index)]
    result = _size(_aten.index(_shadow(x), found))
    return result + sum(map(_places, masks))


def _convolved(x: Tensor, weight: Tensor, bias: Any, *args: Any) -> float:
    """Some kernels write down what is read for each place."""
    out = _aten.convolution(_shadow(x), _shadow(weight), None, *args)
    source = x if args[3] else out
    reads = weight.numel() / max(1, weight.shape[0])
    return _size(source) / max(1, source.shape[1]) * reads


def _trilinear(one: Tensor, two: Tensor, three: Tensor, *args: Any) -> float:
    shapes = []
    for x, added in zip((one, two, three), args, strict=False):
        shape = list(x.shape)
        for axis in added:
            shape.insert(axis, 1)
        shapes.append(shape)
    full = torch.broadcast_shapes(*shapes)
    elements = math.prod(map(float, full)) / max(1, full[args[4] if len(args) > 4 else 1])
    return float(elements * one.element_size())


def _compared(one: Tensor, two: Tensor, *args: Any, **kwargs: Any) -> float:
    """Location by place, with a few steps between, though a single number may come out."""
    full = math.prod(map(float, torch.broadcast_shapes(one.shape, two.shape)))
    return 4 * full * one.element_size()


def _pieces(count: Callable[..., float]) -> Callable[..., float]:
    """So many tensors are made at once; each takes some memory even if it is a view."""
    return lambda *args, **kwargs: 2**10 * count(*args, **kwargs)


_INSIDE: dict[Any, Callable[..., float]] = {
    _aten.convolution: _convolved,
    _aten._trilinear: _trilinear,
    **dict.fromkeys(
        (_aten.dist, _aten.allclose, _aten.binary_cross_entropy_with_logits), _compared
    ),
    _aten.mvlgamma: lambda x, p: _size(x) * p,
    _aten.nonzero: _places,
    _aten.masked_select: lambda x, mask: (
        16.0 * math.prod(torch.broadcast_shapes(x.shape, mask.shape))
    ),
    _aten.repeat_interleave: lambda times, **_: 8 * int(times.sum()),
    _aten.unbind: _pieces(lambda x, dim=0: x.shape[dim]),
    _aten.split: _pieces(lambda x, size, dim=0: x.shape[dim] // max(1, size)),
    **dict.fromkeys(
        (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_), _indexed
    ),
}
