"""CIFAR-10, whole, on the device where it is used; crops and flips are drawn there.

`cifar10:DIR` names a folder that holds the data set as it is handed out, unpacked: the Python
version (cifar-10-batches-py) or the binary one (cifar-10-batches-bin).
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PruneError
from .recipes import Recipe
from .task import Shuffled, Task, evaluating

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_PADDING = 4
_RECORD = 3073  # bytes: a class, then 32 × 32 of red, green and blue


@dataclass(frozen=True)
class Images:
    """Images (N × height × width × 3, bytes) and their classes."""

    x: Tensor
    y: Tensor

    def to(self, device: str | torch.device) -> Images:
        return Images(self.x.to(device), self.y.to(device))

    def pick(self, places: Tensor | slice) -> Images:
        return Images(self.x[places], self.y[places])

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Data(Task):
    """Images to learn from and images to score on."""

    train: Images
    test: Images

    def to(self, device: str | torch.device) -> Data:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def held_out(self, count: int) -> Data:
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(10))
        order = order.to(self.train.y.device)
        return replace(
            self, train=self.train.pick(order[count:]), test=self.train.pick(order[:count])
        )

    def stream(self, recipe: Recipe) -> Batches:
        return Batches(self.train, recipe.batch, cutout=recipe.cutout)

    def example(self) -> Tensor:
        return normalised(self.test.x[: self.examples])

    def answers(self, model: nn.Module) -> Tensor:
        return predictions(model, self.test)

    def score(self, answers: Tensor) -> float:
        return float((answers == self.test.y).double().mean())

    def loss(self, model: nn.Module) -> float:
        return float(F.cross_entropy(scores(model, self.test), self.test.y))

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train), len(self.test)


def open_cifar10(folder: Path) -> Data:
    for inner, read in (("cifar-10-batches-py", _read_python), ("cifar-10-batches-bin", _read_bin)):
        for place in (folder / inner, folder):
            if place.name == inner and place.is_dir():
                return read(place)
    raise PruneError(
        f"--data cifar10:{folder}: there is neither cifar-10-batches-py nor cifar-10-batches-bin "
        f"in it. Unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz there."
    )


def _read_python(folder: Path) -> Data:
    names = [f"data_batch_{k}" for k in range(1, 6)]
    found = []
    for name in (*names, "test_batch"):
        content = _Plain(io.BytesIO(_bytes(folder / name))).load()
        images = torch.from_numpy(content[b"data"]).reshape(-1, 3, 32, 32)
        found.append(
            Images(images.permute(0, 2, 3, 1).contiguous(), torch.tensor(content[b"labels"]))
        )
    return _joined(found)


def _read_bin(folder: Path) -> Data:
    names = [f"data_batch_{k}.bin" for k in range(1, 6)]
    found = []
    for name in (*names, "test_batch.bin"):
        rows = torch.frombuffer(bytearray(_bytes(folder / name)), dtype=torch.uint8)
        rows = rows.reshape(-1, _RECORD)
        images = rows[:, 1:].reshape(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous()
        found.append(Images(images, rows[:, 0].long()))
    return _joined(found)


def _joined(found: list[Images]) -> Data:
    *parts, test = found
    return Data(Images(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])), test)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PruneError(f"--data: {path} cannot be read: {error}.") from error


class _Plain(pickle.Unpickler):
    """The batches are pickles of arrays: nothing else is let in."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        arrays = module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if arrays or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise PruneError(f"--data: a batch holds {module}.{name}; this is not CIFAR-10.")


class Batches(Shuffled):
    """Batches for training, drawn on the device: shuffled, shifted by up to 4 pixels, flipped.

    With `cutout`, a square of so many pixels, centred anywhere in the image, is blank.
    """

    def __init__(self, images: Images, size: int, *, cutout: int = 0) -> None:
        super().__init__(len(images), size, images.x.device)
        frame = (0, 0, _PADDING, _PADDING, _PADDING, _PADDING)
        self.x = F.pad(images.x, frame)
        self.y, self.cutout = images.y, cutout
        self.height, self.width = images.x.shape[1:3]
        self.scale = _scale(self.device)

    def next(self) -> tuple[Tensor, Tensor]:
        device, pick = self.device, self.pick()
        shift = torch.randint(0, 2 * _PADDING + 1, (2, self.size, 1), device=device)
        flip = torch.rand(self.size, 1, device=device) < 0.5
        rows = shift[0] + torch.arange(self.height, device=device)
        across = torch.arange(self.width, device=device)
        columns = shift[1] + torch.where(flip, self.width - 1 - across, across)
        images = self.x[pick[:, None, None], rows[:, :, None], columns[:, None, :]]
        images = normalised(images, self.scale)
        if self.cutout:
            far = [self._far(length)[..., None] for length in (self.height, self.width)]
            images = images * (far[0] | far[1].mT)[:, None]
        return images, self.y[pick]

    def loss(self, out: Tensor, target: Tensor, opinion: Tensor | None, recipe: Recipe) -> Tensor:
        return taught(out, target, opinion, recipe)

    def right(self, out: Tensor, target: Tensor) -> Tensor:
        return (out.argmax(1) == target).float().mean()

    def _far(self, length: int) -> Tensor:
        """For each image the places that the square does not reach, along one axis."""
        along = torch.arange(length, device=self.device)
        centre = torch.randint(0, length, (self.size, 1), device=self.device)
        return (along - centre + self.cutout // 2) % (2 * length) >= self.cutout


def _scale(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(numbers, device=device) for numbers in (MEAN, STD))
    return mean, std


def normalised(images: Tensor, scale: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Bytes (N × height × width × 3) as a model takes them (N × 3 × height × width)."""
    mean, std = scale or _scale(images.device)
    return ((images / 255 - mean) / std).permute(0, 3, 1, 2)


def taught(out: Tensor, target: Tensor, opinion: Tensor | None, recipe: Recipe) -> Tensor:
    """Cross entropy, and how far the scores are from the teacher's (Hinton et al., 2015)."""
    out = out.float()
    loss = F.cross_entropy(out, target, label_smoothing=recipe.label_smoothing)
    if opinion is None:
        return loss
    t = recipe.temperature
    apart = F.kl_div(
        F.log_softmax(out / t, 1), F.log_softmax(opinion.float() / t, 1),
        reduction="batchmean", log_target=True,
    )  # fmt: skip
    return (1 - recipe.distill) * loss + recipe.distill * t * t * apart


def scores(model: nn.Module, images: Images, batch: int = 1000) -> Tensor:
    """Of all classes."""
    with evaluating(model):
        return torch.cat([model(normalised(x)) for x in images.x.split(batch)])


def predictions(model: nn.Module, images: Images) -> Tensor:
    return scores(model, images).argmax(1)


def accuracy(model: nn.Module, images: Images) -> float:
    return float((predictions(model, images) == images.y).double().mean())
