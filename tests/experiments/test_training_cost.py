"""What a training costs, and the small networks that are trained from scratch to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.cli.app import app
from polarprune.experiments.data.cifar10 import Cifar10
from polarprune.experiments.data.images import accuracy
from polarprune.experiments.data.own import open_own
from polarprune.experiments.methods.from_scratch import new_small_network
from polarprune.experiments.presets import preset
from polarprune.experiments.runs.prune import prune, train_small
from polarprune.experiments.runs.pruned_file import rebuild, widths_in
from polarprune.experiments.runs.run import Run
from polarprune.experiments.runs.training_cost import (
    costs_of_file,
    macs_of_an_example,
    scratch_epochs,
    tune_epochs,
)
from polarprune.experiments.runs.weights import write_weights
from polarprune.experiments.settings import Settings
from polarprune.surgery.proof import count_macs
from tests.helpers.cifar import Tiny, images, runner, written

pytestmark = pytest.mark.usefixtures("tiny")
IMAGE = torch.randn(1, 3, 32, 32)
TINY_MACS = 12 * 27 * 16 * 16 + 16 * 108 * 8 * 8 + 160  # two convolutions, and the head


def run_of(data: Cifar10, folder: Path, **changes: object) -> Run:
    return Run(preset("tiny", **changes), data, folder)


# --- what a training costs ------------------------------------------------------------------------


def test_the_cost_is_that_of_all_steps_and_of_the_teacher(data: Cifar10, tmp_path: Path) -> None:
    """200 images: 3 epochs of the baseline, 4 of pruning, 2 of tuning."""
    run = run_of(data, tmp_path, distill=0.5, tune_epochs=2)
    card = prune(run, run.baseline(), macs=0.5)
    found, small = card["training_macs"], card["macs"]
    assert found["baseline"] == 3 * 200 * 3 * TINY_MACS
    assert found["prune"] == 4 * 200 * (3 + 1) * TINY_MACS  # nothing is removed before the end
    assert found["tune"] == 2 * 200 * (3 * small + TINY_MACS)
    assert found["total"] == sum(found[stage] for stage in ("baseline", "prune", "tune"))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[3]["training_macs"] * 4 == rows[6]["training_macs"] == found["prune"]
    for name, stages in (("small", 2), ("tuned", 3)):
        _, stored = rebuild(tmp_path / f"{name}.safetensors")
        assert len(stored["training_macs"]) == stages + 1


class Stop(Exception):
    pass


def test_compaction_makes_it_cheaper_and_a_resumed_run_costs_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarprune.experiments.runs.run.CHECKPOINT_PAUSE", 0.0)
    data = Cifar10(images(200), images(40, seed=1))
    costs = []
    for name in ("whole", "parts"):
        run = run_of(data, tmp_path / name, epochs=6, compact="auto")
        model = run.baseline()
        if name == "parts":

            def stop(row: dict[str, Any]) -> None:
                if row["stage"] == "prune" and row["epoch"] == 5:
                    raise Stop

            run.progress = stop
            with pytest.raises(Stop):
                prune(run, model, macs=0.3)
            run = run_of(data, tmp_path / name, epochs=6, compact="auto")
            model = run.baseline()
        costs.append(prune(run, model, macs=0.3)["training_macs"])
    assert costs[0] == costs[1]
    assert costs[0]["prune"] < 0.95 * 6 * 200 * 3 * TINY_MACS


def test_gates_of_other_methods_cost_nothing_more(data: Cifar10, tmp_path: Path) -> None:
    costs = set()
    for method in ("magnitude", "l0", "kernel-gates"):
        run = run_of(data, tmp_path / method)
        costs.add(prune(run, run.baseline(), method, macs=0.5)["training_macs"]["prune"])
    assert costs == {4 * 200 * 3 * TINY_MACS}


def test_a_baseline_says_what_it_cost(data: Cifar10, tmp_path: Path) -> None:
    file = tmp_path / "first" / "baseline.safetensors"
    run = run_of(data, tmp_path / "first", baseline_epochs=2)
    model = run.baseline()
    assert costs_of_file(file) == {"baseline": 2 * 200 * 3 * TINY_MACS}
    read = run_of(data, tmp_path / "read", baseline_epochs=9)  # whatever its settings say
    read.baseline(file)
    assert read.costs == run.costs
    plain = tmp_path / "plain.safetensors"  # of someone who does not say it
    write_weights(model, plain)
    assumed = run_of(data, tmp_path / "assumed", baseline_epochs=9)
    assumed.baseline(plain)
    assert assumed.costs == {"baseline": 9 * 200 * 3 * TINY_MACS}
    tuned = run_of(data, tmp_path / "tuned", baseline_epochs=1)
    tuned.baseline(start=file)
    wanted = {"start": 2 * 200 * 3 * TINY_MACS, "baseline": 200 * 3 * TINY_MACS}
    assert tuned.costs == wanted == costs_of_file(tmp_path / "tuned" / "baseline.safetensors")


def test_a_file_of_someone_else_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_text("nothing")
    assert costs_of_file(file) == costs_of_file(tmp_path / "x.pth") == {}
    for text in ("[1]", '{"baseline": "much"}', "{"):
        write_weights(Tiny(), file, {"training_macs": text})
        assert costs_of_file(file) == {}


def test_batches_of_a_users_own_loader_are_counted_whole() -> None:
    stream = open_own("tests.helpers.own_model:loaders").stream(Settings("x", batch=7))
    assert (stream.per_epoch, stream.examples) == (5, 60)
    stream = open_own("tests.helpers.own_model:data_sets").stream(Settings("x", batch=7))
    assert (stream.per_epoch, stream.examples) == (8, 56)


# --- small networks from scratch ------------------------------------------------------------------


def test_thin_scales_all_widths_alike(data: Cifar10, tmp_path: Path) -> None:
    run = run_of(data, tmp_path, tune_epochs=2)
    card = prune(run, run.baseline(), "thin", macs=0.5)
    assert 0.4 < card["macs_share"] <= 0.5 and card["method"] == "thin"
    shares = [left / before for left, before in card["widths"].values()]
    assert max(shares) - min(shares) < 2 / 12  # two channels of the narrower group
    assert [row["stage"] for row in card["table"]] == ["baseline", "after training"]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["baseline"] * 3 + ["scratch"] * (3 + 4 + 2)
    assert card["training_macs"] == dict.fromkeys(
        ("scratch", "total"), 9 * 200 * 3 * card["macs"]
    )  # the baseline is of no use to it
    small, _ = rebuild(tmp_path / "small.safetensors")
    assert accuracy(small, data.test) == card["accuracy"] == card["table"][-1]["accuracy"]
    assert count_macs(small, IMAGE) == card["macs"]
    assert not (tmp_path / "tuned.safetensors").exists()


def test_with_a_teacher_the_baseline_is_a_part_of_the_cost(data: Cifar10, tmp_path: Path) -> None:
    run = run_of(data, tmp_path, distill=0.5, scratch_epochs=1)
    card = prune(run, run.baseline(), "thin", macs=0.5)
    found = card["training_macs"]
    assert found["baseline"] == 3 * 200 * 3 * TINY_MACS
    assert found["scratch"] == 200 * (3 * card["macs"] + TINY_MACS)
    assert found["total"] == found["baseline"] + found["scratch"]


def test_epochs_are_chosen_so_that_the_cost_is_the_same(data: Cifar10, tmp_path: Path) -> None:
    distill = 0.5
    run = run_of(data, tmp_path / "ours", distill=distill, epochs=9)
    baseline = run.baseline()
    ours = prune(run, baseline, macs=0.4)
    total = ours["training_macs"]["total"]
    settings: list[tuple[str, dict[str, int]]] = [
        ("thin", {"scratch_epochs": scratch_epochs(ours)}),
        ("magnitude", {"epochs": 3, "tune_epochs": tune_epochs(ours, 3)}),
    ]
    for method, changes in settings:
        run = run_of(data, tmp_path / method, distill=distill, **{"epochs": 9, **changes})
        cost = prune(run, baseline_of(run, tmp_path), method, macs=0.4)["training_macs"]["total"]
        assert cost == pytest.approx(total, abs=0.6 * 200 * 4 * TINY_MACS)
    assert scratch_epochs(ours) > 12 and tune_epochs(ours, 3) > 6


def baseline_of(run: Run, folder: Path) -> nn.Module:
    return run.baseline(folder / "ours" / "baseline.safetensors")


@pytest.mark.parametrize("method", ["gdp", "magnitude"])
def test_reinit_has_the_widths_that_were_found_and_other_weights(
    method: str, data: Cifar10, tmp_path: Path
) -> None:
    run = run_of(data, tmp_path / "found")
    found = prune(run, run.baseline(), method, macs=0.5)
    shapes = widths_in(tmp_path / "found" / "card.json")
    assert shapes == widths_in(tmp_path / "found" / "small.safetensors")
    run = run_of(data, tmp_path / "anew", scratch_epochs=1)
    card = train_small(run, baseline_of_found(run, tmp_path), "reinit", {"macs": 0.5}, None, shapes)
    assert card["widths"].items() <= found["widths"].items() and card["macs"] == found["macs"]
    one, other = (rebuild(tmp_path / name / "small.safetensors")[0] for name in ("found", "anew"))
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    assert not any(torch.allclose(a, b) for a, b in pairs if a.dim() > 1)


def baseline_of_found(run: Run, folder: Path) -> nn.Module:
    return run.baseline(folder / "found" / "baseline.safetensors")


def test_new_weights_of_a_small_network_keep_the_size_of_signals() -> None:
    """Without norms, signals would vanish with the inputs that are missing."""

    def deep() -> nn.Module:
        layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())]
        for layer in layers[::2]:
            nn.init.kaiming_normal_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        return nn.Sequential(*layers, nn.Linear(64, 200))

    torch.manual_seed(0)
    x, whole = torch.randn(100, 64), deep()
    small, widths = new_small_network(deep(), x, {"macs": 0.25}, None)
    assert all(left < 40 for left, _ in widths.values())
    with torch.no_grad():
        ratio = float(small(x).std() / whole(x).std())
    assert 0.5 < ratio < 2


def test_every_group_of_thin_keeps_a_channel() -> None:
    model = nn.Sequential(
        nn.Linear(20, 2), nn.ReLU(), nn.Linear(2, 300), nn.ReLU(), nn.Linear(300, 4)
    )
    x = torch.randn(2, 20)
    _, widths = new_small_network(model, x, {"macs": 0.45}, None)
    assert set(widths) == {"0", "2"} and all(left >= 1 for left, _ in widths.values())
    with pytest.raises(pp.PruneError, match="the lowest is"):
        new_small_network(model, x, {"macs": 0.01}, None)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({}, "its group 'one' has 12 channels here, no there"),
        ({"one": [3, 12], "two": [4, 17]}, "its group 'two' has 16 channels here, 17 there"),
        ({"one": [12, 12], "two": [16, 16]}, "50.00 points above the budget"),
    ],
)
def test_shapes_of_another_network_or_budget_are_refused(
    shapes: dict[str, Any], said: str, data: Cifar10, tmp_path: Path
) -> None:
    run = run_of(data, tmp_path)
    with pytest.raises(pp.PruneError, match=said):
        train_small(run, Tiny(), "reinit", {"macs": 0.5}, None, shapes)


@pytest.mark.parametrize("after", [1, 5])
def test_a_training_from_scratch_goes_on_where_it_was_cut_off(
    after: int, data: Cifar10, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarprune.experiments.runs.run.CHECKPOINT_PAUSE", 0.0)

    def stop(row: dict[str, Any]) -> None:
        if row["stage"] == "scratch" and row["epoch"] == after:
            raise Stop

    cards = []
    for name in ("whole", "parts"):
        run = run_of(data, tmp_path / name)
        model = run.baseline()
        if name == "parts":
            run.progress = stop
            with pytest.raises(Stop):
                prune(run, model, "thin", macs=0.5)
            torch.manual_seed(99)  # another process, another state
            run = run_of(data, tmp_path / name)
            model = run.baseline()
        cards.append(prune(run, model, "thin", macs=0.5))
    assert cards[0]["table"] == cards[1]["table"] and cards[0]["sha256"] == cards[1]["sha256"]
    assert cards[0]["training_macs"] == cards[1]["training_macs"]


# --- the command line -----------------------------------------------------------------------------


def train(folder: Path, out: str, *more: str) -> Any:
    given = ["train", "tiny", "--data", f"cifar10:{folder}", "--device", "cpu", "--macs", "0.5"]
    given += ["--out", str(folder / out), "--set", "epochs=1", "--set", "baseline_epochs=1"]
    return runner.invoke(app, [*given, *more])


def test_thin_and_reinit_on_the_command_line(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    assert train(tmp_path, "ours").exit_code == 0
    same = ["--baseline", str(tmp_path / "ours" / "baseline.safetensors")]
    done = train(tmp_path, "thin", "--method", "thin", *same)
    assert done.exit_code == 0 and "after training" in done.output
    shapes = ["--shapes", str(tmp_path / "ours" / "card.json")]
    assert train(tmp_path, "reinit", "--method", "reinit", *same, *shapes).exit_code == 0
    first = [*same, "--start", str(tmp_path / "thin" / "small.safetensors")]
    card = tmp_path / "thin" / "card.json"
    more = ["--method", "reinit", "--shapes", str(card), "--set", "distill=0.5"]
    done = train(tmp_path, "again", *more, *first, "--json")
    found, before = json.loads(done.stdout), json.loads(card.read_text())
    assert found["training_macs"]["scratch_start"] == before["training_macs"]["total"]
    assert found["widths"] == before["widths"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--method reinit", "reinit: give the widths of a pruned network with --shapes FILE."),
        ("--shapes {}/text.json", "--shapes: gdp has no use for it. Leave it out."),
        ("--method reinit --shapes {}/text.json", "text.json: it holds no widths. Give the card"),
        ("--method reinit --shapes {}/x.json", "x.json: cannot read it"),
        ("--method thin --lam 2 ", "--lam is for gdp only"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_trained(
    given: str, said: str, tmp_path: Path
) -> None:
    written(tmp_path, "bin")
    (tmp_path / "text.json").write_text('{"widths": {"one": [3]}}')
    done = train(tmp_path, "out", *given.format(tmp_path).split())
    assert done.exit_code == 1 and said in " ".join(done.output.split()), done.output
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_the_settings_of_a_later_version_do_not_stop_a_run(data: Cifar10, tmp_path: Path) -> None:
    """A folder of an earlier version knows nothing of settings that were added since."""
    run = run_of(data, tmp_path)
    what = {"method": "gdp", "budget": {}, "hold_out": 0}
    run.claim(what)
    (tmp_path / "log.jsonl").write_text("")
    file = tmp_path / "run.json"
    stored = json.loads(file.read_text())
    del stored["per_class"], stored["scratch_epochs"]
    file.write_text(json.dumps(stored))
    run.claim(what)
    file.write_text(json.dumps(stored))
    with pytest.raises(pp.PruneError, match="per_class is 0 there, 3 here"):
        run_of(data, tmp_path, per_class=3).claim(what)


# --- settings of the training ---------------------------------------------------------------------


def test_the_rate_starts_again_when_the_budget_is_met() -> None:
    settings, usual = (Settings("x", warm_up=0, rates=kind) for kind in ("restart", "cosine"))
    for progress in (0.0, 0.2, 0.49):
        assert settings.rate(progress, 100, 0.5) == usual.rate(progress, 100, 0.5)
    found = [settings.rate(progress, 100, 0.5) for progress in (0.5, 0.75, 1.0)]
    assert found == pytest.approx([1, 0.5, 0])
    assert settings.rate(0.5, 100) == usual.rate(0.5, 100)  # nothing is pruned


def test_only_a_stage_that_prunes_restarts_and_tuning_has_its_own_decay(
    data: Cifar10, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, tuple[float, list[float]]] = {}
    train = Run.train

    def watched(run: Run, stage: str, trainer: Any) -> None:
        decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
        seen[stage] = trainer._landing, decays
        train(run, stage, trainer)

    monkeypatch.setattr(Run, "train", watched)
    run = run_of(data, tmp_path, rates="restart", tune_epochs=1, tune_decay=0.005)
    prune(run, run.baseline(), macs=0.5)
    assert seen == {"baseline": (0, [5e-4]), "prune": (0.5, [5e-4, 0]), "tune": (0, [0.005])}


def test_a_teacher_adds_a_forward_pass() -> None:
    model, x = Tiny(), torch.randn(2, 3, 32, 32)
    assert macs_of_an_example(model, None, x) == 3 * TINY_MACS
    assert macs_of_an_example(model, Tiny(), x) == 4 * TINY_MACS
    assert macs_of_an_example(model, nn.Sequential(Halved(), Tiny()), x) == 3.25 * TINY_MACS + 120


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, ::2, ::2]
