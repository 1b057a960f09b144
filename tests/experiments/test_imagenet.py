"""ImageNet: a folder of photos, the paper's settings, dry runs, several processes."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from polarprune.cli.app import app
from polarprune.experiments.data import imagenet
from polarprune.experiments.data.imagenet import LoaderStream, open_imagenet
from polarprune.experiments.data.table import open_data
from polarprune.experiments.networks.imagenet import MobileNetV1, from_torchvision
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.runs.run import Run
from polarprune.experiments.settings import Settings
from polarprune.surgery.proof import count_macs
from polarprune.tracing.recorder import TRACING_SEED
from tests.helpers.command_line import train_tiny
from tests.helpers.forked_commands import run_command
from tests.helpers.imagenet import TINY, Tiny
from tests.helpers.processes import fork_two

import_torchvision()
runner = CliRunner()


def pictures(folder: Path, train: int = 6, val: int = 3) -> Path:
    """Write two classes of images, red and green, in several sizes."""
    for part, count in (("train", train), ("val", val)):
        for label, colour in (("green", (20, 200, 30)), ("red", (200, 20, 30))):
            (folder / part / label).mkdir(parents=True)
            for k in range(count):
                image = Image.new("RGB", (60 + 10 * k, 50), colour)
                image.save(folder / part / label / f"{k}.jpg")
    return folder


def noisy(folder: Path, train: int, val: int) -> Path:
    """Two classes that are hard to tell apart."""
    generator = numpy.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for label, mean in (("dark", 118), ("light", 132)):
            (folder / part / label).mkdir(parents=True)
            for k in range(count):
                colour = generator.normal(mean, 20, 3)
                pixels = generator.normal(colour, 40, (50, 60, 3)).clip(0, 255)
                image = Image.fromarray(pixels.astype(numpy.uint8))
                image.save(folder / part / label / f"{k}.jpg")
    return folder


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)
    monkeypatch.setitem(PRESETS, "tiny", TINY)


# --- networks and recipes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "macs", "params"),
    [
        ("mobilenet_v1", 568.7e6, 4.23e6),
        ("mobilenet_v2", 300.8e6, 3.50e6),
        ("resnet50", 4089e6, 25.56e6),
    ],
)
def test_networks_have_the_size_that_is_known(name: str, macs: float, params: float) -> None:
    model = NETWORKS[name]().eval()
    assert count_macs(model, torch.randn(1, 3, 224, 224)) == pytest.approx(macs, rel=0.005)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(params, rel=0.005)


def test_all_of_mobilenet_v1_may_be_pruned() -> None:
    graph = pp.trace(MobileNetV1(10).eval(), torch.randn(2, 3, 64, 64))
    assert {name for name, group in graph.groups.items() if group.frozen} == {"head"}
    assert len(graph.prunable) == 14  # a depth-wise convolution goes with the one before it


def test_recipes_are_the_papers() -> None:
    for name in ("mobilenet_v1", "mobilenet_v2", "resnet50", "resnet50-steps"):
        recipe = PRESETS[name]
        assert recipe.epochs == 140 and recipe.data == "imagenet"
        for epoch in (1, 70, 140):
            assert recipe.schedule.eps(epoch, 140) == pytest.approx(0.1 * 0.9**epoch)
    v1, v2 = PRESETS["mobilenet_v1"], PRESETS["mobilenet_v2"]
    rates = [v1.lr * v1.rate(epoch / 140, 140) for epoch in (0, 34, 35, 69, 70, 105, 139)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-4, 1e-4])
    assert v1.label_smoothing == 0 and v2.label_smoothing > 0 and v2.rates == "cosine"
    both = PRESETS["resnet50"], PRESETS["resnet50-steps"]
    assert [(r.rates, r.label_smoothing > 0) for r in both] == [("cosine", True), ("steps", False)]


# --- data -----------------------------------------------------------------------------------------


def test_pictures_are_read_as_in_pytorchs_example(tmp_path: Path) -> None:
    data: Any = open_data(f"imagenet:{pictures(tmp_path)}")
    assert data.counts == (12, 6)
    assert data.example().shape == (2, 3, 224, 224)
    assert data.test[0][1] == 0 and data.test[5][1] == 1  # green before red
    stream = data.stream(TINY)
    assert stream.per_epoch == 3
    stream.shuffle()
    seen = [stream.next() for _ in range(3)]
    assert all(x.shape == (4, 3, 224, 224) for x, _ in seen)
    for x, y in seen:
        assert torch.equal((x[:, 0].mean((1, 2)) > 0).long(), y)  # red is red
    held = data.held_out(4)
    assert held.counts == (8, 4) and held.example().shape == (2, 3, 224, 224)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda root: (root / "val").rename(root / "test"), "no folder val"),
        (lambda root: (root / "val" / "red").rename(root / "val" / "blue"), "different classes"),
        (lambda root: [f.unlink() for f in (root / "val" / "red").iterdir()], "red"),
    ],
)
def test_a_broken_folder_is_refused(harm: Any, message: str, tmp_path: Path) -> None:
    harm(pictures(tmp_path))
    with pytest.raises(pp.PruneError, match=message):
        open_imagenet(tmp_path)


def test_each_process_has_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = open_imagenet(pictures(tmp_path))
    parts = []
    for rank in range(2):
        monkeypatch.setattr(imagenet, "rank_and_count", lambda rank=rank: (rank, 2))
        torch.manual_seed(0)
        stream = LoaderStream(data.train, 4, torch.device("cpu"))
        stream.shuffle()
        parts.append(list(stream.sampler))
        mine = [range(data.counts[1])[places] for places, _, _ in data._own_batches()]
        assert [k for some in mine for k in some] == list(range(3 * rank, 3 * rank + 3))
    assert sorted(parts[0] + parts[1]) == list(range(12))
    monkeypatch.setattr(imagenet, "rank_and_count", lambda: (0, 3))
    with pytest.raises(pp.PruneError, match="cannot be divided evenly"):
        LoaderStream(data.train, 4, torch.device("cpu"))


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_on_a_folder_of_pictures(tmp_path: Path) -> None:
    data = f"imagenet:{pictures(tmp_path / 'data')}"
    done = train_tiny(data, tmp_path / "out", "--macs=0.5")
    assert done.exit_code == 0, done.output
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["macs_share"] <= 0.5 and card["identical_predictions"]
    assert card["table"][0]["accuracy"] == 1.0  # red and green are soon learned
    small, _ = rebuild(tmp_path / "out" / "small.safetensors")
    task = open_data(data)
    assert task.score(task.answers(small)) == card["accuracy"]


def test_a_rehearsal_says_what_it_will_take_and_writes_nothing(tmp_path: Path) -> None:
    data, out = f"imagenet:{pictures(tmp_path / 'data', train=20)}", tmp_path / "out"
    done = train_tiny(data, out, "--macs=0.4", "--dry-run=4")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "baseline: 80 steps of" in said and "prune: 30 steps of" in said and "hours" in said
    assert (
        "14 channels are prunable" in said and "goal: macs 0.4 " in said and said.count(" GiB") == 2
    )
    assert "macs left after each tenth of the epochs: 100%" in said and said.endswith("40%")
    assert not out.exists()


def test_a_rehearsal_of_what_is_left_to_do(tmp_path: Path) -> None:
    data = f"imagenet:{pictures(tmp_path / 'data', train=20)}"
    file = tmp_path / "baseline.safetensors"
    save_file(Tiny().state_dict(), str(file))
    given = ("--lam=3", f"--baseline={file}", "--dry-run=4")
    done = train_tiny(data, tmp_path / "out", *given)
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "baseline:" not in said and "prune: 30 steps of" in said
    assert "goal: lam 3" in said and said.endswith("not known in advance")


def test_a_rehearsal_needs_some_batches(tmp_path: Path) -> None:
    data = f"imagenet:{pictures(tmp_path / 'data')}"
    done = runner.invoke(app, ["train", "tiny", "--data", data, "--macs", "0.4", "--dry-run", "9"])
    assert done.exit_code == 1 and "only 3 batches" in " ".join(done.output.split())


def test_weights_to_begin_with(tmp_path: Path) -> None:
    run = Run(TINY, open_imagenet(pictures(tmp_path / "data")), tmp_path / "out")
    other = Tiny()
    named = {k: v for k, v in other.state_dict().items() if k.startswith("one.")}
    save_file(named, str(tmp_path / "part.safetensors"))
    run.settings = Settings("tiny", "imagenet", baseline_epochs=0, batch=4)
    model: Any = run.baseline(start=tmp_path / "part.safetensors")
    assert torch.equal(model.one.weight, other.one.weight)
    assert not torch.equal(model.two.weight, other.two.weight)
    torch.save(named, tmp_path / "part.pth")
    model = Run(run.settings, run.data, tmp_path / "pth").baseline(start=tmp_path / "part.pth")
    assert torch.equal(model.one.weight, other.one.weight)
    save_file({"else": torch.ones(1)}, str(tmp_path / "none.safetensors"))
    for name, why in (("none", "none of its weights fits"), ("missing", "no such file")):
        with pytest.raises(pp.PruneError, match=why):
            Run(run.settings, run.data, tmp_path / name).baseline(
                start=tmp_path / f"{name}.safetensors"
            )


def test_weights_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def offline(*given: Any, **options: Any) -> nn.Module:
        raise OSError("no way out")

    monkeypatch.setattr(torchvision.models, "get_model", offline)
    with pytest.raises(pp.PruneError, match=r"no way out.*--baseline FILE"):
        from_torchvision("resnet50", "IMAGENET1K_V1")


def test_published_weights_stand_in_for_a_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, asked = Tiny(), []

    def found(name: str, weights: str) -> nn.Module:
        asked.append((name, weights))
        return published

    monkeypatch.setattr("polarprune.experiments.runs.start.from_torchvision", found)
    run = Run(
        Settings("tiny", "imagenet", pretrained="BEST"),
        open_imagenet(pictures(tmp_path / "data")),
        tmp_path / "out",
    )
    model: Any = run.baseline()
    assert asked == [("tiny", "BEST")] and torch.equal(model.one.weight, published.one.weight)
    assert model is not published and not (tmp_path / "out").exists()


class Watched(Tiny):
    """Writes down the seeds with which it was trained in each process."""

    file: Path

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with self.file.with_name(f"seeds{os.environ['RANK']}").open("a") as file:
                file.write(f"{torch.initial_seed()} ")
        return super().forward(x)


def test_several_processes_train_one_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torchrun: the scores are those of the network that is written."""
    data = f"imagenet:{noisy(tmp_path / 'data', train=16, val=40)}"
    monkeypatch.setattr(Watched, "file", tmp_path / "seeds", raising=False)
    monkeypatch.setitem(NETWORKS, "tiny", Watched)
    arguments = ["train", "tiny", "--data", data, "--macs", "0.5", "--out", str(tmp_path / "two")]
    arguments += ["--device", "cpu", "--set", "batch=8"]
    with (tmp_path / "said").open("a") as output:
        done = fork_two(partial(run_command, arguments, output.fileno()))
    said = (tmp_path / "said").read_text()
    assert done, said
    assert said.count("after removal") == 1  # one of them speaks
    card = json.loads((tmp_path / "two" / "card.json").read_text())
    assert card["macs_share"] <= 0.5 and card["identical_predictions"]
    rows = (tmp_path / "two" / "log.jsonl").read_text().splitlines()
    assert len(rows) == TINY.baseline_epochs + TINY.epochs
    small, _ = rebuild(tmp_path / "two" / "small.safetensors")
    task = open_data(data)
    assert task.score(task.answers(small)) == card["accuracy"]
    whole = Tiny()
    whole.load_state_dict(load_file(str(tmp_path / "two" / "baseline.safetensors")))
    assert task.score(task.answers(whole)) == card["table"][0]["accuracy"]
    assert 0.5 < card["table"][0]["accuracy"] < 1  # not all alike, or nothing would have been seen
    first, second = (set((tmp_path / f"seeds{rank}").read_text().split()) for rank in "01")
    traced = {"0", str(TRACING_SEED)}
    assert first & second <= traced  # else all would cut pictures the same way
    assert len(second) >= TINY.baseline_epochs + TINY.epochs
