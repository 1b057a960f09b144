"""The user's own data: `--data file.py:make_data`, a function without arguments.

It returns two data sets or two loaders, for training and for validation. An item of a data set is
an input tensor and its class, an integer. A batch of a loader is a tensor of inputs and a tensor of
their classes. The loader for validation has to give the same order every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from ...errors import PruneError
from ...integrations.factories import call_factory
from ..processes import rank_and_count
from ..settings import Settings
from .imagenet import CPU, LoaderStream
from .task import Task, evaluating, held_out_order

_TEST_BATCH = 128
_PARTS = ("training", "validation")
DataPart = Any  # a data set or a DataLoader of the user's


@dataclass(frozen=True)
class OwnData(Task):
    """What a user's function returned, checked.

    Attributes:
        name: The name of the function, for messages.
        train: A data set or a loader.
        test: A loader.
        first: The first inputs of `test`.
        targets: The class of every example of `test`.
        classes: Their number, if the data says it.
        device: Where batches are moved to.
    """

    name: str
    train: DataPart
    test: DataLoader[Any]
    first: Tensor
    targets: Tensor
    classes: int | None
    device: torch.device = CPU

    def to(self, device: str | torch.device) -> OwnData:
        return replace(self, device=torch.device(device))

    def held_out(self, count: int) -> OwnData:
        """Return a task that scores on training examples, as the training set gives them."""
        if isinstance(self.train, DataLoader):
            raise PruneError(f"{self.name}: to hold out examples, return data sets, not loaders.")
        order = held_out_order(len(self.train)).tolist()
        parts = (Subset(self.train, order[count:]), Subset(self.train, order[:count]))
        return replace(_checked(self.name, *parts), classes=self.classes)

    def stream(self, settings: Settings) -> LoaderStream:
        if isinstance(self.train, DataLoader):
            return OwnLoaderStream(self.name, self.train, self.device)
        return OwnStream(self.name, self.train, settings.batch, self.device)

    def example(self) -> Tensor:
        return self.first.to(self.device)

    def answers(self, model: nn.Module) -> Tensor:
        """Return all predictions; every process computes all of them."""
        found, targets = [], []
        with evaluating(model):
            for x, y in self.test:
                found.append(model(x.to(self.device)).argmax(1))
                targets.append(y)
        if not torch.equal(torch.cat(targets).cpu(), self.targets):
            raise PruneError(
                f"{self.name}: the validation data came in another order the second time. Return "
                f"a data set, or a loader with shuffle=False."
            )
        return torch.cat(found)

    def score(self, answers: Tensor) -> float:
        return float((answers.cpu() == self.targets).double().mean())

    def loss(self, model: nn.Module) -> float:
        total = torch.zeros((), device=self.device)
        with evaluating(model):
            for x, y in self.test:
                output = model(x.to(self.device)).float()
                total += F.cross_entropy(output, y.to(self.device), reduction="sum")
        return float(total) / len(self.targets)

    @property
    def counts(self) -> tuple[int, int]:
        data: DataPart = self.train.dataset if isinstance(self.train, DataLoader) else self.train
        return len(data), len(self.targets)


class OwnStream(LoaderStream):
    """Batches of a user's data set, with classes that the network must have."""

    def __init__(self, name: str, data: DataPart, batch: int, device: torch.device) -> None:
        super().__init__(data, batch, device)
        self.name, self._highest = name, 0

    def next(self) -> tuple[Tensor, Tensor]:
        x, y = next(self._batches)
        self._highest = int(y.max())  # before it is on a GPU, which would have to be waited for
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        if self._highest >= output.shape[1]:
            raise PruneError(
                f"{self.name}: an example is of class {self._highest}, but the network has only "
                f"{output.shape[1]} outputs. Classes are numbered from 0."
            )
        return super().loss(output, target, teacher, settings)


class OwnLoaderStream(OwnStream):
    """The batches of a user's own loader, whatever `batch` is."""

    def __init__(self, name: str, loader: DataLoader[Any], device: torch.device) -> None:
        if rank_and_count()[1] > 1:
            raise PruneError(f"{name}: for several processes, return data sets, not loaders.")
        self.name, self.loader, self.device, self._highest = name, loader, device, 0
        self.per_epoch = len(loader)
        self.examples = len(cast(Sized, loader.dataset))
        if loader.drop_last and loader.batch_size:
            self.examples = self.per_epoch * loader.batch_size
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def shuffle(self) -> None:
        self._batches = iter(self.loader)


def open_own(name: str) -> OwnData:
    """Return the data that a user's function makes.

    Args:
        name: `file.py:make_data` or `package.module:make_data`.

    Raises:
        PruneError: The function fails, or returns something else than it should.
    """
    found = call_factory(name, "data")
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise PruneError(
            f"{name}: it returned {_described(found)}; return two data sets or two loaders, "
            f"(train, val)."
        )
    return _checked(name, *found)


def _checked(name: str, train: DataPart, test: DataPart) -> OwnData:
    """Return the task of two parts, after a check of a batch of each."""
    loaders = [_loader(name, part, data) for part, data in zip(_PARTS, (train, test), strict=True)]
    for part, loader in zip(_PARTS, loaders, strict=True):
        _check_batch(name, part, next(iter(loader), None))
    first = next(iter(loaders[1]))[0][: OwnData.examples]
    targets = torch.cat([y for _, y in loaders[1]]).cpu()
    return OwnData(name, train, loaders[1], first, targets, _count_classes(train))


def _loader(name: str, part: str, data: DataPart) -> DataLoader[Any]:
    """Return a loader as it is, and a loader in a fixed order for a data set."""
    loader = isinstance(data, DataLoader)
    sized = isinstance(data.dataset if loader else data, Sized)
    if not sized or not (loader or hasattr(data, "__getitem__")):
        raise PruneError(
            f"{name}: its {part} data is {_described(data)}; return a data set with __len__ and "
            f"__getitem__, or a DataLoader of one."
        )
    return data if loader else DataLoader(data, _TEST_BATCH)


def _check_batch(name: str, part: str, batch: object) -> None:
    """Refuse a batch that is not a tensor of inputs with a tensor of their classes."""
    where = f"{name}: the {part} data"
    if batch is None:
        raise PruneError(f"{where} is empty.")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PruneError(f"{where} gives {_described(batch)}; give pairs of input and class.")
    x, y = batch
    if not isinstance(x, Tensor):
        raise PruneError(f"{where} gives {_described(x)} as inputs; give a tensor.")
    is_integer = isinstance(y, Tensor) and not (y.is_floating_point() or y.is_complex())
    if not is_integer or y.shape != x.shape[:1]:
        raise PruneError(
            f"{where} gives {_described(y)} as classes; give an integer for each input."
        )
    if int(y.min()) < 0:
        raise PruneError(f"{where} has the class {int(y.min())}. Number the classes from 0.")


def _described(found: object) -> str:
    """Describe a value in a few words."""
    if isinstance(found, Tensor):
        return f"a tensor of {found.dtype} of shape {tuple(found.shape)}"
    if isinstance(found, (tuple, list)):
        return f"a {type(found).__name__} of {len(found)}"
    return f"a value of type {type(found).__name__}"


def _count_classes(data: DataPart) -> int | None:
    """Return the number of classes if a data set names them, as those of torchvision do."""
    source = data.dataset if isinstance(data, DataLoader) else data
    names = getattr(source, "classes", None)
    return len(names) if isinstance(names, (list, tuple)) else None
