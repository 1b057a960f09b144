"""`Task` and `Stream`: the interface between an experiment and its data.

A `Task` holds the training and the test examples and scores a model. Its `Stream` makes the
training batches and computes the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...torch_internals.patches import full_float32_precision
from ..settings import Settings


class Stream(ABC):
    """Training batches and the loss of a model's outputs.

    A CUDA graph can hold `next` if all state is in tensors that are written in place. A stream that
    cannot do this, such as a loader with workers, sets `captured = False`.
    """

    captured = True
    per_epoch: int  # batches
    examples: int  # in these batches, of all processes together
    device: torch.device

    @abstractmethod
    def shuffle(self) -> None:
        """Start an epoch."""

    @abstractmethod
    def next(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the next batch, on the device."""

    @abstractmethod
    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        """Return the loss of a batch; `teacher` has the teacher's outputs, if there is one."""

    @abstractmethod
    def accuracy(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the share of correct outputs of a batch, for the log."""


class InMemoryStream(Stream):
    """Batches of data that lie entirely on the device, in an order that is drawn every epoch."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self.count, self.size, self.device = count, size, device
        self.per_epoch = count // size
        self.examples = self.per_epoch * size
        self.order = torch.zeros(self.per_epoch * size, dtype=torch.long, device=device)
        self.at = torch.zeros((), dtype=torch.long, device=device)

    def shuffle(self) -> None:
        order = torch.randperm(self.count, device=self.device)
        self.order.copy_(order[: len(self.order)])
        self.at.zero_()

    def next_indices(self) -> Tensor:
        """Return the indices of the examples of the next batch."""
        indices = self.order[self.at + torch.arange(self.size, device=self.device)]
        self.at += self.size
        return indices


class Task(ABC):
    """Training and test examples on the device where they are used."""

    measure = "accuracy"  # what `score` is called in logs and cards
    higher_is_better = True
    unit = "images"  # what the examples are, for messages
    examples = 2  # in the traced batch: a batch norm over single values needs more than one
    classes: int | None = None  # None if it is not known, or if there are none

    @abstractmethod
    def to(self, device: str | torch.device) -> Task:
        """Return the same task with its data on another device."""

    @abstractmethod
    def held_out(self, count: int) -> Task:
        """Return a task that scores on `count` training examples, which it does not train on.

        Hyper-parameters are chosen on these, so that the test set is used only once.
        """

    @abstractmethod
    def stream(self, settings: Settings) -> Stream:
        """Return the training batches."""

    @abstractmethod
    def example(self) -> Tensor:
        """Return the batch that is traced."""

    @abstractmethod
    def answers(self, model: nn.Module) -> Tensor:
        """Return the predictions for all test examples, in eval mode and full precision.

        For classes, a prediction is the argmax.
        """

    @abstractmethod
    def score(self, answers: Tensor) -> float:
        """Return the score of predictions, in the unit that `measure` names."""

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Return whether two sets of predictions are equal."""
        return bool((one == other).all())

    def shown(self, score: float) -> str:
        """Return a score as text."""
        return f"{score:.2%}"

    def details(self, answers: Tensor) -> dict[str, object]:
        """Return what a card stores besides the score."""
        return {}

    @abstractmethod
    def loss(self, model: nn.Module) -> float:
        """Return the mean loss on the test examples."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """The number of training and of test examples."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: eval mode, no gradients and full precision; restores the modes at the end.

    Without it, a GPU would round the inputs of convolutions to TF32.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), full_float32_precision():
            yield
    finally:
        for module, training in modes:
            module.training = training


def held_out_order(count: int) -> Tensor:
    """Return a fixed random order of the training examples; the first ones are held out."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(10))
