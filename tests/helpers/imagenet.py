"""A tiny network for images of ImageNet's size, and its settings."""

from __future__ import annotations

from torch import Tensor, nn

from polarprune.experiments.settings import Settings


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 7, 8)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 6, 3, 2)
        self.head = nn.Linear(6, 1000)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.two(self.norm(self.one(x)).relu()).relu().mean((2, 3)))
        return scores


TINY = Settings(
    "tiny", "imagenet", baseline_epochs=8, epochs=3, batch=4, baseline_lr=0.1, lr=0.05, warm_up=0
)
