"""Other methods, with the same data, network, seed, epochs, rates and budget as ours.

Each trains on from the baseline with what it adds to a step, then a plan is made that meets the
budget, the channels are cut, and what is left is fine-tuned. Only Torch-Pruning cuts by itself.

| method | while it trains | what goes |
|---|---|---|
| `gdp` | ours | channels whose gate is zero |
| `magnitude` | nothing | the same share of every group, least weights first |
| `random` | nothing | the same share of every group |
| `slimming` | ℓ1 on the scales of batch norms (Liu et al., 2017) | all scales below a threshold |
| `lasso` | Σ √size · ‖w‖ over all weights that go with a channel | all norms below a threshold |
| `l0` | hard-concrete gates (Louizos et al., 2018), λ · E[MACs] | zeros, then the least likely |
| `torch-pruning` | regularizer of its GroupNormPruner | what that takes, globally |

And two that the paper compares with: `kernel-gates` ("not introducing α") and `naive-sl0`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..analysis.trace import trace
from ..channels.graph import FROZEN, Plan
from ..cost.budget import Budget
from ..cost.other_scores import (
    UnitNorms,
    magnitude_scores,
    plan_by_score,
    plan_by_threshold,
    random_scores,
    scale_scores,
)
from ..cost.resources import Quadratic
from ..errors import PruneError
from ..gates.folding import plain
from ..gates.gate import gate_value
from ..gates.install import insert_gates
from ..surgery.apply import shrink
from ..surgery.proof import count_macs
from ..validation.arguments import check_settings
from .concrete import Borrowed, HardConcrete, Steering, expected_share
from .recipes import Recipe
from .run import Run, with_weights_of
from .training import Groups, Method, Trainer, recalibrate

Limits = dict[str, float]  # resource -> share of the original
_BINS = 20  # of a histogram, as in the history of a pruner
_HARDEST = 16.0  # `alpha` of Torch-Pruning's regularizer
_CLOSE = 1e-4  # pruning ratios of Torch-Pruning: finer than one channel of these networks


class Control(Method, ABC):
    """Trains a model, then cuts it to the budget."""

    def __init__(
        self, model: nn.Module, example: Tensor, recipe: Recipe, steps: int, limits: Limits
    ) -> None:
        self.model, self.example, self.limits = model, example, limits
        self.recipe, self.numbers, self.steps = recipe, recipe.controls, steps
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """What it needs to know of the model."""

    @abstractmethod
    def cut(self, model: nn.Module) -> nn.Module:
        """What is left of the trained model."""

    def trained(self) -> nn.Module:
        """The whole model at the end, without gates."""
        return self.model


class Planned(Control):
    """Says which channels stay; this library cuts."""

    def set_up(self) -> None:
        self.graph = trace(self.model, self.example)
        Budget(self.graph, self.limits).check_reachable()

    @abstractmethod
    def plan(self) -> Plan:
        """Within the budget."""

    def cut(self, model: nn.Module) -> nn.Module:
        return shrink(model, self.graph, self.plan())

    def _same_share(self, scores: Tensor) -> Plan:
        return plan_by_score(self.graph, scores, multiple_of=1, **self.limits)

    def _above_threshold(self, scores: Tensor) -> Plan:
        return plan_by_threshold(self.graph, scores, **self.limits)


class Magnitude(Planned):
    def plan(self) -> Plan:
        return self._same_share(magnitude_scores(self.model, self.graph))


class Random(Planned):
    def plan(self) -> Plan:
        return self._same_share(random_scores(self.graph, self.recipe.seed))


class Slimming(Planned):
    """ℓ1 on the scales of all batch norms; one threshold for all."""

    def set_up(self) -> None:
        super().set_up()
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        self.scales: list[Tensor] = [norm.weight for norm in norms if norm.affine]
        if not self.scales:
            raise PruneError("slimming: this network has no batch norms with scales.")

    def penalty(self) -> Tensor:
        return self.numbers.slimming * torch.cat(self.scales).abs().sum()

    def plan(self) -> Plan:
        return self._above_threshold(scale_scores(self.model, self.graph))


class Lasso(Planned):
    """Group lasso; a weight is in the norms of all channels it goes with. The threshold is on ‖w‖:
    on ‖w‖/√size it would empty the wide layers first, whose weights are smaller to begin with."""

    def set_up(self) -> None:
        super().set_up()
        self.norms = UnitNorms(self.model, self.graph.units, self.graph.axes)

    def penalty(self) -> Tensor:
        return self.numbers.lasso * (self.norms.sizes.sqrt() * self.norms()).sum()

    def facts(self) -> dict[str, Any]:
        """As the paper draws it: ‖w‖ over the number of weights, the largest is 1."""
        norms = (self.norms() / self.norms.sizes).detach().float()
        return {"norms": torch.histc(norms / norms.max(), _BINS, 0, 1).int().tolist()}

    def plan(self) -> Plan:
        return self._above_threshold(self.norms().detach())


class Steered(Planned):
    """λ is steered so that the expected cost goes down along the path that ours takes, and stays at
    the budget."""

    def set_up(self) -> None:
        super().set_up()
        self.home = next(self.model.parameters()).device
        parts, self.whole = self.graph.cost.parts, self.graph.cost.original()
        self.costs = {
            key: Quadratic(parts[key].q.to(self.home), parts[key].b.to(self.home), parts[key].c)
            for key in self.limits
        }
        ways = [self.recipe.schedule.path(step, self.steps) for step in range(self.steps)]
        path = torch.tensor(ways, dtype=torch.float64, device=self.home)
        self.steering = Steering(path, *self.strength())

    def strength(self) -> tuple[float, float]:
        """Of λ: at once, and in the long run."""
        return self.numbers.l0_push, self.numbers.l0_rise

    @abstractmethod
    def chances(self) -> list[Tensor]:
        """For every group, how much of each of its channels is there."""

    def shares(self) -> Tensor:
        """Expected, of each resource that has a budget."""
        chances = self.chances()
        return torch.stack([
            expected_share(cost, self.whole[key], chances) for key, cost in self.costs.items()
        ])  # fmt: skip

    def steer(self, shares: Tensor) -> Tensor:
        """λ, by the resource that is furthest from its budget: 1 at the start, 0 when there."""
        ways = [(share - limit) / (1 - limit)
                for share, limit in zip(shares, self.limits.values(), strict=True)]  # fmt: skip
        return self.steering.follow(torch.stack(ways).amax())

    def penalty(self) -> Tensor | None:
        shares = self.shares()
        return (self.steer(shares) * shares.sum()).sum().float()

    def facts(self) -> dict[str, Any]:
        shares = zip(self.limits, self.shares().tolist(), strict=True)
        return {f"expected_{key}": share for key, share in shares} | {
            "lam": float(self.steering.lam)
        }

    def state(self) -> dict[str, Tensor]:
        return {"step": self.steering.step, "sum": self.steering.sum}

    def plan(self) -> Plan:
        return self._above_threshold(torch.cat(self.chances()).detach())


class L0(Steered):
    """Hard-concrete gates."""

    def set_up(self) -> None:
        super().set_up()
        self.gates = {
            name: HardConcrete(group.size, self.numbers).to(self.home)
            for name, group in self.graph.prunable.items()
        }
        insert_gates(self.model, self.graph, dict(self.gates), torch.ones(self.graph.units).bool())

    def param_groups(self, model: nn.Module, lr: float, weight_decay: float) -> Groups:
        alphas = [gate.alpha for gate in self.gates.values()]
        mine = {id(alpha) for alpha in alphas}
        rest = [p for p in model.parameters() if id(p) not in mine]
        return [
            {"params": rest, "lr": lr, "weight_decay": weight_decay},
            {"params": alphas, "lr": lr * self.numbers.l0_lr, "weight_decay": 0.0},
        ]

    def begin(self) -> None:
        for gate in self.gates.values():
            gate.draw()

    def chances(self) -> list[Tensor]:
        return [gate.chance() for gate in self.gates.values()]

    def trained(self) -> nn.Module:
        return plain(self.model.eval())

    def plan(self) -> Plan:
        gates = self.gates.values()
        chances = [gate.chance() * (gate.settled() > 0) for gate in gates]
        return self._above_threshold(torch.cat(chances).detach())


class Kernels(Steered):
    """Gates g(‖w‖), where ‖w‖ is of all weights that read a channel; ε begins as a tenth of its own
    ‖w‖²."""

    def set_up(self) -> None:
        super().set_up()
        self.norms = UnitNorms(self.model, self.graph.units, self.graph.sites)
        self.first = self.norms().detach().square() / 10
        schedule = self.recipe.schedule
        self.decay = math.log(schedule.eps_end / schedule.eps_start) / self.steps

    def values(self) -> Tensor:
        """All gates: 1 / 1.1 at the start."""
        return gate_value(self.norms(), self.first * torch.exp(self.decay * self.steering.step))

    def chances(self) -> list[Tensor]:
        return list(self.values().split([group.size for group in self.graph.prunable.values()]))

    def strength(self) -> tuple[float, float]:
        return self.numbers.kernel_push, self.numbers.kernel_rise

    def plan(self) -> Plan:
        """In the order of the gates, which are too near to 1 to be told apart at the end."""
        return self._above_threshold((self.norms().square() / self.first).detach())

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "first": self.first}


class NaiveSL0(Kernels):
    """g as a regularizer, as smoothed ℓ0 was meant at first: loss + λ · R(g(‖w‖)).

    λ is fixed: while a path is waited for, ε decays, and what is open can no longer be moved. Near
    zero the slope is as steep as 1/√ε and throws kernels about, as the paper found.
    """

    def steer(self, shares: Tensor) -> Tensor:
        return super().steer(shares).fill_(self.numbers.naive_sl0)


class KernelGates(Kernels):
    """No α: the gates are g(‖w‖), and the proximal step shrinks the weights that read a channel."""

    def set_up(self) -> None:
        super().set_up()
        self.gates = {name: Borrowed(group.size) for name, group in self.graph.prunable.items()}
        for gate in self.gates.values():
            gate.to(self.home)
        insert_gates(self.model, self.graph, dict(self.gates), torch.ones(self.graph.units).bool())
        sizes = torch.tensor([group.size for group in self.graph.prunable.values()])
        self.owner = torch.arange(len(sizes)).repeat_interleave(sizes).to(self.home)
        self.closed = torch.zeros(self.graph.units, dtype=torch.bool, device=self.home)
        self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        for gate, values in zip(self.gates.values(), self.chances(), strict=True):
            gate.now = None
            gate.last.copy_(values)

    def begin(self) -> None:
        for gate, values in zip(self.gates.values(), self.chances(), strict=True):
            gate.now = values

    def penalty(self) -> None:
        return None

    def steer(self, shares: Tensor) -> Tensor:
        """λ, or the fixed one that the recipe has; the rest of the budget is cut at the end."""
        lam = super().steer(shares)
        return lam.fill_(self.numbers.kernel_lam) if self.numbers.kernel_lam else lam

    @torch.no_grad()
    def after(self, rate: Tensor | float) -> None:
        widths = torch.stack([values.sum() for values in self.chances()]).double()
        prices = [(cost.q @ widths + cost.b) / self.whole[key] for key, cost in self.costs.items()]
        price = torch.stack(prices).sum(0)[self.owner]
        pull = self.steer(self.shares()) * rate * price / self.norms()
        factors = (1 - pull).clamp_min(0).float()
        self.closed |= factors == 0  # for good: momentum would open it again
        self.norms.scale(factors.masked_fill(self.closed, 0.0))
        self._settle()

    def trained(self) -> nn.Module:
        return plain(self.model.eval())

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "closed": self.closed}


class TorchPruning(Control):
    """Its groups, its importance, its cutting. Its regularizer reads numbers back and takes longer
    than a step, so the same formula is here in a few large kernels (a test compares them)."""

    def set_up(self) -> None:
        self.norms, self.group = self._units(self._pruner(self.model, 0.5))
        self.groups = int(self.group.max()) + 1

    def _pruner(self, model: nn.Module, ratio: float) -> Any:
        tp = self._library()
        return tp.pruner.GroupNormPruner(
            model,
            self.example,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            reg=self.numbers.torch_pruning,
            global_pruning=True,
            pruning_ratio=ratio,
            ignored_layers=[[m for m in model.modules() if isinstance(m, nn.Linear)][-1]],
        )

    def _library(self) -> Any:
        try:
            import torch_pruning as tp
        except ImportError as error:
            raise PruneError(
                "torch-pruning is not installed: pip install polarprune[controls]"
            ) from error
        return tp

    def _units(self, pruner: Any) -> tuple[UnitNorms, Tensor]:
        """The norms of all channels of its groups, and the group of each channel."""
        tp = self._library()
        kinds = [(tp.prune_conv_out_channels, 0), (tp.prune_linear_out_channels, 0),
                 (tp.prune_conv_in_channels, 1), (tp.prune_linear_in_channels, 1),
                 (tp.prune_batchnorm_out_channels, 0)]  # fmt: skip
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        axes: dict[str, dict[int, Tensor]] = {}
        owners: list[int] = []
        for number, group in enumerate(pruner._groups):
            for item in group:
                layer, known = item.dep.layer, [k for fn, k in kinds if fn == item.dep.pruning_fn]
                if not known or layer.weight is None:
                    continue
                if getattr(layer, "groups", 1) > 1 or getattr(layer, "transposed", False):
                    raise PruneError(f"torch-pruning: {layer} is not one that is compared here.")
                own = axes.setdefault(names[id(layer.weight)], {})
                none = torch.full((layer.weight.shape[known[0]],), FROZEN)
                units = own.setdefault(known[0], none)
                units[list(item.idxs)] = len(owners) + torch.tensor(list(item.root_idxs))
            owners += [number] * len(group[0].idxs)
        home = next(self.model.parameters()).device
        return UnitNorms(self.model, len(owners), axes), torch.tensor(owners, device=home)

    def param_groups(self, model: nn.Module, lr: float, weight_decay: float) -> Groups:
        return super().param_groups(model, lr, self.numbers.torch_pruning_decay)

    @torch.no_grad()
    def pull(self) -> None:
        """The least channels of a group are pulled at 16 times as hard as the largest."""

        def of_group(kind: str, values: Tensor) -> Tensor:
            none = values.new_zeros(self.groups)
            return none.scatter_reduce(0, self.group, values, kind, include_self=False)[self.group]

        squares = self.norms.squares()
        size = (squares / of_group("mean", squares)).sqrt()
        largest, least = of_group("amax", size), of_group("amin", size)
        strength = _HARDEST ** ((largest - size) / (largest - least))
        self.norms.pull(self.numbers.torch_pruning * strength.nan_to_num(0.0, 0.0, 0.0))

    def cut(self, model: nn.Module) -> nn.Module:
        """By the least pruning ratio that meets the budget."""
        whole = cost_of(model, self.example)
        low, high, found = 0.0, 1.0, None
        while high - low > _CLOSE:
            ratio = (low + high) / 2
            small = copy.deepcopy(model)
            self._pruner(small, ratio).step()
            left = cost_of(small, self.example)
            if all(left[key] <= limit * whole[key] for key, limit in self.limits.items()):
                high, found = ratio, small
            else:
                low = ratio
        if found is None:
            raise PruneError(f"torch-pruning: no pruning ratio meets the budget {self.limits}.")
        return found


METHODS: dict[str, type[Control]] = {
    "magnitude": Magnitude,
    "random": Random,
    "slimming": Slimming,
    "lasso": Lasso,
    "l0": L0,
    "torch-pruning": TorchPruning,
}
EVERY = METHODS | {"kernel-gates": KernelGates, "naive-sl0": NaiveSL0}


def cost_of(model: nn.Module, example: Tensor) -> dict[str, int]:
    params = sum(parameter.numel() for parameter in model.parameters())
    return {"macs": count_macs(model, example), "params": params}


def check(method: str, limits: Limits) -> None:
    """What can be said before a baseline is trained."""
    if method != "gdp" and method not in EVERY:
        raise PruneError(f"there is no method {method!r}. Methods: gdp, {', '.join(EVERY)}.")
    if method != "gdp" and "lam" in limits:
        raise PruneError(f"--lam is a number of our method; give {method} a budget.")
    wanted: dict[str, float | None] = {key: limits.get(key) for key in ("macs", "params")}
    check_settings(wanted, limits.get("lam"), steps=1)


def prune(run: Run, baseline: nn.Module, method: str = "gdp", **limits: float) -> dict[str, Any]:
    """From a baseline to a small model and its card, within budgets, by any method."""
    check(method, limits)
    if method == "gdp":
        return run.prune(baseline, **limits)
    recipe = run.recipe
    before = run.score(baseline)
    teacher = baseline if recipe.distill else None
    model = with_weights_of(run.fresh(), baseline)
    steps = recipe.epochs * run.batches.per_epoch
    control = EVERY[method](model, run.data.example(), recipe, steps, limits)
    trainer = Trainer(
        model, run.batches, recipe, epochs=recipe.epochs, lr=recipe.lr, method=control,
        teacher=teacher,
    )  # fmt: skip
    run.train("prune", trainer)
    full = control.trained()
    if recipe.recalibrate:
        recalibrate(full, run.batches, recipe.recalibrate)
    small = control.cut(full)
    whole, left = (cost_of(one, run.data.example()) for one in (full, small))
    over = [key for key, limit in limits.items() if left[key] > limit * whole[key]]
    assert not over, f"{method}: above its budget of {over}"
    models = {"full": full, "small": small}
    card = run.card(method, limits, before, models, run.one(whole), run.one(left))
    return run.finish(card, small, teacher)
