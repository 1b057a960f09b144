"""Modules that change their own code: forwards they choose, tensors they remember or compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from tests.helpers.nets import around, randomise
from tests.helpers.random_cuts import OUTPUT, cut, cut_at_random, images


class Chooses(nn.Module):
    """A module that chooses one of two forwards in its constructor."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.forward = self.by_split if split else self.by_slice  # type: ignore[method-assign]

    def by_split(self, x: Tensor) -> Tensor:
        first, rest = x.split([4, 8], 1)
        return torch.cat([self.conv(first), rest], 1)

    def by_slice(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x[:, :4]), x[:, 4:]], 1)


def test_forward_that_a_module_chose_is_written_anew() -> None:
    for split in (True, False):
        model = around(12, 12, Chooses(split))
        done = cut(
            model,
            (images(),),
            opened={"0.0": 4, "0.0#2": 8, "1.conv": 4},
            whole={"2.2": OUTPUT},
        )
        assert vars(model[1])["forward"].__self__ is model[1]
        assert list(done.graph.rewritten) == ["1"]


class ToldNorm(nn.Module):
    """A norm that stores the shape that it normalizes, as torch's own does."""

    def __init__(self, width: int, rms: bool) -> None:
        super().__init__()
        self.shape, self.rms = (width,), rms
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, normalized_shape=self.shape, weight=self.weight, eps=1e-6)
        return F.layer_norm(x, self.shape, self.weight)


class Mlp(nn.Module):
    def __init__(self, rms: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = ToldNorm(8, rms), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_norms_that_are_told_their_shape_follow_the_stream() -> None:
    for rms in (True, False):
        model = nn.Sequential(nn.Linear(5, 8), Mlp(rms), Mlp(rms), nn.Linear(8, 3))
        model, inputs = randomise(model).double(), (torch.randn(2, 4, 5).double(),)
        graph = pp.trace(model, inputs, norms=True)
        assert {name: group.size for name, group in graph.prunable.items()} == {
            "0": 8,
            "1.up": 12,
            "2.up": 12,
        }
        cut_at_random(model, graph, inputs)


class TwoHeads(nn.Module):
    """Of two heads one is left in a trial; -1 hides it until the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"heads": 2, "width": 6}
        self.qkv, self.proj = nn.Linear(8, 3 * 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads, width = self.settings["heads"], self.settings["width"]
        qkv = self.qkv(x).reshape(x.shape[0], -1, 3, heads, width).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(x.reshape(x.shape[0], -1, heads * width))


def test_code_that_stops_late_is_mended_where_it_first_went_astray() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), TwoHeads(), nn.Linear(8, 3))
    inputs = (torch.randn(2, 4, 5).double(),)
    whole = {"0": "layer norm mixes channels", "3": OUTPUT}
    done = cut(model, inputs, {"2.qkv": 2, "2.proj": 8}, whole)
    assert list(done.graph.rewritten) == ["2"]


class Resized(nn.Module):
    """Learned positions, brought to the size of the image."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.places = mode, nn.Parameter(torch.randn(1, 6, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        smooth = {} if "nearest" in self.mode else {"antialias": True}
        return x + F.interpolate(self.places, x.shape[2:], mode=self.mode, **smooth)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear", "nearest", "nearest-exact"])
def test_positions_that_are_resized_keep_their_channels(mode: str) -> None:
    cut(around(6, 6, Resized(mode)), (images(),), {"0.0": 6}, {"2.2": OUTPUT})


class Remembers(nn.Module):
    """Computes a table for the size that it meets, once, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"heads": 4}
        self.qk, self.v, self.proj = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.slope = nn.Parameter(torch.ones(4, 1, 1))
        self.table = torch.zeros(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        heads = self.settings["heads"]
        if self.table.shape[0] != n:
            table = torch.zeros(n, n)
            table[:, :] = torch.arange(n)[None] - torch.arange(n)[:, None]
            self.table = table.to(x)
        q, k = self.qk(x).reshape(b, n, 2, heads, c // heads).permute(2, 0, 3, 1, 4).unbind(0)
        v = self.v(x).reshape(b, n, heads, c // heads).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1) + self.slope * self.table).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).reshape(b, n, c))


def test_tables_that_a_module_remembers_are_computed_in_code_that_is_written_anew() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), Remembers(), nn.Linear(8, 3))
    inputs = (torch.randn(2, 6, 5).double(),)
    whole = {"0": "layer norm mixes channels", "3": OUTPUT}
    done = cut(model, inputs, {"2.qk": 4, "2.proj": 8}, whole)
    assert model[2].table.shape == (1, 1)
    assert list(done.graph.rewritten) == ["2"]


class OneKey(nn.Module):
    """Many queries, but one key and one value, which torch repeats for every head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 24), nn.Linear(8, 6), nn.Linear(8, 6)
        self.proj = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).unflatten(-1, (-1, 6)).transpose(1, 2), self.k(x), self.v(x)
        x = (q @ k[:, None].transpose(-2, -1)).softmax(-1) @ v[:, None]
        return self.proj(x.transpose(1, 2).flatten(2))


def test_heads_that_share_a_key_go_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), OneKey(), nn.Linear(8, 3))
    whole = {
        "0": "layer norm mixes channels",
        "2.k": "product of two sets of channels",
        "2.v": "shares an axis with other channels",
        "3": OUTPUT,
    }
    inputs = (torch.randn(2, 7, 5).double(),)
    cut(model, inputs, {"2.q": 4, "2.proj": 8}, whole)


class Marked(nn.Module):
    """Zeros that get ones in some places: what looks like a filling is none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], dtype=x.dtype)
        if self.how == "slice":
            mask[::2] = 1
        elif self.how == "view":
            mask.view(2, -1)[0].fill_(1)
        else:
            mask[1:3].add_(1)
        return x * mask[:, None, None]


@pytest.mark.parametrize("how", ["slice", "view", "add"])
def test_zeros_that_are_overwritten_in_part_keep_their_channels(how: str) -> None:
    graph = pp.trace(around(6, 6, Marked(how)), images().float())
    assert not graph.prunable
    assert "combined with a tensor that is not a parameter" in graph.groups["0.0"].reason


class Turned(nn.Module):
    """Queries and keys are scaled by place, for every head in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 3 * 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 3)).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q * turns, k * turns, v)
        return self.proj(x.transpose(1, 2).flatten(2))


class Mixed(nn.Module):
    """Learned frequencies of all layers and heads, multiplied with places in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.speeds = nn.Parameter(torch.randn(2, 4, 3))
        self.layers, self.head = nn.ModuleList([Turned(), Turned()]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        places = torch.arange(x.shape[1]).to(x)[:, None]
        for layer, turns in zip(
            self.layers, (places @ self.speeds.unsqueeze(-2)).sin(), strict=True
        ):
            x = x + layer(self.norm(x), turns)
        return self.head(x)


def test_tables_that_are_computed_for_every_head_go_with_it() -> None:
    whole = {
        "stem": "layer norm mixes channels",
        "speeds": "shared by all heads, or other units of several channels, in layers.0 ",
        "head": OUTPUT,
    }
    done = cut(Mixed(), (torch.randn(2, 6, 5).double(),), {"layers.0.qkv": 4}, whole)
    assert done.small.speeds.shape == (2, len(done.plan["layers.0.qkv"]), 3)


class Windows(nn.Module):
    """Attention within windows; one table of places is read by the queries of every head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Conv2d(6, 3 * 12, 1), nn.Conv2d(12, 6, 1)
        self.places = nn.Parameter(torch.randn(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        qkv = self.qkv(x).unfold(2, 4, 4).unfold(3, 4, 4)
        q, k, v = qkv.reshape(b, 3, -1, 3, h * w // 16, 16).permute(1, 0, 2, 4, 5, 3).unbind(0)
        x = (q @ k.transpose(-2, -1) + q @ self.places.T).softmax(-1) @ v
        x = x.unflatten(3, (4, 4)).permute(0, 1, 5, 2, 3, 4)
        return self.proj(x.reshape(b, -1, h, w))


def test_heads_in_windows_share_a_table() -> None:
    whole = {"1": "combined with a tensor that is not a parameter", "2.2": OUTPUT}
    cut(around(6, 6, Windows()), (images(),), {"0.0": 6, "1.qkv": 4, "1.proj": 6}, whole)


def test_windows_of_channels_stay_whole() -> None:
    class Slides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unfold(1, 2, 1).amax(-1)

    graph = pp.trace(around(6, 5, Slides()), images().float())
    assert not graph.prunable and "windows of channels" in graph.groups["0.0"].reason


class Watches(nn.Module):
    """A module that registers a hook on a layer at its first call, and remembers this."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.watching = False
        self.body, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.watching:
            self.body.register_forward_hook(lambda layer, args, out: self.seen.append(out))
            self.watching = True
        self.seen.clear()
        self.body(x)
        return self.head(torch.stack(self.seen).sum(0))


def test_hooks_that_a_model_puts_in_as_it_runs_are_there_once() -> None:
    model = randomise(Watches()).double()
    graph = pp.trace(model, images())
    assert graph.prunable["body"].size == 8
    assert not model.watching and not model.body._forward_hooks
    model(images())
    assert len(model.body._forward_hooks) == 1
