"""How many elements a call makes of the numbers it is given: stored graphs may not make too many.

`torch.zeros(10**12)` takes a few bytes in a file. In a graph from a file, such a call is refused
before it allocates anything if its result would be out of proportion to the inputs of the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from .errors import PruneError

_FLOOR = 2**26  # elements that any call may make
_TIMES = 256  # and this many for every element of the module's inputs

Count = Callable[[tuple[Any, ...], dict[str, Any]], float]


def limited(target: Any, call: Callable[..., Any]) -> Callable[..., Any] | None:
    """The call with the number of elements of the module's inputs as its first argument, which
    refuses to make too many; None for calls whose results no number decides."""
    count = _COUNTS.get(target)
    if count is None:
        return None

    def checked(inputs: int, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            made = count(args, kwargs)
            if made > _FLOOR + _TIMES * inputs:
                name = getattr(target, "__name__", target)
                raise PruneError(
                    f"{name}: the stored code of this module asks for {made:.1e} elements, for "
                    f"inputs of {inputs}. The file may have been forged."
                )
        return call(*args, **kwargs)

    return checked


def asks_too_much(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the constants of a stored call alone make more than any call may make."""
    if target not in _COUNTS:
        return False
    leaves = tree_leaves((args, kwargs))
    known = not any(isinstance(leaf, fx.Node) for leaf in leaves)
    large = any(type(leaf) is int and abs(leaf) > _FLOOR for leaf in leaves)
    return large or (known and _COUNTS[target](args, kwargs) > _FLOOR)


def elements_of(inputs: Sequence[Any]) -> int:
    return sum(item.numel() for item in inputs if isinstance(item, Tensor))


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _product(sizes: Any) -> float:
    sizes = sizes if isinstance(sizes, (tuple, list)) else (sizes,)
    return math.prod(float(n) for n in sizes if isinstance(n, int))


def _sizes_at(place: int) -> Count:
    """Sizes one by one from this argument on, or all in one."""

    def count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        first = _given(args, kwargs, place, "size")
        return _product(first if isinstance(first, (tuple, list)) else args[place:])

    return count


def _range(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    named = [kwargs[name] for name in ("start", "end", "step") if name in kwargs]
    start, end, step = {1: (0, *args, *named, 1), 2: (*args, *named, 1)}.get(
        len(args) + len(named), (*args, *named)
    )[:3]
    return abs(float(end) - float(start)) / max(abs(float(step)), 1e-30)


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return _product([n for n in (*args, *kwargs.values()) if type(n) is int and n > 0])


def _expanded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    first = _given(args, kwargs, 1, "size")
    sizes = list(first) if isinstance(first, (tuple, list)) else list(args[1:])
    lead = len(sizes) - args[0].dim()
    return _product([n if n != -1 or k < lead else args[0].shape[k - lead]
                     for k, n in enumerate(sizes)])  # fmt: skip


def _repeated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    times = _given(args, kwargs, 1, "repeats")
    times = kwargs.get("dims", times)
    if isinstance(times, Tensor):
        return float(times.sum()) * float(args[0].numel())
    return float(args[0].numel()) * _product(
        times if isinstance(times, (tuple, list)) else args[1:]
    )


def _padded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    amounts, shape = list(_given(args, kwargs, 1, "pad")), list(args[0].shape)
    for k in range(0, len(amounts) - 1, 2):
        shape[-1 - k // 2] += sum(n for n in amounts[k : k + 2] if isinstance(n, int))
    return _product(shape)


def _resized(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    size = _given(args, kwargs, 1, "size" if "size" in kwargs else "output_size")
    scale = _given(args, kwargs, 2, "scale_factor")
    lead, space = args[0].shape[:2], args[0].shape[2:]
    if size is not None:
        sizes = list(size) if isinstance(size, (tuple, list)) else [size] * len(space)
        return _product([*lead, *(space[k] if n is None else n for k, n in enumerate(sizes))])
    scales = scale if isinstance(scale, (tuple, list)) else [scale or 1] * len(space)
    return _product([*lead, *space]) * math.prod(float(x) for x in scales)


def _one_hot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    classes = _given(args, kwargs, 1, "num_classes")
    if not isinstance(classes, int) or classes < 0:
        classes = int(args[0].max()) + 1 if args[0].numel() else 1
    return float(args[0].numel()) * classes


def _squared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[0].numel()) * (args[0].shape[-1] if args[0].dim() else 1)


_POOLS = [getattr(F, f"adaptive_{kind}_pool{n}d") for kind in ("avg", "max") for n in (1, 2, 3)]
_TARGETS: dict[Count, tuple[Any, ...]] = {
    _sizes_at(0): (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.full),
    _sizes_at(1): ("new_zeros", "new_ones", "new_empty", "new_full"),
    lambda args, kwargs: _product(next((x for x in (*args, *kwargs.values())
                                        if isinstance(x, (tuple, list))), 1)): (torch.randint,),
    _range: (torch.arange,),
    _numbers: (torch.linspace, torch.randperm, torch.tril_indices, torch.triu_indices),
    lambda args, kwargs: _numbers(args, kwargs) ** (3 - len(args)): (torch.eye,),
    _expanded: ("expand", "broadcast_to", torch.broadcast_to),
    _repeated: ("repeat", "tile", torch.tile, "repeat_interleave", torch.repeat_interleave),
    _padded: (F.pad, torch._C._nn.pad, torch.constant_pad_nd),
    _resized: (F.interpolate, *_POOLS, torch.adaptive_avg_pool1d),
    _one_hot: (F.one_hot, torch._C._nn.one_hot),
    _squared: ("diag_embed", torch.diag_embed, "diag", torch.diag, "diagflat", torch.diagflat),
}  # fmt: skip
_COUNTS = {target: count for count, targets in _TARGETS.items() for target in targets}
