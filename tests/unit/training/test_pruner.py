"""The pruner in the training loops that users write."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import polarprune as pp
import polarprune.training.pruner
from tests.helpers.nets import NETS, digits_resnet
from tests.helpers.training import alphas, batches, prune, same_state, sgd, share, snapshot, train

pytestmark = pytest.mark.usefixtures("shared_traces")

STEPS = 12
EXAMPLE = torch.zeros(2, 1, 8, 8)


def data(count: int = STEPS) -> Any:
    return batches(count, channels=1, size=8)


def setup(**settings: Any) -> pp.Pruner:
    torch.manual_seed(1)
    settings = {"steps": STEPS, **({} if "lam" in settings else {"macs": 0.5}), **settings}
    return pp.Pruner(digits_resnet(8), EXAMPLE, **settings)


def adam(pruner: pp.Pruner, kind: Any = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
    return kind(pruner.param_groups(lr=0.01, weight_decay=1e-2), **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": lambda pruner, **options: adam(pruner, torch.optim.AdamW, **options),
}
EVERY = list(itertools.product(OPTIMIZERS, [{}, {"foreach": True}, {"fused": True}]))


# --- optimizers, schedulers, scalers --------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
def test_every_optimizer_takes_the_model_to_its_budget(name: str, options: dict[str, bool]) -> None:
    pruner = setup()
    optimizer = OPTIMIZERS[name](pruner, **options)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data())
    assert pruner.step_count == STEPS
    assert share(pruner)["macs"] <= 0.5
    pruner.export()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closed_gate_stays_closed_whatever_the_momentum(name: str) -> None:
    pruner = setup(steps=40)
    optimizer = OPTIMIZERS[name](pruner)
    pruner.attach(optimizer)
    seen = []
    train(pruner.model, optimizer, data(40), lambda: seen.append(alphas(pruner) == 0))
    assert bool(seen[-1].any())
    for earlier, later in itertools.pairwise(seen):
        assert bool(later[earlier].all())


def test_gates_have_a_tenth_of_the_rate_and_no_weight_decay() -> None:
    pruner = setup()
    rest, gates = pruner.param_groups(lr=0.1, weight_decay=5e-4, momentum=0.8)
    assert (rest["lr"], rest["weight_decay"], rest["momentum"]) == (0.1, 5e-4, 0.8)
    assert (gates["lr"], gates["weight_decay"], gates["momentum"]) == (pytest.approx(0.01), 0, 0.8)
    assert [id(p) for p in gates["params"]] == [id(g.alpha) for g in pruner.gates.values()]
    everything = {id(p) for p in pruner.model.parameters()}
    assert {id(p) for p in rest["params"] + gates["params"]} == everything
    assert len(rest["params"]) + len(gates["params"]) == len(everything)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, [0.1, 0.01], total_steps=STEPS + 1),
}


@pytest.mark.parametrize("before", [False, True], ids=["after_attach", "before_attach"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers_go_on_as_ever(name: str, before: bool) -> None:
    pruner = setup()
    optimizer = sgd(pruner)
    scheduler = SCHEDULERS[name](optimizer) if before else None
    pruner.attach(optimizer)
    scheduler = scheduler or SCHEDULERS[name](optimizer)
    rates = []

    def step() -> None:
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])

    train(pruner.model, optimizer, data(), step)
    assert pruner.step_count == STEPS
    assert share(pruner)["macs"] <= 0.5
    assert all(gate == pytest.approx(0.1 * rest) for rest, gate in rates)
    assert len({rest for rest, _ in rates}) == STEPS


def test_accumulated_gradients_count_as_one_step() -> None:
    pruner = setup(steps=6)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    pruner.model.train()
    for number, (images, labels) in enumerate(data(), start=1):
        (F.cross_entropy(pruner.model(images), labels) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert pruner.step_count == 6
    assert share(pruner)["macs"] <= 0.5


def test_gradients_can_be_clipped() -> None:
    pruner = setup()
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    pruner.model.train()
    for images, labels in data():
        optimizer.zero_grad()
        F.cross_entropy(pruner.model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(pruner.model.parameters(), 0.1)
        assert all(gate.alpha.grad is not None for gate in pruner.gates.values())
        optimizer.step()
    assert share(pruner)["macs"] <= 0.5


@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "unscaled_first"])
@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_the_scaler_skips_is_not_counted(name: str, fused: bool, unscale: bool) -> None:
    pruner = setup(steps=6)
    optimizer = OPTIMIZERS[name](pruner, fused=fused)
    pruner.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pruner.model.train()
    counted = []
    for number, (images, labels) in enumerate(data(8)):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(pruner.model(images), labels)).backward()
        if number in (2, 5):
            pruner.model[0][0].weight.grad[0, 0, 0, 0] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
        before = snapshot(pruner.model)
        scaler.step(optimizer)
        scaler.update()
        same = same_state(before, snapshot(pruner.model))
        assert same == (number in (2, 5))
        counted.append(pruner.step_count)
    assert counted == [1, 2, 2, 3, 4, 4, 5, 6]
    assert share(pruner)["macs"] <= 0.5


@pytest.mark.parametrize("goal", [{"macs": 0.5}, {"lam": 100.0}], ids=str)
def test_stepping_by_hand_equals_attach(goal: dict[str, float]) -> None:
    ends = []
    for by_hand in (False, True):
        pruner = setup(**goal)
        optimizer = sgd(pruner)
        if by_hand:
            train(pruner.model, optimizer, data(), pruner.step)
        else:
            pruner.attach(optimizer)
            train(pruner.model, optimizer, data())
        ends.append(snapshot(pruner.model))
    assert same_state(*ends)


def test_eps_is_that_of_the_schedule_after_every_step() -> None:
    pruner = setup()
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    seen = []

    def look() -> None:
        (eps,) = {float(gate.eps) for gate in pruner.gates.values()}
        seen.append(eps)

    train(pruner.model, optimizer, data(), look)
    assert seen == pytest.approx([pp.Schedule().eps(step, STEPS) for step in range(1, STEPS + 1)])


def test_a_step_by_hand_is_refused_once_an_optimizer_is_attached() -> None:
    pruner = setup(steps=100, macs=0.5)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1))
    pruner.step()
    pruner.attach(optimizer)
    with pytest.raises(pp.PruneError, match=r"step: an optimizer is attached.*Remove the call"):
        pruner.step()
    assert pruner.step_count == 1


def test_no_alpha_shrinks_faster_than_within_the_window() -> None:
    pruner = setup(steps=100, macs=0.2)
    most = 1 / pruner.schedule.window_of(100)
    for _ in range(45):  # until shortly before the budget is met
        before = alphas(pruner)
        pruner.step()
        assert float((before - alphas(pruner)).abs().max()) <= most + 1e-4
    assert float(alphas(pruner).min()) == 0


def test_an_earlier_and_shorter_path_can_be_set() -> None:
    pruner = setup(steps=20, schedule=pp.Schedule(start=0.5, done=0.75))
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    costs = []
    train(pruner.model, optimizer, data(20), lambda: costs.append(share(pruner)["macs"]))
    assert costs[:10] == [1.0] * 10
    assert costs[13] > 0.5 >= costs[14]


def test_a_model_in_double_precision_trains_and_is_proved_to_1e_minus_10() -> None:
    torch.manual_seed(1)
    model = digits_resnet(8).double()
    pruner = pp.Pruner(model, EXAMPLE.double(), macs=0.5, steps=STEPS)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    train(model, optimizer, [(images.double(), labels) for images, labels in data()])
    pruner.export()
    assert max(pruner.proof.values()) <= 1e-10


def test_a_gated_model_compiles_whole_and_once_while_eps_changes() -> None:
    from torch._dynamo.testing import CompileCounter

    pruner = setup()
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    counter = CompileCounter()
    compiled = torch.compile(pruner.model, backend=counter, fullgraph=True)
    train(compiled, optimizer, data())
    assert counter.frame_count == 1
    assert share(pruner)["macs"] <= 0.5
    pruner.export()


# --- looking and resuming -------------------------------------------------------------------------


def test_cost_is_what_the_exported_model_costs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    pruner = prune(digits_resnet(8), STEPS, channels=1, size=8, macs=0.4)
    small = pruner.export()
    with FlopCounterMode(display=False) as counter:
        small.eval()(EXAMPLE)
    assert pruner.cost()["macs"] == counter.get_total_flops() // 2
    assert pruner.cost()["params"] == sum(p.numel() for p in small.parameters())


def test_the_plan_is_plain_data_that_names_the_live_channels() -> None:
    pruner = prune(digits_resnet(8), STEPS, channels=1, size=8, macs=0.4)
    plan = pruner.plan()
    assert list(plan) == list(pruner.gates)
    for name, kept in plan.items():
        values = pruner.gates[name].values()
        assert kept == [index for index in range(len(values)) if values[index] > 0]
        assert all(type(index) is int for index in kept)


def test_the_report_has_the_facts_of_the_run() -> None:
    pruner = prune(digits_resnet(8), STEPS, channels=1, size=8, macs=0.4, multiple_of=2)
    pruner.export()
    report = pruner.report()
    assert report.settings["macs"] == 0.4
    assert report.settings["steps"] == STEPS
    assert report.settings["multiple_of"] == 2
    assert report.before == pruner.graph.cost.original()
    assert report.after == pruner.cost()
    assert {row["name"]: row["after"] for row in report.groups if not row["reason"]} == {
        name: len(kept) for name, kept in pruner.plan().items()
    }
    assert [row["step"] for row in report.history] == list(range(STEPS + 1))
    last = report.history[-1]
    assert last["macs"] == share(pruner)["macs"]
    assert last["closed"] == int((alphas(pruner) == 0).sum())
    assert last["between"] == 0
    assert sum(last["histogram"]) == len(alphas(pruner))
    assert set(report.proof) > {"eval", "train"}


def test_the_report_names_the_multiple_that_was_asked_for() -> None:
    for multiple in (1, 4, 32):  # all groups are narrower than 32
        assert setup(multiple_of=multiple, macs=0.9).report().settings["multiple_of"] == multiple


def resumed(stop: int, name: str, goal: dict[str, float]) -> dict[str, Any]:
    """Train, stop after some steps, resume with new objects, and return the state at the end."""
    pruner = setup(steps=20, **goal)
    optimizer = OPTIMIZERS[name](pruner)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data(20)[:stop])
    file = io.BytesIO()
    states = (pruner.model.state_dict(), optimizer.state_dict(), pruner.state_dict())
    torch.save(states, file)
    file.seek(0)
    states = torch.load(file, weights_only=True)

    pruner = setup(steps=20, **goal)
    optimizer = OPTIMIZERS[name](pruner)
    pruner.attach(optimizer)
    for thing, state in zip((pruner.model, optimizer, pruner), states, strict=True):
        thing.load_state_dict(state)
    train(pruner.model, optimizer, data(20)[stop:])
    return {"model": snapshot(pruner.model), "pruner": pruner}


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize("goal", [{"macs": 0.4}, {"lam": 2000.0}], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_resumed_run_is_bit_equal_to_one_without_a_stop(
    name: str, goal: dict[str, float]
) -> None:
    pruner = setup(steps=20, **goal)
    optimizer = OPTIMIZERS[name](pruner)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data(20))
    closed = [row["closed"] for row in pruner.history]
    closing = [step for step in range(19) if closed[step] < closed[step + 1] and step != 9]
    for stop in (closing[0], closing[-1], 15):  # the budget is met in step 10
        other = resumed(stop, name, goal)
        assert same_state(snapshot(pruner.model), other["model"])
        assert other["pruner"].history == pruner.history
        assert other["pruner"].plan() == pruner.plan()
        assert other["pruner"].step_count == 20
        other["pruner"].export()


def test_a_state_is_a_copy() -> None:
    pruner = setup()
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    state = pruner.state_dict()
    kept = copy.deepcopy(state)
    train(pruner.model, optimizer, data())
    assert state["step"] == 0
    assert state["history"] == kept["history"]
    assert same_state(state["alpha"], kept["alpha"])


def test_a_state_of_another_model_is_refused() -> None:
    model, example = NETS["mlp"]()
    other = pp.Pruner(model, example, macs=0.5, steps=STEPS)
    message = "the groups of the state differ from those of this model"
    with pytest.raises(pp.PruneError, match=message):
        setup().load_state_dict(other.state_dict())


# --- export ---------------------------------------------------------------------------------------


def test_export_leaves_the_gated_model_as_it_is_and_it_trains_on() -> None:
    pruner = setup(steps=STEPS)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data()[:-1])
    twin = setup(steps=STEPS)
    other = sgd(twin)
    twin.attach(other)
    train(twin.model, other, data()[:-1])
    images = torch.randn(4, 1, 8, 8)

    before, training = snapshot(pruner.model), pruner.model.training
    out = copy.deepcopy(pruner.model).eval()(images)
    pruner.export()
    assert pruner.model.training == training
    assert same_state(before, snapshot(pruner.model))
    assert torch.equal(copy.deepcopy(pruner.model).eval()(images), out)
    train(pruner.model, optimizer, data()[-1:])
    train(twin.model, other, data()[-1:])
    assert same_state(snapshot(pruner.model), snapshot(twin.model))


def test_export_twice_gives_two_equal_models_that_share_nothing() -> None:
    pruner = prune(digits_resnet(8), STEPS, channels=1, size=8, macs=0.5)
    one, two = pruner.export(), pruner.export(verify=False)
    assert same_state(snapshot(one), snapshot(two))
    places = [{p.data_ptr() for p in m.parameters()} for m in (one, two, pruner.model)]
    assert not places[0] & places[1] and not places[0] & places[2]


def plain_classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize(
    "name", ["conv_bn_relu_forward", "residual_projection", "unet_transpose", "digits_resnet"]
)
def test_the_exported_model_is_plain_and_of_the_users_class(name: str) -> None:
    model, example = NETS[name]()
    classes = plain_classes(model)
    pruner = pp.Pruner(model, example, macs=0.8, steps=2)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(*example).square().mean().backward()
        optimizer.step()
    small = pruner.export()
    assert plain_classes(small) == classes
    assert not any(parametrize.is_parametrized(m) for m in small.modules())
    assert not any(isinstance(m, pp.Gate) for m in small.modules())
    assert not [key for key in small.state_dict() if "alpha" in key or "parametriz" in key]
    assert all(p.requires_grad and p.is_leaf for p in small.parameters())
    assert sum(p.numel() for p in small.parameters()) == pruner.cost()["params"]


def test_the_exported_model_trains() -> None:
    pruner = prune(digits_resnet(8), STEPS, channels=1, size=8, macs=0.5)
    small = pruner.export()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.05)
    before = snapshot(small)
    train(small, optimizer, data(2))
    assert not same_state(before, snapshot(small))


def test_a_deep_copy_of_a_gated_model_shares_its_gates_within_and_not_without() -> None:
    pruner = prune(digits_resnet(8), STEPS, channels=1, size=8, macs=0.5)
    twin = copy.deepcopy(pruner.model)
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(twin.eval()(images), pruner.model.eval()(images))
    mine = {id(gate) for gate in pruner.gates.values()}
    theirs = {id(m) for m in twin.modules() if isinstance(m, pp.Gate)}
    assert len(theirs) == len(mine)
    assert not mine & theirs
    before = snapshot(pruner.model)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), data(1))
    assert same_state(before, snapshot(pruner.model))


def test_where_float32_rounds_too_coarsely_the_proof_is_made_in_float64(monkeypatch) -> None:
    """As on a GPU with TF32: the comparison in float32 fails, and the one in float64 decides."""
    pruner = prune(digits_resnet(8), STEPS, channels=1, size=8, macs=0.5)
    real = polarprune.surgery.cut_proof.prove_equal

    def coarse(one: nn.Module, *rest: Any) -> Any:
        if next(one.parameters()).dtype == torch.float32:
            raise pp.PruneError("rounded")
        return real(one, *rest)

    monkeypatch.setattr(polarprune.surgery.cut_proof, "prove_equal", coarse)
    pruner.export()
    assert set(pruner.proof) > {"eval, in float64", "train, in float64"}
    assert all(key.endswith(", in float64") for key in pruner.proof)
    assert max(pruner.proof.values()) <= 1e-10


def test_a_wrong_cut_is_refused_in_float64_too(monkeypatch) -> None:
    pruner = prune(digits_resnet(8), STEPS, channels=1, size=8, macs=0.5)
    real = polarprune.training.export.Rebuild

    def wrong(bare: nn.Module, graph: Any, before: Tensor, after: Tensor) -> Any:
        group = next(g for g in graph.prunable.values() if g.size > 1)
        mine = after[group.offset : group.offset + group.size].nonzero().flatten()
        after = after.index_fill(0, group.offset + mine[-1:], False)
        return real(bare, graph, before, after)

    monkeypatch.setattr(polarprune.training.export, "Rebuild", wrong)
    with pytest.raises(pp.PruneError, match="Nothing was exported"):
        pruner.export()


class Keeps(nn.Module):
    """A module that keeps an activation, as for a penalty or a plot."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Conv1d(4, 8, 3), nn.Conv1d(8, 6, 3), nn.Conv1d(6, 2, 1)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.one(x).relu()]
        return self.out(self.two(self.kept[0]).relu())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv1d(4, 12, 3, padding=1), nn.GRU(12, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.conv(x).relu().transpose(1, 2))[0])


def normed() -> nn.Module:
    layer: nn.Module = torch.nn.utils.weight_norm(nn.Conv1d(4, 8, 3))
    return nn.Sequential(layer, nn.ReLU(), nn.Conv1d(8, 6, 1), nn.ReLU(), nn.Conv1d(6, 2, 1))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("compact", [None, "auto"])
@pytest.mark.parametrize("make", [Keeps, Recurrent, normed], ids=lambda make: make.__name__)
def test_activations_that_are_kept_do_not_matter(make: Any, compact: str | None) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 4, 10)
    model(x)  # it has run before, with gradients
    pruner = pp.Pruner(model, x, macs=0.7, steps=40, compact=compact)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.01))
    pruner.attach(optimizer)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(2, 4, 10)).square().mean().backward()
        optimizer.step()
    small = pruner.export()
    assert pruner.cost()["macs"] <= 0.7 * pruner.report().before["macs"]
    assert torch.allclose(small.eval()(x), model.eval()(x), atol=1e-5)


def test_recurrent_layers_can_be_copied_while_they_train() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(2, 4, 10)
    pruner = pp.Pruner(model, x, macs=0.7, steps=4)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.01))
    pruner.attach(optimizer)
    average = None
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 4, 10)).square().mean().backward()
        assert all(p.grad is not None for p in model.gru.parameters())
        optimizer.step()
        average = average or torch.optim.swa_utils.AveragedModel(model)
        if step == 1:
            assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert average is not None and not torch.equal(average(x), model(x))
    small = pruner.export()
    assert not small.gru._forward_hooks and torch.allclose(small.eval()(x), model.eval()(x))


def test_complex_outputs_are_compared_as_numbers() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.two(self.one(x).relu())
            return torch.complex(y[:, :3], y[:, 3:])

    torch.manual_seed(0)
    pruner = pp.Pruner(Complex(), torch.randn(3, 4), lam=1.0, steps=1)
    pruner.param_groups(lr=0.0)
    for k in range(6):
        with torch.no_grad():
            pruner.gates["one"].alpha.copy_(torch.rand(8) + 0.3)
            pruner.gates["one"].alpha[k] = 0
            pruner._run.stepper.put(pruner._run.stepper.last())
        pruner._run.steering.progress.step = 0
        pruner.step()
        pruner.export()
        assert max(pruner.proof.values()) < 1e-5


def test_weight_decay_is_that_of_the_optimizer_unless_it_is_given() -> None:
    pruner = pp.Pruner(*small(), macs=0.5, steps=10)
    made = [
        torch.optim.SGD(pruner.param_groups(lr=0.1), weight_decay=5e-4),
        torch.optim.AdamW(pruner.param_groups(lr=0.1)),
        torch.optim.AdamW(pruner.param_groups(lr=0.1, weight_decay=0.3), weight_decay=0.2),
    ]
    decays = [[group["weight_decay"] for group in one.param_groups] for one in made]
    assert decays == [[5e-4, 0], [0.01, 0], [0.3, 0]]


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.randn(4, 6)


@pytest.mark.parametrize(
    "given",
    [{"schedule": None}, {"schedule": {"done": 0.3}}, {"keep": None}, {"keep": [3]}],
    ids=str,
)
def test_settings_of_the_wrong_kind_change_nothing(given: dict[str, Any]) -> None:
    model, x = small()
    with pytest.raises(pp.PruneError, match=f"^{next(iter(given))}[=:].*give"):
        pp.Pruner(model, x, macs=0.5, steps=10, **given)
    pp.Pruner(model, x, macs=0.5, steps=10)


def test_numbers_of_numpy_are_numbers() -> None:
    pruner = pp.Pruner(*small(), macs=np.float32(0.5), steps=np.int64(10), multiple_of=np.int32(2))
    assert pruner.report().settings == {"macs": 0.5, "steps": 10, "multiple_of": 2}
    assert type(pruner.steps) is int


def test_gates_that_were_replaced_are_not_steered() -> None:
    model, x = small()
    pruner = pp.Pruner(model, x, macs=0.5, steps=10)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(pp.PruneError, match="without assign=True"):
        pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_a_model_may_change_its_precision_after_training(kind: torch.dtype) -> None:
    model, x = small()
    pruner = pp.Pruner(model, x, macs=0.5, steps=10)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.01))
    pruner.attach(optimizer)
    for _ in range(10):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model.to(kind)
    assert {p.dtype for p in pruner.export().parameters()} == {kind}


def test_gates_are_not_steered_in_half_precision() -> None:
    model, x = small()
    pruner = pp.Pruner(model, x, macs=0.5, steps=10)
    model.half()
    with pytest.raises(pp.PruneError, match="before the Pruner is built"):
        pruner.attach(torch.optim.SGD(pruner.param_groups(lr=0.01)))


def test_every_group_keeps_the_channels_that_were_asked_for() -> None:
    pruner = setup(min_channels=3, macs=0.3)
    assert {group.minimum for group in pruner.graph.prunable.values()} == {3}
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data())
    assert min(map(len, pruner.plan().values())) >= 3
    assert share(pruner)["macs"] <= 0.3
