"""The demonstration: a small residual network on real handwritten digits, pruned while it trains.

scikit-learn contains the data (1,797 images of 8×8), so nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cost.timing import compare_speed, environment
from ..plain_data import JsonObject, RowHandler
from ..report.report import Report
from ..training.pruner import Pruner
from ..validation.optional_packages import optional_package


class Block(nn.Module):
    """Two convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """A residual network of five blocks for 8×8 images."""

    def __init__(self, width: int = 24, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            Block(width, width),
            Block(width, width),
            Block(width, 2 * width, 2),
            Block(2 * width, 2 * width),
            Block(2 * width, 2 * width),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Digits:
    """Training and test images (N×1×8×8 in [0, 1]) and their classes."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch, shuffled, with images shifted by up to one pixel."""
        order = torch.randperm(len(self.train_x))
        for pick in order[: len(order) // size * size].split(size):
            dx, dy = torch.randint(-1, 2, (2,)).tolist()
            yield self.train_x[pick].roll((dx, dy), (2, 3)), self.train_y[pick]


def load_digits() -> Digits:
    """Return the digits of scikit-learn, with a fixed split into training and test images.

    Raises:
        PruneError: If scikit-learn is not installed.
    """
    datasets = optional_package("sklearn.datasets", needed_for="the demo", extra="cli")
    raw = datasets.load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    classes = torch.tensor(raw.target, dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1257], order[1257:]  # 70 % and 30 %
    return Digits(images[train], classes[train], images[test], classes[test])


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs in eval mode, and restore the mode of the model."""
    was = model.training
    model.eval()
    with torch.no_grad():
        scores: Tensor = model(x)
    model.train(was)
    return scores


def accuracy(model: nn.Module, data: Digits) -> float:
    """Return the fraction of test images that the model classifies correctly."""
    return float((predict(model, data.test_x).argmax(1) == data.test_y).float().mean())


@dataclass(frozen=True)
class Settings:
    """All settings of the demonstration."""

    budget: float = 0.5
    plain_epochs: int = 10
    epochs: int = 40
    tune_epochs: int = 5
    batch: int = 64
    lr: float = 0.1
    tune_lr: float = 0.01
    weight_decay: float = 5e-4
    seed: int = 0


class Demo:
    """One run of the demonstration: train, prune while training, export, compare, fine-tune."""

    def __init__(self, settings: Settings, progress: RowHandler = lambda row: None) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.progress = settings, progress
        self.data = load_digits()
        self.model = DigitsNet()
        self.per_epoch = len(self.data.train_x) // settings.batch
        self.pruner: Pruner | None = None

    @property
    def total_epochs(self) -> int:
        """Return the number of epochs of all stages."""
        return self.settings.plain_epochs + self.settings.epochs + self.settings.tune_epochs

    def run(self) -> tuple[Report, nn.Module]:
        """Run all stages; return the report, with accuracy and cost by stage, and the model."""
        with torch.random.fork_rng():  # refuse an unreachable budget before training
            Pruner(DigitsNet(), self.data.test_x[:2], macs=self.settings.budget, steps=1)
        self.fit(self.model, self.settings.plain_epochs, self.settings.lr, "train")
        unpruned, baseline = copy.deepcopy(self.model), accuracy(self.model, self.data)
        pruner = self.prune()
        small = pruner.export()
        original, left = pruner.graph.cost.original(), pruner.cost()
        table = [
            _row("before pruning", baseline, original),
            _row("before removal", accuracy(self.model, self.data), original),
            _row("after removal", accuracy(small, self.data), left),
        ]
        results = {**compare(self.model, small, self.data.test_x), **environment()}
        report = pruner.report()
        self.pruner = None
        tuned = copy.deepcopy(small)
        self.fit(tuned, self.settings.tune_epochs, self.settings.tune_lr, "fine-tune")
        table.append(_row("after fine-tuning", accuracy(tuned, self.data), left))
        results["table"] = table
        results["file"] = "small.safetensors"
        results["make"] = {
            "imports": "from polarprune.cli.demo import DigitsNet",
            "call": "DigitsNet()",
        }
        results["latency_ms"] = compare_speed(unpruned, small, self.data.test_x[:64])
        return replace(report, results=results), tuned

    def prune(self) -> Pruner:
        """Train with gates until the budget is met."""
        steps = self.settings.epochs * self.per_epoch
        example = self.data.train_x[:2]
        self.pruner = Pruner(self.model, example, macs=self.settings.budget, steps=steps)
        self.fit(self.model, self.settings.epochs, self.settings.lr, "prune")
        return self.pruner

    def fit(self, model: nn.Module, epochs: int, lr: float, stage: str) -> None:
        """Train a model. The loop is an ordinary one; a pruner only adds `attach`."""
        decay = self.settings.weight_decay
        groups = (
            self.pruner.param_groups(lr=lr, weight_decay=decay)
            if self.pruner
            else [{"params": list(model.parameters()), "lr": lr, "weight_decay": decay}]
        )
        optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
        if self.pruner:
            self.pruner.attach(optimizer)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * self.per_epoch)
        model.train()
        for _ in range(epochs):
            total = 0.0
            for x, y in self.data.batches(self.settings.batch):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                rates.step()
                total += float(loss.detach())
            self.tell(stage, model, total / self.per_epoch)

    def tell(self, stage: str, model: nn.Module, loss: float) -> None:
        """Report the state after an epoch to the progress callback."""
        row: JsonObject = {"stage": stage, "loss": loss}
        row["accuracy"] = accuracy(model, self.data)
        if self.pruner:
            last = self.pruner.history[-1]
            row.update({key: last[key] for key in ("macs", "closed", "eps", "lam")})
        self.progress(row)


def _row(stage: str, accuracy: float, cost: dict[str, int]) -> JsonObject:
    return {"stage": stage, "accuracy": accuracy, "macs": cost["macs"], "params": cost["params"]}


def compare(gated: nn.Module, small: nn.Module, x: Tensor) -> JsonObject:
    """Compare the predictions and outputs of two models on every image."""
    left, right = predict(gated, x), predict(small, x)
    return {
        "identical_predictions": bool((left.argmax(1) == right.argmax(1)).all()),
        "test_images": len(x),
        "largest_difference": float((left - right).abs().max()),
    }
