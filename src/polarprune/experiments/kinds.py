"""Data by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import PruneError
from .data import open_cifar10
from .imagenet import open_imagenet
from .recipes import Recipe
from .style import open_style
from .task import Task
from .voc import open_voc

KINDS: dict[str, Callable[[Path], Task]] = {
    "cifar10": open_cifar10,
    "imagenet": open_imagenet,
    "style": open_style,
    "voc": open_voc,
}


def open_data(name: str, recipe: Recipe | None = None) -> Task:
    """`cifar10:DIR`, `imagenet:DIR` and so on; a recipe says which of them it is for."""
    kind, _, folder = name.partition(":")
    wanted = [recipe.data] if recipe else list(KINDS)
    if kind not in wanted or not folder:
        forms = " or ".join(f"{kind}:DIR" for kind in wanted)
        raise PruneError(f"--data {name}: give {forms}, the folder with the unpacked data set.")
    return KINDS[kind](Path(folder))
