"""`PruningRun`: builds the parts of a run, and says what is left of the model.

Each part changes only its own fields.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from ..channels.graph import Graph, Plan, plan_of
from ..cost.budget import Budget
from ..cost.stopwatch import Stopwatch
from ..gates.gate import Gate
from ..gates.sharding import install_gates, unsharded_model
from ..report.groups import graph_facts
from ..report.loading import class_name
from ..report.report import Report
from ..surgery.proof import example_for
from ..tracing.model_state import Example, empty_slots
from ..validation.optimizers import check_known
from ..validation.run import check_finite, check_prunable
from .attachment import Attachment
from .compaction import Compaction
from .copies import Copies
from .processes import Processes
from .settings import RunSettings
from .steering import Steering
from .stepper import Stepper

Trace = Callable[[nn.Module, Example], Graph]


class PruningRun:
    """A model with gates, and the parts that close them.

    Args:
        model: The model to prune. It gets gates, in place.
        example: The inputs that `model(...)` takes.
        trace: Finds the groups of a model's channels.
        settings: The goal of the run.
        compacts: Whether the model is compacted automatically.

    Attributes:
        graph: The groups of the model's channels.
        budget: The limits, and the cost of any set of widths.
        stopwatch: Measures the latency, where that is limited; otherwise None.
        gates: The gate of each prunable group, by group name.
        stepper: Moves the gates on the device.
        steering: Counts the steps, and decides on the host which gates close next.
        attachment: Knows the optimizers.
        copies: Knows the copies of the model, such as averages.
        processes: Knows the other processes that train the model.
        compaction: Removes closed channels from the model while it trains.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        trace: Trace,
        settings: RunSettings,
        *,
        compacts: bool,
    ) -> None:
        self.model, self.example, self.trace, self.settings = model, example, trace, settings
        self.processes = Processes(model)
        unsharded = unsharded_model(model)
        self.graph = trace(unsharded, example)
        check_prunable(self.graph)
        self.budget = Budget(self.graph, settings.limits or {"macs": 0.0}, settings.multiple_of)
        self.stopwatch = self._stopwatch(unsharded)
        if settings.limits:
            self.budget.check_reachable()
        slots = empty_slots(model)
        self.gates: dict[str, Gate] = install_gates(model, unsharded, self.graph, example)
        self.stepper = Stepper(
            self.gates,
            self.budget.owner,
            settings.schedule,
            settings.steps,
            proximal=settings.lam is not None,
        )
        self.steering = Steering(self.graph, self.budget, self.stepper, settings, self.stopwatch)
        self.attachment = Attachment(self.stepper)
        self.copies = Copies(model, self.gates)
        self.compaction = Compaction(
            model, self.graph, self.stepper, self.copies, self.processes, slots, automatic=compacts
        )
        self._traced_dtype = self._weight(model).dtype
        self.steering.check(0.0)

    def _stopwatch(self, model: nn.Module) -> Stopwatch | None:
        """Measure the latency if it is limited; a limit that is out of reach is refused."""
        limit = self.settings.limits.get("latency")
        if limit is None:
            return None
        stopwatch = Stopwatch(model, self.graph, self.example, limit)
        stopwatch.install(self.budget)
        return stopwatch

    @property
    def step_count(self) -> int:
        """The number of optimizer steps done."""
        return self.steering.progress.step

    def check_finite(self, values: Tensor) -> None:
        """Refuse gates that are NaN or infinite; `values` holds them and what else is checked."""
        check_finite(self.named_alphas(), values)

    def named_alphas(self) -> dict[str, nn.Parameter]:
        """Return α of each group, by group name."""
        return {name: gate.alpha for name, gate in self.gates.items()}

    def kept(self) -> Tensor:
        """Return a mask of the units whose gates are not closed."""
        return self.stepper.last().cpu() != 0

    def widths(self) -> Tensor:
        """Return how many units each group keeps."""
        return self.budget.widths(self.kept())

    def plan(self) -> Plan:
        """Return the indices of the channels to keep, by group name."""
        return plan_of(self.graph, self.kept())

    def report(self, proof: Mapping[str, float], skipped: Mapping[str, str]) -> Report:
        """Return what happened so far; the last export found `proof`, and skipped `skipped`."""
        return Report(
            **graph_facts(self.graph, self.plan()),
            settings=self.settings.as_data(),
            history=copy.deepcopy(self.steering.progress.history),
            proof=dict(proof),
            skipped=dict(skipped),
            results={"latency_ms": self.stopwatch.results} if self.stopwatch else {},
            model=class_name(self.model),
        )

    def cost(self) -> dict[str, int]:
        """Return the MACs, the parameters and the memory that are left."""
        return self.graph.cost.at(self.widths())

    def compact(
        self,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        copies: Iterable[nn.Module] | None = None,
        *,
        verify: bool = True,
    ) -> None:
        """Remove closed channels from the model, with the arguments of `Pruner.compact`."""
        known = self.attachment.optimizers(optimizer)
        check_known(known, optimizer is None and self.step_count > 0)
        others = self.copies.to_cut(copies)
        example = self.example_on(self.model) if verify else None
        self.compaction.compact(self.kept(), known, others, example)

    def example_on(self, model: nn.Module) -> Example:
        """Return the example on the device of the model or of a copy, in its precision."""
        return example_for(self.example, self._weight(model), self._traced_dtype)

    def _weight(self, model: nn.Module) -> Tensor:
        """Return a weight of the model, to read its device and precision from."""
        mine = {id(alpha) for alpha in self.stepper.alphas}
        weights = [p for p in model.parameters() if p.is_floating_point()]
        return next((p for p in weights if id(p) not in mine), self.stepper.last())
