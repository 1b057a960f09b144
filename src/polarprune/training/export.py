"""`export`: a plain, small copy of the gated model, proved equal to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..analysis.trace import changed
from ..channels.graph import Graph, plan_of
from ..surgery.config_proof import update_config
from ..surgery.cut_proof import prove_cut
from ..surgery.proof import Proof, check_macs, example_for
from ..tracing.model_state import Example, named_tensors, slots_cleared
from ..validation.run import check_minimum
from .compaction import Compaction
from .rebuild import Rebuild, ungated


class Exporter:
    """Cuts copies of the gated model by the plan of its gates.

    Args:
        compaction: holds the model and the channels that it still has.
        trace_again: traces a model as the pruner did.
    """

    def __init__(
        self, compaction: Compaction, trace_again: Callable[[nn.Module, Example], Graph]
    ) -> None:
        self.compaction, self.trace_again = compaction, trace_again

    def cut(
        self, gated: nn.Module, alive: Tensor, example: Example, *, copied: bool = True
    ) -> nn.Module:
        """Return what remains of a gated model, without gates; `copied=False` uses up the model.

        A model whose plain attributes changed since it was traced is traced again; after a
        compaction that is too late, and `compact` has refused it.
        """
        compaction, graph = self.compaction, self.compaction.graph
        small = ungated(gated, graph, copied=copied)
        if compaction.count == 0 and changed(graph, small, compaction.present):
            here = example_for(example, _weight(small), _weight(compaction.model).dtype)
            plan, graph = plan_of(graph, alive), self.trace_again(small, here)
            alive = graph.alive(plan)
        check_minimum(graph, alive)
        present = compaction.present
        if len(present) != graph.units:
            present = torch.ones_like(alive)
        Rebuild(compaction.original(small), graph, present, alive)(small)
        return small

    def exported(self, gated: nn.Module, alive: Tensor, example: Example) -> nn.Module:
        """Return what remains of a gated model. If it has a config, that gets the new sizes."""
        with slots_cleared(self.compaction.slots):
            small = self.cut(gated, alive, example)
            update_config(small, example)
        return small

    def proved(
        self, gated: nn.Module, small: nn.Module, alive: Tensor, example: Example, macs: int
    ) -> Proof:
        """Compare a cut model with the gated one; return the largest differences."""
        with slots_cleared(self.compaction.slots):
            found = prove_cut(
                gated,
                small,
                example,
                lambda wide, copied: self.cut(wide, alive, example, copied=copied),
            )
        if not self.compaction.graph.tapes[0].depends_on_data:
            check_macs(small, example, macs)
        return found


def _weight(model: nn.Module) -> Tensor:
    """Return a weight of the model, to read its device and precision from."""
    return next(tensor for _, tensor in named_tensors(model) if tensor.is_floating_point())
