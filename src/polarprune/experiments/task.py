"""What is learned, and how good a model is at it: all that an experiment knows of its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..surgery.proof import all_digits
from .recipes import Recipe


class Stream(ABC):
    """What to learn from, batch by batch, and what is wrong with a model's answers.

    Where all that changes is held in tensors that are written in place, a CUDA graph can hold
    `next`; where it is not (a loader with workers), `captured` says so.
    """

    captured = True
    per_epoch: int
    device: torch.device

    @abstractmethod
    def shuffle(self) -> None:
        """Begin an epoch."""

    @abstractmethod
    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and answers, on the device."""

    @abstractmethod
    def loss(self, out: Any, target: Tensor, opinion: Any, recipe: Recipe) -> Tensor:
        """`opinion` is what the teacher says, if there is one."""

    @abstractmethod
    def right(self, out: Any, target: Tensor) -> Tensor:
        """The share of answers that are right, for the log."""


class Shuffled(Stream):
    """Of data that lie on the device as a whole; all that changes is written in place."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self.count, self.size, self.device = count, size, device
        self.per_epoch = count // size
        self.order = torch.zeros(self.per_epoch * size, dtype=torch.long, device=device)
        self.at = torch.zeros((), dtype=torch.long, device=device)

    def shuffle(self) -> None:
        order = torch.randperm(self.count, device=self.device)
        self.order.copy_(order[: len(self.order)])
        self.at.zero_()

    def pick(self) -> Tensor:
        """The places of the next batch."""
        places = self.order[self.at + torch.arange(self.size, device=self.device)]
        self.at += self.size
        return places


class Task(ABC):
    """Data on the device where they are used, to learn from and to score on."""

    measure = "accuracy"  # what `score` is called in logs and cards
    examples = 2  # that are traced: a batch norm over single values needs more than one

    @abstractmethod
    def to(self, device: str | torch.device) -> Task: ...

    @abstractmethod
    def held_out(self, count: int) -> Task:
        """Scores are of so many things to learn from instead, which are not learned from.

        Hyper-parameters are chosen on these: the test set is looked at once.
        """

    @abstractmethod
    def stream(self, recipe: Recipe) -> Stream: ...

    @abstractmethod
    def example(self) -> Tensor:
        """What is traced."""

    @abstractmethod
    def answers(self, model: nn.Module) -> Tensor:
        """To all that is scored on, in eval mode and full precision; argmax where there are
        classes."""

    @abstractmethod
    def score(self, answers: Tensor) -> float: ...

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Are these answers alike?"""
        return bool((one == other).all())

    def shown(self, score: float) -> str:
        return f"{score:.2%}"

    def details(self, answers: Tensor) -> dict[str, Any]:
        """What a card should say besides the score."""
        return {}

    @abstractmethod
    def loss(self, model: nn.Module) -> float:
        """On what is scored on."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """How many to learn from, and to score on."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients, in full precision (a GPU would round the inputs of
    convolutions); afterwards all is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), all_digits():
            yield
    finally:
        for module, training in modes:
            module.training = training
