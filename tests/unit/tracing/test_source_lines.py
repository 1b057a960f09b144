"""Reasons name the line of the user's code, also after a module was rewritten."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

import polarprune as pp


class Halves(nn.Module):
    """Counts channels (`h[:, :3]`), so that its forward is captured and runs as a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.side = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.conv(x)
        h = torch.cat([h[:, :3], h[:, 3:]], 1)
        s = self.side(h)
        return h.relu(), s - s.mean(1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()
        self.out = nn.Conv2d(8, 2, 1)
        self.other = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, s = self.halves(x)
        return self.out(h) + self.other(s)


def line_of(kind: type[nn.Module], text: str) -> str:
    """Return file:line of the line of the forward that contains this text."""
    lines, first = inspect.getsourcelines(kind.forward)
    (offset,) = (number for number, line in enumerate(lines) if text in line)
    return f"test_source_lines.py:{first + offset}"


def test_operations_of_a_rewritten_forward_have_the_lines_of_the_original_code() -> None:
    graph = pp.trace(Net(), torch.randn(2, 3, 9, 9))
    assert list(graph.rewritten) == ["halves"]
    found = {(op.module, op.name, op.line) for op in graph.tapes[0].ops}
    assert found == {
        ("halves.conv", "convolution", line_of(Halves, "self.conv(x)")),
        ("halves", "slice", line_of(Halves, "torch.cat")),
        ("halves", "cat", line_of(Halves, "torch.cat")),
        ("halves.side", "convolution", line_of(Halves, "self.side(h)")),
        ("halves", "relu", line_of(Halves, "return")),
        ("halves", "mean", line_of(Halves, "return")),
        ("halves", "sub", line_of(Halves, "return")),
        ("out", "convolution", line_of(Net, "return")),
        ("other", "convolution", line_of(Net, "return")),
        ("", "add", line_of(Net, "return")),
    }


def test_a_reason_in_a_rewritten_forward_names_the_original_line() -> None:
    graph = pp.trace(Net(), torch.randn(2, 3, 9, 9))
    where = f"halves ({line_of(Halves, 'return')})"
    assert f"mean mixes channels in {where}" in graph.groups["halves.side"].reason


class Wrapped(nn.Module):
    """A module with a rewritten forward that calls a child with its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Centre()
        self.conv = nn.Conv2d(3, 8, 3)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        h = torch.cat([h[:, 3:], h[:, :3]], 1)
        return self.inner(self.out(h))


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


def test_children_of_a_rewritten_module_keep_their_own_lines() -> None:
    graph = pp.trace(Wrapped(), torch.randn(2, 3, 9, 9))
    assert "" in graph.rewritten
    (line,) = {op.line for op in graph.tapes[0].ops if op.name == "mean"}
    assert line == line_of(Centre, "x.mean")
