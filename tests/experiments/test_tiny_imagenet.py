"""Tiny ImageNet, and a few images of CIFAR-10 that a network of Tiny ImageNet is tuned on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from polarprune.cli.app import app
from polarprune.experiments.data.images import Images
from polarprune.experiments.data.table import open_data
from polarprune.experiments.networks import table
from polarprune.experiments.networks.table import code_of, make_network
from polarprune.experiments.presets import PRESETS, preset
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.runs.run import Run
from polarprune.experiments.runs.weights import load_weights
from polarprune.experiments.settings import Settings
from polarprune.surgery.proof import count_macs
from tests.helpers import cifar
from tests.helpers.cifar import runner
from tests.helpers.own_model import Own
from tests.helpers.tiny_imagenet import CLASSES, SIDE, written

import_torchvision()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A network with as many classes as the data has, and its preset."""
    monkeypatch.setitem(table.ANY_CLASSES, "own", Own)
    monkeypatch.setitem(table.NETWORKS, "own", Own)
    short = Settings("own", "tiny-imagenet", baseline_epochs=2, epochs=2, batch=12, lr=0.05)
    monkeypatch.setitem(PRESETS, "own-tiny", short)
    few = Settings("own", batch=10, baseline_epochs=1, epochs=2, side=16, per_class=4, lr=0.05)
    monkeypatch.setitem(PRESETS, "own-transfer", few)
    return "own"


# --- data -----------------------------------------------------------------------------------------


def test_the_arrays_of_tiny_imagenet_are_read(tmp_path: Path) -> None:
    data: Any = open_data(f"tiny-imagenet:{written(tmp_path)}")
    assert data.counts == (60, 20) and data.classes == CLASSES
    assert data.example().shape == (2, 3, SIDE, SIDE)
    assert torch.equal(data.train.y, torch.arange(60) % CLASSES)
    wanted = torch.from_numpy(numpy.load(tmp_path / "val_x.npy"))[:2]
    mean, std = data.test.scale()
    assert torch.allclose(data.example().permute(0, 2, 3, 1) * std + mean, wanted / 255, atol=1e-5)


def damage(folder: Path, name: str, content: Any) -> None:
    if isinstance(content, numpy.ndarray):
        numpy.save(folder / name, content)
    elif content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train_x.npy", None, "train_x.npy cannot be read"),
        ("val_y.npy", "text", "val_y.npy cannot be read"),
        ("classes.json", "[]", "classes.json cannot be read"),
        ("classes.json", '{"classes": ["a"]}', "a class is not among the 1 of classes.json"),
        ("val_x.npy", numpy.zeros((20, 8, 8, 3)), "val_x.npy holds no images of bytes"),
        ("val_x.npy", numpy.zeros((20, 8, 8, 3), "u1"), "have different sizes"),
        ("val_y.npy", numpy.zeros(3, "u1"), "val_y.npy does not hold a class for each image"),
        ("val_y.npy", numpy.array([{}] * 20), "val_y.npy cannot be read"),
    ],
)
def test_a_folder_that_is_not_tiny_imagenet_is_refused(
    name: str, content: Any, said: str, tmp_path: Path
) -> None:
    damage(written(tmp_path), name, content)
    with pytest.raises(pp.PruneError) as error:
        open_data(f"tiny-imagenet:{tmp_path}")
    assert said in str(error.value) and "Give a folder with train_x.npy" in str(error.value)


def test_images_are_drawn_by_class_and_by_their_own_seed() -> None:
    images = cifar.images(200)
    some = images.of_each_class(3, seed=0)
    assert torch.bincount(some.y).tolist() == [3] * 10
    assert torch.equal(some.x, images.of_each_class(3, seed=0).x)
    assert not torch.equal(some.x, images.of_each_class(3, seed=1).x)
    with pytest.raises(pp.PruneError, match="per_class=21: class 0 has only 20 training images"):
        images.of_each_class(21, seed=0)


def test_enlarged_images_keep_their_pictures_and_are_shifted_as_far() -> None:
    x = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    x[:, :4] = 200
    large = Images(x, torch.zeros(1).long()).resized(16)
    assert large.x.shape == (1, 16, 16, 3) and large.shift == 8
    assert (large.x[:, :7] == 200).all() and (large.x[:, 9:] == 0).all()
    assert large.resized(16) is large


def test_settings_choose_the_images(tmp_path: Path) -> None:
    cifar.written(tmp_path, "bin")
    settings = Settings("x", side=16, per_class=2)
    data: Any = open_data(f"cifar10:{tmp_path}", settings)
    assert data.counts == (20, 20) and data.example().shape == (2, 3, 16, 16)
    with pytest.raises(pp.PruneError, match="side and per_class are for cifar10:DIR and tiny"):
        open_data("tests.helpers.own_model:data_sets", Settings("a:b", per_class=2))


# --- networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "macs"),
    [("mobilenet_v1_tiny", 185.6e6), ("mobilenet_v2_tiny", 98.1e6), ("resnet50_tiny", 1.3035e9)],
)
def test_networks_for_small_images_have_the_stated_size(name: str, macs: float) -> None:
    model = make_network(name)
    assert count_macs(model, torch.randn(1, 3, 64, 64)) == pytest.approx(macs, rel=0.001)
    shapes = []
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_hook(lambda module, args, out: shapes.append(out.shape[2:]))
    few = make_network(name, 10)
    with torch.no_grad():
        assert model.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 200)
        assert few.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 10)
    assert shapes == [(64, 64)]
    assert PRESETS[name.replace("_tiny", "-tiny")].network == name
    assert code_of(name, 10)["call"] == f'make_network("{name}", 10)'


# --- complete runs --------------------------------------------------------------------------------


def train(preset_name: str, data: str, out: Path, *more: str) -> dict[str, Any]:
    given = ["train", preset_name, "--data", data, "--out", str(out), "--device", "cpu"]
    done = runner.invoke(app, [*given, "--json", *more])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_network_of_tiny_imagenet_is_pruned_and_scored_again(tiny: str, tmp_path: Path) -> None:
    data, out = f"tiny-imagenet:{written(tmp_path / 'data')}", tmp_path / "out"
    card = train("own-tiny", data, out, "--macs", "0.5")
    assert card["classes"] == CLASSES and card["macs_share"] <= 0.5
    small, _ = rebuild(out / "small.safetensors")
    assert small.eval()(torch.randn(2, 3, SIDE, SIDE)).shape == (2, CLASSES)
    given = ["eval", str(out / "small.safetensors"), "--data", data, "--json"]
    found = json.loads(runner.invoke(app, given).stdout)
    assert found["score"] == found["stated"] == card["accuracy"] and found["examples"] == 20


def test_a_network_is_pruned_while_it_learns_other_classes(tiny: str, tmp_path: Path) -> None:
    """Everything but the head is taken from the network with other classes."""
    (tmp_path / "cifar").mkdir()
    cifar.written(tmp_path / "cifar", "bin")
    first = tmp_path / "first"
    train("own-tiny", f"tiny-imagenet:{written(tmp_path / 'data')}", first)
    start = ["--start", str(first / "baseline.safetensors"), "--set", "baseline_epochs=0"]
    data, out = f"cifar10:{tmp_path / 'cifar'}", tmp_path / "out"
    card = train("own-transfer", data, out, *start, "--macs", "0.5")
    assert card["classes"] == 10 and card["trained_on"] == 40 and card["macs_share"] <= 0.5
    settings = preset("own-transfer")
    run = Run(settings, open_data(data, settings), tmp_path / "other")
    begun, trained = run.baseline(out / "baseline.safetensors"), Own(CLASSES)
    load_weights(trained, first / "baseline.safetensors")
    own = begun.state_dict()
    same = [key for key, value in trained.state_dict().items() if own[key].equal(value)]
    assert len(same) == len(own) - 2 and not any(key.startswith("head") for key in same)
    given = ["eval", str(out / "small.safetensors"), "--data", data, "--json"]
    assert json.loads(runner.invoke(app, given).stdout)["score"] == card["accuracy"]
