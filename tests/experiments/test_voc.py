"""Segmentation: photos and masks that move together, intersection over union, DeepLabV3+."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from polarprune.cli.app import app
from polarprune.experiments.data.table import open_data
from polarprune.experiments.data.voc import (
    MEAN,
    STD,
    VOID,
    Crops,
    Photos,
    Voc,
    intersection_over_union,
    open_voc,
)
from polarprune.experiments.networks.imagenet import from_torchvision
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.runs.optimizers import split_slow_group
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.runs.run import Run
from polarprune.experiments.runs.trainer import Trainer
from polarprune.experiments.settings import Settings
from tests.helpers.command_line import train_tiny
from tests.helpers.no_reading import NoReading
from tests.helpers.voc import Tiny, mask_of, saved, written

SIDE = 33


@pytest.fixture
def voc(tmp_path: Path) -> Voc:
    written(tmp_path)
    return open_voc(tmp_path)


# --- data -----------------------------------------------------------------------------------------


def test_photos_and_masks_are_read_as_they_are(tmp_path: Path) -> None:
    root = written(tmp_path)
    for folder in (tmp_path, root):
        found = open_data(f"voc:{folder}")
        assert isinstance(found, Voc) and found.counts == (12, 4)
    photos = found.train
    assert photos.x.shape == (12, SIDE, SIDE, 3) and photos.sizes[3].tolist() == [23, 28]
    mask = torch.from_numpy(mask_of(3)).int()
    stored = photos.masks[3, :23, :28].int()
    assert torch.equal(stored, torch.where(mask == 255, 0, mask + 1))
    assert not photos.masks[3, 23:].any() and not photos.masks[3, :, 28:].any()
    assert not photos.x[3, 23:].any() and int(photos.x[3, 8, 10, 0]) == pytest.approx(80, abs=5)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda root: (root / "SegmentationClass").rename(root / "Other"),
            "no folder SegmentationClass",
        ),
        (
            lambda root: (root / "ImageSets/Segmentation/val.txt").unlink(),
            r"cannot read .*val\.txt",
        ),
        (lambda root: (root / "JPEGImages/3.jpg").unlink(), r"cannot read .*3\.jpg"),
        (lambda root: saved(mask_of(4), root / "SegmentationClass/3.png"), "photo 3 has"),
        (lambda root: saved(mask_of(3) | 16 + 5, root / "SegmentationClass/3.png"), "class above"),
    ],
)
def test_a_broken_folder_is_refused(harm: Any, message: str, tmp_path: Path) -> None:
    harm(written(tmp_path))
    with pytest.raises(pp.PruneError, match=message):
        open_voc(tmp_path)


def test_outside_of_a_photo_is_the_mean_colour(voc: Voc) -> None:
    x = voc.train.normalised()
    height, width = voc.train.sizes[0].tolist()
    assert not x[0, :, height:].any() and not x[0, :, :, width:].any()
    wanted = (voc.train.x[0, 0, 0] / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert x[0, :, 0, 0].allclose(wanted)


def test_photo_and_mask_are_cut_alike(voc: Voc) -> None:
    """Red is 80 times the class, so a crop says what its mask has to be."""
    crops = Crops(voc.train, 6, 25)
    seen = set()
    for _ in range(10):
        crops.shuffle()
        x, y = crops.next()
        assert x.shape == (6, 3, 25, 25) and y.shape == (6, 25, 25)
        red = (x[:, 0] * STD[0] + MEAN[0]) * 255
        inside = (y > 0) & (red - 80 * y).abs().lt(8)  # bilinear at the borders, nearest in masks
        assert float(inside.sum() / (y > 0).sum()) > 0.7
        seen |= set(y.unique().tolist())
    assert seen == {VOID, 0, 1, 2, 3}


def test_crops_are_of_all_scales_and_both_ways_round(voc: Voc) -> None:
    crops = Crops(voc.train, 12, 25)
    widths, sides = [], []
    for _ in range(30):
        crops.shuffle()
        where = crops._grid(voc.train.sizes[crops.order])
        across = where[:, 0, :, 0]
        widths.append((across[:, -1] - across[:, 0]) * SIDE / 2 / 24)  # photo pixels a pixel
        sides.append(across[:, -1] > across[:, 0])
    width = torch.cat(widths).abs()
    assert 0.5 <= float(width.min()) < 0.55 and 1.8 < float(width.max()) <= 2.0
    assert 0.4 < float(torch.cat(sides).double().mean()) < 0.6


def test_all_photos_are_seen_once_in_an_epoch(voc: Voc) -> None:
    crops = Crops(voc.train, 4, 25)
    assert crops.per_epoch == 3
    crops.shuffle()
    assert sorted(crops.order.tolist()) == list(range(12))


def test_photos_held_out_are_not_learned_from(voc: Voc) -> None:
    held = voc.held_out(5)
    assert held.counts == (7, 5)
    known = {tuple(row.flatten().tolist()) for row in held.train.x}
    assert not known & {tuple(row.flatten().tolist()) for row in held.test.x}


# --- scores ---------------------------------------------------------------------------------------


def test_intersection_over_union_by_hand() -> None:
    masks = torch.tensor([[[1, 1, 2, 2], [0, 3, 3, 0]]], dtype=torch.uint8)  # class + 1; 0 is void
    answers = torch.tensor([[[0, 1, 1, 1], [9, 2, 0, 9]]], dtype=torch.uint8)
    found = intersection_over_union(answers, masks)
    assert found[:3].tolist() == [1 / 3, 2 / 3, 1 / 2]  # void does not count, 9 is only there
    assert bool(found[3:].isnan().all())
    voc = Voc(
        Photos(torch.zeros(0), masks, torch.zeros(0)), Photos(torch.zeros(0), masks, torch.zeros(0))
    )
    assert voc.score(answers) == pytest.approx((1 / 3 + 2 / 3 + 1 / 2) / 3)
    assert voc.score((masks.int() - 1).clamp_min(0).byte()) == 1.0


# --- a run ----------------------------------------------------------------------------------------


TINY = Settings(
    "tiny",
    "voc",
    baseline_epochs=25,
    epochs=4,
    batch=4,
    baseline_lr=0.2,
    lr=0.05,
    rates="poly",
    crop=25,
    warm_up=0,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)
    monkeypatch.setitem(PRESETS, "tiny", TINY)


def test_a_run_ends_on_its_budget_with_the_same_answers(
    voc: Voc, tiny: None, tmp_path: Path
) -> None:
    run = Run(PRESETS["tiny"], voc, tmp_path / "out")
    model = run.baseline()
    assert run.score(model) > 0.4
    card = run.prune(model, macs=0.5)
    assert card["macs_share"] <= 0.5 and card["identical_predictions"]
    assert card["mIoU"] == card["table"][-1]["mIoU"] == card["table"][-2]["mIoU"]
    assert (card["trained_on"], card["scored_on"], card["measure"]) == (12, 4, "mIoU")
    small, _ = rebuild(tmp_path / "out" / "small.safetensors")
    assert voc.score(voc.answers(small)) == card["mIoU"]
    rows = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert rows[-1]["mIoU"] == card["mIoU"] and rows[-1]["recalibrated_loss"] > 0
    assert rows[24]["loss"] < rows[0]["loss"] / 2


def test_train_and_eval_on_the_command_line(tiny: None, tmp_path: Path) -> None:
    written(tmp_path)
    runner, data, out = CliRunner(), f"voc:{tmp_path}", tmp_path / "out"
    settings = ("--set=epochs=1", "--set=baseline_epochs=1", "--set=distill=0.5")
    done = train_tiny(data, out, "--macs=0.6", *settings)
    assert done.exit_code == 0, done.output
    assert "after removal" in done.output and "of the MACs" in done.output
    done = runner.invoke(app, ["eval", str(out / "small.safetensors"), "--data", data])
    assert done.exit_code == 0, done.output
    assert "mIoU" in done.output and "on 4 images" in done.output
    done = runner.invoke(app, ["train", "tiny", "--data", "cifar10:x", "--macs", "0.5"])
    assert done.exit_code == 1 and "give voc:DIR" in " ".join(done.output.split())


def test_some_modules_learn_at_a_tenth_of_the_rate(voc: Voc) -> None:
    model = Tiny()
    pruner = pp.Pruner(model, torch.randn(2, 3, 9, 9), macs=0.5, steps=10)
    groups = split_slow_group(pruner.param_groups(lr=0.01, weight_decay=1e-4), model, "backbone")
    quick, slow, gates = groups
    assert (quick["lr"], slow["lr"], gates["lr"]) == pytest.approx((0.01, 0.001, 0.001))
    assert len(slow["params"]) == 2 and len(quick["params"]) == 6
    assert gates["params"] == [gate.alpha for gate in pruner.gates.values()]
    trainer = Trainer(
        model, Crops(voc.train, 4, 25), Settings("tiny", slow="backbone"), epochs=1, lr=0.01
    )
    assert trainer.rates == pytest.approx([0.01, 0.001])


def test_the_rate_of_the_paper_for_segmentation() -> None:
    recipe = PRESETS["deeplabv3plus"]
    rates = [recipe.rate(t, 100) for t in (0.0, 0.5, 1.0)]
    assert rates == pytest.approx([1.0, 0.5**0.9, 0.0])
    for each in (recipe, PRESETS["deeplabv3plus-scratch"]):
        assert each.lr * each.schedule.gate_lr == pytest.approx(9e-4)
        assert each.schedule.eps(120, 60_000) == pytest.approx(0.1 * 0.97)


# --- DeepLabV3+ -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deeplab() -> nn.Module:
    import_torchvision()
    torch.manual_seed(0)
    return NETWORKS["deeplabv3plus"]().eval()


def test_deeplab_has_an_output_stride_of_16_and_a_score_for_every_pixel(deeplab: Any) -> None:
    x = torch.randn(1, 3, 65, 65)
    early, late = deeplab.backbone(x)
    assert early.shape == (1, 256, 17, 17) and late.shape == (1, 2048, 5, 5)
    assert deeplab(x).shape == (1, 21, 65, 65)
    assert [way[0].dilation[0] for way in deeplab.pyramid.ways] == [1, 6, 12, 18]


def test_deeplab_begins_with_torchvisions_weights(
    deeplab: Any, voc: Voc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, asked = from_torchvision("resnet50"), []

    def found(name: str, weights: str) -> nn.Module:
        asked.append((name, weights))
        return published

    monkeypatch.setattr("polarprune.experiments.runs.start.from_torchvision", found)
    monkeypatch.setitem(NETWORKS, "deeplabv3plus", lambda: copy.deepcopy(deeplab))
    torch.save(published.state_dict(), tmp_path / "resnet50.pth")
    recipe = replace(PRESETS["deeplabv3plus"], baseline_epochs=0, batch=2)
    for start in (None, tmp_path / "resnet50.pth"):
        out = tmp_path / ("file" if start else "published")
        model: Any = Run(recipe, voc, out).baseline(start=start)
        assert torch.equal(model.backbone.layer4[2].conv3.weight, published.layer4[2].conv3.weight)  # type: ignore[index,union-attr]
        assert torch.equal(model.pyramid.ways[1][0].weight, deeplab.pyramid.ways[1][0].weight)
    assert asked == [("resnet50", "IMAGENET1K_V1")]
    norms = [m for m in deeplab.backbone.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {norm.momentum for norm in norms} == {0.01} and deeplab.fine[1].momentum == 0.1


def test_a_branch_of_the_pyramid_can_vanish(deeplab: nn.Module) -> None:
    """The paper saw it happen to the one of rate 18."""
    x = torch.randn(2, 3, 65, 65)
    graph = pp.trace(deeplab, x)
    whole = {name for name, group in graph.groups.items() if group.frozen}
    assert whole == {"classes"}
    plan = {name: list(range(group.size)) for name, group in graph.prunable.items()}
    plan |= {"pyramid.ways.3.0": [], "pyramid.ways.2.0": [3, 77]}
    small: Any = pp.shrink(deeplab, graph, plan)
    with torch.no_grad():
        deeplab.pyramid.project[0][0].weight[:, 768:1024] = 0  # type: ignore[index,union-attr,operator]
        kept = torch.zeros(256, dtype=torch.bool)
        kept[[3, 77]] = True
        deeplab.pyramid.project[0][0].weight[:, 512:768][:, ~kept] = 0  # type: ignore[index,union-attr,operator]
        assert small(x).allclose(deeplab(x), atol=1e-4)
    assert small.pyramid.ways[2][0].weight.shape[0] == 2


def test_a_step_can_be_captured(tiny: None, tmp_path: Path) -> None:
    run = Run(TINY, open_voc(written(tmp_path)), tmp_path / "out")
    trainer = Trainer(
        run.new_network(), run.batches, TINY, epochs=1, lr=0.1, teacher=run.new_network()
    )
    trainer.batches.shuffle()
    with NoReading():
        trainer._step()
