"""CIFAR-10: all images lie on the device, where crops and flips are drawn.

`cifar10:DIR` names the folder of the unpacked data set, either the Python version
(cifar-10-batches-py) or the binary version (cifar-10-batches-bin).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import PruneError
from ..settings import Settings
from .distillation import classification_loss
from .task import InMemoryStream, Task, evaluating, held_out_order

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_PADDING = 4
_RECORD = 3073  # bytes: the class, then 32 × 32 values of red, green and blue


@dataclass(frozen=True)
class Images:
    """Images (N × height × width × 3, bytes) and their classes."""

    x: Tensor
    y: Tensor

    def to(self, device: str | torch.device) -> Images:
        return Images(self.x.to(device), self.y.to(device))

    def pick(self, indices: Tensor | slice) -> Images:
        return Images(self.x[indices], self.y[indices])

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Cifar10(Task):
    """Training images and test images."""

    train: Images
    test: Images
    classes = 10

    def to(self, device: str | torch.device) -> Cifar10:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def held_out(self, count: int) -> Cifar10:
        order = held_out_order(len(self.train)).to(self.train.y.device)
        return replace(
            self, train=self.train.pick(order[count:]), test=self.train.pick(order[:count])
        )

    def stream(self, settings: Settings) -> Batches:
        return Batches(self.train, settings.batch, cutout=settings.cutout)

    def example(self) -> Tensor:
        return normalised(self.test.x[: self.examples])

    def answers(self, model: nn.Module) -> Tensor:
        return predictions(model, self.test)

    def score(self, answers: Tensor) -> float:
        return float((answers == self.test.y).double().mean())

    def loss(self, model: nn.Module) -> float:
        return float(F.cross_entropy(logits(model, self.test), self.test.y))

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train), len(self.test)


class Batches(InMemoryStream):
    """Training batches: shuffled images, each shifted by up to 4 pixels and flipped or not.

    With `cutout`, a square of this side, centred anywhere in the image, is set to zero.
    """

    def __init__(self, images: Images, size: int, *, cutout: int = 0) -> None:
        super().__init__(len(images), size, images.x.device)
        frame = (0, 0, _PADDING, _PADDING, _PADDING, _PADDING)
        self.x = F.pad(images.x, frame)
        self.y, self.cutout = images.y, cutout
        self.height, self.width = images.x.shape[1:3]
        self.scale = _mean_and_std(self.device)

    def next(self) -> tuple[Tensor, Tensor]:
        device, indices = self.device, self.next_indices()
        shift = torch.randint(0, 2 * _PADDING + 1, (2, self.size, 1), device=device)
        flip = torch.rand(self.size, 1, device=device) < 0.5
        rows = shift[0] + torch.arange(self.height, device=device)
        across = torch.arange(self.width, device=device)
        columns = shift[1] + torch.where(flip, self.width - 1 - across, across)
        images = self.x[indices[:, None, None], rows[:, :, None], columns[:, None, :]]
        images = normalised(images, self.scale)
        if self.cutout:
            outside = [self._outside(length)[..., None] for length in (self.height, self.width)]
            images = images * (outside[0] | outside[1].mT)[:, None]
        return images, self.y[indices]

    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        return classification_loss(output, target, teacher, settings)

    def accuracy(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).float().mean()

    def _outside(self, length: int) -> Tensor:
        """Return, for each image, which coordinates along one axis are outside of the square."""
        along = torch.arange(length, device=self.device)
        centre = torch.randint(0, length, (self.size, 1), device=self.device)
        # Modulo 2 · length, coordinates before the square become large, as those after it are.
        return (along - centre + self.cutout // 2) % (2 * length) >= self.cutout


def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)


def normalised(images: Tensor, scale: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Convert bytes (N × height × width × 3) to the inputs of a model (N × 3 × height × width)."""
    mean, std = scale or _mean_and_std(images.device)
    return ((images / 255 - mean) / std).permute(0, 3, 1, 2)


def logits(model: nn.Module, images: Images, batch: int = 1000) -> Tensor:
    """Return the logits of all images, in eval mode and full precision."""
    with evaluating(model):
        return torch.cat([model(normalised(x)) for x in images.x.split(batch)])


def predictions(model: nn.Module, images: Images) -> Tensor:
    """Return the predicted class of every image."""
    return logits(model, images).argmax(1)


def accuracy(model: nn.Module, images: Images) -> float:
    """Return the share of images whose class is predicted correctly."""
    return float((predictions(model, images) == images.y).double().mean())


def open_cifar10(folder: Path) -> Cifar10:
    """Read CIFAR-10 from a folder, in the Python or the binary version."""
    versions = {"cifar-10-batches-py": _read_python, "cifar-10-batches-bin": _read_binary}
    for name, read in versions.items():
        for place in (folder / name, folder):
            if place.name == name and place.is_dir():
                return read(place)
    raise PruneError(
        f"--data cifar10:{folder}: found neither cifar-10-batches-py nor cifar-10-batches-bin in "
        f"it. Unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz there."
    )


def _read_python(folder: Path) -> Cifar10:
    return _read(folder, "", _from_pickle)


def _read_binary(folder: Path) -> Cifar10:
    return _read(folder, ".bin", _from_records)


def _read(folder: Path, suffix: str, parse: Callable[[bytes], Images]) -> Cifar10:
    """Read the five training files and the test file."""
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    *parts, test = (parse(_read_bytes(folder / f"{name}{suffix}")) for name in names)
    train = Images(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
    return Cifar10(train, test)


def _from_pickle(content: bytes) -> Images:
    found = _ArrayUnpickler(io.BytesIO(content)).load()
    images = torch.from_numpy(found[b"data"]).reshape(-1, 3, 32, 32)
    return Images(images.permute(0, 2, 3, 1).contiguous(), torch.tensor(found[b"labels"]))


def _from_records(content: bytes) -> Images:
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, _RECORD)
    images = rows[:, 1:].reshape(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous()
    return Images(images, rows[:, 0].long())


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PruneError(f"--data: cannot read {path}: {error}.") from error


class _ArrayUnpickler(pickle.Unpickler):
    """Reads pickles of NumPy arrays and refuses everything else: a pickle can run code."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> object:
        arrays = module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if arrays or (module, name) == ("_codecs", "encode"):
            found: object = super().find_class(module, name)
            return found
        raise PruneError(f"--data: a batch contains {module}.{name}, so this is not CIFAR-10.")
