"""ImageNet, or any folder of pictures in the layout of PyTorch's own example: DIR/train/CLASS/…,
DIR/val/CLASS/…, and the networks that the paper prunes there.

Pictures are read by workers while the model trains. With `torchrun` every process has its own GPU
and its own part of each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from ..errors import PruneError
from .data import taught
from .processes import agreed, rank_and_count, summed
from .recipes import Recipe
from .task import Stream, Task, evaluating
from .voc import MEAN, STD

CPU = torch.device("cpu")
_WORKERS = 8
_EVALUATED = 128  # pictures at once

Pictures = Dataset[tuple[Tensor, int]]


class MobileNetV1(nn.Module):
    """Howard et al., 2017: 3 × 3 on each channel, then 1 × 1 over all of them, thirteen times."""

    stages = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5,
              (1024, 2), (1024, 1))  # fmt: skip

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers, wide = [_conv(3, 32, 3, 2)], 32
        for width, stride in self.stages:
            layers += [_conv(wide, wide, 3, stride, groups=wide), _conv(wide, width, 1)]
            wide = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).mean((2, 3)))
        return scores


def _conv(wide: int, width: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(wide, width, size, stride, size // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())


def from_torchvision(name: str, weights: str | None = None, **options: Any) -> nn.Module:
    """A model of torchvision, new or with the weights that are published with it."""
    try:
        from torchvision.models import get_model
    except (ImportError, RuntimeError) as error:
        raise PruneError(
            f"{name} is torchvision's, which cannot be loaded ({error}). Install one that fits "
            f"this torch: pip install polarprune[vision]."
        ) from error
    try:
        model: nn.Module = get_model(name, weights=weights, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise PruneError(
            f"{name}: its weights {weights!r} could not be had ({error}). Give them as "
            f"--baseline FILE (--start FILE, if they are of a part), or train them here with "
            f"--set pretrained=null."
        ) from error
    return model


def resnet50() -> nn.Module:
    return from_torchvision("resnet50")


def mobilenet_v2() -> nn.Module:
    return from_torchvision("mobilenet_v2")


@dataclass(frozen=True)
class ImageNet(Task):
    """Pictures to learn from and pictures to score on, and where they go."""

    train: Pictures
    test: Pictures
    device: torch.device = CPU

    def to(self, device: str | torch.device) -> ImageNet:
        return replace(self, device=torch.device(device))

    def held_out(self, count: int) -> ImageNet:
        """Held out are seen as those to score on: no crops are drawn."""
        order = torch.randperm(size(self.train), generator=torch.Generator().manual_seed(10))
        plain = folder_of(self.train, learning=False)
        first, rest = order[:count].tolist(), order[count:].tolist()
        return replace(self, train=Subset(self.train, rest), test=Subset(plain, first))

    def stream(self, recipe: Recipe) -> Loaded:
        return Loaded(self.train, recipe.batch, self.device)

    def example(self) -> Tensor:
        return torch.stack([self.test[k][0] for k in range(self.examples)]).to(self.device)

    def answers(self, model: nn.Module) -> Tensor:
        """Each process has its share of the pictures; all get to know all answers."""
        found = torch.zeros(size(self.test), dtype=torch.long, device=self.device)
        with evaluating(model):
            for places, x, _ in self._mine():
                found[places] = model(x).argmax(1)
        return summed(found)

    def score(self, answers: Tensor) -> float:
        return float((answers.cpu() == classes_of(self.test)).double().mean())

    def loss(self, model: nn.Module) -> float:
        total = torch.zeros((), device=self.device)
        with evaluating(model):
            for _, x, y in self._mine():
                total += F.cross_entropy(model(x).float(), y, reduction="sum")
        return float(summed(total)) / size(self.test)

    def _mine(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Batches of this process, and where they are among all."""
        rank, world = rank_and_count()
        bounds = [size(self.test) * k // world for k in (rank, rank + 1)]
        loader = DataLoader(
            Subset(self.test, range(*bounds)), _EVALUATED, num_workers=workers(self.device)
        )
        start = bounds[0]
        for x, y in loader:
            yield slice(start, start + len(y)), x.to(self.device), y.to(self.device)
            start += len(y)

    @property
    def counts(self) -> tuple[int, int]:
        return size(self.train), size(self.test)


class Loaded(Stream):
    """Batches from workers; of several processes each has its part of an epoch."""

    captured = False

    def __init__(self, pictures: Pictures, batch: int, device: torch.device) -> None:
        self.device = device
        rank, world = rank_and_count()
        if batch % world:
            raise PruneError(f"a batch of {batch} cannot be shared by {world} processes evenly.")
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            pictures, world, rank, shuffle=True, drop_last=True
        )
        self.loader = DataLoader(
            pictures, batch // world, sampler=self.sampler, drop_last=True,
            num_workers=workers(device), pin_memory=device.type == "cuda",
            persistent_workers=workers(device) > 0,
        )  # fmt: skip
        self.per_epoch = len(self.loader)
        self._batches: Iterator[Any] = iter(())

    def shuffle(self) -> None:
        self.sampler.set_epoch(int(agreed(torch.randint(1 << 30, ()).to(self.device))))
        self._batches = iter(self.loader)

    def next(self) -> tuple[Tensor, Tensor]:
        x, y = next(self._batches)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def loss(self, out: Tensor, target: Tensor, opinion: Tensor | None, recipe: Recipe) -> Tensor:
        return taught(out, target, opinion, recipe)

    def right(self, out: Tensor, target: Tensor) -> Tensor:
        return (out.argmax(1) == target).float().mean()


def open_imagenet(folder: Path) -> ImageNet:
    for part in ("train", "val"):
        if not (folder / part).is_dir():
            raise PruneError(
                f"--data imagenet:{folder}: there is no folder {part} in it. Pictures are expected "
                f"as {part}/CLASS/NAME.jpg, as in PyTorch's ImageNet example."
            )
    train, test = (_folder(folder / part, part == "train") for part in ("train", "val"))
    if train.classes != test.classes:
        raise PruneError(f"--data imagenet:{folder}: train and val have other classes.")
    return ImageNet(train, test)


def _folder(path: Path, learning: bool) -> Any:
    """Pictures as in PyTorch's example: crops of any size, or the middle."""
    try:
        from torchvision import transforms
        from torchvision.datasets import ImageFolder
    except (ImportError, RuntimeError) as error:
        raise PruneError(
            f"pictures are read with torchvision, which cannot be loaded ({error}): "
            f"pip install polarprune[vision]"
        ) from error
    crop = (
        [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
        if learning
        else [transforms.Resize(256), transforms.CenterCrop(224)]
    )
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    try:
        return ImageFolder(str(path), transforms.Compose([*crop, *last]))
    except FileNotFoundError as error:
        raise PruneError(f"--data imagenet: {error}.") from error


def folder_of(pictures: Any, learning: bool) -> Any:
    return _folder(Path(pictures.root), learning)


def classes_of(pictures: Any) -> Tensor:
    if isinstance(pictures, Subset):
        return classes_of(pictures.dataset)[torch.as_tensor(pictures.indices)]
    return torch.tensor(pictures.targets)


def size(pictures: Pictures) -> int:
    return len(cast(Sized, pictures))


def workers(device: torch.device) -> int:
    return _WORKERS if device.type == "cuda" else 0
