"""Every setting of torch that holds for the process and that polarprune changes for a while.

Unlike a patch, such a setting has an official switch. The context managers restore what they found.
`seed_generators` restores nothing: its callers are inside of `tracing.model_state.restored`, which
puts the generators back. Only the programs that own the process (`experiments` and `cli`) call
`torch.manual_seed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with this many threads on the CPU; 0 leaves the number as it is."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def convolutions_tuned() -> Iterator[None]:
    """Let cuDNN try its algorithms for each convolution, and keep the fastest."""
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = True
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def seed_generators(seed: int, devices: Iterable[torch.device] = ()) -> None:
    """Seed the generators of the CPU and of these GPUs; the caller restores them.

    The devices are not asked for as long as no GPU is in use.

    `torch.manual_seed` also notes the seed for every kind of device that is not in use yet, with a
    stack trace each time. That is slow, and would override the user's seed when the device is used.
    """
    torch.default_generator.manual_seed(seed)
    if not torch.cuda.is_initialized():
        return
    for device in set(devices):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
