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
from safetensors.torch import load_file, save_file
from torch import nn

from ..bench import environment
from ..checkpoint import load, read_card, save
from ..errors import PruneError
from ..pruner import Pruner
from ..report import Report
from .data import Batches, Data, normalised
from .networks import NETWORKS
from .recipes import Recipe
from .training import Trainer, accuracy, predictions, recalibrate

Progress = Callable[[dict[str, Any]], None]
_EVERY = 20  # epochs between checkpoints
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
        self.batches = Batches(self.data.train, recipe.batch)

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
        self._train("baseline", trainer)
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, str(file))
        return model

    def prune(self, model: nn.Module, **limits: float) -> dict[str, Any]:
        """From a baseline to a small model and its card, within budgets."""
        recipe = self.recipe
        before = accuracy(model, self.data.test)
        teacher = model if recipe.distill else None
        model = _copied(self.fresh(), model)
        pruner = Pruner(
            model, self._example(), steps=recipe.epochs * self.batches.per_epoch,
            schedule=recipe.schedule, compact=recipe.compact, **limits,  # type: ignore[arg-type]
        )  # fmt: skip
        trainer = Trainer(
            model, self.batches, recipe, epochs=recipe.epochs, lr=recipe.lr, pruner=pruner,
            teacher=teacher,
        )  # fmt: skip
        self._train("prune", trainer)
        if recipe.recalibrate:
            recalibrate(model, self.batches, recipe.recalibrate)
        small = pruner.export()
        gated, cut = (predictions(one, self.data.test) for one in (model, small))
        right = self.data.test.y
        whole, left = (_per_image(cost) for cost in (pruner.graph.cost.original(), pruner.cost()))
        table = [
            _row("baseline", before, whole),
            _row("before removal", float((gated == right).double().mean()), whole),
            _row("after removal", float((cut == right).double().mean()), left),
        ]
        if recipe.tune_epochs:
            table.append(_row("after fine-tuning", self._tuned(small), left))
        results = {
            "table": table,
            "identical_predictions": bool((gated == cut).all()),
            "test_images": len(right),
            **environment(),
        }
        return self._written(dataclasses.replace(pruner.report(), results=results), small, limits)

    def _tuned(self, small: nn.Module) -> float:
        recipe = dataclasses.replace(self.recipe, warm_up=0.0)
        trainer = Trainer(small, self.batches, recipe, epochs=recipe.tune_epochs, lr=recipe.tune_lr)
        self._train("tune", trainer)
        return accuracy(small, self.data.test)

    def _train(self, stage: str, trainer: Trainer) -> None:
        """To the end, from the last checkpoint of this stage, if there is one."""
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
                row |= {key: last[key] for key in ("macs", "params", "closed", "between", "eps")}
                row["lam"] = last["lam"]
            if epoch % 10 == 0 or epoch == trainer.epochs:
                row["accuracy"] = accuracy(trainer.model, self.data.test)
            row["seconds"] = round(time.perf_counter() - start, 2)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.progress(row)
            if epoch % _EVERY == 0 and epoch < trainer.epochs:
                new = kept.with_suffix(".new")
                torch.save(trainer.state(), new)
                new.replace(kept)
        kept.unlink(missing_ok=True)

    def _example(self) -> torch.Tensor:
        return normalised(self.data.test.x[:_EXAMPLES])

    def _written(
        self, report: Report, small: nn.Module, limits: dict[str, float]
    ) -> dict[str, Any]:
        card = {
            "network": self.recipe.network,
            "budget": limits,
            "table": report.results["table"],
            "accuracy": report.results["table"][-1]["accuracy"],
            "macs": report.after["macs"] // _EXAMPLES,
            "macs_share": report.after["macs"] / report.before["macs"],
            "params": report.after["params"],
            "params_share": report.after["params"] / report.before["params"],
            "scored_on": len(self.data.test),
            "trained_on": len(self.data.train),
            "identical_predictions": report.results["identical_predictions"],
            "recipe": dataclasses.asdict(self.recipe),
            **environment(),
        }
        file = self.out / "small.safetensors"
        save(small.cpu(), file, card=card)
        card["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        (self.out / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        (self.out / "report.json").write_text(report.to_json(), encoding="utf-8")
        (self.out / "report.html").write_text(report.to_html(), encoding="utf-8")
        return card


def _row(stage: str, accuracy: float, cost: dict[str, int]) -> dict[str, Any]:
    return {"stage": stage, "accuracy": accuracy, "macs": cost["macs"], "params": cost["params"]}


def _per_image(cost: dict[str, int]) -> dict[str, int]:
    return {**cost, "macs": cost["macs"] // _EXAMPLES}


def _copied(model: nn.Module, other: nn.Module) -> nn.Module:
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
