"""Networks whose code has sizes written into it, and what should be prunable in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.nets import cbr, head, randomise
from tests.helpers.random_cuts import images

OUTPUT = "part of the model's output"
PART = "written into part of another tensor"


# --------------------------------------------------------------------------------------------------
# attention


def window_attention(
    x: Tensor,
    qkv_weight: Tensor,
    proj_weight: Tensor,
    bias: Tensor,
    window: list[int],
    num_heads: int,
    shift: list[int],
    qkv_bias: Tensor,
    proj_bias: Tensor,
) -> Tensor:
    """Windows as in torchvision's Swin transformer: all numbers come from sizes of the input."""
    batch, height, width, channels = x.shape
    right, below = (-width) % window[1], (-height) % window[0]
    x = F.pad(x, (0, 0, 0, right, 0, below))
    _, tall, wide, _ = x.shape
    shift = shift.copy()
    if window[0] >= tall:
        shift[0] = 0
    if sum(shift) > 0:
        x = torch.roll(x, shifts=(-shift[0], -shift[1]), dims=(1, 2))
    number = (tall // window[0]) * (wide // window[1])
    x = x.view(batch, tall // window[0], window[0], wide // window[1], window[1], channels)
    x = x.permute(0, 1, 3, 2, 4, 5).reshape(batch * number, window[0] * window[1], channels)
    qkv = F.linear(x, qkv_weight, qkv_bias)
    qkv = qkv.reshape(x.size(0), x.size(1), 3, num_heads, channels // num_heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q = q * (channels // num_heads) ** -0.5
    scores = q.matmul(k.transpose(-2, -1)) + bias
    if sum(shift) > 0:
        parts = x.new_zeros((tall, wide))
        count = 0
        for rows in ((0, -window[0]), (-window[0], -shift[0]), (-shift[0], None)):
            for columns in ((0, -window[1]), (-window[1], -shift[1]), (-shift[1], None)):
                parts[rows[0] : rows[1], columns[0] : columns[1]] = count
                count += 1
        parts = parts.view(tall // window[0], window[0], wide // window[1], window[1])
        parts = parts.permute(0, 2, 1, 3).reshape(number, window[0] * window[1])
        mask = parts.unsqueeze(1) - parts.unsqueeze(2)
        mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        scores = scores.view(batch, number, num_heads, x.size(1), x.size(1))
        scores = scores + mask.unsqueeze(1).unsqueeze(0)
        scores = scores.view(-1, num_heads, x.size(1), x.size(1))
    x = F.softmax(scores, dim=-1).matmul(v).transpose(1, 2).reshape(x.size(0), x.size(1), channels)
    x = F.linear(x, proj_weight, proj_bias)
    x = x.view(batch, tall // window[0], wide // window[1], window[0], window[1], channels)
    x = x.permute(0, 1, 3, 2, 4, 5).reshape(batch, tall, wide, channels)
    if sum(shift) > 0:
        x = torch.roll(x, shifts=(shift[0], shift[1]), dims=(1, 2))
    return x[:, :height, :width, :].contiguous()


class Window(nn.Module):
    def __init__(self, dim: int = 12, heads: int = 4, shift: int = 1) -> None:
        super().__init__()
        self.window, self.shift, self.num_heads = [3, 3], [shift, shift], heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.randn(25, heads))
        place = torch.stack(torch.meshgrid(*[torch.arange(3)] * 2, indexing="ij")).flatten(1)
        apart = (place[:, :, None] - place[:, None]) + 2
        self.register_buffer("index", (apart[0] * 5 + apart[1]).flatten())

    def bias(self) -> Tensor:
        area = self.window[0] * self.window[1]
        near = self.table[self.index].view(area, area, -1)
        return near.permute(2, 0, 1).contiguous().unsqueeze(0)

    def forward(self, x: Tensor) -> Tensor:
        return window_attention(
            x,
            self.qkv.weight,
            self.proj.weight,
            self.bias(),
            self.window,
            self.num_heads,
            self.shift,
            self.qkv.bias,
            self.proj.bias,
        )


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, as in GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Causal(nn.Module):
    """Attention as in GPT-2."""

    def __init__(self, dim: int = 12, heads: int = 4) -> None:
        super().__init__()
        self.embed_dim = self.split_size = dim
        self.num_heads, self.head_dim = heads, dim // heads
        self.c_attn, self.c_proj = Conv1D(3 * dim, dim), Conv1D(dim, dim)
        self.register_buffer("past", torch.ones(1, 1, 16, 16).tril().bool(), persistent=False)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view((*x.shape[:-1], self.num_heads, self.head_dim)).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = self.split_heads(q), self.split_heads(k), self.split_heads(v)
        scores = torch.matmul(q, k.transpose(-1, -2)) / (v.size(-1) ** 0.5)
        length = k.size(-2)
        least = torch.finfo(scores.dtype).min
        lowest = torch.full([], least, dtype=scores.dtype, device=scores.device)
        scores = torch.where(self.past[:, :, :length, :length], scores, lowest)
        out = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).contiguous()
        return self.c_proj(out.view((*out.size()[:-2], self.num_heads * self.head_dim)))


class Einsum(nn.Module):
    def __init__(self, dim: int = 12, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, self.heads, c // self.heads) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", scores, v).reshape(b, n, c))


class Block(nn.Module):
    """A layer norm freezes the stream; heads are prunable."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm, self.attention = nn.Linear(5, 12), nn.LayerNorm(12), attention
        self.tail = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.tail(x + self.attention(self.norm(x)))


# --------------------------------------------------------------------------------------------------
# convolutional code


class Slices(nn.Module):
    """Channels are last, and are sliced by numbers with an ellipsis."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.mix = 3, nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = torch.cat([self.mix(x[..., : self.n]), x[..., self.n :]], -1)
        return x.permute(0, 3, 1, 2)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 3

    def forward(self, x: Tensor) -> Tensor:
        rest = x.size(1) - self.n
        return torch.cat([x.narrow(1, self.n, rest), x.narrow(1, 0, self.n).relu()], 1)


class Unflatten(nn.Module):
    """Two halves of the channels, the second gates the first."""

    def __init__(self) -> None:
        super().__init__()
        self.half = 4

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, self.half))
        return x[:, 0] * x[:, 1].sigmoid()


class Expand(nn.Module):
    """A squeezed map that is expanded over a fixed number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.weight = 8, nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.expand(x.size(0), self.c, *x.shape[2:])


class Zeros(nn.Module):
    """A recurrent state that starts with zeros of a hard-coded width."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.new = 8, nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.size(0), self.c, *x.shape[2:], dtype=x.dtype, device=x.device)
        for _ in range(2):
            state = torch.tanh(self.new(torch.cat([state, x], 1)))
        return state


class Pad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extra, self.body = 2, nn.Conv2d(8, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, self.extra)) + self.body(x)


class Scale(nn.Module):
    """The scale was trained with the full width, and has to stay."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.shape[1] ** -0.5


class Odd(nn.Module):
    """Code that takes one of two branches depending on a size, and slices channels in between."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1, 0, 1))
        a, b = x.split([3, x.shape[1] - 3], 1)
        return F.max_pool2d(torch.cat([b, a], 1), 2)


class Assign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.size(0), 10, *x.shape[2:])
        out[:, :4] = self.a(x)
        out[:, 4:] = self.b(x)
        return out


class Rows(nn.Module):
    """Item assignment along an axis that is not cut."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, :, 1:] = x[:, :, :-1]
        out[..., 0] = 1.0
        return out


class Mixed(nn.Module):
    """A pointwise convolution written with `einsum`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bchw,dc->bdhw", x, self.weight)


class Modes(nn.Module):
    """Noise in train mode only, and a hard-coded split, so that two graphs are needed."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split([3, 5], 1)
        if self.training:
            a = a * 1.5
        return torch.cat([b, a], 1)


# --------------------------------------------------------------------------------------------------
# the cases


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of the input
    opened: dict[str, int]
    whole: dict[str, str]
    rewritten: tuple[str, ...] = ()  # modules whose code was rewritten


def attention(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    group: str,
    *rewritten: str,
    whole: dict[str, str] | None = None,
) -> Case:
    whole = {"stem": "layer norm mixes channels", "tail": OUTPUT, **(whole or {})}
    return Case(lambda: Block(make()), shape, {group: 4}, whole, rewritten)


def conv(
    make: Callable[[], nn.Module],
    after: int,
    opened: dict[str, int],
    *rewritten: str,
    size: int = 6,
    whole: dict[str, str] | None = None,
) -> Case:
    def net() -> nn.Module:
        return nn.Sequential(cbr(3, 8), make(), cbr(after, 6), head(6))

    whole = {**(whole or {}), "3.2": OUTPUT}
    return Case(net, (2, 3, size, size), {**opened, "2.0": 6}, whole, rewritten)


CASES = {
    "windows": attention(Window, (2, 5, 7, 5), "attention.qkv", "attention"),
    "windows, not shifted": attention(
        lambda: Window(shift=0), (2, 6, 6, 5), "attention.qkv", "attention"
    ),
    "gpt2": attention(Causal, (2, 7, 5), "attention.c_attn"),
    "einsum of heads": attention(Einsum, (2, 7, 5), "attention.q", "attention"),
    "slices": conv(Slices, 10, {"0.0": 3, "0.0#2": 5, "1.mix": 5}, "1"),
    "narrow": conv(Narrow, 8, {"0.0": 8}, "1"),
    "unflatten": conv(Unflatten, 4, {"0.0": 4}),
    "expand": conv(Expand, 8, {"0.0": 8}),
    "zeros": conv(Zeros, 8, {"0.0": 8, "1.new": 8}),
    "pad": conv(Pad, 10, {"0.0": 8, "1.body": 2}, "1"),
    "scale": conv(Scale, 8, {"0.0": 8}, "1"),
    "odd": conv(Odd, 8, {"0.0": 8}, "1", size=7),
    "assign": conv(Assign, 10, {"0.0": 8}, whole={"1.a": PART, "1.b": "combined with a tensor"}),
    "rows": conv(Rows, 8, {"0.0": 8}),
    "einsum": conv(Mixed, 10, {"0.0": 8, "1": 10}),
    "modes": conv(Modes, 8, {"0.0": 8}, "1"),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return randomise(CASES[name].make()).double(), images(*CASES[name].shape)
