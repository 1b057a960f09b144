"""Tiny ImageNet: `tiny-imagenet:DIR`, 200 classes of ImageNet, 64 × 64 pixels.

DIR holds arrays of NumPy: `train_x.npy` and `val_x.npy` (bytes, N × height × width × 3),
`train_y.npy` and `val_y.npy` (classes, numbered from 0); and `classes.json` with the names of the
classes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from ...errors import PruneError
from ...validation.optional_packages import optional_package
from .images import Images, LabelledImages

_MEAN, _STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
_SHIFT = 8  # an eighth of the side, as for CIFAR-10


def open_tiny_imagenet(folder: Path) -> LabelledImages:
    """Read Tiny ImageNet from a folder.

    Raises:
        PruneError: A file is missing, or does not hold what it should.
    """
    train, val = (_read_part(folder, part) for part in ("train", "val"))
    try:
        classes = len(json.loads((folder / "classes.json").read_text("utf-8"))["classes"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _wrong(folder, f"classes.json cannot be read ({error!r})") from error
    if train.x.shape[1:] != val.x.shape[1:]:
        raise _wrong(folder, "training and validation images have different sizes")
    for images in (train, val):
        if not 0 <= int(images.y.min()) <= int(images.y.max()) < classes:
            raise _wrong(folder, f"a class is not among the {classes} of classes.json")
    return LabelledImages(train, val, classes)


def _read_part(folder: Path, part: str) -> Images:
    x, y = (_read(folder, f"{part}_{axis}.npy") for axis in "xy")
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[3] != 3:
        raise _wrong(folder, f"{part}_x.npy holds no images of bytes (N × height × width × 3)")
    if y.is_floating_point() or y.shape != x.shape[:1] or not len(y):
        raise _wrong(folder, f"{part}_y.npy does not hold a class for each image")
    return Images(x, y.long(), _MEAN, _STD, _SHIFT)


def _read(folder: Path, name: str) -> Tensor:
    numpy = optional_package("numpy", needed_for="Tiny ImageNet", extra="vision")
    try:
        return torch.from_numpy(numpy.load(folder / name, allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise _wrong(folder, f"{name} cannot be read ({error})") from error


def _wrong(folder: Path, what: str) -> PruneError:
    return PruneError(
        f"--data tiny-imagenet:{folder}: {what}. Give a folder with train_x.npy, train_y.npy, "
        f"val_x.npy, val_y.npy and classes.json."
    )
