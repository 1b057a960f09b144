"""DeepLabV3+ (Chen et al., 2018) with a ResNet-50 of output stride 16, as the paper prunes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .imagenet import from_torchvision

_WIDTH = 256  # of the pyramid and the decoder
_FINE = 48  # channels of the early features
_MOMENTUM = 0.01  # of the backbone's batch norms, as in the code that the paper started from


class DeepLabV3Plus(nn.Module):
    """Early features (stride 4) joined with late ones (stride 16) that passed the pyramid."""

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
        late = _resize(self.pyramid(late), early)
        both = torch.cat([self.fine(early), late], 1)
        logits: Tensor = self.classes(self.mix(both))
        return _resize(logits, x)


class Backbone(nn.Module):
    """torchvision's ResNet-50 without its head; the names are the same, so its weights fit."""

    conv1: nn.Module
    bn1: nn.Module
    relu: nn.Module
    maxpool: nn.Module
    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module
    layer4: nn.Module

    def __init__(self) -> None:
        super().__init__()
        resnet = from_torchvision("resnet50", replace_stride_with_dilation=[False, False, True])
        for name in Backbone.__annotations__:
            self.add_module(name, resnet.get_submodule(name))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        early = self.layer1(x)
        return early, self.layer4(self.layer3(self.layer2(early)))


class BackboneClassifier(nn.Module):
    """The backbone with a classifier, trained on enlarged small images to get initial weights."""

    def __init__(self, classes: int = 10, side: int = 128) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(2048, classes)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False)
        logits: Tensor = self.head(self.backbone(x)[1].mean((2, 3)))
        return logits


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: 1 × 1, 3 × 3 at three rates, and the mean of the image."""

    def __init__(self, inputs: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        ways = [_conv(inputs, _WIDTH, 1), *(_conv(inputs, _WIDTH, 3, rate) for rate in rates)]
        self.ways = nn.ModuleList(ways)
        self.whole = _conv(inputs, _WIDTH, 1)
        self.project = nn.Sequential(_conv((len(ways) + 1) * _WIDTH, _WIDTH, 1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        mean = _resize(self.whole(x.mean((2, 3), keepdim=True)), x)
        mixed: Tensor = self.project(torch.cat([*(way(x) for way in self.ways), mean], 1))
        return mixed


def _conv(inputs: int, width: int, size: int, rate: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, width, size, padding=rate * (size // 2), dilation=rate, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())


def _resize(x: Tensor, like: Tensor) -> Tensor:
    """Scale a tensor to the height and width of another one."""
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)
