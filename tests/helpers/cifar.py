"""A tiny CIFAR-10, and a network and settings for it."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from polarprune.experiments.data.cifar10 import Cifar10
from polarprune.experiments.data.images import Images
from polarprune.experiments.settings import Settings

runner = CliRunner()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 12, 3, 2, 1)
        self.bn = nn.BatchNorm2d(12)
        self.two = nn.Conv2d(12, 16, 3, 2, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.bn(self.one(x)).relu()).relu().mean((2, 3)))


TINY = Settings("tiny", baseline_epochs=3, epochs=4, batch=20, baseline_lr=0.05, lr=0.05, warm_up=1)


def images(count: int, seed: int = 0) -> Images:
    """Return images whose classes differ in colour."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 10
    x = torch.randint(0, 60, (count, 32, 32, 3), generator=generator)
    x[:, :, :, 0] += 20 * y[:, None, None] % 190
    x[:, :, :, 1] += (y[:, None, None] * 70) % 190
    return Images(x.to(torch.uint8), y)


def few_images() -> Cifar10:
    """Return a data set of a few such images."""
    return Cifar10(images(200), images(60, seed=1))


def written(folder: Path, kind: str, count: int = 20) -> Cifar10:
    """Write a tiny CIFAR-10 (`count` images a file) in one of its two published formats."""
    inner = folder / f"cifar-10-batches-{kind}"
    inner.mkdir()
    parts = [images(count, seed=k) for k in range(6)]
    for name, part in zip(
        [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"], parts, strict=True
    ):
        rows = part.x.permute(0, 3, 1, 2).reshape(len(part), -1)
        if kind == "py":
            content = {b"data": rows.numpy(), b"labels": part.y.tolist()}
            (inner / name).write_bytes(pickle.dumps(content, protocol=2))
        else:
            whole = torch.cat([part.y[:, None].to(torch.uint8), rows], 1)
            (inner / f"{name}.bin").write_bytes(bytes(whole.flatten().tolist()))
    train = Images(torch.cat([p.x for p in parts[:5]]), torch.cat([p.y for p in parts[:5]]))
    return Cifar10(train, parts[5])
