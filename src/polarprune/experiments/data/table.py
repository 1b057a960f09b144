"""`open_data`: data sets by name, such as `cifar10:DIR`, and the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import PruneError
from ...integrations.factories import names_module
from ..settings import Settings
from .cifar10 import open_cifar10
from .imagenet import SIDE, open_imagenet
from .images import LabelledImages
from .own import open_own
from .style import open_style
from .task import Task
from .text import CONTEXT, open_text
from .tiny_imagenet import open_tiny_imagenet
from .voc import open_voc

OWN = "own"  # the kind of what a user's function returns
DATA_SETS: dict[str, Callable[[Path], Task]] = {
    "cifar10": open_cifar10,
    "imagenet": open_imagenet,
    "style": open_style,
    "tiny-imagenet": open_tiny_imagenet,
    "voc": open_voc,
}
_UNPACKED = "DIR, where DIR holds the unpacked data set"
_FOLDER, _TEXT = "folder", "text"
KINDS = (*DATA_SETS, _FOLDER, _TEXT, OWN)
FORMS = (*(f"{kind}:DIR" for kind in (*DATA_SETS, _FOLDER)), f"{_TEXT}:FILE", "file.py:make_data")


def kind_of(name: str) -> str:
    """Return the kind of data that a name stands for, one of `KINDS`."""
    kind = name.partition(":")[0]
    return kind if kind in KINDS[:-1] else OWN


def open_data(name: str, settings: Settings | None = None) -> Task:
    """Open a data set.

    Args:
        name: `KIND:DIR`, where KIND is a key of `DATA_SETS` and DIR the folder of the data;
            `folder:DIR` for any folder of photos; `text:FILE`; `file.py:make_data` or
            `package.module:make_data` for a function that returns data.
        settings: If given, only the kind of data that these settings are for is accepted, and
            `crop` is the side of the photos of `folder:DIR`, `context` the length of the windows
            of `text:FILE`; `side` and `per_class` change CIFAR-10 and Tiny ImageNet. A network of
            the user's own accepts all.

    Raises:
        PruneError: The name has another form, or the folder does not hold the data set.
    """
    found = _open(name, settings)
    if settings is None or not (settings.side or settings.per_class):
        return found
    if not isinstance(found, LabelledImages):
        raise PruneError(
            f"--data {name}: side and per_class are for cifar10:DIR and tiny-imagenet:DIR. Leave "
            f"them out."
        )
    return found.of_settings(settings)


def _open(name: str, settings: Settings | None) -> Task:
    kind, _, rest = name.partition(":")
    fixed = settings is not None and ":" not in settings.network
    if settings is not None and fixed and (kind != settings.data or not rest):
        form = "FILE, a text in UTF-8" if settings.data == _TEXT else _UNPACKED
        raise PruneError(f"--data {name}: give {settings.data}:{form}.")
    if kind == _FOLDER and rest:
        return open_imagenet(Path(rest), (settings and settings.crop) or SIDE, _FOLDER)
    if kind == _TEXT and rest:
        return open_text(Path(rest), settings.context if settings else CONTEXT)
    if kind in DATA_SETS and rest:
        return DATA_SETS[kind](Path(rest))
    if rest and names_module(name.rpartition(":")[0]):
        return open_own(name)
    raise PruneError(f"--data {name}: give {', '.join(FORMS[:-1])} or {FORMS[-1]}.")
