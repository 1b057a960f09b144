"""An experiment from data to card: baseline, pruning, removal, scores; resumable."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..cost.timing import environment
from ..errors import PruneError
from ..files.model_file import load, read_card, save
from ..files.writing import cannot_write, make_folder, replacing, write_tensors, write_text
from ..surgery.recipe import RECIPE
from ..training.pruner import Pruner
from .imagenet import from_torchvision
from .networks import BACKBONES, NETWORKS
from .processes import rank_and_count, wait_for_all
from .recipes import Recipe
from .source import commit
from .task import Task
from .training import Trainer, recalibrate, recalibrated

Progress = Callable[[dict[str, Any]], None]
_PAUSE = 60.0  # seconds, at least, between checkpoints
_RECALIBRATED = 20  # batches: ε has moved on since the statistics were taken
_WARM = 5  # steps of a rehearsal that are not timed
_STAGES = ("baseline", "prune", "tune")
_FREE = ("compiled", "tune_epochs", "tune_lr", "scored")  # may change when a run goes on
_LOGGED = ("macs", "params", "closed", "between", "eps", "lam", "histogram")


class Run:
    """One experiment in a folder. What is there already is not done again."""

    def __init__(
        self,
        recipe: Recipe,
        data: Task,
        out: Path,
        *,
        device: str = "cpu",
        progress: Progress = lambda row: None,
    ) -> None:
        self.recipe, self.out, self.progress = recipe, out, progress
        self.commit = commit()  # now: sources may change while this runs
        if out.exists() and not out.is_dir():
            raise PruneError(f"--out {out}: that is a file; give a folder.")
        self.device = torch.device(device)
        self.data = data.to(device)
        torch.manual_seed(recipe.seed)
        torch.backends.cudnn.benchmark = True
        self.batches = self.data.stream(recipe)
        self.writes = rank_and_count()[0] == 0  # the other processes of several write nothing

    def fresh(self) -> nn.Module:
        if self.recipe.network not in NETWORKS:
            known = ", ".join(NETWORKS)
            raise PruneError(f"there is no network {self.recipe.network!r}. Networks: {known}.")
        model: Any = NETWORKS[self.recipe.network]().to(self.device)
        if self.device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)
        return model  # type: ignore[no-any-return]

    def claim(self, what: dict[str, Any]) -> None:
        """Refuse a folder in which another run is kept; else say in it what this one is."""
        mine = {**dataclasses.asdict(self.recipe), **what}
        mine = json.loads(json.dumps({k: v for k, v in mine.items() if k not in _FREE}))
        note = self.out / "run.json"
        begun = note.exists() and (self.out / "log.jsonl").exists()
        kept = read_json(note) if begun else mine
        free = ("budget", "method") if not kept.get("budget") else ()  # a baseline, so far
        other = [key for key in mine if kept.get(key) != mine[key] and key not in free]
        if other:
            raise PruneError(
                f"--out {self.out}: another run is kept there ({other[0]} is {kept.get(other[0])} "
                f"there, {mine[other[0]]} here). Give another folder."
            )
        if self.writes:
            make_folder(self.out)
            write_json(note, mine)

    def finished(self) -> dict[str, Any] | None:
        """The card, if this run has come to its end before."""
        file = self.out / "card.json"
        card = read_json(file) if file.exists() else None
        tuned = card and card["recipe"]["tune_epochs"] == self.recipe.tune_epochs
        return card if tuned else None

    def baseline(self, file: Path | None = None, start: Path | None = None) -> nn.Module:
        """The network trained as usual: read from a file, or trained and written there.

        `start` has weights to begin with, of the whole network or a part that is named alike.
        """
        model = self.fresh()
        file = file or self.out / "baseline.safetensors"
        recipe = self.recipe
        if file.exists():
            return read_state(model, file)
        if start is not None:
            begun(model, start)
        elif recipe.pretrained and recipe.network in BACKBONES:
            part = from_torchvision(BACKBONES[recipe.network], recipe.pretrained)
            fitted(model, part.state_dict(), recipe.pretrained)
        elif recipe.pretrained:
            return with_weights_of(model, from_torchvision(recipe.network, recipe.pretrained))
        if self.writes:
            make_folder(file.parent)
        trainer = Trainer(
            model, self.batches, recipe, epochs=recipe.baseline_epochs, lr=recipe.baseline_lr
        )
        self.train("baseline", trainer)
        if self.writes:
            write_state(model, file)
            self._drop_checkpoints()
        wait_for_all()
        return model

    def check(self, limits: dict[str, float], baseline: Path | None) -> None:
        """Refuse what a Pruner refuses before a baseline is trained."""
        if not limits or (baseline or self.out / "baseline.safetensors").exists():
            return
        with torch.random.fork_rng():  # the baseline begins as if this had not been
            Pruner(
                self.fresh(), self.data.example(), steps=self.recipe.epochs,
                schedule=self.recipe.schedule, compact=self.recipe.compact, **limits,  # type: ignore[arg-type]
            )  # fmt: skip

    def prune(self, model: nn.Module, **limits: float) -> dict[str, Any]:
        """From a baseline to a small model and its card, within budgets."""
        recipe = self.recipe
        before = self.score(model)
        teacher = model if recipe.distill else None
        model = with_weights_of(self.fresh(), model)
        pruner, trainer = self._gated(model, teacher, limits)
        self.train("prune", trainer)
        if recipe.recalibrate:
            recalibrate(model, self.batches, recipe.recalibrate)
        small = pruner.export()
        report = pruner.report()
        whole, left = self.one(report.before), self.one(report.after)
        card = self.card("gdp", limits, before, {"full": model, "small": small}, whole, left)
        card["widths"] = {
            group["name"]: [group["after"], group["before"]] for group in report.groups
        }
        card["landing"] = dict(pruner.landing)
        results = {key: card[key] for key in ("table", "identical_predictions")}
        results |= {"test_images": card["scored_on"], **environment()}
        report = dataclasses.replace(report, before=whole, after=left, results=results)
        if self.writes:
            write_text(self.out / "report.json", report.to_json())
            write_text(self.out / "report.html", report.to_html())
        return self.finish(card, small, teacher)

    def _gated(
        self, model: nn.Module, teacher: nn.Module | None, limits: dict[str, float]
    ) -> tuple[Pruner, Trainer]:
        recipe = self.recipe
        pruner = Pruner(
            model, self.data.example(), steps=recipe.epochs * self.batches.per_epoch,
            schedule=recipe.schedule, compact=recipe.compact, **limits,  # type: ignore[arg-type]
        )  # fmt: skip
        trainer = Trainer(
            model, self.batches, recipe, epochs=recipe.epochs, lr=recipe.lr, pruner=pruner,
            teacher=teacher,
        )  # fmt: skip
        return pruner, trainer

    def rehearse(self, steps: int, *, trained: bool = False, **limits: float) -> dict[str, Any]:
        """A few steps of both trainings, or of the second if the first is done: what all of them
        will take. Nothing is written."""
        recipe = self.recipe
        steps = min(steps, self.batches.per_epoch - _WARM)
        if steps < 1:
            raise PruneError(f"--dry-run: an epoch has only {self.batches.per_epoch} batches.")
        stages = {}
        published = recipe.pretrained and recipe.network not in BACKBONES
        if not (published or trained):
            epochs, lr = max(recipe.baseline_epochs, 1), recipe.baseline_lr
            whole = Trainer(self.fresh(), self.batches, recipe, epochs=epochs, lr=lr)
            stages["baseline"] = self._timed(whole, steps)
        teacher = self.fresh() if recipe.distill else None
        pruner, gated = self._gated(self.fresh(), teacher, limits)
        stages["prune"] = self._timed(gated, steps)
        path = {
            key: [limit + (1 - limit) * recipe.schedule.path(k * gated.steps / 10, gated.steps)
                  for k in range(11)]
            for key, limit in limits.items() if key != "lam"
        }  # fmt: skip
        return {"stages": stages, "path": path, "channels": pruner.graph.units}

    def _timed(self, trainer: Trainer, steps: int) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.batches.shuffle()
        trainer.advance(_WARM)
        start = time.perf_counter()
        trainer.advance(steps)  # waits for the device to read the loss
        taken = (time.perf_counter() - start) / steps
        memory = torch.cuda.max_memory_allocated(self.device) if on_gpu else _most_memory()
        return {"seconds_a_step": taken, "steps": trainer.steps, "memory": memory}

    def train(self, stage: str, trainer: Trainer) -> None:
        """To the end, from the last checkpoint of this stage, if there is one.

        The last one stays until the card is written: the next stage may be cut off, too.
        """
        if self.batches.per_epoch < 1:
            raise PruneError(
                f"batch={self.recipe.batch}: there are only {self.data.counts[0]:,} examples to "
                f"learn from, less than one batch."
            )
        make_folder(self.out)
        kept = self.out / f"{stage}.checkpoint"
        log = self.out / "log.jsonl"
        own = self.recipe.seed + (_STAGES.index(stage) << 40)
        torch.manual_seed(own % 2**63)  # whatever was drawn before
        if kept.exists():
            try:
                trainer.load(torch.load(kept, map_location=self.device, weights_only=True))
            except Exception as error:  # damaged, or of something else
                raise PruneError(
                    f"{kept}: no checkpoint of this run ({error!r}). Delete it, or give another "
                    f"folder."
                ) from error
        start = saved = time.perf_counter()
        rank = rank_and_count()[0]
        while trainer.done < trainer.steps:
            if rank:  # the others' crops are not those of the first
                torch.manual_seed((own + (trainer.done << 8) + rank) % 2**63)
            row: dict[str, Any] = {"stage": stage, **trainer.epoch()}
            epoch = trainer.done // self.batches.per_epoch
            row |= {"epoch": epoch, "epochs": trainer.epochs}
            if trainer.pruner is not None:
                last = trainer.pruner.history[-1]
                row |= {key: last[key] for key in _LOGGED}
            row |= trainer.method.facts()
            if epoch % self.recipe.scored == 0 or epoch == trainer.epochs:
                row |= self._scores(trainer)
            now = time.perf_counter()
            row["seconds"] = round(now - start, 2)
            if not self.writes:
                continue
            append(log, json.dumps(row) + "\n")
            self.progress(row)
            if now - saved >= _PAUSE or epoch == trainer.epochs:
                saved = now
                with replacing(kept) as new, new.open("wb") as file:
                    torch.save(trainer.state(), file)
        wait_for_all()

    def _scores(self, trainer: Trainer) -> dict[str, float]:
        found = {self.data.measure: self.score(trainer.model)}
        if trainer.pruner is not None:
            with recalibrated(trainer.model, self.batches, _RECALIBRATED):
                found["recalibrated_loss"] = self.data.loss(trainer.model)
        return found

    def score(self, model: nn.Module) -> float:
        return self.data.score(self.data.answers(model))

    def _drop_checkpoints(self) -> None:
        for file in self.out.glob("*.checkpoint"):
            file.unlink()

    def card(
        self,
        method: str,
        limits: dict[str, float],
        before: float,
        models: dict[str, nn.Module],
        whole: dict[str, int],
        left: dict[str, int],
    ) -> dict[str, Any]:
        """Scores of the trained model ("full") and of what is left of it ("small"), and how it came
        about. `before` is the baseline's score, `whole` and `left` are costs."""
        full, small = (self.data.answers(models[name]) for name in ("full", "small"))
        table = [
            self._row("baseline", before, whole),
            self._row("before removal", self.data.score(full), whole),
            self._row("after removal", self.data.score(small), left),
        ]
        learned, scored = self.data.counts
        return {
            "network": self.recipe.network,
            "method": method,
            "budget": limits,
            "table": table,
            "measure": self.data.measure,
            self.data.measure: table[-1][self.data.measure],
            "macs": left["macs"],
            "macs_share": left["macs"] / whole["macs"],
            "params": left["params"],
            "params_share": left["params"] / whole["params"],
            "scored_on": scored,
            "trained_on": learned,
            "identical_predictions": self.data.same(full, small),
            **self.data.details(small),
            "recipe": finite(dataclasses.asdict(self.recipe)),
            "commit": self.commit,
            **environment(),
        }

    def _row(self, stage: str, score: float, cost: dict[str, int]) -> dict[str, Any]:
        costs = {key: cost[key] for key in ("macs", "params")}
        return {"stage": stage, self.data.measure: score, **costs}

    def one(self, cost: dict[str, int]) -> dict[str, int]:
        """Of all that was traced, the cost of one."""
        return {**cost, "macs": cost["macs"] // self.data.examples}

    def finish(
        self, card: dict[str, Any], small: nn.Module, teacher: nn.Module | None
    ) -> dict[str, Any]:
        """Write the model, fine-tune it, write that too, and the card of both."""
        card["sha256"] = self._write(small, "small", card)
        if self.recipe.tune_epochs:
            recipe = dataclasses.replace(self.recipe, warm_up=0.0)
            trainer = Trainer(
                small, self.batches, recipe, epochs=recipe.tune_epochs, lr=recipe.tune_lr,
                teacher=teacher,
            )  # fmt: skip
            self.train("tune", trainer)
            score = {self.data.measure: self.score(small)}
            row = {**card["table"][-1], "stage": "after fine-tuning", **score}
            tuned = {**card, "table": [*card["table"], row], **score}
            card = {**tuned, "sha256_tuned": self._write(small, "tuned", tuned)}
        if self.writes:
            write_json(self.out / "card.json", card)
            self._drop_checkpoints()
        wait_for_all()
        return card

    def _write(self, model: nn.Module, name: str, card: dict[str, Any]) -> str:
        """A file that `rebuilt` reads; or, if another library did the cutting, a state dict."""
        if not self.writes:
            return ""
        file = self.out / f"{name}.safetensors"
        if hasattr(model, RECIPE):
            save(model, file, card={k: v for k, v in card.items() if k != "sha256"})
        else:
            file = self.out / f"{name}-state.safetensors"
            write_state(model, file)
            card["file"] = "a state dict: not cut by polarprune, which cannot rebuild it"
        return hashlib.sha256(file.read_bytes()).hexdigest()


def _most_memory() -> int | None:
    """That this process had so far, in bytes, where the system tells."""
    try:
        import resource
    except ImportError:
        return None
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else 1024 * found


def append(file: Path, line: str) -> None:
    """All of a line, or nothing of it."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("a", encoding="utf-8") as log:
            log.write(line)
    except OSError as error:
        with suppress(OSError):
            os.truncate(file, size)
        raise cannot_write(file, error) from error


def write_json(file: Path, content: Any) -> None:
    write_text(file, json.dumps(content, indent=1) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PruneError(f"{file}: it cannot be read ({error}). Give another folder.") from error


def write_state(model: nn.Module, file: Path) -> None:
    tensors = {k: v.cpu().contiguous() for k, v in model.state_dict().items()}
    with replacing(file) as new:
        write_tensors(tensors, new)


def read_state(model: nn.Module, file: Path) -> nn.Module:
    try:
        model.load_state_dict(weights_in(file))
    except Exception as error:  # no weights, or of something else
        why = str(error).splitlines()[0]
        raise PruneError(f"{file}: not the weights of this network ({why}).") from error
    return model


def weights_in(file: Path) -> dict[str, Tensor]:
    """A state dict, as safetensors or as torch writes it."""
    if file.suffix == ".safetensors":
        return load_file(str(file))
    found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return found


def begun(model: nn.Module, file: Path) -> None:
    """Weights from a file into the parts of a model that have the same names and shapes."""
    if not file.exists():
        raise PruneError(f"--start {file}: there is no such file.")
    try:
        found = weights_in(file)
    except Exception as error:  # neither
        raise PruneError(f"--start {file}: it holds no weights ({error}).") from error
    fitted(model, found, f"--start {file}")


def fitted(model: nn.Module, found: dict[str, Tensor], source: str) -> None:
    """Of the whole network or of a part of it, or of its backbone under the names it has alone."""
    own = model.state_dict()
    for stem in ("", "backbone."):
        fits = {stem + key: value for key, value in found.items()
                if stem + key in own and own[stem + key].shape == value.shape}  # fmt: skip
        if fits:
            model.load_state_dict(fits, strict=False)
            return
    raise PruneError(f"{source}: it has no weights that fit this network by name.")


def with_weights_of(model: nn.Module, other: nn.Module) -> nn.Module:
    model.load_state_dict(other.state_dict())
    return model


def rebuilt(file: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a file that `Run` wrote, and its card: nothing else is needed."""
    card = read_card(file)
    network = card.get("network")
    if not isinstance(network, str) or network not in NETWORKS:
        raise PruneError(
            f"{file}: its card names the network {network!r}, which is not one of "
            f"{', '.join(NETWORKS)}. Load it with polarprune.load(file, model=...)."
        )
    told = ("macs", "macs_share", "params", "params_share")
    lacks = [key for key in told if type(card.get(key)) not in (int, float)]
    if lacks:
        raise PruneError(
            f"{file}: its card does not say how many {lacks[0]} there are. Load it with "
            f"polarprune.load(file, model=...), or train it again."
        )
    if network == "mobilenetv2" and card["macs"] < 1e8 * card["macs_share"]:
        raise PruneError(  # the weights have the same shapes in both
            f"{file}: it is of the network that is now called 'mobilenetv2_88m'. Load it with "
            f"polarprune.load(file, model=polarprune.experiments.networks.mobilenetv2_88m())."
        )
    return load(file, model=NETWORKS[network]()), card


def finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """The same as JSON can hold it: "inf" stands for a cap that there is not (`Schedule.paper`)."""
    return {
        key: finite(value) if isinstance(value, dict) else "inf" if value == math.inf else value
        for key, value in numbers.items()
    }
