"""Several training processes, started by `torchrun`: one GPU each, and only the first one writes.

Every function also works in a single process, where it does nothing or returns its argument.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn


@contextmanager
def process_group(device: str) -> Iterator[str]:
    """Context manager: join the other processes, if any, and yield the device of this one."""
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
    """Return the rank of this process and the number of processes."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place, and return it."""
    if distributed.is_initialized():
        distributed.all_reduce(tensor)
    return tensor


def from_first_process(tensor: Tensor) -> Tensor:
    """Overwrite a tensor with that of the first process, and return it."""
    if distributed.is_initialized():
        distributed.broadcast(tensor, 0)
    return tensor


def share_buffers(model: nn.Module) -> None:
    """Overwrite all buffers with those of the first process.

    Batch norms have statistics of the batches of their own process, and DistributedDataParallel
    copies them only at the next step.
    """
    for buffer in model.buffers():
        from_first_process(buffer)


def wait_for_all() -> None:
    """Wait until all processes are here, so that they can read what the first one wrote."""
    if distributed.is_initialized():
        distributed.barrier()
