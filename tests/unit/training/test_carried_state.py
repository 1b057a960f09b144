"""The model's own state dict contains the pruner's state: no third state has to be stored."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.training.state_bytes import decode, encode
from tests.helpers.nets import digits_resnet
from tests.helpers.resuming import STEPS, Parts, assert_same, build, learn
from tests.helpers.training import same_state, sgd, snapshot

pytestmark = pytest.mark.usefixtures("shared_traces")
KEY = "polarprune_state"


def by_torch(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_safetensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return safetensors.torch.load(safetensors.torch.save(state))


FILES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "torch": by_torch,
    "safetensors": by_safetensors,
}


def resumed(first: Parts, through: Callable[..., Any] = by_torch, **settings: Any) -> Parts:
    """Build a new run from only the states of the model and the optimizer."""
    second = build(**settings)
    second[1].load_state_dict(through(first[1].state_dict()))
    second[2].load_state_dict(by_torch(first[2].state_dict()))
    return second


def assert_same_runs(one: Parts, other: Parts) -> None:
    assert_same(one[0].state_dict(), other[0].state_dict())
    assert same_state(snapshot(one[1]), snapshot(other[1]))
    assert_same(one[2].state_dict(), other[2].state_dict())
    assert one[0].plan() == other[0].plan()


# --- bit-equal ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("compact", [None, "auto"])
def test_model_and_optimizer_are_enough_to_resume_bit_equal(
    optimizer: str, compact: str | None, file: str
) -> None:
    settings = {"optimizer": optimizer, "compact": compact}
    whole, parts = build(**settings), build(**settings)
    for first, last in pairwise((0, 3, 15, 25, STEPS)):
        if first:
            parts = resumed(parts, FILES[file], **settings)
        for one in (whole, parts):
            learn(one, first, last)
        assert_same_runs(parts, whole)
    assert bool(parts[0].compactions) == (compact == "auto")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_that_was_compacted_by_hand_resumes_bit_equal(optimizer: str) -> None:
    whole = build(optimizer)
    learn(whole, 0, 17)
    whole[0].compact()
    second = resumed(whole, optimizer=optimizer)
    for parts in (whole, second):
        learn(parts, 17, STEPS)
    assert_same_runs(second, whole)


@pytest.mark.parametrize("attached_after", ["the model", "the optimizer"])
def test_an_optimizer_that_is_attached_later_is_resumed_too(attached_after: str) -> None:
    first = build()
    learn(first, 0, 25)
    first[0].compact()
    model, pruner = unattached()
    model.load_state_dict(by_torch(first[1].state_dict()))
    optimizer = sgd(pruner)
    if attached_after == "the model":
        pruner.attach(optimizer)
    optimizer.load_state_dict(by_torch(first[2].state_dict()))
    if attached_after == "the optimizer":
        pruner.attach(optimizer)
    second = (pruner, model, optimizer)
    for parts in (first, second):
        learn(parts, 25, STEPS)
    assert_same_runs(second, first)


def test_an_optimizer_that_was_built_before_the_model_was_loaded_is_cut_when_attached() -> None:
    first = build()
    learn(first, 0, 25)
    first[0].compact()
    model, pruner = unattached()
    optimizer = sgd(pruner)
    model.load_state_dict(by_torch(first[1].state_dict()))
    pruner.attach(optimizer)
    optimizer.load_state_dict(by_torch(first[2].state_dict()))
    second = (pruner, model, optimizer)
    for parts in (first, second):
        learn(parts, 25, STEPS)
    assert_same_runs(second, first)


def unattached() -> tuple[Any, pp.Pruner]:
    torch.manual_seed(1)
    model = digits_resnet(8)
    return model, pp.Pruner(model, torch.zeros(2, 1, 8, 8), macs=0.3, steps=STEPS)


class Wrapped(nn.Module):
    """A model inside another module, as in Lightning."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.before, self.net, self.after = nn.Linear(2, 2), model, nn.Linear(2, 2)


@pytest.mark.parametrize("strict", [True, False])
def test_the_state_travels_in_the_state_of_a_module_around_the_model(strict: bool) -> None:
    first = build(compact="auto")
    learn(first, 0, 25)
    second = build(compact="auto")
    state = by_safetensors(Wrapped(first[1]).state_dict())
    assert f"net.{KEY}" in state
    found = Wrapped(second[1]).load_state_dict(state, strict=strict)
    assert not found.missing_keys and not found.unexpected_keys
    second[2].load_state_dict(by_torch(first[2].state_dict()))
    for parts in (first, second):
        learn(parts, 25, STEPS)
    assert_same_runs(second, first)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_the_explicit_state_may_be_loaded_too_in_any_order(order: tuple[int, ...]) -> None:
    first = build(compact="auto")
    learn(first, 0, 25)
    second = build(compact="auto")
    states = [by_torch(part.state_dict()) for part in first]
    for number in order:
        second[number].load_state_dict(states[number])
    for parts in (first, second):
        learn(parts, 25, STEPS)
    assert_same_runs(second, first)


def test_the_dict_that_was_loaded_is_not_changed() -> None:
    first, second = build(), build()
    state = first[1].state_dict()
    keys = list(state)
    second[1].load_state_dict(state)
    assert list(state) == keys and keys[-1] == KEY


# --- one entry ------------------------------------------------------------------------------------


def test_the_entry_is_one_tensor_of_bytes_that_no_pickle_made() -> None:
    pruner, model, _ = build()
    entry = model.state_dict()[KEY]
    assert entry.dtype == torch.uint8 and entry.dim() == 1
    tensors = safetensors.torch.load(bytes(entry.tolist()))
    assert tensors and all(isinstance(value, Tensor) for value in model.state_dict().values())
    assert_same(decode(entry), pruner.state_dict())


def test_plain_data_and_tensors_come_back_as_they_were() -> None:
    state = {
        "tensor": {"tensor": torch.arange(3), "zero": torch.zeros(())},
        "empty": torch.zeros(0, dtype=torch.float64),
        "rows": [{"step": 1, "share": 0.1}, {"step": 2, "share": float("inf")}],
        "flags": {"a": True, "b": torch.tensor([True, False])},
    }
    assert_same(decode(encode(state, torch.device("cpu"))), state)


DAMAGES: dict[str, Callable[[Tensor], object]] = {
    "truncated": lambda entry: entry[:-9],
    "shorter than its header": lambda entry: entry[:100],
    "empty": lambda entry: entry[:0],
    "zeros": torch.zeros_like,
    "averaged": lambda entry: entry * 0.9,
    "on meta": lambda entry: entry.to("meta"),
    "a number": lambda entry: 3,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_refused_and_nothing_changes(damage: str) -> None:
    first, second = build(), build()
    learn(first, 0, 25)
    first[0].compact()
    state = {**first[1].state_dict()}
    state[KEY] = DAMAGES[damage](state[KEY])
    before = snapshot(second[1])
    with pytest.raises(pp.PruneError, match=r"the pruner's state .* is damaged.*Nothing was"):
        second[1].load_state_dict(state)
    assert same_state(before, snapshot(second[1]))


def test_the_entry_of_another_run_is_refused_and_nothing_changes() -> None:
    first, second = build(macs=0.5), build()
    before = snapshot(second[1])
    with pytest.raises(pp.PruneError, match=r"from a run with settings .*0\.5.*Nothing was"):
        second[1].load_state_dict(first[1].state_dict())
    assert same_state(before, snapshot(second[1]))


# --- mismatched parts -----------------------------------------------------------------------------


def without_entry(model: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in by_torch(model.state_dict()).items() if key != KEY}


def refused(parts: Parts, message: str) -> None:
    before = snapshot(parts[1])
    with pytest.raises(pp.PruneError, match=message):
        learn(parts, 0, 1)
    assert same_state(weights(before), weights(snapshot(parts[1])))


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all entries except running statistics, which a forward pass changes."""
    return {key: x for key, x in state.items() if "running" not in key and "num_" not in key}


def test_gates_without_their_state_are_refused_at_the_next_step() -> None:
    first, second = build(), build()
    learn(first, 0, 5)
    second[1].load_state_dict(without_entry(first[1]))
    refused(second, r"gates were loaded .* without the pruner's state.*Nothing was changed")
    second[0].load_state_dict(first[0].state_dict())
    learn(second, 5, 6)
    assert second[0].step_count == 6


def test_the_gates_of_the_present_step_need_no_state() -> None:
    first, second = build(), build()
    second[1].load_state_dict(without_entry(first[1]))
    learn(second, 0, 1)
    second[1].load_state_dict(without_entry(second[1]))
    learn(second, 1, 2)
    assert second[0].step_count == 2


@pytest.mark.parametrize("loaded", [1, 2])
def test_a_model_or_an_optimizer_that_was_loaded_alone_is_refused_at_the_next_step(
    loaded: int,
) -> None:
    first, second = build(), build()
    learn(first, 0, 5)
    second[loaded].load_state_dict(by_torch(first[loaded].state_dict()))
    steps = (5, 0) if loaded == 1 else (0, 5)
    refused(second, r"the model is at step {}, but the optimizer is at step {}:".format(*steps))
    second[0].load_state_dict(second[0].state_dict())  # the remedy that the message names
    learn(second, 5, 6)
    assert second[0].step_count == steps[0] + 1


def test_a_fresh_optimizer_for_a_resumed_model_is_refused_at_the_next_step() -> None:
    first = build()
    learn(first, 0, 5)
    model, pruner = unattached()
    model.load_state_dict(by_torch(first[1].state_dict()))
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    refused((pruner, model, optimizer), "the model is at step 5, but the optimizer is at step 0")


@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_the_model_without_gates_are_refused_and_nothing_changes(strict: bool) -> None:
    _, model, _ = parts = build()
    learn(parts, 0, 2)
    pruner, plain, before = parts[0], digits_resnet(8), snapshot(model)
    with pytest.raises(pp.PruneError, match=r"without gates\. Load such weights before the Pruner"):
        model.load_state_dict(plain.state_dict(), strict=strict)
    assert same_state(before, snapshot(model))
    learn(parts, 2, 3)
    assert pruner.step_count == 3


@pytest.mark.parametrize("strict", [True, False])
def test_the_state_of_a_wrapper_is_refused_and_nothing_changes(strict: bool) -> None:
    (_, first, _), (_, second, _) = build(), build()
    before = snapshot(second)
    with pytest.raises(
        pp.PruneError, match=r"begin with 'module\.', because it is the state of a wrapper"
    ):
        second.load_state_dict(nn.DataParallel(first).state_dict(), strict=strict)
    assert same_state(before, snapshot(second))
    nn.DataParallel(second).load_state_dict(nn.DataParallel(first).state_dict())


def test_other_weights_are_loaded_as_torch_does() -> None:
    pruner, model, _ = build()
    learn((pruner, model, _), 0, 2)
    found = model.load_state_dict({"0.1.bias": torch.full((8,), 7.0)}, strict=False)
    assert "0.1.bias" not in found.missing_keys
    learn((pruner, model, _), 2, 3)
    assert pruner.step_count == 3


# --- copies ---------------------------------------------------------------------------------------


def test_copies_have_no_state_and_accept_that_of_the_model() -> None:
    _, model, _ = parts = build()
    learn(parts, 0, 5)
    twin = copy.deepcopy(model)
    state = model.state_dict()
    assert list(twin.state_dict()) == [key for key in state if key != KEY]
    assert twin.load_state_dict(state).missing_keys == []
    model.load_state_dict({**twin.state_dict()})
    learn(parts, 5, 6)


def test_the_export_has_no_hooks_and_no_entry() -> None:
    pruner, *_ = parts = build()
    learn(parts, 0, STEPS)
    small = pruner.export()
    assert not any("polarprune" in key for key in small.state_dict())
    for module in small.modules():
        assert not hasattr(module, KEY)
        assert not (module._state_dict_hooks or module._load_state_dict_pre_hooks)
        assert not module._load_state_dict_post_hooks
    fresh = copy.deepcopy(small)
    fresh.load_state_dict(small.state_dict())
