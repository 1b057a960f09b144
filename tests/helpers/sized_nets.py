"""Networks that are built from a config, as those of transformers are, without transformers."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Sizes:
    """A config: numbers as attributes, which can be converted to a dict."""

    def __init__(self, **numbers: Any) -> None:
        vars(self).update(numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, with those of configs inside."""
        held = copy.deepcopy(vars(self))
        return {k: v.to_dict() if isinstance(v, Sizes) else v for k, v in held.items()}

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> Sizes:
        """Return the config that gave these numbers."""
        parts = {k: cls.from_dict(v) for k, v in numbers.items() if isinstance(v, dict)}
        return cls(**{**numbers, **parts})


class EvenSizes(Sizes):
    """A config that refuses odd widths."""

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> Sizes:
        """Return the config that gave these numbers, unless one is odd."""
        if numbers.get("inner", 0) % 2:
            raise ValueError("inner has to be even")
        return super().from_dict(numbers)


class Sized(nn.Module):
    """The base of these networks: a config, and the method that writes it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def save_pretrained(self, folder: str) -> None:
        """Pretend to write the folder."""


class Perceptrons(Sized):
    """Blocks with one inner width for all of them, stages with their own, and a scale.

    `inner` may be missing: it is four times `width` then. `scaled` says how much the scale follows
    from the width of the first stage.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inner = 4 * config.width if config.inner is None else config.inner
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(config.width, inner), nn.Tanh(), nn.Linear(inner, config.width))
            for _ in range(config.depth)
        )
        widths = [config.width, *config.stages]
        self.stages = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.scale = 1 + config.scaled * config.stages[0] if config.stages else 1.0
        self.head = nn.Linear(widths[-1], config.top.classes)

    def forward(self, x: Tensor) -> Any:
        """Return the logits."""
        for block in self.blocks:
            x = x + block(x)
        for stage in self.stages:
            x = torch.tanh(stage(x)) * self.scale
        return self.head(x)


def perceptrons(kind: type[Sizes] = Sizes, **numbers: Any) -> Perceptrons:
    """Return a small network; its input has 6 features."""
    given = {"width": 6, "inner": 10, "depth": 2, "stages": [8, 8], "scaled": 0.0, **numbers}
    return Perceptrons(kind(**given, top=Sizes(classes=3)))
