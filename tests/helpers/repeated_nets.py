"""Networks that repeat a block, for uniform widths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.attention_nets import DIM, Block, Packed, Rotary
from tests.helpers.nets import BasicBlock, Bottleneck, cbr, head


class Tokens(nn.Module):
    """Blocks between two linear layers, as in a transformer."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(6, DIM), blocks, nn.Linear(DIM, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks.children():
            x = block(x)
        return self.head(x.mean(1))


class Feed(nn.Module):
    """Two linear layers with a skip connection or without."""

    def __init__(self, skips: bool = True, width: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.skips = nn.Linear(DIM, width), nn.Linear(width, DIM), skips

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.up(x).relu())
        return x + out if self.skips else out


def grouped_queries() -> nn.Module:
    """Return blocks with four heads, two of them for keys and values, as in Llama."""
    return Tokens(nn.ModuleList(Block(Rotary(2)) for _ in range(3)))


def vision_transformer() -> nn.Module:
    """Return blocks with queries, keys and values from one matrix, as in timm."""
    return Tokens(nn.Sequential(*(Block(Packed()) for _ in range(3))))


def feeds(*blocks: nn.Module) -> nn.Module:
    return Tokens(nn.ModuleList(blocks or (Feed(), Feed(), Feed())))


def resnet(width: int = 16, block: Callable[..., nn.Module] = BasicBlock) -> nn.Module:
    """Two stages; the first block of the second one has a projection in its shortcut."""
    wide = 2 * width
    one = nn.Sequential(block(width, width), block(width, width))
    two = nn.Sequential(block(width, wide, 2), block(wide, wide), block(wide, wide))
    return nn.Sequential(cbr(3, width), one, two, head(wide, 10))


def bottlenecks() -> nn.Module:
    blocks = nn.Sequential(Bottleneck(8, 6, 2), Bottleneck(24, 6), Bottleneck(24, 6))
    return nn.Sequential(cbr(3, 8), blocks, head(24, 10))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (resnet, (3, 8, 8)),
    "bottlenecks": (bottlenecks, (3, 8, 8)),
    "grouped queries": (grouped_queries, (7, 6)),
    "vision transformer": (vision_transformer, (7, 6)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network with fixed weights, and an example."""
    make, shape = NETS[name]
    torch.manual_seed(1)
    return make(), torch.randn(2, *shape)


def data(name: str, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return random inputs with random labels, the same for the same arguments."""
    generator = torch.Generator().manual_seed(steps)
    shape = NETS[name][1]
    return [
        (
            torch.randn(8, *shape, generator=generator),
            torch.randint(10, (8,), generator=generator),
        )
        for _ in range(steps)
    ]


def widths(pruner: Any) -> dict[str, set[int]]:
    """Return the different widths in each family: one, if widths are uniform."""
    plan = pruner.plan()
    return {
        family: {len(plan[name]) for name in names}
        for family, names in pruner.graph.families.items()
    }
