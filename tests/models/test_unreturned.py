"""Code at the end of a forward, results that are not returned, and numbers from a fixed seed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.channels.graph import Graph
from tests.helpers.cuts import Body2d, images, reasons, worst

OTHERS = (images(3, 8), images(2, 12), images(2, 5))


def checked(body: Any) -> Graph:
    """The graph of a network whose cuts were compared."""
    model = Body2d(body)
    graph = pp.trace(model, images(4, 8))
    assert worst(model, graph, images(4, 8), *OTHERS) < 1e-12
    return graph


# --- operations at the end ------------------------------------------------------------------------


def repeated(net: Any, h: Tensor) -> Tensor:
    y = net.rest(h)
    for _ in range(net.a.out_channels):
        y = y * 1.1
    return y  # type: ignore[no-any-return]


def fewer_if_wide(net: Any, h: Tensor) -> Tensor:
    y = net.rest(h)
    return y if len(net.a.weight) > 10 else y * 2  # type: ignore[no-any-return]


def more_if_wide(net: Any, h: Tensor) -> Tensor:
    y = net.rest(h)
    return y * 2 if len(net.a.weight) > 10 else y  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", [repeated, fewer_if_wide, more_if_wide])
def test_operations_that_come_or_go_at_the_end_are_noticed(body: Any) -> None:
    assert checked(body).units == 28  # rewritten as the example ran


@pytest.mark.parametrize("body", [repeated, fewer_if_wide, more_if_wide])
def test_they_freeze_channels_if_the_code_cannot_be_rewritten(body: Any) -> None:
    def unwritable(net: Any, h: Tensor) -> Any:
        with torch.enable_grad():  # which no graph can hold
            h = h + 0
        return body(net, h)

    graph = checked(unwritable)
    assert "a" not in graph.prunable
    wording = r"fewer channels: the cut model (computes|does not compute) "
    assert re.search(wording, graph.groups["a"].reason)


# --- draws ----------------------------------------------------------------------------------------


def own_generator(h: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(h.shape[1], 1, 1, generator=generator, dtype=h.dtype)


def written(h: Tensor, method: str = "normal_") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn: Tensor = getattr(torch.zeros_like(h[:1, :, :1, :1]), method)(generator=generator)
    return drawn


def seed_of_all(h: Tensor) -> Tensor:
    torch.manual_seed(torch.initial_seed() % 7)
    return torch.randn(h.shape[1], 1, 1, dtype=h.dtype)


def forked(h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.rand_like(h[:1, :, :1, :1])


def bernoulli(h: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.bernoulli(torch.full_like(h[:1, :, :1, :1], 0.5), generator=generator)


def permuted(h: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(h.shape[1], generator=generator)[:, None, None] * 0.1


def dropped(h: Tensor) -> Tensor:
    torch.manual_seed(3)
    return nn.functional.dropout(torch.ones_like(h[:1, :, :1, :1]), 0.5, training=True)


DRAWS = {
    "rand": own_generator,
    "normal_": written,
    "uniform_": lambda h: written(h, "uniform_"),
    "bernoulli_": lambda h: written(h, "bernoulli_"),
    "manual_seed": seed_of_all,
    "fork_rng": forked,
    "bernoulli": bernoulli,
    "randperm": permuted,
    "dropout": dropped,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_drawn_with_a_seed_are_a_fixed_vector(draw: str) -> None:
    graph = checked(lambda net, h: net.rest(h * DRAWS[draw](h)))
    assert list(graph.prunable) == ["b"]
    assert "in model (test_unreturned.py" in reasons(graph)


def test_noise_without_a_seed_goes_with_its_channels() -> None:
    model = Body2d(lambda net, h: net.rest(h + torch.randn_like(h) + torch.rand(h.shape[1], 1, 1)))
    assert pp.trace(model, images(4, 8)).units == 28


def test_tracing_leaves_the_random_state_as_it_was() -> None:
    model = Body2d(lambda net, h: net.rest(h * seed_of_all(h)))
    torch.manual_seed(5)
    before, seed = torch.get_rng_state(), torch.initial_seed()
    pp.trace(model, images(4, 8))
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == seed


# --- results that are not returned ----------------------------------------------------------------


class Auxiliary(nn.Module):
    """A second branch whose result is stored, thrown away, or cut out of what is stored."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)
        self.side, self.mix = nn.Conv2d(12, 8, 1), nn.Conv2d(8, 8, 1)
        self.c = nn.Linear(12, 5)
        self.keep, self.aux = keep, None
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).relu()).relu()
        self.keep(self, self.mix(self.side(h).relu()))
        found: Tensor = self.c(h.mean((2, 3)))
        return found


def store(net: Any, y: Tensor) -> None:
    net.aux = y


def store_in_a_list(net: Any, y: Tensor) -> None:
    net.found = [y.mean((2, 3))]


def throw_away(net: Any, y: Tensor) -> None:
    y.mean((2, 3))


def of_fixed_size(net: Any, y: Tensor) -> None:
    y.reshape(-1, 8) * torch.ones(8, dtype=y.dtype)


KEEPS = [store, store_in_a_list, throw_away, of_fixed_size]


@pytest.mark.parametrize("keep", KEEPS)
def test_what_is_not_returned_runs_on_after_a_cut(keep: Any) -> None:
    model = Auxiliary(keep)
    graph = pp.trace(model, images(4, 8))
    assert {"a", "b", "side"} <= graph.prunable.keys() and "mix" not in graph.prunable
    assert worst(model, graph, images(4, 8), *OTHERS) < 1e-12


def test_an_unread_branch_with_fixed_sizes_runs_on_other_batches() -> None:
    class Reshaped(Auxiliary):
        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x).relu()).relu()
            y = self.side(h)
            y.mean((2, 3)).reshape(-1, 8)  # 6 of 8 channels: fits for 4 pictures, not for 3
            found: Tensor = self.c(h.mean((2, 3))) + self.mix(y).mean((1, 2, 3))[:, None]
            return found

    model = Reshaped(store)
    graph = pp.trace(model, images(4, 8))
    assert worst(model, graph, images(4, 8), *OTHERS) < 1e-12


@torch.no_grad()
def test_what_is_stored_is_the_same_after_a_cut() -> None:
    model = Auxiliary(store)
    graph = pp.trace(model, images(4, 8))
    plan = {name: list(range(1, group.size, 2)) for name, group in graph.prunable.items()}
    small = pp.shrink(model, graph, plan)
    for name, kept in plan.items():
        for reader in graph.groups[name].consumers:
            weight = model.get_submodule(reader).weight
            gone = [k for k in range(graph.groups[name].size) if k not in kept]
            weight[:, gone] = 0  # type: ignore[index,operator]
    x = images(3, 8)
    model(x), small(x)
    assert torch.allclose(model.aux, small.aux, rtol=0, atol=1e-12)  # type: ignore[arg-type]


def test_channels_that_are_stored_without_being_returned_are_frozen() -> None:
    class Stored(Auxiliary):
        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x).relu())
            self.aux = h * 2  # type: ignore[assignment]
            found: Tensor = self.c(h.mean((2, 3)))
            return found

    graph = pp.trace(Stored(store), images(4, 8))
    assert list(graph.prunable) == ["a"]
    assert "not returned" in graph.groups["b"].reason


def test_weights_of_heads_that_attention_throws_away_freeze_nothing() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.attention(x, x, x)[0])
            return found

    assert pp.trace(Heads(), torch.randn(2, 5, 16)).groups["attention"].size == 4


def test_closing_what_follows_takes_no_group_below_its_minimum() -> None:
    model = Auxiliary(throw_away)
    graph = pp.trace(model, images(4, 8))
    graph = graph.with_minimum(dict.fromkeys(graph.prunable, 1))
    kept_units = graph.kept_units({"side": [3]})
    kept_units[graph.groups["side"].offset + 3] = False  # what reads b there is closed
    settled = graph.without_unread(graph.kept_units({"a": [5], "b": [7]}) & kept_units)
    for name in ("a", "b"):
        group = graph.groups[name]
        assert int(settled[group.offset : group.offset + group.size].sum()) == 1


def test_training_with_an_unread_branch_ends_in_an_export() -> None:
    model = Auxiliary(throw_away)
    pruner = pp.Pruner(model, images(4, 8), macs=0.3, steps=40)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.02))
    pruner.attach(optimizer)
    for _ in range(40):
        optimizer.zero_grad()
        model(images(4, 8)).square().mean().backward()
        optimizer.step()
    small = pruner.export().eval()
    for x in OTHERS:
        assert torch.allclose(small(x), model.eval()(x), rtol=0, atol=1e-12)
