"""Refuse stored graphs that need memory out of proportion to their inputs.

`torch.zeros(10**12)` takes a few bytes in a file, and so do forty nodes that each double a tensor.
`load` refuses calls whose constants alone are too large. All other calls are checked while the
graph runs: on inputs of new sizes, each operation runs on tensors without memory first.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..tracing.model_state import Args, Kwargs
from .node_functions import CallError

_MAX_BYTES = 2**28  # of one tensor, for inputs of any size
_BYTES_PER_INPUT_BYTE = 256  # added to the limit for each byte of the inputs or of a child's output
_MAX_ITEMS = 2**17  # in lists and tuples
_MAX_OPERATIONS = 2**14  # of torch in one call
_MAX_DEPTH = 64  # of nested containers
_PLAIN_TENSORS = (Tensor, nn.Parameter)

Target: TypeAlias = Callable[..., object] | str
Operation: TypeAlias = "OpOverload[..., object]"


# --- constants in a file --------------------------------------------------------------------------


def asks_too_much(target: Target, args: Args, kwargs: Kwargs) -> bool:
    """Return whether the constants of a stored call alone exceed the limit for one tensor."""
    sizes = _SIZES.get(target)
    if sizes is not None:
        requested = [n for n in tree_leaves(sizes(args, kwargs)) if isinstance(n, (int, float))]
        return 4 * math.prod(map(float, requested)) > _MAX_BYTES
    grown = args[1:] if target in _GROWING else ()
    return any(type(leaf) is int and 4 * abs(leaf) > _MAX_BYTES for leaf in tree_leaves(grown))


def _all_sizes(args: Args, kwargs: Kwargs) -> object:
    """Return all positional arguments, or `size`."""
    return args or kwargs.get("size")


def _size_at(position: int) -> Callable[[Args, Kwargs], object]:
    """Return a function that returns the positional argument at this position, or `size`."""
    return lambda args, kwargs: args[position] if len(args) > position else kwargs.get("size")


def _first_sequence(args: Args, kwargs: Kwargs) -> object:
    """Return the first argument that is a tuple or list."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, (tuple, list))), ())


def _steps(args: Args, kwargs: Kwargs) -> object:
    """Return `steps` of `torch.linspace`."""
    return kwargs.get("steps", args[2] if len(args) > 2 else 1)


def _square(args: Args, kwargs: Kwargs) -> object:
    """Return the rows and columns of `torch.eye`."""
    return (*args, *args) if len(args) == 1 else args


def _range_length(args: Args, kwargs: Kwargs) -> object:
    """Return the number of elements of `torch.arange`."""
    given = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
    numbers = [n for n in given if isinstance(n, (int, float))]
    if len(numbers) < len(given):
        return ()
    start, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    return abs(end - start) / max(abs(step), 1e-30)


_SIZES: dict[Target, Callable[[Args, Kwargs], object]] = {
    **dict.fromkeys((torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn), _all_sizes),
    **dict.fromkeys((torch.randperm, torch.full), _size_at(0)),
    **dict.fromkeys((torch.tril_indices, torch.triu_indices), lambda args, _: args[:2]),
    torch.randint: _first_sequence,
    torch.linspace: _steps,
    torch.eye: _square,
    torch.arange: _range_length,
    "new_full": _size_at(1),
}
_GROWING_METHODS = "new_zeros new_ones new_empty expand broadcast_to repeat tile repeat_interleave"
_GROWING: set[Target] = {
    *_GROWING_METHODS.split(),
    *(torch.broadcast_to, torch.tile, torch.repeat_interleave),
    *(F.pad, torch.constant_pad_nd, F.interpolate, F.one_hot),
    *(getattr(F, f"adaptive_{kind}_pool{n}d") for kind in ("avg", "max") for n in (1, 2, 3)),
}


# --- a run ----------------------------------------------------------------------------------------


def signature(inputs: Sequence[object]) -> Hashable:
    """Return a key that is equal for inputs that lead to tensors of equal sizes, or None."""
    if not all(isinstance(x, (Tensor, int, float, str, type(None))) for x in inputs):
        return None
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in inputs)


def can_be_watched(inputs: Sequence[object]) -> bool:
    """Return whether `Watch` can be used: no other tool intercepts, and all tensors have memory."""
    intercepted = torch._C._get_tracing_state() or torch._C._len_torch_dispatch_stack()
    if intercepted or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return all(type(x) in _PLAIN_TENSORS and not x.is_meta for x in tensors)


class Watch(TorchDispatchMode):
    """Refuses operations that would create too much memory, before they run.

    It also limits the memory that all results together keep alive.
    """

    def __init__(self, module: nn.Module | None, inputs: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = [*module.parameters(), *module.buffers()] if module is not None else []
        self.base_limit = _MAX_BYTES + sum(map(_size, own))
        self.input_bytes = sum(_size(x) for x in _leaves(inputs) if isinstance(x, Tensor))
        self.children = set[str]()  # paths of the children that were called
        self.by_data = False  # whether a size or number came from the values of a tensor
        self.live_bytes, self.uses = 0, Counter[int]()  # number of uses by address
        self.held: dict[int, dict[int, int]] = {}  # slot -> address of a storage -> bytes
        self.operations_left = _MAX_OPERATIONS

    @property
    def limit(self) -> float:
        """Return the most bytes that one tensor may have."""
        return self.base_limit + _BYTES_PER_INPUT_BYTE * self.input_bytes

    def before(self, target: Target, values: Sequence[object]) -> None:
        """Check a call of plain Python, which runs no operation of torch."""
        self.operations_left = _MAX_OPERATIONS
        found = list(_leaves(values))
        first = values[0] if values else None
        if target == "tolist" and isinstance(first, Tensor):
            self.by_data = True
            _demand(first.numel() <= _MAX_ITEMS, "a long list")
        elif target in _GROWING_OPERATORS and not all(isinstance(x, Tensor) for x in found):
            _demand(_is_small(target, *values), "a large number, string or list")

    def after(self, slot: int, value: object, released: Iterable[int], child: str = "") -> None:
        """Count the memory of a result, and stop counting the slots that were released.

        Args:
            slot: The slot of the result.
            value: The result.
            released: The slots that no later call reads.
            child: The path of the module that was called. It is the model's own code, so its
                output may be of any size and raises the limit. This applies to its first call
                only, because a file could call it again and again.
        """
        storages = _storages(value)
        if child and child not in self.children:
            self.children.add(child)
            self.input_bytes = max(self.input_bytes, *storages.values(), 0)
        self.held[slot] = storages
        for address, size in storages.items():
            self.uses[address] += 1
            self.live_bytes += size if self.uses[address] == 1 else 0
        _demand(self.live_bytes <= 2 * self.limit, f"{self.live_bytes:.1e} bytes of memory")
        for old in released:
            for address, size in self.held.pop(old, {}).items():
                self.uses[address] -= 1
                self.live_bytes -= 0 if self.uses[address] else size

    def __torch_dispatch__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run an operation if the tensors that it would create are small enough."""
        kwargs = kwargs or {}
        self.operations_left -= 1
        _demand(self.operations_left > 0, "many operations in one call")
        self.by_data |= _depends_on_values(func, args)
        plain = torch.Tag.pointwise in func.tags and func._overloadpacket not in _INTERNAL_BYTES
        if not plain or _broadcast_bytes(args) > self.limit:
            for size in _created_bytes(func, args, kwargs):
                _demand(size <= self.limit, f"{size:.1e} bytes of memory")
        return func(*args, **kwargs)


def _demand(fine: bool, what: str) -> None:
    """Raise a `CallError` unless the condition holds."""
    if not fine:
        raise CallError(
            f"the stored code asks for {what}, which is out of proportion to its inputs. The file "
            f"may be forged. If you trust it, use smaller batches."
        )


def _storages(value: object) -> dict[int, int]:
    """Return the bytes of each storage in a result by address, and check numbers and strings."""
    storages = dict[int, int]()
    for leaf in _leaves([value]):
        _demand(type(leaf) is not int or abs(leaf) <= 2**63, "a large number")
        _demand(type(leaf) is not str or len(leaf) < 2**13, "a long string")
        plain = type(leaf) in _PLAIN_TENSORS
        if plain and isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def _leaves(values: Iterable[object]) -> Iterator[object]:
    """Yield the items of nested containers, up to a limit, as one may hold another many times."""
    level, left = list(islice(values, _MAX_ITEMS)), _MAX_ITEMS
    for _ in range(_MAX_DEPTH):
        inner: list[Sequence[object]] = []
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


# --- operators of Python --------------------------------------------------------------------------

_GROWING_OPERATORS: set[Target] = {
    *(operator.pow, operator.ipow, operator.mul, operator.imul),
    *(operator.mod, operator.imod, operator.iadd),
}


def _is_small(target: Target, *values: object) -> bool:
    """Return whether the result of an operator is not much larger than its operands."""
    last = values[-1]
    if target in (operator.pow, operator.ipow):
        integers = all(isinstance(n, int) for n in values)
        return not (isinstance(last, int) and integers) or abs(last) < 2**10
    if target is operator.iadd:
        return not isinstance(last, Tensor) or last.shape[:1].numel() < _MAX_ITEMS
    sequences = [x for x in values if isinstance(x, (tuple, list))]
    strings = any(isinstance(x, str) for x in values)
    counts = [*map(len, sequences), *(x for x in values if isinstance(x, int))]
    return not strings and (not sequences or math.prod(counts) < _MAX_ITEMS)


# --- operations of torch --------------------------------------------------------------------------

_aten = torch.ops.aten
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _depends_on_values(func: Operation, args: Sequence[Any]) -> bool:
    """Return whether the size or the number that an operation returns depends on values."""
    masked = func is not _aten.index.Tensor or bool(_masks(args[1]))
    return masked and not _VALUE_TAGS.isdisjoint(func.tags)


def _created_bytes(func: Operation, args: Args, kwargs: Kwargs) -> Iterator[float]:
    """Yield the bytes of the tensors that an operation will create, as far as they are known."""
    if func._overloadpacket in _INTERNAL_BYTES:
        yield float(_INTERNAL_BYTES[func._overloadpacket](*args, **kwargs))
    try:
        args, kwargs = tree_map_only(Tensor, _meta_copy, (args, kwargs))
        if _takes_device(func):
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": None}
        found = func(*args, **kwargs)
    except Exception as error:  # the sizes depend on values, or the real call will fail as well
        if "overflow" in str(error):
            yield math.inf
        return
    yield from (_size(x) for x in tree_leaves(found) if isinstance(x, Tensor))


def _broadcast_bytes(args: Sequence[object]) -> float:
    """Return an upper bound for an element-wise operation; `_created_bytes` takes longer."""
    shapes = [x.shape for x in args if isinstance(x, Tensor)]
    axes = range(1, 1 + max(map(len, shapes), default=0))
    return 16.0 * math.prod(max(s[-k] for s in shapes if len(s) >= k) for k in axes)


@cache
def _takes_device(func: Operation) -> bool:
    """Return whether an operation creates a tensor on a device that an argument names."""
    return any(argument.name == "pin_memory" for argument in func._schema.arguments)


def _size(tensor: Tensor) -> float:
    """Return the bytes of a tensor, as a float because a tensor without memory may overflow."""
    return math.prod(map(float, tensor.shape)) * tensor.element_size()


def _meta_copy(tensor: Tensor) -> Tensor:
    """Return a tensor with the same shape, strides and dtype, but without memory."""
    layout = tensor.shape, tensor.stride()
    return torch.empty_strided(*layout, dtype=tensor.dtype, device="meta")


# --- memory that operations use internally --------------------------------------------------------


def _masks(indices: Sequence[object]) -> list[Tensor]:
    """Return the indices that are masks."""
    return [x for x in indices if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]


def _nonzero_bytes(mask: Tensor) -> float:
    """Return the bytes of the positions at which a mask is set."""
    return 8.0 * int(mask.count_nonzero()) * max(1, mask.dim())


def _index_bytes(x: Tensor, indices: Sequence[Tensor | None], *_: object, **__: object) -> float:
    """Return the bytes for indexing with masks, which torch turns into positions first."""
    masks = _masks(indices)
    if not masks:
        return 0.0
    found: list[Tensor | None] = []
    for index in indices:
        if index is None:
            found.append(None)
        elif any(index is mask for mask in masks):
            count = int(index.count_nonzero())
            found += [torch.empty(count, dtype=torch.long, device="meta")] * index.dim()
        else:
            found.append(_meta_copy(index))
    return _size(_aten.index(_meta_copy(x), found)) + sum(map(_nonzero_bytes, masks))


def _convolution_bytes(x: Tensor, weight: Tensor, bias: object, *args: object) -> float:
    """Return the bytes of the unfolded input, which some kernels store."""
    out = _aten.convolution(_meta_copy(x), _meta_copy(weight), None, *args)
    source = x if args[3] else out  # args[3]: transposed
    reads = weight.numel() / max(1, weight.shape[0])
    return _size(source) / max(1, source.shape[1]) * reads


def _trilinear_bytes(one: Tensor, two: Tensor, three: Tensor, *args: Any) -> float:
    """Return the bytes of the product before it is summed; it is computed slice by slice."""
    shapes = []
    for x, added in zip((one, two, three), args, strict=False):
        shape = list(x.shape)
        for axis in added:
            shape.insert(axis, 1)
        shapes.append(shape)
    full = torch.broadcast_shapes(*shapes)
    elements = math.prod(map(float, full)) / max(1, full[args[4] if len(args) > 4 else 1])
    return float(elements * one.element_size())


def _comparison_bytes(one: Tensor, two: Tensor, *args: object, **kwargs: object) -> float:
    """Return the bytes of element-wise intermediate results; the final one may be a number."""
    full = math.prod(map(float, torch.broadcast_shapes(one.shape, two.shape)))
    return 4 * full * one.element_size()


def _bytes_of_views(count: Callable[..., float]) -> Callable[..., float]:
    """Return a function for operations that create many views, each of which takes some memory."""
    return lambda *args, **kwargs: 2**10 * count(*args, **kwargs)


_COMPARISONS = (_aten.dist, _aten.allclose, _aten.binary_cross_entropy_with_logits)
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_INTERNAL_BYTES: dict[object, Callable[..., float]] = {
    _aten.convolution: _convolution_bytes,
    _aten._trilinear: _trilinear_bytes,
    **dict.fromkeys(_COMPARISONS, _comparison_bytes),
    _aten.mvlgamma: lambda x, p: _size(x) * p,
    _aten.nonzero: _nonzero_bytes,
    _aten.masked_select: lambda x, mask: (
        16.0 * math.prod(torch.broadcast_shapes(x.shape, mask.shape))
    ),
    _aten.repeat_interleave: lambda times, **_: 8 * int(times.sum()),
    _aten.unbind: _bytes_of_views(lambda x, dim=0: x.shape[dim]),
    _aten.split: _bytes_of_views(lambda x, size, dim=0: x.shape[dim] // max(1, size)),
    **dict.fromkeys(_INDEXING, _index_bytes),
}
