"""`Settings`: every number of an experiment, and the checks on their values.

Cards and `run.json` store these classes field by field, and `--set` changes them by name: a renamed
field would make stored runs unreadable.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import TypeVar

from ..errors import PruneError
from ..training.schedule import Schedule

_Changed = TypeVar("_Changed")


@dataclass(frozen=True)
class MethodSettings:
    """The numbers of the methods that polarprune is compared with (see `methods`)."""

    slimming: float = 1e-5  # weight of Σ |γ|; its authors' value for ResNets
    lasso: float = 2e-5  # weight of Σ √size · ‖w‖
    l0_beta: float = 2 / 3  # temperature of the hard-concrete distribution
    l0_gamma: float = -0.1  # the distribution is stretched to gamma … zeta and clamped to 0 … 1
    l0_zeta: float = 1.1
    l0_drop: float = 0.1  # probability at the start, before stretching, that a channel is dropped
    l0_lr: float = 1.0  # as a factor of the learning rate of the weights
    l0_push: float = 100.0  # λ for each unit of distance from the planned cost
    l0_rise: float = 200.0  # λ for each unit of the mean distance over the whole run
    kernel_push: float = 1000.0  # the same two numbers for gates made of kernel norms
    kernel_rise: float = 0.0
    kernel_lam: float = 0.0  # a fixed λ for these gates; 0 adjusts λ to the planned cost
    naive_sl0: float = 1.0  # λ
    # `reg` of GroupNormPruner. Its authors use 5e-4 at a learning rate of 0.01 on ResNet-56; this
    # value has the same product with our learning rates over a run of 100 epochs.
    torch_pruning: float = 6.2e-5
    torch_pruning_decay: float = 0.0  # weight decay beside it, as its authors have it


@dataclass(frozen=True)
class Settings:
    """Train a baseline, prune it in a second training, export it, and fine-tune it if asked to."""

    network: str
    data: str = "cifar10"
    pretrained: str | None = None  # torchvision weights of the baseline or of its backbone
    baseline_epochs: int = 200
    epochs: int = 200  # while pruning
    batch: int = 256
    baseline_lr: float = 0.2
    lr: float = 0.2
    warm_up: float = 5.0  # epochs in which the learning rate rises from 0
    # Or "steps": a tenth after each quarter; "poly": (1 - t)^0.9; "restart": a cosine that starts
    # again at the highest rate when the budget is met.
    rates: str = "cosine"
    slow: str = ""  # modules whose names start with this learn at a tenth of the rate
    lr_end: float = 0.0  # where the cosine ends, as a share of the highest rate
    optimizer: str = "sgd"  # or "adam", or "adamw", which decays matrices only
    momentum: float = 0.9  # β₁ of Adam and AdamW
    beta2: float = 0.999  # of Adam and AdamW
    nesterov: bool = True
    weight_decay: float = 5e-4
    clip: float = 0.0  # largest norm of the gradients of all weights together; 0: any
    label_smoothing: float = 0.0
    cutout: int = 0  # side of the square that is blanked in every image, in pixels
    crop: int = 0  # side of the square that is cropped from a photo of any size, in pixels
    side: int = 0  # of CIFAR-10 or Tiny ImageNet, enlarged or reduced; 0: as they are
    context: int = 256  # characters of an example of text
    epoch_steps: int = 0  # batches of an epoch of text; 0: as many as the text has examples for
    per_class: int = 0  # training images of each class of these data sets; 0: all
    data_seed: int = 0  # draws them; the same for all seeds of a comparison
    schedule: Schedule = Schedule()
    compact: str | None = None  # "auto": remove closed channels during training
    uniform: bool = False  # the same widths at the same position of repeated blocks
    norms: bool = False  # channels that layer norms mix, such as a residual stream, are prunable
    multiple_of: int | str = 1  # every width is a multiple of this, or "auto" (see `Pruner`)
    compiled: bool = False  # torch.compile
    distill: float = 0.0  # share of the loss that compares with the baseline's logits
    temperature: float = 4.0
    # Epochs between scores on the test set, for curves; nothing is chosen by them, unless `best` is
    # set: then a stage ends with the weights that had the best score, once the budget was met.
    scored: int = 10
    best: bool = False
    recalibrate: int = 0  # batches from which batch norms re-estimate their statistics at the end
    tune_epochs: int = 0  # of fine-tuning after removal
    tune_lr: float = 0.02
    tune_decay: float | None = None  # weight decay of fine-tuning; None: as before
    scratch_epochs: int = 0  # of `thin` and `reinit`; 0: those of all stages together
    seed: int = 0
    controls: MethodSettings = MethodSettings()

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field, getattr(self, field.name))

    def rate(self, progress: float, epochs: int, landing: float = 0.0) -> float:
        """Return the learning rate as a share of the highest.

        Args:
            progress: Share of the training that is done, from 0 to 1.
            epochs: Length of the training, which sets the length of the warm-up.
            landing: Share after which the budget is met, for "restart"; 0 if nothing is pruned.
        """
        rising = self.warm_up / epochs
        if progress < rising:
            return progress / rising
        if self.rates == "steps":
            return float(10.0 ** -math.floor(4 * progress))
        done = (progress - rising) / (1 - rising)
        if self.rates == "poly":
            return float((1 - done) ** 0.9)
        if self.rates == "restart" and 0 < landing <= progress:
            done = (progress - landing) / (1 - landing)
        return self.lr_end + (1 - self.lr_end) * 0.5 * (1 + math.cos(math.pi * done))


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "int | str": (int, str),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
    "Schedule": (Schedule,),
    "MethodSettings": (MethodSettings,),
}
_CHOICES = {"rates": ("cosine", "steps", "poly", "restart"), "optimizer": ("sgd", "adam", "adamw")}
_LIMITS: dict[str, tuple[float, float | None]] = {
    **dict.fromkeys(("batch", "epochs", "scored", "context"), (1, None)),
    **dict.fromkeys(("baseline_epochs", "tune_epochs", "scratch_epochs", "recalibrate"), (0, None)),
    **dict.fromkeys(("cutout", "crop", "side", "per_class", "epoch_steps"), (0, None)),
    **dict.fromkeys(("baseline_lr", "lr", "tune_lr"), (0, None)),
    **dict.fromkeys(("warm_up", "weight_decay", "tune_decay", "clip"), (0, None)),
    **dict.fromkeys(("momentum", "beta2", "lr_end", "label_smoothing", "distill"), (0, 1)),
    **dict.fromkeys(("seed", "data_seed"), (0, 2**63 - 1)),
}


def _check(field: Field[object], value: object) -> None:
    """Refuse a value of the wrong type, outside of its choices or outside of its limits."""
    name, types = field.name, _TYPES[str(field.type)]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise PruneError(f"settings: {name}={value!r} must be of type {field.type}.")
    if name in _CHOICES and value not in _CHOICES[name]:
        choices = ", ".join(_CHOICES[name])
        raise PruneError(f"settings: {name}={value!r} must be one of {choices}.")
    if name in _LIMITS and isinstance(value, (int, float)):
        least, most = _LIMITS[name]
        if not value >= least or (most is not None and value > most):  # NaN fails, too
            limit = "" if most is None else f" and at most {most}"
            raise PruneError(f"settings: {name}={value!r} must be at least {least}{limit}.")


def changed(settings: _Changed, key: str, value: object) -> _Changed:
    """Return a copy with one field changed.

    Args:
        settings: A dataclass, such as `Settings`.
        key: Name of the field; `schedule.done` names the field `done` of the field `schedule`.
        value: The new value.

    Raises:
        PruneError: There is no such field, or its value is refused.
    """
    key, _, inner = key.partition(".")
    if not is_dataclass(settings) or isinstance(settings, type):
        raise PruneError(f"settings: {settings!r} is a plain value without a field {key!r}.")
    known = [field.name for field in fields(settings)]
    if key not in known:
        kind = type(settings).__name__
        raise PruneError(f"settings: {kind} has no field {key!r}. Fields: {', '.join(known)}.")
    new = changed(getattr(settings, key), inner, value) if inner else value
    return replace(settings, **{key: new})


def finite(numbers: dict[str, object]) -> dict[str, object]:
    """Return the same values as JSON can store them: infinity becomes the text "inf".

    `Schedule.paper` has no upper limit for the proximal step, which is stored as infinity.
    """
    return {
        key: finite(value) if isinstance(value, dict) else "inf" if value == math.inf else value
        for key, value in numbers.items()
    }
