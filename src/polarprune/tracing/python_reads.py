"""Detect Python code that reads values or sizes of tensors.

`x.tolist()` and `x.numpy()` bypass the dispatcher, so the recorder of operations does not see them.
Sizes (`x.shape`, `x.size(1)`, `len(x)`) are replaced with numbers that remember where they were
read (`watched_sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .model_state import Args, Kwargs
from .op_recorder import OpRecorder
from .source_lines import user_line
from .watched_sizes import watched_count, watched_size, watched_sizes

_VALUE_READS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__repr__,
}
_SPLITS = {torch.tensor_split, Tensor.tensor_split}  # at positions that may be given as a tensor
_READS = {
    *_VALUE_READS,
    *_SPLITS,
    Tensor.data_ptr,
    Tensor.__reduce_ex__,
    Tensor.data.__set__,  # type: ignore[attr-defined]
}
_COUNTS = {Tensor.numel, Tensor.nelement, torch.numel}
_SIZES = {Tensor.shape.__get__, Tensor.size, Tensor.__len__, *_COUNTS}  # type: ignore[attr-defined]


class PythonReads(TorchFunctionMode):
    """Tells the recorder which values and sizes Python code reads.

    Args:
        recorder: The recorder of the run.
        watch_sizes: Replace sizes with watched numbers.
    """

    def __init__(self, recorder: OpRecorder, watch_sizes: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.watch_sizes = watch_sizes

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        """Call the function, and note what it reads."""
        kwargs = kwargs or {}
        if func in _READS:
            self._note_read(func, args, kwargs)
        found = func(*args, **kwargs)
        if self.watch_sizes and func in _SIZES and self.recorder.watches_sizes:
            return self._watched(func, args, kwargs, found)
        return found

    def _note_read(self, func: object, args: Args, kwargs: Kwargs) -> None:
        values = self.recorder.values((args, kwargs))
        self.recorder.note_access(values)
        if func in _VALUE_READS:
            self.recorder.note_read(values)
        elif func in _SPLITS:
            self.recorder.note_read(self.recorder.values((args[1:], kwargs)))

    def _watched(
        self, func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: object
    ) -> object:
        """Return a size that was read, as a number that remembers where."""
        value = self.recorder.value(args[0] if args else kwargs["input"])
        log = self.recorder.sizes
        if isinstance(found, torch.Size):
            return torch.Size(watched_sizes(value, log))
        if func in _COUNTS:
            return watched_count(value, log)
        if func is Tensor.__len__:  # Python's `len` returns a plain number whatever we return
            first = watched_size(value, 0, log)
            log.compared(first.source, first.source.constant(found), user_line())
            return found
        axis = args[1] if len(args) > 1 else kwargs["dim"]
        return watched_size(value, value.axis(int(axis)), log)
