"""Shape-only operations return what the operation returns, except the values, or call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, randn

from polarprune.tracing.recorder import attempt, record
from polarprune.tracing.shape_only import PLACEHOLDERS, Zeros

aten = torch.ops.aten
conv, norm = aten.convolution.default, aten.native_batch_norm.default
attention = aten._scaled_dot_product_flash_attention_for_cpu.default
pool, cat = aten.max_pool2d_with_indices.default, aten.cat.default
flat = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def statistics(training: bool) -> tuple[Any, ...]:
    return randn(3), randn(3), randn(3), randn(3).abs(), training, 0.1, 1e-5


FITTING = [
    (conv, (randn(2, 3, 9, 9), randn(6, 3, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)),
    (
        conv,
        (randn(1, 4, 9, 8), randn(6, 2, 3, 2), randn(6), [2, 1], [1, 0], [1, 3], False, [0, 0], 2),
    ),
    (conv, (randn(1, 4, 9), randn(6, 4, 3), randn(6), [3], [2], [1], False, [0], 1)),
    (aten.mm.default, (randn(4, 5), randn(3, 5).t())),
    (aten.addmm.default, (randn(3), randn(4, 5), randn(5, 3))),
    (aten.bmm.default, (randn(2, 4, 5), randn(2, 5, 3))),
    (attention, tuple(randn(2, 4, 7, 8) for _ in range(3))),
    (attention, tuple(randn(2, 7, 4, 8).transpose(1, 2) for _ in range(3))),
    (attention, tuple(randn(2, 7, 3, 4, 8, dtype=torch.float64).permute(2, 0, 3, 1, 4))),
    (norm, (randn(2, 3, 4, 4), *statistics(True))),
    (norm, (randn(2, 3), *statistics(False))),
    (norm, (randn(2, 3, 4), None, None, None, None, True, 0.1, 1e-5)),
    (pool, (randn(2, 3, 9, 9), [3, 3], [2, 2], [1, 1])),
    (pool, (randn(2, 3, 9, 8), [2], [], [0], [2])),
    (pool, (randn(2, 3, 9, 8), [3, 2])),
    (cat, ([randn(2, 3, 4), randn(2, 5, 4)], 1)),
    (cat, ([randn(2, 3), randn(1, 3)],)),
    (aten.relu_.default, (randn(2, 3).t(),)),
    (aten.add_.Tensor, (randn(2, 3), randn(2, 3))),
]
OTHERS = [
    (conv, (randn(2, 4, 9, 9), randn(6, 3, 3, 3), None, *flat)),
    (conv, (randn(2, 3, 2, 2), randn(6, 3, 3, 3), None, *flat)),
    (conv, (randn(2, 3, 9, 9), randn(6, 3, 3, 3), randn(5), *flat)),
    (conv, (randn(2, 3, 9, 9), randn(6, 3, 3, 3).double(), None, *flat)),
    (aten.mm.default, (randn(4, 5), randn(4, 3))),
    (aten.addmm.default, (randn(4), randn(4, 5), randn(5, 3))),
    (aten.bmm.default, (randn(2, 4, 5), randn(3, 5, 3))),
    (pool, (randn(2, 3, 9, 9), [2, 2], [2, 2], [2, 2])),
    (pool, (randn(2, 3, 2, 2), [3, 3])),
    (cat, ([randn(2, 3), randn(2, 4)], 0)),
    (cat, ([randn(2, 3), randn(2, 3, 1)], 1)),
    (cat, ([randn(2, 3), randn(2, 3)], 2)),
    (aten.add_.Tensor, (randn(2, 3), randn(2, 4))),
]
LEFT_ALONE = [
    (pool, (randn(2, 3, 9, 9), [2, 2], [2, 2], [0, 0], [1, 1], True)),
    (pool, (randn(3, 9, 9), [2, 2])),
    (cat, ([randn(2, 3), randn(0)], 1)),
    (cat, ([randn(2, 3), randn(2, 3)], -1)),
    (cat, ([randn(2, 3), randn(2, 3).double()], 1)),
    (aten.add_.Tensor, (randn(2, 3), randn(3))),
    (aten.add_.Tensor, (randn(2, 3), 1)),
    (aten.relu_.default, (torch.arange(3),)),
]


@pytest.mark.parametrize(("func", "args"), FITTING)
def test_shape_layout_and_type_are_those_of_the_operation(func: Any, args: Any) -> None:
    given, wanted = PLACEHOLDERS[func](Zeros(), *args), func(*args)
    pairs = zip(*([x] if isinstance(x, Tensor) else x for x in (given, wanted)), strict=True)
    for mine, real in pairs:
        assert mine.shape == real.shape and mine.dtype == real.dtype
        assert mine.stride() == real.stride()


@pytest.mark.parametrize(("func", "args"), OTHERS)
def test_what_does_not_fit_is_left_to_the_operation(func: Any, args: Any) -> None:
    assert PLACEHOLDERS[func](Zeros(), *args) is None
    with pytest.raises((RuntimeError, IndexError)):
        func(*args)


@pytest.mark.parametrize(("func", "args"), LEFT_ALONE)
def test_what_takes_more_thought_is_left_to_the_operation(func: Any, args: Any) -> None:
    assert PLACEHOLDERS[func](Zeros(), *args) is None
    func(*args)


def test_channels_last_is_left_to_the_operation() -> None:
    x = randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    assert PLACEHOLDERS[conv](Zeros(), x, randn(6, 3, 3, 3), None, *flat) is None
    assert PLACEHOLDERS[norm](Zeros(), x, *statistics(True)) is None
    assert (
        PLACEHOLDERS[pool](Zeros(), x, [2, 2]) is None
        and PLACEHOLDERS[cat](Zeros(), [x, x], 1) is None
    )


class Picky(nn.Module):
    """A network that reads the values of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return x.relu() if bool((x != 0).any()) else x.tanh()


def test_values_are_computed_where_code_looks_at_them() -> None:
    x = randn(2, 4)
    tape = record(Picky(), x, training=False)
    assert tape.has_values and [op.name for op in tape.ops][-1] == "relu"
    assert not record(nn.Linear(4, 4), x, training=False).has_values
    blind, _ = attempt(Picky(), x, training=False)
    assert [op.name for op in blind.ops][-1] == "tanh"
