"""Networks for images of 32 × 32 pixels, in the shapes that the paper compares.

ResNet-56 and VGG-16 are those of HRank (Lin et al., 2020): 125.5 and 313 M MACs. `MobileNetV2` is
LeGR's network for CIFAR-10 (Chin et al., 2020): 265.7 M MACs. `mobilenetv2_88m` has stride 2 in the
fourth stage as well, as in the ImageNet network, and no dropout: 88.0 M MACs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut.

    Where the shape changes, the shortcut takes every other pixel and pads the channels with zeros
    (option A of He et al.).
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            half = self.more // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return F.relu(y + x)


class ResNet(nn.Module):
    """Three stages of `blocks` blocks each: 6 · blocks + 2 layers."""

    def __init__(self, blocks: int = 9, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        layers, inputs = [], 16
        for width in (16, 32, 64):
            for _ in range(blocks):
                layers.append(BasicBlock(inputs, width, 1 if inputs == width else 2))
                inputs = width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(64, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class VGG(nn.Module):
    """Thirteen convolutions and two linear layers; a width of 0 is a pooling."""

    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in self.widths:
            if width == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(inputs, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        self.features = nn.Sequential(*layers, nn.AvgPool2d(2))
        self.head = nn.Sequential(
            nn.Linear(inputs, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, classes)
        )
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits


class InvertedResidual(nn.Module):
    """A 1 × 1, a depthwise 3 × 3 and a 1 × 1 convolution, with a shortcut if the shape is kept."""

    def __init__(self, inputs: int, width: int, stride: int, expand: int) -> None:
        super().__init__()
        middle = inputs * expand
        layers = [_conv(inputs, middle, 1)] if expand > 1 else []
        layers.append(_conv(middle, middle, 3, stride, groups=middle))
        self.layers = nn.Sequential(*layers, nn.Conv2d(middle, width, 1, bias=False))
        self.bn = nn.BatchNorm2d(width)
        self.adds = stride == 1 and inputs == width

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

    # Expansion factor, width and number of blocks of each stage.
    stages = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))

    def __init__(
        self,
        classes: int = 10,
        strides: tuple[int, ...] = (1, 1, 2, 1, 1, 2, 1),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.stem = _conv(3, 32, 3)
        layers, inputs = [], 32
        for (expand, width, blocks), stride in zip(self.stages, strides, strict=True):
            for number in range(blocks):
                layers.append(InvertedResidual(inputs, width, 1 if number else stride, expand))
                inputs = width
        self.blocks = nn.Sequential(*layers)
        self.last = _conv(inputs, 1280, 1)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(1280, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(x)))
        logits: Tensor = self.head(self.dropout(x.mean((2, 3))))
        return logits


def _conv(inputs: int, width: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, width, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU6())


def _initialise(model: nn.Module) -> None:
    """Draw the weights of all convolutions as He et al. do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def resnet56() -> nn.Module:
    """Return a new ResNet-56."""
    return ResNet(9)


def resnet20() -> nn.Module:
    """Return a new ResNet-20."""
    return ResNet(3)


def mobilenetv2_88m() -> nn.Module:
    """Return a new MobileNetV2 that halves the images once more, before the 64-channel stage."""
    return MobileNetV2(strides=(1, 1, 2, 2, 1, 2, 1), dropout=0.0)
