"""`make_network`: a new network by its name, one of `NETWORKS` or of the user's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ...errors import PruneError
from ...integrations.factories import factory_code, make_model
from .deeplab import BackboneClassifier, DeepLabV3Plus
from .imagenet import (
    MobileNetV1,
    mobilenet_v1_tiny,
    mobilenet_v2,
    mobilenet_v2_tiny,
    resnet50,
    resnet50_tiny,
)
from .small_images import VGG, MobileNetV2, mobilenetv2_88m, resnet20, resnet56
from .style import StyleNet
from .transformers import GPT, DeiT

ANY_CLASSES: dict[str, Callable[..., nn.Module]] = {  # with as many classes as the data has
    "mobilenet_v1_tiny": mobilenet_v1_tiny,
    "mobilenet_v2_tiny": mobilenet_v2_tiny,
    "resnet50_tiny": resnet50_tiny,
    "gpt": GPT,
    "deit_tiny": DeiT,
}
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
    **ANY_CLASSES,
}
BACKBONES = {"deeplabv3plus": "resnet50"}  # networks whose backbone is one of torchvision's


def make_network(name: str, classes: int | None = None) -> nn.Module:
    """Return a new network.

    Args:
        name: A key of `NETWORKS`, or a name that `factories.make_model` takes.
        classes: The number of classes, for those of `ANY_CLASSES` and the user's own.

    Raises:
        PruneError: There is no such network, or it cannot be made.
    """
    if name in ANY_CLASSES and classes is not None:
        return ANY_CLASSES[name](classes)
    if name in NETWORKS:
        return NETWORKS[name]()
    if ":" not in name:
        raise PruneError(f"unknown network {name!r}. Networks: {', '.join(NETWORKS)}.")
    return make_model(name, classes)


def has_classes(name: str) -> bool:
    """Return whether the number of classes of a network is not fixed by its name."""
    return name in ANY_CLASSES or ":" in name


def code_of(name: str, classes: int | None = None) -> dict[str, str]:
    """Return the code that makes a network: its `imports` and the `call`."""
    if name in NETWORKS:
        count = f", {classes}" if name in ANY_CLASSES else ""
        made = f'make_network("{name}"{count})'
        return {"imports": f"from {__name__} import make_network", "call": made}
    return factory_code(name, classes)
