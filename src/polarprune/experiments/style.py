"""Style transfer by a feed-forward network (Johnson et al., 2016), which the paper prunes, too.

`style:DIR` names a folder with `style.jpg`, photos in `train/` and `val/`, and
`features.safetensors`: the weights of a trained VGG-16, with or without batch norms, named as in
torchvision. Its features say how far a picture is from the content of a photo and from the style.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import PruneError
from .recipes import Recipe
from .task import Shuffled, Task, evaluating
from .voc import MEAN, STD, pixels

SIDE = 256  # pixels
_CONTENT, _STYLE = 1e5, 1e10  # weights of the two losses, as in PyTorch's example
_LEVELS = (2, 2, 3, 3)  # convolutions of VGG-16 between poolings, up to relu4_3
_CONTENT_LEVEL = 1  # relu2_2


class StyleNet(nn.Module):
    """Three convolutions down, five residual blocks, three up; pictures of 0 … 255."""

    def __init__(self, width: int = 32, blocks: int = 5) -> None:
        super().__init__()
        wide = 4 * width
        self.down = nn.Sequential(
            *_conv(3, width, 9), nn.ReLU(), *_conv(width, 2 * width, 3, 2), nn.ReLU(),
            *_conv(2 * width, wide, 3, 2), nn.ReLU(),
        )  # fmt: skip
        self.blocks = nn.Sequential(*(Residual(wide) for _ in range(blocks)))
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=2), *_conv(wide, 2 * width, 3), nn.ReLU(),
            nn.Upsample(scale_factor=2), *_conv(2 * width, width, 3), nn.ReLU(),
        )  # fmt: skip
        self.paint = nn.Sequential(nn.ReflectionPad2d(4), nn.Conv2d(width, 3, 9))

    def forward(self, x: Tensor) -> Tensor:
        picture: Tensor = self.paint(self.up(self.blocks(self.down(x))))
        return picture


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_conv(width, width, 3), nn.ReLU(), *_conv(width, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layers(x)
        return found


def _conv(wide: int, width: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.ReflectionPad2d(size // 2),
        nn.Conv2d(wide, width, size, stride),
        nn.InstanceNorm2d(width, affine=True),
    ]


class Features(nn.Module):
    """What a trained VGG-16, whole or pruned, sees: after relu1_2, relu2_2, relu3_3, relu4_3."""

    mean: Tensor
    std: Tensor

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        normed = "features.1.running_mean" in weights
        layers: list[nn.Module] = []
        self.ends: list[int] = []
        for level in _LEVELS:
            for _ in range(level):
                width, wide = _part(weights, f"features.{len(layers)}.weight").shape[:2]
                layers += [nn.Conv2d(wide, width, 3, padding=1)]
                layers += [nn.BatchNorm2d(width)] if normed else []
                layers += [nn.ReLU()]
            self.ends.append(len(layers))
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.load_state_dict({name: _part(weights, name) for name in self.state_dict()})
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


def _part(weights: dict[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise PruneError(
            f"--data style: features.safetensors has no {name}. It has to hold the weights of a "
            f"VGG-16 as torchvision names them (features.0.weight, ...)."
        )
    return weights[name]


def gram(x: Tensor) -> Tensor:
    """How often two features occur together."""
    flat = x.flatten(2)
    return flat @ flat.mT / flat[0].numel()


@dataclass(frozen=True)
class Style(Task):
    """Photos (N × side × side × 3, bytes), the style's features, and who sees them."""

    train: Tensor
    test: Tensor
    wanted: list[Tensor]
    features: Features
    measure = "perceptual loss"

    def to(self, device: str | torch.device) -> Style:
        return replace(
            self, train=self.train.to(device), test=self.test.to(device),
            wanted=[tensor.to(device) for tensor in self.wanted], features=self.features.to(device),
        )  # fmt: skip

    def held_out(self, count: int) -> Style:
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(10))
        order = order.to(self.train.device)
        return replace(self, train=self.train[order[count:]], test=self.train[order[:count]])

    def stream(self, recipe: Recipe) -> Painted:
        return Painted(self, recipe.batch)

    def example(self) -> Tensor:
        return _floats(self.test[: self.examples])

    def answers(self, model: nn.Module) -> Tensor:
        """The pictures."""
        with evaluating(model):
            return torch.cat([model(_floats(x)).clamp(0, 255) for x in self.test.split(4)])

    def same(self, one: Tensor, other: Tensor) -> bool:
        """To half of what a byte can tell apart."""
        return float((one - other).abs().max()) < 0.5

    def score(self, answers: Tensor) -> float:
        pairs = zip(answers.split(4), self.test.split(4), strict=True)
        with torch.no_grad():
            each = [float(self.apart(one, _floats(x))) * len(x) for one, x in pairs]
        return sum(each) / len(self.test)

    def shown(self, score: float) -> str:
        return f"{score:.4g}"

    def loss(self, model: nn.Module) -> float:
        return self.score(self.answers(model))

    def apart(self, pictures: Tensor, photos: Tensor) -> Tensor:
        """How far pictures are from the content of photos and from the style."""
        with torch.autocast(pictures.device.type, torch.bfloat16, enabled=pictures.is_cuda):
            with torch.no_grad():
                content = self.features(photos)[_CONTENT_LEVEL]
            seen = self.features(pictures)
        loss = _CONTENT * F.mse_loss(seen[_CONTENT_LEVEL], content)
        for level, wanted in zip(seen, self.wanted, strict=True):
            own = gram(level)
            loss = loss + _STYLE * F.mse_loss(own, wanted.expand_as(own))
        return loss

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train), len(self.test)


class Painted(Shuffled):
    """Photos in any order, some turned over."""

    def __init__(self, style: Style, size: int) -> None:
        super().__init__(len(style.train), size, style.train.device)
        self.style = style

    def next(self) -> tuple[Tensor, Tensor]:
        x = _floats(self.style.train[self.pick()])
        flip = torch.rand(self.size, 1, 1, 1, device=self.device) < 0.5
        x = torch.where(flip, x.flip(3), x)
        return x, x

    def loss(self, out: Tensor, target: Tensor, opinion: Tensor | None, recipe: Recipe) -> Tensor:
        loss = self.style.apart(out.float(), target)
        if opinion is None:
            return loss
        return (1 - recipe.distill) * loss + recipe.distill * F.mse_loss(out.float(), opinion)

    def right(self, out: Tensor, target: Tensor) -> Tensor:
        return out.new_zeros((), dtype=torch.float32)  # there is no right or wrong


def _floats(photos: Tensor) -> Tensor:
    return photos.permute(0, 3, 1, 2).float()


def open_style(folder: Path) -> Style:
    parts = {name: sorted((folder / name).glob("*.jpg")) for name in ("train", "val")}
    file = folder / "features.safetensors"
    lacking = [name for name, found in parts.items() if not found]
    lacking += [path.name for path in (folder / "style.jpg", file) if not path.exists()]
    if lacking:
        raise PruneError(
            f"--data style:{folder}: there is no {lacking[0]} in it (or nothing in that). Wanted "
            f"are train/*.jpg, val/*.jpg, style.jpg and features.safetensors."
        )
    train, test = (torch.stack([square(path) for path in found]) for found in parts.values())
    features = Features(load_file(str(file)))
    with torch.no_grad():
        seen = features(_floats(square(folder / "style.jpg")[None]))
    return Style(train, test, [gram(level) for level in seen], features)


def square(path: Path) -> Tensor:
    """The middle of a photo."""

    def middle(image: Any) -> Any:
        from PIL import Image, ImageOps

        return ImageOps.fit(image.convert("RGB"), (SIDE, SIDE), Image.Resampling.BILINEAR)

    return pixels(path, middle)
