"""Properties of labels, compared with a naive union-find and with the tensors they describe."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from polarprune.channels.labels import Axis, Labels, along, compress, reshape, support

SEEDS = range(40)


class Naive:
    """Union-find that joins one pair at a time; the smallest label of a set is its root."""

    def __init__(self, count: int) -> None:
        self.sets = [{label} for label in range(count)]

    def join(self, a: int, b: int) -> None:
        if self.sets[a] is not self.sets[b]:
            merged = self.sets[a] | self.sets[b]
            for label in merged:
                self.sets[label] = merged

    def roots(self) -> list[int]:
        return [min(members) for members in self.sets]


def some_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 4)))


def another_shape(rng: random.Random, old: tuple[int, ...]) -> tuple[int, ...]:
    """Return a random shape with as many elements, by grouping the shuffled prime factors."""
    factors = [p for size in old for p in _primes(size)]
    rng.shuffle(factors)
    factors += [1] * rng.randint(0, 2)
    rng.shuffle(factors)
    new: list[int] = []
    for factor in factors:
        if new and rng.random() < 0.5:
            new[-1] *= factor
        else:
            new.append(factor)
    return tuple(new)


def _primes(n: int) -> list[int]:
    for p in range(2, n + 1):
        if n % p == 0:
            return [p, *_primes(n // p)]
    return []


def some_layer(rng: random.Random, shape: tuple[int, ...], labels: int = 5) -> Tensor:
    """Return random labels along some random axes."""
    sizes = [size if rng.random() < 0.6 else 1 for size in shape]
    return torch.tensor(
        [rng.randrange(labels) for _ in range(math.prod(sizes))], dtype=torch.long
    ).reshape(sizes)


# --------------------------------------------------------------------------------------------------
# joining


@pytest.mark.parametrize("seed", SEEDS)
def test_roots_are_those_of_a_naive_union_find(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 200)
    labels, naive = Labels(), Naive(count)
    labels.fresh(count)
    for _ in range(rng.randint(0, 60)):
        size = rng.randint(1, 4)
        pairs = [(rng.randrange(count), rng.randrange(count)) for _ in range(size)]
        labels.join(torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs]))
        for a, b in pairs:
            naive.join(a, b)
        if rng.random() < 0.1:  # roots may be asked for at any time
            assert labels.roots().tolist() == naive.roots()
    assert labels.roots().tolist() == naive.roots()


@pytest.mark.parametrize("seed", SEEDS)
def test_roots_of_a_long_chain_in_random_order_are_one(seed: int) -> None:
    order = list(range(300))
    random.Random(seed).shuffle(order)
    labels = Labels()
    labels.fresh(300)
    for a, b in pairwise(order):
        labels.join(torch.tensor([a]), torch.tensor([b]))
    assert labels.roots().tolist() == [0] * 300


@pytest.mark.parametrize("seed", SEEDS)
def test_join_broadcasts_like_a_sum(seed: int) -> None:
    rng = random.Random(seed)
    shape = some_shape(rng)
    left, right = some_layer(rng, shape, 30), some_layer(rng, shape, 30)
    labels, naive = Labels(), Naive(30)
    labels.fresh(30)
    labels.join(left, right)
    full = (left + 0 * right).flatten().tolist(), (right + 0 * left).flatten().tolist()
    for a, b in zip(*full, strict=True):
        naive.join(a, b)
    assert labels.roots().tolist() == naive.roots()


@pytest.mark.parametrize("seed", SEEDS)
def test_flatten_onto_joins_exactly_what_shares_a_place_on_the_axis(seed: int) -> None:
    rng = random.Random(seed)
    shape = some_shape(rng)
    layer = some_layer(rng, shape, 30)
    axis = rng.randrange(len(shape))
    labels, naive = Labels(), Naive(30)
    labels.fresh(30)
    first = labels.flatten_onto(layer, (axis,))
    for row in layer.movedim(axis, 0).reshape(layer.shape[axis], -1).tolist():
        for label in row:
            naive.join(row[0], label)
    assert labels.roots().tolist() == naive.roots()
    assert set(support(first)) <= {axis}
    assert torch.equal(labels.roots()[first.expand(layer.shape)], labels.roots()[layer])


def test_labels_that_are_not_joined_stay_apart() -> None:
    labels = Labels()
    labels.fresh(4)
    same = torch.tensor([1, 2])
    labels.join(same, same)
    assert labels.roots().tolist() == [0, 1, 2, 3]


def test_fresh_labels_never_repeat() -> None:
    labels = Labels()
    assert labels.fresh(3).tolist() == [0, 1, 2]
    assert labels.fresh(2).tolist() == [3, 4]
    assert labels.count == 5


def test_tensor_gets_a_layer_for_each_axis_longer_than_one() -> None:
    labels = Labels()
    layers = labels.of_tensor("conv.weight", (4, 1, 3))
    assert [tuple(layer.shape) for layer in layers] == [(4, 1, 1), (1, 1, 3)]
    assert torch.cat([layer.flatten() for layer in layers]).tolist() == list(range(7))
    assert labels.axes == [Axis("conv.weight", 0, 0, 4), Axis("conv.weight", 2, 4, 3)]


def test_first_reason_to_freeze_counts_for_the_whole_component() -> None:
    labels = Labels()
    labels.fresh(5)
    labels.freeze(torch.tensor([3]), "first")
    labels.freeze(torch.tensor([1, 4]), "second")
    labels.join(torch.tensor([1]), torch.tensor([3]))
    numbers, texts = labels.reasons(labels.roots())
    frozen = (numbers >= 0).nonzero().flatten().tolist()
    assert {k: texts[numbers[k]] for k in frozen} == {1: "first", 4: "second"}


# --------------------------------------------------------------------------------------------------
# layers


@pytest.mark.parametrize("seed", range(300))
def test_reshaped_layer_is_the_layer_of_the_reshaped_tensor(seed: int) -> None:
    rng = random.Random(seed)
    old = some_shape(rng)
    new = another_shape(rng, old) or (1,)
    layer = some_layer(rng, old)
    got = reshape(layer, old, new)
    assert got.dim() == len(new)
    assert torch.equal(got.expand(new), layer.expand(old).reshape(new))


@pytest.mark.parametrize("seed", range(100))
def test_reshaped_layer_is_as_small_as_the_axes_it_varies_along(seed: int) -> None:
    rng = random.Random(seed)
    old = some_shape(rng)
    new = another_shape(rng, old) or (1,)
    got = reshape(some_layer(rng, old, 3), old, new)
    for axis in support(got):
        assert not torch.equal(got, got.narrow(axis, 0, 1).expand(got.shape))


def test_reshape_to_a_scalar_and_back_keeps_the_label() -> None:
    scalar = reshape(torch.tensor([[7]]), (1, 1), ())
    assert scalar.shape == () and int(scalar) == 7
    assert reshape(scalar, (), (1, 1)).tolist() == [[7]]


def test_flatten_to_linear_repeats_a_channel_for_every_pixel() -> None:
    layer = along(torch.arange(3), 1, 4)
    flat = reshape(layer, (2, 3, 2, 2), (2, 12))
    assert flat.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]


def test_large_untouched_axes_are_not_expanded() -> None:
    layer = along(torch.arange(8), 1, 4)
    got = reshape(layer, (4096, 8, 512, 512), (4096, 2, 4, 512 * 512))
    assert got.shape == (1, 2, 4, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_compress_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    shape = some_shape(rng)
    full = some_layer(rng, shape, 2).expand(shape)
    small = compress(full)
    assert torch.equal(small.expand(shape), full)
    assert compress(full.contiguous()).shape == small.shape


def test_along_lays_a_vector_on_one_axis() -> None:
    layer = along(torch.tensor([5, 6]), 2, 4)
    assert layer.shape == (1, 1, 2, 1)
    assert layer.flatten().tolist() == [5, 6]
    assert support(layer) == (2,)
