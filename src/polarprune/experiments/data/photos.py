"""Photo files as tensors, and the mean and standard deviation of ImageNet's colours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import PruneError

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _unchanged(image: Image) -> Image:
    return image


def read_photo(path: Path, change: Callable[[Image], Image] = _unchanged) -> Tensor:
    """Return the pixels of an image file as bytes, height × width (× 3).

    Args:
        path: A file that Pillow can read.
        change: Applied to Pillow's image first, for example to convert or crop it.

    Raises:
        PruneError: Pillow is not installed, or the file cannot be read.
    """
    try:
        import numpy
        from PIL import Image
    except ImportError as error:
        raise PruneError("reading photos needs Pillow: pip install polarprune[vision]") from error
    try:
        with Image.open(path) as image:
            pixels = numpy.array(change(image))
    except OSError as error:
        raise PruneError(f"--data: cannot read {path}: {error}.") from error
    return torch.from_numpy(pixels)
