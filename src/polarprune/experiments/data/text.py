"""Text: `text:FILE`, a file in UTF-8 whose characters a network predicts one by one.

As in nanoGPT, the network learns from the first 90 % of the characters and is scored on the rest.
An example is a window of `context` characters, whose targets are the characters that follow each of
them. The windows of training begin anywhere; those that are scored lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import PruneError
from ..settings import Settings
from .distillation import classification_loss
from .task import Stream, Task, evaluating

CONTEXT = 256  # characters of a window, as in nanoGPT's settings for Shakespeare
_TRAINED_ON = 0.9  # of all characters
_AT_ONCE = 64  # windows that are scored together
_SAME = 1e-3  # difference of a loss that rounding may cause


@dataclass(frozen=True)
class Text(Task):
    """The characters to learn from and to score on, as numbers that start at 0.

    Attributes:
        train: The characters to learn from, in their order.
        test: The characters to score on, in their order.
        classes: The number of different characters.
        context: Characters of a window.
    """

    train: Tensor
    test: Tensor
    classes: int
    context: int = CONTEXT
    measure = "validation loss"
    higher_is_better = False
    unit = "windows"

    def to(self, device: str | torch.device) -> Text:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def held_out(self, count: int) -> Text:
        """Return a task that scores on the last windows of the training text."""
        end = len(self.train) - count * self.context
        task = replace(self, train=self.train[:end], test=self.train[end - 1 :])
        return task._checked("--hold-out")

    def stream(self, settings: Settings) -> Windows:
        return Windows(self.train, self.context, settings.batch, settings.epoch_steps)

    def example(self) -> Tensor:
        return self.test[: self.examples * self.context].view(self.examples, self.context)

    def answers(self, model: nn.Module) -> Tensor:
        """Return the cross entropy of every character but the first, which nothing predicts."""
        count = (len(self.test) - 1) // self.context * self.context
        x, y = (self.test[k : k + count].view(-1, self.context) for k in (0, 1))
        pairs = list(zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True))
        if len(self.test) - 1 > count:  # the last window is shorter
            pairs.append((self.test[None, count:-1], self.test[None, count + 1 :]))
        with evaluating(model):
            return torch.cat([_losses(model(x), y) for x, y in pairs])

    def score(self, answers: Tensor) -> float:
        return float(answers.double().mean())

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Return whether the losses of all characters differ by no more than rounding."""
        return float((one - other).abs().max()) < _SAME

    def shown(self, score: float) -> str:
        return f"{score:.4f}"

    def loss(self, model: nn.Module) -> float:
        return self.score(self.answers(model))

    @property
    def counts(self) -> tuple[int, int]:
        train, test = (-(-(len(part) - 1) // self.context) for part in (self.train, self.test))
        return train, test

    def _checked(self, name: str) -> Text:
        """Return the task, or refuse it if a part of the text is too short."""
        least = self.examples * self.context + 1
        shortest = min(len(self.train), len(self.test))
        if shortest < least:
            raise PruneError(
                f"{name}: a part of the text has {shortest:,} characters, but at least {least:,} "
                f"are needed to learn from and to score on. Give a longer text or a smaller "
                f"context."
            )
        return self


class Windows(Stream):
    """Training batches: windows that begin anywhere in the text.

    Args:
        text: The characters.
        context: Characters of a window.
        size: Windows of a batch.
        steps: Batches of an epoch; 0 for as many as the text has windows for.
    """

    def __init__(self, text: Tensor, context: int, size: int, steps: int = 0) -> None:
        self.text, self.context, self.size, self.device = text, context, size, text.device
        self.per_epoch = steps or len(text) // context // size
        self.examples = self.per_epoch * size

    def shuffle(self) -> None:
        """Do nothing: every batch is drawn from the whole text."""

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.text) - self.context, (self.size, 1), device=self.device)
        where = starts + torch.arange(self.context, device=self.device)
        return self.text[where], self.text[where + 1]

    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        flat = None if teacher is None else teacher.flatten(0, 1)
        return classification_loss(output.flatten(0, 1), target.flatten(), flat, settings)

    def accuracy(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(2) == target).float().mean()


def _losses(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of every character of some windows, one after the other."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")


def open_text(file: Path, context: int = CONTEXT) -> Text:
    """Read a text.

    Args:
        file: The text, in UTF-8.
        context: Characters of a window.

    Raises:
        PruneError: The file cannot be read, or is too short.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PruneError(f"--data text:{file}: cannot read it ({error}). Give a text.") from error
    known = sorted(set(text))
    number = {character: k for k, character in enumerate(known)}
    characters = torch.tensor([number[character] for character in text])
    first = int(_TRAINED_ON * len(text))
    task = Text(characters[:first], characters[first:], len(known), context)
    return task._checked(f"--data text:{file}")
