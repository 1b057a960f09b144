"""Modules that shape their own code: forwards they chose, tensors they remember or compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nets import around, randomise
from test_awkward import OUTPUT, cut, cut_at_random, images
from torch import Tensor, nn

import polarprune as pp


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


class ToldNorm(nn.Module):
    """A norm that keeps the shape that it normalises, as torch's own does."""

    def __init__(self, width: int, rms: bool) -> None:
        super().__init__()
        self.shape, self.rms = (width,), rms
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, normalized_shape=self.shape, weight=self.weight, eps=1e-6)
        return F.layer_norm(x, self.shape, self.weight)


class Mlp(nn.Module):
    def __init__(self, rms: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = ToldNorm(8, rms), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_norms_that_are_told_their_shape_follow_the_stream() -> None:
    for rms in (True, False):
        model = nn.Sequential(nn.Linear(5, 8), Mlp(rms), Mlp(rms), nn.Linear(8, 3))
        model, inputs = randomise(model).double(), (torch.randn(2, 4, 5).double(),)
        graph = pp.trace(model, inputs, norms=True)
        assert {name: group.size for name, group in graph.open.items()} == {
            "0": 8, "1.up": 12, "2.up": 12,
        }  # fmt: skip
        cut_at_random(model, graph, inputs)
