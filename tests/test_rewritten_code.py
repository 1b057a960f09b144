"""Code that bakes in sizes: it follows by its attributes, or is rewritten, or stays whole.

Whatever way was taken, what comes back is still the user's module: it computes the same at another
batch size, trains, is with_weights_of, saved, loaded and exported like any other.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import polarprune as pp
from nets import cbr, head, randomise
from polarprune.files.untrusted.checksum import BLANK, signed
from polarprune.rewriting import (
    capture,
    installed_forward,
    stored_graphs,
    symbolic_graphs,
)
from polarprune.rewriting.captured_forward import CapturedForward, Refused
from polarprune.surgery.proof import difference, prove_equal
from test_awkward import Cut, cut_at_random, images, trains
from test_exact import VARIANTS, pruner_of, set_gates

OUTPUT = "part of the model's output"
PART = "written into part of another tensor"
PLACES = {"attention": "meets a tensor", "attention#2": "no layer merges"}  # of the causal mask


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
    """As in torchvision's Swin transformer: everything by sizes of the input."""
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
            x, self.qkv.weight, self.proj.weight, self.bias(), self.window, self.num_heads,
            self.shift, self.qkv.bias, self.proj.bias,
        )  # fmt: skip


class Conv1D(nn.Module):
    """A linear layer the other way round, as in GPT-2."""

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
    """A layer norm holds the stream; heads are open."""

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
    """Channels last, and cut by numbers with an ellipsis."""

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
    """A squeezed map, spread over the channels again by number."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.weight = 8, nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.expand(x.size(0), self.c, *x.shape[2:])


class Zeros(nn.Module):
    """A recurrent state that starts at zeros of a width that is written down."""

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
    """Code that looks at a size and goes one of two ways, and cuts channels in between."""

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
    """A pointwise convolution as a product of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bchw,dc->bdhw", x, self.weight)


class Modes(nn.Module):
    """Noise in train mode only, and a baked split: two graphs."""

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
    "assign": conv(Assign, 10, {"0.0": 8}, whole={"1.a": PART, "1.b": "meets a tensor"}),
    "rows": conv(Rows, 8, {"0.0": 8}),
    "einsum": conv(Mixed, 10, {"0.0": 8, "1": 10}),
    "modes": conv(Modes, 8, {"0.0": 8}, "1"),
}
every_case = pytest.mark.parametrize("name", CASES)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return randomise(CASES[name].make()).double(), images(*CASES[name].shape)


@cache
def shrunk(name: str) -> Cut:
    model, x = made(name)
    return cut_at_random(model, pp.trace(model, x), (x,))


@cache
def exported(name: str) -> Cut:
    """The same by training with gates: `masked` is the gated model."""
    pruner = pruner_of(*made(name))
    set_gates(pruner, VARIANTS["half"], name)
    small = pruner.export()
    return Cut(pruner.graph, pruner.plan(), pruner.model, small)


def cuts(name: str) -> list[Cut]:
    return [shrunk(name), exported(name)]


@every_case
def test_what_can_be_followed_is_open(name: str) -> None:
    case, graph = CASES[name], shrunk(name).graph
    assert {group: g.size for group, g in graph.prunable.items()} == case.opened
    whole = {group: g.reason for group, g in graph.groups.items() if g.frozen}
    assert whole.keys() == case.whole.keys()
    assert all(case.whole[group] in whole[group] for group in whole)
    assert set(case.rewritten) <= set(graph.rewritten)
    assert graph.unknown == {}


@every_case
@pytest.mark.parametrize("batch", [1, 3])
def test_another_batch_size_gives_what_the_original_gives(name: str, batch: int) -> None:
    other = images(batch, *CASES[name].shape[1:])
    for this in cuts(name):
        modes = {"eval", "train"}
        assert prove_equal(this.masked, this.small, (other,), 1e-10).keys() == modes


@every_case
def test_what_comes_back_is_of_the_class_of_the_user(name: str) -> None:
    model, _ = made(name)
    for this in cuts(name):
        small = dict(this.small.named_modules())
        assert small.keys() == dict(model.named_modules()).keys()
        for path, module in model.named_modules():
            assert isinstance(small[path], type(module))
            assert type(small[path]).__name__ == type(module).__name__


@every_case
def test_what_comes_back_trains(name: str) -> None:
    for this in cuts(name):
        trains(this.small, (images(*CASES[name].shape),))


@every_case
def test_what_comes_back_is_copied_saved_and_loaded(name: str, tmp_path: Path) -> None:
    x = images(*CASES[name].shape)
    for this in cuts(name):
        pp.save(this.small, tmp_path / "small.safetensors")
        torch.manual_seed(1)
        fresh = randomise(CASES[name].make()).double()
        filled = copy.deepcopy(this.small)
        for parameter in filled.parameters():
            nn.init.zeros_(parameter)
        filled.load_state_dict(this.small.state_dict())
        again = pp.load(tmp_path / "small.safetensors", model=fresh)
        for other in (again, filled, copy.deepcopy(again)):
            for training in (False, True):
                assert difference(this.small, other, (x,), training=training) == 0


@every_case
def test_what_comes_back_is_exported_by_torch(name: str) -> None:
    x = images(*CASES[name].shape)
    small = shrunk(name).small.eval()
    program = torch.export.export(small, (x,), strict=False)
    assert torch.allclose(program.module()(x), small(x), rtol=1e-10, atol=1e-12)


def test_scale_that_was_computed_from_a_width_keeps_its_value() -> None:
    this = shrunk("scale")
    x = images(2, this.small[0][0].out_channels, 3, 3)
    assert torch.allclose(this.small[1](x), x * 8**-0.5, rtol=1e-12)


def test_graphs_of_train_and_eval_mode_are_kept_apart() -> None:
    this = shrunk("modes")
    x = images(2, this.small[0][0].out_channels, 3, 3)
    width = sum(channel < 3 for channel in this.plan["0.0"])
    assert width
    one, other = this.small.train()[1](x), this.small.eval()[1](x)
    assert torch.allclose(one[:, -width:], 1.5 * other[:, -width:])
    assert torch.equal(one[:, :-width], other[:, :-width])


# --------------------------------------------------------------------------------------------------
# code that looks at sizes and values


class Inspection(nn.Module):
    def __init__(self, look: Callable[[Inspection, Tensor], Tensor]) -> None:
        super().__init__()
        self.look, self.c = look, 8

    def forward(self, x: Tensor) -> Tensor:
        return self.look(self, x)


def swap(x: Tensor) -> Tensor:
    """Code that counts channels, and so has to be rewritten."""
    a, b = x.split([3, x.shape[1] - 3], 1)
    return torch.cat([b, a], 1)


def tokens(x: Tensor, width: int) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    return F.gelu(x.reshape(-1, width)).view_as(x).permute(0, 3, 1, 2)


def part(x: Tensor, size: int) -> Tensor:
    return F.interpolate(x, size=(size, x.shape[3]))


Looks = dict[str, Callable[[Inspection, Tensor], Tensor]]
RIGHT: Looks = {
    "root of the batch": lambda self, x: swap(x) / math.sqrt(x.shape[0]),
    "root of the width": lambda self, x: swap(x) / math.sqrt(x.shape[1]),
    "quarter of the height": lambda self, x: part(swap(x), math.ceil(x.shape[2] / 4)),
    "lower half": lambda self, x: swap(x)[:, :, x.shape[2] // 2 :],
    "ramp over rows": lambda self, x: swap(x) * torch.arange(x.shape[2]).to(x)[:, None],
    "ones of a list": lambda self, x: swap(x) + x.new_ones([x.shape[0], 1, *x.shape[2:]]),
    "branch on the width": lambda self, x: swap(x) * 2 if x.shape[1] > 5 else swap(x),
    "attribute in a scale": lambda self, x: swap(x) * self.c**-0.5,
    "number of elements": lambda self, x: x / x.numel(),
}
HARD: Looks = {
    "batch as a float": lambda self, x: swap(x) / float(x.shape[0]),
    "length": lambda self, x: swap(x) * len(x),
    "loop over the batch": lambda self, x: torch.stack([swap(x)[i] for i in range(x.shape[0])]),
    "iteration": lambda self, x: torch.stack(list(swap(x))),
    "unbind": lambda self, x: torch.stack(list(swap(x).unbind(0))),
    "branch on the batch": lambda self, x: swap(x) * (2 if x.shape[0] == 2 else 1),
    "branch on a remainder": lambda self, x: swap(x) * (2 if x.shape[-1] % 3 == 0 else 1),
    "whole part of the height": lambda self, x: part(swap(x), int(x.shape[2] * 1.5)),
    "smaller of two": lambda self, x: swap(x)[..., : min(x.shape[-1], 7)],
    "comparison of shapes": lambda self, x: swap(x) * (2 if x.shape[2:] == (6, 6) else 1),
    "branch on a value": lambda self, x: swap(x) * (2 if x[0, 0, 0, 0] > 0.1 else 1),
    "largest value as a float": lambda self, x: swap(x) * float(x.max()),
    "largest value as a number": lambda self, x: swap(x) * x.max().item(),
    "tokens by attribute": lambda self, x: tokens(x, self.c),
    "tokens by number": lambda self, x: tokens(x, 8),
    "limit that is seldom met": lambda self, x: x.clamp(max=x.shape[1] * 10.0),
    "tensor of the width": lambda self, x: x * torch.tensor(x.shape[1]).to(x),
    "new tensor of the width": lambda self, x: x * x.new_tensor(x.shape[1]),
}  # fmt: skip


def rows(x: Tensor, count: int) -> Tensor:
    """Statistics of so many rows of the batch."""
    y = x.reshape(count, -1)
    return ((y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1e-5)).view(x.shape)


MIXED: Looks = {  # numbers made of a width and of something that the next input may change
    "batch and width": lambda self, x: rows(swap(x), x.shape[0] * x.shape[1]),
    "batch and a number": lambda self, x: rows(x, x.shape[0] * 8),
    "a number and batch": lambda self, x: rows(x, 8 * x.shape[0]),
    "batch and groups": lambda self, x: rows(x, x.shape[0] * 4),
    "width, height and width": lambda self, x: x / (x.shape[1] * x.shape[2] * x.shape[3]),
    "a part of the shape": lambda self, x: swap(x) / math.prod(x.shape[1:]),
    "the last of a part": lambda self, x: swap(x) / (x.shape[:2][-1] * x.shape[2:][0]),
    "width and height in a root": lambda self, x: swap(x) * (x.shape[1] * x.shape[2]) ** -0.5,
}
LOOKS = {**RIGHT, **HARD, **MIXED}


@pytest.mark.parametrize("look", [*LOOKS.values()], ids=[*LOOKS])
def test_code_that_looks_is_right_for_other_inputs_or_refuses_them(
    look: Callable[[Inspection, Tensor], Tensor],
) -> None:
    """Other batches, images and values than the example's: equal, or one clear PruneError."""
    net = nn.Sequential(cbr(3, 8), Inspection(look), nn.Conv2d(8, 6, 1), nn.ReLU(), head(6))
    model, example = randomise(net).double(), images(2, 3, 6, 6)
    graph = pp.trace(model, example)
    assert graph.prunable["2"].size == 6
    shapes = (1, 6, 6), (3, 6, 6), (5, 9, 8)
    others = [
        images(number, 3, *size) * scale for number, *size in shapes for scale in (1, 300, -1)
    ]
    for _ in range(4):
        this = cut_at_random(model, graph, (example,))
        for other in others:
            for training in (False, True):
                with suppress(pp.PruneError):
                    assert difference(this.masked, this.small, (other,), training=training) <= 1e-10


@pytest.mark.parametrize("look", [*MIXED.values()], ids=[*MIXED])
def test_sizes_that_mix_with_widths_are_read_anew(
    look: Callable[[Inspection, Tensor], Tensor],
) -> None:
    net = nn.Sequential(cbr(3, 8), Inspection(look), nn.Conv2d(8, 6, 1), nn.ReLU(), head(6))
    model, example = randomise(net).double(), images(2, 3, 6, 6)
    graph = pp.trace(model, example)
    assert not graph.groups["0.0"].frozen
    this = cut_at_random(model, graph, (example,))
    for other in (images(1, 3, 6, 6), images(5, 3, 6, 6), images(2, 3, 9, 8)):
        assert difference(this.masked, this.small, (other,), training=False) <= 1e-10


def test_a_number_without_a_formula_is_refused_for_other_sizes() -> None:
    net = nn.Sequential(
        cbr(3, 8), Inspection(lambda self, x: rows(x, 4 * (x.shape[0] + 2) - 8)), head(8)
    )
    model, example = randomise(net).double(), images(2, 3, 6, 6)
    graph = pp.trace(model, example)
    this = cut_at_random(model, graph, (example,))
    if not graph.groups["0.0"].frozen:
        with pytest.raises(pp.PruneError, match="sizes of the example"):
            this.small(images(4, 3, 6, 6))


# --------------------------------------------------------------------------------------------------
# writing down


class Written(nn.Module):
    """Most of what can be stored: slices, an ellipsis, types, infinity, methods, children."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, y: dict[str, Tensor], flip: bool = False, p: float = 2.0) -> Any:
        x = self.layer(x)[..., 1:] * self.gain[1:]
        x = x.masked_fill(x > 1, -float("inf")).clamp(min=-2.0)
        rest = torch.zeros(x.size(0), 2, dtype=torch.float32) + y["rest"]
        x = torch.cat([x.flip(0) if flip else x, rest], dim=-1).pow(p)
        if self.training:
            x = x * 2
        return {"x": x, "pair": (x.shape[0] * rest, [x.sum()])}


def call(number: int = 3, flip: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(number, 4), {"rest": torch.randn(number, 2)}), {"flip": flip}


def written() -> tuple[nn.Module, CapturedForward]:
    module = Written()
    args, kwargs = call()
    captured = capture.capture(module, args, kwargs)
    assert isinstance(captured, CapturedForward)
    return module, captured


def test_capture_store_and_run_gives_the_same() -> None:
    module, captured = written()
    stored = json.loads(json.dumps(stored_graphs.encode(captured)))
    again = installed_forward.with_forward(copy.deepcopy(module), stored_graphs.decode(stored))
    assert isinstance(again, Written) and type(again) is not Written
    assert stored_graphs.encode(stored_graphs.decode(stored)) == stored
    args, kwargs = call(5)
    seen = []
    for training in (True, False):
        before, after = (m.train(training)(*args, **kwargs) for m in (module, again))
        assert before.keys() == after.keys() and type(after["pair"]) is tuple
        pairs = list(zip(tree_leaves(before), tree_leaves(after), strict=True))
        assert len(pairs) == 3 and all(torch.equal(a, b) for a, b in pairs)
        seen.append(after["x"])
    assert torch.equal(seen[0], 2 * seen[1])
    assert type(module) is Written and not module.training


def test_capture_leaves_the_module_as_it_was() -> None:
    class Counts(nn.Module):
        calls: Any = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = x.shape[0]
            return x[:, :2]

    module = Counts().eval()
    refused = capture.capture(module, (torch.randn(3, 4),), {})
    assert refused == Refused("its code sets self.calls, which a graph cannot hold")
    assert type(module) is Counts and not module.training
    assert module.calls == 0 and vars(module).keys() == vars(Counts()).keys()


OTHER_CALLS: dict[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "another value": lambda x, y: ((x, y), {"flip": False}),
    "another keyword": lambda x, y: ((x, y), {"flip": True, "p": 3.0}),
    "one less": lambda x, y: ((x, y), {}),
    "without what is needed": lambda x, y: ((x,), {"flip": True}),
    "an unknown name": lambda x, y: ((x, y), {"flip": True, "other": 3}),
    "one too many": lambda x, y: ((x, y, True, 2.0, None), {}),
    "other keys": lambda x, y: ((x, {"left": y["rest"]}), {"flip": True}),
}


SAME_CALLS: dict[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "by position": lambda x, y: ((x, y, True), {}),
    "by name": lambda x, y: ((), {"y": y, "flip": True, "x": x}),
    "what is so by default": lambda x, y: ((x, y), {"flip": True, "p": float("2")}),
    "all of it": lambda x, y: ((x, y, True, float("2")), {}),
}


@pytest.mark.parametrize("form", SAME_CALLS)
def test_the_same_call_may_be_written_in_another_way(form: str) -> None:
    module, captured = written()
    again = installed_forward.with_forward(copy.deepcopy(module), captured).eval()
    args, kwargs = call()
    found, wanted = again(*SAME_CALLS[form](*args)[0], **SAME_CALLS[form](*args)[1]), module.eval()
    assert torch.equal(found["x"], wanted(*args, **kwargs)["x"])


@pytest.mark.parametrize("form", OTHER_CALLS)
def test_call_of_another_form_is_refused(form: str) -> None:
    module, captured = written()
    again = installed_forward.with_forward(copy.deepcopy(module), captured)
    (x, y), _ = call()
    args, kwargs = OTHER_CALLS[form](x, y)
    message = r"called with different arguments than the example.*Trace "
    with pytest.raises(pp.PruneError, match=message):
        again(*args, **kwargs)


def test_module_that_is_called_in_two_forms_is_cut_or_stays_whole() -> None:
    """The first call has no second argument, the second has: one graph does not do for both."""

    class Forms(nn.Module):
        def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
            a, b = x.split([3, 5], 1)
            x = torch.cat([b, a], 1)
            return x if more is None else x + more

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.forms, self.tail = cbr(3, 8), Forms(), nn.Sequential(cbr(8, 6), head(6))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.tail(self.forms(self.forms(x), x))

    model, x = randomise(Net()).double(), images()
    graph = pp.trace(model, x)
    assert graph.prunable["tail.0.0"].size == 6
    cut_at_random(model, graph, (x,))


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy()[:, :2])


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = {"tensor": torch.randn(4)}  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        return x * self.hidden["tensor"]


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("targets are missing")
        return x[:, :2]


class Own(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Result(x[:, :2])


@dataclass
class Result:
    x: Tensor


class Leaves(nn.Module):
    penalty: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.square().mean()
        return x[:, :2]


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x[:, :2]


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.mean(0)
        return x[:, :2]


class NoGrad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            share = x.mean(1, keepdim=True)
        return x[:, :2] * share


class Decorated(nn.Module):
    @torch.no_grad()
    def share(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * self.share(x)


class Precise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x[:, :2] * x.mean(1, keepdim=True)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class OwnGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Twice.apply(x)
        return doubled[:, :2]


LOST: dict[type[nn.Module], str] = {
    Leaves: "sets self.",
    Appends: "appends to a list on self",
    Averages: "sets self.",
    NoGrad: "uses no_grad.__enter__",
    Decorated: "uses no_grad.__enter__",
    Precise: "uses autocast.__enter__",
    OwnGradient: "uses Function.apply",
}


@pytest.mark.parametrize("family", LOST, ids=lambda family: family.__name__)
def test_nothing_is_lost_when_code_is_written_down(family: type[nn.Module]) -> None:
    """Gradients, precision and what is left on self are no part of a graph."""
    module = family()
    before = dict(vars(module)), dict(module._buffers)
    for found in (
        capture.capture(module, (torch.randn(3, 4),), {}),
        symbolic_graphs.editable_graph(module),
    ):
        assert isinstance(found, Refused) and LOST[family] in found.reason
    assert (dict(vars(module)), dict(module._buffers)) == before
    assert family is not OwnGradient or module(torch.ones(1, 4)).tolist() == [[2.0, 2.0]]


def test_a_block_that_is_cut_keeps_what_learns_nothing_so() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed, self.one, self.two = (nn.Conv2d(8, 8, 1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.fixed(x)
            return x + self.two(self.one(x).relu())

    model, x = nn.Sequential(cbr(3, 8), Fixed(), head(8)).double(), images()
    pruner = pp.Pruner(model, x, lam=1.0, steps=1)
    pruner.param_groups(lr=0.0)
    set_gates(pruner, lambda group: group.size if group.minimum else 0, "closed")
    small = pruner.export()
    small(x).square().sum().backward()
    assert small[1].fixed.weight.grad is None and small[0][0].weight.grad is None
    assert small[2][-1].weight.grad is not None


UNCAPTURED: dict[type[nn.Module], str] = {
    Numpy: r"fails while it is captured \(TypeError: .*np\.ndarray",
    Constant: "a tensor that is neither an input nor a parameter or buffer",
    Raises: r"fails while it is captured \(RuntimeError: targets are missing\)",
    Own: "calls .*Result.*, which a stored graph may not use",
}


@pytest.mark.parametrize("family", UNCAPTURED, ids=lambda family: family.__name__)
def test_code_that_cannot_be_captured_is_refused_with_the_reason(family: type[nn.Module]) -> None:
    refused = capture.capture(family(), (torch.randn(3, 4),), {})
    assert isinstance(refused, Refused) and re.search(UNCAPTURED[family], refused.reason)


def test_forward_of_the_instance_is_not_written_down() -> None:
    module = Written()
    module.forward = lambda x: x  # type: ignore[method-assign]
    refused = capture.capture(module, (torch.randn(3, 4),), {})
    assert refused == Refused("its forward was replaced by a function that is no method of it")


# --------------------------------------------------------------------------------------------------
# files that were tampered with


def node(data: dict[str, Any], kind: str, target: str = "") -> list[Any]:
    """The first node of this kind in the stored graph: name, kind, target, args, kwargs."""
    return next(n for n in data["eval"] if n[1] == kind and (not target or n[2] == target))


def set_target(kind: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        node(data, kind, old)[2] = new

    return change


def set_attribute(name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        found = node(data, "call_method", "flip")
        found[1:4] = ["call_function", "builtins.getattr", {"tuple": [found[3]["tuple"][0], name]}]

    return change


def set_keyword(data: dict[str, Any]) -> None:
    held = node(data, "call_function", "torch.cat")[4]["dict"]
    held["dim=__import__('os').getpid(), out"] = held.pop("dim")


def set_name(name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        text = json.dumps(data["eval"])
        old = node(data, "call_method", "flip")[0]
        data["eval"] = json.loads(text.replace(f'"{old}"', json.dumps(name)))

    return change


def set_operator(name: str) -> Callable[[dict[str, Any]], None]:
    return set_target("call_function", "torch.cat", f"operator.{name}")


def set_type(data: dict[str, Any]) -> None:
    node(data, "call_function", "torch.zeros")[4]["dict"]["dtype"] = {"dtype": "load"}


def set_kind(data: dict[str, Any]) -> None:
    node(data, "call_method", "flip")[1] = "call_system"


CODE = "x); __import__('os').getpid("
TAMPERED: dict[str, Callable[[dict[str, Any]], None]] = {
    "unknown function": set_target("call_function", "torch.cat", "os.system"),
    "builtin": set_target("call_function", "torch.cat", "builtins.eval"),
    "function that reads files": set_target("call_function", "torch.cat", "torch.load"),
    "function in a submodule": set_target("call_function", "torch.cat", "torch.serialization.load"),
    "method not of tensors": set_target("call_method", "flip", "system"),
    "method with code": set_target("call_method", "flip", f"flip({CODE}"),
    "method of a method": set_target("call_method", "flip", "flip.__self__"),
    "module with code": set_target("call_module", "layer", f"layer({CODE}"),
    "attribute with code": set_target("get_attr", "gain", f"gain + {CODE}"),
    "private attribute": set_attribute("__class__"),
    "attribute by code": set_attribute(CODE),
    "keyword with code": set_keyword,
    "name with code": set_name("a = __import__('os').getpid(); b"),
    "name with a new line": set_name("a\nimport os\nb"),
}
ACCEPTED: dict[str, Callable[[dict[str, Any]], None]] = {
    "private attribute of the module": set_target("get_attr", "gain", "__init__.__globals__"),
    "private method": set_target("call_method", "flip", "__reduce_ex__"),
    "method that calls": set_target("call_method", "flip", "__call__"),
    "function that calls": set_operator("call"),
    "function that reads attributes": set_operator("attrgetter"),
    "function that calls methods": set_operator("methodcaller"),
    "type that is none": set_type,
    "kind of node": set_kind,
}


@pytest.mark.parametrize(
    "change",
    [
        *(pytest.param(change, id=name) for name, change in TAMPERED.items()),
        *(pytest.param(change, id=name) for name, change in ACCEPTED.items()),
    ],
)
def test_graph_that_was_tampered_with_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    stored = json.loads(json.dumps(stored_graphs.encode(written()[1])))
    stored_graphs.decode(copy.deepcopy(stored))
    change(stored)
    with pytest.raises(pp.PruneError, match="not loaded"):
        stored_graphs.decode(stored)


def test_stored_graph_cannot_run_code() -> None:
    """From a tensor to the globals of one of its methods, to `eval`."""

    def items(*held: Any) -> dict[str, Any]:
        return {"tuple": list(held)}

    nothing: dict[str, Any] = {"dict": {}}
    nodes = [
        ["x0", "placeholder", "x0", items(), nothing],
        ["a", "call_function", "operator.attrgetter", items("backward.__globals__"), nothing],
        ["b", "call_function", "operator.call", items({"node": "a"}, {"node": "x0"}), nothing],
        ["c", "call_function", "operator.getitem", items({"node": "b"}, "__builtins__"), nothing],
        ["d", "call_function", "operator.getitem", items({"node": "c"}, "eval"), nothing],
        ["e", "call_function", "operator.call", items({"node": "d"}, "6 * 7"), nothing],
        ["output", "output", "output", items({"node": "e"}), nothing],
    ]
    identity = capture.capture(nn.Identity(), (torch.zeros(1),), {})
    assert isinstance(identity, CapturedForward)
    stored = {**stored_graphs.encode(identity), "train": nodes, "eval": nodes}
    try:
        answer = installed_forward.with_forward(nn.Identity(), stored_graphs.decode(stored))(
            torch.zeros(1)
        )
    except pp.PruneError:
        return
    pytest.fail(f"a file made python compute {answer}")


def test_file_that_was_tampered_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    pp.save(shrunk("pad").small, path)
    with safe_open(str(path), framework="pt") as file:
        content = json.loads(file.metadata()["polarprune"])
    for graph in (content["recipe"]["rewired"]["1"][mode] for mode in ("train", "eval")):
        next(n for n in graph if n[1] == "call_function")[2] = "os.system"
    text, tensors = json.dumps({**content, "sha256": BLANK}), load_file(str(path))
    save_file(tensors, str(path), metadata={"polarprune": signed(text, tensors)})
    with pytest.raises(
        pp.PruneError, match=r"not loaded: .* function 'os\.system', which is not allowed"
    ):
        pp.load(path, model=made("pad")[0])


def test_names_of_nodes_mean_nothing_outside_of_the_file(tmp_path: Path) -> None:
    """Another version of torch may name nodes otherwise."""
    path = tmp_path / "small.safetensors"
    small = shrunk("pad").small
    pp.save(small, path)
    with safe_open(str(path), framework="pt") as file:
        content = json.loads(file.metadata()["polarprune"])
    for code in content["recipe"]["rewired"].values():
        for mode in ("train", "eval"):
            code[mode] = renamed(code[mode])
    text, tensors = json.dumps({**content, "sha256": BLANK}), load_file(str(path))
    save_file(tensors, str(path), metadata={"polarprune": signed(text, tensors)})
    model, x = made("pad")
    assert torch.equal(pp.load(path, model=model).eval()(x), small.eval()(x))


def renamed(nodes: list[Any]) -> list[Any]:
    """A stored graph with other names of nodes."""
    names = {name: f"other_{number}" for number, (name, *_) in enumerate(nodes)}

    def replaced(data: Any) -> Any:
        if isinstance(data, dict) and data.keys() == {"node"}:
            return {"node": names[data["node"]]}
        if isinstance(data, dict):
            return {key: replaced(item) for key, item in data.items()}
        return [replaced(item) for item in data] if isinstance(data, list) else data

    return [[names[n], kind, target, replaced(a), replaced(k)] for n, kind, target, a, k in nodes]
