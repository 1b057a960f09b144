"""Norms over channels with gate-weighted statistics: the residual stream can be pruned, exactly."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from nets import randomise
from polarprune.gates.folding import fold
from polarprune.rewriting.weighted_statistics import weighted_mean
from polarprune.surgery.proof import difference, prove_equal
from test_exact import counted

WIDTH = 12


class RMS(nn.Module):
    """As language models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class ByHand(nn.Module):
    """A layer norm in two means."""

    def forward(self, x: Tensor) -> Tensor:
        middle = x.mean(-1, keepdim=True)
        spread = (x - middle).pow(2).mean(-1, keepdim=True)
        return (x - middle) / torch.sqrt(spread + 1e-5)


class VarMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, dim=-1, unbiased=False, keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-5)


class Var(nn.Module):
    """With the correction of a sample, as torch.var has it if it is not told."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)


class Length(nn.Module):
    """A sum, not a mean: CLIP, SSD."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        if self.own:
            return x / x.square().sum(-1, keepdim=True).sqrt()
        return 3 * F.normalize(x, dim=-1)


class Tokens(nn.Module):
    """Group norm of one group wants channels second."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm, no scale": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "rms norm by hand": lambda: RMS(WIDTH),
    "layer norm by hand": ByHand,
    "var_mean": VarMean,
    "var": Var,
    "length": lambda: Length(True),
    "normalize": lambda: Length(False),
    "group norm": lambda: Tokens(WIDTH),
}


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], post: bool) -> None:
        super().__init__()
        self.one, self.two, self.post = norm(), norm(), post
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        b, n = x.shape[:2]
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.one(x + self.attend(x))
            return self.two(x + self.down(F.gelu(self.up(x))))
        x = x + self.attend(self.one(x))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Net(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], post: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.place = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.blocks = nn.Sequential(Block(norm, post), Block(norm, post))
        self.norm, self.head = norm(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.place)).mean(1))


def made(name: str, post: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return randomise(Net(NORMS[name], post)).double(), torch.randn(4, 6, 5).double()


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
    assert pp.trace(model, x, norms=True).groups["embed"].minimum == least


@pytest.mark.parametrize("post", [False, True], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("name", NORMS)
def test_cut_stream_equals_masked_stream(name: str, post: bool) -> None:
    model, x = made(name, post)
    graph = pp.trace(model, x, norms=True)
    assert {g.reason for g in graph.groups.values() if g.frozen} == {"part of the model's output"}
    assert graph.prunable["embed"].size == WIDTH
    for seed in range(3):
        plan = plan_of(graph, seed)
        masked = copy.deepcopy(model)
        fold(masked, graph, graph.alive(plan).double())
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
    model, x = made(name)
    graph = pp.trace(model, x, norms=True)
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
