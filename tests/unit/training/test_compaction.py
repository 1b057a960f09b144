"""`compact()` removes closed channels, and training continues as without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map_only

import polarprune as pp
from polarprune.surgery.cut_proof import prove_cut
from polarprune.surgery.replacement_layers import Constant
from tests.helpers.exact import counted, difference, run
from tests.helpers.nets import NETS, randomise
from tests.helpers.norm_nets import Net

pytestmark = pytest.mark.usefixtures("shared_traces")
Optimizers = Callable[[pp.Pruner], torch.optim.Optimizer]


def sgd(pruner: pp.Pruner) -> torch.optim.Optimizer:
    groups = pruner.param_groups(lr=0.01, weight_decay=1e-3)
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True)


def adam(pruner: pp.Pruner) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pruner.param_groups(lr=1e-3, weight_decay=1e-2), amsgrad=True)


def double(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def close(pruner: pp.Pruner, seed: int, whole: bool = False) -> None:
    """Close random gates; with `whole`, all gates that may close."""
    generator = torch.Generator().manual_seed(seed)
    alpha = pruner._run.stepper.last()
    for group in pruner.graph.prunable.values():
        shut = torch.rand(group.size, generator=generator) < (1.0 if whole else 0.4)
        shut[: max(group.minimum, int(not whole))] = False
        alpha[group.offset : group.offset + group.size][shut] = 0
    with torch.no_grad():
        pruner._run.stepper.put(alpha)
        pruner._run.steering.check(0.0)  # channels that nothing reads close too


def trained(
    name: str, make: Optimizers, compact: tuple[int, ...], steps: int = 6, whole: bool = False
) -> tuple[pp.Pruner, list[Tensor], Any]:
    """Train a run in which gates close at two steps and which is compacted at other steps."""
    model, inputs = NETS[name]()
    inputs = double(inputs)
    pruner = pp.Pruner(model.double(), inputs, lam=1e-9, steps=steps)  # traced as by other tests
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # else other random numbers fall on what is left
    optimizer = make(pruner)
    pruner.attach(optimizer)
    outs: list[Tensor] = []
    for step in range(steps):
        if step in (1, 3):
            close(pruner, step, whole and step == 3)
        if step in compact:
            pruner.compact(verify=step == compact[-1])  # the test compares what all of them give
        optimizer.zero_grad()
        found = [x for x in tree_leaves(run(model, inputs)) if x.is_floating_point()]
        outs = [x.detach() for x in found]
        torch.stack([x.square().mean() for x in found]).sum().backward()
        optimizer.step()
    return pruner, outs, inputs


def open_nets() -> list[str]:
    return [name for name in NETS if "frozen" not in name]


@pytest.mark.parametrize("whole", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("name", open_nets())
def test_training_goes_on_as_if_nothing_had_happened(name: str, whole: bool) -> None:
    make = adam if whole else sgd
    try:
        pruner, outs, inputs = trained(name, make, (), whole=whole)
    except pp.PruneError as error:
        assert "no prunable channels" in str(error)
        return
    other, again, _ = trained(name, make, (1, 2, 4), whole=whole)
    for a, b in zip(outs, again, strict=True):
        assert float((a - b).abs().max()) <= 1e-8 * float(a.abs().max())
    assert other.plan() == pruner.plan() and other.cost() == pruner.cost()
    small, same = pruner.export(verify=False), other.export()  # compared here
    for training in (False, True):
        assert difference(small, same, inputs, training=training) <= 1e-8
    assert counted(same, inputs)["params"] == other.cost()["params"]
    live = sum(len(gate.alpha) for gate in other.gates.values())
    left = sum(p.numel() for p in other.model.parameters()) - live
    assert left == other.cost()["params"]


class Tied(nn.Module):
    """One matrix for input and output words, with torch's attention between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 12)
        self.mix = nn.MultiheadAttention(12, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
        self.out = nn.Linear(12, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.mix(x, x, x, need_weights=False)[0]
        return self.out(x + self.mlp(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    return randomise(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 4),
        )
    ).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(4, (8,), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    images, labels = batch(seed)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def begun(steps: int = 30) -> tuple[pp.Pruner, torch.optim.Optimizer]:
    pruner = pp.Pruner(net(), batch(0)[0], macs=0.4, steps=steps)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    return pruner, optimizer


def test_what_was_put_around_the_model_goes_on() -> None:
    """Compare runs with and without compaction: momentum, a scheduler, averaged weights."""
    losses, weights = [], []
    for compact in (False, True):
        pruner, optimizer = begun()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        average = AveragedModel(pruner.model, use_buffers=True)
        found = []
        for number in range(30):
            found.append(step(pruner.model, optimizer, number))
            schedule.step()
            average.update_parameters(pruner.model)
            if compact and number in (8, 12, 16):
                pruner.compact(copies=[average])
        losses.append(found)
        weights.append(average.module[3].parametrizations.weight.original)
        pruner.export()
    plan = pruner.plan()
    left = weights[0][plan["3"]][:, plan["0"]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)
    assert left.shape == weights[1].shape != weights[0].shape
    assert left.allclose(weights[1], rtol=1e-8)


def test_objects_stay_what_they_are() -> None:
    pruner, optimizer = begun()
    seen: list[torch.Size] = []
    pruner.model[3].register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    pruner.model[0].mark = "mine"  # type: ignore[assignment]
    for number in range(16):
        step(pruner.model, optimizer, number)
    modules = [id(pruner.model[k]) for k in range(9)]
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    pruner.compact()
    assert [id(pruner.model[k]) for k in range(9)] == modules
    assert {id(p) for p in pruner.model.parameters()} <= parameters
    step(pruner.model, optimizer, 16)
    width = len(pruner.plan()["3"])
    assert width < 12 and seen[-1][1] == width == pruner.model[3].out_channels
    assert pruner.model[0].mark == "mine"
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert optimizer.state[p]["momentum_buffer"].shape == p.shape


def test_gradients_that_are_there_are_cut_too() -> None:
    pruner, optimizer = begun()
    for number in range(16):
        step(pruner.model, optimizer, number)
    images, labels = batch(16)
    optimizer.zero_grad()
    F.cross_entropy(pruner.model(images), labels).backward()  # first half of a batch
    pruner.compact()
    F.cross_entropy(pruner.model(images), labels).backward()
    for p in pruner.model.parameters():
        assert p.grad is not None and p.grad.shape == p.shape
    optimizer.step()


def test_nothing_closed_nothing_changed() -> None:
    pruner, _ = begun()
    before = {name: p.clone() for name, p in pruner.model.named_parameters()}
    pruner.compact()
    after = dict(pruner.model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("again", [False, True])
def test_a_run_is_resumed_after_compact(again: bool, tmp_path: Path) -> None:
    pruner, optimizer = begun()
    whole = [step(pruner.model, optimizer, number) for number in range(30)]
    first, optimizer = begun()
    losses = []
    for number in range(18):
        losses.append(step(first.model, optimizer, number))
        if number in (10, 15):
            first.compact()
    state = {
        "pruner": first.state_dict(),
        "model": first.model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other, optimizer = begun()
    other.load_state_dict(state["pruner"])
    other.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for number in range(18, 30):
        losses.append(step(other.model, optimizer, number))
        if again and number == 20:
            other.compact()
    assert losses == pytest.approx(whole, rel=1e-8)
    small = other.export()
    pp.save(small, tmp_path / "small.safetensors")
    same = pp.load(tmp_path / "small.safetensors", model=net())
    images = batch(50)[0]
    assert torch.equal(same.eval()(images), small.eval()(images))


def test_state_that_cannot_be_cut_is_refused_before_anything_changes() -> None:
    pruner, optimizer = begun()
    for number in range(16):
        step(pruner.model, optimizer, number)
    weight = pruner.model[3].parametrizations.weight.original
    optimizer.state[weight]["rows"] = torch.zeros(12)
    shapes = [p.shape for p in pruner.model.parameters()]
    with pytest.raises(pp.PruneError, match="keeps rows of shape"):
        pruner.compact()
    assert [p.shape for p in pruner.model.parameters()] == shapes


@pytest.mark.parametrize("norms", [False, True])
def test_transformers_shrink_while_they_train(norms: bool) -> None:
    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        if norms:
            return randomise(Net(lambda: nn.LayerNorm(12))).double(), torch.randn(4, 6, 5).double()
        return randomise(Tied()).double(), torch.randint(0, 11, (4, 6))

    found = []
    for compact in (False, True):
        model, x = make()
        pruner = pp.Pruner(model, x, macs=0.5, steps=30, norms=norms)
        optimizer = adam(pruner)
        pruner.attach(optimizer)
        for number in range(30):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if compact and number in (9, 13, 17):
                pruner.compact()
        found.append((float(loss.detach()), pruner.plan(), pruner.export()(x)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-8)
    assert found[0][1] == found[1][1]
    assert found[0][2].allclose(found[1][2], rtol=1e-8)


def test_a_copy_of_the_model_has_its_own_weights() -> None:
    pruner, optimizer = begun()
    twin = copy.deepcopy(pruner.model)
    for number in range(16):
        step(pruner.model, optimizer, number)
    pruner.compact(copies=[twin])
    shapes = {name: p.shape for name, p in pruner.model.named_parameters()}
    assert {name: p.shape for name, p in twin.named_parameters()} == shapes
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in pruner.model.parameters()}


def whole_run(compact: str | None) -> tuple[pp.Pruner, list[float], set[int]]:
    pruner = pp.Pruner(net(), batch(0)[0], macs=0.4, steps=60, compact=compact)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    average = AveragedModel(pruner.model)
    pruner.copies.append(average)
    losses, sizes = [], set()
    for number in range(60):
        losses.append(step(pruner.model, optimizer, number))
        average.update_parameters(pruner.model)
        sizes.add(sum(p.numel() for p in pruner.model.parameters()))
    return pruner, losses, sizes


def test_auto_compacts_a_few_times_and_changes_nothing_else() -> None:
    plain, losses, sizes = whole_run(None)
    pruner, same, fewer = whole_run("auto")
    assert same == pytest.approx(losses, rel=1e-8)
    assert len(sizes) == 1 and 2 < len(fewer) <= 6
    live = sum(len(gate.alpha) for gate in pruner.gates.values())
    assert min(fewer) - live == pruner.cost()["params"] == plain.cost()["params"]


def test_another_word_than_auto_is_refused() -> None:
    with pytest.raises(pp.PruneError, match=r"compact='always': give"):
        pp.Pruner(net(), batch(0)[0], macs=0.5, steps=10, compact="always")


def shares_at_which_auto_compacts(pruner: pp.Pruner) -> list[tuple[int, float]]:
    """Return the steps at which shapes changed, and the share of the MACs that was left then."""
    found = []
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    for number in range(pruner.steps):
        before = pruner.compactions
        step(pruner.model, optimizer, number)
        if pruner.compactions > before:
            found.append((number + 1, pruner.history[-1]["macs"]))
    return found


def test_auto_compacts_when_an_eighth_of_the_macs_has_closed_or_the_budget_is_met() -> None:
    pruner = pp.Pruner(net(), batch(0)[0], macs=0.4, steps=60, compact="auto")
    found = shares_at_which_auto_compacts(pruner)
    last = 1.0
    for number, share in found:
        assert share <= (0.95 if number >= 30 else 0.875) * last
        last = share
    assert found[-1] == (30, pruner.history[-1]["macs"])


def test_auto_does_not_compact_when_hardly_any_step_is_left() -> None:
    late = pp.Schedule(done=0.98)
    pruner = pp.Pruner(net(), batch(0)[0], macs=0.4, steps=60, compact="auto", schedule=late)
    found = shares_at_which_auto_compacts(pruner)
    assert found and found[-1][0] < 58
    assert pruner.history[-1]["macs"] < found[-1][1]


class Beside(nn.Module):
    """A layer that reads prunable channels and the model's input, which stays."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(5, 8), nn.Linear(13, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.two(torch.cat([x, self.one(x).relu()], -1)).relu())


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(5, 16), nn.Linear(16, 2)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.out(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("family", "shape", "group"), [(Beside, (3, 5), "one"), (Heads, (2, 6, 5), "attention")]
)
def test_a_weight_may_lose_its_last_gate(
    family: type[nn.Module], shape: tuple[int, ...], group: str
) -> None:
    torch.manual_seed(0)
    model, x = family().double(), torch.randn(shape).double()
    pruner = pp.Pruner(model, x, lam=1.0, steps=2)
    pruner.param_groups(lr=0.0)
    with torch.no_grad():
        pruner.gates[group].alpha.zero_()
        pruner._run.stepper.put(pruner._run.stepper.last())
    pruner.step()
    before = copy.deepcopy(model)
    pruner.compact(optimizer=())
    assert difference(before, model, (x,), training=False) <= 1e-12
    pruner.step()
    assert difference(model, pruner.export(), (x,), training=False) <= 1e-12


def small_net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    return model, torch.randn(8, 6)


def learn(model: nn.Module, optimizers: list[torch.optim.Optimizer], x: Tensor, steps: int) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(x) - x[:, :3]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_the_state_of_every_optimizer_is_cut() -> None:
    model, x = small_net()
    pruner = pp.Pruner(model, x, macs=0.4, steps=60, compact="auto")
    weights, gates = pruner.param_groups(lr=0.05)
    one, two = torch.optim.SGD([weights], momentum=0.9), torch.optim.Adam([gates])
    with pytest.raises(pp.PruneError, match=r"is in none of the optimizers.*attach\(optimizer, "):
        pruner.attach(two)
    pruner.attach(two, one)
    learn(model, [one, two], x, 60)
    assert pruner.compactions and pruner.cost()["macs"] <= 0.4 * pruner.report().before["macs"]
    for optimizer in (one, two):
        for parameter, state in optimizer.state.items():
            assert all(v.shape in (parameter.shape, ()) for v in state.values())
    pruner.export()


def test_an_optimizer_that_is_not_known_is_asked_for() -> None:
    model, x = small_net()
    pruner = pp.Pruner(model, x, macs=0.4, steps=60)
    weights, gates = pruner.param_groups(lr=0.05)
    one, two = torch.optim.SGD([weights], momentum=0.9), torch.optim.Adam([gates])
    pruner.attach(two)
    learn(model, [one, two], x, 40)
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(pp.PruneError, match=r"compact\(optimizer=\[...\]\)"):
        pruner.compact()
    assert [p.shape for p in model.parameters()] == shapes
    pruner.compact(optimizer=one)
    assert [p.shape for p in model.parameters()] != shapes
    learn(model, [one, two], x, 20)
    pruner.export()


def test_a_training_does_not_end_because_nothing_can_be_cut() -> None:
    model, x = small_net()
    pruner = pp.Pruner(model, x, macs=0.4, steps=60, compact="auto")
    optimizer = torch.optim.Adafactor(pruner.param_groups(lr=0.05, weight_decay=0.0))
    pruner.attach(optimizer)
    with pytest.warns(UserWarning, match="turned off.*cannot be cut"):
        learn(model, [optimizer], x, 60)
    assert not pruner.compactions
    pruner.export()


def test_compact_inside_autocast_is_proved_without_it() -> None:
    model, x = small_net()
    pruner = pp.Pruner(model, x, macs=0.4, steps=60, compact="auto")
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05))
    pruner.attach(optimizer)
    with torch.autocast("cpu", dtype=torch.float16):
        learn(model, [optimizer], x, 60)
    assert pruner.compactions


def test_what_is_no_copy_is_refused_before_anything_is_cut() -> None:
    model, x = small_net()
    pruner = pp.Pruner(model, x, macs=0.4, steps=60)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05))
    pruner.attach(optimizer)
    learn(model, [optimizer], x, 40)
    good, bad = copy.deepcopy(model), small_net()[0]
    shapes = [p.shape for p in good.parameters()]
    with pytest.raises(pp.PruneError, match=r"not a copy of the gated model.*Nothing was changed"):
        pruner.compact(copies=[good, bad])
    assert [p.shape for p in good.parameters()] == [p.shape for p in model.parameters()] == shapes
    pruner.compact(copies=[good])
    assert [p.shape for p in good.parameters()] == [p.shape for p in model.parameters()] != shapes


def test_averages_are_brought_to_the_widths_of_a_state() -> None:
    model, x = small_net()
    pruner = pp.Pruner(model, x, macs=0.4, steps=60, compact="auto")
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05))
    pruner.attach(optimizer)
    average = AveragedModel(model)
    pruner.copies = [average]
    learn(model, [optimizer], x, 50)
    assert pruner.compactions
    states = [m.state_dict() for m in (pruner, model, average)]
    model, x = small_net()
    again = pp.Pruner(model, x, macs=0.4, steps=60, compact="auto")
    average = AveragedModel(model)
    again.copies = [average]
    for part, state in zip((again, model, average), states, strict=True):
        part.load_state_dict(state)


@pytest.mark.parametrize("missing", ["present", "stepper", "landing"])
def test_a_state_that_is_not_whole_changes_nothing(missing: str) -> None:
    model, x = small_net()
    pruner = pp.Pruner(model, x, macs=0.4, steps=60)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05))
    pruner.attach(optimizer)
    learn(model, [optimizer], x, 40)
    pruner.compact()
    state = pruner.state_dict()
    del state[missing]
    model, x = small_net()
    again = pp.Pruner(model, x, macs=0.4, steps=60)
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(pp.PruneError, match=f"has no '{missing}'.*Nothing was changed"):
        again.load_state_dict(state)
    assert again.step_count == 0 and [p.shape for p in model.parameters()] == shapes


class Twice(nn.Module):
    """Two branches, of which one may close; its last layer has no bias, and a norm follows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.inner = nn.Conv2d(8, 6, 1)
        self.last = nn.Conv2d(6, 8, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.norm(self.last(self.inner(x).relu()))
        return self.head(x.relu().mean((2, 3)))


@pytest.mark.parametrize("compacted", [False, True])
def test_where_float32_is_too_coarse_a_closed_layer_is_compared_in_float64(
    compacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    pruner = pp.Pruner(Twice(), x, lam=1e-9, steps=1)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    optimizer.step()
    alpha = pruner._run.stepper.last()
    group = pruner.graph.prunable["inner"]
    alpha[group.offset : group.offset + group.size] = 0
    with torch.no_grad():
        pruner._run.stepper.put(alpha)
    if compacted:
        pruner.compact()
    coarse = f"polarprune.training.{'export.prove_cut' if compacted else 'compaction._TOLERANCE'}"
    exact = partial(prove_cut, tolerance=-1.0)  # in float32 nothing is equal enough
    monkeypatch.setattr(coarse, exact if compacted else -1.0)
    if compacted:
        pruner.export()
        assert "train, in float64" in pruner.proof
    else:
        pruner.compact()
        assert isinstance(pruner.model.last, Constant) and pruner.compactions == 1


def test_a_model_that_was_compacted_may_change_its_precision_before_the_export() -> None:
    pruner, optimizer = begun()
    for number in range(30):
        step(pruner.model, optimizer, number)
        if number == 20:
            pruner.compact()
    pruner.model.float()
    assert {p.dtype for p in pruner.export().parameters()} == {torch.float32}
