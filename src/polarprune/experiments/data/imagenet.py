"""Folders of photos: `imagenet:DIR` and, for the user's own networks, `folder:DIR`.

The layout is that of PyTorch's example: DIR/train/CLASS/NAME.jpg and DIR/val/CLASS/NAME.jpg.
Workers read the photos while the model trains. With `torchrun`, every process has its own GPU and
its own part of each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from ...errors import PruneError
from ..processes import from_first_process, rank_and_count, sum_over_processes
from ..settings import Settings
from .distillation import classification_loss
from .photos import MEAN, STD
from .task import Stream, Task, evaluating, held_out_order

CPU = torch.device("cpu")
SIDE = 224  # of the square that a model sees, in pixels
_WORKERS = 8
_TEST_BATCH = 128

LabelledPhotos = Dataset[tuple[Tensor, int]]


class PhotoFolder(Protocol):
    """The part of torchvision's ImageFolder that is used here."""

    root: str
    classes: list[str]
    targets: list[int]

    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...


@dataclass(frozen=True)
class ImageNet(Task):
    """Training photos and test photos, and the device that batches are moved to.

    `classes` is their number, and `side` that of the pixels of a square that a model sees.
    """

    train: LabelledPhotos
    test: LabelledPhotos
    device: torch.device = CPU
    classes: int | None = None
    side: int = SIDE

    def to(self, device: str | torch.device) -> ImageNet:
        return replace(self, device=torch.device(device))

    def held_out(self, count: int) -> ImageNet:
        """Return a task that scores on training photos, with centre crops as for test photos."""
        order = held_out_order(_count(self.train))
        root = Path(cast(PhotoFolder, self.train).root)
        centred = _open_folder(root, self.side, augment=False)
        first, rest = order[:count].tolist(), order[count:].tolist()
        return replace(self, train=Subset(self.train, rest), test=Subset(centred, first))

    def stream(self, settings: Settings) -> LoaderStream:
        return LoaderStream(self.train, settings.batch, self.device)

    def example(self) -> Tensor:
        return torch.stack([self.test[k][0] for k in range(self.examples)]).to(self.device)

    def answers(self, model: nn.Module) -> Tensor:
        """Return all predictions; each process computes its share of them."""
        found = torch.zeros(_count(self.test), dtype=torch.long, device=self.device)
        with evaluating(model):
            for where, x, _ in self._own_batches():
                found[where] = model(x).argmax(1)
        return sum_over_processes(found)

    def score(self, answers: Tensor) -> float:
        return float((answers.cpu() == _classes(self.test)).double().mean())

    def loss(self, model: nn.Module) -> float:
        total = torch.zeros((), device=self.device)
        with evaluating(model):
            for _, x, y in self._own_batches():
                total += F.cross_entropy(model(x).float(), y, reduction="sum")
        return float(sum_over_processes(total)) / _count(self.test)

    def _own_batches(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the test batches of this process, each with its position among all photos."""
        rank, world = rank_and_count()
        bounds = [_count(self.test) * k // world for k in (rank, rank + 1)]
        loader = DataLoader(
            Subset(self.test, range(*bounds)), _TEST_BATCH, num_workers=_workers(self.device)
        )
        start = bounds[0]
        for x, y in loader:
            yield slice(start, start + len(y)), x.to(self.device), y.to(self.device)
            start += len(y)

    @property
    def counts(self) -> tuple[int, int]:
        return _count(self.train), _count(self.test)


class LoaderStream(Stream):
    """Training batches from workers; each of several processes has its own part of an epoch."""

    captured = False

    def __init__(self, photos: LabelledPhotos, batch: int, device: torch.device) -> None:
        self.device = device
        rank, world = rank_and_count()
        if batch % world:
            raise PruneError(
                f"batch={batch} cannot be divided evenly among {world} processes. Choose a "
                f"multiple of {world}."
            )
        self.sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(
            photos, world, rank, shuffle=True, drop_last=True
        )
        self.loader = DataLoader(
            photos,
            batch // world,
            sampler=self.sampler,
            drop_last=True,
            num_workers=_workers(device),
            pin_memory=device.type == "cuda",
            persistent_workers=_workers(device) > 0,
        )
        self.per_epoch = len(self.loader)
        self.examples = self.per_epoch * batch
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def shuffle(self) -> None:
        number = from_first_process(torch.randint(1 << 30, ()).to(self.device))
        self.sampler.set_epoch(int(number))
        self._batches = iter(self.loader)

    def next(self) -> tuple[Tensor, Tensor]:
        x, y = next(self._batches)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        return classification_loss(output, target, teacher, settings)

    def accuracy(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).float().mean()


def open_imagenet(folder: Path, side: int = SIDE, kind: str = "imagenet") -> ImageNet:
    """Open the photos in `folder/train` and `folder/val`.

    Args:
        folder: The folder of both.
        side: Side of the square that a model sees, in pixels.
        kind: The name of the data set, for messages.

    Raises:
        PruneError: A folder is missing or empty, or both have different classes.
    """
    for part in ("train", "val"):
        if not (folder / part).is_dir():
            raise PruneError(
                f"--data {kind}:{folder}: it has no folder {part}. Photos are expected as "
                f"{part}/CLASS/NAME.jpg, as in PyTorch's ImageNet example."
            )
    train, test = (_open_folder(folder / part, side, part == "train") for part in ("train", "val"))
    classes = cast(PhotoFolder, train).classes
    if classes != cast(PhotoFolder, test).classes:
        raise PruneError(
            f"--data {kind}:{folder}: train and val have different classes. Give both the same "
            f"subfolders."
        )
    return ImageNet(train, test, classes=len(classes), side=side)


def _open_folder(path: Path, side: int, augment: bool) -> LabelledPhotos:
    """Open photos as PyTorch's example does: random crops for training, else the centre."""
    transforms, datasets = _torchvision()
    crop = (
        [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()]
        if augment
        else [transforms.Resize(side * 256 // 224), transforms.CenterCrop(side)]
    )
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    try:
        photos: LabelledPhotos = datasets.ImageFolder(str(path), transforms.Compose([*crop, *last]))
    except FileNotFoundError as error:
        raise PruneError(f"--data: {error}.") from error
    return photos


def _torchvision() -> tuple[Any, Any]:
    """Return torchvision's transforms and data sets."""
    try:
        from torchvision import datasets, transforms
    except (ImportError, RuntimeError) as error:
        raise PruneError(
            f"reading photos needs torchvision, which cannot be imported ({error}): "
            f"pip install polarprune[vision]"
        ) from error
    return transforms, datasets


def _classes(photos: LabelledPhotos) -> Tensor:
    """Return the class of every photo."""
    if isinstance(photos, Subset):
        return _classes(photos.dataset)[torch.as_tensor(photos.indices)]
    return torch.tensor(cast(PhotoFolder, photos).targets)


def _count(photos: LabelledPhotos) -> int:
    return len(cast(Sized, photos))


def _workers(device: torch.device) -> int:
    return _WORKERS if device.type == "cuda" else 0
