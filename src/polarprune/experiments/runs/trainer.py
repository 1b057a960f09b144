"""`Trainer`: the training loop of all experiments.

On one GPU, the whole step is captured in a CUDA graph. On a CPU or with several processes, the same
code runs step by step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ...training.pruner import Pruner
from ..data.task import Stream
from ..methods.base import Groups, Method
from ..processes import rank_and_count, share_buffers, sum_over_processes
from ..settings import Settings
from .cuda_graph import CapturedStep
from .optimizers import clip_gradients, make_optimizer, split_by_decay, split_slow_group
from .training_cost import macs_of_an_example

TrainerState = dict[str, Any]  # what a training continues from: tensors and plain data


class Trainer:
    """Trains a model, with or without a pruner, another method, or a teacher.

    Args:
        model: The model to train.
        batches: Training batches and the loss.
        settings: Optimizer, learning rates, distillation and so on.
        epochs: Length of this training.
        lr: Highest learning rate of this training.
        pruner: If given, it is attached to the optimizer.
        teacher: If given, the loss also compares with the outputs of a copy of it.
        method: Another pruning method, instead of a pruner.
        example: A batch whose MACs are counted, for the cost of the training.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Stream,
        settings: Settings,
        *,
        epochs: int,
        lr: float,
        pruner: Pruner | None = None,
        teacher: nn.Module | None = None,
        method: Method | None = None,
        example: Tensor | None = None,
    ) -> None:
        self.model, self.batches, self.settings = model, batches, settings
        self.epochs, self.pruner, self.method = epochs, pruner, method or Method()
        self.teacher = copy.deepcopy(teacher).eval().requires_grad_(False) if teacher else None
        self.device = batches.device
        self.on_gpu = self.device.type == "cuda"
        self.steps = epochs * batches.per_epoch
        self.done = 0  # steps
        self.example, self._spent = example, 0  # MACs of these steps, for one example of each
        prunes = pruner is not None or method is not None
        self._landing = settings.schedule.done if prunes else 0.0
        self._wrap()
        self._run_teacher = self._compiled(self.teacher) if self.teacher else None
        groups = self._param_groups(lr)
        self.rates: list[float] = [group["lr"] for group in groups]
        self.optimizer = make_optimizer(groups, settings, self.device)
        if pruner:
            pruner.attach(self.optimizer)
        self.sums = torch.zeros(2, device=self.device)  # of the losses and of the accuracies
        alone = not distributed.is_initialized()
        captured = self.on_gpu and alone and self.method.captured and batches.captured
        self._run_step = CapturedStep(self._step, captured)
        self._compactions = 0
        self._count_macs()

    def _count_macs(self) -> None:
        """Count the MACs of a step at the present widths."""
        given = self.example
        self._macs = 0 if given is None else macs_of_an_example(self.model, self.teacher, given)

    @property
    def training_macs(self) -> int:
        """The MACs of all steps so far; see `training_cost`."""
        return self._spent * self.batches.examples // max(self.batches.per_epoch, 1)

    def _compiled(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the model, compiled if the settings say so."""
        return torch.compile(model) if self.settings.compiled else model

    def _wrap(self) -> None:
        """Compile the model if wanted, and let several processes average their gradients."""
        self._run_model = self._compiled(self.model)
        if distributed.is_initialized():
            ids = [self.device] if self.on_gpu else None
            self._run_model = DistributedDataParallel(self._run_model, device_ids=ids)

    def _param_groups(self, lr: float) -> Groups:
        decay = self.settings.weight_decay
        if self.pruner:
            groups = self.pruner.param_groups(lr=lr, weight_decay=decay)
        else:
            groups = self.method.param_groups(self.model, lr, decay)
        groups = split_slow_group(groups, self.model, self.settings.slow)
        return split_by_decay(groups) if self.settings.optimizer == "adamw" else groups

    def _step(self) -> None:
        self.model.train()
        x, y = self.batches.next()
        self.method.before_forward()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            output = self._run_model(x)
            teacher_output = None if self._run_teacher is None else self._run_teacher(x)
        loss = self.batches.loss(output, y, teacher_output, self.settings)
        penalty = self.method.penalty()
        (loss if penalty is None else loss + penalty).backward()
        self.method.after_backward()
        if self.settings.clip:
            clip_gradients(self._groups_of_weights(), self.settings.clip)
        self.optimizer.step()
        self.method.after_step(self.optimizer.param_groups[0]["lr"])
        self.sums += torch.stack([loss.detach(), self.batches.accuracy(output, y)])

    def _groups_of_weights(self) -> Groups:
        """Return the groups of the optimizer without that of the pruner's gates, the last one."""
        return self.optimizer.param_groups[: -1 if self.pruner else None]

    def _set_rate(self) -> None:
        share = self.settings.rate(self.done / self.steps, self.epochs, self._landing)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share

    def epoch(self) -> dict[str, float]:
        """Train for one epoch; see `advance`."""
        self.batches.shuffle()
        return self.advance(self.batches.per_epoch)

    def advance(self, count: int) -> dict[str, float]:
        """Train for `count` steps of an epoch and return the mean loss and accuracy."""
        self.sums.zero_()
        for _ in range(count):
            self._set_rate()
            replayed = self._run_step()
            if replayed and self.pruner is not None:
                self.pruner.replayed()
            self.done += 1
            self._spent += self._macs
            self._follow_compaction()
        share_buffers(self.model)
        total = count * rank_and_count()[1]
        loss, accuracy = (sum_over_processes(self.sums) / total).tolist()
        return {"loss": loss, "train_accuracy": accuracy}

    def _follow_compaction(self) -> None:
        """Capture and compile again after the pruner has changed shapes."""
        if self.pruner is not None and self.pruner.compactions > self._compactions:
            self._compactions = self.pruner.compactions
            self._run_step.discard()
            self._wrap()
            self._count_macs()

    def weights(self) -> TrainerState:
        """Return the state of the model and of the pruner."""
        return {
            "pruner": self.pruner.state_dict() if self.pruner else None,
            "model": self.model.state_dict(),
        }

    def load_weights(self, state: TrainerState) -> None:
        """Load what `weights` returned."""
        if self.pruner is not None:
            self.pruner.load_state_dict(state["pruner"])  # first: it restores the widths
            self._compactions = self.pruner.compactions
            self._count_macs()
        self.model.load_state_dict(state["model"])

    def state(self) -> TrainerState:
        """Return all that is needed to resume the training from here."""
        return {
            **self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.method.state(),
            "done": self.done,
            "spent": self._spent,
            "random": torch.get_rng_state(),
            "random_gpu": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }

    def load(self, state: TrainerState) -> None:
        """Resume from a state that `state` returned."""
        self.load_weights(state)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a graph may hold this tensor; its value is set at every step
        for name, tensor in self.method.state().items():
            tensor.copy_(state["method"][name])
        self.done, self._spent = state["done"], state["spent"]
        torch.set_rng_state(state["random"].cpu())
        if state["random_gpu"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random_gpu"].cpu())
