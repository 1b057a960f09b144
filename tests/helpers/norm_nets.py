"""A small transformer with any of several norms over its channels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.nets import randomise

WIDTH = 12


class RMS(nn.Module):
    """RMS norm as language models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class ByHand(nn.Module):
    """A layer norm written with two means."""

    def forward(self, x: Tensor) -> Tensor:
        middle = x.mean(-1, keepdim=True)
        spread = (x - middle).pow(2).mean(-1, keepdim=True)
        return (x - middle) / torch.sqrt(spread + 1e-5)


class VarMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, dim=-1, unbiased=False, keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-5)


class Var(nn.Module):
    """A norm with Bessel's correction, which is the default of torch.var."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)


class Length(nn.Module):
    """A norm that divides by the root of a sum instead of a mean, as in CLIP and SSD."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        if self.own:
            return x / x.square().sum(-1, keepdim=True).sqrt()
        return 3 * F.normalize(x, dim=-1)


class Tokens(nn.Module):
    """Group norm with one group, which needs the channels on the second axis."""

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
