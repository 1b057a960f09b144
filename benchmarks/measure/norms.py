"""Claim: gate-weighted norms cost time; at equal MACs, accuracy is the same within a few seeds.

Compares `norms=False` and `norms=True`: the time of a training step of a vision transformer
(width 192, 6 blocks, 64 tokens), and the accuracy of a small one on handwritten digits after the
last epoch, at equal MACs and equal epochs, with three seeds. Writes numbers/norms.json (the result
with hardware, versions and number of runs):

    python -m benchmarks.measure.norms
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from benchmarks.store import write_numbers
from polarprune.cli.demo import Digits, accuracy, load_digits, predict
from polarprune.cost.timing import environment

SEEDS = (0, 1, 2)
BUDGETS = (0.5, 0.35)
EPOCHS = (10, 30)  # a short training and a long one
BATCH, RATE, DECAY = 32, 2e-3, 0.05
TURNS, WARM_UP = 40, 5


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attend(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A plain vision transformer that takes the mean over its tokens."""

    def __init__(self, channels: int, size: int, patch: int, dim: int, depth: int, heads: int):
        super().__init__()
        self.embed = nn.Conv2d(channels, dim, patch, patch)
        self.place = nn.Parameter(torch.randn(1, (size // patch) ** 2, dim) * 0.3)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


def prepare(
    model: nn.Module, x: Tensor, steps: int, budget: float | None, norms: bool
) -> tuple[torch.optim.Optimizer, pp.Pruner | None]:
    if budget is None:
        return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY), None
    pruner = pp.Pruner(model, x, macs=budget, steps=steps, norms=norms)
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=RATE, weight_decay=DECAY))
    pruner.attach(optimizer)
    return optimizer, pruner


# --- speed ----------------------------------------------------------------------------------------


def stepper(budget: float | None, norms: bool) -> Callable[[], None]:
    """Return a training step with all gates open: forward, backward, optimizer, proximal step."""
    torch.manual_seed(0)
    model, x, y = ViT(3, 32, 4, 192, 6, 3), torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    optimizer, _ = prepare(model, x[:2], 10_000, budget, norms)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def speed() -> dict:
    """Return the milliseconds of a step; the three take turns, so noise affects all equally."""
    steps = {
        "plain": stepper(None, False),
        "norms=False": stepper(0.5, False),
        "norms=True": stepper(0.5, True),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + TURNS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= WARM_UP:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {
        name: {
            "median_ms": statistics.median(found),
            "quartiles_ms": statistics.quantiles(found, n=4)[::2],
            "of_plain": statistics.median(found) / statistics.median(times["plain"]),
        }
        for name, found in times.items()
    }


# --- accuracy -------------------------------------------------------------------------------------


def train(data: Digits, epochs: int, seed: int, budget: float | None, norms: bool) -> dict:
    torch.manual_seed(seed)
    model = ViT(1, 8, 2, 48, 3, 4)
    per_epoch = len(data.train_x) // BATCH
    optimizer, pruner = prepare(model, data.train_x[:2], epochs * per_epoch, budget, norms)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    for _ in range(epochs):
        order = torch.randperm(len(data.train_x))[: per_epoch * BATCH]
        for pick in order.split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(data.train_x[pick]), data.train_y[pick]).backward()
            optimizer.step()
            rates.step()
    facts = {"epochs": epochs, "seed": seed, "budget": budget, "norms": norms}
    if pruner:
        model = pruner.export()
        before, after = pruner.graph.cost.original(), pruner.cost()
        facts.update({key: after[key] / before[key] for key in ("macs", "params")})
        facts["heads"] = sum(len(k) for name, k in pruner.plan().items() if name.endswith("qkv"))
    return {
        **facts,
        "stream": model.head.in_features,
        "accuracy": accuracy(model, data),
        "test_loss": float(F.cross_entropy(predict(model, data.test_x), data.test_y)),
    }


def digits() -> list[dict]:
    data, runs = load_digits(), []
    arms = [(None, False), *((budget, norms) for budget in BUDGETS for norms in (False, True))]
    for epochs in EPOCHS:
        for seed in SEEDS:
            for budget, norms in arms:
                runs.append(train(data, epochs, seed, budget, norms))
                print(json.dumps(runs[-1]), flush=True)
    return runs


def summary(runs: list[dict]) -> list[dict]:
    """Return the mean and the standard deviation over the seeds."""
    keys = ("epochs", "budget", "norms")
    arms: dict[tuple, list[dict]] = {}
    for run in runs:
        arms.setdefault(tuple(run[key] for key in keys), []).append(run)
    return [
        {
            **dict(zip(keys, arm, strict=True)),
            **{
                name: {"mean": statistics.mean(values), "deviation": statistics.stdev(values)}
                for name in ("accuracy", "test_loss")
                for values in [[run[name] for run in found]]
            },
            "runs": len(found),
        }
        for arm, found in arms.items()
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps, runs = speed(), digits()
    result = {
        "claim": __doc__.split("\n\n")[0],
        **environment(),
        "threads": torch.get_num_threads(),
        "step": {"runs": TURNS, **steps},
        "digits": summary(runs),
        "runs": runs,
    }
    write_numbers("norms", result, sort_keys=False)
