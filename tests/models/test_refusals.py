"""Models that used to crash: unusual arguments in their code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from tests.helpers.training import cut_error, sgd

# --- dim arguments on tensors without axes --------------------------------------------------------

NAMED = (
    "sum mean var std prod any all amax amin max min argmax argmin median nanmedian mode cumsum "
    "cumprod cummax cummin logcumsumexp logsumexp softmax log_softmax sort argsort nansum"
)
SCALARS: dict[str, Callable[[Tensor], Any]] = {
    name: lambda t, name=name: getattr(torch, name)(t, 0) for name in NAMED.split()
} | {
    "last axis": lambda t: t.sum(-1),
    "norm": lambda t: torch.norm(t, dim=0),
    "topk": lambda t: t.topk(1, 0),
    "kthvalue": lambda t: t.kthvalue(1, 0),
    "index_select": lambda t: t.index_select(0, torch.tensor([0])),
    "gather": lambda t: t.gather(0, torch.tensor(0)),
    "index_add": lambda t: t.index_add(0, torch.tensor(0), t),
    "unfold": lambda t: t.unfold(0, 1, 1),
    "flip": lambda t: t.flip(0),
    "squeeze": lambda t: t.squeeze(0),
    "transpose": lambda t: t.transpose(0, -1),
    "normalize": lambda t: F.normalize(t, dim=0),
}


class Scaled(nn.Module):
    """A scalar is computed beside the layers."""

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.scale, self.compute = nn.Parameter(torch.tensor(1.5)), compute

    def forward(self, x: Tensor) -> Tensor:
        found = self.compute(self.scale * 2)
        found = found if isinstance(found, Tensor) else found[0]
        return self.last(self.first(x).relu()) + found.to(x.dtype)


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_dim_arguments_on_a_tensor_without_axes_are_followed(name: str) -> None:
    net, x = Scaled(SCALARS[name]).double().eval(), torch.randn(2, 5).double()
    graph = pp.trace(net, x)
    assert graph.prunable["first"].size == 8
    if name not in ("var", "std"):  # NaN, of one element
        assert cut_error(net, graph, (x,)) < 1e-10


# --- rewritten code whose arguments are computed -------------------------------------------------


class Reordered(nn.Module):
    """Code that counts channels, so that it is rewritten, followed by `reform`."""

    def __init__(self, reform: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.reform = nn.Linear(5, 24), nn.Linear(24, 3), reform

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(x).relu().split((10, 14), 1)
        return self.last(self.reform(torch.cat([two, one], 1)).flatten(1))


REFORMS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # and how many units are prunable
    "unflatten, a shape": (6, lambda h: h.unflatten(1, h.view(h.shape[0], 4, -1).shape[1:])),
    "unflatten, a size": (6, lambda h: h.unflatten(1, sizes=h.view(h.shape[0], 4, -1).size()[1:])),
    "unflatten, sizes": (6, lambda h: h.unflatten(1, (4, h.shape[1] // 4))),
    "unflatten, dim": (6, lambda h: h.unflatten(h.dim() - 1, (4, 6))),
    "torch.unflatten": (6, lambda h: torch.unflatten(input=h, dim=1, sizes=(4, 6))),
    "view, a shape": (6, lambda h: h.view(h.view(h.shape[0], 4, -1).shape)),
    "view, by name": (24, lambda h: h.view(size=(h.shape[0], 24))),
    "reshape, by name": (24, lambda h: h.reshape(shape=(h.shape[0], 24))),
    "expand, a shape": (24, lambda h: h.expand(h.shape)),
    "new_full, a shape": (24, lambda h: h.new_full(h.shape, 1.5) * h),
    "full, a shape": (24, lambda h: torch.full(h.shape, 1.5).to(h) * h),
    "new_zeros, a shape": (24, lambda h: h.new_zeros(h.shape) + h),
    "split, dim": (24, lambda h: torch.cat(h.split([10, 14], h.dim() - 1), 1)),
    "split, sizes": (24, lambda h: torch.cat(h.split([h.shape[1] // 3, 16], 1), 1)),
    "narrow, dim": (24, lambda h: torch.cat([h.narrow(h.dim() - 1, k, 12) for k in (0, 12)], 1)),
    "narrow, by name": (24, lambda h: torch.narrow(input=h, dim=1, start=0, length=24)),
    "pad, a shape": (24, lambda h: F.pad(h, h.new_zeros(0, 3).shape)[:, :24]),
    "slice, computed": (24, lambda h: torch.cat([h[:, : h.shape[1] // 2], h[:, 12:]], 1)),
    "size, dim": (24, lambda h: h * h.size(h.dim() - 1) ** -0.5),
    "shape, dim": (24, lambda h: h * h.shape[h.dim() - 1] ** -0.5),
    "pool, by name": (24, lambda h: F.max_pool1d(input=h[..., None], kernel_size=1)),
    "norm, a shape": (0, lambda h: F.layer_norm(h, h.shape[1:])),
    "start, a tensor": (0, lambda h: torch.narrow(h, 1, torch.tensor(0), 24)),
    "sizes, fixed": (0, lambda h: h.unflatten(1, h.new_zeros(4, 6).shape)),
}


@pytest.mark.parametrize("name", REFORMS)
def test_rewritten_code_may_compute_any_argument(name: str) -> None:
    prunable, reform = REFORMS[name]
    net, x = Reordered(reform).double().eval(), torch.randn(2, 5).double()
    graph = pp.trace(net, x)
    assert sum(group.size for group in graph.prunable.values()) == prunable
    assert prunable or graph.groups["first"].reason
    assert cut_error(net, graph, (x,), (torch.randn(3, 5).double(),)) < 1e-10


# --- code that needs more than one channel --------------------------------------------------------

SQUEEZES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda h: h.squeeze(),
    "dim": lambda h: h.squeeze(1),
    "last": lambda h: torch.squeeze(h, -1),
    "dims": lambda h: h.squeeze((0, 1)),
    "in place": lambda h: h.clone().squeeze_(),
    "after a pool": lambda h: F.adaptive_avg_pool1d(h[..., None], 1).squeeze(),
}


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, body: Callable[[Tensor], Any], width: int = 4) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(5, width), body, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x).relu()))


@pytest.mark.parametrize("name", SQUEEZES)
def test_an_axis_that_is_squeezed_keeps_two_channels(name: str) -> None:
    net, x = Between(SQUEEZES[name]).double().eval(), torch.randn(2, 5).double()
    graph = pp.trace(net, x)
    assert (graph.prunable["first"].size, graph.prunable["first"].minimum) == (4, 2)
    assert any("squeeze would take away an axis" in note for note in graph.notes)
    assert cut_error(net, graph, (x,), (torch.randn(3, 5).double(),)) < 1e-10
    with pytest.raises(pp.PruneError, match="the group needs at least 2"):
        pp.shrink(net, graph, {"first": [0]})


def test_an_axis_that_stays_wide_when_squeezed_may_lose_all_but_one_channel() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).squeeze()

    net = nn.Sequential(nn.Conv1d(2, 4, 3), Flat(), nn.Linear(12, 3)).double().eval()
    x = torch.randn(2, 2, 5).double()
    graph = pp.trace(net, x)
    assert (graph.prunable["0"].size, graph.prunable["0"].minimum) == (4, 1)
    assert cut_error(net, graph, (x,)) < 1e-10


def test_a_budget_keeps_what_a_squeeze_needs() -> None:
    net = Between(SQUEEZES["all"], width=8)
    pruner = pp.Pruner(net, torch.randn(2, 5), macs=0.3, steps=20)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        net(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    assert pruner.export().get_submodule("first").out_features == 2


@pytest.mark.parametrize(("unbiased", "least"), [(True, 2), (False, 1)])
def test_an_unbiased_variance_keeps_two_channels(unbiased: bool, least: int) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.var(-1, keepdim=True, unbiased=unbiased) + 1e-3)

    net = nn.Sequential(nn.Linear(5, 6), Norm(), nn.Linear(6, 3)).double().eval()
    graph = pp.trace(net, torch.randn(2, 5).double(), norms=True)
    assert (graph.prunable["0"].size, graph.prunable["0"].minimum) == (6, least)
    assert cut_error(net, graph, (torch.randn(2, 5).double(),)) < 1e-10


class Recurrent(nn.Module):
    def __init__(self, body: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(5, 6), body, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x))[0])


@pytest.mark.parametrize(
    ("body", "width"),
    [
        (lambda: nn.LSTM(6, 8, proj_size=4, batch_first=True), 4),
        (lambda: nn.LSTM(6, 8, proj_size=4, batch_first=True, num_layers=2), 4),
        (lambda: nn.LSTM(6, 8, proj_size=4, batch_first=True, bidirectional=True), 8),
    ],
)
def test_an_lstm_keeps_more_hidden_units_than_projections(body: Any, width: int) -> None:
    net, x = Recurrent(body(), width).double().eval(), torch.randn(2, 4, 5).double()
    graph = pp.trace(net, x)
    assert {name: (g.size, g.minimum) for name, g in graph.prunable.items()} == {
        "first": (6, 1),
        "body": (8, 5),
        "body#2": (4, 1),
    }
    assert cut_error(net, graph, (x,), (torch.randn(3, 7, 5).double(),)) < 1e-10


@pytest.mark.parametrize("unpack", [lambda found: found[0], lambda found: next(iter(found))])
@pytest.mark.parametrize("weights", [False, True])
def test_attention_whose_answer_holds_none_is_followed_in_rewritten_code(
    unpack: Any, weights: bool
) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 3)
            self.attend = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.first(x).split((10, 6), -1)
            h = torch.cat([two, one], -1)
            return self.last(unpack(self.attend(h, h, h, need_weights=weights)))

    net, x = Attends().double().eval(), torch.randn(2, 4, 5).double()
    graph = pp.trace(net, x)
    assert {name: group.size for name, group in graph.prunable.items()} == {
        "first": 16,
        "attend": 4,
        "attend.out_proj": 16,
    }
    assert cut_error(net, graph, (x,), (torch.randn(3, 6, 5).double(),)) < 1e-10


# --- what norms=True would open -------------------------------------------------------------------


class Response(nn.Module):
    """Global response normalization, as in ConvNeXt V2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=1, keepdim=True)
        return self.scale * (x * (size / (size.mean(-1, keepdim=True) + 1e-6))) + self.shift + x


class Gated(nn.Module):
    """The spatial gate of gMLP."""

    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Conv1d(places, places, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return one * self.mix(self.norm(two))


@pytest.mark.parametrize(
    ("norm", "width", "opens"),
    [
        (lambda: Response(12), 12, 12),
        (lambda: Gated(6, 4), 6, 6),
        (lambda: nn.LayerNorm(12), 12, 12),
    ],
)
def test_a_refusal_says_what_norms_would_open(norm: Any, width: int, opens: int) -> None:
    net, x = nn.Sequential(nn.Linear(5, 12), norm(), nn.Linear(width, 3)), torch.randn(2, 4, 5)
    graph = pp.trace(net, x)
    assert not graph.prunable and graph.with_norms == opens
    assert f"note: norms=True may make {opens} more channels prunable" in str(graph)
    with pytest.raises(pp.PruneError, match=f"norms=True may make {opens} channels prunable"):
        pp.Pruner(net, x, macs=0.5, steps=10)
    assert sum(group.size for group in pp.trace(net, x, norms=True).prunable.values()) == opens


def test_norms_are_not_named_where_they_open_nothing() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.LayerNorm(3))
    graph = pp.trace(net, torch.randn(2, 5))
    assert graph.with_norms == 0 and "norms=True" not in str(graph)
