"""Networks by name; those for images of 32 × 32 in the shapes that the paper compares.

ResNet-56 and VGG-16 are those of HRank (Lin et al., 2020): 125.5 and 313 M MACs. `mobilenetv2` is
LeGR's network for CIFAR-10 (Chin et al., 2020): 265.7 M MACs. `mobilenetv2_88m` has stride 2 in the
fourth stage as well, as in the ImageNet network, and no dropout: 88.0 M MACs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from .deeplab import DeepLabV3Plus, Enlarged
from .imagenet import MobileNetV1, mobilenet_v2, resnet50
from .style import StyleNet


class Basic(nn.Module):
    """Two 3 × 3 convolutions; where the shape changes, the shortcut takes every other pixel and
    fills up with zeros (He et al., option A)."""

    def __init__(self, wide: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - wide

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            half = self.more // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return F.relu(y + x)


class ResNet(nn.Module):
    """Three stages of `blocks` each: 6·blocks + 2 layers."""

    def __init__(self, blocks: int = 9, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        found, wide = [], 16
        for width in (16, 32, 64):
            for _ in range(blocks):
                found.append(Basic(wide, width, 1 if wide == width else 2))
                wide = width
        self.blocks = nn.Sequential(*found)
        self.head = nn.Linear(64, classes)
        _begin(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class VGG(nn.Module):
    """Thirteen convolutions and two linear layers."""

    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        wide = 3
        for width in self.widths:
            if width == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(wide, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
            wide = width
        self.features = nn.Sequential(*layers, nn.AvgPool2d(2))
        self.head = nn.Sequential(
            nn.Linear(wide, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, classes)
        )
        _begin(self)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).flatten(1))
        return scores


class Inverted(nn.Module):
    """Expand, filter each channel, project; a shortcut where the shape stays."""

    def __init__(self, wide: int, width: int, stride: int, expand: int) -> None:
        super().__init__()
        middle = wide * expand
        layers = [_conv(wide, middle, 1)] if expand > 1 else []
        layers.append(_conv(middle, middle, 3, stride, groups=middle))
        self.layers = nn.Sequential(*layers, nn.Conv2d(middle, width, 1, bias=False))
        self.bn = nn.BatchNorm2d(width)
        self.adds = stride == 1 and wide == width

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(self.layers(x))
        return x + y if self.adds else y


class MobileNetV2(nn.Module):
    """MobileNetV2 for images of 32 × 32; the defaults are LeGR's `MobileNetV2_CIFAR10`.

    Args:
        classes: Number of outputs.
        strides: Stride of the first block of each of the seven stages.
        dropout: Probability that a feature is dropped before the classifier.
    """

    stages = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))

    def __init__(
        self,
        classes: int = 10,
        strides: tuple[int, ...] = (1, 1, 2, 1, 1, 2, 1),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.stem = _conv(3, 32, 3)
        found, wide = [], 32
        for (expand, width, blocks), stride in zip(self.stages, strides, strict=True):
            for number in range(blocks):
                found.append(Inverted(wide, width, stride if number == 0 else 1, expand))
                wide = width
        self.blocks = nn.Sequential(*found)
        self.last = _conv(wide, 1280, 1)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(1280, classes)
        _begin(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(x)))
        scores: Tensor = self.head(self.dropout(x.mean((2, 3))))
        return scores


def _conv(wide: int, width: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(wide, width, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU6())


def _begin(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def resnet56() -> nn.Module:
    return ResNet(9)


def resnet20() -> nn.Module:
    return ResNet(3)


def mobilenetv2_88m() -> nn.Module:
    """The images are halved once more, before the 64 channels; no dropout."""
    return MobileNetV2(strides=(1, 1, 2, 2, 1, 2, 1), dropout=0.0)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet56": resnet56,
    "resnet20": resnet20,
    "vgg16": VGG,
    "mobilenetv2": MobileNetV2,
    "mobilenetv2_88m": mobilenetv2_88m,
    "deeplabv3plus": DeepLabV3Plus,
    "deeplab_backbone": Enlarged,
    "stylenet": StyleNet,
    "mobilenet_v1": MobileNetV1,
    "mobilenet_v2": mobilenet_v2,
    "resnet50": resnet50,
}
BACKBONES = {"deeplabv3plus": "resnet50"}  # networks with one of torchvision's in them
