"""Compare models in a precision that is wide enough to distinguish rounding from a wrong cut.

Two models that compute the same function differ by rounding: by about 1e-7 in float32, and by 1e-2
in bfloat16, where a wrong cut may differ as little. So models are compared in a wider precision if
their own is too coarse. If a part still computes in float32, such as a scripted norm, the whole
comparison is only as precise as float32.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..errors import PruneError
from ..tracing.copying import copy_model
from ..tracing.model_state import Args, Example, Kwargs, named_tensors
from ..tracing.recorder import record
from .repeatable_runs import TorchFunction

_LOW = (torch.bfloat16, torch.float16)
_NARROW = {
    torch.float64: (*_LOW, torch.float32),
    torch.float32: _LOW,
}
_CASTS: dict[TorchFunction, torch.dtype] = {
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.half: torch.float16,
    torch.Tensor.float: torch.float32,
}


_READS_BYTES: set[TorchFunction] = {torch.Tensor.view}  # if it is given a dtype


class StaysWide(TorchFunctionMode):
    """Compute in a wide precision where the model's code asks for a narrower one.

    Transformers often convert to float32 explicitly, for example in norms and in softmax.
    """

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self.wide = wide

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run one function of torch with the wide dtype in place of narrower ones."""
        if func in _CASTS and _CASTS[func] in _NARROW[self.wide]:
            return cast(Tensor, args[0]).to(self.wide)
        if func in _READS_BYTES:
            return func(*args, **(kwargs or {}))
        args = tuple([self._widened(value) for value in args])
        if kwargs is None:
            return func(*args)
        return func(*args, **{key: self._widened(value) for key, value in kwargs.items()})

    def _widened(self, argument: object) -> object:
        """Return the wide dtype for a narrower one, and any other argument as it is."""
        if type(argument) is torch.dtype and argument in _NARROW[self.wide]:
            return self.wide
        return argument


class WidensOnReading(StaysWide):
    """Compute in a wide precision with narrower weights: an operation converts those that it reads.

    This avoids a converted copy of the whole model, which takes at least twice its memory.
    """

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run one function of torch with wide tensors in place of narrower ones."""
        name = str(getattr(func, "__name__", ""))
        if name in _READS_NO_VALUES:
            return self._widened(func(*args, **(kwargs or {})))
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        first = args[:1] if writes else ()  # it is converted when it is written to
        args = (*first, *(tree_map_only(Tensor, self._read, one) for one in args[len(first) :]))
        named = {key: tree_map_only(Tensor, self._read, one) for key, one in (kwargs or {}).items()}
        return super().__torch_function__(func, types, args, named)

    def _read(self, x: Tensor) -> Tensor:
        return x.to(self.wide) if x.dtype in _NARROW[self.wide] else x


# Functions that are cheap, or refer to a tensor: properties, sizes, memory.
_READS_NO_VALUES = {
    *("__get__", "__set__", "__len__", "__hash__", "__bool__", "size", "dim", "numel", "stride"),
    *("element_size", "storage_offset", "data_ptr", "untyped_storage", "is_contiguous"),
    *("is_floating_point", "is_complex", "requires_grad_", "get_device"),
}


class StaysDouble(StaysWide):
    """Compute in float64 where the model's code asks for float32, bfloat16 or float16."""

    def __init__(self) -> None:
        super().__init__(torch.float64)


def is_low(model: nn.Module) -> bool:
    """Return whether a model has weights in bfloat16 or float16."""
    return any(tensor.dtype in _LOW for _, tensor in named_tensors(model))


def in_precision(
    model: nn.Module, example: Example, wide: torch.dtype
) -> tuple[nn.Module, Example]:
    """Return a copy of the model and of the example, in which no tensor is narrower."""

    def widened(x: Tensor) -> Tensor:
        return x.to(wide) if x.dtype in _NARROW[wide] else x

    found: Example = tree_map_only(Tensor, widened, example)
    return copy_model(model)._apply(widened), found


def in_double(model: nn.Module, example: Example) -> tuple[nn.Module, Example]:
    """Return a copy of the model and of the example in float64."""
    return in_precision(model, example, torch.float64)


def computes_in_double(model: nn.Module, example: Example) -> bool:
    """Return whether all of a model in float64 computes in float64, under `StaysDouble`.

    Code that torch cannot intercept, such as scripted functions, may convert to float32.

    Raises:
        PruneError: The model does not run in float64.
    """
    with StaysDouble():
        tape = record(model, example, training=False)
    made = (value for op in tape.ops for value in op.outs if not value.is_integer)
    return all(value.itemsize >= 8 for value in made if value.shape)


def check_rounded(small: nn.Module, exact: nn.Module) -> None:
    """Raise unless the tensors of a model are those of the compared model, rounded."""
    wanted = dict(named_tensors(exact))
    for name, tensor in named_tensors(small):
        if tensor.dtype in _LOW:
            _check_close(name, tensor, wanted.get(name))


def _check_close(name: str, tensor: Tensor, wanted: Tensor | None) -> None:
    limit = 4 * torch.finfo(tensor.dtype).eps  # gates, their product with the weight: two roundings
    if wanted is not None and wanted.shape == tensor.shape:
        wanted = wanted.to(tensor.device)
        if not tensor.numel():
            return
        if bool(((tensor.to(wanted) - wanted).abs() <= limit * wanted.abs().max()).all()):
            return
    raise PruneError(
        f"{name} of the pruned model is not the rounded weight that was compared. Nothing was "
        f"exported. Please report this model."
    )
