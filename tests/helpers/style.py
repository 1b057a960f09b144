"""Photos, a style image, and the weights of a network that computes features."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from polarprune.experiments.networks.small_images import VGG


def weights() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {k: v for k, v in VGG().state_dict().items() if k.startswith("features.")}


def photos(folder: Path, train: int = 8, val: int = 3) -> Path:
    generator = numpy.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        (folder / part).mkdir(parents=True)
        for k in range(count):
            coarse = generator.integers(0, 256, (4, 5, 3), dtype=numpy.uint8)
            Image.fromarray(coarse).resize((60, 48)).save(folder / part / f"{k}.jpg")
    stripes = numpy.zeros((40, 40, 3), numpy.uint8)
    stripes[::4] = (250, 120, 10)
    Image.fromarray(stripes).save(folder / "style.jpg")
    save_file(weights(), str(folder / "features.safetensors"))
    return folder
