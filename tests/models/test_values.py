"""Models whose operations depend on values are traced with real values.

Recorded runs use placeholders for the results of products (`shape_only`). If a branch, an index, a
shape or a file of numbers depends on them, the run is repeated with every operation computed. No
placeholder value may remain in a model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.tracing.recorder import attempt
from polarprune.tracing.tape import Tape

Reads = Callable[[Tensor], Any]


class Branch(nn.Module):
    """A model that takes one branch if `reads` finds something in an activation, else another."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.three, self.out = nn.Conv2d(8, 6, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = self.two(x).relu() if self.reads(x) else x.tanh()
        return self.out(self.three(x).mean((2, 3)))


def _factor(x: Tensor) -> bool:
    flat = x[0].flatten(1)
    try:
        torch.linalg.cholesky(flat @ flat.T)
    except RuntimeError:  # not so for what is really there
        return False
    return True


def _written_into(x: Tensor) -> bool:
    there = torch.zeros(x.shape)
    there[:, :4] = x[:, :4]
    return there.view(-1).tolist() != [0.0] * x.numel()


def _shared(x: Tensor) -> bool:
    there = torch.zeros(x.shape)
    view = there[0]
    view.copy_(x[0])
    return bool(np.asarray(there).any())


def _cut_in_two(x: Tensor) -> bool:
    place = x.flatten(1).norm(dim=1).argmax() + (x[0, 0, 0, :1] != 0) * 3
    return torch.tensor_split(x, place.flatten(), 1)[0].shape[1] >= 3


def _packed(x: Tensor) -> bool:
    lengths = (x.flatten(1) != 0).all(1).long() * 3 + 1
    packed = nn.utils.rnn.pack_padded_sequence(x.flatten(2), lengths, batch_first=True)
    return len(packed.data) > 2


READS: dict[str, Reads] = {
    "item": lambda x: x.abs().sum().item() > 0,
    "comparison": lambda x: x.sum() != 0,
    "any of": lambda x: any(v != 0 for v in x.flatten()[:3]),
    "equal": lambda x: not torch.equal(x, 0 * x),
    "allclose": lambda x: not torch.allclose(x, 0 * x),
    "nonzero": lambda x: len(x.nonzero()),
    "unique": lambda x: len(x.unique()) > 1,
    "mask": lambda x: x[x != 0].numel(),
    "large mask": lambda x: x.repeat(1, 1, 32, 64)[(x != 0).repeat(1, 1, 32, 64)].numel(),
    "mask of bytes": lambda x: x.flatten()[(x != 0).flatten().to(torch.uint8)].numel(),
    "tolist": lambda x: any(x.flatten().tolist()),
    "tolist of a copy": lambda x: any(x.clone().detach().cpu().flatten().tolist()),
    "tolist of data": lambda x: any(x.data.flatten().tolist()),
    "numpy": lambda x: x.numpy().any(),
    "array": lambda x: np.asarray(x).any(),
    "dlpack": lambda x: np.from_dlpack(x).any(),
    "storage": lambda x: any(x.untyped_storage().tolist()),
    "repr": lambda x: repr(x) != repr(0 * x),
    "format": lambda x: float(f"{x.abs().sum()}") > 0,
    "an error that is caught": _factor,
    "written into": _written_into,
    "written through a view": _shared,
    "tensor_split": _cut_in_two,
    "packed": _packed,
    "index": lambda x: x.flatten()[x.flatten().argmax()] != 0,
    "topk": lambda x: x.flatten().topk(2).indices.tolist()[0] > 1,
}


UNSEEN = ("an error that is caught", "packed")  # the cut model may take another way


def really(model: nn.Module, x: Tensor, training: bool) -> Tape:
    tape, error = attempt(copy.deepcopy(model), x.clone(), training=training, with_values=True)
    assert error is None
    return tape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READS)
def test_the_way_is_the_one_that_values_lead(name: str) -> None:
    torch.manual_seed(0)
    size = 3 if name == "storage" else 8  # torch lists a storage byte by byte
    model, x = Branch(READS[name]), torch.randn(2, 3, size, size)
    graph = pp.trace(model, x)
    for training, tape in enumerate(graph.tapes):
        assert tape.has_values
        wanted = really(model, x, bool(training))
        assert [op.name for op in tape.ops] == [op.name for op in wanted.ops]
        assert "relu" in [op.name for op in tape.ops]
    assert "two" in {module for group in graph.groups.values() for module in group.consumers}
    if name not in UNSEEN:
        assert graph.groups["one"].frozen
    assert graph.prunable["three"].size == 6


class Chosen(nn.Module):
    """Experts by argmax, an order from a weight, an order from a buffer of floats."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.route, self.out = nn.Linear(8, 2), nn.Conv2d(8, 4, 1)
        self.score = nn.Parameter(torch.randn(8))
        self.register_buffer("order", torch.tensor([3.0, 1, 2, 0, 7, 6, 5, 4]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if self.by == "argmax":
            chosen = self.route(x.mean((2, 3))).argmax(1)
            return self.out(torch.stack([x, self.two(x)], 1)[torch.arange(len(x)), chosen])
        if self.by == "data":
            same = torch.zeros(x.shape)
            same.data.copy_(x)
            return self.out(self.two(x)[:, same.mean((0, 2, 3)).topk(8).indices])
        if self.by == "topk":
            return self.out(self.two(x)[:, self.two(x).mean((0, 2, 3)).topk(8).indices])
        index = self.score.argsort() if self.by == "score" else self.order.long()
        return self.out(self.two(x).index_select(1, index))


@pytest.mark.parametrize("by", ["argmax", "topk", "data", "score", "order"])
def test_indices_are_those_that_values_give(by: str) -> None:
    torch.manual_seed(0)
    model, x = Chosen(by), torch.randn(4, 3, 8, 8)
    graph = pp.trace(model, x)
    assert graph.tapes[0].has_values
    for training, tape in enumerate(graph.tapes):
        for mine, real in zip(tape.ops, really(model, x, bool(training)).ops, strict=True):
            for a, b in zip(mine.tensors(), real.tensors(), strict=True):
                assert a.data is None or b.data is None or torch.equal(a.data, b.data)


class Remembers(nn.Module):
    """A module that stores what it computed and reads it later."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.mean = nn.Parameter(torch.ones(8))
        self.plain, self.listed = torch.ones(8), [torch.ones(8)]
        self.seen: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        new = y.mean((0, 2, 3))
        if self.how == "data":
            self.mean.data.mul_(0.9).add_(new)
        elif self.how == "a view":
            self.mean[None].copy_(new)
        elif self.how == "other data":
            self.mean.data = new
        elif self.how == "another":
            self.mean = nn.Parameter(new)
        elif self.how == "plain":
            self.plain.add_(new)
        elif self.how == "listed":
            torch._foreach_add_(self.listed, [new])
        elif self.how == "appended":
            self.seen.append(new)
        elif self.how == "named":
            self.by_name["mean"] = new
        elif self.how == "out":
            torch.add(new, 1, out=self.plain)
        else:
            x.add_(new.mean())
        return self.two(y * self.mean.view(-1, 1, 1))


@pytest.mark.parametrize(
    "how",
    [
        "data",
        "a view",
        "other data",
        "another",
        "plain",
        "listed",
        "appended",
        "named",
        "out",
        "input",
    ],
)
def test_nothing_that_was_made_up_stays_behind(how: str) -> None:
    torch.manual_seed(0)
    model, x = Remembers(how), torch.randn(2, 3, 8, 8)
    before, given, mean = copy.deepcopy(model.state_dict()), x.clone(), model.mean
    pp.trace(model, x)
    assert model.mean is mean and torch.equal(x, given)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.seen and not model.by_name
    assert torch.equal(model.plain, torch.ones(8)) and torch.equal(model.listed[0], torch.ones(8))


class Pooled(nn.Module):
    """Integers that nobody reads, and some that do not come of products."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 4, 1)
        self.norm, self.pool = nn.BatchNorm1d(8), nn.MaxPool1d(2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2).masked_fill((ids == 0)[:, None], 0.0)
        sizes = torch.tensor([len(ids), int(ids.shape[1])]).tolist()
        flags = torch.zeros_like(x, dtype=torch.bool)
        return self.two(self.pool(self.norm(self.one(x.masked_fill(flags, sizes[0])))))


def test_integers_of_the_example_are_known_without_products() -> None:
    graph = pp.trace(Pooled(), torch.arange(18).reshape(2, 9) % 9)
    assert [tape.has_values for tape in graph.tapes] == [False, False]
    assert [group.size for group in graph.prunable.values()] == [8, 8]


def test_indices_of_a_pool_that_are_read_are_computed() -> None:
    class Unpooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
            self.pool, self.back = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            small, indices = self.pool(self.one(x))
            return self.two(self.back(small, indices))

    assert pp.trace(Unpooled(), torch.randn(2, 3, 8, 8)).tapes[0].has_values
