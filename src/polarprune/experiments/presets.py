"""`PRESETS`: the settings of every experiment, by the name that `polarprune train` takes.

Names ending in `-paper` follow the paper's text; `-plain` also uses its exact proximal step. The
other CIFAR-10 presets are ours. Where the paper gives no value (learning rate and batch size for
CIFAR-10), the usual one is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import PruneError
from ..integrations.factories import FORMS
from ..training.schedule import Schedule
from .settings import Settings, changed

_CIFAR10 = 50000  # training images
_EPS_VOC = 0.1 * 0.97**500  # × 0.97 after every 120 of 60,000 steps


def per_epoch(decay: float, epochs: int) -> Schedule:
    """Return the paper's schedule of ε, which is multiplied by `decay` after every epoch."""
    return Schedule(eps_start=0.1, eps_end=0.1 * decay**epochs)


def _paper(network: str) -> Settings:
    """Return the paper's CIFAR-10 settings, for a run with a budget."""
    return Settings(
        network,
        baseline_epochs=350,
        epochs=350,
        batch=128,
        baseline_lr=0.1,
        lr=0.1,
        warm_up=0.0,
        schedule=per_epoch(0.96, 350),
    )


def _plain(network: str) -> Settings:
    """Return the same for `--lam`: the published proximal step, and ε decays once an epoch."""
    paper = _paper(network)
    return replace(paper, schedule=Schedule.paper(decay=0.96, every=_CIFAR10 // paper.batch))


def _mobilenetv2(network: str) -> Settings:
    """Return the settings that were chosen on held-out images for `mobilenetv2_88m`."""
    return Settings(
        network, baseline_epochs=250, epochs=250, weight_decay=1.5e-4, distill=0.9, cutout=16
    )


def _imagenet(network: str) -> Settings:
    """Return the paper's settings; batch and weight decay are those of PyTorch's example."""
    return Settings(
        network,
        "imagenet",
        baseline_epochs=90,
        epochs=140,
        batch=256,
        baseline_lr=0.1,
        lr=0.1,
        warm_up=0.0,
        nesterov=False,
        weight_decay=1e-4,
        schedule=per_epoch(0.9, 140),
    )


def _tiny(network: str, weight_decay: float) -> Settings:
    """Return our settings for Tiny ImageNet; see docs/experiments.md."""
    return Settings(
        network,
        "tiny-imagenet",
        baseline_epochs=100,
        epochs=100,
        batch=256,
        baseline_lr=0.1,
        lr=0.1,
        weight_decay=weight_decay,
        distill=0.9,
    )


def _transfer(network: str) -> Settings:
    """Return our settings for fine-tuning on a few images of CIFAR-10, enlarged to 64 × 64."""
    return Settings(
        network,
        "cifar10",
        baseline_epochs=200,
        epochs=200,
        batch=50,
        baseline_lr=0.02,
        lr=0.02,
        scored=20,
        side=64,
        per_class=50,
    )


def _deeplab() -> Settings:
    """Return the paper's settings for Pascal VOC."""
    return Settings(
        "deeplabv3plus",
        "voc",
        pretrained="IMAGENET1K_V1",
        baseline_epochs=45,
        epochs=91,
        batch=16,
        baseline_lr=0.01,
        lr=0.01,
        warm_up=0.0,
        rates="poly",
        slow="backbone",
        nesterov=False,
        weight_decay=1e-4,
        crop=513,
        schedule=Schedule(eps_end=_EPS_VOC, gate_lr=0.09),  # a rate of 9e-4 for the gates
    )


def _deeplab_from_scratch() -> Settings:
    """Return our settings for Pascal VOC without pretrained weights."""
    return Settings(
        "deeplabv3plus",
        "voc",
        baseline_epochs=100,
        epochs=100,
        batch=16,
        baseline_lr=0.05,
        lr=0.05,
        rates="poly",
        crop=513,
        schedule=Schedule(eps_end=_EPS_VOC, gate_lr=0.018),  # a rate of 9e-4 for the gates
    )


def _style() -> Settings:
    """Return the settings of PyTorch's style transfer example, which the paper started from."""
    return Settings(
        "stylenet",
        "style",
        baseline_epochs=40,
        epochs=40,
        batch=4,
        baseline_lr=1e-3,
        lr=1e-3,
        warm_up=0.0,
        optimizer="adam",
        weight_decay=0.0,
    )


def _gpt() -> Settings:
    """Return nanoGPT's settings for Shakespeare: 5,000 steps, scored every 250 as there."""
    return Settings(
        "gpt",
        "text",
        baseline_epochs=20,
        epochs=20,
        batch=64,
        baseline_lr=1e-3,
        lr=1e-3,
        tune_lr=1e-3,
        warm_up=0.4,  # 100 steps
        lr_end=0.1,
        optimizer="adamw",
        beta2=0.99,
        weight_decay=0.1,
        clip=1.0,
        epoch_steps=250,
        multiple_of="auto",
        distill=0.9,
        temperature=1.0,
        scored=1,
        best=True,
    )


def _deit() -> Settings:
    """Return our settings for DeiT-Tiny/8 on Tiny ImageNet; see docs/experiments.md."""
    return Settings(
        "deit_tiny",
        "tiny-imagenet",
        baseline_epochs=100,
        epochs=100,
        batch=512,
        baseline_lr=1e-3,
        lr=1e-3,
        tune_lr=1e-3,
        warm_up=5.0,
        lr_end=0.01,
        optimizer="adamw",
        weight_decay=0.05,
        clip=1.0,
        label_smoothing=0.1,
        norms=True,
        multiple_of="auto",
        distill=0.9,
    )


PRESETS = {
    "resnet56": Settings("resnet56", distill=0.9, cutout=8),
    "vgg16": Settings("vgg16", baseline_lr=0.1, lr=0.1, distill=0.9, cutout=16),
    "mobilenetv2": replace(_mobilenetv2("mobilenetv2"), baseline_epochs=200, epochs=200),
    "mobilenetv2_88m": _mobilenetv2("mobilenetv2_88m"),
    "resnet20": Settings("resnet20"),
    "deeplabv3plus": _deeplab(),
    "deeplabv3plus-scratch": _deeplab_from_scratch(),
    "deeplab_backbone": Settings("deeplab_backbone", baseline_epochs=30, baseline_lr=0.1),
    "stylenet": _style(),
    "gpt": _gpt(),
    "deit_tiny": _deit(),
    "mobilenet_v1": replace(_imagenet("mobilenet_v1"), rates="steps"),
    "mobilenet_v2": replace(
        _imagenet("mobilenet_v2"),
        label_smoothing=0.1,
        weight_decay=4e-5,
        baseline_lr=0.05,
        lr=0.05,
        pretrained="IMAGENET1K_V1",
    ),
    "resnet50": replace(_imagenet("resnet50"), label_smoothing=0.1, pretrained="IMAGENET1K_V1"),
    "mobilenet_v1-tiny": _tiny("mobilenet_v1_tiny", 1e-4),
    "mobilenet_v2-tiny": _tiny("mobilenet_v2_tiny", 1e-4),
    "resnet50-tiny": _tiny("resnet50_tiny", 5e-4),
    "mobilenet_v2-transfer": _transfer("mobilenet_v2_tiny"),
    "resnet50-transfer": _transfer("resnet50_tiny"),
    "resnet50-steps": replace(_imagenet("resnet50"), rates="steps", pretrained="IMAGENET1K_V1"),
    **{f"{name}-paper": _paper(name) for name in ("resnet56", "vgg16", "mobilenetv2")},
    **{f"{name}-plain": _plain(name) for name in ("resnet56", "vgg16", "mobilenetv2")},
}


# For a network of the user's own: common values, which are not tuned for it.
_OWN = Settings("", baseline_epochs=30, epochs=60, batch=64, baseline_lr=0.05, lr=0.05)


def own_settings(network: str, data: str, **changes: object) -> Settings:
    """Return the settings for a network of the user's own, with some fields changed.

    Args:
        network: `file.py:factory`, `timm:NAME` and so on.
        data: Kind of the data.
        **changes: As in `preset`.

    Raises:
        PruneError: A field is unknown, or a value is refused.
    """
    return _changed(replace(_OWN, network=network, data=data), changes)


def preset(name: str, **changes: object) -> Settings:
    """Return the settings of a preset, with some fields changed.

    Args:
        name: A key of `PRESETS`.
        **changes: Fields to change; `**{"schedule.done": 0.4}` changes a field of a field.

    Raises:
        PruneError: The preset or a field is unknown, or a value is refused.
    """
    if name not in PRESETS:
        raise PruneError(
            f"unknown preset {name!r}. Presets: {', '.join(PRESETS)}. Or give {FORMS}."
        )
    return _changed(PRESETS[name], changes)


def _changed(settings: Settings, changes: Mapping[str, object]) -> Settings:
    for key, value in changes.items():
        settings = changed(settings, key, value)
    return settings
