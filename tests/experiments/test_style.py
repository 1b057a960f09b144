"""Style transfer: features, losses by hand, and a run from photos to a smaller network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from polarprune.cli.app import app
from polarprune.experiments.data import style
from polarprune.experiments.data.style import Features, gram, open_style
from polarprune.experiments.data.table import open_data
from polarprune.experiments.networks.small_images import VGG
from polarprune.experiments.networks.style import StyleNet
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.runs.run import Run
from polarprune.experiments.settings import Settings
from polarprune.surgery.proof import count_macs
from tests.helpers.no_reading import NoReading
from tests.helpers.style import photos, weights


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "SIDE", 32)
    monkeypatch.setitem(NETWORKS, "tiny", lambda: StyleNet(4, 1))
    rates = {"baseline_lr": 3e-3, "lr": 1e-3, "warm_up": 0, "weight_decay": 0}
    tiny = Settings(
        "tiny", "style", baseline_epochs=6, epochs=3, batch=4, optimizer="adam", **rates
    )
    monkeypatch.setitem(PRESETS, "tiny", tiny)


def test_the_network_is_that_of_johnson_and_all_of_it_may_be_pruned() -> None:
    model = StyleNet().eval()
    assert sum(p.numel() for p in model.parameters()) == 1_679_235
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3, 32, 32)
    graph = pp.trace(model, torch.randn(2, 3, 32, 32))
    assert [name for name, group in graph.groups.items() if group.frozen] == ["paint.1"]


def test_features_are_what_the_network_sees() -> None:
    whole = VGG().eval()
    whole.load_state_dict(weights(), strict=False)
    x = torch.rand(1, 3, 32, 32) * 255
    seen = Features(weights())(x)
    assert [tuple(level.shape[1:]) for level in seen] == [
        (64, 32, 32),
        (128, 16, 16),
        (256, 8, 8),
        (512, 4, 4),
    ]
    scaled = x / 255 - torch.tensor(style.MEAN)[:, None, None]
    scaled = scaled / torch.tensor(style.STD)[:, None, None]
    assert seen[1].allclose(whole.features[:13](scaled), atol=1e-5)  # type: ignore[operator]


def test_weights_of_a_vgg_without_norms_fit_too() -> None:
    torch.manual_seed(0)
    whole = import_torchvision().models.vgg16().eval()
    x = torch.zeros(1, 3, 32, 32) + 255 * torch.tensor(style.MEAN)[:, None, None]
    seen = Features(whole.state_dict())(x)
    assert seen[3].allclose(whole.features[:23](torch.zeros(1, 3, 32, 32)), atol=1e-5)


def test_a_pruned_vgg_sees_too() -> None:
    file = Path(__file__).parents[2] / "zoo" / "vgg16-31.safetensors"
    whole = rebuild(file)[0].eval()
    x = torch.zeros(1, 3, 32, 32) + 255 * torch.tensor(style.MEAN)[:, None, None]
    seen = Features(load_file(str(file)))(x)
    assert seen[3].allclose(whole.features[:33](torch.zeros(1, 3, 32, 32)), atol=1e-5)  # type: ignore[operator]


def test_how_often_features_occur_together() -> None:
    x = torch.tensor([[[[1.0, 2.0]], [[3.0, 0.0]]]])  # two features, two places
    assert gram(x).tolist() == [[[5 / 4, 3 / 4], [3 / 4, 9 / 4]]]


def test_the_style_itself_lacks_only_the_content(tmp_path: Path) -> None:
    task: Any = open_data(f"style:{photos(tmp_path)}")
    own = style.as_input(style.read_square(tmp_path / "style.jpg")[None])
    other = style.as_input(task.test[:1])
    assert float(task.perceptual_loss(own, own)) < 1e-3 * float(task.perceptual_loss(other, other))
    assert float(task.perceptual_loss(other, own)) > float(task.perceptual_loss(other, other))
    assert task.counts == (8, 3) and task.held_out(2).counts == (6, 2)


def test_a_run_ends_on_its_budget_with_the_same_pictures(tmp_path: Path) -> None:
    data, out = f"style:{photos(tmp_path / 'data')}", tmp_path / "out"
    runner = CliRunner()
    done = runner.invoke(
        app,
        ["train", "tiny", "--data", data, "--macs", "0.5", "--out", str(out), "--device", "cpu"],
    )
    assert done.exit_code == 0, done.output
    card = json.loads((out / "card.json").read_text())
    assert card["macs_share"] <= 0.5 and card["identical_predictions"]
    losses = [row["perceptual loss"] for row in card["table"]]
    assert losses[1] == pytest.approx(losses[2], rel=1e-4)
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert rows[5]["loss"] < 0.9 * rows[0]["loss"]
    found, _ = rebuild(out / "small.safetensors")
    task = open_data(data)
    assert task.score(task.answers(found)) == pytest.approx(card["perceptual loss"])
    assert count_macs(found, torch.randn(1, 3, 32, 32)) == card["macs"]
    done = runner.invoke(app, ["eval", str(out / "small.safetensors"), "--data", data])
    assert done.exit_code == 0 and "perceptual loss" in done.output


def test_pictures_that_differ_are_not_the_same(tmp_path: Path) -> None:
    task = open_style(photos(tmp_path))
    run = Run(PRESETS["tiny"], task, tmp_path / "out")
    pictures = task.answers(run.new_network())
    assert task.same(pictures, pictures + 0.4) and not task.same(pictures, pictures + 0.6)


@pytest.mark.parametrize("name", ["style.jpg", "features.safetensors", "train", "val"])
def test_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    photos(tmp_path)
    (tmp_path / name).rename(tmp_path / "elsewhere")
    with pytest.raises(pp.PruneError, match=f"no {name}"):
        open_style(tmp_path)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    photos(tmp_path)
    save_file({"conv.weight": torch.ones(1)}, str(tmp_path / "features.safetensors"))
    with pytest.raises(pp.PruneError, match=r"has no features.0.weight"):
        open_style(tmp_path)


def test_a_step_can_be_captured(tmp_path: Path) -> None:
    tiny = PRESETS["tiny"]
    run = Run(tiny, open_style(photos(tmp_path)), tmp_path / "out")
    run.batches.shuffle()
    model, teacher = run.new_network(), run.new_network()
    with NoReading():  # all of it but Adam, which counts on the host where there is no GPU
        x, y = run.batches.next()
        run.batches.loss(model(x), y, teacher(x), tiny).backward()
