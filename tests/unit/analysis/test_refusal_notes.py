"""Reasons for which code could not be rewritten reach the notes that `trace` prints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from polarprune.analysis import repairs
from polarprune.analysis.tape_comparison import Mismatch
from polarprune.channels.graph import Graph


class Counting(nn.Module):
    """A residual block that counts its calls, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.two(self.one(x).relu())


class Noisy(nn.Conv2d):
    """A layer whose weight is random."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * torch.rand(()), self.bias)


def noted(layer: nn.Module, width: int) -> Graph:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), layer, nn.Conv2d(width, 4, 1))
    return pp.trace(net, torch.randn(1, 3, 8, 8))


def test_a_branch_that_cannot_be_removed_is_noted_with_the_reason() -> None:
    graph = noted(Counting(), 8)
    assert [note for note in graph.notes if "self.calls" in note] == [
        "1: a branch that closes stays as a constant: its code sets self.calls, which a graph "
        "cannot hold"
    ]
    assert "note: 1: a branch that closes" in str(graph)


def test_a_weight_that_cannot_be_followed_is_noted_with_the_reason() -> None:
    graph = noted(Noisy(8, 6, 3), 6)
    assert any(
        note.startswith("1: channels are not followed through its code: its weight is")
        for note in graph.notes
    )
    assert "test_refusal_notes.py:" in graph.groups["0"].reason


def test_nothing_is_noted_where_everything_can_be_followed() -> None:
    assert noted(nn.Conv2d(8, 6, 3), 6).notes == ()


class Fixed(nn.Module):
    """Code that says how many channels there are, which a captured forward adapts."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 8, -1).relu().view(x.shape)


def test_a_captured_forward_that_does_not_help_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert noted(Fixed(), 8).groups["0"].reason == ""
    found = Mismatch("the cut model still fails")
    monkeypatch.setattr(repairs, "_obstacle", lambda *given: found)
    assert (
        "(its forward cannot be rewritten: a trial cut gets no further with the captured one: the "
        "cut model still fails)" in noted(Fixed(), 8).groups["0"].reason
    )
