"""`open_data`: data sets by name, such as `cifar10:DIR`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import PruneError
from ..settings import Settings
from .cifar10 import open_cifar10
from .imagenet import open_imagenet
from .style import open_style
from .task import Task
from .voc import open_voc

DATA_SETS: dict[str, Callable[[Path], Task]] = {
    "cifar10": open_cifar10,
    "imagenet": open_imagenet,
    "style": open_style,
    "voc": open_voc,
}


def open_data(name: str, settings: Settings | None = None) -> Task:
    """Open a data set.

    Args:
        name: `KIND:DIR`, where KIND is a key of `DATA_SETS` and DIR the folder of the data.
        settings: If given, only the kind of data that these settings are for is accepted.

    Raises:
        PruneError: The name has another form, or the folder does not hold the data set.
    """
    kind, _, folder = name.partition(":")
    accepted = [settings.data] if settings else list(DATA_SETS)
    if kind not in accepted or not folder:
        forms = " or ".join(f"{kind}:DIR" for kind in accepted)
        raise PruneError(f"--data {name}: give {forms}, where DIR holds the unpacked data set.")
    return DATA_SETS[kind](Path(folder))
