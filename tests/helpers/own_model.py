"""A user's file: factories of a model and of data, right and wrong ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Own(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 12, 3, 2, 1)
        self.norm = nn.BatchNorm2d(12)
        self.two = nn.Conv2d(12, 16, 3, 2, 1)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.two(self.norm(self.one(x)).relu()).relu().mean((2, 3)))
        return scores


def ten_classes() -> nn.Module:
    return Own()


def three_classes() -> nn.Module:
    return Own(3)


def pair_of_outputs() -> nn.Module:
    class Pair(Own):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x), x)  # type: ignore[return-value]

    return Pair()


def part(count: int, seed: int, classes: int = 3) -> TensorDataset:
    """Return noise in which a different colour is brighter for each class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    x = 0.3 * torch.randn(count, 3, 16, 16, generator=generator)
    x[torch.arange(count), y % 3] += 1
    return TensorDataset(x, y)


def data_sets() -> tuple[Dataset[tuple[Tensor, ...]], Dataset[tuple[Tensor, ...]]]:
    return part(60, 0), part(30, 1)


def loaders() -> list[DataLoader[tuple[Tensor, ...]]]:
    train, val = data_sets()
    return [DataLoader(train, 12, shuffle=True), DataLoader(val, 8)]


def shuffled() -> list[DataLoader[tuple[Tensor, ...]]]:
    train, val = data_sets()
    return [DataLoader(train, 12, shuffle=True), DataLoader(val, 8, shuffle=True)]


def one_part() -> Dataset[tuple[Tensor, ...]]:
    return part(60, 0)


def numbers() -> tuple[int, int]:
    return 60, 30


def no_classes() -> tuple[TensorDataset, TensorDataset]:
    return TensorDataset(part(6, 0).tensors[0]), part(6, 1)


def broad_classes() -> tuple[TensorDataset, TensorDataset]:
    x, y = part(6, 0).tensors
    return TensorDataset(x, y.float()), part(6, 1)


def negative_classes() -> tuple[TensorDataset, TensorDataset]:
    x, y = part(6, 0).tensors
    return TensorDataset(x, y - 1), part(6, 1)


def lists_of_inputs() -> tuple[list[tuple[str, int]], TensorDataset]:
    return [("picture", 0)] * 6, part(6, 1)


def nothing() -> tuple[TensorDataset, TensorDataset]:
    return part(0, 0), part(6, 1)


def many_classes() -> tuple[TensorDataset, TensorDataset]:
    return part(60, 0, classes=12), part(6, 1)
