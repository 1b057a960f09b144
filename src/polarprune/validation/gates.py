"""Check the arguments and the input of a `Gate` that users create by hand."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from ..errors import PruneError


def check_gate(size: object, axis: object, dtype: object) -> None:
    """Raise unless these are valid arguments of `Gate`."""
    if not isinstance(size, Integral) or isinstance(size, bool) or int(size) < 1:
        raise PruneError(f"Gate: size={size!r}; pass the number of channels, at least 1.")
    if not isinstance(axis, Integral) or isinstance(axis, bool):
        raise PruneError(f"Gate: axis={axis!r}; pass the axis of the channels, an integer.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PruneError(
            f"Gate: dtype={dtype!r}; pass a floating-point dtype, such as torch.float32."
        )


def check_gate_input(x: object, size: int, axis: int) -> None:
    """Raise unless `x` is a floating-point tensor with `size` channels along `axis`.

    Without this check, a wrong shape could broadcast, and an integer dtype would round the gates to
    0 and 1.
    """
    given = type(x).__name__
    if isinstance(x, Tensor):
        fits = -x.dim() <= axis < x.dim() and x.shape[axis] == size
        if fits and (x.is_floating_point() or x.is_complex()):
            return
        given = f"{x.dtype} of shape {list(x.shape)}"
    raise PruneError(
        f"Gate: the input is {given}; pass a floating-point tensor with {size} channels along "
        f"axis {axis}, or create Gate(size, axis) to match this input."
    )
