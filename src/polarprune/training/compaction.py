"""`compact`: remove closed channels from a model while it trains.

α, costs, plans and budgets keep counting the original channels, so everything else in a run is the
same with and without compaction.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..analysis.trace import changed
from ..channels.graph import Graph
from ..errors import PruneError
from ..surgery.cut_proof import prove_cut
from ..tracing.copying import copy_model
from ..tracing.model_state import Example, Slot, clear_slots, slots_cleared
from ..validation.compaction import (
    check_can_cut,
    check_copy,
    check_held,
    check_optimizer_state,
)
from ..validation.run import check_unchanged
from .copies import Copies
from .processes import Processes
from .rebuild import Rebuild, drop_parameters, gates_in, same_shapes, skeleton, ungated
from .stepper import Stepper

_FIRST = 0.125  # compact="auto" waits until this share of the MACs has closed since the last time
_LAST = 0.05  # the same once the budget is met, as nothing more will close
_WORTHWHILE = 0.02  # share of all steps that a compaction must save
_TOLERANCE = 1e-4


class Compaction:
    """Removes closed channels from the model of a pruner.

    Args:
        model: The gated model.
        graph: The groups of its channels.
        stepper: Moves its gates.
        copies: Copies of the model, such as averages, that are cut with it.
        processes: The processes that must agree.
        slots: Where the forward of the model may keep tensors of a batch.
        automatic: Whether to compact without being asked (`compact="auto"`).

    Attributes:
        present: A mask of the original units that the model still has.
        count: How many times the model was compacted.
        gave_up: Whether an automatic compaction was refused.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        stepper: Stepper,
        copies: Copies,
        processes: Processes,
        slots: list[Slot],
        *,
        automatic: bool,
    ) -> None:
        self.model, self.graph, self.slots, self.automatic = model, graph, slots, automatic
        self.present = torch.ones(graph.units, dtype=torch.bool, device="cpu")
        self.count, self.gave_up = 0, False
        self._stepper, self._copies, self._processes = stepper, copies, processes
        self._gates = stepper.gates
        self._removed: list[weakref.ref[Tensor]] = []  # parameters of layers that were removed
        self._original: nn.Module | None = None

    def original(self, small: nn.Module | None = None) -> nn.Module:
        """Return a skeleton of the model with its widths before the first compaction.

        `small` is a copy without gates, if the caller has one.
        """
        if self._original is not None:
            return self._original
        with slots_cleared(self.slots):  # what the last batch left there cannot be copied
            return skeleton(ungated(self.model, self.graph) if small is None else small)

    def drop_removed(self, optimizer: Optimizer) -> None:
        """Remove the parameters of layers that were removed before the optimizer was known."""
        held = [ref() for ref in self._removed]
        drop_parameters(optimizer, {id(tensor) for tensor in held if tensor is not None})

    # --- when -------------------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """The share of the MACs that was left after the last compaction."""
        widths = [self.present[group.units].sum() for group in self.graph.prunable.values()]
        share = self.graph.cost.share(torch.stack(widths).double())["macs"]
        return share or 1.0  # a model may have no MACs

    def pays(self, macs: float, steps_left: int, steps: int, landed: bool) -> bool:
        """Decide whether an automatic compaction is due.

        Steps and MACs decide, never a clock: a resumed run, and every process of a distributed one,
        must decide alike.
        """
        if not self.automatic or self.gave_up:
            return False
        closed = 1 - macs / self.share
        due = closed >= (_LAST if landed else _FIRST)
        return due and closed * steps_left >= _WORTHWHILE * steps

    def try_to(self, compact: Callable[[], None]) -> None:
        """Compact; if that is refused, warn and continue without compaction."""
        try:
            compact()
        except PruneError as error:
            self.gave_up = True
            warnings.warn(f'compact="auto" is turned off: {error}', stacklevel=2)

    # --- how --------------------------------------------------------------------------------------

    def compact(
        self,
        kept: Tensor,
        optimizers: Sequence[Optimizer],
        copies: Sequence[nn.Module],
        example: Example | None,
    ) -> None:
        """Remove all other units from the model, if all processes agree.

        Args:
            kept: A mask of the units to keep.
            optimizers: The optimizers whose state is cut.
            copies: Copies of the model that are cut, too.
            example: Inputs on which the result is compared with the model first, or None.

        Raises:
            PruneError: If something cannot be cut, or the result differs. Nothing is changed.
        """
        wrappers = self._processes.wrappers()
        rebuild = self._processes.agreed(lambda: self._checked(kept, optimizers, copies, example))
        if rebuild is not None:
            self._apply(rebuild, optimizers, copies)
            self._processes.renew(wrappers)

    def restore(self, present: Tensor, gave_up: bool, optimizers: Sequence[Optimizer]) -> None:
        """Cut the model to the units of a state that was checked.

        Args:
            present: A mask of the original units that the model had.
            gave_up: Whether an automatic compaction was refused before.
            optimizers: The optimizers whose state is cut.
        """
        if not torch.equal(present, self.present):
            wrappers = self._processes.wrappers()
            rebuild = self._rebuild(present)
            copies = self._copies.to_cut(snapshots=True)
            self._check(rebuild, optimizers, copies)
            self._apply(rebuild, optimizers, copies)
            self._processes.renew(wrappers)
        self.gave_up = gave_up

    def _rebuild(self, kept: Tensor) -> Rebuild:
        """Plan how to cut the model to these units."""
        return Rebuild(self.original(), self.graph, self.present, kept)

    def _checked(
        self,
        kept: Tensor,
        optimizers: Sequence[Optimizer],
        copies: Sequence[nn.Module],
        example: Example | None,
    ) -> Rebuild | None:
        """Plan a cut and check it; return None if there is nothing to remove."""
        rebuild = self._rebuild(kept)
        if rebuild.changes_nothing:
            return None
        check_unchanged(changed(self.graph, self.model, self.present))
        if optimizers:
            check_held(self.model, optimizers, "compact(optimizer=[...])")
        self._check(rebuild, optimizers, copies)
        if example is not None:
            self._prove(rebuild, example)
        return rebuild

    def _check(
        self, rebuild: Rebuild, optimizers: Sequence[Optimizer], copies: Sequence[nn.Module]
    ) -> None:
        """Refuse what cannot be cut, before anything changes."""
        graph = rebuild.graph
        computed = [] if rebuild.changes_nothing else graph.computed
        check_can_cut(computed, sorted(rebuild.recipe.rewired.keys() & graph.weights.keys()))
        for one in optimizers:
            check_optimizer_state(one)
        for other in copies:
            check_copy("compact", other, fits=same_shapes(other, self.model))

    def _prove(self, rebuild: Rebuild, example: Example) -> None:
        """Compact a copy and compare it with the model."""

        def compacted(gated: nn.Module, copied: bool) -> nn.Module:
            trial = copy_model(gated) if copied else gated
            rebuild.gated(trial, gates_in(trial, self.model, self._gates))
            return trial

        with slots_cleared(self.slots):
            prove_cut(self.model, compacted(self.model, True), example, compacted, _TOLERANCE)

    def _apply(
        self, rebuild: Rebuild, optimizers: Sequence[Optimizer], copies: Sequence[nn.Module]
    ) -> None:
        """Cut the model, its copies and the state of its optimizers."""
        for other in copies:
            rebuild.gated(other, gates_in(other, self.model, self._gates))
        rebuild.gated(self.model, self._gates, optimizers)
        torch.clear_autocast_cache()
        clear_slots(self.slots)
        self._original = rebuild.bare
        self._removed += rebuild.removed
        self.count += 1
        self.present = rebuild.after
        self._stepper.keep_only(self.present)
