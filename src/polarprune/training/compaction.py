"""`compact`: remove closed channels from a model while it trains.

α, costs, plans and budgets keep counting the original channels, so everything else in a run is the
same with and without compaction.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..analysis.trace import changed
from ..channels.graph import Graph
from ..errors import PruneError
from ..gates.gate import Gate
from ..surgery.cut_proof import prove_cut
from ..tracing.copying import copy_model
from ..tracing.model_state import Example, clear_slots, empty_slots, slots_cleared
from ..validation.run import check_unchanged
from .copies import Copies
from .rebuild import (
    Rebuild,
    check_can_compact,
    check_copy,
    check_held,
    check_optimizer_state,
    drop_parameters,
    gates_in,
    skeleton,
    ungated,
)

_FIRST = 0.125  # compact="auto" waits until this share of the MACs has closed since the last time
_LAST = 0.05  # the same once the budget is met, as nothing more will close
_WORTHWHILE = 0.02  # share of all steps that a compaction must save
_TOLERANCE = 1e-4


class Cut(NamedTuple):
    """A compaction that was checked: how to cut, and which copies of the model to cut as well."""

    rebuild: Rebuild
    copies: Sequence[nn.Module]


class Compaction:
    """Removes closed channels from the model of a pruner.

    Args:
        model: the gated model.
        graph: the groups of its channels.
        gates: the gate of each group.
        automatic: compact without being asked (`compact="auto"`).

    Attributes:
        present: a mask of the original units that the model still has.
        count: how many times the model was compacted.
        share: the share of the MACs that was left at the last compaction.
        gave_up: whether an automatic compaction was refused.
        copies: copies of the gated model, such as averages, that are cut with it.
    """

    def __init__(
        self, model: nn.Module, graph: Graph, gates: Mapping[str, Gate], *, automatic: bool
    ) -> None:
        self.model, self.graph, self.gates, self.automatic = model, graph, gates, automatic
        self.present = torch.ones(graph.units, dtype=torch.bool, device="cpu")
        self.count, self.share, self.gave_up = 0, 1.0, False
        self.copies = Copies(model, gates)
        self._removed: list[weakref.ref[Tensor]] = []  # parameters of layers that were removed
        self.slots = empty_slots(model)
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

    def rebuild(self, alive: Tensor) -> Rebuild:
        """Plan how to cut the model to these units."""
        return Rebuild(self.original(), self.graph, self.present, alive)

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

    def check(
        self,
        rebuild: Rebuild,
        optimizers: Sequence[Optimizer],
        copies: Sequence[nn.Module],
    ) -> None:
        """Refuse what cannot be cut, before anything changes."""
        check_can_compact(rebuild)
        for one in optimizers:
            check_optimizer_state(one)
        for other in copies:
            check_copy("compact", other, self.model)

    def prepare(
        self,
        alive: Tensor,
        optimizers: Sequence[Optimizer],
        copies: Sequence[nn.Module],
        example: Example | None,
    ) -> Cut | None:
        """Plan to remove all units that are not alive; return None if there are none.

        The result is compared on `example` first, if one is given. Nothing is changed yet.
        """
        rebuild = self.rebuild(alive)
        if rebuild.changes_nothing:
            return None
        check_unchanged(changed(self.graph, self.model, self.present))
        if optimizers:
            check_held(self.model, optimizers, "compact(optimizer=[...])")
        self.check(rebuild, optimizers, copies)
        if example is not None:
            self._prove(rebuild, example)
        return Cut(rebuild, copies)

    def _prove(self, rebuild: Rebuild, example: Example) -> None:
        """Compact a copy and compare it with the model."""

        def compacted(gated: nn.Module, copied: bool) -> nn.Module:
            trial = copy_model(gated) if copied else gated
            rebuild.gated(trial, gates_in(trial, self.model, self.gates))
            return trial

        with slots_cleared(self.slots):
            prove_cut(self.model, compacted(self.model, True), example, compacted, _TOLERANCE)

    def apply(
        self, rebuild: Rebuild, optimizers: Sequence[Optimizer], copies: Sequence[nn.Module]
    ) -> None:
        """Cut the model, its copies and the state of its optimizers."""
        for other in copies:
            rebuild.gated(other, gates_in(other, self.model, self.gates))
        rebuild.gated(self.model, self.gates, optimizers)
        torch.clear_autocast_cache()
        clear_slots(self.slots)
        self._original = rebuild.bare
        self._removed += rebuild.removed
        self.count += 1
        self.present = rebuild.after
