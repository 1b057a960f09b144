"""DeiT on Tiny ImageNet: its size, complete runs, and the page on transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import polarprune as pp
from benchmarks.measure.experiments import EXPERIMENTS
from benchmarks.pages import transformer_runs
from benchmarks.pages.stored_runs import read_runs
from polarprune.cli.app import app
from polarprune.experiments.methods.table import METHODS
from polarprune.experiments.networks import table
from polarprune.experiments.networks.table import make_network
from polarprune.experiments.networks.transformers import DeiT
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.settings import Settings
from polarprune.surgery.proof import count_macs
from tests.helpers.cifar import runner
from tests.helpers.tiny_imagenet import CLASSES, SIDE, written


def small_deit(classes: int = CLASSES) -> DeiT:
    """Return a DeiT of two blocks."""
    return DeiT(classes, SIDE, 4, width=24, heads=3, blocks=2)


# --- the network ----------------------------------------------------------------------------------


def test_deit_tiny_has_the_stated_size() -> None:
    model = make_network("deit_tiny", 200)
    params = sum(p.numel() for p in model.parameters())
    block = 12 * 192**2 + 13 * 192  # four matrices of attention, eight of the MLP; vectors
    ends = (3 * 64 + 1) * 192 + 66 * 192 + 2 * 192 + 193 * 200
    assert params == 12 * block + ends == 5_427_080
    matrices = 12 * 65 * (12 * 192**2 + 2 * 65 * 192)
    assert count_macs(model, torch.randn(1, 3, 64, 64)) == matrices + 64 * 192**2 + 192 * 200
    with torch.no_grad():
        assert model(torch.randn(2, 3, 64, 64)).shape == (2, 200)


def test_only_the_class_token_is_read_at_the_end() -> None:
    torch.manual_seed(0)
    model, x = small_deit().eval(), torch.randn(1, 3, SIDE, SIDE)
    model.blocks = torch.nn.ModuleList()
    with torch.no_grad():
        assert torch.equal(model(x), model(torch.zeros_like(x)))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_a_gated_deit_is_exported(norms: bool, uniform: bool) -> None:
    torch.manual_seed(0)
    model, x = small_deit(), torch.randn(2, 3, SIDE, SIDE)
    pruner = pp.Pruner(model, x, macs=0.5, steps=20, norms=norms, uniform=uniform, multiple_of=1)
    assert ("patches" in pruner.graph.prunable) == norms
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=1e-3, no_decay=True))
    pruner.attach(optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    small: Any = pruner.export()
    assert torch.allclose(small.eval()(x), model.eval()(x), atol=1e-4)
    if uniform:
        assert len({block.mlp[0].out_features for block in small.blocks}) == 1


@pytest.mark.filterwarnings("ignore:Unwrapped parameters")  # the class token
def test_torch_pruning_narrows_the_heads_of_a_deit() -> None:
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model, x = small_deit(), torch.randn(2, 3, SIDE, SIDE)
    before = count_macs(model, x)
    method = METHODS["torch-pruning"](model, x, Settings("x", norms=True), 1, {"macs": 0.5})
    model(x).square().mean().backward()
    method.after_backward()
    small: Any = method.cut(model)
    assert small(x).shape == (2, CLASSES) and 0.4 < count_macs(small, x) / before <= 0.5
    attention = small.blocks[0].attention
    assert attention.heads == 3 and attention.qkv.out_features % 9 == 0


# --- complete runs --------------------------------------------------------------------------------


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A small DeiT with its settings, and images for it."""
    monkeypatch.setitem(table.ANY_CLASSES, "small_deit", small_deit)
    monkeypatch.setitem(table.NETWORKS, "small_deit", small_deit)
    usual = PRESETS["deit_tiny"]
    changes = {"network": "small_deit", "baseline_epochs": 2, "epochs": 4, "batch": 12}
    short = dataclasses.replace(usual, **changes, warm_up=0.5, distill=0.5)
    monkeypatch.setitem(PRESETS, "small_deit", short)
    return f"tiny-imagenet:{written(tmp_path / 'data')}"


@pytest.mark.parametrize("more", [[], ["--uniform"], ["--method", "thin"]])
def test_a_deit_is_pruned_to_half_of_its_macs(data: str, more: list[str], tmp_path: Path) -> None:
    given = ["train", "small_deit", "--data", data, "--out", str(tmp_path / "out"), "--macs", "0.5"]
    done = runner.invoke(app, [*given, "--device", "cpu", "--json", *more])
    assert done.exit_code == 0, done.output
    card = json.loads(done.stdout)
    assert 0.4 < card["macs_share"] <= 0.5 and card["measure"] == "accuracy"
    assert card["recipe"]["norms"] and "patches" in card["widths"]
    small, _ = rebuild(tmp_path / "out" / "small.safetensors")
    x = torch.randn(1, 3, SIDE, SIDE)
    assert small.eval()(x).shape == (1, CLASSES) and count_macs(small, x) == card["macs"]


# --- the experiments ------------------------------------------------------------------------------


def test_every_comparison_has_free_and_uniform_widths_and_equal_controls() -> None:
    for stem, budget, seeds in (
        ("gpt-50", {"params": 0.5}, 3),
        ("gpt-50-stream", {"params": 0.5}, 3),
        ("gpt-25", {"params": 0.25}, 1),
        ("gpt-25-stream", {"params": 0.25}, 1),
        ("deit-50", {"macs": 0.5}, 1),
        ("deit-30", {"macs": 0.3}, 1),
    ):
        other = "torch-pruning" if "deit" in stem else "magnitude"
        controls = [f"{m}-{e}" for m in ("thin", other) for e in ("cost", "epochs")]
        for seed in range(seeds):
            found = {n: EXPERIMENTS[f"{stem}-{n}-seed{seed}"] for n in ("ours", *controls)}
            uniform = EXPERIMENTS[f"{stem}-uniform-seed{seed}"]
            assert uniform._replace(change=found["ours"].change) == found["ours"]
            assert uniform.change[-1] == "uniform=true"
            for one in found.values():
                assert all(getattr(one, key) == limit for key, limit in budget.items())
                assert one.after == f"{stem.split('-')[0]}-baseline" and one.seed == seed
                assert "uniform=true" not in one.change
                assert one.change == (
                    () if "deit" in stem else (f"norms={str('stream' in stem).lower()}",)
                )
        assert f"{stem}-ours-seed{seeds}" not in EXPERIMENTS


# --- the page -------------------------------------------------------------------------------------


def stored(folder: Path, name: str, score: float) -> None:
    """Write a card as `Run` does."""
    one = EXPERIMENTS[name]
    usual = PRESETS[one.preset]
    measure = "validation loss" if usual.data == "text" else "accuracy"
    stages = {"baseline": 1.47 if usual.data == "text" else 0.5, "after removal": score}
    card = {
        "network": usual.network,
        "method": one.method,
        "measure": measure,
        "table": [{"stage": stage, measure: number} for stage, number in stages.items()],
        "macs_share": 0.5,
        "params_share": 0.499,
        "scored_on": 10000,
        "recipe": dataclasses.asdict(usual) | {"seed": one.seed},
        "training_macs": {"prune": 1000, "total": 1000},
    }
    (folder / name).mkdir(parents=True)
    (folder / name / "card.json").write_text(json.dumps(card))


def test_transformers_that_were_not_run_are_named(tmp_path: Path) -> None:
    parts = transformer_runs.gpt(tmp_path) + transformer_runs.deit(tmp_path)
    assert parts[1] == "The unpruned GPT: not run yet. nanoGPT's best validation loss is 1.4697."
    missing = [part for part in parts if part.endswith(": not run yet.")]
    assert len(missing) == 2 * 2 + 2
    assert "At 25 % of the parameters, residual stream prunable: not run yet." in missing


def test_the_page_says_whether_ours_is_better_than_thin(tmp_path: Path) -> None:
    for seed in range(3):
        stored(tmp_path, f"gpt-50-ours-seed{seed}", 1.48 + seed / 1000)
        stored(tmp_path, f"gpt-50-uniform-seed{seed}", 1.53 + seed / 1000)
        stored(tmp_path, f"gpt-50-thin-cost-seed{seed}", 1.5 + seed / 1000)
    stored(tmp_path, "deit-50-ours-seed0", 0.49)
    stored(tmp_path, "deit-50-thin-epochs-seed0", 0.5)
    (tmp_path / "gpt-baseline").mkdir()
    rows = [{"validation loss": loss} for loss in (1.6, 1.48, 1.7)]
    (tmp_path / "gpt-baseline" / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parts = transformer_runs.gpt(tmp_path)
    assert (
        "reaches 1.4800; nanoGPT publishes 1.4697. The difference of 0.0103 is within" in parts[1]
    )
    title, lines, said, left = parts[2:6]
    assert title == "At 50 % of the parameters, residual stream frozen:"
    assert "| original network |  | 100.00% |" in lines and "| 1.4700 |" in lines
    assert "| ours, uniform widths |" in lines and "| 1.4810 ± 0.0010 |" in lines
    assert said.splitlines() == [
        "- Free widths: Pruning is better than a thin network (equal training cost) by "
        "0.0200 ± 0.0023.",
        "- Uniform widths: A thin network (equal training cost) is better than pruning by "
        "0.0300 ± 0.0023: use that instead.",
    ]
    assert left.startswith("Not run yet: gpt-50-thin-epochs-seed0, ")
    found = transformer_runs.deit(tmp_path)[3]
    assert found == (
        "- Free widths: With one seed, pruning is 1.00 points behind a thin network (equal "
        "epochs), which may be chance."
    )
    assert read_runs(tmp_path) == []  # they are not in the paper's table
