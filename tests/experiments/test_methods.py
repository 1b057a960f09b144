"""Other methods on tiny data: equal budget, equal epochs, and their penalties and formulas."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from benchmarks.pages.results import MARKS, write
from polarprune.cost.other_scores import UnitNorms, scale_scores
from polarprune.cost.resources import Quadratic
from polarprune.experiments.data.cifar10 import Cifar10
from polarprune.experiments.data.images import Batches, accuracy
from polarprune.experiments.methods import base
from polarprune.experiments.methods.expected_cost import LambdaAdjuster, expected_share
from polarprune.experiments.methods.kernel_gates import KernelGates, NaiveSL0
from polarprune.experiments.methods.l0 import L0, HardConcrete
from polarprune.experiments.methods.lasso import Lasso
from polarprune.experiments.methods.slimming import Slimming
from polarprune.experiments.methods.table import ALL_METHODS, METHODS
from polarprune.experiments.networks.small_images import MobileNetV2, ResNet
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import preset
from polarprune.experiments.runs.prune import prune
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.runs.run import Run
from polarprune.experiments.runs.trainer import Trainer
from polarprune.experiments.settings import MethodSettings
from polarprune.gates.gate import GatedWeight
from polarprune.surgery.proof import count_macs
from tests.helpers.cifar import TINY, Tiny, images, written
from tests.helpers.command_line import train_tiny
from tests.helpers.no_reading import NoReading

EXAMPLE = torch.randn(2, 3, 32, 32)
pytestmark = pytest.mark.usefixtures("tiny")
INSTALLED = importlib.util.find_spec("torch_pruning") is not None
needs_torch_pruning = pytest.mark.skipif(not INSTALLED, reason="needs torch-pruning")
OURS = [name for name in ALL_METHODS if name != "torch-pruning"]
EVERY = [*OURS, pytest.param("torch-pruning", marks=needs_torch_pruning)]


def control(kind: Any, model: nn.Module, steps: int = 40, **numbers: float) -> Any:
    wanted = preset("tiny", **{f"controls.{key}": value for key, value in numbers.items()})
    return kind(model, EXAMPLE, wanted, steps, {"macs": 0.5})


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EVERY)
def test_a_control_meets_its_budget_in_as_many_epochs(
    method: str, data: Cifar10, tmp_path: Path
) -> None:
    run = Run(preset("tiny", distill=0.5, recalibrate=2, tune_epochs=2), data, tmp_path)
    card = prune(run, run.baseline(), method, macs=0.5)
    assert card["method"] == method and 0.2 < card["macs_share"] <= 0.5
    assert [row["stage"] for row in card["table"]] == [
        "baseline",
        "before removal",
        "after removal",
        "after fine-tuning",
    ]
    assert all(0 <= row["accuracy"] <= 1 for row in card["table"])
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["baseline"] * 3 + ["prune"] * 4 + ["tune"] * 2
    names = {path.name for path in tmp_path.iterdir()}
    kind = "-state.safetensors" if method == "torch-pruning" else ".safetensors"
    files = {"baseline.safetensors", f"small{kind}", f"tuned{kind}"}
    assert names == files | {"card.json", "log.jsonl"}
    assert json.loads((tmp_path / "card.json").read_text()) == card
    if method != "torch-pruning":
        small, _ = rebuild(tmp_path / "small.safetensors")
        assert accuracy(small, data.test) == card["table"][2]["accuracy"]
        assert count_macs(small, EXAMPLE[:1]) == card["macs"]


@pytest.mark.parametrize(
    ("method", "number", "strong"),
    [("slimming", "slimming", 0.03), ("lasso", "lasso", 0.002), ("l0", "l0_push", 100.0)],
)
def test_only_a_penalty_brings_channels_near_zero(
    method: str, number: str, strong: float, data: Cifar10, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    plan = base.plan_by_threshold
    monkeypatch.setattr(
        base,
        "plan_by_threshold",
        lambda graph, scores, **limits: [seen.append(scores), plan(graph, scores, **limits)][1],
    )
    for value in (0.0, strong):
        torch.manual_seed(0)
        model = Tiny()
        kind = control(METHODS[method], model, steps=300, **{number: value}, l0_rise=0.0)
        trainer = Trainer(model, Batches(data.train, 20), TINY, epochs=30, lr=0.1, method=kind)
        while trainer.done < trainer.steps:
            trainer.epoch()
        kind.plan()
    without, with_it = (scores[scores.isfinite()] for scores in seen)
    assert float(without.min() / without.max()) > 0.1
    assert int((with_it < 0.02 * with_it.max()).sum()) >= 3


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", ["l0", "lasso", "kernel-gates"])
def test_a_control_goes_on_where_it_was_cut_off(
    method: str, data: Cifar10, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarprune.experiments.runs.run.CHECKPOINT_PAUSE", 0.0)

    def stop(row: dict[str, Any]) -> None:
        if row["stage"] == "prune" and row["epoch"] == 3:
            raise Stop

    cards = []
    for name in ("whole", "parts"):
        run = Run(TINY, data, tmp_path / name)
        model = run.baseline()
        torch.manual_seed(5)
        if name == "parts":
            run.progress = stop
            with pytest.raises(Stop):
                prune(run, model, method, macs=0.5)
            torch.manual_seed(99)  # another process, another state
            run = Run(TINY, data, tmp_path / name)
            model = run.baseline()
        cards.append(prune(run, model, method, macs=0.5))
    assert cards[0]["table"] == cards[1]["table"] and cards[0]["sha256"] == cards[1]["sha256"]


@pytest.mark.parametrize("method", ["magnitude", "l0"])
def test_residual_networks(method: str, data: Cifar10, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(NETWORKS, "tiny", lambda: ResNet(1))
    run = Run(preset("tiny", epochs=1, baseline_epochs=1, batch=50), data, tmp_path)
    card = prune(run, run.baseline(), method, macs=0.4665)
    assert 0.4 < card["macs_share"] <= 0.4665


def test_the_command_line_takes_a_method(tmp_path: Path) -> None:
    written(tmp_path, "bin")
    changes = ("--set=batch=10", "--set=epochs=2", "--set=controls.slimming=0.01")
    train = partial(train_tiny, f"cifar10:{tmp_path}", tmp_path / "out", "--macs=0.5", *changes)
    done = train("--method=slimming")
    assert done.exit_code == 0 and "after removal" in done.output, done.output
    card = json.loads((tmp_path / "out/card.json").read_text())
    assert card["method"] == "slimming" and card["recipe"]["controls"]["slimming"] == 0.01
    done = train("--method=slim")
    assert done.exit_code == 1
    assert "unknown method 'slim'. Methods: gdp, magnitude," in " ".join(done.output.split())


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(pp.PruneError, match=r"pip install polarprune\[controls\]"):
        control(METHODS["torch-pruning"], Tiny())


def test_slimming_needs_batch_norms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 2))
    with pytest.raises(pp.PruneError, match="no batch norms"):
        control(Slimming, model)


# --- penalties ------------------------------------------------------------------------------------


def test_slimming_pulls_at_every_scale_by_its_sign() -> None:
    model = Tiny()
    with torch.no_grad():
        model.bn.weight.copy_(torch.linspace(-1, 1, 12))
    control(Slimming, model, slimming=0.3).penalty().backward()
    assert torch.allclose(model.bn.weight.grad, 0.3 * model.bn.weight.detach().sign())
    assert model.bn.bias.grad is None


def test_group_lasso_against_its_closed_form() -> None:
    """The gradient is w √size / ‖w‖, summed over the channels that a weight belongs to."""
    model = Tiny()
    control(Lasso, model, lasso=0.7).penalty().backward()

    def norm(*parts: Tensor) -> tuple[Tensor, int]:
        rows = torch.cat([part.flatten(1) for part in parts], 1)
        return rows.norm(dim=1), rows.shape[1]

    one, two, bn, head = model.one, model.two, model.bn, model.head
    with torch.no_grad():
        first, size = norm(
            one.weight,
            one.bias[:, None],
            bn.weight[:, None],
            bn.bias[:, None],
            two.weight.transpose(0, 1),
        )
        second, other = norm(two.weight, two.bias[:, None], head.weight.T)
        assert (size, other) == (27 + 3 + 16 * 9, 12 * 9 + 1 + 10)
        a, b = 0.7 * math.sqrt(size) / first, 0.7 * math.sqrt(other) / second
        wanted = {
            one.weight: one.weight * a[:, None, None, None],
            bn.bias: bn.bias * a,
            two.weight: two.weight * (a[:, None, None] + b[:, None, None, None]),
            head.weight: head.weight * b,
        }
    for parameter, gradient in wanted.items():
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)
    assert head.bias.grad is None  # belongs to no channel


def test_norms_of_nothing_have_a_slope() -> None:
    model = Tiny()
    graph = pp.trace(model, EXAMPLE)
    norms = UnitNorms(model, graph.units, graph.axes)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    norms().sum().backward()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in model.parameters())


def test_coupled_scales_count_as_their_mean() -> None:
    model = ResNet(1)
    graph = pp.trace(model, EXAMPLE)
    with torch.no_grad():
        model.bn.weight.fill_(0.5)
        model.blocks[0].bn2.weight.fill_(-1.5)
        model.blocks[1].bn2.weight.fill_(4.0)
        model.blocks[2].bn2.weight.fill_(2.0)
        model.blocks[0].bn1.weight.fill_(0.25)
    scores = scale_scores(model, graph)
    stream = int(graph.axes["bn.weight"][0][0])
    inner = int(graph.axes["blocks.0.bn1.weight"][0][0])
    assert float(scores[stream]) == pytest.approx((0.5 + 1.5 + 4 + 2) / 4)
    assert float(scores[inner]) == pytest.approx(0.25)
    scores = scale_scores(Tiny(), pp.trace(Tiny(), EXAMPLE))
    assert int(scores.isinf().sum()) == 16  # the second layer has no norm


# --- hard-concrete gates --------------------------------------------------------------------------


def concrete(*log_alpha: float) -> HardConcrete:
    gate = HardConcrete(len(log_alpha), MethodSettings())
    gate.alpha.data.copy_(torch.tensor(log_alpha))
    return gate


def test_the_formulas_of_the_paper() -> None:
    gate = concrete(-1.0, 0.0, 2.0)
    gate.noise.copy_(torch.tensor([0.3, 0.6, 0.9]))
    wanted, kept, chances = [], [], []
    for log_alpha, u in ((-1.0, 0.3), (0.0, 0.6), (2.0, 0.9)):
        s = 1 / (1 + math.exp(-(math.log(u) - math.log(1 - u) + log_alpha) / (2 / 3)))
        wanted.append(min(1, max(0, s * 1.2 - 0.1)))
        kept.append(min(1, max(0, 1.2 / (1 + math.exp(-log_alpha)) - 0.1)))
        chances.append(1 / (1 + math.exp(-(log_alpha - 2 / 3 * math.log(0.1 / 1.1)))))
    assert torch.allclose(gate.values(), torch.tensor(wanted), atol=1e-6)
    assert torch.allclose(gate.open_probability(), torch.tensor(chances), atol=1e-6)
    assert torch.allclose(gate.eval().values(), torch.tensor(kept), atol=1e-6)


def test_gates_are_open_as_often_as_their_chance_says() -> None:
    log_alpha = [-3.0, -1.5, 0.0, 1.0]
    gate = concrete(*(value for value in log_alpha for _ in range(20000)))
    gate.draw()
    often = (gate.values() != 0).float().reshape(4, -1).mean(1)
    assert torch.allclose(often, gate.open_probability().reshape(4, -1)[:, 0], atol=0.012)


def test_a_gate_begins_with_its_chance_of_dropping() -> None:
    gate = HardConcrete(3, MethodSettings(l0_drop=0.2))
    assert torch.allclose(torch.sigmoid(gate.alpha), torch.tensor(0.8))


def test_the_expected_cost_is_the_mean_over_all_subsets() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.rand(2, 2, generator=generator, dtype=torch.float64)
    cost = Quadratic(q + q.T, torch.rand(2, generator=generator, dtype=torch.float64), 0.5)
    chances = [torch.rand(size, generator=generator, dtype=torch.float64) for size in (3, 2)]
    flat, total = torch.cat(chances), 0.0
    for subset in itertools.product([0, 1], repeat=5):
        there = torch.tensor(subset, dtype=torch.float64)
        chance = float((flat * there + (1 - flat) * (1 - there)).prod())
        total += chance * float(cost(torch.stack([there[:3].sum(), there[3:].sum()])))
    assert float(expected_share(cost, 4.0, chances)) == pytest.approx(total / 4)


def test_lambda_answers_the_distance_and_its_sum() -> None:
    adjuster = LambdaAdjuster(torch.tensor([1.0, 0.5, 0.0, 0.0]), push=10.0, rise=4.0)
    found = [float(adjuster.update(torch.tensor(share))) for share in (0.9, 0.7, 0.2, 0.0, -1.0)]
    assert found == pytest.approx([0.0, 10 * 0.2 + 0.2, 10 * 0.2 + 0.4, 0.4, 0.0])


def test_all_that_read_a_channel_see_the_same_gate() -> None:
    model = ResNet(1)
    method = control(L0, model)
    assert not model._forward_pre_hooks  # the bank multiplies other gates
    method.before_forward()
    model.train()
    gate = method.gates[next(iter(method.gates))]
    parts = [part for part in model.modules() if isinstance(part, GatedWeight)]
    readers = [part for part in parts if gate in list(part.gates)]
    assert len(readers) > 1
    first = gate.values().clone()
    assert torch.equal(first, gate.values())
    method.before_forward()
    assert not torch.equal(first, gate.values())


def test_what_is_cut_at_closed_gates_changes_nothing() -> None:
    model = ResNet(1).eval()
    method = control(L0, model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for gate in method.gates.values():
            gate.alpha.copy_(torch.randn(len(gate.alpha), generator=generator) * 2 - 1.5)
    method.limits = {"macs": 1.0}
    full = method.trained_model()
    small = method.cut(full)
    closed = torch.cat([gate.final_values() == 0 for gate in method.gates.values()])
    assert closed.any() and count_macs(small, EXAMPLE) < count_macs(full, EXAMPLE)
    assert torch.allclose(model(EXAMPLE), small.eval()(EXAMPLE), atol=1e-5)


@pytest.mark.parametrize("kind", [L0, KernelGates])
def test_the_gates_reach_the_budget_by_themselves(kind: Any, data: Cifar10) -> None:
    torch.manual_seed(0)
    model, batches = Tiny(), Batches(data.train, 20)
    method = control(kind, model, steps=1200)
    trainer = Trainer(model, batches, TINY, epochs=120, lr=0.1, method=method)
    while trainer.done < trainer.steps:
        trainer.epoch()
    # The end of such a short run is noisy: 0.042 off at most in 13 runs.
    assert method.expected_shares().tolist()[0] == pytest.approx(0.5, abs=0.05)


# --- gates made of kernels ------------------------------------------------------------------------


def kernels(model: Any) -> Tensor:
    """Compute by hand the norms of the weights that read the channels of `one` and `two`."""
    return torch.cat(
        [
            model.two.weight.detach().square().sum((0, 2, 3)).sqrt(),
            model.head.weight.detach().norm(dim=0),
        ]
    )


@pytest.mark.parametrize("kind", [KernelGates, NaiveSL0])
def test_gates_made_of_kernels_begin_where_ours_do(kind: Any) -> None:
    model = Tiny()
    norms = kernels(model)
    method = control(kind, model, steps=40)
    assert method.norms().allclose(norms, rtol=1e-5)
    assert method.values().allclose(torch.tensor(1 / 1.1), rtol=1e-5)
    method.adjuster.step.fill_(20)
    decay = (preset("tiny").schedule.eps_end / 0.1) ** 0.5
    assert method.values().allclose(1 / (1 + 0.1 * torch.tensor(decay)), rtol=1e-5)


def test_a_network_computes_with_gates_of_its_kernels() -> None:
    torch.manual_seed(0)
    model: Any = Tiny().train()
    twin = copy.deepcopy(model)
    method = control(KernelGates, model)
    method.before_forward()
    with torch.no_grad():
        twin.two.weight /= 1.1
        twin.head.weight /= 1.1
    assert model(EXAMPLE).allclose(twin(EXAMPLE), atol=1e-5)
    model(EXAMPLE).sum().backward()
    assert model.two.parametrizations.weight.original.grad is not None


def test_the_proximal_step_shrinks_kernels_by_their_price_for_good() -> None:
    model: Any = Tiny()
    method = control(KernelGates, model)
    before, prices = (
        method.norms().detach(),
        torch.tensor([macs for macs, _ in method.graph.cost.prices().values()]),
    )
    method.adjust = lambda shares: torch.tensor([2.0])
    widths = torch.tensor([12.0, 16.0]) / 1.1
    cost, rate = method.graph.cost.parts["macs"], 0.05
    own = (cost.q @ widths.double() + cost.b) / method.original["macs"]
    method.after_step(rate)
    shrunk = before - 2.0 * rate * own.float().repeat_interleave(torch.tensor([12, 16]))
    assert method.norms().allclose(shrunk, rtol=1e-4) and bool((prices > 0).all())
    assert bool((shrunk > 0).all()) and not bool(method.closed.any())
    method.adjust = lambda shares: torch.tensor([1e4])
    method.after_step(rate)
    assert bool(method.closed.all())
    with torch.no_grad():
        model.two.parametrizations.weight.original += 1.0
    method.adjust = lambda shares: torch.tensor([0.0])
    method.after_step(rate)
    assert not bool(model.two.parametrizations.weight.original.any())


def test_naive_sl0_pulls_at_kernels_and_leaves_the_forward_pass_alone() -> None:
    model: Any = Tiny().eval()
    wanted = model(EXAMPLE)
    method = control(NaiveSL0, model, naive_sl0=3.0)
    assert torch.equal(model(EXAMPLE), wanted)
    share = method.expected_shares().detach()
    penalty = method.penalty()
    assert float(penalty.detach()) == pytest.approx(3.0 * float(share), rel=1e-5)
    assert int(method.adjuster.step) == 1
    penalty.backward()
    slope = model.head.weight.grad
    assert bool((slope * model.head.weight > 0).any(0).all())  # shrinks every kernel
    assert model.one.weight.grad is None and model.bn.weight.grad is None


# --- in a captured step ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_step_reads_nothing_back(name: str, data: Cifar10) -> None:
    model = ResNet(1)
    method = control(ALL_METHODS[name], model)
    assert method.captured
    trainer = Trainer(model, Batches(data.train, 20), TINY, epochs=4, lr=0.05, method=method)
    trainer.batches.shuffle()
    trainer._step()
    with NoReading():
        trainer._step()
    assert all(
        tensor is again
        for tensor, again in zip(method.state().values(), method.state().values(), strict=True)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", EVERY)
def test_a_captured_step_trains_like_an_eager_one(name: str) -> None:
    few, found = images(200).to("cuda"), []
    for captured in (False, True):
        torch.manual_seed(0)
        model = ResNet(1).cuda()
        kind = ALL_METHODS[name]
        method = kind(model, EXAMPLE.cuda(), preset("tiny"), 40, {"macs": 0.5})
        method.captured = captured
        trainer = Trainer(model, Batches(few, 20), TINY, epochs=4, lr=0.02, method=method)
        losses = [trainer.epoch()["loss"] for _ in range(4)]
        found.append((losses, method.log_entries()))
    assert found[0][0] == pytest.approx(found[1][0], rel=0.2)
    assert found[0][1] == pytest.approx(found[1][1], rel=0.1, abs=0.5)


def pulled(method: Any, model: nn.Module) -> set[str]:
    """Compare our regularizer with that of Torch-Pruning; return the tensors that one pulls at."""
    model(EXAMPLE).square().sum().backward()
    kept = {name: p.grad.clone() for name, p in model.named_parameters()}
    method.after_backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name].clone()
    method._pruner(model, 0.5).regularize(model)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, found[name], rtol=1e-4, atol=1e-5), name
    return {
        name
        for name, p in model.named_parameters()
        if not (torch.equal(p.grad, kept[name]) and torch.equal(found[name], kept[name]))
    }


@needs_torch_pruning
@pytest.mark.parametrize("kind", [Tiny, partial(ResNet, 1)])
def test_torch_prunings_regularizer_is_its_own(kind: Any) -> None:
    model = kind()
    method = control(METHODS["torch-pruning"], model, torch_pruning=0.1)
    weights = {name for name, _ in model.named_parameters() if name.endswith("weight")}
    assert pulled(method, model) == weights


@needs_torch_pruning
def test_torch_pruning_regularizes_no_depthwise_convolution() -> None:
    """The library leaves them out of the regularizer and of the importance."""
    model = MobileNetV2(strides=(2, 2, 2, 2, 1, 2, 1), dropout=0.0)
    model.blocks = model.blocks[:3]
    model.last = nn.Conv2d(24, 32, 1)
    model.head = nn.Linear(32, 10)
    method = control(METHODS["torch-pruning"], model, torch_pruning=0.1)
    weights = pulled(method, model)
    depthwise = model.blocks[1].layers[1][0]
    name = next(key for key, one in model.named_modules() if one is depthwise)
    assert depthwise.groups > 1 and weights and f"{name}.weight" not in weights
    small = method.cut(model)
    assert count_macs(small, EXAMPLE) <= 0.5 * count_macs(model, EXAMPLE)


@needs_torch_pruning
def test_torch_pruning_cuts_to_the_budget() -> None:
    model = Tiny()
    method = control(METHODS["torch-pruning"], model)
    before = copy.deepcopy(model)
    small = method.cut(model)
    assert count_macs(small, EXAMPLE) <= 0.5 * count_macs(before, EXAMPLE)
    assert count_macs(model, EXAMPLE) == count_macs(before, EXAMPLE)


# --- the page of results --------------------------------------------------------------------------


def stored(
    root: Path,
    name: str,
    scores: tuple[float, ...],
    *,
    seed: int = 0,
    method: str = "gdp",
    network: str = "resnet56",
    macs: float = 0.4665,
    images: int = 10000,
    **changes: Any,
) -> None:
    """Write a card and a log as `Run` does."""
    stages = ("baseline", "before removal", "after removal", "after fine-tuning")
    table = [
        {"stage": stage, "accuracy": score, "macs": 1, "params": 1}
        for stage, score in zip(stages, scores, strict=False)
    ]
    numbers = dataclasses.asdict(preset(network, seed=seed, **changes))
    card = {
        "network": network,
        "method": method,
        "budget": {"macs": macs},
        "table": table,
        "accuracy": scores[-1],
        "macs_share": macs - 1e-4,
        "scored_on": images,
        "recipe": numbers,
        "machine": "a machine",
        "versions": {"torch": "2.13.0"},
        "identical_predictions": name != "vgg",
    }
    folder = root / "results" / name
    folder.mkdir(parents=True)
    (folder / "card.json").write_text(json.dumps(card))
    rows = [{"stage": "prune", "epoch": k, "seconds": s} for k, s in ((1, 900.0), (2, 1800.0))]
    rows += [{"stage": "tune", "epoch": 1, "seconds": 1800.0}]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def made(root: Path) -> tuple[str, str]:
    """Write the page and the README, and return their texts."""
    (root / "docs").mkdir()
    (root / "README.md").write_text(f"above\n{MARKS[0]}\nold\n{MARKS[1]}\nbelow\n")
    write(root)
    return (root / "docs" / "results.md").read_text(), (root / "README.md").read_text()


def test_results_that_are_missing_are_said_to_be(tmp_path: Path) -> None:
    page, readme = made(tmp_path)
    assert page.count("| not run yet | – | not run yet | – | 0 |") == 4
    assert "[Is pruning better than training a thin network?](#is-pruning-worth-it) | 0 of " in page
    assert "**Accuracy.**" not in page and "**Other methods.**" not in page
    assert all(f"| {name} | – | – | not run yet |" in page for name in ("gdp", *METHODS))
    assert readme == f"above\n{MARKS[0]}\nold\n{MARKS[1]}\nbelow\n"


def test_results_are_means_over_seeds_beside_the_papers(tmp_path: Path) -> None:
    stored(tmp_path, "a", (0.9390, 0.94, 0.94))
    stored(tmp_path, "b", (0.9410, 0.942, 0.942), seed=1)
    stored(tmp_path, "held-out", (0.5, 0.5, 0.5), images=5000)
    stored(tmp_path, "vgg", (0.93, 0.935, 0.935), network="vgg16", macs=0.3055)
    page, readme = made(tmp_path)
    row = (
        "| ResNet-56 | 93.90 | 46.65 | 93.97 | +0.07 | 94.00 ± 0.14 | 46.64 ± 0.00 | "
        "**94.10 ± 0.14** | +0.10 | 2 |"
    )
    assert row in page and row in readme
    assert "more accurate in 1 of 2 cases, our baseline in 1. Relative to its" in page
    assert "ours loses less accuracy than the paper's in 2 of 2 cases" in page
    assert "changes none of the 10,000 predictions in 2 of 3 runs" in page
    assert "3 of 3 runs end at or below their budget, at most 0.01 points" in page
    assert "1 of 2 rows of the paper's table have one run each" in page
    assert "93.99 | +0.10 | 93.00 | 30.54 | **93.50** | +0.50 | 1 |" in page
    assert "| ResNet-56 | 93.90 | 34.36 | 93.55 | -0.35 | not run yet |" in page
    assert "identical on all 10,000 test images in 2 of 3 runs" in page
    assert "loses less accuracy in 0 of 2 rows" in page
    assert readme.startswith("above\n") and readme.endswith("below\n") and "old" not in readme
    assert "epochs 200 (350)" in page and "distill 0.9 (0)" in page
    assert "3 runs on a machine (torch 2.13.0): 3.0 hours" in page


def test_another_network_is_not_put_beside_the_papers(tmp_path: Path) -> None:
    stored(tmp_path, "a", (0.95, 0.96, 0.96), network="mobilenetv2_88m", macs=0.5378)
    stored(tmp_path, "b", (0.94, 0.94, 0.94))
    page, readme = made(tmp_path)
    missing = "| MobileNetV2 | 94.89 | 53.78 | 95.15 | +0.26 | not run yet | – | not run yet |"
    ours = (
        "| MobileNetV2 with one more stride, 88 M MACs; not the paper's network | – | – | – | – | "
        "95.00 | 53.77 | **96.00** | +1.00 | 1 |"
    )
    assert all(row in text for row in (missing, ours) for text in (page, readme))
    assert "in 2 of 2 runs" in page and "loses less accuracy in 1 of 1 rows" in page
    assert "- `mobilenetv2_88m` (MobileNetV2 with one more stride" in page


def test_what_was_held_out_is_a_table_of_what_differs(tmp_path: Path) -> None:
    for decay, score in ((1e-4, 0.93), (2e-4, 0.94)):
        folder = tmp_path / "results" / f"held-out-{decay}"
        folder.mkdir(parents=True)
        numbers = dataclasses.asdict(preset("mobilenetv2", weight_decay=decay, baseline_epochs=60))
        (folder / "run.json").write_text(json.dumps({**numbers, "hold_out": 5000}))
        rows = [{"stage": "baseline", "accuracy": s} for s in (0.5, score)]
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    page, _ = made(tmp_path)
    held = page.split("held-out images\n")[1].split("## Conditions")[0]
    assert "MobileNetV2, 60 epochs, 5,000 images held out:" in held
    table = [line for line in held.splitlines() if line.startswith("|")]
    assert table[0] == "| weight_decay | accuracy |"
    assert table[2:] == ["| 0.0001 | 93.00 |", "| 0.0002 | 94.00 |"]


def test_runs_by_other_recipes_are_not_mixed(tmp_path: Path) -> None:
    stored(tmp_path, "a", (0.93, 0.94, 0.94))
    stored(tmp_path, "b", (0.93, 0.95, 0.95), epochs=100)
    stored(tmp_path, "c", (0.93, 0.94, 0.94, 0.945), seed=1, tune_epochs=40)
    tuned = {"epochs": 100, "tune_epochs": 40}  # compared with others only
    stored(tmp_path, "d", (0.93, 0.96, 0.96, 0.97), **tuned)
    page, _ = made(tmp_path)
    assert "| ResNet-56 (resnet56) |" in page and "**94.00 ± 0.00** | +1.00 | 2 |" in page
    assert "| ResNet-56 (changed: epochs 100 (200)) |" in page and "**95.00** | +2.00 | 1 |" in page
    assert "**96.00**" not in page and "| 93.00 | 96.00 | 96.00 | +3.00 | 97.00 | +4.00 |" in page
    assert "46.65 % was then fine-tuned for 40 epochs" in page and "reached 94.50 %." in page


def test_where_a_control_wins_is_said(tmp_path: Path) -> None:
    for seed in (0, 1):
        tuned = {"epochs": 100, "tune_epochs": 40, "seed": seed}
        stored(tmp_path, f"gdp{seed}", (0.93, 0.94, 0.94, 0.941), **tuned)
        stored(tmp_path, f"l0{seed}", (0.93, 0.92, 0.91, 0.945), method="l0", **tuned)
        stored(tmp_path, f"rnd{seed}", (0.93, 0.94, 0.1, 0.92), method="random", **tuned)
    weak = {"method": "slimming", "epochs": 100, "tune_epochs": 40, "controls.slimming": 3e-5}
    stored(tmp_path, "slim", (0.93, 0.95, 0.945, 0.95), **weak)
    short = {"epochs": 100}
    stored(tmp_path, "other", (0.93, 0.9, 0.9, 0.9), method="lasso", tune_epochs=20, **short)
    stored(tmp_path, "base", (0.95, 0.9, 0.9, 0.9), method="magnitude", tune_epochs=40, **short)
    page, _ = made(tmp_path)
    rows = {
        line.split("|")[1].strip(): line
        for line in page.split("## Other")[1].splitlines()
        if line.startswith("|")
    }
    assert "94.00 ± 0.00 | +1.00 | 94.10 ± 0.00 | +1.10 |" in rows["**gdp (ours)**"]
    assert rows["l0"].endswith("| 100 + 40 | 2 | after fine-tuning |")
    assert rows["random"].endswith("| no |")
    assert rows["slimming (slimming = 3e-05)"].endswith("| after removal and after fine-tuning |")
    assert rows["lasso"].endswith("| gdp: not run yet |")
    assert rows["magnitude"].endswith("| no (from another baseline) |")
    assert rows["torch-pruning"].count("not run yet") == 2


def test_controls_that_one_run_does_not_tell_apart_are_named(tmp_path: Path) -> None:
    for seed, score in ((0, 0.940), (1, 0.942)):  # ± 0.14, so that 0.40 points are far
        stored(tmp_path, f"seed{seed}", (0.93, score, score), seed=seed)
    tuned = {"epochs": 100, "tune_epochs": 40}
    stored(tmp_path, "gdp", (0.93, 0.94, 0.94, 0.940), **tuned)
    stored(tmp_path, "l0", (0.93, 0.94, 0.937, 0.943), method="l0", **tuned)
    stored(tmp_path, "lasso", (0.93, 0.94, 0.90, 0.937), method="lasso", **tuned)
    stored(tmp_path, "random", (0.93, 0.94, 0.10, 0.935), method="random", **tuned)
    page, _ = made(tmp_path)
    assert "a standard deviation of 0.14 over 2 seeds" in page
    assert "(after removal: l0; after fine-tuning: l0 and lasso)." in page
    assert "1 of 3 runs of other methods are more accurate than ours" in page
    assert "l0 and lasso cannot be told apart from it by single runs" in page


def test_the_readme_has_the_marks() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert all(text.count(mark) == 1 for mark in MARKS)
