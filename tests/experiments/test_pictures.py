"""Figures of masks and paintings, made with small networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import polarprune as pp
from benchmarks.pages import example_images
from polarprune.experiments.data import style
from polarprune.experiments.networks.style import StyleNet
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS
from tests.helpers.style import weights
from tests.helpers.voc import Tiny, written


def run(folder: Path, name: str, network: str, example: torch.Tensor, baseline: bool) -> None:
    """Write a model and its pruned version, as an experiment stores them."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    (folder / name).mkdir(parents=True)
    if baseline:
        save_file(model.state_dict(), str(folder / name / "baseline.safetensors"))
    pruner = pp.Pruner(model, example, macs=0.5, steps=2)
    for _ in range(2):
        pruner.step()
    card = {"network": network, "macs": 1, "macs_share": 0.5, "params": 1, "params_share": 0.5}
    pp.save(pruner.export(), folder / name / "small.safetensors", card=card)


def test_masks_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, "deeplabv3plus", Tiny)
    root = written(tmp_path)
    for percent in example_images.VOC:
        run(
            tmp_path / "runs",
            f"voc-{percent}",
            "deeplabv3plus",
            torch.randn(2, 3, 9, 9),
            baseline=percent == example_images.VOC[0],
        )
    given = [
        "masks",
        f"--data=voc:{root}",
        f"--runs={tmp_path / 'runs'}",
        "--rows=2",
        "--device=cpu",
    ]
    sheets: list[Any] = []
    monkeypatch.setattr(example_images, "sheet", lambda columns, path: sheets.append(columns))
    for photos in ([], ["--photos"]):
        example_images.main([*given, f"--out={tmp_path}", *photos])
        names = ["by hand", "baseline", *(f"{percent} %" for percent in example_images.VOC)]
        assert list(sheets[-1]) == ["photo"] * bool(photos) + names
        assert all(len(column) == 2 for column in sheets[-1].values())
        truth = sheets[-1]["by hand"][0]
        assert [tuple(c) for c in numpy.unique(truth.reshape(-1, 3), axis=0)] == [
            (0, 0, 0),
            (128, 0, 0),
            (255, 255, 255),
        ]
    monkeypatch.undo()
    example_images.sheet(sheets[1], tmp_path / "masks.png")
    with Image.open(tmp_path / "masks.png") as image:
        assert image.width > image.height


def test_vocs_colours() -> None:
    colours = example_images.palette(21)
    names = {
        "aeroplane": (128, 0, 0),
        "cat": (64, 0, 0),
        "person": (192, 128, 128),
        "monitor": (0, 64, 128),
    }
    for name, colour in names.items():
        assert tuple(colours[example_images.CLASSES.index(name)]) == colour


def test_paintings_from_photos_to_a_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "SIDE", 32)
    monkeypatch.setattr(example_images, "TEST_PHOTOS", 1)
    monkeypatch.setitem(NETWORKS, "stylenet", lambda: StyleNet(4, 1))
    (tmp_path / "photos").mkdir()
    for k in range(3):
        Image.new("RGB", (40, 40), (80 * k, 10, 10)).save(tmp_path / "photos" / f"{k}.jpg")
    everything = {**weights(), "head.weight": torch.ones(1)}
    save_file(everything, str(tmp_path / "vgg.safetensors"))
    data = tmp_path / "data"
    example_images.main(
        [
            "style-data",
            f"--photos={tmp_path / 'photos'}",
            f"--out={data}",
            f"--features={tmp_path / 'vgg.safetensors'}",
            "--scaled",
        ]
    )
    task = style.open_style(data)
    assert task.counts == (2, 1) and PRESETS["stylenet"].data == "style"
    run(tmp_path / "runs", "style-48", "stylenet", torch.rand(2, 3, 32, 32), baseline=True)
    example_images.main(
        ["paintings", f"--data=style:{data}", f"--runs={tmp_path / 'runs'}", f"--out={tmp_path}"]
    )
    with Image.open(tmp_path / "paintings.png") as image:
        assert image.width > image.height and len(image.getcolors(1 << 24) or []) > 1000


def test_scaled_features_are_as_large_as_wanted_and_mean_the_same() -> None:
    torch.manual_seed(0)
    plain, scaled = style.Features(weights()), style.Features(weights())
    photos = 255 * torch.rand(2, 3, 32, 32)
    example_images.scale(scaled, photos)
    for before, after in zip(plain(photos), scaled(photos), strict=True):
        assert after.mean().item() == pytest.approx(example_images.FEATURE_MEAN, rel=1e-4)
        torch.testing.assert_close(after / after.mean(), before / before.mean())
