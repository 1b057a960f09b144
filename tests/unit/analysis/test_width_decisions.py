"""Code that branches on a width: a cut model takes the trained branch, or nothing is cut."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import polarprune as pp
from polarprune.tracing.recorder import record
from polarprune.tracing.tape import Value
from polarprune.tracing.watched_sizes import SizeLog, WatchedInt, watched_count, watched_size
from tests.helpers.cuts import Body2d, images, reasons, worst

OTHERS = (images(3, 8), images(2, 20), images(2, 5))


def scaled(amount: Any) -> Any:
    return lambda net, h: net.rest(h * amount(net, h))


def chosen(condition: Any) -> Any:
    return lambda net, h: net.rest(h.relu() if condition(net, h) else h.tanh())


def repeated(times: Any) -> Any:
    def body(net: Any, h: Tensor) -> Any:
        for _ in range(times(net, h)):
            h = h.tanh()
        return net.rest(h)

    return body


# What the first layer's 16 channels decide. Where it can be rewritten, all of them stay prunable.
DECISIONS: dict[str, Any] = {
    "a width and a height": chosen(lambda net, h: h.shape[1] >= h.shape[2]),
    "a width and a number": chosen(lambda net, h: h.shape[1] > 3),
    "equal to a number": chosen(lambda net, h: h.size(1) == 5),
    "unequal": chosen(lambda net, h: h.size(1) != 5),
    "even": chosen(lambda net, h: h.shape[1] % 2 == 0),
    "even, as a truth value": chosen(lambda net, h: h.shape[1] % 2),
    "two widths": chosen(lambda net, h: net.a.weight.shape[0] > net.b.weight.shape[0]),
    "of a weight": chosen(lambda net, h: net.b.weight.size(1) % 3 == 1),
    "an attribute": chosen(lambda net, h: net.a.out_channels > 3),
    "an attribute, even": chosen(lambda net, h: net.b.in_channels % 2 == 0),
    "a product": chosen(lambda net, h: h.shape[1] * h.shape[3] > 40),
    "a quotient": chosen(lambda net, h: h.shape[1] / 4 > 1.5),
    "a power": chosen(lambda net, h: h.shape[1] ** 0.5 >= 2.1),
    "one of several": chosen(lambda net, h: h.shape[1] in (16, 8, 4)),
    "len": chosen(lambda net, h: len(h[0]) > 4),
    "the larger one": scaled(lambda net, h: max(h.shape[1], 5)),
    "the smaller one": scaled(lambda net, h: min(net.a.out_channels, 7)),
    "rounded down": scaled(lambda net, h: h.shape[1] // 5),
    "rounded up": scaled(lambda net, h: math.ceil(h.shape[1] / 5)),
    "rounded": scaled(lambda net, h: round(h.shape[1] / 5)),
    "cut off": scaled(lambda net, h: int(h.shape[1] / 5)),
    "a loop": repeated(lambda net, h: h.shape[1] // 4),
    "an item": scaled(lambda net, h: [1.0, 2.0, 3.0, 4.0, 5.0][h.shape[1] // 4]),
    "all elements": chosen(lambda net, h: h.numel() > 2 * 5 * 64),
    "a whole shape": chosen(lambda net, h: h.shape == (2, 16, 8, 8)),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_the_way_that_was_trained_is_taken(name: str) -> None:
    model = Body2d(DECISIONS[name])
    graph = pp.trace(model, images(2, 8))
    assert worst(model, graph, images(2, 8), *OTHERS) < 1e-9
    assert graph.groups["a"].size == 16 and "a" in graph.prunable, reasons(graph)


@pytest.mark.parametrize("name", DECISIONS)
def test_code_that_cannot_be_rewritten_freezes_what_it_compares(name: str) -> None:
    inner = DECISIONS[name]

    def body(net: Any, h: Tensor) -> Any:
        with torch.enable_grad():  # which no graph holds
            h = h * 1.0
        return inner(net, h)

    model = Body2d(body)
    graph = pp.trace(model, images(2, 8))
    assert "a" not in graph.prunable
    assert worst(model, graph, images(2, 8), *OTHERS) < 1e-9


def test_the_reason_names_the_line() -> None:
    def body(net: Any, h: Tensor) -> Any:
        with torch.enable_grad():
            h = h * 1.0
        return net.rest(h.relu() if h.shape[1] == 13 else h.tanh())

    graph = pp.trace(Body2d(body), images(2, 8))
    assert "decides by the number of channels in model (test_width_decisions.py:" in reasons(graph)
    assert "decide by an attribute set in __init__" in reasons(graph)  # what to do about it


CHECKS: dict[str, Any] = {
    "the same width": lambda net, h: h.shape[1] == net.a.weight.shape[0],
    "an attribute of the layer": lambda net, h: h.shape[1] == net.a.out_channels,
    "a batch": lambda net, h: h.shape[0] >= 1,
    "a height": lambda net, h: h.shape[2] % 2 == 0,
    "a height rounded up": lambda net, h: math.ceil(h.shape[2]) != 0,
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_that_hold_after_any_cut_change_nothing(name: str) -> None:
    """The model stays of its own class: no code is rewritten for an assertion."""

    def body(net: Any, h: Tensor) -> Any:
        assert CHECKS[name](net, h)
        return net.rest(h)

    graph = pp.trace(Body2d(body), images(2, 8))
    assert "a" in graph.prunable and not graph.rewritten


def test_tracing_leaves_no_watched_numbers_behind() -> None:
    kept: list[Any] = []

    def body(net: Any, h: Tensor) -> Any:
        kept.append(h.shape[1])
        net.last_width = h.shape[1] + net.a.out_channels
        return net.rest(h)

    model = Body2d(body)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    pp.trace(model, images(2, 8))
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(type(v) is type(before[name][k]) for k, v in vars(module).items())
    watched = [n for n in kept if isinstance(n, WatchedInt)]
    assert watched and all(type(n + 1) is int and n + 1 == 17 for n in watched)  # inert by now


def number(size: int = 6) -> tuple[WatchedInt, SizeLog]:
    log = SizeLog(lambda: "")
    return watched_size(Value((2, size)), 1, log), log


def test_arithmetic_is_followed() -> None:
    n, log = number()
    results = [
        n + 1,
        1 + n,
        n * 2,
        10 - n,
        n // 4,
        13 // n,
        n % 4,
        n / 4,
        n**2,
        -n,
        abs(-n),
        n << 1,
        12 // int(n),
        round(n / 4),
        math.floor(n / 4),
        math.ceil(n / 4),
    ]
    assert results == [7, 7, 12, 4, 1, 2, 2, 1.5, 36, -6, 6, 12, 2, 2, 1, 2]
    with_nine = [one.source.value(lambda leaf: 9) for one in results if hasattr(one, "source")]
    assert with_nine == [10, 10, 18, 1, 2, 1, 1, 2.25, 81, -9, 9, 18, 2, 2, 3]
    assert len(log.decisions) > 0  # the comparisons above


def test_a_watched_number_is_a_number() -> None:
    n, _ = number()
    x = torch.randn(6, 6)
    assert isinstance(n, int) and hash(n) == hash(6) and f"{n:03d} {n}" == "006 6"
    assert type(copy.deepcopy(n)) is int and [0] * n == [0] * 6 and "ab" * n == "ab" * 6
    assert x.view(n * n).shape == (36,) and torch.zeros(n).shape == (6,)
    assert torch.equal(x * n, x * 6) and torch.equal(n * x, 6 * x) and {6: "six"}[n] == "six"
    assert watched_count(Value((2, 6)), SizeLog(lambda: "")) == 12
    assert n.source.value(lambda leaf: 0) == 0 and (12 // n).source.value(lambda leaf: 0) is None


def test_comparisons_inside_torch_are_not_noted() -> None:
    model = Body2d(lambda net, h: net.rest(torch.nn.functional.group_norm(h, 4)))
    assert not record(model, images(2, 8), training=True).decisions
