"""Every number of an experiment. `paper` is the paper's recipe as it stands, the others are ours.

Where the paper is silent (learning rate and batch for CIFAR-10) the numbers are the usual ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ..errors import PruneError
from ..training.schedule import Schedule


@dataclass(frozen=True)
class Controls:
    """The numbers of the methods that ours is compared with (see `methods`)."""

    slimming: float = 1e-5  # weight of Σ |γ|, its authors' for ResNets
    lasso: float = 2e-5  # weight of Σ √size · ‖w‖
    l0_beta: float = 2 / 3  # temperature of the hard-concrete distribution
    l0_gamma: float = -0.1  # it is stretched to gamma … zeta, and cut off at 0 and 1
    l0_zeta: float = 1.1
    l0_drop: float = 0.1  # chance at the start, before stretching, that a channel is dropped
    l0_lr: float = 1.0  # of the weights' rate
    l0_push: float = 100.0  # λ by which a unit of distance from the path is answered at once
    l0_rise: float = 200.0  # λ to which it adds up over the whole run
    kernel_push: float = 1000.0  # the same for gates made of kernels
    kernel_rise: float = 0.0
    kernel_lam: float = 0.0  # a fixed λ for them instead; 0: steered
    naive_sl0: float = 1.0  # λ
    torch_pruning: float = 6.2e-5  # reg of GroupNormPruner: times our rates, over a run of 100
    # epochs, what its authors' 5e-4 is times theirs (0.01, on ResNet-56)
    torch_pruning_decay: float = 0.0  # weight decay beside it, as there


@dataclass(frozen=True)
class Recipe:
    """A baseline is trained, pruned while it is trained again, exported, perhaps tuned."""

    network: str
    data: str = "cifar10"
    pretrained: str | None = None  # weights of torchvision: the baseline, or those of its backbone
    baseline_epochs: int = 200
    epochs: int = 200  # while pruning
    batch: int = 256
    baseline_lr: float = 0.2
    lr: float = 0.2
    warm_up: float = 5.0  # epochs in which the rate rises from 0
    rates: str = "cosine"  # or "steps": a tenth after each quarter; or "poly": (1 - t)^0.9
    slow: str = ""  # modules whose names begin so learn at a tenth of the rate
    optimizer: str = "sgd"  # or "adam"
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    cutout: int = 0  # pixels of a square that is blank in every image
    crop: int = 0  # pixels of the square that is cut out of a picture of any size
    schedule: Schedule = Schedule()
    compact: str | None = None  # "auto": closed channels are taken out on the way
    compiled: bool = False  # torch.compile
    distill: float = 0.0  # share of the loss that is the baseline's opinion
    temperature: float = 4.0
    scored: int = 10  # epochs between looks at the test set, for curves: nothing is chosen by them
    recalibrate: int = 0  # batches from which batch norms take their statistics anew at the end
    tune_epochs: int = 0  # after removal
    tune_lr: float = 0.02
    seed: int = 0
    controls: Controls = Controls()

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), _KINDS[str(field.type)]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise PruneError(f"recipe: {field.name}={value!r}, which should be a {field.type}.")
            if field.name in _CHOICES and value not in _CHOICES[field.name]:
                known = ", ".join(_CHOICES[field.name])
                raise PruneError(f"recipe: {field.name}={value!r}; there are {known}.")
            least, most = _LIMITS.get(field.name, (None, None))
            if (least is not None and not value >= least) or (most is not None and value > most):
                upto = "" if most is None else f", at most {most}"
                raise PruneError(f"recipe: {field.name}={value!r}; at least {least}{upto}.")

    def rate(self, progress: float, epochs: int) -> float:
        """The learning rate at a time between 0 and 1, as a share of the highest."""
        rising = self.warm_up / epochs
        if progress < rising:
            return progress / rising
        if self.rates == "steps":
            return float(10.0 ** -math.floor(4 * progress))
        done = (progress - rising) / (1 - rising)
        if self.rates == "poly":
            return float((1 - done) ** 0.9)
        return 0.5 * (1 + math.cos(math.pi * done))


_KINDS: dict[str, Any] = {
    "int": int, "float": (int, float), "bool": bool, "str": str, "str | None": (str, type(None)),
    "Schedule": Schedule, "Controls": Controls,
}  # fmt: skip
_CHOICES = {"rates": ("cosine", "steps", "poly"), "optimizer": ("sgd", "adam")}
_LIMITS: dict[str, tuple[float, float | None]] = {
    **dict.fromkeys(("batch", "epochs", "scored"), (1, None)),
    **dict.fromkeys(("baseline_epochs", "tune_epochs", "cutout", "crop", "recalibrate"), (0, None)),
    **dict.fromkeys(("baseline_lr", "lr", "tune_lr", "warm_up", "weight_decay"), (0, None)),
    **dict.fromkeys(("momentum", "label_smoothing", "distill"), (0, 1)),
    "seed": (0, 2**63 - 1),
}


def per_epoch(decay: float, epochs: int, start: float = 0.1) -> Schedule:
    """ε as the paper gives it: multiplied by a number once an epoch."""
    return Schedule(eps_start=start, eps_end=start * decay**epochs)


def _paper(network: str) -> Recipe:
    return Recipe(
        network, baseline_epochs=350, epochs=350, batch=128, baseline_lr=0.1, lr=0.1, warm_up=0.0,
        schedule=per_epoch(0.96, 350),
    )  # fmt: skip


def _mobilenetv2(network: str) -> Recipe:
    """Chosen on `mobilenetv2_88m`."""
    return Recipe(
        network, baseline_epochs=250, epochs=250, weight_decay=1.5e-4, distill=0.9, cutout=16
    )


def _plain(network: str) -> Recipe:
    """The same for `--lam`: every proximal step as published, and ε falls once an epoch."""
    paper = _paper(network)
    return replace(paper, schedule=Schedule.paper(decay=0.96, every=_CIFAR10 // paper.batch))


_CIFAR10 = 50000  # images to learn from


def _imagenet(network: str, **changes: Any) -> Recipe:
    """As the paper has it; where it is silent (batch, weight decay), as PyTorch's example."""
    usual = Recipe(
        network, "imagenet", baseline_epochs=90, epochs=140, batch=256, baseline_lr=0.1, lr=0.1,
        warm_up=0.0, nesterov=False, weight_decay=1e-4, schedule=per_epoch(0.9, 140),
    )  # fmt: skip
    return replace(usual, **changes)


_EPS_VOC = 0.1 * 0.97**500  # × 0.97 every 120 of 60,000 steps
RECIPES = {
    "resnet56": Recipe("resnet56", distill=0.9, cutout=8),
    "vgg16": Recipe("vgg16", baseline_lr=0.1, lr=0.1, distill=0.9, cutout=16),
    "mobilenetv2": _mobilenetv2("mobilenetv2"),
    "mobilenetv2_88m": _mobilenetv2("mobilenetv2_88m"),
    "resnet20": Recipe("resnet20"),
    "deeplabv3plus": Recipe(
        "deeplabv3plus", "voc", pretrained="IMAGENET1K_V1", baseline_epochs=45, epochs=91, batch=16,
        baseline_lr=0.01, lr=0.01, warm_up=0.0, rates="poly", slow="backbone", nesterov=False,
        weight_decay=1e-4, crop=513, schedule=Schedule(eps_end=_EPS_VOC, gate_lr=0.09),  # 9e-4
    ),
    "deeplabv3plus-scratch": Recipe(
        "deeplabv3plus", "voc", baseline_epochs=100, epochs=100, batch=16, baseline_lr=0.05,
        lr=0.05, rates="poly", crop=513,
        schedule=Schedule(eps_end=_EPS_VOC, gate_lr=0.018),  # 9e-4
    ),
    "deeplab_backbone": Recipe("deeplab_backbone", baseline_epochs=30, baseline_lr=0.1),
    "stylenet": Recipe(  # as PyTorch's example, which the paper started from
        "stylenet", "style", baseline_epochs=40, epochs=40, batch=4, baseline_lr=1e-3, lr=1e-3,
        warm_up=0.0, optimizer="adam", weight_decay=0.0,
    ),
    "mobilenet_v1": _imagenet("mobilenet_v1", rates="steps"),
    "mobilenet_v2": _imagenet(
        "mobilenet_v2", label_smoothing=0.1, weight_decay=4e-5, baseline_lr=0.05, lr=0.05,
        pretrained="IMAGENET1K_V1",
    ),
    "resnet50": _imagenet("resnet50", label_smoothing=0.1, pretrained="IMAGENET1K_V1"),
    "resnet50-steps": _imagenet("resnet50", rates="steps", pretrained="IMAGENET1K_V1"),
    **{f"{name}-paper": _paper(name) for name in ("resnet56", "vgg16", "mobilenetv2")},
    **{f"{name}-plain": _plain(name) for name in ("resnet56", "vgg16", "mobilenetv2")},
}  # fmt: skip


def recipe(name: str, **changes: Any) -> Recipe:
    """A recipe by its name, with some numbers changed."""
    if name not in RECIPES:
        raise PruneError(f"there is no recipe {name!r}. Recipes: {', '.join(RECIPES)}.")
    found = RECIPES[name]
    for key, value in changes.items():
        found = _changed(found, key, value)
    return found


def _changed(found: Any, key: str, value: Any) -> Any:
    """A copy with one number changed; `schedule.done` reaches into the schedule."""
    key, _, inner = key.partition(".")
    if not is_dataclass(found) or isinstance(found, type):
        raise PruneError(f"{found!r} has no {key!r}: it is a plain value.")
    known = [field.name for field in fields(found)]
    if key not in known:
        raise PruneError(f"a {type(found).__name__} has no {key!r}. It has {', '.join(known)}.")
    return replace(found, **{key: _changed(getattr(found, key), inner, value) if inner else value})
