"""With gate-weighted statistics in norms over channels, pruning the residual stream is exact."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from polarprune.channels.graph import Graph
from polarprune.gates.folding import fold
from polarprune.rewriting.weighted_statistics import weighted_mean
from polarprune.surgery.proof import difference, prove_equal
from tests.helpers.exact import counted
from tests.helpers.nets import randomise
from tests.helpers.norm_nets import NORMS, RMS, WIDTH, Net, made

pytestmark = pytest.mark.usefixtures("shared_traces")


@cache
def traced(name: str, post: bool = False) -> Graph:
    """Return the graph of a model with `norms=True`, traced once."""
    return pp.trace(*made(name, post), norms=True)


def plan_of(graph: Any, seed: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: sorted(torch.randperm(g.size, generator=generator)[: max(1, g.size // 2)].tolist())
        for name, g in graph.prunable.items()
    }


def test_weighted_mean_is_the_mean_over_what_is_open() -> None:
    x = torch.randn(3, 8, 5).double()
    gates = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0]).double()
    expected = x[:, gates.bool()]
    assert weighted_mean(gates, 1, x, 1).allclose(expected.mean(1), rtol=1e-13)
    assert weighted_mean(gates, 1, x, (1, 2), True).allclose(expected.mean((1, 2), True))


@pytest.mark.parametrize("name", NORMS)
def test_stream_is_whole_unless_asked_for(name: str) -> None:
    model, x = made(name)
    graph = pp.trace(model, x)
    assert graph.groups["embed"].frozen and not graph.weights
    least = 2 if name == "var" else 1  # the variance of a sample of one is NaN
    assert traced(name).groups["embed"].minimum == least


@pytest.mark.parametrize("post", [False, True], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("name", NORMS)
def test_cut_stream_equals_masked_stream(name: str, post: bool) -> None:
    (model, x), graph = made(name, post), traced(name, post)
    assert {g.reason for g in graph.groups.values() if g.frozen} == {"part of the model's output"}
    assert graph.prunable["embed"].size == WIDTH
    for seed in range(3):
        plan = plan_of(graph, seed)
        masked = copy.deepcopy(model)
        fold(masked, graph, graph.kept_units(plan).double())
        small = pp.shrink(masked, graph, plan)
        prove_equal(masked, small, x, 1e-12)
        wrong = pp.shrink(masked, graph, {**plan, "embed": plan["embed"][1:]})
        assert difference(masked, wrong, x, training=False) > 1e-4
        assert [type(m).__name__ for m in small.modules()] == [
            type(m).__name__ for m in model.modules()
        ]
        n = torch.tensor([len(kept) for kept in plan.values()])
        claimed = graph.cost.at(n)
        assert counted(small, (x,)) == {key: claimed[key] for key in ("macs", "params")}


@pytest.mark.parametrize("name", NORMS)
def test_half_of_everything_costs_a_quarter(name: str) -> None:
    graph = traced(name)
    n = torch.tensor([g.size // 2 for g in graph.prunable.values()])
    assert graph.cost.share(n)["macs"] < 0.35


@pytest.mark.parametrize("name", NORMS)
def test_pruner_exports_plain_norms(name: str, tmp_path: Any) -> None:
    model, x = made(name)
    pruner = pp.Pruner(model, x, macs=0.4, steps=60, norms=True)
    assert "embed" in pruner.gates
    optimizer = torch.optim.Adam(pruner.param_groups(lr=0.01))
    pruner.attach(optimizer)
    target = torch.randn(4, 3).double()
    for _ in range(60):
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()
    assert all(torch.isfinite(gate.alpha).all() for gate in pruner.gates.values())
    small = pruner.export()
    assert pruner.cost()["macs"] <= 0.4 * pruner.graph.cost.original()["macs"]
    assert not any("polar" in key for key in small.state_dict())
    pp.save(small, tmp_path / "small.safetensors")
    again = pp.load(tmp_path / "small.safetensors", model=made(name)[0])
    assert torch.equal(again.eval()(x), small.eval()(x))


def test_gates_half_open_are_refused_and_nothing_is_lost() -> None:
    """Plain statistics cannot stand for weights between 0 and 1: export raises."""
    model, x = made("layer norm")
    pruner = pp.Pruner(model, x, lam=1e-9, steps=1, norms=True)
    pruner.param_groups(lr=0.1)
    pruner.step()
    with torch.no_grad():
        pruner.gates["embed"].alpha[3] = 1e-4  # ε is 5e-8 at the end
    before = model(x)
    with pytest.raises(pp.PruneError, match="differs"):
        pruner.export()
    assert torch.equal(model(x), before)


def test_mean_that_cannot_be_weighted_stays_whole() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.amax(-1, keepdim=True)

    model = randomise(Net(Odd)).double()
    graph = pp.trace(model, torch.randn(4, 6, 5).double(), norms=True)
    assert "amax mixes channels" in graph.groups["embed"].reason


class Experts(nn.Module):
    """The order of operations depends on the data, and the norm says float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.route = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 2)
        self.norm = RMS(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        normed = self.norm(x.float()).to(x)
        best, out = self.route(normed).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(best == number)
            out.index_add_(0, rows, expert(normed[rows]))
        return self.head(x + out)


@pytest.mark.parametrize("seed", range(3))
def test_stream_between_experts_is_open(seed: int) -> None:
    torch.manual_seed(seed)
    graph = pp.trace(randomise(Experts()), torch.randn(16, 5), norms=True)
    assert {name: group.size for name, group in graph.prunable.items()} == {"embed": WIDTH}
