"""Lightning: steps, the optimizer of the user's module, loggers and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polarprune as pp
from polarprune.integrations.lightning import PruningCallback
from tests.helpers.adapters import (
    BATCH,
    BATCHES,
    EPOCHS,
    EXAMPLE,
    STEPS,
    Classifier,
    Digits,
    loader,
)
from tests.helpers.nets import digits_resnet
from tests.helpers.training import same_state, share, snapshot

pytestmark = [
    pytest.mark.usefixtures("shared_traces"),
    pytest.mark.filterwarnings("ignore"),  # advice about workers, loggers and devices
]


def fit(
    module: Any,
    *callbacks: Any,
    epochs: int = 2,
    data: Any = None,
    resume: Path | None = None,
    **options: Any,
) -> Any:
    options = {"logger": False, "enable_checkpointing": False, **options}
    if "strategy" not in options:
        options["accelerator"] = "cpu"
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader() if data is None else data, ckpt_path=resume)
    return trainer


def test_accumulated_gradients_are_one_step() -> None:
    callback = PruningCallback(macs=0.5)
    fit(Classifier(digits_resnet(8)), callback, epochs=4, accumulate_grad_batches=3)
    assert callback.pruner.step_count == callback.pruner.steps == 4 * 3  # 8 batches: 3, 3 and 2


def test_steps_that_a_gradient_scaler_skips_are_not_counted() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    callback = PruningCallback(macs=0.5)
    module = Classifier(digits_resnet(8))
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    fit(module, callback, epochs=5, plugins=precision)
    assert callback.pruner.landed and STEPS / 2 <= callback.pruner.step_count < STEPS


class Rates(lightning.Callback):
    """A callback that records the learning rates of weights and gates at every step."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """After the hook of the gates, which was there first."""

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.seen.append([group["lr"] for group in optimizer.param_groups])

        trainer.optimizers[0].register_step_pre_hook(note)


def test_gates_learn_at_a_tenth_of_the_rate_that_any_scheduler_sets() -> None:
    callback, rates = PruningCallback(macs=0.5), Rates()
    trainer = fit(Classifier(digits_resnet(8)), callback, rates, epochs=5)
    weights, gates = trainer.optimizers[0].param_groups
    assert (weights["weight_decay"], gates["weight_decay"]) == (5e-4, 0)
    assert len(rates.seen) == STEPS and len({pair[0] for pair in rates.seen}) > STEPS / 2
    assert all(gate == pytest.approx(weight / 10) for weight, gate in rates.seen)


class Late(Classifier):
    """Makes its network in `configure_model`, and its part of the optimizers by hand."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.head = nn.Linear(10, 10)
        self.automatic_optimization = False

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = digits_resnet(8)

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, labels = batch
        for optimizer in self.optimizers():
            loss = F.cross_entropy(self.head(self.net(images)), labels)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        both = self.head, self.net
        return [torch.optim.SGD(part.parameters(), lr=0.05, weight_decay=0.1) for part in both]


@pytest.mark.parametrize("part", ["", "net"])
def test_one_of_several_optimizers_gets_the_gates(part: str) -> None:
    """The whole module is pruned, of which each optimizer holds a part, or one part of it."""
    callback = PruningCallback(EXAMPLE, module=part, macs=0.5, compact="auto")
    module = Late()
    module.forward = lambda images: module.head(module.net(images))  # type: ignore[method-assign]
    trainer = fit(module, callback, epochs=5)
    assert [len(one.param_groups) for one in trainer.optimizers] == ([1, 2] if part else [2, 1])
    gates = {id(gate.alpha) for gate in callback.pruner.gates.values()}
    held = [id(p) for one in trainer.optimizers for g in one.param_groups for p in g["params"]]
    assert len(held) == len(set(held)) and gates <= set(held)
    assert callback.pruner.step_count == STEPS and share(callback.pruner)["macs"] <= 0.5
    assert callback.pruner.compactions and callback.export() is not None


def test_a_module_without_an_optimizer_of_torch_is_refused() -> None:
    module = Classifier(digits_resnet(8))
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]
    with pytest.raises(pp.PruneError, match="made no optimizer of torch that holds weights"):
        fit(module, PruningCallback(macs=0.5))


def test_the_trainers_loggers_get_the_rows(tmp_path: Path) -> None:
    callback = PruningCallback(macs=0.5)
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    fit(Classifier(digits_resnet(8)), callback, logger=logger)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    values = [one.value for one in found.Scalars("pruning/macs")]
    rows = callback.pruner.history[1:]
    assert values == pytest.approx([row["macs"] for row in rows]) and len(rows) == 2 * BATCHES
    assert found.Tags()["histograms"] == ["pruning/gates"]


def test_module_and_strategy_get_their_own_methods_back() -> None:
    module = Classifier(digits_resnet(8))
    trainer = fit(module, PruningCallback(macs=0.5))
    assert "on_load_checkpoint" not in vars(module) and "setup" not in vars(trainer.strategy)


def test_a_second_model_is_refused() -> None:
    callback = PruningCallback(macs=0.5)
    fit(Classifier(digits_resnet(8)), callback)
    with pytest.raises(pp.PruneError, match=r"has pruned a model already\. To resume, build"):
        fit(Classifier(digits_resnet(8)), callback)


def test_strategies_that_make_other_parameters_are_refused() -> None:
    class Sharded(SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

    with pytest.raises(pp.PruneError, match="Sharded makes other parameters than the module has"):
        fit(Classifier(digits_resnet(8)), PruningCallback(macs=0.5), strategy=Sharded("cpu"))


def test_an_example_is_needed() -> None:
    module = Classifier(digits_resnet(8))
    module.example_input_array = None
    with pytest.raises(pp.PruneError, match="or set the module's example_input_array"):
        fit(module, PruningCallback(macs=0.5))


def test_there_is_no_small_model_before_the_training() -> None:
    with pytest.raises(pp.PruneError, match=r"no pruner yet; call trainer\.fit first"):
        PruningCallback(macs=0.5).export()


def test_averaged_weights_of_lightning_take_part() -> None:
    """Lightning copies the averages into the module when the training ends."""
    average = lightning.callbacks.EMAWeightAveraging(decay=0.9)
    callback = PruningCallback(macs=0.3, compact="auto")
    module = Classifier(digits_resnet(8))
    fit(module, callback, average, epochs=5)
    assert callback.pruner.compactions and share(callback.pruner)["macs"] <= 0.3
    small = callback.export()
    with torch.no_grad():
        assert torch.allclose(small.eval()(EXAMPLE), module.eval()(EXAMPLE), atol=1e-5)


class Averaging(lightning.callbacks.EMAWeightAveraging):
    def __init__(self, **options: Any) -> None:
        super().__init__(decay=0.9, **options)


@pytest.mark.parametrize(
    "average",
    [
        lambda: Averaging(update_starting_at_step=STEPS - 5),
        lambda: lightning.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=EPOCHS - 1),
    ],
    ids=["exponential", "stochastic"],
)
def test_averages_that_begin_late_are_compacted_too(average: Callable[[], Any]) -> None:
    callback = PruningCallback(macs=0.3, compact="auto")
    module = Classifier(digits_resnet(8))
    fit(module, callback, average(), epochs=EPOCHS)
    assert callback.pruner.compactions
    small = callback.export()
    with torch.no_grad():
        assert torch.allclose(small.eval()(EXAMPLE), module.eval()(EXAMPLE), atol=1e-5)


class Saved(DataLoader[Any]):
    """Continues in the middle of an epoch, as Lightning wants it."""

    start = done = 0

    def __iter__(self) -> Any:
        first, self.start, self.done = self.start, 0, self.start
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.done = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]


class Killed(Exception):
    pass


class Kill(lightning.Callback):
    """Writes a checkpoint in the middle of an epoch, and kills the run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == STEPS // 2:
            trainer.save_checkpoint(self.file)
            raise Killed


@pytest.mark.parametrize("options", [{}, {"precision": "64-true"}], ids=str)
def test_a_killed_run_with_an_average_resumes_in_the_middle_of_an_epoch(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    file, found = tmp_path / "c.ckpt", []
    runs: list[tuple[list[Any], Path | None]] = [([], None), ([Kill(file)], None), ([], file)]
    for kill, resume in runs:
        torch.manual_seed(1)
        module = Classifier(digits_resnet(8))
        pruning, data = PruningCallback(macs=0.3, compact="auto"), Saved(Digits(), BATCH)
        with pytest.raises(Killed) if kill else contextlib.nullcontext():
            more = {"epochs": EPOCHS, "data": data, "resume": resume, **options}
            fit(module, pruning, Averaging(), *kill, **more)
        found.append(snapshot(module))
    assert pruning.pruner.compactions and pruning.pruner.step_count == STEPS
    assert same_state(found[0], found[2]) and not same_state(found[0], found[1])


class SetUp(Classifier):
    """Has a hook that may make the network."""

    def setup(self, stage: str) -> None:
        pass


def test_an_average_from_before_a_network_that_is_made_late_is_refused() -> None:
    callbacks = [PruningCallback(macs=0.5), Averaging()]
    with pytest.raises(pp.PruneError, match=r"make the network in __init__, without the hooks"):
        fit(SetUp(digits_resnet(8)), *callbacks)
    pruning = PruningCallback(macs=0.5)
    fit(SetUp(digits_resnet(8)), pruning)
    assert pruning.pruner.landed


REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "an average comes first": (
        [Averaging(), PruningCallback(macs=0.5)],
        {},
        "let PruningCallback be the first",
    ),
    "half precision": (
        [PruningCallback(macs=0.5)],
        {"precision": "bf16-true"},
        "half precision is too coarse .* set precision='bf16-mixed'",
    ),
    "another part": (
        [PruningCallback(EXAMPLE, module="nett", macs=0.5)],
        {},
        "Classifier has no module='nett'; its parts are net",
    ),
}


@pytest.mark.parametrize(("callbacks", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_pruner_cannot_follow_is_refused(
    callbacks: list[Any], options: dict[str, Any], message: str
) -> None:
    module = Classifier(digits_resnet(8))
    with pytest.raises(pp.PruneError, match=message):
        fit(module, *callbacks, **options)
    assert list(module.state_dict()) == list(Classifier(digits_resnet(8)).state_dict())
