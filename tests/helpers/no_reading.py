"""A dispatch mode that refuses what a CUDA graph cannot hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoReading(TorchDispatchMode):
    """Raises where a value goes from the device to the host or back, or a size depends on values:
    a CUDA graph cannot hold that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            raise AssertionError("a tensor is made of Python numbers")
        waits = torch.Tag.data_dependent_output in func.tags
        if torch.Tag.dynamic_output_shape in func.tags:  # index only by a mask
            kinds = [x.dtype for x in tree_leaves(args[1:]) if isinstance(x, Tensor)]
            waits |= func.overloadpacket is not torch.ops.aten.index or torch.bool in kinds
        if waits:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
