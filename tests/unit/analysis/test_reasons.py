"""Reasons say which tensor, which operation and which line, and what to do about it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp


class Middle(nn.Module):
    """User code between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [torch.rand(8, 1, 1)]  # a list hides the tensor from the module
        self.kernel = nn.Parameter(torch.rand(8, 8, 1, 1))

    def constant(self, x: Tensor) -> Tensor:
        return x * self.scale[0]

    def computed(self, x: Tensor) -> Tensor:
        return x * torch.arange(8.0)[:, None, None]

    def softmax(self, x: Tensor) -> Tensor:
        return x.softmax(1)

    def centred(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    def picked(self, x: Tensor) -> Tensor:
        return x[:, torch.randperm(8)]

    def strided(self, x: Tensor) -> Tensor:
        return torch.as_strided(x, x.shape, (*x.stride()[:2], 1, x.shape[2]))

    def weight(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.kernel * torch.rand(()))

    def drawn(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.rand_like(x)


REASONS = {
    "constant": (
        "combined with a tensor that is not a parameter and has no known channels",
        ": mul with a constant tensor of shape (8, 1, 1); register it with register_buffer",
    ),
    "computed": (
        "combined with a tensor that is not a parameter and has no known channels",
        ": mul with the result of shape (8, 1, 1) of ",
    ),
    "softmax": ("_softmax mixes channels", "; only the channels that reach it are frozen: "),
    "centred": ("mean mixes channels", "; only the channels that reach it are frozen: "),
    "picked": ("channels are picked by index", ": index; only a constant vector of integers"),
    "strided": (
        "as_strided reads memory with other strides",
        ": the result of shape (2, 8, 6, 6) of convolution in 0 (",
    ),
    "weight": (
        "merged by a computed weight",
        ": convolution with the result of shape (8, 8, 1, 1) of mul in 1 (test_reasons.py:",
    ),
    "drawn": ("rand_like draws numbers with a fixed seed", "; set the seed outside the model"),
}


@pytest.mark.parametrize("method", REASONS)
def test_a_reason_names_the_fact_the_line_the_tensor_and_the_remedy(method: str) -> None:
    class Chosen(Middle):
        forward = getattr(Middle, method)

    net = nn.Sequential(nn.Conv2d(3, 8, 3), Chosen(), nn.Conv2d(8, 4, 3))
    reason = pp.trace(net, torch.randn(2, 3, 8, 8)).groups["0"].reason
    fact, rest = REASONS[method]
    line = getattr(Middle, method).__code__.co_firstlineno + (2 if method == "drawn" else 1)
    assert reason.startswith(f"{fact} in 1 (test_reasons.py:{line}){rest}")


@pytest.mark.parametrize("method", ["softmax", "centred"])
def test_a_pointwise_layer_before_a_mixing_operation_frees_the_layer_before(method: str) -> None:
    class Chosen(Middle):
        forward = getattr(Middle, method)

    first, pointwise, last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3)
    graph = pp.trace(nn.Sequential(first, pointwise, Chosen(), last), torch.randn(2, 3, 8, 8))
    assert graph.prunable.keys() == {"0"}
    assert "a 1 x 1 convolution" in graph.groups["1"].reason


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.out = nn.Conv2d(11, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.conv(x), x], 1))


def test_concatenated_inputs_are_named_as_such() -> None:
    graph = pp.trace(Beside(), torch.randn(2, 3, 8, 8))
    assert graph.prunable.keys() == {"conv"}
    (reason,) = (g.reason for g in graph.groups.values() if "no known layer" in g.reason)
    fact = "joined with channels that come from no known layer"
    assert reason.startswith(f"{fact} in model (test_reasons.py:")
    assert "): cat with an input of the model of shape (2, 3, 8, 8); put a layer" in reason


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.out = nn.Conv2d(8, 4, 3)
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.last.append(x.sigmoid())
        return self.out(x)


def test_a_stored_tensor_is_named_by_the_operation_that_made_it() -> None:
    reason = pp.trace(Storing(), torch.randn(2, 3, 8, 8)).groups["conv"].reason
    assert "stored by the model's code but not returned" in reason
    assert "of sigmoid in model (test_reasons.py:" in reason and "return it" in reason
