"""An experiment from data to card: baseline, pruning, removal, scores; resumable."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from ..bench import environment
from ..checkpoint import load, read_card, save
from ..errors import PruneError
from ..pruner import Pruner
from ..surgery import RECIPE
from .data import Batches, Data, normalised
from .networks import NETWORKS
from .recipes import Recipe
from .training import Trainer, accuracy, predictions, recalibrate, recalibrated, scores

Progress = Callable[[dict[str, Any]], None]
_EVERY = 20  # epochs between checkpoints
_SCORED = 10  # epochs between looks at the test set: for the curves, nothing is chosen by them
_RECALIBRATED = 20  # batches: ε has moved on since the statistics were taken
_LOGGED = ("macs", "params", "closed", "between", "eps", "lam", "histogram")
_EXAMPLES = 2  # images that are traced: a batch norm over single values needs more than one


class Run:
    """One experiment in a folder. What is there already is not done again."""

    def __init__(
        self,
        recipe: Recipe,
        data: Data,
        out: Path,
        *,
        device: str = "cpu",
        progress: Progress = lambda row: None,
    ) -> None:
        self.recipe, self.out, self.device, self.progress = recipe, out, device, progress
        self.data = data.to(device)
        out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(recipe.seed)
        torch.backends.cudnn.benchmark = True
        self.batches = Batches(self.data.train, recipe.batch, cutout=recipe.cutout)

    def fresh(self) -> nn.Module:
        model: Any = NETWORKS[self.recipe.network]().to(self.device)
        if self.device == "cuda":
            model = model.to(memory_format=torch.channels_last)
        return model  # type: ignore[no-any-return]

    def baseline(self, file: Path | None = None) -> nn.Module:
        """The network trained as usual: read from a file, or trained and written there."""
        model = self.fresh()
        file = file or self.out / "baseline.safetensors"
        if file.exists():
            model.load_state_dict(load_file(str(file), device=self.device))
            return model
        recipe = self.recipe
        trainer = Trainer(
            model, self.batches, recipe, epochs=recipe.baseline_epochs, lr=recipe.baseline_lr
        )
        self.train("baseline", trainer)
        write_state(model, file)
        self._drop_checkpoints()
        return model

    def prune(self, model: nn.Module, **limits: float) -> dict[str, Any]:
        """From a baseline to a small model and its card, within budgets."""
        recipe = self.recipe
        before = accuracy(model, self.data.test)
        teacher = model if recipe.distill else None
        model = copied(self.fresh(), model)
        pruner = Pruner(
            model, self.example(), steps=recipe.epochs * self.batches.per_epoch,
            schedule=recipe.schedule, compact=recipe.compact, **limits,  # type: ignore[arg-type]
        )  # fmt: skip
        trainer = Trainer(
            model, self.batches, recipe, epochs=recipe.epochs, lr=recipe.lr, pruner=pruner,
            teacher=teacher,
        )  # fmt: skip
        self.train("prune", trainer)
        if recipe.recalibrate:
            recalibrate(model, self.batches, recipe.recalibrate)
        small = pruner.export()
        report = pruner.report()
        whole, left = per_image(report.before), per_image(report.after)
        card = self.card("gdp", limits, before, {"full": model, "small": small}, whole, left)
        results = {key: card[key] for key in ("table", "identical_predictions")}
        results |= {"test_images": card["scored_on"], **environment()}
        report = dataclasses.replace(report, before=whole, after=left, results=results)
        (self.out / "report.json").write_text(report.to_json(), encoding="utf-8")
        (self.out / "report.html").write_text(report.to_html(), encoding="utf-8")
        return self.finish(card, small)

    def train(self, stage: str, trainer: Trainer) -> None:
        """To the end, from the last checkpoint of this stage, if there is one.

        The last one stays until the card is written: the next stage may be cut off, too.
        """
        kept = self.out / f"{stage}.checkpoint"
        log = self.out / "log.jsonl"
        if kept.exists():
            trainer.load(torch.load(kept, map_location=self.device, weights_only=True))
        start = time.perf_counter()
        while trainer.done < trainer.steps:
            row: dict[str, Any] = {"stage": stage, **trainer.epoch()}
            epoch = trainer.done // self.batches.per_epoch
            row |= {"epoch": epoch, "epochs": trainer.epochs}
            if trainer.pruner is not None:
                last = trainer.pruner.history[-1]
                row |= {key: last[key] for key in _LOGGED}
            row |= trainer.method.facts()
            if epoch % _SCORED == 0 or epoch == trainer.epochs:
                row |= self._scores(trainer)
            row["seconds"] = round(time.perf_counter() - start, 2)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.progress(row)
            if epoch % _EVERY == 0 or epoch == trainer.epochs:
                new = kept.with_suffix(".new")
                torch.save(trainer.state(), new)
                new.replace(kept)

    def _scores(self, trainer: Trainer) -> dict[str, float]:
        found = {"accuracy": accuracy(trainer.model, self.data.test)}
        if trainer.pruner is not None:
            with recalibrated(trainer.model, self.batches, _RECALIBRATED):
                guesses, right = scores(trainer.model, self.data.test), self.data.test.y
            found["recalibrated_loss"] = float(F.cross_entropy(guesses, right))
            found["recalibrated_accuracy"] = float((guesses.argmax(1) == right).double().mean())
        return found

    def _drop_checkpoints(self) -> None:
        for file in self.out.glob("*.checkpoint"):
            file.unlink()

    def example(self) -> torch.Tensor:
        """What is traced."""
        return normalised(self.data.test.x[:_EXAMPLES])

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
        full, small = (predictions(models[name], self.data.test) for name in ("full", "small"))
        right = self.data.test.y
        table = [
            _row("baseline", before, whole),
            _row("before removal", float((full == right).double().mean()), whole),
            _row("after removal", float((small == right).double().mean()), left),
        ]
        return {
            "network": self.recipe.network,
            "method": method,
            "budget": limits,
            "table": table,
            "accuracy": table[-1]["accuracy"],
            "macs": left["macs"],
            "macs_share": left["macs"] / whole["macs"],
            "params": left["params"],
            "params_share": left["params"] / whole["params"],
            "scored_on": len(self.data.test),
            "trained_on": len(self.data.train),
            "identical_predictions": bool((full == small).all()),
            "recipe": dataclasses.asdict(self.recipe),
            **environment(),
        }

    def finish(self, card: dict[str, Any], small: nn.Module) -> dict[str, Any]:
        """Write the model, fine-tune it, write that too, and the card of both."""
        card["sha256"] = self._write(small, "small", card)
        if self.recipe.tune_epochs:
            recipe = dataclasses.replace(self.recipe, warm_up=0.0)
            trainer = Trainer(
                small, self.batches, recipe, epochs=recipe.tune_epochs, lr=recipe.tune_lr
            )
            self.train("tune", trainer)
            score = accuracy(small, self.data.test)
            row = {**card["table"][-1], "stage": "after fine-tuning", "accuracy": score}
            tuned = {**card, "table": [*card["table"], row], "accuracy": score}
            card = {**tuned, "sha256_tuned": self._write(small, "tuned", tuned)}
        (self.out / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        self._drop_checkpoints()
        return card

    def _write(self, model: nn.Module, name: str, card: dict[str, Any]) -> str:
        """A file that `rebuilt` reads; or, if another library did the cutting, a state dict."""
        file = self.out / f"{name}.safetensors"
        if hasattr(model, RECIPE):
            save(model, file, card={k: v for k, v in card.items() if k != "sha256"})
        else:
            file = self.out / f"{name}-state.safetensors"
            write_state(model, file)
            card["file"] = "a state dict: not cut by polarprune, which cannot rebuild it"
        return hashlib.sha256(file.read_bytes()).hexdigest()


def _row(stage: str, accuracy: float, cost: dict[str, int]) -> dict[str, Any]:
    return {"stage": stage, "accuracy": accuracy, "macs": cost["macs"], "params": cost["params"]}


def per_image(cost: dict[str, int]) -> dict[str, int]:
    return {**cost, "macs": cost["macs"] // _EXAMPLES}


def write_state(model: nn.Module, file: Path) -> None:
    new = file.with_suffix(".new")
    save_file({k: v.cpu().contiguous() for k, v in model.state_dict().items()}, str(new))
    new.replace(file)  # whole: other runs may wait for it


def copied(model: nn.Module, other: nn.Module) -> nn.Module:
    model.load_state_dict(other.state_dict())
    return model


def rebuilt(file: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a file that `Run` wrote, and its card: nothing else is needed."""
    card = read_card(file)
    network = card.get("network")
    if network not in NETWORKS:
        raise PruneError(
            f"{file}: its card names the network {network!r}, which is not one of "
            f"{', '.join(NETWORKS)}. Load it with polarprune.load(file, model=...)."
        )
    return load(file, model=NETWORKS[network]()), card
