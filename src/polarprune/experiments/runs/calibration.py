"""Re-estimate the statistics of batch norms, permanently or temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..data.task import Stream
from ..processes import share_buffers


def recalibrate(model: nn.Module, batches: Stream, count: int) -> None:
    """Replace the statistics of all batch norms by their mean over `count` batches."""
    batches.shuffle()
    torch.optim.swa_utils.update_bn(
        (batches.next()[0] for _ in range(min(count, batches.per_epoch))), model
    )
    share_buffers(model)


@contextmanager
def recalibrated(model: nn.Module, batches: Stream, count: int) -> Iterator[None]:
    """Context manager: recalibrate a model, and restore its statistics at the end."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        recalibrate(model, batches, count)
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
