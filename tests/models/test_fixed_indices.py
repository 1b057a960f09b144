"""Channels that code reads or writes by index: a cut must not shift the index."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import polarprune as pp
from polarprune.gates.folding import fold
from tests.helpers.cuts import Body, Body2d, images, reasons, worst

OTHERS = (images(3, 8), images(2, 12), images(2, 5))


def reading(pick: Any) -> Body:
    """A body that scales all channels by those that are picked."""
    return lambda net, h: net.rest(h * pick(h))


def writing(write: Any) -> Body:
    def body(net: Any, h: Tensor) -> Any:
        h = h.clone()
        write(h)
        return net.rest(h)

    return body


def assign(index: Any, value: float) -> Any:
    return lambda h: h.__setitem__(index, value)


def add(index: Any) -> Any:
    def write(h: Tensor) -> None:
        h[index] += 1

    return write


def unpacked(net: Any, h: Tensor) -> Any:
    first, second, *_ = h.unbind(1)
    return net.rest(h * first[:, None] + second[:, None])


EVERY = slice(None)
# What stays prunable of the first layer's 16 channels is stated with each body.
READS: dict[str, tuple[Any, int]] = {
    "h[:, 1]": (lambda h: h[:, 1][:, None], 15),
    "h[:, -1]": (lambda h: h[:, -1][:, None], 15),
    "h[:, -3]": (lambda h: h[:, -3][:, None], 15),
    "h[..., 1, :, :]": (lambda h: h[..., 1, :, :][:, None], 15),
    "h[:, 1, None]": (lambda h: h[:, 1, None], 15),
    "select": (lambda h: h.select(1, 1)[:, None], 15),
    "torch.select from the end": (lambda h: torch.select(h, -3, -2)[:, None], 15),
    "transposed": (lambda h: h.transpose(0, 1)[1][:, None], 15),
    "h[:, 5:6]": (lambda h: h[:, 5:6], 15),
    "narrow": (lambda h: h.narrow(1, 4, 1), 15),
    "a number that is read": (lambda h: h[:, h.shape[1] // 2][:, None], 15),
    "a list": (lambda h: h[:, [0, 2]].sum(1, keepdim=True), 14),
    "index_select": (lambda h: h.index_select(1, torch.tensor([3])), 15),
    "take": (lambda h: torch.take(h, torch.tensor([70])), 0),
    "flattened": (lambda h: h.flatten()[70], 0),
    "flattened from the second axis": (lambda h: h.flatten(1)[:, 100][:, None, None, None], 0),
    "slice of what is flattened": (lambda h: h.flatten(1)[:, 70:71][:, :, None, None], 0),
    "uneven chunks": (lambda h: h.chunk(6, 1)[-1], 15),
}
WRITES: dict[str, tuple[Any, int]] = {
    "h[:, 1] = 0.5": (assign((EVERY, 1), 0.5), 15),
    "h[:, -2] = 0.5": (assign((EVERY, -2), 0.5), 15),
    "h[..., 3, :, :] = 0.5": (assign((..., 3, EVERY, EVERY), 0.5), 15),
    "h[:, 1] += 1": (add((EVERY, 1)), 15),
    "h[:, :2] = 0.5": (assign((EVERY, slice(2)), 0.5), 16),
    "h[:, 2:] += 1": (add((EVERY, slice(2, None))), 16),
    "h[:, 3:-2] = 0.5": (assign((EVERY, slice(3, -2)), 0.5), 16),
    "h[:, ::2] = 0.5": (assign((EVERY, slice(None, None, 2)), 0.5), 0),
    "h[:, [0, 3]] = 0.5": (assign((EVERY, [0, 3]), 0.5), 0),
    "select and fill_": (lambda h: h.select(1, 2).fill_(0.5), 15),
    "narrow and mul_": (lambda h: h.narrow(1, 2, 3).mul_(2), 16),
    "index_fill_": (lambda h: h.index_fill_(1, torch.tensor([2]), 0.5), 0),
}
BODIES = {
    **{name: (reading(pick), count) for name, (pick, count) in READS.items()},
    **{name: (writing(write), count) for name, (write, count) in WRITES.items()},
    "unpacked": (unpacked, 0),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_number_of_a_channel_still_means_the_same_channel(name: str) -> None:
    body, prunable = BODIES[name]
    model = Body2d(body)
    graph = pp.trace(model, images(4, 8))
    assert sum(g.size for n, g in graph.prunable.items() if n.startswith("a")) == prunable
    assert prunable or "in model (" in reasons(graph) or "picked out" in reasons(graph)
    assert worst(model, graph, images(4, 8), *OTHERS) < 1e-12


@pytest.mark.parametrize("name", ["h[:, 1]", "h[:, 1] = 0.5", "h[:, :2] = 0.5", "flattened"])
def test_code_that_cannot_be_rewritten_freezes_what_it_counts(name: str) -> None:
    body, _ = BODIES[name]

    def unwritable(net: Any, h: Tensor) -> Any:
        with torch.enable_grad():  # which no graph can hold
            h = h + 0
        return body(net, h)

    model = Body2d(unwritable)
    graph = pp.trace(model, images(4, 8))
    assert "a" not in graph.prunable and "b" in graph.prunable
    assert worst(model, graph, images(4, 8), *OTHERS) < 1e-12


@pytest.mark.parametrize(("index", "least"), [(-1, 1), (-3, 3), (5, 6)])
def test_an_index_that_is_taken_for_its_shape_only_freezes_nothing(index: int, least: int) -> None:
    def unwritable(net: Any, h: Tensor) -> Any:
        with torch.enable_grad():  # which no graph can hold
            shape = h[:, index].shape
        return net.rest(h * torch.ones(shape, dtype=h.dtype)[:, None])

    model = Body2d(unwritable)
    graph = pp.trace(model, images(4, 8))
    group = graph.prunable["a"]
    assert (group.size, group.minimum) == (16, least) and not graph.rewritten
    for count in (least, 9):
        kept = torch.randperm(16)[:count]
        kept_units = graph.kept_units({"a": kept.tolist()})
        masked = copy.deepcopy(model)
        fold(masked, graph, kept_units.double())
        small = pp.shrink(model, graph, {"a": kept.tolist()})
        for x in (images(4, 8), *OTHERS):
            torch.testing.assert_close(small(x), masked(x))


def test_an_index_whose_values_decide_freezes_its_channel() -> None:
    def body(net: Any, h: Tensor) -> Any:
        return net.rest(h if h[:, -1].tolist() else 2 * h)

    graph = pp.trace(Body2d(body), images(4, 8))
    assert not any(name.startswith("a") for name in graph.prunable)
