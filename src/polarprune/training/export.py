"""`export`: a plain, small copy of the gated model, proved equal to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..analysis.trace import changed
from ..channels.graph import plan_of
from ..gates.sharding import gathered_copy
from ..surgery.config_proof import update_config
from ..surgery.cut_proof import prove_cut
from ..surgery.proof import Proof, check_macs, example_for
from ..tracing.model_state import empty_slots, named_tensors, slots_cleared
from ..validation.run import (
    check_done,
    check_minimum,
    check_no_other_weights,
    check_same_gates,
    check_weights,
    warn_of_early_export,
)
from .rebuild import Rebuild, gates_in, ungated
from .run import PruningRun


class Exporter:
    """Cuts one gated model by the plan of its gates.

    Args:
        run: The run that has closed the gates.
        model: A copy of its model with other weights, which is cut in place of the model; or None.

    Attributes:
        gated: The gated model to cut. Weights that are spread over processes are gathered.
    """

    def __init__(self, run: PruningRun, model: nn.Module | None) -> None:
        self._run, self._slots = run, run.compaction.slots
        run.check_finite(run.stepper.last())
        if run.processes.sharded:
            check_no_other_weights(model)
            self.gated = self._gathered()
            self._slots = empty_slots(self.gated)
        else:
            self.gated = run.model if model is None else run.copies.with_own_gates(model)
        self._kept, self._example = run.kept(), run.example_on(self.gated)

    def _gathered(self) -> nn.Module:
        """Return a copy of a sharded model with whole weights."""
        run, whole = self._run, gathered_copy(self._run.model)
        gates = gates_in(whole, run.model, run.gates)
        found = torch.cat([gate.alpha for gate in gates.values()])
        check_same_gates(run.stepper.last(), found)
        return whole

    def check_ready(self) -> None:
        """Refuse to export weights that diverged, or before the budget is met."""
        run, settings = self._run, self._run.settings
        check_weights(self.gated)
        share = run.graph.cost.share(run.widths())
        deadline = 0 if run.steering.progress.landed else settings.deadline
        check_done(settings.limits, share, run.step_count, settings.steps, deadline)
        warn_of_early_export(run.step_count, settings.steps)

    def small(self) -> nn.Module:
        """Return what remains of the gated model. If it has a config, that gets the new sizes."""
        with slots_cleared(self._slots):
            small = self._cut(self.gated)
            update_config(small, self._example)
        return small

    def prove(self, small: nn.Module) -> Proof:
        """Compare the small model with the gated one."""
        run = self._run
        with slots_cleared(self._slots):
            found = prove_cut(
                self.gated,
                small,
                self._example,
                lambda wide, copied: self._cut(wide, copied=copied),
            )
        if not run.graph.tapes[0].depends_on_data:
            check_macs(small, self._example, run.cost()["macs"])
        return found

    def check_latency(self, small: nn.Module) -> None:
        """Refuse a small model that is slower than its budget, where latency is limited."""
        if self._run.stopwatch is not None:
            self._run.stopwatch.check(small)

    def _cut(self, gated: nn.Module, *, copied: bool = True) -> nn.Module:
        """Return what remains of a gated model, without gates.

        A model whose plain attributes changed since it was traced is traced again; after a
        compaction that is too late, and `compact` has refused it.

        Args:
            gated: The model to cut.
            copied: Whether the model is kept; with False its modules become those of the result.
        """
        compaction, graph, kept = self._run.compaction, self._run.graph, self._kept
        small = ungated(gated, graph, copied=copied)
        if compaction.count == 0 and changed(graph, small, compaction.present):
            here = example_for(self._example, _weight(small), _weight(self._run.model).dtype)
            plan, graph = plan_of(graph, kept), self._run.trace(small, here)
            kept = graph.kept_units(plan)
        check_minimum(graph, kept)
        present = compaction.present
        if len(present) != graph.units:
            present = torch.ones_like(kept)
        Rebuild(compaction.original(small), graph, present, kept)(small)
        return small


def _weight(model: nn.Module) -> Tensor:
    """Return a weight of the model, to read its device and precision from."""
    return next(tensor for _, tensor in named_tensors(model) if tensor.is_floating_point())
