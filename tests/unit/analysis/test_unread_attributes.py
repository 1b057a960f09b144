"""Integers that held a width change with a cut, even if the traced forward does not read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune import PruneError
from polarprune.analysis import unread_attributes
from polarprune.analysis.attribute_reads import attributes_read
from polarprune.rewriting.captured_forward import Refused


class Split(nn.Module):
    """A block like a detector's, in which an exporter replaces `forward` by `forward_split`."""

    def __init__(self, width: int, c: int) -> None:
        super().__init__()
        self.c = c
        self.one = nn.Conv2d(width, 2 * c, 1)
        self.inner = nn.Conv2d(c, c, 3, padding=1)
        self.two = nn.Conv2d(3 * c, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x).relu().chunk(2, 1)
        return self.two(torch.cat([a, b, self.inner(b)], 1))

    def forward_split(self, x: Tensor) -> Tensor:
        a, b = self.one(x).relu().split((self.c, self.c), 1)
        return self.two(torch.cat([a, b, self.inner(b)], 1))


class Blind(Split):
    forward_split = None  # type: ignore[assignment]


def net(block: type[Split] = Split) -> nn.Module:
    parts = (nn.Conv2d(3, 10, 1), block(10, 8), nn.ReLU(), block(10, 6), nn.ReLU())
    return nn.Sequential(*parts, nn.Conv2d(10, 4, 1))


class Reads(Blind):
    """Reads `c`, though only to leave out what lies beyond it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., -self.c :]


IMAGES = torch.randn(2, 3, 8, 8)


def test_an_integer_that_the_forward_reads_is_left_to_the_trial_cuts() -> None:
    read = attributes_read(net(Reads), IMAGES, {("1", "c"), ("3", "c")})
    assert read == {("1", "c"), ("3", "c")}
    assert attributes_read(net(Blind), IMAGES, {("1", "c")}) == set()
    model = net(Reads)
    assert pp.trace(model, IMAGES).size_attributes == {}
    assert model[1].c == 8 and type(model[1]) is Reads


class Once(Blind):
    """A block that cannot be copied."""

    def __deepcopy__(self, memo: object) -> Once:
        raise TypeError("only one exists")


def test_a_note_says_why_it_is_not_known_which_integers_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = attributes_read(net(Once), IMAGES, {("1", "c")})
    assert isinstance(found, Refused) and found.reason == "TypeError: only one exists"
    monkeypatch.setattr(unread_attributes, "attributes_read", lambda *given: found)
    graph = pp.trace(net(Blind), IMAGES)
    (note,) = graph.notes
    assert "integers such as 1.c = 8" in note and "(TypeError: only one exists)" in note
    assert graph.size_attributes == {}


def cut(model: nn.Module, x: Tensor = IMAGES, share: float = 0.5) -> nn.Module:
    graph = pp.trace(model, x)
    plan = {k: list(range(max(1, int(g.size * share)))) for k, g in graph.prunable.items()}
    return pp.shrink(model, graph, plan)


def test_another_forward_tells_which_width_an_integer_is() -> None:
    """`inner` makes as many channels as the halves have, but a cut leaves another number there."""
    model = net()
    graph = pp.trace(model, IMAGES)
    assert {path: list(names) for path, names in graph.size_attributes.items()} == {
        "1": ["c"],
        "3": ["c"],
    }
    for keep in ([0, 1, 2], [1, 4, 5, 7]):
        small = pp.shrink(model, graph, {"1.one": keep, "1.inner": [0, 1]})
        assert small[1].c == len(keep) and small[3].c == 6
        y = small(IMAGES)
        small[1].forward = small[1].forward_split
        assert torch.equal(small(IMAGES), y)


def test_an_integer_that_equals_several_widths_is_listed_and_stays() -> None:
    graph = pp.trace(net(Blind), IMAGES)
    (note,) = (note for note in graph.notes if "several sizes" in note)
    assert note.startswith("1.c = 8: equal to several sizes, so a cut leaves them")
    assert cut(net(Blind))[1].c == 8


class Heads(nn.Module):
    """Attention whose forward selects by position, so that it is rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.num_heads, self.head_dim, self.scale = 7, 3, 5, 5**-0.5
        self.qkv, self.proj = nn.Linear(7, 45), nn.Linear(15, 11)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 9, self.head_dim)
        q, k, v = self.qkv(x).view(shape).transpose(1, 2).split(3, 1)
        mixed = (q @ k.mT * self.scale).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))


def attention() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), Heads(), nn.Linear(11, 2))


TOKENS = torch.randn(6, 4, 4)


def test_the_number_of_heads_follows_in_a_rewritten_forward(tmp_path: Path) -> None:
    model = attention()
    graph = pp.trace(model, TOKENS)
    assert "1" in graph.rewritten and graph.prunable["1.qkv"].size == 3
    small = pp.shrink(model, graph, {"1.qkv": [0, 2]})
    assert (small[1].width, small[1].num_heads, small[1].head_dim) == (7, 2, 5)
    pp.save(small, tmp_path / "small.safetensors")
    assert pp.load(tmp_path / "small.safetensors", model=attention())[1].num_heads == 2
    assert cut(small, TOKENS)[1].width == 3


def test_a_compacted_model_can_be_compacted_again_although_a_number_followed() -> None:
    torch.manual_seed(0)
    model = attention()
    pruner = pp.Pruner(model, TOKENS, macs=0.5, steps=10)
    with torch.no_grad():
        pruner.gates["1.qkv"].alpha[1] = 0
    pruner.compact()
    assert model[1].num_heads == 2
    with torch.no_grad():
        pruner.gates["1.qkv"].alpha[0] = 0
    pruner.compact()
    assert model[1].num_heads == 1 and pruner.compactions == 2
    vars(model[1])["num_heads"] = 7
    with torch.no_grad():
        pruner.gates["0"].alpha[0] = 0
    with pytest.raises(PruneError, match=r"1\.num_heads changed since tracing"):
        pruner.compact()


class Used(nn.Module):
    """An integer that equals a width but counts something else, or a size of the input."""

    def __init__(self, **numbers: int) -> None:
        super().__init__()
        vars(self).update(numbers)
        self.one, self.two = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        for _ in range(getattr(self, "repeats", 1)):
            x = x.relu() * 0.5
        return self.two(x)


def test_a_number_that_the_code_uses_otherwise_stays() -> None:
    small = cut(Used(repeats=6))
    assert small.one.out_channels == 3 and small.repeats == 6


def test_a_number_that_equals_a_size_of_the_input_stays() -> None:
    model = Used(picture=6)
    small = cut(model, torch.randn(2, 3, 6, 6))
    assert small.one.out_channels == 3 and small.picture == 6


def test_a_number_whose_name_is_no_width_stays() -> None:
    assert cut(Used(stride=6)).stride == 6


def test_a_number_follows_the_width_of_a_child() -> None:
    small = cut(Used(hidden=6))
    assert small.hidden == small.one.out_channels == 3
