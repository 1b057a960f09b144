"""A few images with boxes, and a detector of Ultralytics that is narrow enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE = 32
# Everything that would take time, draw pictures or start processes is off. The pictures that
# mosaic remembers are not in a checkpoint.
FAST: dict[str, Any] = {
    **{"imgsz": SIZE, "batch": 4, "nbs": 4, "epochs": 4, "device": "cpu", "workers": 0},
    **{"amp": False, "plots": False, "verbose": False, "mosaic": 0.0, "optimizer": "SGD"},
    **{"lr0": 0.01, "warmup_epochs": 1},
}


def write_pictures(folder: Path, count: int = 12, size: int = 64) -> Path:
    """Write images of coloured squares with labels, and return the file that describes them."""
    dice = np.random.default_rng(0)
    for part, number in (("train", count), ("val", 4)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        for k in range(number):
            picture, colour = dice.integers(0, 60, (size, size, 3), dtype=np.uint8), k % 2
            left, top = dice.integers(5, 35, 2)
            picture[top : top + 24, left : left + 24, colour] = 255
            Image.fromarray(picture).save(folder / "images" / part / f"{k}.png")
            box = " ".join(f"{(edge + 12) / size} " for edge in (left, top))
            label = f"{colour} {box} {24 / size} {24 / size}\n"
            (folder / "labels" / part / f"{k}.txt").write_text(label)
    data = folder / "data.yaml"
    data.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [red, green]\n")
    return data


def write_classes(folder: Path, size: int = SIZE) -> Path:
    """Write images for a classifier, one folder for each class, and return the folder."""
    dice = np.random.default_rng(0)
    for part in ("train", "val"):
        for colour, name in enumerate(("red", "green")):
            (folder / part / name).mkdir(parents=True)
            for k in range(4):
                picture = dice.integers(0, 60, (size, size, 3), dtype=np.uint8)
                picture[..., colour] += 150
                Image.fromarray(picture).save(folder / part / name / f"{k}.png")
    return folder


# Layers as in YOLO11, on two levels: from, repeats, module, arguments.
BACKBONE = """
backbone:
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, C3k2, [24, False, 0.25]]
  - [-1, 1, Conv, [24, 3, 2]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, C2PSA, [32]]
"""
HEADS = {
    "detect": """
head:
  - [-1, 1, nn.Upsample, [None, 2, "nearest"]]
  - [[-1, 3], 1, Concat, [1]]
  - [-1, 1, C3k2, [24, False]]
  - [[8, 5], 1, Detect, [nc]]
""",
    "classify": """
head:
  - [-1, 1, Classify, [nc]]
""",
}


def write_model(folder: Path, task: str = "detect") -> Path:
    """Write the description of a narrow network."""
    file = folder / f"narrow-{task}.yaml"
    file.write_text(f"nc: 2\n{BACKBONE}{HEADS[task]}")
    return file
