"""Style transfer by a feed-forward network (Johnson et al., 2016): photos and the perceptual loss.

`style:DIR` names a folder with `style.jpg`, photos in `train/` and `val/`, and
`features.safetensors`: the weights of a trained VGG-16, with or without batch norms, named as in
torchvision. Its features measure how far an image is from a photo's content and from the style.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ...errors import PruneError
from ..settings import Settings
from .photos import MEAN, STD, read_photo
from .task import InMemoryStream, Task, evaluating, held_out_order

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

SIDE = 256  # pixels
_CONTENT, _STYLE = 1e5, 1e10  # weights of the two losses, as in PyTorch's example
_LEVELS = (2, 2, 3, 3)  # convolutions of VGG-16 between poolings, up to relu4_3
_CONTENT_LEVEL = 1  # relu2_2


class Features(nn.Module):
    """The features of a trained VGG-16, pruned or not: after relu1_2, relu2_2, relu3_3, relu4_3."""

    mean: Tensor
    std: Tensor

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        normed = "features.1.running_mean" in weights
        layers: list[nn.Module] = []
        self.ends: list[int] = []
        for level in _LEVELS:
            for _ in range(level):
                width, inputs = _weight(weights, f"features.{len(layers)}.weight").shape[:2]
                layers += [nn.Conv2d(inputs, width, 3, padding=1)]
                layers += [nn.BatchNorm2d(width)] if normed else []
                layers += [nn.ReLU()]
            self.ends.append(len(layers))
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.load_state_dict({name: _weight(weights, name) for name in self.state_dict()})
        self.eval().requires_grad_(False)
        for name, numbers in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(numbers)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found, start = (x / 255 - self.mean) / self.std, [], 0
        for end in self.ends:
            x = self.features[start:end](x)
            start = end
            found.append(x.float())
        return found


def _weight(weights: dict[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise PruneError(
            f"--data style: features.safetensors has no {name}. It must hold the weights of a "
            f"VGG-16, named as in torchvision (features.0.weight, ...)."
        )
    return weights[name]


def gram(x: Tensor) -> Tensor:
    """Return the Gram matrix of features: how often two channels are active together."""
    flat = x.flatten(2)
    return flat @ flat.mT / flat[0].numel()


@dataclass(frozen=True)
class Style(Task):
    """Photos (N × side × side × 3, bytes), Gram matrices of the style, and the feature network."""

    train: Tensor
    test: Tensor
    grams: list[Tensor]
    features: Features
    measure = "perceptual loss"
    higher_is_better = False

    def to(self, device: str | torch.device) -> Style:
        return replace(
            self,
            train=self.train.to(device),
            test=self.test.to(device),
            grams=[tensor.to(device) for tensor in self.grams],
            features=self.features.to(device),
        )

    def held_out(self, count: int) -> Style:
        order = held_out_order(len(self.train)).to(self.train.device)
        return replace(self, train=self.train[order[count:]], test=self.train[order[:count]])

    def stream(self, settings: Settings) -> FlippedPhotos:
        return FlippedPhotos(self, settings.batch)

    def example(self) -> Tensor:
        return as_input(self.test[: self.examples])

    def answers(self, model: nn.Module) -> Tensor:
        """Return the stylised photos."""
        with evaluating(model):
            return torch.cat([model(as_input(x)).clamp(0, 255) for x in self.test.split(4)])

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Return whether images differ by less than half of the step between two byte values."""
        return float((one - other).abs().max()) < 0.5

    def score(self, answers: Tensor) -> float:
        pairs = zip(answers.split(4), self.test.split(4), strict=True)
        with torch.no_grad():
            each = [float(self.perceptual_loss(one, as_input(x))) * len(x) for one, x in pairs]
        return sum(each) / len(self.test)

    def shown(self, score: float) -> str:
        return f"{score:.4g}"

    def loss(self, model: nn.Module) -> float:
        return self.score(self.answers(model))

    def perceptual_loss(self, images: Tensor, photos: Tensor) -> Tensor:
        """Return the distance of images from the content of photos and from the style."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            with torch.no_grad():
                content = self.features(photos)[_CONTENT_LEVEL]
            levels = self.features(images)
        loss = _CONTENT * F.mse_loss(levels[_CONTENT_LEVEL], content)
        for level, wanted in zip(levels, self.grams, strict=True):
            own = gram(level)
            loss = loss + _STYLE * F.mse_loss(own, wanted.expand_as(own))
        return loss

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train), len(self.test)


class FlippedPhotos(InMemoryStream):
    """Photos in random order, each flipped or not."""

    def __init__(self, style: Style, size: int) -> None:
        super().__init__(len(style.train), size, style.train.device)
        self.style = style

    def next(self) -> tuple[Tensor, Tensor]:
        x = as_input(self.style.train[self.next_indices()])
        flip = torch.rand(self.size, 1, 1, 1, device=self.device) < 0.5
        x = torch.where(flip, x.flip(3), x)
        return x, x

    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        loss = self.style.perceptual_loss(output.float(), target)
        if teacher is None:
            return loss
        distance = F.mse_loss(output.float(), teacher)
        return (1 - settings.distill) * loss + settings.distill * distance

    def accuracy(self, output: Tensor, target: Tensor) -> Tensor:
        """Return 0: an image is neither correct nor wrong."""
        return output.new_zeros((), dtype=torch.float32)


def as_input(photos: Tensor) -> Tensor:
    """Convert bytes (N × side × side × 3) to the inputs of a model (N × 3 × side × side)."""
    return photos.permute(0, 3, 1, 2).float()


def open_style(folder: Path) -> Style:
    """Read the photos, the style and the feature network."""
    parts = {name: sorted((folder / name).glob("*.jpg")) for name in ("train", "val")}
    file = folder / "features.safetensors"
    missing = [name for name, found in parts.items() if not found]
    missing += [path.name for path in (folder / "style.jpg", file) if not path.exists()]
    if missing:
        raise PruneError(
            f"--data style:{folder}: it has no {missing[0]}, or an empty one. It must hold "
            f"train/*.jpg, val/*.jpg, style.jpg and features.safetensors."
        )
    train, test = (torch.stack([read_square(path) for path in found]) for found in parts.values())
    features = Features(load_file(str(file)))
    with torch.no_grad():
        levels = features(as_input(read_square(folder / "style.jpg")[None]))
    return Style(train, test, [gram(level) for level in levels], features)


def read_square(path: Path) -> Tensor:
    """Return the central square of a photo, scaled to `SIDE` pixels."""

    def centre(image: PillowImage) -> PillowImage:
        from PIL import Image, ImageOps

        return ImageOps.fit(image.convert("RGB"), (SIDE, SIDE), Image.Resampling.BILINEAR)

    return read_photo(path, centre)
