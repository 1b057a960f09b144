"""Training as fast as one GPU goes: the whole step captured in a CUDA graph.

The same code runs on a CPU, step by step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from ..training.pruner import Pruner
from .processes import agree, rank_and_count, summed
from .recipes import Recipe
from .task import Stream

Groups = list[dict[str, Any]]  # of parameters, as an optimizer takes them
_WARM = 3  # steps before one is captured


class Captured:
    """Runs a function; on a GPU, after a few times, from a CUDA graph of it."""

    def __init__(self, function: Callable[[], None], on_gpu: bool) -> None:
        self.function, self.on_gpu = function, on_gpu
        self.discard()

    def discard(self) -> None:
        """Shapes are others now: capture anew."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = 0

    def __call__(self) -> bool:
        """True if it was replayed."""
        if not self.on_gpu:
            self.function()
            return False
        if self.warm < _WARM:
            self.warm += 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.function()
            torch.cuda.current_stream().wait_stream(side)
            return False
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.function()
        self.graph.replay()
        return True


class Method:
    """What a method adds to the steps of a training; this one adds nothing.

    All of it but `facts` may be captured in a CUDA graph: state is held in tensors that are written
    in place, and nothing is read back. A method that cannot do that sets `captured = False`.
    """

    captured = True

    def param_groups(self, model: nn.Module, lr: float, weight_decay: float) -> Groups:
        """For the optimizer."""
        return [{"params": list(model.parameters()), "lr": lr, "weight_decay": weight_decay}]

    def begin(self) -> None:
        """Before the forward pass."""

    def penalty(self) -> Tensor | None:
        """Added to the loss."""
        return None

    def pull(self) -> None:
        """After the backward pass, at the gradients."""

    def after(self, rate: Tensor | float) -> None:
        """After the optimizer's step; `rate` is the weights'."""

    def facts(self) -> dict[str, Any]:
        """For the log, once an epoch."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the model's own state: tensors to be written in place."""
        return {}


class Trainer:
    """Trains a model by a recipe, with or without a pruner, with or without a teacher."""

    def __init__(
        self,
        model: nn.Module,
        batches: Stream,
        recipe: Recipe,
        *,
        epochs: int,
        lr: float,
        pruner: Pruner | None = None,
        teacher: nn.Module | None = None,
        method: Method | None = None,
    ) -> None:
        self.model, self.batches, self.recipe = model, batches, recipe
        self.epochs, self.pruner, self.method = epochs, pruner, method or Method()
        self.teacher = copy.deepcopy(teacher).eval().requires_grad_(False) if teacher else None
        self.device = batches.device
        self._wrap()
        self._opinion: Any = self.teacher
        if recipe.compiled and self.teacher:
            self._opinion = torch.compile(self.teacher)
        self.steps = epochs * batches.per_epoch
        self.done = 0  # steps
        on_gpu = self.device.type == "cuda"
        groups: Groups = (
            pruner.param_groups(lr=lr, weight_decay=recipe.weight_decay)
            if pruner
            else self.method.param_groups(model, lr, recipe.weight_decay)
        )
        groups = slowed(groups, model, recipe.slow)
        self.rates = [group["lr"] for group in groups]
        if on_gpu:  # a captured step reads the rate from the device
            for group in groups:
                group["lr"] = torch.tensor(group["lr"], device=self.device)
        self.optimizer: Optimizer
        if recipe.optimizer == "adam":
            self.optimizer = Adam(groups, fused=on_gpu or None, capturable=on_gpu)
        else:
            self.optimizer = SGD(
                groups, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=on_gpu or None
            )
        if pruner:
            pruner.attach(self.optimizer)
        self.sums = torch.zeros(2, device=self.device)  # of losses, and of right answers
        alone = not distributed.is_initialized()
        captured = on_gpu and alone and self.method.captured and batches.captured
        self._run = Captured(self._step, captured)
        self._compactions = 0

    def _wrap(self) -> None:
        """What is called for the model's answers; of several processes each has its own batches."""
        self._scores: Any = torch.compile(self.model) if self.recipe.compiled else self.model
        if distributed.is_initialized():
            ids = [self.device] if self.device.type == "cuda" else None
            self._scores = DistributedDataParallel(self._scores, device_ids=ids)

    def _step(self) -> None:
        self.model.train()
        x, y = self.batches.next()
        self.method.begin()
        self.optimizer.zero_grad(set_to_none=True)
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            scores = self._scores(x)
            opinion = self._opinion(x) if self.teacher else None
        loss = self.batches.loss(scores, y, opinion, self.recipe)
        penalty = self.method.penalty()
        (loss if penalty is None else loss + penalty).backward()
        self.method.pull()
        self.optimizer.step()
        self.method.after(self.optimizer.param_groups[0]["lr"])
        self.sums += torch.stack([loss.detach(), self.batches.right(scores, y)])

    def _set_rate(self) -> None:
        share = self.recipe.rate(self.done / self.steps, self.epochs)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share

    def epoch(self) -> dict[str, float]:
        """One pass over what there is to learn from."""
        self.batches.shuffle()
        return self.advance(self.batches.per_epoch)

    def advance(self, count: int) -> dict[str, float]:
        """So many steps of an epoch."""
        self.sums.zero_()
        for _ in range(count):
            self._set_rate()
            replayed = self._run()
            if replayed and self.pruner is not None:
                self.pruner.replayed()
            self.done += 1
            if self.pruner is not None and self.pruner.compactions > self._compactions:
                self._compactions = self.pruner.compactions
                self._run.discard()
                self._wrap()
        agree(self.model)
        loss, right = (summed(self.sums) / (count * rank_and_count()[1])).tolist()
        return {"loss": loss, "train_accuracy": right}

    def state(self) -> dict[str, Any]:
        """All that is needed to go on from here."""
        return {
            "pruner": self.pruner.state_dict() if self.pruner else None,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.method.state(),
            "done": self.done,
            "random": torch.get_rng_state(),
            "random_gpu": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        if self.pruner is not None:
            self.pruner.load_state_dict(state["pruner"])  # first: it brings back the widths
            self._compactions = self.pruner.compactions
        self.model.load_state_dict(state["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a tensor that a graph may hold; the value is set at every step
        for name, tensor in self.method.state().items():
            tensor.copy_(state["method"][name])
        self.done = state["done"]
        torch.set_rng_state(state["random"].cpu())
        if state["random_gpu"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random_gpu"].cpu())


def slowed(groups: Groups, model: nn.Module, stem: str) -> Groups:
    """The first group in two, if some modules are to learn slowly."""
    if not stem:
        return groups
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    first, *rest = groups
    slow = [p for p in first["params"] if named[id(p)].startswith(stem)]
    quick = [p for p in first["params"] if not named[id(p)].startswith(stem)]
    return [
        {**first, "params": quick},
        {**first, "params": slow, "lr": 0.1 * first["lr"]},
        *rest,
    ]


def recalibrate(model: nn.Module, batches: Stream, count: int) -> None:
    """Statistics of batch norms taken anew, as the mean over some batches."""
    batches.shuffle()
    torch.optim.swa_utils.update_bn(
        (batches.next()[0] for _ in range(min(count, batches.per_epoch))), model
    )
    agree(model)


@contextmanager
def recalibrated(model: nn.Module, batches: Stream, count: int) -> Iterator[None]:
    """For a while: the statistics from before are put back."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        recalibrate(model, batches, count)
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
