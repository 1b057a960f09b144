"""`PruningRun`: builds the parts of a run and connects them, and takes the steps of the gates.

`Stepper` moves the gates on the device. `Steering` counts the steps, and decides on the host which
gates close next. `Attachment` knows the optimizers, `Processes` the other processes, `Copies` the
averages of the model. `Compaction` removes closed channels during training. Each part changes only
its own fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..channels.graph import Graph
from ..cost.budget import Budget
from ..cost.stopwatch import Stopwatch
from ..gates.gate import Gate
from ..gates.sharding import install_gates, shard_gates, whole_model
from ..surgery.proof import example_for
from ..torch_internals.parallel import is_distributed, only_makes_state
from ..tracing.model_state import Example, empty_slots
from ..validation.compaction import check_held
from ..validation.optimizers import check_gates, check_known, check_not_attached
from ..validation.run import (
    check_finite,
    check_prunable,
    check_step_by_hand,
    warn_of_more_steps,
)
from .attachment import Attachment
from .compaction import Compaction
from .copies import Copies
from .processes import Processes
from .settings import RunSettings
from .steering import Steering
from .stepper import Stepper

Trace = Callable[[nn.Module, Example], Graph]


class PruningRun:
    """A model with gates, and everything that closes them.

    Args:
        model: The model to prune. It gets gates, in place.
        example: The inputs that `model(...)` takes.
        trace: Finds the groups of a model's channels.
        settings: The goal of the run.
        compacts: Whether the model is compacted automatically.

    Attributes:
        gates: The gate of each prunable group, by group name.
        graph: The groups of the model's channels.
        budget: The limits, and the cost of any set of widths.
        stopwatch: Measures the latency, where that is limited; otherwise None.
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
        whole = whole_model(model)
        self.graph = trace(whole, example)
        check_prunable(self.graph)
        self.budget = Budget(self.graph, settings.limits or {"macs": 0.0}, settings.multiple_of)
        self.stopwatch = self._stopwatch(whole)
        if settings.limits:
            self.budget.check_reachable()
        slots = empty_slots(model)
        self.gates: dict[str, Gate] = install_gates(model, whole, self.graph, example)
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
        self._warned = False  # of steps after the announced ones
        self.steering.check(0.0)

    def _stopwatch(self, model: nn.Module) -> Stopwatch | None:
        """Measure the latency if it is limited; a limit that is out of reach is refused."""
        limit = self.settings.limits.get("latency")
        if limit is None:
            return None
        stopwatch = Stopwatch(model, self.graph, self.example, limit)
        stopwatch.install(self.budget)
        return stopwatch

    # --- steps ------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer, *others: Optimizer) -> None:
        """Move the gates after every step of an optimizer.

        Args:
            optimizer: Holds the gates.
            *others: Optimizers of other parameters.

        Raises:
            PruneError: As `Pruner.attach` does. Nothing is changed.
        """
        check_not_attached(self.attachment.optimizer)
        check_gates(self._named_alphas(), self.stepper.alphas, optimizer, others)
        if self.compaction.automatic:
            check_held(self.model, (optimizer, *others), "attach(optimizer, other)")
        for one in (optimizer, *others):
            self.compaction.drop_removed(one)
        self.attachment.attach(optimizer, others, self.step_count)
        optimizer.register_step_pre_hook(lambda opt, args, kw: self._before_step(opt))
        optimizer.register_step_post_hook(lambda opt, args, kw: self._after_step(opt))

    def _before_step(self, optimizer: Optimizer) -> None:
        if not only_makes_state(optimizer):
            self._check_step()

    def _after_step(self, optimizer: Optimizer) -> None:
        skipped = bool(getattr(optimizer, "found_inf", None))  # by a fused optimizer itself
        if not skipped and not only_makes_state(optimizer):
            self.move_gates()

    def _check_step(self) -> None:
        """Refuse a step if parts of different checkpoints were loaded, or if processes differ."""
        self.attachment.check_step(self.step_count)
        self._hold_if_done()

    def check_step_by_hand(self) -> None:
        """Refuse a step that the user takes, if an optimizer takes it or the rate is unknown."""
        knows_rate = self.settings.lam is None or self.attachment.knows_rate
        check_step_by_hand(self.attachment.optimizer, rate_known=knows_rate)

    def move_gates(self) -> None:
        """Move the gates by one step, and count it."""
        self.attachment.check(self.step_count)  # an optimizer was compared before its step
        if self._hold_if_done():
            return
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not captured:
            self._check_gates_if_due()
        self.stepper.follow_device()
        if self.settings.lam is not None:
            self.stepper.set_scale(self.settings.lam * self.attachment.gate_lr())
        self.stepper()
        if not captured:
            self._finish_step()

    def finish_replayed_step(self) -> None:
        """Do what `move_gates` does on the host, after a CUDA graph has moved the gates."""
        self._check_step()
        if not self.steering.is_done:
            self._check_gates_if_due()
            self._finish_step()

    def _check_gates_if_due(self) -> None:
        if self.steering.is_due:
            self.check_finite(self.stepper.flat())

    def check_finite(self, values: Tensor) -> None:
        """Refuse gates that are NaN or infinite; `values` holds them and what else is checked."""
        check_finite(self._named_alphas(), values)

    def _named_alphas(self) -> dict[str, nn.Parameter]:
        return {name: gate.alpha for name, gate in self.gates.items()}

    def _hold_if_done(self) -> bool:
        """After the announced steps, leave the gates as they are, and warn once."""
        self.processes.join(self.stepper.alphas, self._facts)
        if not self.steering.is_done:
            return False
        self.stepper.hold()
        self.copies.follow()
        if not self._warned:
            self._warned = True
            warn_of_more_steps(self.settings.steps)
        return True

    def _finish_step(self) -> None:
        """Count the step, check the gates if that is due, and compact if that saves time."""
        due = self.steering.count_step(float(self.attachment.gate_lr()))
        self.attachment.note_step(self.step_count)
        if due:
            progress, steps = self.steering.progress, self.settings.steps
            macs = progress.history[-1]["macs"]
            if self.compaction.pays(macs, steps - progress.step, steps, progress.landed):
                self.compaction.try_to(self.compact)
        self.copies.follow()

    # --- other processes --------------------------------------------------------------------------

    def follow_sharding(self) -> None:
        """Spread the gates over the processes if `fully_shard` has spread the weights."""
        if self.processes.sharded and not is_distributed(self.stepper.alphas[0]):
            shard_gates(self.model, self.gates)
            self.stepper.follow_gates()

    def _facts(self) -> dict[str, object]:
        """Return what must be equal in all processes that train the model."""
        groups = [(name, one.size, one.minimum) for name, one in self.graph.prunable.items()]
        settings = self.settings
        return {
            "the arguments of the Pruner": (settings.as_data(), asdict(settings.schedule)),
            "the groups of channels": groups,
            "the steps that were taken": self.step_count,
            "the gates": (self.stepper.last().tolist(), self.compaction.present.tolist()),
            "the history": self.steering.progress.history,
        }

    # --- what is left -----------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """The number of optimizer steps done."""
        return self.steering.progress.step

    def kept(self) -> Tensor:
        """Return a mask of the units whose gate is not closed."""
        return self.stepper.last().cpu() != 0

    def widths(self) -> Tensor:
        """Return how many units each group keeps."""
        return self.budget.widths(self.kept())

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
