"""A recorded run leaves nothing behind, in its own thread or in others, and its tape is final."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor, nn

from polarprune.tracing import recorder
from polarprune.tracing.recorder import attempt, record
from polarprune.tracing.shape_only import Zeros


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def left_behind(model: nn.Module) -> list[str]:
    """Return the modules that have hooks, or a forward of their own."""
    return [
        path
        for path, one in model.named_modules()
        if one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one)
    ]


def failing(module: nn.Module, mark: recorder.Mark) -> recorder.Forward:
    raise RuntimeError("cannot be made")


def test_a_forward_that_cannot_be_made_leaves_no_other_behind() -> None:
    def making(module: nn.Module, mark: recorder.Mark) -> recorder.Forward:
        return module.forward

    model = network()
    tape, error = attempt(
        model, torch.randn(1, 4), training=False, forwards={"0": making, "2": failing}
    )
    assert "cannot be made" in str(error) and not tape.ops
    assert left_behind(model) == []


def test_a_module_that_takes_no_hook_leaves_no_hooks_behind() -> None:
    class Refusing(nn.ReLU):
        def register_forward_hook(self, *args: object, **options: object) -> None:  # type: ignore[override]
            raise RuntimeError("takes no hooks")

    model = nn.Sequential(nn.Linear(4, 6), Refusing())
    _, error = attempt(model, torch.randn(1, 4), training=False)
    assert "takes no hooks" in str(error)
    assert left_behind(model) == []


def test_nobody_changes_a_tape() -> None:
    tape = record(network(), torch.randn(1, 4), training=False)
    with pytest.raises(FrozenInstanceError):
        tape.failed_in = "0"  # type: ignore[misc]
    for held in (tape.ops, tape.inputs, tape.outputs, tape.read_values, tape.stored_values):
        assert isinstance(held, tuple)


def test_the_end_of_one_run_does_not_disturb_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The placeholders of two runs share no memory, so one may end while the other asks for it."""
    asked, ended = threading.Event(), threading.Event()
    view: Callable[..., Tensor] = Zeros.of

    def slow(self: Zeros, like: Tensor, shape: torch.Size) -> Tensor:
        found = view(self, like, shape)
        if threading.current_thread().name == "slow":
            asked.set()
            assert ended.wait(60)
            assert self._memory, "released by another run"
        return found

    monkeypatch.setattr(Zeros, "of", slow)
    errors: list[Exception | None] = []
    run = threading.Thread(
        target=lambda: errors.append(attempt(network(), torch.randn(1, 4), training=False)[1]),
        name="slow",
    )
    run.start()
    assert asked.wait(60)
    _, error = attempt(network(), torch.randn(1, 4), training=False, forwards={"0": failing})
    assert error is not None  # before it waited for the other run to end
    ended.set()
    run.join(60)
    assert errors == [None]
