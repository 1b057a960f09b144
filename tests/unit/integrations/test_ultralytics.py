"""The trainer for Ultralytics meets a budget, resumes, and writes the small model."""

from __future__ import annotations

import re
import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from ultralytics import YOLO
from ultralytics.nn.modules.block import C2f

import polarprune as pp
from polarprune import PruneError
from polarprune.integrations.ultralytics import (
    PruningClassificationTrainer,
    PruningTrainer,
)
from tests.helpers.detection import FAST, SIZE, write_classes, write_model, write_pictures

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # its own, which nothing here can avoid
    pytest.mark.usefixtures("quick_collections", "shared_traces"),
]
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "ultralytics.md").read_text(encoding="utf-8")
HALF = PruningTrainer.with_budget(macs=0.6, compact="auto")


@dataclass
class Trained:
    folder: Path
    data: Path
    model: Path
    trainer: Any

    def file(self, name: str) -> Path:
        return self.folder / "whole" / "weights" / name

    def options(self, name: str, **more: Any) -> dict[str, Any]:
        return {**FAST, "data": str(self.data), "project": str(self.folder), "name": name, **more}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("ultralytics")
    made = Trained(folder, write_pictures(folder / "data"), write_model(folder), None)
    detector = YOLO(made.model)
    detector.train(trainer=HALF, save_period=1, **made.options("whole"))
    made.trainer = detector.trainer
    return made


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def state(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = YOLO(file).model.state_dict()
    return found


def test_both_files_hold_the_small_plain_model(trained: Trained) -> None:
    pruner = trained.trainer.pruner
    assert pruner.landed and pruner.step_count == pruner.steps == 12
    assert pruner.cost()["macs"] <= 0.6 * pruner.graph.cost.original()["macs"]
    assert max(pruner.proof.values()) < 1e-5
    for name in ("last.pt", "best.pt"):
        model = YOLO(trained.file(name)).model
        assert parameters(model) == pruner.cost()["params"]
        assert not any(isinstance(module, pp.Gate) for module in model.modules())


def test_the_width_that_the_forward_for_exporters_reads_follows(trained: Trained) -> None:
    """An exporter puts `forward_split`, which reads `c`, in the place of `forward`."""
    model, x = YOLO(trained.model).model.eval(), torch.rand(2, 3, SIZE, SIZE)
    graph = pp.trace(model, x)
    small = pp.shrink(model, graph, {k: [*range(g.size // 2)] for k, g in graph.prunable.items()})
    before = [module.c for module in model.modules() if isinstance(module, C2f)]
    blocks = [module for module in small.modules() if isinstance(module, C2f)]
    assert [block.c for block in blocks] == [c // 2 for c in before] == [3, 6]
    wanted = small(x)[0]
    for block in blocks:
        block.forward = block.forward_split
    assert torch.equal(small(x)[0], wanted)


def test_the_small_model_predicts_validates_and_is_saved(trained: Trained) -> None:
    detector = YOLO(trained.file("best.pt"))
    pp.save(detector.model, trained.folder / "small.safetensors")
    picture = np.zeros((SIZE, SIZE, 3), np.uint8)
    assert len(detector.predict(picture, imgsz=SIZE, verbose=False, device="cpu")) == 1
    options = {k: FAST[k] for k in ("imgsz", "batch", "device", "workers", "plots", "verbose")}
    found = detector.val(data=str(trained.data), project=str(trained.folder), **options)
    assert 0 <= found.box.map <= 1


def test_the_file_for_onnx_computes_the_same(trained: Trained) -> None:
    runtime = pytest.importorskip("onnxruntime")
    options: dict[str, Any] = {"imgsz": SIZE, "device": "cpu", "simplify": False, "verbose": False}
    file = YOLO(trained.file("best.pt")).export(format="onnx", **options)
    x = torch.rand(1, 3, SIZE, SIZE)
    session = runtime.InferenceSession(file)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    model = YOLO(trained.file("best.pt")).model.fuse(verbose=False).eval()
    wanted = model(x)[0].detach()
    assert found.shape == tuple(wanted.shape)
    assert (torch.from_numpy(found) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_resumed_run_is_bit_equal(trained: Trained, epoch: int) -> None:
    """One checkpoint from before the budget was met, and one of a model that was compacted."""
    again = trained.folder / f"again{epoch}"
    start = trained.folder / f"start{epoch}.pt"
    shutil.copy(trained.file(f"epoch{epoch}.pt"), start)
    detector = YOLO(start)
    detector.train(trainer=HALF, resume=True, save_dir=str(again))
    resumed = detector.trainer
    assert resumed.start_epoch == epoch + 1 and resumed.pruner.step_count == 12
    assert resumed.pruner.compactions > 0
    assert resumed.pruner.history == trained.trainer.pruner.history
    for name in ("last.pt", "best.pt"):
        whole, part = state(trained.file(name)), state(again / "weights" / name)
        assert whole.keys() == part.keys()
        assert all(torch.equal(whole[key], part[key]) for key in whole)


def test_the_small_model_is_trained_on_with_its_widths(trained: Trained) -> None:
    detector = YOLO(trained.file("best.pt"))
    before = parameters(detector.model)
    detector.train(trainer=PruningTrainer, **trained.options("on", epochs=2))
    assert detector.trainer.pruner is None and parameters(detector.model) == before
    (start, end) = (state(file) for file in (trained.file("best.pt"), detector.trainer.last))
    assert start.keys() == end.keys()
    assert any(not torch.equal(start[key], end[key]) for key in start)
    again = YOLO(detector.trainer.best)
    with pytest.raises(PruneError, match=r"this model is pruned, and its yaml has no 'backbone'"):
        again.train(**trained.options("wrong"))


def test_another_trainer_refuses_the_small_model(trained: Trained) -> None:
    shutil.copy(trained.file("epoch2.pt"), trained.folder / "middle.pt")
    for file in (trained.file("best.pt"), trained.folder / "middle.pt"):
        detector = YOLO(file)
        with pytest.raises(PruneError, match=r"pass trainer=PruningTrainer \(or the one of its"):
            detector.train(resume=file.name == "middle.pt", **trained.options("other"))


def test_other_classes_than_those_of_the_small_model_are_refused(trained: Trained) -> None:
    data = trained.folder / "three.yaml"
    data.write_text(trained.data.read_text().replace("[red, green]", "[red, green, blue]"))
    with pytest.raises(PruneError, match=r"the pruned model has 2 classes and the data 3"):
        YOLO(trained.file("best.pt")).train(
            trainer=PruningTrainer, **{**trained.options("three"), "data": str(data)}
        )


@pytest.mark.parametrize("option", [{"time": 0.1}, {"compile": True}])
def test_what_pruning_does_not_support_is_refused(trained: Trained, option: dict[str, Any]) -> None:
    with pytest.raises(PruneError, match=f"pruning does not work with {next(iter(option))}"):
        YOLO(trained.model).train(trainer=HALF, **trained.options("refused", **option))


def test_steps_are_counted_with_accumulation_and_warmup(trained: Trained) -> None:
    detector = YOLO(trained.model)
    options = trained.options("accumulated", nbs=8, epochs=6, warmup_epochs=2, val=False)
    detector.train(trainer=PruningTrainer.with_budget(macs=0.7), **options)
    pruner = detector.trainer.pruner
    assert pruner.step_count == pruner.steps < 18


def test_a_classifier_is_pruned_too(trained: Trained) -> None:
    classifier = YOLO(write_model(trained.folder, "classify"))
    trainer = PruningClassificationTrainer.with_budget(macs=0.6)
    data = str(write_classes(trained.folder / "classes"))
    classifier.train(trainer=trainer, **{**trained.options("classes"), "data": data})
    assert parameters(classifier.model) == classifier.trainer.pruner.cost()["params"]
    picture = np.zeros((SIZE, SIZE, 3), np.uint8)
    assert len(classifier.predict(picture, imgsz=SIZE, verbose=False, device="cpu")) == 1


def test_the_example_runs(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "ultralytics_train.py"))["main"]
    options = {k: v for k, v in trained.options("example", epochs=2).items() if k != "data"}
    detector = main(str(trained.data), str(trained.model), macs=0.7, **options)
    assert parameters(detector.model) == detector.trainer.pruner.cost()["params"]
    assert f"the small model is {detector.trainer.best}" in capsys.readouterr().out


def test_the_code_of_the_page_runs(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the small network; `last.pt` is a checkpoint from the middle of the training."""
    monkeypatch.chdir(trained.folder)
    weights = trained.folder / "page"
    weights.mkdir()
    shutil.copy(trained.file("best.pt"), weights / "best.pt")
    shutil.copy(trained.file("epoch2.pt"), weights / "last.pt")
    Image.fromarray(np.zeros((SIZE, SIZE, 3), np.uint8)).save("bus.jpg")
    size = {"imgsz": SIZE, "device": "cpu", "project": str(trained.folder)}
    scope: dict[str, Any] = {"options": trained.options("block", epochs=2), "size": size}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        for old, new in (
            ("macs=0.5", 'macs=0.6, compact="auto"'),
            ("runs/detect/train/weights", str(weights)),
            ("yolo11n.pt", str(trained.model)),
            ('data="coco8.yaml", epochs=100', "**options"),
            ('data="coco8.yaml", epochs=10', "**options"),
            ("coco8.yaml", str(trained.data)),
            ('"bus.jpg"', '"bus.jpg", **size'),
            ("val(", "val(**size, workers=0, "),
            ("export(", "export(**{k: v for k, v in size.items() if k != 'project'}, "),
            ("resume=True", f'resume=True, save_dir="{trained.folder / "resumed"}"'),
        ):
            block = block.replace(old, new)
        exec(block, scope)
    assert (weights / "best.onnx").exists()
    (trained_on,) = trained.folder.glob("block-*/weights/best.pt")
    small, on = (state(file) for file in (weights / "best.pt", trained_on))
    assert [tensor.shape for tensor in small.values()] == [tensor.shape for tensor in on.values()]
