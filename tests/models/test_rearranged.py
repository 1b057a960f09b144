"""Channels that are rearranged: in blocks, in rows and columns, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from tests.helpers.training import cut_error, sgd

IMAGES, MORE_IMAGES = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 6, 6)
VECTORS, MORE_VECTORS = torch.randn(2, 5), torch.randn(3, 5)


class Code(nn.Module):
    """Layers by name, and a forward that is given as a function."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def expanded(net: Any, x: Tensor) -> Tensor:
    """Patch expansion: (b, c·4, h, w) becomes (b, c, h·2, w·2), the blocks after the channels."""
    x = net.first(x)
    b, c, h, w = x.shape
    x = x.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
    return net.last(net.middle(x.reshape(b, c // 4, h * 2, w * 2)).relu())


def expanded_before(net: Any, x: Tensor) -> Tensor:
    """The same with the blocks before the channels."""
    x = net.first(x)
    b, c, h, w = x.shape
    x = x.view(b, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2)
    return net.last(net.middle(x.reshape(b, c // 4, h * 2, w * 2)).relu())


def expanded_last(net: Any, x: Tensor) -> Tensor:
    """As in Swin-Unet: channels last."""
    x = net.first(x)
    b, h, w, c = x.shape
    x = x.view(b, h, w, 2, 2, c // 4).permute(0, 1, 3, 2, 4, 5)
    return net.last(x.reshape(b, h * 2, w * 2, c // 4))


def blocks() -> dict[str, nn.Module]:
    return {
        "first": nn.Conv2d(4, 16, 3, padding=1),
        "middle": nn.Conv2d(4, 6, 1),
        "last": nn.Conv2d(6, 2, 1),
    }


def generator(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Code(run, first=nn.Linear(5, 8 * 16), last=nn.Conv2d(8, 3, 1))


def rows(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Code(run, first=nn.Linear(5, 24), middle=nn.Linear(4, 6), last=nn.Linear(6, 2))


Case = tuple[Callable[[], nn.Module], dict[str, int], Tensor, Tensor]
CASES: dict[str, Case] = {
    "pixel shuffle": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 16, 3),
            nn.PixelShuffle(2),
            nn.Conv2d(4, 6, 1),
            nn.ReLU(),
            nn.Conv2d(6, 2, 1),
        ),
        {"0": 4, "2": 6},
        IMAGES,
        MORE_IMAGES,
    ),
    "pixel shuffle, twice": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 16, 3),
            nn.PixelShuffle(2),
            nn.Conv2d(4, 16, 1),
            nn.PixelShuffle(2),
            nn.Conv2d(4, 2, 1),
        ),
        {"0": 4, "2": 4},
        IMAGES,
        MORE_IMAGES,
    ),
    "patch expansion": (
        lambda: Code(expanded, **blocks()),
        {"first": 4, "middle": 6},
        IMAGES,
        MORE_IMAGES,
    ),
    "patch expansion, blocks first": (
        lambda: Code(expanded_before, **blocks()),
        {"first": 4, "middle": 6},
        IMAGES,
        MORE_IMAGES,
    ),
    "patch expansion, channels last": (
        lambda: Code(expanded_last, first=nn.Linear(6, 16), last=nn.Linear(4, 3)),
        {"first": 4},
        IMAGES,
        MORE_IMAGES,
    ),
    "grouped convolution of the input": (
        lambda: nn.Sequential(nn.Conv2d(4, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 2, 1)),
        {"0": 6},
        IMAGES,
        MORE_IMAGES,
    ),
    "several channels for each of the input": (
        lambda: nn.Sequential(nn.Conv2d(4, 12, 3, groups=4), nn.ReLU(), nn.Conv2d(12, 2, 1)),
        {"0": 3},
        IMAGES,
        MORE_IMAGES,
    ),
    "transposed grouped convolution of the input": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 12, 3, groups=2), nn.Conv2d(12, 2, 1)),
        {"0": 6},
        IMAGES,
        MORE_IMAGES,
    ),
    "nn.Unflatten": (
        lambda: nn.Sequential(
            nn.Linear(5, 8 * 16), nn.Unflatten(1, (8, 4, 4)), nn.ReLU(), nn.Conv2d(8, 3, 1)
        ),
        {"0": 8},
        VECTORS,
        MORE_VECTORS,
    ),
    "nn.Unflatten, norm": (
        lambda: nn.Sequential(
            nn.Linear(5, 8 * 16),
            nn.Unflatten(-1, (-1, 4, 4)),
            nn.BatchNorm2d(8),
            nn.ConvTranspose2d(8, 4, 2),
            nn.Conv2d(4, 3, 1),
        ),
        {"0": 8, "3": 4},
        VECTORS,
        MORE_VECTORS,
    ),
    "view": (
        lambda: generator(lambda net, x: net.last(net.first(x).view(x.shape[0], 8, 4, 4).relu())),
        {"first": 8},
        VECTORS,
        MORE_VECTORS,
    ),
    "view, free batch": (
        lambda: generator(lambda net, x: net.last(net.first(x).view(-1, 8, 4, 4).relu())),
        {"first": 8},
        VECTORS,
        MORE_VECTORS,
    ),
    "unflatten": (
        lambda: generator(lambda net, x: net.last(net.first(x).unflatten(1, (8, 4, 4)).relu())),
        {"first": 8},
        VECTORS,
        MORE_VECTORS,
    ),
    "columns": (
        lambda: rows(lambda net, x: net.last(net.middle(net.first(x).reshape(x.shape[0], -1, 4)))),
        {"first": 4, "middle": 6},
        VECTORS,
        MORE_VECTORS,
    ),
    "columns, summed": (
        lambda: rows(
            lambda net, x: net.last(net.middle(net.first(x).reshape(x.shape[0], -1, 4)).sum(1))
        ),
        {"first": 4, "middle": 6},
        VECTORS,
        MORE_VECTORS,
    ),
}


ORDER = [3, 1, 0, 2, 7, 5, 4, 6]
TWICE = [0, 1, 2, 3, 4, 5, 6, 7, 0, 3]
HELD = torch.tensor(ORDER)


class Ordered(Code):
    """A fixed order of channels, in a buffer or in a plain attribute."""

    def __init__(self, run: Any, order: list[int] = ORDER) -> None:
        super().__init__(run, first=nn.Linear(5, 8), last=nn.Linear(len(order), 3))
        self.register_buffer("order", torch.tensor(order))
        self.plain = torch.tensor(order)


ORDERS: dict[str, Callable[[], nn.Module]] = {
    "a buffer": lambda: Ordered(lambda net, x: net.last(net.first(x).relu()[:, net.order])),
    "an attribute": lambda: Ordered(lambda net, x: net.last(net.first(x).relu()[:, net.plain])),
    "a list": lambda: Ordered(lambda net, x: net.last(net.first(x).relu()[:, ORDER])),
    "a tensor outside": lambda: Ordered(lambda net, x: net.last(net.first(x).relu()[..., HELD])),
    "from the end": lambda: Ordered(
        lambda net, x: net.last(net.first(x)[:, [-1, -3, 0, 1, 2, 3, 4, 6]])
    ),
    "index_select": lambda: Ordered(
        lambda net, x: net.last(net.first(x).index_select(-1, net.order))
    ),
    "some twice": lambda: Ordered(lambda net, x: net.last(net.first(x)[:, net.order]), TWICE),
    "some of them": lambda: Ordered(lambda net, x: net.last(net.first(x)[:, net.order]), [5, 1, 2]),
    "back again": lambda: Ordered(
        lambda net, x: net.last(net.first(x)[:, net.order][:, torch.argsort(HELD).tolist()])
    ),
}
FREE = {"some twice": 2 + 6, "some of them": 3}  # units, not all of one kind


@pytest.mark.parametrize("name", ORDERS)
def test_channels_in_a_fixed_order_are_prunable_and_cut_exactly(name: str) -> None:
    net, x, more = ORDERS[name]().double().eval(), VECTORS.double(), MORE_VECTORS.double()
    graph = pp.trace(net, x)
    assert graph.units == FREE.get(name, 8)
    assert cut_error(net, graph, (x,), (more,)) < 1e-10


@pytest.mark.parametrize("name", ["a buffer", "a list", "an attribute"])
def test_channels_in_a_fixed_order_are_trained_exported_and_stored(
    name: str, tmp_path: Path
) -> None:
    pruned(ORDERS[name], VECTORS, MORE_VECTORS, tmp_path)


def test_an_order_that_depends_on_the_input_freezes() -> None:
    net = Ordered(lambda net, x: net.last(net.first(x)[:, x.sum(0).repeat(2)[:8].argsort()]))
    graph = pp.trace(net, VECTORS)
    assert graph.groups["first"].reason.startswith("channels are picked by index")


def test_an_order_that_changes_in_training_is_not_exported_as_it_was() -> None:
    torch.manual_seed(0)  # an order whose kept channels are no mirror image of themselves
    net, more = ORDERS["a buffer"](), torch.randn_like(MORE_VECTORS)
    pruner = pp.Pruner(net, torch.randn_like(VECTORS), macs=0.6, steps=20)
    optimizer = sgd(pruner, lr=0.01)
    pruner.attach(optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        net(more).square().mean().backward()
        optimizer.step()
    net.order.copy_(net.order.flip(0))
    with pytest.raises(pp.PruneError, match="Nothing was exported"):
        pruner.export()


def checked(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, _, example, other = CASES[name]
    return make().double().eval(), example.double(), other.double()


@pytest.mark.parametrize("name", CASES)
def test_rearranged_channels_are_prunable_and_cut_exactly(name: str) -> None:
    net, x, more = checked(name)
    graph = pp.trace(net, x)
    assert {key: group.size for key, group in graph.prunable.items()} == CASES[name][1]
    assert cut_error(net, graph, (x,), (more,)) < 1e-10


@pytest.mark.parametrize(
    "name",
    [
        "pixel shuffle",
        "patch expansion",
        "nn.Unflatten",
        "view",
        "grouped convolution of the input",
        "columns",
    ],
)
def test_rearranged_channels_are_trained_exported_and_stored(name: str, tmp_path: Path) -> None:
    make, _, example, other = CASES[name]
    pruned(make, example, other, tmp_path)


def pruned(
    make: Callable[[], nn.Module], example: Tensor, other: Tensor, path: Path, **settings: Any
) -> nn.Module:
    net = make()
    pruner = pp.Pruner(net, example, macs=0.6, steps=40, **settings)
    optimizer = sgd(pruner, lr=0.01)
    pruner.attach(optimizer)
    for _ in range(40):
        optimizer.zero_grad()
        F.mse_loss(net(other), torch.zeros_like(net(other))).backward()
        optimizer.step()
    small = pruner.export()
    pp.save(small, path / "small.safetensors")
    again = pp.load(path / "small.safetensors", model=make())
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in make().parameters())
    for x in (example, other):
        assert torch.equal(small.eval()(x), again.eval()(x))
    return small


def test_one_channel_for_each_of_the_input_is_frozen_with_the_reason() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    graph = pp.trace(net, IMAGES)
    assert graph.groups["0"].reason.startswith("makes one channel for each channel of its input")


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm((6, 8)),
        lambda: nn.RMSNorm((6, 8)),
        lambda: nn.LayerNorm((6, 8), elementwise_affine=False),
    ],
)
def test_norms_over_places_and_channels_are_weighted(
    norm: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), norm(), nn.Linear(8, 3))

    net, x, more = make().double().eval(), IMAGES.double(), MORE_IMAGES.double()
    assert not pp.trace(net, x).prunable
    graph = pp.trace(net, x, norms=True)
    assert {name: group.size for name, group in graph.prunable.items()} == {"0": 8}
    assert cut_error(net, graph, (x,), (more,)) < 1e-10
    small = pruned(make, IMAGES, MORE_IMAGES, tmp_path, norms=True)
    assert small.get_submodule("1").normalized_shape == (6, small.get_submodule("0").out_features)


def test_norms_over_channels_and_space_are_weighted() -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.LayerNorm((8, 6, 6)), nn.Conv2d(8, 3, 1)).double()
    graph = pp.trace(net.eval(), IMAGES.double(), norms=True)
    assert {name: group.size for name, group in graph.prunable.items()} == {"0": 8}
    assert cut_error(net, graph, (IMAGES.double(),), (MORE_IMAGES.double(),)) < 1e-10
