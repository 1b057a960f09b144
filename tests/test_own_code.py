"""Modules that shape their own code: forwards they chose, tensors they remember or compute."""

from __future__ import annotations

import torch
from nets import around
from test_awkward import OUTPUT, cut, images
from torch import Tensor, nn


class Chooses(nn.Module):
    """One of two forwards, taken when the module is made."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.forward = self.by_split if split else self.by_slice  # type: ignore[method-assign]

    def by_split(self, x: Tensor) -> Tensor:
        first, rest = x.split([4, 8], 1)
        return torch.cat([self.conv(first), rest], 1)

    def by_slice(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x[:, :4]), x[:, 4:]], 1)


def test_forward_that_a_module_chose_is_written_anew() -> None:
    for split in (True, False):
        model = around(12, 12, Chooses(split))
        done = cut(
            model,
            (images(),),
            opened={"0.0": 4, "0.0#2": 8, "1.conv": 4},
            whole={"2.2": OUTPUT},
        )
        assert vars(model[1])["forward"].__self__ is model[1]
        assert list(done.graph.rewired) == ["1"]
