"""DeepLabV3+ (Chen et al., 2018) with a ResNet-50 of output stride 16, as the paper prunes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .imagenet import from_torchvision

_WIDTH = 256  # of the pyramid and the decoder
_FINE = 48  # channels of the early features
_MOMENTUM = 0.01  # of the backbone's batch norms, as in the code that the paper started from


class DeepLabV3Plus(nn.Module):
    """Early features (stride 4) beside late ones (stride 16) that were looked at in five ways."""

    def __init__(self, classes: int = 21, rates: tuple[int, ...] = (6, 12, 18)) -> None:
        super().__init__()
        self.backbone = Backbone()
        for module in self.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = _MOMENTUM
        self.pyramid = Pyramid(2048, rates)
        self.fine = _conv(256, _FINE, 1)
        self.mix = _conv(_FINE + _WIDTH, _WIDTH, 3)
        self.classes = nn.Conv2d(_WIDTH, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        early, late = self.backbone(x)
        late = _resized(self.pyramid(late), early)
        both = torch.cat([self.fine(early), late], 1)
        scores: Tensor = self.classes(self.mix(both))
        return _resized(scores, x)


class Backbone(nn.Module):
    """torchvision's ResNet-50 without its head; names as there, so that its weights fit."""

    def __init__(self) -> None:
        super().__init__()
        dilated = [False, False, True]
        whole: Any = from_torchvision("resnet50", replace_stride_with_dilation=dilated)
        self.conv1, self.bn1, self.relu, self.maxpool = (
            whole.conv1, whole.bn1, whole.relu, whole.maxpool,
        )  # fmt: skip
        self.layer1, self.layer2 = whole.layer1, whole.layer2
        self.layer3, self.layer4 = whole.layer3, whole.layer4

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        early = self.layer1(x)
        return early, self.layer4(self.layer3(self.layer2(early)))


class Enlarged(nn.Module):
    """The same backbone learns to name small images, made larger: weights to begin with."""

    def __init__(self, classes: int = 10, side: int = 128) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(2048, classes)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False)
        scores: Tensor = self.head(self.backbone(x)[1].mean((2, 3)))
        return scores


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: 1 × 1, 3 × 3 at three rates, and the mean of the picture."""

    def __init__(self, wide: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        ways = [_conv(wide, _WIDTH, 1), *(_conv(wide, _WIDTH, 3, rate) for rate in rates)]
        self.ways = nn.ModuleList(ways)
        self.whole = _conv(wide, _WIDTH, 1)
        self.project = nn.Sequential(_conv((len(ways) + 1) * _WIDTH, _WIDTH, 1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        mean = _resized(self.whole(x.mean((2, 3), keepdim=True)), x)
        mixed: Tensor = self.project(torch.cat([*(way(x) for way in self.ways), mean], 1))
        return mixed


def _conv(wide: int, width: int, size: int, rate: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(wide, width, size, padding=rate * (size // 2), dilation=rate, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())


def _resized(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)
