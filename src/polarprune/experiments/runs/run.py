"""`Run`: an experiment from data to card; resumable.

A run trains a baseline, prunes it in a second training, removes the closed channels, scores the
result and fine-tunes it if asked to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...cost.timing import environment
from ...errors import PruneError
from ...files.model_file import save
from ...files.writing import make_folder, replacing
from ...plain_data import JsonObject, RowHandler
from ...torch_internals.markers import attached_recipe
from ...torch_internals.process_settings import convolutions_tuned
from ...training.pruner import Pruner
from ..data.task import Task
from ..methods.base import Limits
from ..methods.from_scratch import FROM_SCRATCH
from ..networks.table import make_network
from ..processes import rank_and_count, wait_for_all
from ..settings import Settings
from .best_weights import BestWeights
from .calibration import recalibrate, recalibrated
from .card import CostOfAnExample, Pruned, make_card
from .files import append, read_json, write_json
from .rehearsal import WARM_UP, planned_costs, time_steps
from .report_files import write_report
from .source import commit
from .start import check_network, is_published, load_start
from .trainer import Trainer
from .training_cost import Costs, costs_of_file, macs_of_an_example, metadata, with_total
from .weights import copy_weights, load_weights, write_weights

CHECKPOINT_PAUSE = 60.0  # seconds, at least, between checkpoints
_RECALIBRATED = 20  # batches: ε has moved on since the statistics were estimated
_STAGES = ("baseline", "prune", "tune", "scratch")
_MAY_CHANGE = ("compiled", "tune_epochs", "tune_lr", "tune_decay", "scored")  # when it is resumed
_DEFAULTS = dataclasses.asdict(Settings(""))
_LOGGED = ("macs", "params", "closed", "between", "eps", "lam", "histogram")


class Run:
    """One experiment in a folder. Stages that are finished there are not repeated.

    Args:
        settings: Every number of the experiment.
        data: Training and test examples.
        out: Folder of the run.
        device: Where to train.
        progress: Called with every row of the log.
    """

    def __init__(
        self,
        settings: Settings,
        data: Task,
        out: Path,
        *,
        device: str = "cpu",
        progress: RowHandler = lambda row: None,
    ) -> None:
        self.settings, self.out, self.progress = settings, out, progress
        self.commit = commit()  # now: sources may change while this runs
        if out.exists() and not out.is_dir():
            raise PruneError(f"--out {out}: it is a file. Choose a folder.")
        self.device = torch.device(device)
        self.data = data.to(device)
        torch.manual_seed(settings.seed)
        self.batches = self.data.stream(settings)
        self.writes = rank_and_count()[0] == 0  # of several processes, only the first writes
        self.costs: Costs = {}  # of every stage, in MACs

    def new_network(self) -> nn.Module:
        """Return the network of the settings, with new weights, on the device."""
        model = make_network(self.settings.network, self.data.classes).to(self.device)
        if self.device.type == "cuda":
            convert: Callable[..., nn.Module] = model.to  # torch's types lack this argument
            convert(memory_format=torch.channels_last)
        return model

    def claim(self, what: JsonObject) -> None:
        """Refuse a folder that holds another run; otherwise record which run this is.

        Args:
            what: Facts about the run that are not in the settings: method, budget, hold-out.
        """
        own = {**dataclasses.asdict(self.settings), **what}
        own = json.loads(json.dumps({k: v for k, v in own.items() if k not in _MAY_CHANGE}))
        note = self.out / "run.json"
        started = note.exists() and (self.out / "log.jsonl").exists()
        # Settings that a later version added have had their default values.
        stored = {**_DEFAULTS, **read_json(note)} if started else own
        free = () if stored.get("budget") else ("budget", "method")  # only a baseline so far
        other = [key for key in own if stored.get(key) != own[key] and key not in free]
        if other:
            raise PruneError(
                f"--out {self.out}: it holds another run ({other[0]} is {stored.get(other[0])} "
                f"there, {own[other[0]]} here). Choose another folder."
            )
        if self.writes:
            make_folder(self.out)
            write_json(note, own)

    def finished(self) -> JsonObject | None:
        """Return the card if this run was finished before, or None."""
        file = self.out / "card.json"
        card = read_json(file) if file.exists() else None
        tuned = card and card["recipe"]["tune_epochs"] == self.settings.tune_epochs
        return card if tuned else None

    def baseline(self, file: Path | None = None, start: Path | None = None) -> nn.Module:
        """Return the trained network: read from a file, or trained and written there.

        Args:
            file: Weights of the baseline; `baseline.safetensors` in the folder of the run if None.
            start: Initial weights of the network or of a part of it that has the same names.
        """
        model = self.new_network()
        file = file or self.out / "baseline.safetensors"
        if file.exists():
            load_weights(model, file)
            self.costs |= costs_of_file(file) or self._assumed_cost(model)
            return model
        if start is not None:
            self.costs["start"] = sum(costs_of_file(start).values())
        if not load_start(model, self.settings, start):
            self._train_baseline(model, file)
        return model

    def _assumed_cost(self, model: nn.Module) -> Costs:
        """Return the cost of a baseline if it was trained with the settings of this run."""
        own = macs_of_an_example(model, None, self.data.example())
        return {"baseline": own * self.batches.examples * self.settings.baseline_epochs}

    def _train_baseline(self, model: nn.Module, file: Path) -> None:
        settings = self.settings
        if self.writes:
            make_folder(file.parent)
        trainer = self.trainer(model, settings.baseline_epochs, settings.baseline_lr)
        self.train("baseline", trainer)
        if self.writes:
            write_weights(model, file, metadata(self.costs))
            self._drop_checkpoints()
        wait_for_all()

    def check(self, limits: Limits, baseline: Path | None) -> None:
        """Refuse a network that does not fit the data, and what a Pruner would refuse.

        Args:
            limits: The budget, which is not checked if there is none.
            baseline: File of the baseline; nothing is checked if it exists.
        """
        if (baseline or self.out / "baseline.safetensors").exists():
            return
        with torch.random.fork_rng():  # the baseline starts from the same random numbers
            model = self.new_network()
            check_network(model, self.settings.network, self.data)
            if limits:
                self._pruner(model, self.settings.epochs, limits)

    def prune(self, model: nn.Module, **limits: float) -> JsonObject:
        """Prune a baseline to a budget with polarprune, and return the card.

        Args:
            model: The baseline; it is not changed.
            **limits: `macs`, `params` or both as shares of the original, or `lam`.
        """
        settings = self.settings
        baseline = self.score(model)
        original, teacher = model, model if settings.distill else None
        model = copy_weights(self.new_network(), model)
        pruner, trainer = self._gated(model, teacher, limits)
        self.train("prune", trainer)
        if settings.recalibrate:
            recalibrate(model, self.batches, settings.recalibrate)
        with warnings.catch_warnings():  # the best weights may be those of an earlier step
            if settings.best:
                warnings.filterwarnings("ignore", "export: .* steps were taken")
            small = pruner.export()
        report = pruner.report()
        before, after = self.per_example(report.before), self.per_example(report.after)
        card = self.card("gdp", limits, baseline, Pruned(model, small, before, after))
        card["widths"] = {
            group["name"]: [group["after"], group["before"]] for group in report.groups
        }
        card["landing"] = dict(pruner.landing)
        if self.writes:
            report = dataclasses.replace(report, before=before, after=after)
            write_report(self.out, report, card, original, small, self.data.example())
        return self.finish(card, small, teacher)

    def _pruner(self, model: nn.Module, steps: int, limits: Limits) -> Pruner:
        return Pruner(
            model,
            self.data.example(),
            steps=steps,
            schedule=self.settings.schedule,
            compact=self.settings.compact,
            uniform=self.settings.uniform,
            norms=self.settings.norms,
            multiple_of=self.settings.multiple_of,
            macs=limits.get("macs"),
            params=limits.get("params"),
            lam=limits.get("lam"),
        )

    def _gated(
        self, model: nn.Module, teacher: nn.Module | None, limits: Limits
    ) -> tuple[Pruner, Trainer]:
        """Insert gates into a model and return the pruner and the trainer of the second stage."""
        settings = self.settings
        pruner = self._pruner(model, settings.epochs * self.batches.per_epoch, limits)
        return pruner, self.trainer(
            model, settings.epochs, settings.lr, pruner=pruner, teacher=teacher
        )

    def trainer(self, model: nn.Module, epochs: int, lr: float, **given: Any) -> Trainer:
        """Return a trainer of a stage of this run; see `Trainer`."""
        given = {"settings": self.settings, "example": self.data.example(), **given}
        return Trainer(model, self.batches, epochs=epochs, lr=lr, **given)

    def rehearse(self, steps: int, *, trained: bool = False, **limits: float) -> JsonObject:
        """Time a few steps of both trainings; nothing is written.

        Args:
            steps: Number of steps to time.
            trained: Whether a baseline exists; then only the pruning is timed.
            **limits: The budget, as in `prune`.

        Returns:
            Time and memory of the stages, the planned costs and the number of prunable channels.
        """
        settings = self.settings
        steps = min(steps, self.batches.per_epoch - WARM_UP)
        if steps < 1:
            raise PruneError(f"--dry-run: an epoch has too few batches: {self.batches.per_epoch}.")
        stages = {}
        if not (trained or is_published(settings)):
            epochs, lr = max(settings.baseline_epochs, 1), settings.baseline_lr
            trainer = self.trainer(self.new_network(), epochs, lr)
            stages["baseline"] = time_steps(trainer, steps)
        teacher = self.new_network() if settings.distill else None
        pruner, trainer = self._gated(self.new_network(), teacher, limits)
        stages["prune"] = time_steps(trainer, steps)
        path = planned_costs(settings, limits, trainer.steps)
        return {"stages": stages, "path": path, "channels": pruner.graph.units}

    def train(self, stage: str, trainer: Trainer) -> None:
        """Train to the end, starting from the last checkpoint of this stage if there is one.

        The last checkpoint is kept until the card is written: the next stage may be interrupted,
        too.
        """
        if self.batches.per_epoch < 1:
            raise PruneError(
                f"batch={self.settings.batch}: {self.data.counts[0]:,} training examples are less "
                f"than one batch."
            )
        make_folder(self.out)
        seed = self.seed(stage)
        checkpoint, best = self.out / f"{stage}.checkpoint", BestWeights(self.data.higher_is_better)
        if checkpoint.exists():
            self._resume(trainer, checkpoint, best)
        start = saved = time.perf_counter()
        rank = rank_and_count()[0]
        while trainer.done < trainer.steps:
            if rank:  # every process draws its own crops
                torch.manual_seed((seed + (trainer.done << 8) + rank) % 2**63)
            with convolutions_tuned():
                row = self._epoch(stage, trainer)
            now = time.perf_counter()
            row["seconds"] = round(now - start, 2)
            if self.settings.best and self.data.measure in row:
                best.offer(row[self.data.measure], trainer)
            if not self.writes:
                continue
            append(self.out / "log.jsonl", json.dumps(row) + "\n")
            self.progress(row)
            if now - saved >= CHECKPOINT_PAUSE or row["epoch"] == trainer.epochs:
                saved = now
                with replacing(checkpoint) as new, new.open("wb") as file:
                    torch.save({**trainer.state(), "best": best.state}, file)
        best.restore(trainer)
        self.costs[stage] = trainer.training_macs
        wait_for_all()

    def seed(self, stage: str) -> int:
        """Seed a stage, independently of what was drawn before, and return the seed."""
        seed = self.settings.seed + (_STAGES.index(stage) << 40)
        torch.manual_seed(seed % 2**63)
        return seed

    def _resume(self, trainer: Trainer, checkpoint: Path, best: BestWeights) -> None:
        try:
            state = torch.load(checkpoint, map_location=self.device, weights_only=True)
            trainer.load(state)
            best.state = state.get("best", {})  # earlier versions kept none
        except Exception as error:  # damaged, or of another run
            raise PruneError(
                f"{checkpoint}: not a checkpoint of this run ({error!r}). Delete it, or choose "
                f"another folder."
            ) from error

    def _epoch(self, stage: str, trainer: Trainer) -> JsonObject:
        """Train for one epoch and return its row of the log."""
        row: JsonObject = {"stage": stage, **trainer.epoch()}
        epoch = trainer.done // self.batches.per_epoch
        row |= {"epoch": epoch, "epochs": trainer.epochs, "training_macs": trainer.training_macs}
        if trainer.pruner is not None:
            last = trainer.pruner.history[-1]
            row |= {key: last[key] for key in _LOGGED}
        row |= trainer.method.log_entries()
        if epoch % self.settings.scored == 0 or epoch == trainer.epochs:
            row |= self._scores(trainer, recalibrates=stage == "prune")
        return row

    def _scores(self, trainer: Trainer, *, recalibrates: bool) -> dict[str, float]:
        scores = {self.data.measure: self.score(trainer.model)}
        if recalibrates:
            with recalibrated(trainer.model, self.batches, _RECALIBRATED):
                scores["recalibrated_loss"] = self.data.loss(trainer.model)
        return scores

    def score(self, model: nn.Module) -> float:
        """Return the score of a model on the test examples."""
        return self.data.score(self.data.answers(model))

    def _drop_checkpoints(self) -> None:
        for file in self.out.glob("*.checkpoint"):
            file.unlink()

    def card(self, method: str, limits: Limits, baseline: float, pruned: Pruned) -> JsonObject:
        """Return the card of this run; see `make_card`."""
        scores = make_card(self.settings, self.data, method, limits, baseline, pruned)
        return {**scores, **self.cost_entries(method), "commit": self.commit, **environment()}

    def cost_entries(self, method: str) -> JsonObject:
        """Return what a card says about the cost of the training."""
        needs_baseline = method not in FROM_SCRATCH or self.settings.distill > 0
        costs = with_total(self.costs, needs_baseline=needs_baseline)
        return {"training_macs": costs, "epoch_examples": self.batches.examples}

    def per_example(self, cost: CostOfAnExample) -> CostOfAnExample:
        """Return the cost of one example, given that of the traced batch."""
        return {**cost, "macs": cost["macs"] // self.data.examples}

    def finish(self, card: JsonObject, small: nn.Module, teacher: nn.Module | None) -> JsonObject:
        """Write the small model, fine-tune it if asked to, and write and return the card."""
        card["sha256"] = self._write_model(small, "small", card)
        if self.settings.tune_epochs and card["method"] not in FROM_SCRATCH:
            self._fine_tune(small, teacher)
            score = {self.data.measure: self.score(small)}
            row = {**card["table"][-1], "stage": "after fine-tuning", **score}
            tuned = {**card, "table": [*card["table"], row], **score}
            tuned |= self.cost_entries(card["method"])
            card = {**tuned, "sha256_tuned": self._write_model(small, "tuned", tuned)}
        if self.writes:
            write_json(self.out / "card.json", card)
            self._drop_checkpoints()
        wait_for_all()
        return card

    def _fine_tune(self, small: nn.Module, teacher: nn.Module | None) -> None:
        wanted = self.settings
        decay = wanted.weight_decay if wanted.tune_decay is None else wanted.tune_decay
        settings = dataclasses.replace(wanted, warm_up=0.0, weight_decay=decay)
        epochs, lr = settings.tune_epochs, settings.tune_lr
        self.train("tune", self.trainer(small, epochs, lr, settings=settings, teacher=teacher))

    def _write_model(self, model: nn.Module, name: str, card: JsonObject) -> str:
        """Write a file that `rebuild` reads, or a state dict if another library did the cutting.

        Returns:
            The SHA-256 of the file.
        """
        if not self.writes:
            return ""
        file = self.out / f"{name}.safetensors"
        if attached_recipe(model) is not None:
            save(model, file, card={k: v for k, v in card.items() if k != "sha256"})
        else:
            file = self.out / f"{name}-state.safetensors"
            write_weights(model, file)
            card["file"] = "a state dict: not cut by polarprune, which cannot rebuild it"
        return hashlib.sha256(file.read_bytes()).hexdigest()
