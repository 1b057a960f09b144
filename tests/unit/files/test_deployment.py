"""`polarprune export` writes only files that compute what the model computes."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import polarprune as pp
from polarprune.cli.app import app
from polarprune.cli.demo import DigitsNet
from polarprune.files import deployment
from polarprune.files.deployment import Answer, Inputs, deploy

# torch's own exporter still uses a name that torch gave up
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pruned DigitsNet."""
    torch.manual_seed(0)
    pruner = pp.Pruner(DigitsNet(), torch.randn(2, 1, 8, 8), macs=0.5, steps=2)
    for _ in range(2):
        pruner.step()
    path = tmp_path_factory.mktemp("pruned") / "small.safetensors"
    pp.save(pruner.export(), path)
    return path


@pytest.mark.parametrize("suffix", list(deployment.FORMATS))
def test_what_is_written_computes_the_same_for_any_batch(file: Path, suffix: str) -> None:
    to = file.with_suffix(suffix)
    given = ["--model", "polarprune.cli.demo:DigitsNet", "--shape", "1,1,8,8", "--to", str(to)]
    done = CliRunner().invoke(app, ["export", str(file), *given])
    assert done.exit_code == 0, done.output
    assert "batches of any size" in done.output and to.name in done.output
    small = pp.load(file, model=DigitsNet()).eval()
    x = torch.randn(7, 1, 8, 8)
    if suffix == ".onnx":
        session = onnxruntime.InferenceSession(to)
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    else:
        found = torch.export.load(to).module()(x)
    with torch.no_grad():
        torch.testing.assert_close(found, small(x), rtol=1e-4, atol=1e-5)
    assert not [path for path in file.parent.iterdir() if path.is_dir()]


class OneOnly(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 1:
            raise RuntimeError("one at a time")
        return super().forward(x)


@pytest.mark.parametrize("suffix", list(deployment.FORMATS))
def test_a_size_that_is_in_the_code_stays(tmp_path: Path, suffix: str) -> None:
    made = deploy(OneOnly(4, 3), (torch.randn(1, 4),), tmp_path / f"x{suffix}")
    assert made.difference < 1e-6 and made.fixed_batch == "one at a time"


def test_what_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(program: Any, inputs: Inputs, any_size: bool, file: Path) -> Answer:
        file.write_text("half")
        return lambda some: [1.01 * program.module()(*some)]

    monkeypatch.setitem(deployment.FORMATS, ".pt2", wrong)
    kept = tmp_path / "x.pt2"
    kept.write_text("the one before")
    with pytest.raises(pp.PruneError, match=r"differ from the model's by 1\.0e-02 of the largest"):
        deploy(nn.Linear(4, 3), (torch.randn(1, 4),), kept)
    assert kept.read_text() == "the one before" and list(tmp_path.iterdir()) == [kept]


class Branch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 2 * y if len(x) > 4 else y


@pytest.mark.parametrize("suffix", list(deployment.FORMATS))
def test_a_branch_on_the_size_is_not_written_for_any(tmp_path: Path, suffix: str) -> None:
    made = deploy(Branch(4, 3), (torch.randn(1, 4),), tmp_path / f"x{suffix}")
    assert made.fixed_batch and "batch" in made.fixed_batch


class Detector(nn.Linear):
    """Large boxes beside small scores, a class, and places that are off."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        off = torch.where(y > 0, y, float("-inf"))
        return {"boxes": 1e3 * y, "scores": y.sigmoid(), "kind": y.argmax(1), "off": off}


def test_every_output_has_its_own_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Detector(4, 3), torch.randn(2, 4)
    for suffix in deployment.FORMATS:
        made = deploy(model, (x,), tmp_path / f"x{suffix}")
        assert made.difference < 1e-5 and made.fixed_batch is None

    def wrong(program: Any, inputs: Inputs, any_size: bool, file: Path) -> Answer:
        def answer(some: Inputs) -> list[Tensor]:
            boxes, scores, *rest = program.module()(*some).values()
            return [boxes, scores + 0.01, *rest]

        return answer

    monkeypatch.setitem(deployment.FORMATS, ".pt2", wrong)
    with pytest.raises(pp.PruneError, match="would differ from the model's by 1"):
        deploy(model, (x,), tmp_path / "y.pt2")
    assert not (tmp_path / "y.pt2").exists()


class Inplace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def test_a_model_may_write_to_its_input(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    before = x.clone()
    assert deploy(Inplace(4, 3), (x,), tmp_path / "x.onnx").difference < 1e-5
    assert torch.equal(x, before)


class Generator(nn.Module):
    """A network with hard-coded sizes, so that its code is rewritten when it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(z).relu().view(-1, 4, 4, 4))
        return made


@pytest.mark.parametrize("suffix", list(deployment.FORMATS))
def test_rewritten_code_takes_any_batch(tmp_path: Path, suffix: str) -> None:
    model, z = Generator(), torch.randn(2, 6)
    graph = pp.trace(model, z)
    small = pp.shrink(model, graph, {name: [0, 2] for name in graph.prunable})
    assert type(small) is not Generator
    assert deploy(small, (z,), tmp_path / f"x{suffix}").fixed_batch is None


def test_the_command_says_why_a_batch_is_fixed(file: Path) -> None:
    to = file.with_suffix(".pt2")
    given = ["--model", f"{__name__}:OnlyOneDigit", "--shape", "1,1,8,8", "--to", str(to)]
    done = CliRunner().invoke(app, ["export", str(file), *given])
    assert done.exit_code == 0, done.output
    wanted = "batches of this size only (one digit at a time); outputs differ"
    assert wanted in " ".join(done.output.split())


class OnlyOneDigit(DigitsNet):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 1:
            raise RuntimeError("one digit at a time")
        return super().forward(x)


class Talks(nn.Linear):
    """A model that logs in its forward, and waits there until another thread has logged."""

    def __init__(self, elsewhere: Callable[[], None]) -> None:
        super().__init__(4, 3)
        self.elsewhere = elsewhere

    def forward(self, x: Tensor) -> Tensor:
        logging.getLogger("model").error("from the export")
        thread = threading.Thread(target=self.elsewhere)
        thread.start()
        thread.join()
        return super().forward(x)


def test_other_threads_log_and_warn_while_a_model_is_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caught: list[object] = []

    def elsewhere() -> None:
        logging.getLogger("training").error("from the training")
        try:
            warnings.warn("of the user", UserWarning, stacklevel=1)  # an error in the tests
        except UserWarning as warning:
            caught.append(warning)

    deploy(Talks(elsewhere), (torch.randn(1, 4),), tmp_path / "x.pt2")
    assert {record.message for record in caplog.records} == {"from the training"} and caught
    logging.getLogger("model").error("afterwards")
    assert caplog.records[-1].message == "afterwards"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--to", "{}"], "give a name that ends in"),
        (["--to", "{}/x.tflite"], "give a name that ends in .onnx or .pt2"),
        (["--to", "{}/none/x.pt2"], "there is no folder"),
        (["--to", "{}/x.pt2", "--shape", "a"], "give sizes, such as 1,3,224,224"),
        (
            ["--to", "{}/x.pt2", "--model", "polarprune.cli.demo:Missing"],
            "the model could not be made",
        ),
        (
            ["--to", "{}/x.pt2", "--model", ""],
            "small.safetensors: unknown network; pass --model package.module:factory",
        ),
        (["--to", "{}/x.pt2", "--shape", "1,5,8,8"], "x.pt2: this model could not be exported: "),
        (["--to", "{}/x.onnx", "--shape", "1,5,8,8"], "expected input[1, 5, 8, 8]"),
    ],
)
def test_mistakes_get_one_line(file: Path, given: list[str], said: str, tmp_path: Path) -> None:
    usual = {"--shape": "1,1,8,8", "--model": "polarprune.cli.demo:DigitsNet"}
    usual |= dict(zip(given[::2], (part.format(tmp_path) for part in given[1::2]), strict=True))
    done = CliRunner().invoke(
        app, ["export", str(file), *(part for pair in usual.items() for part in pair)]
    )
    assert done.exit_code == 1 and said in " ".join(done.output.split()), done.output
    assert "PruneError" in done.output and "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_onnx_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(pp.PruneError, match=r"pip install 'polarprune\[onnx\]'"):
        deploy(nn.Linear(4, 3), (torch.randn(1, 4),), tmp_path / "x.onnx")
