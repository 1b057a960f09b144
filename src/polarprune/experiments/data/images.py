"""Images in the memory of the device, which also draws crops and flips.

CIFAR-10 and Tiny ImageNet are such data sets. A CUDA graph can hold the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import PruneError
from ..settings import Settings
from .distillation import classification_loss
from .task import InMemoryStream, Task, evaluating, held_out_order

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10
_AT_ONCE = 1000  # images that are enlarged or scored together

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Images:
    """Images (N × height × width × 3, bytes) and their classes.

    Attributes:
        x: The images.
        y: The class of each image.
        mean: Mean of each colour, which is subtracted; by default that of CIFAR-10.
        std: Standard deviation of each colour, by which it is divided.
        shift: Training images are shifted by up to this many pixels.
    """

    x: Tensor
    y: Tensor
    mean: Colour = MEAN
    std: Colour = STD
    shift: int = 4

    def to(self, device: str | torch.device) -> Images:
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def pick(self, indices: Tensor | slice) -> Images:
        return replace(self, x=self.x[indices], y=self.y[indices])

    def scale(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the colours on the device of the images."""
        mean, std = (torch.tensor(one, device=self.x.device) for one in (self.mean, self.std))
        return mean, std

    def inputs(self, indices: slice = slice(None)) -> Tensor:
        """Return some images as inputs of a model."""
        return normalised(self.x[indices], self.scale())

    def of_each_class(self, count: int, seed: int) -> Images:
        """Return `count` images of each class, which are drawn with a seed."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        classes = self.y.cpu()[order]
        found = []
        for number in range(int(classes.max()) + 1):
            own = order[classes == number]
            if len(own) < count:
                raise PruneError(
                    f"per_class={count}: class {number} has only {len(own)} training images."
                )
            found.append(own[:count])
        return self.pick(torch.cat(found).to(self.x.device))

    def resized(self, side: int) -> Images:
        """Return the images enlarged or reduced to `side` × `side` pixels, and the shift alike."""
        high = self.x.shape[1]
        if (high, self.x.shape[2]) == (side, side):
            return self
        parts = [_resized(part, side) for part in self.x.split(_AT_ONCE)]
        return replace(self, x=torch.cat(parts), shift=max(1, self.shift * side // high))

    def __len__(self) -> int:
        return len(self.y)


def _resized(x: Tensor, side: int) -> Tensor:
    x = F.interpolate(x.permute(0, 3, 1, 2).float(), (side, side), mode="bilinear", antialias=True)
    return x.round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()


@dataclass(frozen=True)
class LabelledImages(Task):
    """Training images and test images."""

    train: Images
    test: Images
    classes: int

    def to(self, device: str | torch.device) -> LabelledImages:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def held_out(self, count: int) -> LabelledImages:
        order = held_out_order(len(self.train)).to(self.train.y.device)
        return replace(
            self, train=self.train.pick(order[count:]), test=self.train.pick(order[:count])
        )

    def of_settings(self, settings: Settings) -> LabelledImages:
        """Return the task with as many training images and as many pixels as settings say."""
        train, test = self.train, self.test
        if settings.per_class:
            train = train.of_each_class(settings.per_class, settings.data_seed)
        if settings.side:
            train, test = train.resized(settings.side), test.resized(settings.side)
        return replace(self, train=train, test=test)

    def stream(self, settings: Settings) -> Batches:
        return Batches(self.train, settings.batch, cutout=settings.cutout)

    def example(self) -> Tensor:
        return self.test.inputs(slice(self.examples))

    def answers(self, model: nn.Module) -> Tensor:
        return predictions(model, self.test)

    def score(self, answers: Tensor) -> float:
        return float((answers == self.test.y).double().mean())

    def loss(self, model: nn.Module) -> float:
        return float(F.cross_entropy(logits(model, self.test), self.test.y))

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train), len(self.test)


class Batches(InMemoryStream):
    """Training batches: shuffled images, each shifted by a few pixels and flipped or not.

    With `cutout`, a square of this side, centred anywhere in the image, is set to zero.
    """

    def __init__(self, images: Images, size: int, *, cutout: int = 0) -> None:
        super().__init__(len(images), size, images.x.device)
        self.shift = images.shift
        self.x = F.pad(images.x, (0, 0, *[self.shift] * 4))
        self.y, self.cutout = images.y, cutout
        self.height, self.width = images.x.shape[1:3]
        self.scale = images.scale()

    def next(self) -> tuple[Tensor, Tensor]:
        device, indices = self.device, self.next_indices()
        shift = torch.randint(0, 2 * self.shift + 1, (2, self.size, 1), device=device)
        flip = torch.rand(self.size, 1, device=device) < 0.5
        rows = shift[0] + torch.arange(self.height, device=device)
        across = torch.arange(self.width, device=device)
        columns = shift[1] + torch.where(flip, self.width - 1 - across, across)
        images = self.x[indices[:, None, None], rows[:, :, None], columns[:, None, :]]
        images = normalised(images, self.scale)
        if self.cutout:
            outside = [self._outside(length)[..., None] for length in (self.height, self.width)]
            images = images * (outside[0] | outside[1].mT)[:, None]
        return images, self.y[indices]

    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        return classification_loss(output, target, teacher, settings)

    def accuracy(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).float().mean()

    def _outside(self, length: int) -> Tensor:
        """Return, for each image, which coordinates along one axis are outside of the square."""
        along = torch.arange(length, device=self.device)
        centre = torch.randint(0, length, (self.size, 1), device=self.device)
        # Modulo 2 · length, coordinates before the square become large, as those after it are.
        return (along - centre + self.cutout // 2) % (2 * length) >= self.cutout


def normalised(images: Tensor, scale: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Convert bytes (N × height × width × 3) to the inputs of a model (N × 3 × height × width).

    Args:
        images: The bytes.
        scale: Mean and standard deviation of the colours; by default those of CIFAR-10.
    """
    mean, std = scale or (torch.tensor(one, device=images.device) for one in (MEAN, STD))
    return ((images / 255 - mean) / std).permute(0, 3, 1, 2)


def logits(model: nn.Module, images: Images) -> Tensor:
    """Return the logits of all images, in eval mode and full precision."""
    scale = images.scale()
    with evaluating(model):
        return torch.cat([model(normalised(x, scale)) for x in images.x.split(_AT_ONCE)])


def predictions(model: nn.Module, images: Images) -> Tensor:
    """Return the predicted class of every image."""
    return logits(model, images).argmax(1)


def accuracy(model: nn.Module, images: Images) -> float:
    """Return the share of images whose class is predicted correctly."""
    return float((predictions(model, images) == images.y).double().mean())
