"""One process, or several that `torchrun` started: each has its GPU, the first one writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Meet the others, if there are any; the device of this process."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield device
        return
    on_gpu = device.startswith("cuda")
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def rank_and_count() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def summed(tensor: Tensor) -> Tensor:
    """Over all processes."""
    if distributed.is_initialized():
        distributed.all_reduce(tensor)
    return tensor


def agreed(tensor: Tensor) -> Tensor:
    """What the first process has."""
    if distributed.is_initialized():
        distributed.broadcast(tensor, 0)
    return tensor


def agree(model: nn.Module) -> None:
    """On the buffers of the first process: each has statistics of its own batches, and they are
    copied at the next step only."""
    if distributed.is_initialized():
        for buffer in model.buffers():
            distributed.broadcast(buffer, 0)


def wait_for_all() -> None:
    """The first writes what the others read."""
    if distributed.is_initialized():
        distributed.barrier()
