"""`polarprune train` and `eval`: data, settings, the training loop, a run from start to card."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import pickle
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import polarprune as pp
from benchmarks.measure import experiments
from benchmarks.pages import compared_methods, paper_table, run_conditions
from polarprune.cli.app import app
from polarprune.experiments.data.cifar10 import Cifar10
from polarprune.experiments.data.images import (
    MEAN,
    STD,
    Batches,
    Images,
    accuracy,
    logits,
    normalised,
    predictions,
)
from polarprune.experiments.data.table import open_data
from polarprune.experiments.methods.table import ALL_METHODS
from polarprune.experiments.networks.small_images import (
    VGG,
    MobileNetV2,
    ResNet,
    mobilenetv2_88m,
)
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS, per_epoch, preset
from polarprune.experiments.runs.calibration import recalibrate, recalibrated
from polarprune.experiments.runs.prune import prune
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.runs.run import Run
from polarprune.experiments.runs.source import commit
from polarprune.experiments.runs.trainer import Trainer
from polarprune.experiments.settings import Settings
from polarprune.surgery.proof import count_macs
from tests.helpers.cifar import TINY, Tiny, few_images, images, runner, written
from tests.helpers.command_line import train_tiny
from tests.helpers.forked_commands import ForkedCommand

pytestmark = pytest.mark.usefixtures("tiny")


# --- networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "macs", "params"),
    [
        (ResNet, 125.5e6, 0.85e6),
        (VGG, 313.5e6, 14.99e6),
        (MobileNetV2, 265.7e6, 2.24e6),
        (mobilenetv2_88m, 87.98e6, 2.24e6),
    ],
)
def test_networks_have_the_size_that_is_compared(make: Any, macs: float, params: float) -> None:
    model = make()
    image = torch.randn(1, 3, 32, 32)
    assert count_macs(model, image) == pytest.approx(macs, rel=0.002)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(params, rel=0.01)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_mobilenetv2_is_that_of_the_paper() -> None:
    model = NETWORKS["mobilenetv2"]()
    assert isinstance(model, MobileNetV2)
    assert model.stem[0].stride == (1, 1)
    convs = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    strides = [conv.stride[0] for conv in convs if conv.groups > 1]
    starts = [0, 1, 3, 6, 10, 13, 16]  # the first blocks of the stages
    assert [strides[k] for k in starts] == [1, 1, 2, 1, 1, 2, 1] and sum(strides) == 17 + 2
    assert isinstance(model.dropout, nn.Dropout) and model.dropout.p == 0.5
    assert not any(isinstance(part, nn.Dropout) for part in mobilenetv2_88m().modules())
    assert PRESETS["mobilenetv2"].network == PRESETS["mobilenetv2-paper"].network == "mobilenetv2"
    assert PRESETS["mobilenetv2_88m"].network == "mobilenetv2_88m"


def test_mobilenetv2_with_its_dropout_is_pruned_to_the_papers_budget() -> None:
    torch.manual_seed(0)
    model, x = MobileNetV2(), torch.randn(2, 3, 32, 32)
    pruner = pp.Pruner(model, x, macs=0.5378, steps=8)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.01))
    pruner.attach(optimizer)
    for _ in range(8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    small: Any = pruner.export()
    assert count_macs(small, x) <= 0.5378 * 2 * 265_691_648
    assert small.dropout.p == 0.5 and small.head.in_features < 1280
    assert torch.allclose(small.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: ResNet(1), VGG, MobileNetV2, mobilenetv2_88m])
def test_all_of_a_network_may_be_pruned(make: Any) -> None:
    graph = pp.trace(make().eval(), torch.randn(2, 3, 32, 32))
    assert not any(group.frozen for name, group in graph.groups.items() if "head" not in name)
    lowest = torch.tensor([float(group.minimum) for group in graph.prunable.values()])
    assert graph.cost.share(lowest)["macs"] < 0.05


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["py", "bin"])
@pytest.mark.parametrize("inside", [True, False])
def test_both_forms_of_the_data_set_are_read(kind: str, inside: bool, tmp_path: Path) -> None:
    wanted = written(tmp_path, kind)
    folder = tmp_path / f"cifar-10-batches-{kind}" if inside else tmp_path
    found = open_data(f"cifar10:{folder}")
    for one, other in ((found.train, wanted.train), (found.test, wanted.test)):
        assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y)


def test_a_pickle_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "py")
    file = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(pickle.dumps({b"data": Path("x"), b"labels": []}))
    with pytest.raises(pp.PruneError, match="so this is not CIFAR-10"):
        open_data(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("name", ["cifar100:x", "cifar10", "cifar10:", "nothing"])
def test_other_data_is_refused(name: str) -> None:
    with pytest.raises(pp.PruneError, match="give cifar10:DIR"):
        open_data(name)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(pp.PruneError, match="neither cifar-10-batches-py nor"):
        open_data(f"cifar10:{tmp_path}")
    written(tmp_path, "bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    with pytest.raises(pp.PruneError, match=r"cannot read .*data_batch_2\.bin"):
        open_data(f"cifar10:{tmp_path}")


def test_what_is_held_out_is_not_learned_from(data: Cifar10) -> None:
    part = data.held_out(50)
    assert (len(part.train), len(part.test)) == (150, 50)
    seen = {bytes(x.flatten()[:50].tolist()) for x in part.train.x}
    assert not any(bytes(x.flatten()[:50].tolist()) in seen for x in part.test.x)
    assert torch.equal(part.test.x, data.held_out(50).test.x)


def test_normalised_images_have_the_published_mean_and_deviation() -> None:
    x = torch.tensor(MEAN).mul(255).expand(1, 2, 2, 3)
    assert normalised(x).abs().max() < 1e-6
    y = (torch.tensor(MEAN) + torch.tensor(STD)).mul(255).expand(1, 2, 2, 3)
    assert torch.allclose(normalised(y), torch.ones(1, 3, 2, 2), atol=1e-5)


def test_batches_are_crops_and_flips_of_the_images() -> None:
    """Every image of a batch is one of the 9 × 9 × 2 possible crops and flips."""
    few = images(6)
    batches = Batches(few, 3)
    padded = nn.functional.pad(few.x, (0, 0, 4, 4, 4, 4))
    crops = torch.cat(
        [padded[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
    )
    known = normalised(torch.cat([crops, crops.flip(2)]))
    torch.manual_seed(0)
    batches.shuffle()
    seen = []
    for _ in range(2):
        x, y = batches.next()
        for image, label in zip(x, y, strict=True):
            gaps = (known - image).abs().amax((1, 2, 3))
            number = int(gaps.argmin()) % 6
            assert float(gaps.min()) < 1e-6 and int(few.y[number]) == int(label)
            seen.append(number)
    assert sorted(seen) == list(range(6))  # each once an epoch


def test_shifts_and_flips_differ_from_image_to_image() -> None:
    same = images(1)
    many = Images(same.x.expand(64, -1, -1, -1), same.y.expand(64))
    batches = Batches(many, 64)
    batches.shuffle()
    x, _ = batches.next()
    assert len({tuple(image.flatten()[::97].tolist()) for image in x}) > 30


def test_cutout_blanks_a_square_and_nothing_else() -> None:
    many = images(40)
    found = []
    for cutout in (0, 10):
        batches = Batches(many, 40, cutout=cutout)
        torch.manual_seed(1)
        batches.shuffle()
        found.append(batches.next()[0])
    whole, cut = found
    blank = (cut == 0).all(1)  # of images whose own pixels are never at the mean
    assert torch.equal(cut, whole * ~blank[:, None])
    corners = set()
    for square in blank:
        rows, columns = square.any(1).nonzero().flatten(), square.any(0).nonzero().flatten()
        top, left, high, wide = int(rows[0]), int(columns[0]), len(rows), len(columns)
        assert int(square.sum()) == high * wide  # full, and in one piece
        assert rows.tolist() == list(range(top, top + high))
        assert 5 <= high <= 10 and 5 <= wide <= 10  # the rest of it lies outside
        assert high == 10 or top in (0, 32 - high)
        corners.add((top, left))
    assert len(corners) > 20


# --- recipes --------------------------------------------------------------------------------------


def test_the_papers_schedule_of_epsilon() -> None:
    schedule = per_epoch(0.96, 350)
    assert schedule.eps(0, 350) == pytest.approx(0.1)
    assert schedule.eps(1, 350) == pytest.approx(0.096)
    assert schedule.eps(350, 350) == pytest.approx(0.1 * 0.96**350)
    assert preset("resnet56-paper").schedule == schedule


def test_rates() -> None:
    cosine = Settings("x", warm_up=5)
    assert [cosine.rate(t, 100) for t in (0.0, 0.025, 0.05)] == pytest.approx([0, 0.5, 1])
    assert cosine.rate(0.525, 100) == pytest.approx(0.5) and cosine.rate(1.0, 100) < 1e-9
    steps = Settings("x", warm_up=0, rates="steps")
    assert [steps.rate(t, 140) for t in (0.0, 34.9 / 140, 35 / 140, 0.8)] == [1.0, 1.0, 0.1, 0.001]


def test_numbers_of_a_recipe_may_be_changed() -> None:
    found = preset("resnet56", epochs=7, compact="auto", **{"schedule.done": 0.4})
    assert (found.epochs, found.compact, found.schedule.done) == (7, "auto", 0.4)
    assert preset("resnet56", compact=None).compact is None
    with pytest.raises(pp.PruneError, match="has no field 'epoch'"):
        preset("resnet56", epoch=7)
    with pytest.raises(pp.PruneError, match="unknown preset 'resnet'"):
        preset("resnet")


# --- training -------------------------------------------------------------------------------------


def test_cards_say_what_was_closed_at_the_landing(
    data: Cifar10, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned: list[pp.Pruner] = []
    gated = Run._gated

    def kept(self: Run, *given: Any) -> tuple[pp.Pruner, Trainer]:
        made = gated(self, *given)
        pruned.append(made[0])
        return made

    monkeypatch.setattr(Run, "_gated", kept)
    run = Run(preset("tiny"), data, tmp_path)
    card = run.prune(run.baseline(), macs=0.5)
    assert card["landing"] == pruned[0].landing and set(card["landing"]) == {"gates", "macs"}
    assert type(card["landing"]["gates"]) is int and type(card["landing"]["macs"]) is float


def test_it_learns(data: Cifar10, tmp_path: Path) -> None:
    run = Run(preset("tiny", baseline_epochs=15), data, tmp_path)
    model = run.baseline()
    assert accuracy(model, data.test) > 0.6
    again = Run(preset("tiny", baseline_epochs=15), data, tmp_path).baseline()
    assert torch.equal(predictions(model, data.test), predictions(again, data.test))


def test_a_run_ends_on_its_budget_with_the_same_predictions(data: Cifar10, tmp_path: Path) -> None:
    run = Run(preset("tiny", distill=0.5, recalibrate=4, tune_epochs=2), data, tmp_path)
    card = run.prune(run.baseline(), macs=0.5)
    assert card["macs_share"] <= 0.5 and card["identical_predictions"]
    assert [row["stage"] for row in card["table"]] == [
        "baseline",
        "before removal",
        "after removal",
        "after fine-tuning",
    ]
    assert card["table"][1]["accuracy"] == card["table"][2]["accuracy"]
    assert {p.name for p in tmp_path.iterdir()} == {
        "baseline.safetensors",
        "small.safetensors",
        "tuned.safetensors",
        "card.json",
        "report.json",
        "report.html",
        "log.jsonl",
    }
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["before"]["macs"] == card["table"][0]["macs"]
    assert json.loads((tmp_path / "card.json").read_text()) == card
    assert card["commit"] == run.commit == commit()
    for name, row in (("small", card["table"][2]), ("tuned", card["table"][3])):
        small, found = rebuild(tmp_path / f"{name}.safetensors")
        assert accuracy(small, data.test) == row["accuracy"] == found["accuracy"]
        assert count_macs(small, torch.randn(1, 3, 32, 32)) == card["macs"]
        assert found["table"][-1] == row and found["recipe"] == card["recipe"]
        assert (found["commit"], found["landing"]) == (card["commit"], card["landing"])
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["baseline"] * 3 + ["prune"] * 4 + ["tune"] * 2
    assert rows[6]["macs"] <= 0.5 and rows[6]["accuracy"] is not None
    assert sum(rows[6]["histogram"]) == 28  # gates
    assert rows[6]["histogram"][0] == rows[6]["closed"] and rows[6]["recalibrated_loss"] > 0


class Stop(Exception):
    pass


@cache
def uninterrupted() -> dict[str, Any]:
    """Return the card of the run that the next test cuts off."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(preset("tiny", tune_epochs=2), few_images(), Path(folder))
        model = run.baseline()
        torch.manual_seed(5)
        return run.prune(model, macs=0.5)


@pytest.mark.parametrize(("stage", "after"), [("prune", 1), ("prune", 3), ("tune", 0), ("tune", 1)])
def test_a_run_goes_on_where_it_was_cut_off(
    stage: str, after: int, data: Cifar10, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarprune.experiments.runs.run.CHECKPOINT_PAUSE", 0.0)
    wanted, seen = preset("tiny", tune_epochs=2), 0

    def stop(row: dict[str, Any]) -> None:
        nonlocal seen
        seen += row["stage"] == stage
        if seen > after:
            raise Stop

    run = Run(wanted, data, tmp_path)
    model = run.baseline()
    torch.manual_seed(5)
    run.progress = stop
    with pytest.raises(Stop):
        run.prune(model, macs=0.5)
    torch.manual_seed(99)  # another process, another state
    run = Run(wanted, data, tmp_path)
    card, whole = run.prune(run.baseline(), macs=0.5), uninterrupted()
    assert card["table"] == whole["table"] and card["sha256"] == whole["sha256"]
    rows = (tmp_path / "log.jsonl").read_text().count('"stage": "prune"')
    assert rows == 4 + (stage == "prune")  # one epoch is done again, none after it was finished


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_teacher_stays_for_the_fine_tuning(
    share: float, data: Cifar10, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = {}
    train = Run.train
    monkeypatch.setattr(
        Run,
        "train",
        lambda run, stage, trainer: (
            taught.update({stage: trainer.teacher is not None}),
            train(run, stage, trainer),
        ),
    )
    run = Run(preset("tiny", distill=share, tune_epochs=1), data, tmp_path)
    run.prune(run.baseline(), macs=0.5)
    assert taught == {"baseline": False, "prune": share > 0, "tune": share > 0}


def test_a_teacher_is_listened_to(data: Cifar10) -> None:
    torch.manual_seed(0)
    teacher, student = Tiny(), Tiny()
    batches = Batches(data.train, 20)
    trainer = Trainer(
        student, batches, preset("tiny", distill=1.0), epochs=20, lr=0.05, teacher=teacher
    )

    def apart() -> float:
        x = normalised(data.test.x)
        with torch.no_grad():
            return float((teacher.eval()(x).softmax(1) - student.eval()(x).softmax(1)).abs().sum())

    before = apart()
    for _ in range(20):
        trainer.epoch()
    assert apart() < 0.7 * before
    assert trainer.teacher is not teacher and not any(
        p.requires_grad for p in trainer.teacher.parameters()
    )


def test_a_compiled_training_is_the_same_training(
    data: Cifar10, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def quickly(model: nn.Module) -> Any:
        compiled.append(model)
        return compile_with(model, backend="aot_eager")

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", quickly)
    found = []
    for wanted in (False, True):
        torch.manual_seed(0)
        teacher, student, batches = Tiny(), Tiny(), Batches(data.train, 20)
        steps = 2 * batches.per_epoch
        pruner = pp.Pruner(student, normalised(data.test.x[:2]), macs=0.5, steps=steps)
        trainer = Trainer(
            student,
            batches,
            preset("tiny", distill=0.5, compiled=wanted),
            epochs=2,
            lr=0.05,
            pruner=pruner,
            teacher=teacher,
        )
        found.append([trainer.epoch()["loss"] for _ in range(2)])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0][0] != found[0][1]
    assert len(compiled) == 2 and compiled[0] is student  # and its teacher


def test_statistics_of_batch_norms_are_taken_anew(data: Cifar10) -> None:
    model = Tiny()
    model.bn.running_mean.fill_(100.0)
    recalibrate(model, Batches(data.train, 20), 5)
    assert float(model.bn.running_mean.abs().max()) < 10


def test_statistics_are_taken_anew_for_a_while_only(data: Cifar10) -> None:
    model, batches = Tiny(), Batches(data.train, 20)
    model.bn.running_mean.fill_(100.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with recalibrated(model, batches, 5):
        inside = logits(model, data.test)
    recalibrate(anew := copy.deepcopy(model), batches, 5)
    assert inside.allclose(logits(anew, data.test), atol=0.1)
    assert not inside.allclose(logits(model, data.test), atol=0.1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.data_ptr() == places[name], name


def test_the_log_of_a_lasso_says_how_its_norms_lie(data: Cifar10, tmp_path: Path) -> None:
    run = Run(preset("tiny"), data, tmp_path)
    prune(run, run.baseline(), "lasso", macs=0.5)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    norms = [row["norms"] for row in rows if row["stage"] == "prune"]
    assert len(norms) == TINY.epochs
    assert all(len(bins) == 20 and sum(bins) == 28 and bins[-1] >= 1 for bins in norms)


def test_with_the_papers_lambda_the_ratio_falls_where_it_falls(
    data: Cifar10, tmp_path: Path
) -> None:
    shares = []
    for lam in (5.0, 100.0):
        run = Run(preset("tiny", epochs=8), data, tmp_path / str(lam))
        card = prune(run, run.baseline(), "gdp", lam=lam)
        assert card["budget"] == {"lam": lam} and card["identical_predictions"]
        shares.append(card["macs_share"])
    assert 1 >= shares[0] > shares[1] > 0
    with pytest.raises(pp.PruneError, match="--lam is for gdp only"):
        prune(run, run.baseline(), "lasso", lam=1.0)


# --- the command line -----------------------------------------------------------------------------


MISTAKES = {
    "--macs 1.5": "macs=1.5",
    "--macs 0.5 --method foo": "unknown method 'foo'",
    "--macs 0.5 --lam 3": "conflicting settings",
    "--macs 0.5 --method lasso --params 2": "params=2",
    "--set epochs": "name=value",
    "--set epochs=abc": "epochs='abc' must be of type int",
    "--set rates=foo": "must be one of cosine, steps, poly",
    "--set optimizer=Adam": "must be one of sgd, adam",
    "--set batch=0": "batch=0 must be at least 1",
    "--set schedule=3": "schedule=3",
    "--set epochs.x=3": "is a plain value without a field 'x'",
    "--set network=foo": "unknown network 'foo'",
    "--start nowhere.safetensors": "no such file",
    "--set momentum=-0.5": "momentum=-0.5 must be at least 0 and at most 1",
    "--set seed=99999999999999999999999": "at most 9223372036854775807",
    "--set weight_decay=NaN": "weight_decay=nan must be at least 0",
    "--set distill=2.0": "distill=2.0 must be at least 0 and at most 1",
    "--set lr=-1": "lr=-1 must be at least 0",
    "--macs 0.00001": "lowest",
    "--macs 0.5 --set compact=yes": "compact='yes'",
    "--macs 0.5 --device cpu:x": "give cpu or cuda",
    "--macs 0.5 --uniform": "uniform=True: no two prunable groups are at the same position",
    "--macs 0.5 --uniform --method lasso": "--uniform is for gdp only",
    "--lam 3 --set uniform=true": "with lam= every channel closes by itself",
    "--macs 0.5 --set uniform=1": "uniform=1 must be of type bool",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_told_before_anything_is_trained(given: str, tmp_path: Path) -> None:
    written(tmp_path, "bin")
    out = tmp_path / "out"
    start = ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--device", "cpu", "--out", str(out)]
    done = runner.invoke(app, [*start, *given.split()])
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert MISTAKES[given] in done.output and "PruneError: " in done.output
    assert not (out / "log.jsonl").exists()


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    out = tmp_path / "out"
    start = ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--device", "cpu", "--out", str(out)]
    start += ["--set", "epochs=1", "--set", "baseline_epochs=1", "--macs", "0.5"]
    assert runner.invoke(app, start).exit_code == 0
    assert runner.invoke(app, [*start, "--set", "scored=1"]).exit_code == 0  # goes on
    kept = (out / "card.json").read_bytes()
    for more, what in ((["--seed", "5"], "seed is 0 there, 5 here"), (["--macs", "0.4"], "budget")):
        done = runner.invoke(app, [*start, *more])
        assert done.exit_code == 1 and what in " ".join(done.output.split())
    assert (out / "card.json").read_bytes() == kept
    done = runner.invoke(app, [*start[:-2], "--out", str(out / "card.json")])
    assert done.exit_code == 1 and "is a file" in done.output


def test_what_was_refused_does_not_keep_the_folder(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    start = ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--out", str(tmp_path / "out")]
    start += ["--set", "epochs=1", "--set", "baseline_epochs=1"]
    assert runner.invoke(app, [*start, "--macs", "0.5", "--set", "compact=yes"]).exit_code == 1
    assert runner.invoke(app, start).exit_code == 0  # a baseline only
    assert runner.invoke(app, [*start, "--macs", "0.5"]).exit_code == 0  # goes on from it
    rows = [json.loads(row) for row in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["baseline", "prune"]


def test_a_baseline_that_is_read_is_as_good_as_one_that_was_trained(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    start = ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--macs", "0.5", "--device", "cpu"]
    start += ["--set", "epochs=2", "--set", "baseline_epochs=1"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert runner.invoke(app, [*start, "--out", str(one)]).exit_code == 0
    given = ["--out", str(two), "--baseline", str(one / "baseline.safetensors")]
    assert runner.invoke(app, [*start, *given]).exit_code == 0
    small = [(folder / "small.safetensors").read_bytes() for folder in (one, two)]
    cards = [json.loads((folder / "card.json").read_text()) for folder in (one, two)]
    assert small[0] == small[1] and cards[0]["sha256"] == cards[1]["sha256"]


@pytest.mark.parametrize("name", ["card.json", "run.json", "prune.checkpoint"])
def test_a_damaged_file_is_told(name: str, tmp_path: Path) -> None:
    written(tmp_path, "bin")
    out = tmp_path / "out"
    start = ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--macs", "0.5", "--out", str(out)]
    start += ["--set", "epochs=1", "--set", "baseline_epochs=1"]
    assert runner.invoke(app, start).exit_code == 0
    (out / name).write_bytes(b"{")
    if name == "prune.checkpoint":
        (out / "card.json").unlink()
    done = runner.invoke(app, start)
    assert done.exit_code == 1 and f"PruneError: {out / name}" in "".join(done.output.split("\n"))
    assert "Traceback" not in done.output


def test_a_run_that_is_finished_is_not_done_again(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    out = tmp_path / "out"
    start = ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--device", "cpu", "--out", str(out)]
    start += ["--set", "epochs=1", "--set", "baseline_epochs=1", "--macs", "0.5"]
    first = runner.invoke(app, start)
    kept = {file.name: file.read_bytes() for file in out.iterdir()}
    again = runner.invoke(app, start)
    assert first.exit_code == again.exit_code == 0
    assert "after removal" in again.output and "of the MACs" in again.output
    assert {file.name: file.read_bytes() for file in out.iterdir()} == kept


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--hold-out", "-5"], "--hold-out -5: give a number from 0 to 99"),
        (["--hold-out", "100000"], "less than the number of training examples"),
        (["--dry-run", "-2"], "--dry-run -2"),
        (["--set", "batch=60000"], "are less than one batch"),
        (["--device", "gpu"], "--device gpu: give cpu or cuda"),
        (["--start", "{}/text"], "it holds no weights"),
    ],
)
def test_a_training_that_cannot_be_is_not_begun(
    given: list[str], said: str, tmp_path: Path
) -> None:
    written(tmp_path, "bin")
    (tmp_path / "text").write_text("nothing")
    out = tmp_path / "out"
    given = [part.format(tmp_path) for part in given]
    done = runner.invoke(
        app, ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--out", str(out), *given]
    )
    assert done.exit_code == 1 and said in " ".join(done.output.split())
    assert not (out / "baseline.safetensors").exists()


def test_a_sweep_prunes_one_baseline_to_several_budgets(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    out = tmp_path / "out"
    start = ["sweep", "tiny", "--data", f"cifar10:{tmp_path}", "--device", "cpu", "--out", str(out)]
    start += ["--set", "epochs=2", "--set", "baseline_epochs=1"]
    start += ["--no-ray", "--macs", "0.7", "--macs", "0.4", "--macs", "0.7"]
    done = runner.invoke(app, start)
    assert done.exit_code == 0, done.output
    rows = json.loads((out / "sweep.json").read_text())
    assert [row["budget"] for row in rows] == [0.7, 0.4]
    assert all(row["macs"] <= row["budget"] for row in rows) and rows[0]["macs"] > 0.5
    assert len({row["baseline"] for row in rows}) == 1 and done.output.count("baseline 1/1") == 1
    for row in rows:
        card = json.loads((out / f"macs-{row['budget']:g}" / "card.json").read_text())
        assert card["accuracy"] == row["score"] and f"{row['macs']:.2%}" in done.output
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    kept = (out / "macs-0.4" / "log.jsonl").read_bytes()
    more = [*start[:-6], "--macs", "0.9"]
    assert runner.invoke(app, more).exit_code == 0  # what is there stays
    assert (out / "macs-0.4" / "log.jsonl").read_bytes() == kept
    rows = json.loads((out / "sweep.json").read_text())
    assert [row["budget"] for row in rows] == [0.9, 0.7, 0.4]
    done = runner.invoke(app, [*more, "--seed", "5"])  # another baseline
    assert done.exit_code == 1 and "seed is 0 there, 5 here" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--macs", "0.5", "--macs", "1.5"], "macs=1.5"),
        (["--macs", "0.5", "--method", "foo"], "unknown method 'foo'"),
        (["--macs", "0.5", "--out", "{}/text"], "is a file"),
        (["--macs", "0.5", "--macs", "0.0001"], "lowest"),
        (["--macs", "0.5,x"], "--macs x: give fractions, such as --macs 0.7,0.5."),
        (["--macs", "0.5", "--seeds", "0"], "--seeds 0: give at least 1."),
        (["--macs", "0.5", "--threads", "-1"], "--threads -1: give a number of threads"),
    ],
)
def test_a_sweep_that_cannot_be_is_not_begun(given: list[str], said: str, tmp_path: Path) -> None:
    written(tmp_path, "bin")
    (tmp_path / "text").write_text("nothing")
    usual = ["sweep", "tiny", "--data", f"cifar10:{tmp_path}", "--out", str(tmp_path / "out")]
    usual += ["--set", "epochs=1", "--set", "baseline_epochs=1"]
    done = runner.invoke(app, [*usual, *(part.format(tmp_path) for part in given)])
    assert done.exit_code == 1 and said in " ".join(done.output.split()), done.output
    assert not list((tmp_path / "out").glob("*/card.json"))


def test_the_seed_may_be_given_twice(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    given = ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--out", str(tmp_path / "out")]
    given += ["--set", "seed=1", "--seed", "2", "--set", "baseline_epochs=1"]
    assert runner.invoke(app, given).exit_code == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["seed"] == 2


def test_eval_wants_the_data_of_the_network(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    start = ["train", "tiny", "--data", f"cifar10:{tmp_path}", "--device", "cpu"]
    start += ["--out", str(tmp_path / "out"), "--set", "epochs=1", "--set", "baseline_epochs=1"]
    assert runner.invoke(app, [*start, "--macs", "0.5"]).exit_code == 0
    file = str(tmp_path / "out" / "small.safetensors")
    done = runner.invoke(app, ["eval", file, "--data", f"voc:{tmp_path}"])
    assert done.exit_code == 1 and "give cifar10:DIR" in done.output
    if not torch.cuda.is_available():
        done = runner.invoke(
            app, ["eval", file, "--data", f"cifar10:{tmp_path}", "--device", "cuda"]
        )
        assert done.exit_code == 1 and "no GPU" in done.output


def test_train_and_eval_on_the_command_line(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    data, out = f"cifar10:{tmp_path}", tmp_path / "out"
    done = train_tiny(data, out, "--macs=0.5", "--set=epochs=3", "--set=batch=10", "--seed=3")
    assert done.exit_code == 0, done.output
    assert "after removal" in done.output and "of the MACs" in done.output
    scored = runner.invoke(app, ["eval", str(out / "small.safetensors"), "--data", data])
    assert scored.exit_code == 0, scored.output
    card = json.loads((out / "card.json").read_text())
    shown = " ".join(scored.output.split())
    assert f"accuracy {card['accuracy']:.2%} on 20 images" in shown
    assert card["recipe"]["seed"] == 3 and card["recipe"]["epochs"] == 3


def test_a_baseline_alone(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    done = runner.invoke(
        app,
        [
            "train",
            "tiny",
            "--data",
            f"cifar10:{tmp_path}",
            "--out",
            str(tmp_path / "out"),
            "--set",
            "batch=10",
            "--hold-out",
            "20",
        ],
    )
    assert done.exit_code == 0 and "baseline: " in done.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["train", "nothing", "--data", "cifar10:x"], "unknown preset 'nothing'"),
        (["train", "tiny", "--data", "cifar10:nowhere"], "neither cifar-10-batches-py nor"),
        (["train", "tiny", "--data", "cifar10:x", "--set", "speed=9"], "has no field 'speed'"),
        (["eval", "nowhere.safetensors", "--data", "cifar10:x"], "there is no file"),
    ],
)
def test_mistakes_on_the_command_line_are_named(given: list[str], said: str) -> None:
    done = runner.invoke(app, given)
    assert done.exit_code == 1 and said in " ".join(done.output.split())


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    model = Tiny().eval()
    graph = pp.trace(model, torch.randn(2, 3, 32, 32))
    small = pp.shrink(model, graph, {})
    pp.save(small, tmp_path / "x.safetensors", card={"network": "unknown"})
    with pytest.raises(pp.PruneError, match="names the network 'unknown'"):
        rebuild(tmp_path / "x.safetensors")


# --- all experiments ------------------------------------------------------------------------------


FORKS = SimpleNamespace(Popen=ForkedCommand, STDOUT=subprocess.STDOUT)


def test_experiments_run_one_after_the_other_and_leave_cards_and_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path, "bin", count=10)
    few = {
        "b": experiments.Experiment("tiny", 0.4, after="a"),
        "a": experiments.Experiment("tiny", 0.5, seed=1, tune=1, ships="net-50"),
        "common": experiments.Experiment("resnet20", keeps=True),
        "c": experiments.Experiment("resnet20", 0.6, after="common"),
        "other": experiments.Experiment("tiny", 0.5, after="nothing"),
    }
    monkeypatch.setattr(experiments, "EXPERIMENTS", few)
    folders = [f"--{name}={tmp_path / name}" for name in ("runs", "results", "zoo")]
    small = [f"--set={change}" for change in ("epochs=2", "baseline_epochs=1", "batch=10")]
    given = [f"--data=cifar10:{tmp_path}", "--together=2", *folders, *small]
    assert experiments.main([*given, "other"]) == 1  # there is no baseline
    with monkeypatch.context() as patched:
        patched.setattr(experiments, "subprocess", FORKS)
        assert experiments.main([*given, "a", "b"]) == 0
        assert experiments.main([*given, "--set=epochs=none", "a"]) == 1  # what fails is counted
    cards = {
        name: json.loads((tmp_path / f"results/{name}/card.json").read_text()) for name in "ab"
    }
    assert cards["a"]["recipe"]["seed"] == 1 and cards["b"]["macs_share"] <= 0.4
    assert cards["a"]["table"][0]["accuracy"] == cards["b"]["table"][0]["accuracy"]
    assert not (tmp_path / "runs/b/baseline.safetensors").exists()
    shipped = json.loads((tmp_path / "zoo/net-50.json").read_text())
    net, found = rebuild(tmp_path / "zoo/net-50.safetensors")
    assert accuracy(net, data.test) == shipped["accuracy"] == cards["a"]["table"][2]["accuracy"]
    assert shipped["sha256"] == cards["a"]["sha256"] and (tmp_path / shipped["log"]).exists()
    assert found["recipe"] == shipped["recipe"]
    assert experiments.main([*given, "common"]) == 0  # in a process of its own
    assert (tmp_path / "results/common/baseline.safetensors").exists()
    shutil.rmtree(tmp_path / "runs")  # what was kept is enough to start from
    monkeypatch.setattr(experiments, "subprocess", FORKS)
    assert experiments.main([*given, "c"]) == 0


def settings(experiment: experiments.Experiment) -> Settings:
    """Return the settings of an experiment, as the command line would change them."""
    changes = [change.partition("=")[::2] for change in experiment.change]
    return preset(experiment.preset, **{key: json.loads(value) for key, value in changes})


PLAIN = [
    name
    for name, one in experiments.EXPERIMENTS.items()
    if name.startswith(("plain", "search", "paper")) and (one.lam or one.aim)
]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_mode_is_that_of_the_paper(name: str) -> None:
    experiment = experiments.EXPERIMENTS[name]
    found = settings(experiment)
    own = {key: getattr(found.schedule, key) for key in ("relaxed", "sweeps", "alpha_start")}
    ends, decay = {"eps_start": found.schedule.eps_start}, found.schedule.decay
    paper = pp.Schedule.paper(decay=decay, every=50000 // found.batch, **own, **ends)
    assert found.schedule == paper and not experiment.macs and not found.distill
    if experiment.aim:  # to its end
        assert (found.epochs, found.baseline_epochs, found.cutout) == (350, 350, 0)
        assert decay == 0.96 and found.schedule.eps_start == 0.1
    elif name.startswith("plain"):
        assert found.epochs == experiments.SHORT


@pytest.mark.parametrize(
    "name",
    [
        "plain-reference",
        "plain-l0-lam4-alpha0.5",
        "plain-kernel-gates",
        "plain-scratch",
        "paper-vgg16-31-budget",
    ],
)
def test_the_papers_recipes_run(name: str, data: Cifar10, tmp_path: Path) -> None:
    """Run one epoch of a tiny network with all other settings of the experiment."""
    one = experiments.EXPERIMENTS[name]
    short = {"network": "tiny", "epochs": 1, "baseline_epochs": 1, "batch": 20, "tune_epochs": 0}
    run = Run(dataclasses.replace(settings(one), **short), data, tmp_path)  # type: ignore[arg-type]
    goal = {"macs": one.macs} if one.macs else {"lam": one.lam}
    card = prune(run, run.baseline(), one.method, **goal)
    assert 0 < card["macs_share"] <= (one.macs or 1)
    assert card["identical_predictions"] or one.method != "gdp"  # that is cut to a budget
    capped = card["recipe"]["schedule"]["max_shrink"]
    assert capped == ("inf" if name.startswith("plain") else 10.0)


def test_a_plain_run_to_the_end_waits_for_its_lambda(tmp_path: Path) -> None:
    given = argparse.Namespace(results=tmp_path / "results", runs=tmp_path / "runs")
    name = "paper-vgg16-31-plain"
    one = experiments.EXPERIMENTS[name]
    (given.runs / one.after).mkdir(parents=True)
    (given.runs / one.after / experiments.BASELINE).touch()
    for number, lam in enumerate(experiments.SEARCHED["vgg16"]):
        assert not experiments.ready(name, given)
        folder = given.results / f"{one.search}{lam}"
        folder.mkdir(parents=True)
        card = {"macs_share": 0.9 - 0.2 * number, "budget": {"lam": lam}, "recipe": {"epochs": 35}}
        (folder / "card.json").write_text(json.dumps(card))
    assert experiments.ready(name, given)
    arguments = one.arguments("cifar10:x", given, name)
    found = float(arguments[arguments.index("--lam") + 1])
    assert 0.2 < found < 0.4  # 2 to 4, over ten times as many epochs


def comparisons() -> list[experiments.Experiment]:
    """The runs against thin networks and other methods, which are not the paper's."""
    return [
        *experiments.worth().values(),
        *experiments.tiny().values(),
        *experiments.transfer().values(),
        *experiments.gpt().values(),
        *experiments.deit().values(),
    ]


def test_the_experiments_are_those_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert names == sorted(names, key=lambda name: bool(experiments.needs(name)))
    mine = [
        one
        for one in experiments.EXPERIMENTS.values()
        if one.preset not in run_conditions.OTHER_NETWORKS
    ]
    assert {one.kind for one in mine} == {"cifar10", "voc", "style", "tiny-imagenet", "text"}
    mine = [one for one in mine if one not in comparisons()]
    for claim in paper_table.CLAIMS:
        same = [one for one in mine if round(100 * one.macs, 2) == claim.macs]
        assert {one.preset for one in same} == {claim.network, f"{claim.network}-paper"}
        assert len({one.seed for one in same if one.method == "gdp"}) == (
            3 if claim == compared_methods.COMPARED else 1
        )
    found = {one.method for one in experiments.EXPERIMENTS.values()}
    assert found == {"gdp", *ALL_METHODS, "thin", "reinit"}
    with pytest.raises(SystemExit):
        experiments.main(["--data=voc:x", "resnet56"])
