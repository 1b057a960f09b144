"""`polarprune train` with the user's own model and data, and every way to name them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from polarprune.cli.app import app
from polarprune.experiments.data.own import open_own
from polarprune.experiments.data.table import open_data
from polarprune.experiments.runs.pruned_file import original, rebuild
from polarprune.experiments.runs.run import Run
from polarprune.experiments.settings import Settings
from polarprune.integrations.factories import make_model, published_model
from tests.helpers.cifar import runner, written
from tests.helpers.own_model import Own

import_torchvision()
FILE = Path(sys.modules[Own.__module__].__file__ or "")
HELPER = Own.__module__
SMALL = ["--set", "epochs=3", "--set", "baseline_epochs=2", "--set", "batch=12"]
SMALL += ["--device", "cpu", "--macs", "0.5"]


def pictures(folder: Path, classes: int = 4) -> Path:
    """Write images of as many colours as classes, as PNG and JPEG files."""
    for part, count in (("train", 6), ("val", 2)):
        for label in range(classes):
            (folder / part / f"class{label}").mkdir(parents=True)
            for k in range(count):
                image = Image.new("RGB", (20 + k, 24), (60 * label, 250 - 60 * label, 10 * k))
                image.save(folder / part / f"class{label}" / f"{k}.{'png' if k % 2 else 'jpg'}")
    return folder


def train(*given: str) -> Any:
    return runner.invoke(app, ["train", *given, *SMALL])


# --- models by name -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{HELPER}:Own", f"{FILE}:Own"])
def test_a_factory_that_takes_the_number_of_classes_gets_it(name: str) -> None:
    model: Any = make_model(name, classes=7)
    assert model.head.out_features == 7
    model = make_model(name)
    assert model.head.out_features == 10


def test_a_factory_without_such_a_parameter_is_called_without() -> None:
    model: Any = make_model(f"{HELPER}:three_classes", classes=7)
    assert model.head.out_features == 3


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:mobilenet_v3_small"])
def test_models_of_packages_are_made_with_the_number_of_classes(name: str) -> None:
    model = make_model(name, classes=7).eval()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm:resnet1x", "timm has no model 'resnet1x'. Similar: resnet1"),
        ("torchvision:nothing", "torchvision has no model 'nothing'. Its list_models"),
        ("timm:hf-hub:someone/something", "timm has no model 'hf-hub:someone/something'"),
        ("model.py:make", "the model could not be made: FileNotFoundError"),
        ("nowhere", "give package.module:factory, file.py:factory, timm:NAME or torchvision:NAME"),
        (f"{HELPER}:data_sets", "it returned a value of type tuple; return a torch.nn.Module"),
    ],
)
def test_a_wrong_name_is_refused(name: str, said: str) -> None:
    with pytest.raises(pp.PruneError) as error:
        make_model(name)
    assert said in str(error.value)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    widths = []
    for folder, width in (("one", 3), ("two", 5)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "same_name.py"
        file.write_text(f"from torch import nn\ndef make(): return nn.Linear(2, {width})\n")
        model: Any = make_model(f"{file}:make")
        again: Any = make_model(f"{file}:make")
        widths.append((model.out_features, again.out_features))
    assert widths == [(3, 3), (5, 5)]


def test_a_file_that_fails_is_not_half_imported(tmp_path: Path) -> None:
    file = tmp_path / "fails_at_first.py"
    file.write_text("raise ValueError('not yet')")
    with pytest.raises(pp.PruneError, match="not yet"):
        make_model(f"{file}:make")
    file.write_text("from torch import nn\nmake = nn.Identity\n")
    assert isinstance(make_model(f"{file}:make"), torch.nn.Identity)


def test_only_packages_have_published_weights() -> None:
    with pytest.raises(pp.PruneError, match="only timm:NAME and torchvision:NAME have published"):
        published_model(f"{HELPER}:Own", "DEFAULT")


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (
            "one_part",
            "it returned a value of type TensorDataset; return two data sets",
        ),
        ("numbers", "its training data is a value of type int; return a data set with __len__"),
        ("no_classes", "the training data gives a list of 1; give pairs of input and class"),
        ("broad_classes", r"gives a tensor of torch.float32 of shape \(6,\) as classes"),
        ("negative_classes", "the training data has the class -1. Number the classes from 0"),
        ("lists_of_inputs", "the training data gives a tuple of 6 as inputs; give a tensor"),
        ("nothing", "the training data is empty"),
        ("missing", "the data could not be made: AttributeError"),
    ],
)
def test_data_that_is_no_pair_of_data_sets_is_refused(factory: str, said: str) -> None:
    with pytest.raises(pp.PruneError, match=said):
        open_own(f"{HELPER}:{factory}")


def test_data_sets_can_be_held_out_and_loaders_cannot() -> None:
    part = open_own(f"{HELPER}:data_sets").held_out(20)
    assert part.counts == (40, 20)
    with pytest.raises(pp.PruneError, match="return data sets, not loaders"):
        open_own(f"{HELPER}:loaders").held_out(20)


def test_validation_data_in_another_order_is_refused() -> None:
    data = open_own(f"{HELPER}:shuffled")
    with pytest.raises(pp.PruneError, match="in another order the second time"):
        data.answers(Own())


def test_the_loss_on_validation_data_is_that_of_all_examples() -> None:
    data = open_own(f"{HELPER}:loaders")
    model = Own().eval()
    dataset: Any = data.test.dataset
    x, y = dataset.tensors
    wanted = torch.nn.functional.cross_entropy(model(x), y).item()
    assert data.loss(model) == pytest.approx(wanted, rel=1e-5)


def test_a_folder_of_pictures_knows_its_classes(tmp_path: Path) -> None:
    found = open_data(f"folder:{pictures(tmp_path, 5)}", Settings("a:b", "folder", crop=16))
    assert found.classes == 5 and found.counts == (30, 10)
    assert found.example().shape == (2, 3, 16, 16)
    assert found.held_out(4).example().shape == (2, 3, 16, 16)


# --- complete runs --------------------------------------------------------------------------------


def test_a_network_is_trained_on_a_folder_of_pictures(tmp_path: Path) -> None:
    data, out = f"folder:{pictures(tmp_path / 'data')}", tmp_path / "out"
    given = [f"{FILE}:Own", "--data", data, "--out", str(out), "--set", "crop=16"]
    done = train(*given)
    assert done.exit_code == 0, done.output
    card = json.loads((out / "card.json").read_text())
    assert card["classes"] == 4 and card["macs_share"] <= 0.5 and card["trained_on"] == 24
    small, _ = rebuild(out / "small.safetensors", f"{FILE}:Own")
    assert small.eval()(torch.randn(2, 3, 16, 16)).shape == (2, 4)
    again = train(*given, "--json")  # finished already
    assert json.loads(again.stdout)["sha256"] == card["sha256"]
    file = str(out / "small.safetensors")
    scored = runner.invoke(app, ["eval", file, "--data", data, "--model", f"{FILE}:Own", "--json"])
    found = json.loads(scored.stdout)
    assert found["score"] == found["stated"] == card["accuracy"] and found["examples"] == 8
    refused = runner.invoke(app, ["eval", file, "--data", data])
    assert refused.exit_code == 1 and "pass --model" in refused.output


@pytest.mark.parametrize("factory", ["data_sets", "loaders"])
def test_a_network_learns_the_users_own_data(factory: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    name = f"{HELPER}:three_classes"
    done = train(name, "--data", f"{HELPER}:{factory}", "--out", str(out))
    assert done.exit_code == 0, done.output
    card = json.loads((out / "card.json").read_text())
    assert card["identical_predictions"] and card["macs_share"] <= 0.5
    assert card["table"][0]["accuracy"] > 0.5
    assert (card["trained_on"], card["scored_on"]) == (60, 30)


def test_an_interrupted_run_on_own_data_ends_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarprune.experiments.runs.run.CHECKPOINT_PAUSE", 0.0)

    def stopped(row: dict[str, Any]) -> None:
        if row["stage"] == "prune" and row["epoch"] == 2:
            raise KeyboardInterrupt

    cards = []
    for out, interrupted in ((tmp_path / "whole", False), (tmp_path / "parts", True)):
        given = [f"{HELPER}:Own", "--data", f"{HELPER}:loaders", "--out", str(out)]
        if interrupted:
            settings = Settings(
                f"{HELPER}:Own",
                "own",
                epochs=3,
                baseline_epochs=2,
                batch=12,
                baseline_lr=0.05,
                lr=0.05,
            )
            run = Run(settings, open_own(f"{HELPER}:loaders"), out, progress=stopped)
            run.claim({"method": "gdp", "budget": {"macs": 0.5}, "hold_out": 0})
            with pytest.raises(KeyboardInterrupt):
                run.prune(run.baseline(), macs=0.5)
        assert train(*given).exit_code == 0
        cards.append(json.loads((out / "card.json").read_text()))
    assert cards[0]["sha256"] == cards[1]["sha256"]


def test_a_model_of_timm_is_rebuilt_without_its_factory(tmp_path: Path) -> None:
    data, out = f"folder:{pictures(tmp_path / 'data')}", tmp_path / "out"
    changes = ("crop=32", "epochs=1", "baseline_epochs=1", "batch=12")
    small = [part for change in changes for part in ("--set", change)]
    done = runner.invoke(
        app,
        ["train", "timm:test_resnet", "--data", data, "--out", str(out), "--macs", "0.7", *small],
    )
    assert done.exit_code == 0, done.output
    file = str(out / "small.safetensors")
    scored = runner.invoke(app, ["eval", file, "--data", data])
    assert scored.exit_code == 0 and "timm:test_resnet" in scored.output
    timed = runner.invoke(
        app,
        [
            *[
                "bench",
                "timm:test_resnet",
                "--runs",
                "4",
                "--shape",
                "1,3,32,32",
                "--json",
                "--small",
            ],
            file,
        ],
    )
    found = json.loads(timed.stdout)["models"]
    assert found["test_resnet"]["macs"] > found["small.safetensors"]["macs"]
    assert all(
        one["quartiles"][0] <= one["milliseconds"] <= one["quartiles"][1] for one in found.values()
    )


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ("ten_classes", "folder", "it has 10 outputs, but the data has 4 classes"),
        ("pair_of_outputs", "folder", "it returns tuple; return logits of shape (batch, classes)"),
        ("Own", "many_classes", "an example is of class 11, but the network has only 10 outputs"),
        (
            "Own",
            "nowhere:data",
            "give cifar10:DIR, imagenet:DIR, style:DIR, tiny-imagenet:DIR, voc:DIR, folder:DIR",
        ),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_refused(
    model: str, data: str, said: str, tmp_path: Path
) -> None:
    if data == "folder":
        data = f"folder:{pictures(tmp_path / 'data')}"
    elif ":" not in data:
        data = f"{HELPER}:{data}"
    given = [f"{HELPER}:{model}", "--data", data, "--out", str(tmp_path / "out")]
    done = train(*given, "--set", "crop=16")
    assert done.exit_code == 1 and said in " ".join(done.output.split()), done.output


def test_a_file_cannot_choose_a_factory_to_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pruner = pp.Pruner(Own(), torch.randn(2, 3, 16, 16), macs=0.9, steps=2)
    for _ in range(2):
        pruner.step()
    file = tmp_path / "small.safetensors"
    pp.save(pruner.export(), file, card={"network": "os:getcwd"})
    with pytest.raises(pp.PruneError, match="unknown network; pass --model"):
        original(file)


def test_a_preset_still_wants_its_own_data(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    done = train("resnet20", "--data", f"folder:{tmp_path}")
    assert done.exit_code == 1 and "give cifar10:DIR, where DIR holds" in done.output
