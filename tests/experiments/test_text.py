"""Text as data, the GPT that learns it, and complete runs with a budget of parameters."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polarprune as pp
from benchmarks.measure import experiments
from benchmarks.measure.experiments import Experiment
from polarprune.cli.app import app
from polarprune.cli.console import line
from polarprune.experiments.data.table import open_data
from polarprune.experiments.data.text import Text, open_text
from polarprune.experiments.networks import table
from polarprune.experiments.networks.table import make_network
from polarprune.experiments.networks.transformers import GPT
from polarprune.experiments.presets import PRESETS, preset
from polarprune.experiments.runs.optimizers import clip_gradients, make_optimizer, split_by_decay
from polarprune.experiments.runs.prune import prune
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.runs.run import Run
from polarprune.experiments.runs.trainer import Trainer
from polarprune.experiments.settings import Settings
from polarprune.surgery.proof import count_macs
from tests.helpers.cifar import runner
from tests.helpers.no_reading import NoReading
from tests.helpers.text import CONTEXT, SMALL, small_gpt, text, written


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a small GPT and its settings known."""
    monkeypatch.setitem(table.ANY_CLASSES, "small_gpt", small_gpt)
    monkeypatch.setitem(table.NETWORKS, "small_gpt", small_gpt)
    monkeypatch.setitem(PRESETS, "small_gpt", SMALL)


@pytest.fixture
def data(tmp_path: Path) -> Text:
    """Return a short text."""
    return open_text(Path(written(tmp_path / "data").partition(":")[2]), CONTEXT)


# --- data -----------------------------------------------------------------------------------------


def test_the_first_nine_tenths_of_a_text_are_to_learn_from(data: Text) -> None:
    whole, known = text(), sorted(set(text()))
    numbers = torch.cat([data.train, data.test])
    assert "".join(known[k] for k in numbers.tolist()) == whole
    assert len(data.train) == int(0.9 * len(whole)) and data.classes == len(known)
    assert data.counts == (len(data.train) // CONTEXT + 1, len(data.test) // CONTEXT + 1)
    assert data.example().shape == (2, CONTEXT)


def test_windows_are_parts_of_the_text_and_their_targets_follow(data: Text) -> None:
    torch.manual_seed(0)
    batches = data.stream(Settings("x", batch=32))
    assert batches.per_epoch == len(data.train) // CONTEXT // 32
    assert data.stream(Settings("x", batch=32, epoch_steps=7)).examples == 7 * 32
    x, y = batches.next()
    assert x.shape == y.shape == (32, CONTEXT) and torch.equal(x[:, 1:], y[:, :-1])
    every = data.train.unfold(0, CONTEXT + 1, 1)
    seen = torch.cat([x, y[:, -1:]], 1)
    assert all((every == window).all(1).any() for window in seen)
    assert len({tuple(window.tolist()) for window in batches.next()[0]}) > 20


def test_the_first_and_the_last_window_can_be_drawn() -> None:
    characters = torch.arange(CONTEXT + 3)
    batches = Text(characters, characters, CONTEXT + 3, CONTEXT).stream(Settings("x", batch=99))
    x, y = batches.next()
    assert set(x[:, 0].tolist()) == {0, 1, 2} and int(y.max()) == CONTEXT + 2


def test_drawing_windows_waits_for_nothing(data: Text) -> None:
    """A CUDA graph can then contain it."""
    batches = data.stream(Settings("x", batch=4))
    with NoReading():
        x, y = batches.next()
        output = torch.zeros(4, CONTEXT, data.classes, requires_grad=True)
        batches.loss(output, y, output.detach(), Settings("x", distill=0.5)).backward()
        batches.accuracy(output.detach(), y)
    assert batches.captured and x.shape == y.shape


class Constant(nn.Module):
    """A model that predicts the same for every character and records its inputs."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.seen = logits, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.unbind(0)
        return self.logits.expand(*x.shape, -1)


def test_every_character_but_the_first_is_scored_once(data: Text) -> None:
    model = Constant(torch.linspace(-1, 1, data.classes))
    answers = data.answers(model)
    wanted = F.cross_entropy(model.logits.expand(len(data.test) - 1, -1), data.test[1:])
    assert torch.equal(torch.cat(model.seen), data.test[:-1])
    assert len(model.seen[-1]) < CONTEXT  # what is left at the end
    assert data.score(answers) == pytest.approx(float(wanted), abs=1e-6) == data.loss(model)
    assert data.same(answers, answers + 1e-4) and not data.same(answers, answers + 0.01)
    assert data.shown(1.46971) == "1.4697" and not data.higher_is_better


def test_the_loss_of_a_batch_is_that_of_its_characters(data: Text) -> None:
    batches, usual = data.stream(Settings("x", batch=4)), Settings("x", distill=0.5, temperature=2)
    output, teacher = torch.randn(2, 4, CONTEXT, data.classes).unbind(0)
    _, y = batches.next()
    plain = F.cross_entropy(output.mT, y)
    assert torch.allclose(batches.loss(output, y, None, usual), plain)
    one, other = (F.log_softmax(logits / 2, 2) for logits in (output, teacher))
    apart = (other.exp() * (other - one)).sum(2).mean()
    assert torch.allclose(batches.loss(output, y, teacher, usual), plain / 2 + 2 * apart)
    same = F.one_hot(y, data.classes).float()
    assert float(batches.accuracy(same, y)) == 1 and float(batches.accuracy(-same, y)) == 0


def test_windows_are_held_out_at_the_end_of_the_training_text(data: Text) -> None:
    part = data.held_out(5)
    assert torch.equal(torch.cat([part.train, part.test[1:]]), data.train)
    assert len(part.test) == 5 * CONTEXT + 1 and part.counts[1] == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read it"), (b"\xff\xfe\xff", "cannot read it"), (b"to be", "at least 33")],
)
def test_a_file_that_is_no_text_is_refused(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(pp.PruneError, match=said):
        open_data(f"text:{file}", Settings("gpt", "text", context=16))
    with pytest.raises(pp.PruneError, match="give text:FILE, a text in UTF-8"):
        open_data(f"cifar10:{file}", Settings("gpt", "text"))


# --- the network ----------------------------------------------------------------------------------


def test_the_gpt_has_the_size_that_nanogpt_reports() -> None:
    model = make_network("gpt", 65)
    assert isinstance(model, GPT)
    params = sum(p.numel() for p in model.parameters())
    assert params - model.positions.weight.numel() == 10_646_784  # "10.65M"
    with torch.no_grad():
        assert model(torch.zeros(2, 10, dtype=torch.long)).shape == (2, 10, 65)
    matrices = 6 * 12 * 384**2 + 65 * 384
    attention = 6 * 2 * 256 * 384
    assert count_macs(model, torch.zeros(1, 256, dtype=torch.long)) == 256 * (matrices + attention)


def test_the_gpt_sees_no_later_character() -> None:
    model = small_gpt().eval()
    x = torch.randint(16, (1, CONTEXT))
    other = x.clone()
    other[0, 9] = (x[0, 9] + 1) % 16
    with torch.no_grad():
        changed = (model(x) != model(other)).any(2)[0]
    assert not changed[:9].any() and changed[9:].all()


def test_layers_that_write_to_the_stream_begin_with_smaller_weights() -> None:
    torch.manual_seed(0)
    model = GPT(65)
    for block in model.blocks:
        assert float(block.attention.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
        for layer in (block.attention.project, block.mlp[2]):
            assert float(layer.weight.detach().std()) == pytest.approx(0.02 / 12**0.5, rel=0.02)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_a_gated_gpt_is_exported_in_both_modes(norms: bool, uniform: bool) -> None:
    torch.manual_seed(0)
    model, x = small_gpt(), torch.randint(16, (4, CONTEXT))
    pruner = pp.Pruner(model, x, params=0.5, steps=20, norms=norms, uniform=uniform, multiple_of=1)
    assert ("positions" in pruner.graph.prunable) == norms
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=1e-3, no_decay=True))
    pruner.attach(optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    small: Any = pruner.export()
    assert {"eval", "train"} <= set(pruner.proof) and max(pruner.proof.values()) < 1e-4
    assert torch.allclose(small.eval()(x), model.eval()(x), atol=1e-4)
    assert small.drop.p == 0.2
    small.train()(x).square().mean().backward()
    assert small.tokens.weight.grad is not None
    if uniform:
        assert len({block.mlp[0].out_features for block in small.blocks}) == 1


@pytest.mark.parametrize("norms", [False, True])
def test_a_step_of_a_gated_gpt_is_one_graph_and_waits_for_nothing(norms: bool, data: Text) -> None:
    """Then it works with `compiled=true` and in a CUDA graph."""
    model, batches = small_gpt(data.classes), data.stream(SMALL)
    pruner = pp.Pruner(model, data.example(), params=0.5, steps=20, norms=norms)
    groups = pruner.param_groups(lr=1e-3)
    with NoReading():
        x, y = batches.next()
        batches.loss(model(x), y, None, SMALL).backward()
        clip_gradients(groups, 1.0)
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


# --- the optimizer --------------------------------------------------------------------------------


def test_only_matrices_decay_with_adamw() -> None:
    model = small_gpt()
    groups = split_by_decay([{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.2}])
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert all(p.dim() == 2 for p in groups[0]["params"])
    assert len(groups[1]["params"]) == 2 * 2 + 1  # the scales of the norms
    optimizer = make_optimizer(groups, SMALL, torch.device("cpu"))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == (0.9, 0.99)


def test_clipping_waits_for_nothing() -> None:
    model = small_gpt()
    groups = [{"params": list(model.parameters())}]
    model(torch.zeros(1, 4, dtype=torch.long)).square().sum().backward()
    with NoReading():
        clip_gradients(groups, 0.5)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


def test_the_cosine_ends_where_it_is_told() -> None:
    usual, ends = Settings("x", warm_up=2.0), Settings("x", warm_up=2.0, lr_end=0.1)
    for progress in (0.0, 0.05, 0.1, 0.4, 1.0):
        below = usual.rate(progress, 20)
        assert ends.rate(progress, 20) == pytest.approx(
            below if progress < 0.1 else 0.1 + 0.9 * below
        )
    assert ends.rate(1.0, 20) == pytest.approx(0.1)
    with pytest.raises(pp.PruneError, match="lr_end=2 must be at least 0 and at most 1"):
        Settings("x", lr_end=2)


def test_gradients_are_clipped_together_but_not_those_of_gates(data: Text) -> None:
    torch.manual_seed(0)
    model, batches = small_gpt(data.classes), data.stream(SMALL)
    pruner = pp.Pruner(model, data.example(), params=0.5, steps=15)
    trainer = Trainer(model, batches, SMALL, epochs=1, lr=1e-3, pruner=pruner)
    seen, gates = list[float](), list[float]()

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        norms = [
            torch.nn.utils.get_total_norm([p.grad for g in some for p in g["params"]])
            for some in (optimizer.param_groups[:-1], optimizer.param_groups[-1:])
        ]
        seen.append(float(norms[0]))
        gates.append(float(norms[1]))

    trainer.optimizer.register_step_pre_hook(look)
    trainer.settings = replace(SMALL, clip=1e-6)
    trainer.epoch()
    assert seen == pytest.approx([1e-6] * 15, rel=0.01) and max(gates) > 1e-5


# --- complete runs --------------------------------------------------------------------------------


def run_of(data: Text, out: Path, **changes: Any) -> Run:
    return Run(preset("small_gpt", **changes), data, out)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def train(out: Path, *more: str) -> dict[str, Any]:
    name = written(out.parent / "data")
    given = ["train", "small_gpt", "--data", name, "--out", str(out), "--device", "cpu", "--json"]
    done = runner.invoke(app, [*given, *more])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("more", [[], ["--uniform", "--set", "norms=true"]])
def test_a_gpt_is_pruned_to_half_of_its_parameters(more: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    card = train(out, "--params", "0.5", *more)
    assert 0.45 < card["params_share"] <= 0.5 and card["identical_predictions"]
    assert card["measure"] == "validation loss" and card["validation loss"] < 3
    inner = [card["widths"][f"blocks.{k}.mlp.0"][0] for k in range(2)]
    assert not more or inner[0] == inner[1]
    given = ["eval", str(out / "small.safetensors"), "--data", written(tmp_path / "data")]
    done = runner.invoke(app, given)
    assert f"validation loss {card['validation loss']:.4f} on " in " ".join(done.output.split())
    assert " windows in " in " ".join(done.output.split())
    small, _ = rebuild(out / "small.safetensors")
    assert sum(p.numel() for p in small.parameters()) == card["params"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("method", ["thin", "magnitude"])
def test_controls_meet_a_budget_of_parameters(
    method: str, norms: bool, data: Text, tmp_path: Path
) -> None:
    run = run_of(data, tmp_path / "out", norms=norms, epochs=1, tune_epochs=1)
    card = prune(run, run.baseline(), method, params=0.5)
    assert 0.45 < card["params_share"] <= 0.5
    shares = {name: left / before for name, (left, before) in card["widths"].items()}
    assert ("positions" in shares) == norms
    assert max(shares.values()) - min(shares.values()) < 0.4  # a third of the heads is one head
    small, _ = rebuild(tmp_path / "out" / ("small.safetensors"))
    assert sum(p.numel() for p in small.parameters()) == card["params"]


@pytest.mark.usefixtures("small")
def test_a_stage_ends_with_its_best_weights(data: Text, tmp_path: Path) -> None:
    """The rate is so high that the score gets worse, and the gates close in the first half."""
    changes = {"lr": 0.1, "baseline_lr": 0.1, "distill": 0.0}
    run = run_of(data, tmp_path / "out", **changes)
    model = run.baseline()
    rows = logged(tmp_path / "out")
    assert run.score(model) == min(row["validation loss"] for row in rows)
    card = prune(run, model, params=0.5)
    rows = logged(tmp_path / "out")
    landed = [row for row in rows if row["stage"] == "prune" and row["params"] <= 0.5]
    assert 2 <= len(landed) < 4
    assert card["table"][1]["validation loss"] == min(row["validation loss"] for row in landed)
    last = run_of(data, tmp_path / "last", best=False, **changes)
    card = prune(last, last.baseline(), params=0.5)
    rows = logged(tmp_path / "last")
    assert card["table"][1]["validation loss"] == rows[-1]["validation loss"]


class Stop(Exception):
    """The run is killed."""


@pytest.mark.usefixtures("small")
def test_the_best_weights_survive_a_kill(
    data: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth epoch is the best one; the run is killed after the fifth of six."""
    monkeypatch.setattr("polarprune.experiments.runs.run.CHECKPOINT_PAUSE", 0.0)

    def scores(run: Run, trainer: Trainer, *, recalibrates: bool) -> dict[str, float]:
        return {"validation loss": abs(trainer.done / run.batches.per_epoch - 4)}

    monkeypatch.setattr(Run, "_scores", scores)
    changes = {"epochs": 6, "distill": 0.0}

    def stop(row: dict[str, Any]) -> None:
        if row["stage"] == "prune" and row["epoch"] == 5:
            raise Stop

    whole = run_of(data, tmp_path / "whole", **changes)
    wanted = prune(whole, whole.baseline(), params=0.5)
    last = run_of(data, tmp_path / "last", **changes, best=False)
    assert prune(last, last.baseline(), params=0.5)["table"] != wanted["table"]
    run = run_of(data, tmp_path / "parts", **changes)
    run.progress = stop
    with pytest.raises(Stop):
        prune(run, run.baseline(), params=0.5)
    torch.manual_seed(99)  # another process, another state
    run = run_of(data, tmp_path / "parts", **changes)
    card = prune(run, run.baseline(), params=0.5)
    assert card["table"] == wanted["table"] and card["sha256"] == wanted["sha256"]


def test_progress_shows_the_validation_loss() -> None:
    assert line({"loss": 1.2345, "validation loss": 1.46971}) == (
        "loss 1.234  validation loss 1.4697"
    )


# --- equal training cost --------------------------------------------------------------------------


@pytest.fixture
def compared(small: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Experiment]:
    """The comparisons of the GPT, with the small one."""
    monkeypatch.setitem(PRESETS, "gpt", replace(SMALL, epochs=2, baseline_epochs=1))
    monkeypatch.setattr(experiments, "GPT_PARAMS", ((0.5, 1),))
    monkeypatch.setattr(experiments, "GPT_STREAMS", {"gpt-{}-stream": "true"})
    found = experiments.gpt()
    monkeypatch.setattr(experiments, "EXPERIMENTS", found)
    return found


def test_controls_of_a_gpt_cost_as_much_as_ours(
    compared: dict[str, Experiment], tmp_path: Path
) -> None:
    results, runs = tmp_path / "results", tmp_path / "runs"
    folders = {"text": written(tmp_path / "data")}
    given = argparse.Namespace(
        results=results, runs=runs, zoo=tmp_path / "zoo", set=[], folders=folders
    )
    epochs, cards = {}, {}
    for name in experiments.wanted([]):
        assert experiments.ready(name, given), name
        changes = compared[name].equal_changes(given)
        call = compared[name].arguments(folders["text"], given, name)
        more = [part for change in changes for part in ("--set", change)]
        done = runner.invoke(app, [*call, *more, "--device", "cpu"])
        assert done.exit_code == 0, (name, done.output)
        experiments.keep(name, given)
        epochs[name.removeprefix("gpt-50-stream-")] = changes
        if not compared[name].is_baseline:
            card = json.loads((results / name / "card.json").read_text())
            cards[name.removeprefix("gpt-50-stream-")] = card
    assert set(cards) == {
        f"{one}-seed0" for one in ("ours", "uniform", "thin-cost", "thin-epochs", "magnitude-cost")
    } | {"magnitude-epochs-seed0"}
    ours = cards["ours-seed0"]
    assert all(card["params_share"] <= 0.5 for card in cards.values())
    assert cards["uniform-seed0"]["recipe"]["uniform"] and ours["recipe"]["norms"]
    for method in ("thin", "magnitude"):
        card = cards[f"{method}-cost-seed0"]
        step = ours["epoch_examples"] * (3 * card["macs"] + card["table"][0]["macs"])
        apart = card["training_macs"]["total"] - ours["training_macs"]["total"]
        assert abs(apart) <= 0.51 * step  # half an epoch, as epochs are whole
    assert epochs["thin-epochs-seed0"] == ["scratch_epochs=0"]
