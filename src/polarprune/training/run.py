"""The parts of a pruning run, and how they work together.

`Stepper` moves the gates on the device, `Steering` counts the steps and decides on the host which
gates close next, `Compaction` removes closed channels during training, `Exporter` cuts the small
model. `PruningRun` builds and connects them; `Pruner` adds the methods that users call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..channels.graph import Graph
from ..cost.budget import Budget
from ..cost.stopwatch import Stopwatch
from ..errors import PruneError
from ..gates.gate import Gate
from ..gates.install import install
from ..surgery.proof import example_for
from ..tracing.model_state import Example
from ..validation.optimizers import check_optimizers
from ..validation.run import check_finite, check_prunable
from .compaction import Compaction
from .export import Exporter
from .schedule import Schedule
from .steering import Progress, Row, Steering
from .stepper import Stepper

State = dict[str, Any]  # of a pruner: tensors and plain data


class PruningRun:
    """A model with gates, and everything that closes them.

    Args:
        model: gets gates, in place.
        example: what `model(...)` takes.
        trace: finds the groups of a model's channels.
        schedule: how ε and the cost decrease over the steps.
        limits: budgets, as fractions of the original; empty with `lam`.
        lam: λ of the paper's plain mode, or None.
        steps: the number of optimizer steps.
        multiple_of: every kept width is a multiple of this number; "auto" depends on the group.
        compacts: compact the model automatically.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        trace: Callable[[nn.Module, Example], Graph],
        schedule: Schedule,
        *,
        limits: dict[str, float],
        lam: float | None,
        steps: int,
        multiple_of: int | str,
        compacts: bool,
    ) -> None:
        self.model, self.example, self.schedule = model, example, schedule
        self.limits, self.lam, self.steps, self.multiple_of = limits, lam, steps, multiple_of
        self.graph: Graph = trace(model, example)
        check_prunable(self.graph)
        self._build_budget()
        self.gates: dict[str, Gate] = {}
        self._compaction = Compaction(model, self.graph, self.gates, automatic=compacts)
        self.gates.update(install(model, self.graph, example))
        self._exporter = Exporter(self._compaction, trace)
        self._build_steering()
        self._traced_dtype = self._weight().dtype
        self.proof: dict[str, float] = {}
        self._optimizer: Optimizer | None = None
        self._others: tuple[Optimizer, ...] = ()
        self._lr: float | None = None
        self._steering.look(0.0)

    def _build_budget(self) -> None:
        """Set up the limits, and measure the latency if that is limited; refuse what is too low."""
        self.budget = Budget(self.graph, self.limits or {"macs": 0.0}, self.multiple_of)
        self._stopwatch: Stopwatch | None = None
        if "latency" in self.limits:
            limit = self.limits["latency"]
            self._stopwatch = Stopwatch(self.model, self.graph, self.example, limit)
            self._stopwatch.install(self.budget)
        if self.limits:
            self.budget.check_reachable()

    def _build_steering(self) -> None:
        self._stepper = Stepper(
            self.gates, self.budget.owner, self.schedule, self.steps, proximal=self.lam is not None
        )
        self._steering = Steering(
            self.graph,
            self.budget,
            self._stepper,
            self.schedule,
            self.steps,
            lam=self.lam,
            stopwatch=self._stopwatch,
        )

    # --- steps ------------------------------------------------------------------------------------

    def _check_gates_if_due(self) -> None:
        if self._steering.is_due:
            check_finite(self._named_alphas(), self._flat())

    def _check_steps_left(self) -> None:
        if self.step_count >= self.steps:
            raise PruneError(
                f"steps: {self.steps} steps were announced and all are done. Set "
                f"steps = epochs * len(loader) (optimizer steps, not batches, if gradients are "
                f"accumulated); to continue training, export first and train the small model."
            )

    def _gate_lr(self) -> float | Tensor:
        """Return the gates' learning rate: a tensor if the optimizer's step is captured."""
        if self._optimizer is None:
            return self._lr or 0.0
        first = id(self._stepper.alphas[0])
        for group in self._optimizer.param_groups:
            if any(id(p) == first for p in group["params"]):
                rate: float | Tensor = group["lr"]
                return rate
        raise AssertionError("attach made sure that the optimizer holds the gates")

    # --- progress ---------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Optimizer steps done."""
        return self._steering.progress.step

    @property
    def landed(self) -> bool:
        """Whether the budget is met for good."""
        return self._steering.progress.landed

    @property
    def landing(self) -> dict[str, float]:
        """The gates and the share of the MACs that were closed at once at the deadline."""
        return self._steering.progress.landing

    @property
    def history(self) -> list[Row]:
        """One row for every look at the gates."""
        return self._steering.progress.history

    @property
    def compactions(self) -> int:
        """How many times the model was compacted; each time its shapes changed."""
        return self._compaction.count

    @property
    def copies(self) -> list[nn.Module]:
        """Other copies of the gated model that `compact` cuts."""
        return self._compaction.copies

    @copies.setter
    def copies(self, given: list[nn.Module]) -> None:
        self._compaction.copies = given

    def _named_alphas(self) -> dict[str, nn.Parameter]:
        return {name: gate.alpha for name, gate in self.gates.items()}

    def _flat(self) -> Tensor:
        """Return α of all original gates as one vector."""
        return self._stepper.flat()

    def _alive(self) -> Tensor:
        """Return a mask of the units whose gate is not closed."""
        return self._flat().cpu() != 0

    def _widths(self) -> Tensor:
        return self.budget.widths(self._flat().cpu())

    def _settings(self) -> dict[str, float | str]:
        goal: dict[str, float] = self.limits if self.lam is None else {"lam": self.lam}
        return {**goal, "steps": self.steps, "multiple_of": self.multiple_of}

    def _here(self) -> Example:
        """Return the example on the device of the model, in its precision."""
        return example_for(self.example, self._weight(), self._traced_dtype)

    def _weight(self) -> Tensor:
        """Return one of the model's weights, which tells its device and precision."""
        mine = {id(alpha) for alpha in self._stepper.alphas}
        weights = [p for p in self.model.parameters() if p.is_floating_point()]
        return next((p for p in weights if id(p) not in mine), self._flat())

    # --- smaller models ---------------------------------------------------------------------------

    def _after_compaction(self) -> None:
        self._stepper.keep_only(self._compaction.present)
        self._compaction.share = self.graph.cost.share(self._widths())["macs"]

    def _optimizers(self, more: object = ()) -> list[Optimizer]:
        given = list(more) if isinstance(more, Iterable) else [more]
        found = [one for one in (self._optimizer, *self._others, *given) if one is not None]
        check_optimizers(found, "compact")
        return list(dict.fromkeys(one for one in found if isinstance(one, Optimizer)))

    # --- resuming ---------------------------------------------------------------------------------

    def _state(self) -> State:
        sizes = [group.size for group in self.graph.prunable.values()]
        compaction = self._compaction
        return {
            "settings": self._settings(),
            "schedule": asdict(self.schedule),
            "step": self.step_count,
            "landed": self.landed,
            "landing": dict(self.landing),
            "alpha": dict(zip(self.gates, self._flat().split(sizes), strict=True)),
            "present": compaction.present.clone(),
            "compacted": compaction.share,
            "given_up": compaction.gave_up,
            "stepper": self._stepper.state(),
            "history": copy.deepcopy(self.history),
            **({"latency": self._stopwatch.state()} if self._stopwatch else {}),
        }

    def _restore(self, state: State) -> None:
        """Continue from a state that was checked."""
        compaction = self._compaction
        rebuild = compaction.rebuild(state["present"].cpu())
        optimizers = self._optimizers()
        copies = compaction.check(rebuild, optimizers)
        if not rebuild.changes_nothing:
            compaction.apply(rebuild, optimizers, copies)
            self._stepper.keep_only(compaction.present)
        compaction.share, compaction.gave_up = state["compacted"], state["given_up"]
        self._stepper.put(torch.cat([state["alpha"][name] for name in self.gates]))
        self._stepper.load(state["stepper"])
        self._stepper.set_step(state["step"])
        self._steering.progress = Progress(
            state["step"], state["landed"], dict(state["landing"]), copy.deepcopy(state["history"])
        )
        if self._stopwatch is not None:
            self._stopwatch.load(state["latency"])
