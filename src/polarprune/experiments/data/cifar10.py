"""CIFAR-10: `cifar10:DIR` names the folder of the unpacked data set.

It is either the Python version (cifar-10-batches-py) or the binary version (cifar-10-batches-bin).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import PruneError
from .images import Images, LabelledImages

_RECORD = 3073  # bytes: the class, then 32 × 32 values of red, green and blue


@dataclass(frozen=True)
class Cifar10(LabelledImages):
    """Training images and test images."""

    classes: int = 10


def open_cifar10(folder: Path) -> Cifar10:
    """Read CIFAR-10 from a folder, in the Python or the binary version."""
    versions = {"cifar-10-batches-py": _read_python, "cifar-10-batches-bin": _read_binary}
    for name, read in versions.items():
        for candidate in (folder / name, folder):
            if candidate.name == name and candidate.is_dir():
                return read(candidate)
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
