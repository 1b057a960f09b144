"""Hugging Face: `PruningTrainer(..., pruning={"macs": 0.5})` in place of `Trainer`.

`save_pretrained` writes the small model as a folder that plain transformers loads, and
`folder_settings` finds the settings with which it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..tracing.model_state import Example
from ..training.pruner import Pruner
from ..validation.optional_packages import missing_package
from .folder_settings import folder_settings
from .gate_group import separate_gates, take_gates_out
from .pretrained_folder import save_pretrained
from .refusals import refuse

try:
    from transformers import Trainer, TrainerCallback, TrainerState
except ImportError as error:
    raise missing_package(
        "transformers", needed_for="PruningTrainer", extra="transformers"
    ) from error


__all__ = ["PruningTrainer", "folder_settings", "save_pretrained"]
_OF_FOLDERS = ("keep", "norms", "multiple_of", "min_channels")  # what `folder_settings` takes


class PruningTrainer(Trainer):
    """A `Trainer` that prunes the model to a budget while it trains it.

    It counts the steps as `Trainer` does, and adds a group for the gates to the optimizer of
    `Trainer`, whose groups with and without weight decay stay as they are. The pruner's state is in
    every checkpoint, so `trainer.train(resume_from_checkpoint=True)` resumes it. A best model
    (`load_best_model_at_end`, `EarlyStoppingCallback`) is chosen among those that meet the budget.
    The logs contain the share of the MACs and parameters that is left.

    To prune with another trainer, inherit from both: `class T(PruningTrainer, Seq2SeqTrainer)`.

    Args:
        *args: As for `Trainer`.
        pruning: Arguments of `Pruner`, such as {"macs": 0.5}; without `steps`. With "folder": True,
            `folder_settings` adds those with which `save_pretrained` can write the result.
        example_inputs: What the model takes; by default the first batch, without labels.
        **kwargs: As for `Trainer`; `model_init` is not possible.

    Attributes:
        pruner: The `Pruner`, also before `train`.

    Raises:
        PruneError: If the arguments exclude pruning; from `train`, as `Pruner` does.

    Example:
        >>> from polarprune.integrations.transformers import PruningTrainer
        >>> trainer = PruningTrainer(model, args, train_dataset=data, pruning={"macs": 0.5})
        >>> result = trainer.train()
        >>> small = trainer.export()
    """

    def __init__(
        self,
        *args: object,
        pruning: Mapping[str, Any],
        example_inputs: Example | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.pruning, self.example_inputs = dict(pruning), example_inputs
        self._pruner: Pruner | None = None
        self._attached = False
        self._check()

    def _check(self) -> None:
        """Refuse what a pruner cannot follow."""
        wrong = {
            "give model=..., since model_init makes several.": self.model_init is not None,
            "auto_find_batch_size=True changes the number of steps during the training; set "
            "per_device_train_batch_size.": self.args.auto_find_batch_size,
            "a scheduler that is made before the gates have a parameter group does not set its "
            "rate; set lr_scheduler_type, or override create_scheduler.": self.lr_scheduler,
            "DeepSpeed and XLA's FSDP make other parameters than the model has; train with "
            "DistributedDataParallel (torchrun, without these options), or with fsdp=True and "
            "version 2 in fsdp_config.": self.is_deepspeed_enabled or self.is_fsdp_xla_enabled,
        }
        refuse("PruningTrainer", wrong)
        if self.is_fsdp_enabled:
            self._check_fsdp()

    def _check_fsdp(self) -> None:
        """Refuse options of FSDP that a pruner cannot follow."""
        plugin = self.accelerator.state.fsdp_plugin
        wrong = {
            "version 1 does not work; set 2 in fsdp_config.": plugin.fsdp_version != 2,
            "FULL_STATE_DICT does not work; set state_dict_type to SHARDED_STATE_DICT in "
            "fsdp_config.": "SHARDED" not in str(plugin.state_dict_type),
            "activation_checkpointing in fsdp_config does not work; set "
            "gradient_checkpointing.": plugin.activation_checkpointing,
            "cpu_ram_efficient_loading does not work; set False in "
            "fsdp_config.": plugin.cpu_ram_efficient_loading,
            "load_best_model_at_end does not work; set False.": self.args.load_best_model_at_end,
        }
        refuse("PruningTrainer with FSDP", wrong)

    @property
    def pruner(self) -> Pruner:
        """The pruner. At the first use, at the latest in `train`, gates are installed."""
        if self._pruner is None:
            loader = self.get_train_dataloader()
            steps = self.set_initial_training_values(self.args, loader)[-1]
            example = self._first_batch(loader)
            settings = self._settings(example)
            self._pruner = Pruner(self.model, example, **{"steps": steps, **settings})
            self.add_callback(_BestWithinBudget(self._pruner))
        return self._pruner

    def _settings(self, example: Example) -> dict[str, Any]:
        """Return the arguments of the pruner, with those for a folder if one is wanted."""
        settings = dict(self.pruning)
        if settings.pop("folder", False):
            given = {name: settings.pop(name) for name in _OF_FOLDERS if name in settings}
            settings.update(folder_settings(self.model, example, **given))
        return settings

    def train(self, *args: object, **kwargs: object) -> object:
        """Train as `Trainer` does, with gates in the model."""
        assert self.pruner.gates  # installed before weights are loaded and the optimizer is made
        return super().train(*args, **kwargs)

    def _first_batch(self, loader: Iterable[Mapping[str, object]]) -> Example:
        """Return the user's example, or the first batch, without drawing random numbers."""
        if self.example_inputs is not None:
            return self.example_inputs
        with torch.random.fork_rng(devices=[]):
            batch = next(iter(loader))
        return {name: value for name, value in batch.items() if name not in self.label_names}

    def create_optimizer(self, *args: object, **kwargs: object) -> Optimizer:
        """Make the optimizer as `Trainer` does, move the gates, and attach the pruner."""
        optimizer: Optimizer = super().create_optimizer(*args, **kwargs)
        if self.is_fsdp_enabled:  # the model's parameters will be replaced
            take_gates_out(self.pruner, optimizer)
        else:
            self._attach(optimizer)
        return optimizer

    def create_scheduler(self, *args: object, **kwargs: object) -> object:
        """Make the scheduler as `Trainer` does, once the optimizer has all of its groups."""
        if self.is_fsdp_enabled:
            self._attach(self.optimizer.optimizer)
        return super().create_scheduler(*args, **kwargs)

    def _attach(self, optimizer: Optimizer) -> None:
        """Give the gates a group, and attach the pruner, at the first call."""
        if not self._attached:
            self._attached = True
            separate_gates(self.pruner, optimizer)
            self.pruner.attach(optimizer)

    def save_model(self, *args: object, **kwargs: object) -> None:
        """Save as `Trainer` does, under the names that the model has now.

        `Trainer` stores some models under older names, and does not find these when it resumes.
        """
        held: dict[str, object] = self.model.__dict__
        save = getattr(type(self.model), "save_pretrained", None)
        before = held.pop("save_pretrained", None)  # a model that is pruned again may refuse
        if save is not None:
            held["save_pretrained"] = partial(save, self.model, save_original_format=False)
        try:
            super().save_model(*args, **kwargs)
        finally:
            held.pop("save_pretrained", None)
            if before is not None:
                held["save_pretrained"] = before

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Log as `Trainer` does, and add the share of the MACs and parameters that is left."""
        row = self._pruner.history[-1] if self._pruner is not None else {}
        left = {f"{key}_left": row[key] for key in ("macs", "params") if key in row}
        super().log({**logs, **left}, *args, **kwargs)

    def export(self) -> nn.Module:
        """Return the small model, as `Pruner.export` does."""
        return self.pruner.export()


class _BestWithinBudget(TrainerCallback):
    """Discards a best model from before the budget was met, so that the next one counts as best."""

    def __init__(self, pruner: Pruner) -> None:
        self.first = pruner.schedule.deadline(pruner.steps) if pruner.limits else pruner.steps

    def on_step_end(
        self, args: object, state: TrainerState, control: object, **kwargs: object
    ) -> None:
        """Discard what an evaluation after an earlier step has found."""
        if state.best_global_step is not None and state.best_global_step < self.first:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
