"""The demonstration and the command line, on a few epochs."""

import json

import pytest
import torch
from typer.testing import CliRunner

import polarprune as pp
from polarprune.cli.app import app
from polarprune.cli.demo import Demo, DigitsNet, Settings, load_digits
from polarprune.cost.timing import side_by_side

pytestmark = pytest.mark.shares_a_run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    result = CliRunner().invoke(app, ["demo", "--out", str(out), "--epochs", "3"])
    assert result.exit_code == 0, result.output
    return out, result.output


def test_the_demo_writes_model_report_and_picture(written):
    out, _ = written
    names = {file.name for file in out.iterdir()}
    assert names == {"small.safetensors", "report.html", "report.json", "gates.png"}
    assert (out / "gates.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_ends_with_the_papers_table(written):
    _, text = written
    for words in ("before removal", "after removal", "after fine-tuning", "latency", "difference"):
        assert words in text
    assert "the same on all 540 test images" in text


def test_removal_changes_no_prediction_and_the_budget_is_met(written):
    out, _ = written
    report = json.loads((out / "report.json").read_text())
    rows = {row["stage"]: row for row in report["results"]["table"]}
    assert rows["before removal"]["accuracy"] == rows["after removal"]["accuracy"]
    assert report["results"]["identical_predictions"] is True
    assert rows["after removal"]["macs"] == report["after"]["macs"]
    assert 0.495 < report["after"]["macs"] / report["before"]["macs"] <= 0.5


def test_the_written_model_loads_into_the_original_class(written):
    out, _ = written
    small = pp.load(out / "small.safetensors", model=DigitsNet()).eval()
    data = load_digits()
    report = json.loads((out / "report.json").read_text())
    with torch.no_grad():
        right = (small(data.test_x).argmax(1) == data.test_y).float().mean()
    tuned = report["results"]["table"][-1]
    assert tuned["stage"] == "after fine-tuning"
    assert float(right) == pytest.approx(tuned["accuracy"], abs=1e-6)
    assert sum(p.numel() for p in small.parameters()) == tuned["params"]


def test_progress_tells_loss_accuracy_cost_gates_eps_and_lambda():
    rows = []
    Demo(Settings(plain_epochs=1, epochs=2, tune_epochs=1), rows.append).run()
    assert [row["stage"] for row in rows] == ["train", "prune", "prune", "fine-tune"]
    assert {"loss", "accuracy", "macs", "closed", "eps", "lam"} <= set(rows[1])


def test_inspect_prints_the_groups():
    result = CliRunner().invoke(
        app, ["inspect", "polarprune.cli.demo:DigitsNet", "--shape", "2,1,8,8", "--keep", "stem"]
    )
    assert result.exit_code == 0, result.output
    assert "blocks.0.conv1" in result.output
    assert "kept by keep='stem'" in result.output


@pytest.mark.parametrize("target", ["polarprune.cli.demo:Missing", "no_such_package:Net"])
def test_inspect_of_something_missing_is_one_clear_line(target):
    result = CliRunner().invoke(app, ["inspect", target, "--shape", "1,3,8,8"])
    assert result.exit_code == 1
    assert "Error" in result.output and "Traceback" not in result.output


def test_report_prints_a_stored_report_and_writes_a_page(written, tmp_path):
    out, _ = written
    shown = CliRunner().invoke(app, ["report", str(out / "report.json")])
    assert shown.exit_code == 0 and "blocks.0.conv1" in shown.output
    page = tmp_path / "page.html"
    CliRunner().invoke(app, ["report", str(out / "report.json"), "--html", str(page)])
    assert page.read_text(encoding="utf-8") == (out / "report.html").read_text(encoding="utf-8")


def test_report_of_a_file_that_is_none_is_one_clear_line(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path / "none.json")])
    assert result.exit_code == 1 and "none.json" in result.output


def test_bench_puts_a_pruned_model_beside_the_original(written):
    out, _ = written
    file = str(out / "small.safetensors")
    asked = ["bench", "polarprune.cli.demo:DigitsNet", "--shape", "4,1,8,8", "--small", file]
    result = CliRunner().invoke(app, [*asked, "--runs", "3"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "%" in line]
    assert len(lines) == 2 and "(100.0%)" in lines[0] and "small.safetensors" in lines[1]
    assert "median of 3 runs" in result.output and "batch of 4" in result.output


def test_bench_tells_files_of_one_name_apart(written, tmp_path):
    out, _ = written
    (tmp_path / "small.safetensors").write_bytes((out / "small.safetensors").read_bytes())
    asked = ["bench", "polarprune.cli.demo:DigitsNet", "--shape", "4,1,8,8", "--runs", "3"]
    for folder in (out, tmp_path):
        asked += ["--small", str(folder / "small.safetensors")]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert len([line for line in result.output.splitlines() if "%" in line]) == 3


def test_whole_numbers_may_be_inputs():
    result = CliRunner().invoke(app, ["inspect", f"{__name__}:Words", "--shape", "2,7:int64"])
    assert result.exit_code == 0, result.output
    assert "first" in result.output and "prunable" in result.output


class Words(torch.nn.Sequential):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(9, 8)
        self.first, self.last = torch.nn.Linear(8, 6), torch.nn.Linear(6, 2)


def test_bench_of_another_model_is_one_clear_line(written, tmp_path):
    out, _ = written
    file = str(out / "small.safetensors")
    result = CliRunner().invoke(
        app, ["bench", "torch.nn:Identity", "--shape", "4,1", "--small", file]
    )
    assert result.exit_code == 1 and result.output.startswith("PruneError")


def test_models_are_timed_in_turn_and_left_as_they_were():
    calls = []

    class Noted(torch.nn.Linear):
        def forward(self, x):
            calls.append((self.out_features, self.training))
            return super().forward(x)

    models = {"wide": Noted(3, 8).train(), "narrow": Noted(3, 2).eval()}
    found = side_by_side(models, torch.randn(5, 3), runs=4, warm_up=1)
    wide, narrow = [(8, False)], [(2, False)]
    assert calls[:12] == [*wide, *narrow, *wide * 5, *narrow * 5]  # to warm up, then turns of five
    assert models["wide"].training and not models["narrow"].training
    for name, width in (("wide", 8), ("narrow", 2)):
        one = found[name]
        assert len(one.milliseconds) == 4 and all(t > 0 for t in one.milliseconds)
        assert (one.macs, one.params, one.batch) == (5 * 3 * width, 4 * width, 5)
        assert one.throughput == pytest.approx(5e3 / one.median)


def test_compiled_model_is_counted_without_being_compiled_again():
    x = torch.randn(5, 3)
    with torch.no_grad():  # the first time, torch may compile a function of its own, too
        torch.compile(torch.nn.Linear(3, 8), backend="eager")(x)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(torch.nn.Linear(3, 8), backend="eager")
    found = side_by_side({"compiled": compiled}, x, runs=2, warm_up=1)["compiled"]
    assert (found.macs, found.params) == (5 * 3 * 8, 4 * 8)
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["demo", "--out", "{}/file"], "that is a file"),
        (["demo", "--epochs", "0"], "--epochs 0: give at least 1"),
        (["report", "{}/file"], "this is not what Report.to_json() writes"),
        (["report", "{}/numbers"], "this is not what Report.to_json() writes"),
        (["report", "{}/missing"], "not the report.json of a run"),
        (["bench", "x:y", "--shape", "1,3", "--threads", "-1"], "--threads -1"),
        (["bench", "x:y", "--shape", "1,3", "--threads", "100000"], "--threads 100000"),
        (["bench", "torch.nn:Identity", "--shape", "0,3"], "--shape 0,3: give sizes"),
        (["bench", "torch.nn:Identity", "--shape", "1,3:word"], "--shape 1,3:word: give sizes"),
        (
            ["bench", "polarprune.cli.demo:DigitsNet", "--shape", "1,3"],
            "it does not run on --shape",
        ),
        (["demo", "--macs", "0.00001"], "lowest"),
        (["demo", "--out", "{}/file/deeper"], "give a folder"),
        (["report", "{}/report.json", "--html", "{}/no/page.html"], "no/page.html: it cannot be"),
        (["inspect", "nosuch:x", "--shape", "1,3"], "nosuch:x: the model could not be made"),
    ],
)
def test_mistakes_get_one_line(given, said, written, tmp_path):
    (tmp_path / "file").write_text("nothing")
    (tmp_path / "numbers").write_text("[1, 2]")
    (tmp_path / "report.json").write_bytes((written[0] / "report.json").read_bytes())
    done = CliRunner().invoke(app, [part.format(tmp_path) for part in given])
    assert done.exit_code == 1 and said in " ".join(done.output.split())
    assert "PruneError" in done.output and "Traceback" not in done.output
