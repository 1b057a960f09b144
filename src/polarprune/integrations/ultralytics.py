"""Ultralytics: `YOLO(...).train(trainer=PruningTrainer.with_budget(macs=0.5), ...)`."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import PruneError
from ..gates.folding import plain
from ..torch_internals.markers import attach_run, attached_run, detach_run
from ..training.pruner import Pruner
from .refusals import refuse

try:
    import numpy as np
    from ultralytics.engine.trainer import BaseTrainer
    from ultralytics.models.yolo.classify import ClassificationTrainer
    from ultralytics.models.yolo.detect import DetectionTrainer
    from ultralytics.models.yolo.segment import SegmentationTrainer
    from ultralytics.utils import RANK
    from ultralytics.utils.patches import torch_load
    from ultralytics.utils.torch_utils import init_seeds
except ImportError as error:
    raise PruneError(
        "PruningTrainer needs ultralytics. Install it with: pip install 'polarprune[ultralytics]'"
    ) from error

_REMEDY = (
    "pass trainer=PruningTrainer (or the one of its task) of polarprune.integrations.ultralytics"
)


class PrunedYaml(dict[str, object]):
    """The `yaml` of a pruned model, without the part from which Ultralytics builds the full model.

    Any other trainer would build the full model from it without a warning.
    """

    def __missing__(self, key: str) -> NoReturn:
        raise PruneError(
            f"train: this model is pruned, and its yaml has no {key!r}: another trainer would "
            f"build the full size from it. To train it as it is, or to resume its pruning, "
            f"{_REMEDY}."
        )


class Pruning(BaseTrainer):
    """Makes a trainer of Ultralytics prune to a budget, or train a pruned model as it is.

    Put it before the trainer of any task: `class PosePruning(Pruning, PoseTrainer)`. Its
    checkpoints resume with `resume=True` and the same trainer. At the end, `best.pt` and `last.pt`
    hold the small, plain model; only epochs that meet the budget can be the best.

    Attributes:
        settings: Arguments of `Pruner`. Without any, the model is trained as it is.
        pruner: The `Pruner`, once the training has started.
    """

    settings: ClassVar[dict[str, Any]] = {}
    pruner: Pruner | None = None
    ema: Any
    _start: nn.Module  # the model before it got gates
    _landed = False  # whether the budget was met at the last validation

    @classmethod
    def with_budget(cls, **settings: Any) -> type[Any]:
        """Return a trainer class with these arguments of `Pruner`, such as `macs=0.5`.

        Example:
            >>> YOLO("yolo11n.pt").train(trainer=PruningTrainer.with_budget(macs=0.5), data=data)
        """
        return type(cls.__name__, (cls,), {"settings": settings})

    # --- building ---------------------------------------------------------------------------------

    def get_model(self, cfg: object = None, weights: Any = None, verbose: bool = True) -> object:
        """Return the full model, the one that a run started with, or a copy of a pruned one."""
        run = attached_run(weights)
        if run is not None and self.resume:
            return run["start"].float()
        if not isinstance(cfg, PrunedYaml):
            return super().get_model(cfg=cfg, weights=weights, verbose=verbose)
        if len(weights.names) != self.data["nc"]:
            raise PruneError(
                f"train: the pruned model has {len(weights.names)} classes and the data "
                f"{self.data['nc']}. Prune a model that was trained on these classes."
            )
        return deepcopy(weights).requires_grad_(True)

    def build_optimizer(self, model: nn.Module, **options: object) -> Optimizer:
        """Return the optimizer, with a group for the gates that warm-up and schedule apply to."""
        optimizer: Optimizer = super().build_optimizer(model=model, **options)
        if self.settings:
            self._check()
            size = (2, self.data["channels"], self.args.imgsz, self.args.imgsz)
            images = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(self.device)
            steps, self._start = self._optimizer_steps(), deepcopy(model).cpu().half()
            # Ultralytics fuses its layers after the training: none of them may be replaced.
            settings = {"steps": steps, "min_channels": 1, **self.settings}
            self.pruner = Pruner(model, images, **settings)
            weights = min(optimizer.param_groups, key=lambda group: group["lr"])
            gates = self.pruner.param_groups(lr=weights["lr"])[-1]
            known = {k: v for k, v in weights.items() if k not in ("params", "lr", "weight_decay")}
            optimizer.add_param_group({**known, **gates, "param_group": "gates"})
            self.pruner.attach(optimizer)
        return optimizer

    def _check(self) -> None:
        """Refuse what this trainer cannot do."""
        options = ("time", "compile", "distill_model")
        wrong = {name: getattr(self.args, name, None) for name in options}
        wrong["quantize=8"] = getattr(self.args, "quantize", None) == 8
        wrong["several devices"] = RANK != -1
        text = "pruning does not work with {}; train without it."
        refuse("train", {text.format(name): found for name, found in wrong.items()})

    def _optimizer_steps(self) -> int:
        """Return how many steps the loop of Ultralytics will take."""
        batches = len(self.train_loader)
        warm = self._get_warmup_iterations(batches)
        count, last = 0, -1
        for number in range(batches * self.epochs):
            ramp = np.interp(number, [0, warm], [1, self.accumulate]) if number < warm else None
            if number - last >= (self.accumulate if ramp is None else max(1, int(ramp.round()))):
                count, last = count + 1, number
        return count

    # --- training ---------------------------------------------------------------------------------

    def _model_train(self) -> None:
        """Start an epoch, with random numbers that do not depend on where the run was resumed."""
        super()._model_train()
        seed = self.args.seed + 1 + self.epoch
        init_seeds(seed, deterministic=self.args.deterministic)
        self.train_loader.sampler.generator = torch.Generator().manual_seed(seed)

    def optimizer_step(self) -> None:
        """Take a step; the tensors of the average may be cut in it."""
        if self.pruner is None:
            super().optimizer_step()
            return
        average, self.ema, before = self.ema, None, self.pruner.compactions
        self.pruner.copies = [average.ema]  # after a resume, it has had no update yet
        super().optimizer_step()
        self.ema = average
        if self.pruner.compactions > before:
            average._pairs = None  # tensors with the old shapes
        average.update(self.model)

    def validate(self) -> object:
        """Validate; a model from before the budget was met cannot be the best."""
        if self.pruner is not None and not self._landed:
            self.best_fitness, self.stopper.best_fitness = None, 0.0
            self.stopper.best_epoch, self._landed = self.epoch + 1, self.pruner.landed
        return super().validate()

    def save_metrics(self, metrics: dict[str, object]) -> None:
        """Write the metrics of an epoch, with the share of the MACs that is left."""
        if self.pruner is not None:
            metrics = {**metrics, "pruning/macs": self.pruner.history[-1]["macs"]}
        super().save_metrics(metrics)

    # --- checkpoints ------------------------------------------------------------------------------

    def save_model(self) -> bool:
        """Write checkpoints that hold a plain model, with all that resuming needs attached."""
        if self.pruner is None:
            return bool(super().save_model())
        average = self.ema.ema
        states = [deepcopy(part.state_dict()) for part in (self.model, average, self.optimizer)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns that training is not at its end
            small = self.pruner.export(model=average, verify=False) if self.pruner.landed else None
        self.ema.ema = plain(average) if small is None else small
        attach_run(self.ema.ema, {"states": states, "start": self._start})
        self.ema.ema.yaml = _without_backbone(average.yaml)
        try:
            return bool(super().save_model())
        finally:
            self.ema.ema = average

    def _load_checkpoint_state(self, ckpt: dict[str, object]) -> None:
        """Restore everything from a checkpoint, as it was."""
        if self.pruner is None:
            super()._load_checkpoint_state(ckpt)
            return
        run = attached_run(ckpt["ema"])
        if run is None:
            raise PruneError(
                "resume: this checkpoint comes from a run without pruning; start a new run."
            )
        model, average, optimizer = run["states"]
        self.model.load_state_dict(model)
        gated = deepcopy(self.model)
        gated.load_state_dict(average)
        super()._load_checkpoint_state({**ckpt, "ema": gated, "optimizer": optimizer})
        self._landed = self.pruner.landed

    def _handle_nan_recovery(self, epoch: int) -> bool:
        """Stop where Ultralytics would go back to the last checkpoint, which has no gates."""
        if self.pruner is None:
            return bool(super()._handle_nan_recovery(epoch))
        if self.loss is not None and not self.loss.isfinite():
            raise PruneError(
                f"train: the loss is not finite in epoch {epoch + 1}. Resume from {self.last}, or "
                f"start again with a lower lr0."
            )
        return False

    def final_eval(self) -> None:
        """Prove the small model equal to the gated one, and validate the best one."""
        if self.pruner is not None:
            self.pruner.export()
            for file in filter(Path.exists, (self.last, self.best)):
                content = torch_load(file, map_location="cpu")
                detach_run(content["ema"])
                torch.save(content, file)
        super().final_eval()


def _without_backbone(yaml: dict[str, object]) -> PrunedYaml:
    return PrunedYaml({key: value for key, value in yaml.items() if key != "backbone"})


class PruningTrainer(Pruning, DetectionTrainer):
    """`DetectionTrainer` with pruning."""


class PruningSegmentationTrainer(Pruning, SegmentationTrainer):
    """`SegmentationTrainer` with pruning."""


class PruningClassificationTrainer(Pruning, ClassificationTrainer):
    """`ClassificationTrainer` with pruning."""
