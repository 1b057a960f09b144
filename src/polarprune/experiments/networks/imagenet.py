"""Networks for ImageNet: torchvision's, with or without published weights, and MobileNetV1."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ...errors import PruneError


class MobileNetV1(nn.Module):
    """MobileNet (Howard et al., 2017): thirteen pairs of a depthwise 3 × 3 and a 1 × 1 convolution.

    `stages` has the width and the stride of each pair.

    Args:
        classes: Number of outputs.
        stride: Stride of the first convolution.
    """

    stages = (
        *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
        *((512, 1),) * 5,
        *((1024, 2), (1024, 1)),
    )

    def __init__(self, classes: int = 1000, stride: int = 2) -> None:
        super().__init__()
        layers, inputs = [_conv(3, 32, 3, stride)], 32
        for width, stride in self.stages:
            layers += [_conv(inputs, inputs, 3, stride, groups=inputs), _conv(inputs, width, 1)]
            inputs = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


def _conv(inputs: int, width: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, width, size, stride, size // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())


def from_torchvision(name: str, weights: str | None = None, **options: object) -> nn.Module:
    """Return a model of torchvision.

    Args:
        name: Its name in torchvision.
        weights: Name of published weights; None for new ones.
        **options: Options of the model, such as `num_classes`.

    Raises:
        PruneError: torchvision cannot be imported, or the weights cannot be downloaded.
    """
    try:
        from torchvision.models import get_model
    except (ImportError, RuntimeError) as error:
        raise PruneError(
            f"{name} is a model of torchvision, which cannot be imported ({error}). Install a "
            f"version that fits this torch: pip install polarprune[vision]."
        ) from error
    try:
        model: nn.Module = get_model(name, weights=weights, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise PruneError(
            f"{name}: cannot load its weights {weights!r} ({error}). Pass them as --baseline FILE "
            f"(or --start FILE for a part of the network), or train without them: "
            f"--set pretrained=null."
        ) from error
    return model


# Networks for images of 64 × 64. The first convolution has stride 1 instead of 2, so the last
# features have 4 × 4 pixels.


def mobilenet_v1_tiny(classes: int = 200) -> nn.Module:
    """Return a new MobileNetV1 for 64 × 64 pixels: 185.6 M MACs."""
    return MobileNetV1(classes, stride=1)


def mobilenet_v2_tiny(classes: int = 200) -> nn.Module:
    """Return torchvision's MobileNetV2, new, for 64 × 64 pixels: 98.1 M MACs."""
    model: Any = from_torchvision("mobilenet_v2", num_classes=classes)
    model.features[0][0].stride = (1, 1)
    return cast(nn.Module, model)


def resnet50_tiny(classes: int = 200) -> nn.Module:
    """Return torchvision's ResNet-50, new, for 64 × 64 pixels: 1.3 G MACs.

    Its first convolution is 3 × 3, as is usual for small images; the pooling after it stays.
    """
    model: Any = from_torchvision("resnet50", num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return cast(nn.Module, model)


def resnet50() -> nn.Module:
    """Return torchvision's ResNet-50, with new weights."""
    return from_torchvision("resnet50")


def mobilenet_v2() -> nn.Module:
    """Return torchvision's MobileNetV2, with new weights."""
    return from_torchvision("mobilenet_v2")
