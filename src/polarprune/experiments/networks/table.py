"""`make_network`: a new network by its name, one of `NETWORKS` or of the user's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ...errors import PruneError
from ...factories import factory_code, make_model
from .deeplab import BackboneClassifier, DeepLabV3Plus
from .imagenet import MobileNetV1, mobilenet_v2, resnet50
from .small_images import VGG, MobileNetV2, mobilenetv2_88m, resnet20, resnet56
from .style import StyleNet

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet56": resnet56,
    "resnet20": resnet20,
    "vgg16": VGG,
    "mobilenetv2": MobileNetV2,
    "mobilenetv2_88m": mobilenetv2_88m,
    "deeplabv3plus": DeepLabV3Plus,
    "deeplab_backbone": BackboneClassifier,
    "stylenet": StyleNet,
    "mobilenet_v1": MobileNetV1,
    "mobilenet_v2": mobilenet_v2,
    "resnet50": resnet50,
}
BACKBONES = {"deeplabv3plus": "resnet50"}  # networks whose backbone is one of torchvision's


def make_network(name: str, classes: int | None = None) -> nn.Module:
    """Return a new network.

    Args:
        name: A key of `NETWORKS`, or a name that `factories.make_model` takes.
        classes: The number of classes, for a network of the user's own.

    Raises:
        PruneError: There is no such network, or it cannot be made.
    """
    if name in NETWORKS:
        return NETWORKS[name]()
    if ":" not in name:
        raise PruneError(f"unknown network {name!r}. Networks: {', '.join(NETWORKS)}.")
    return make_model(name, classes)


def code_of(name: str, classes: int | None = None) -> dict[str, str]:
    """Return the code that makes a network: its `imports` and the `call`."""
    if name in NETWORKS:
        made = f'make_network("{name}")'
        return {"imports": f"from {__name__} import make_network", "call": made}
    return factory_code(name, classes)
