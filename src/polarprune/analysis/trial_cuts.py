"""Trial cuts: cut a copy of the model, run it, and compare it with the prediction of the graph.

The comparison of the two runs (`tape_comparison`) takes one run of a small model and needs no
values of weights. Where the order of operations depends on the data, or the user wants to be sure,
the outputs are compared instead, in float64 and with random weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..channels.graph import Graph, Plan, plan_of
from ..errors import PruneError
from ..gates.folding import fold
from ..surgery.apply import cut_copy, mock_copy
from ..surgery.other_inputs import fresh_inputs
from ..surgery.precision import StaysWide, computes_in_double, in_double, in_precision
from ..surgery.proof import NotEqual, prove_equal
from ..surgery.recipe import Recipe
from ..surgery.write_recipe import recipe_for
from ..tracing.copying import copy_model
from ..tracing.model_state import Example, named_tensors
from ..tracing.recorder import attempt
from ..tracing.tape import Tape
from .tape_comparison import Mismatch, TapeComparison, replaced_modules

_TOLERANCE = 1e-8  # in float64, where a correct cut differs by 1e-15 and a wrong one by 1e-3
_SINGLE = 1e-4  # in float32
# Elements of all tensors; larger models are compared in float32, in half of the memory.
_LARGE = 200_000_000


@dataclass(frozen=True)
class _Wide:
    """A copy of the model in a wide precision, and how much a correct cut of it may differ."""

    model: nn.Module
    example: Example
    dtype: torch.dtype
    tolerance: float


class TrialCuts:
    """Cuts copies of one model and compares them with it."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.model, self.example = model, example
        self._wide: _Wide | None = None

    def mismatch(
        self, graph: Graph, plan: Plan, *, compare_outputs: bool = False, mode: int | None = None
    ) -> Mismatch | None:
        """Cut a copy by this plan and return the first mismatch, or None.

        Args:
            graph: The graph to confirm.
            plan: The channels to keep.
            compare_outputs: Compare outputs too, on a copy with random weights in float64.
            mode: Run only in eval mode (0) or train mode (1) if both do the same.
        """
        kept_units = graph.without_unread(graph.kept_units(plan))
        recipe = recipe_for(self.model, graph, kept_units)
        found = self._compare_runs(
            graph, kept_units, recipe, mode if _modes_are_alike(graph) else None
        )
        if self._is_meta() or (found is None and not compare_outputs):
            return found
        if found and not (found.ran and found.excusable):
            return found
        return self._compare_outputs(graph, plan, recipe, found)

    def _is_meta(self) -> bool:
        """Return True for a model on the meta device, whose outputs have no values."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    def _compare_runs(
        self, graph: Graph, kept_units: Tensor, recipe: Recipe, mode: int | None
    ) -> Mismatch | None:
        """Run a copy with the shapes of the cut model in the traced modes; compare the tapes."""
        try:
            values = any(tape.has_values for tape in graph.tapes)
            small = mock_copy(self.model, recipe, values=values)
        except PruneError as refused:
            return Mismatch(str(refused))
        skipped = replaced_modules(recipe)
        for training, before in enumerate(graph.tapes):
            if mode in (None, training):
                after, error = self._run(small, before, training=bool(training))
                tapes = TapeComparison(graph, kept_units, before, after, skipped)
                found = _mismatch_of(tapes, error)
                if found is not None:
                    return found
        return None

    def _run(
        self, small: nn.Module, before: Tape, *, training: bool
    ) -> tuple[Tape, Exception | None]:
        """Trace the cut model in one mode; return the tape and the error that stopped it."""
        return attempt(
            small,
            self.example,
            training=training,
            generates=before.generates,
            with_values=before.has_values,
            brief=True,
        )

    def _compare_outputs(
        self, graph: Graph, plan: Plan, recipe: Recipe, found: Mismatch | None
    ) -> Mismatch | None:
        """Compare outputs; if they differ, return `found`, which can name the operation."""
        wide = self._in_wide_precision(graph)
        masked = copy_model(wide.model, _untouched(wide.model, graph))
        fold(masked, graph, graph.kept_units(plan).double())
        try:
            small = cut_copy(masked, recipe)
            with StaysWide(wide.dtype):
                prove_equal(masked, small, wide.example, wide.tolerance, fresh_inputs(wide.example))
        except NotEqual as error:
            return found or Mismatch(error.fact)
        except PruneError as error:
            return found or Mismatch(_first_line(error))
        return None

    def _in_wide_precision(self, graph: Graph) -> _Wide:
        """Return a copy with random weights in float64, or in float32 if it is large.

        Outputs that are single numbers, such as a loss, have to be compared in float64.
        """
        if self._wide is None:
            elements = sum(tensor.numel() for _, tensor in named_tensors(self.model))
            scalars = all(math.prod(value.shape) == 1 for value in graph.tapes[0].outputs)
            double = self._double() if elements < _LARGE or scalars else None
            self._wide = double or self._single()
            _perturb(self._wide.model)
        return self._wide

    def _double(self) -> _Wide | None:
        """Return a copy in float64, or None if the code converts to float32."""
        try:
            model, example = in_double(self.model, self.example)
            throughout = computes_in_double(model, example)
        except PruneError:
            return None
        return _Wide(model, example, torch.float64, _TOLERANCE if throughout else _SINGLE)

    def _single(self) -> _Wide:
        model, example = in_precision(self.model, self.example, torch.float32)
        return _Wide(model, example, torch.float32, _SINGLE)


def _untouched(model: nn.Module, graph: Graph) -> dict[int, object]:
    """Return the parameters that gates do not change, as a memo: a copy need not have its own."""
    parameters = dict(model.named_parameters())
    return {id(x): x for name, x in parameters.items() if name not in graph.sites}


def _mismatch_of(tapes: TapeComparison, error: Exception | None) -> Mismatch | None:
    """Return the first mismatch of two runs; `error` is what stopped the second."""
    found = tapes.first_mismatch()
    if found is None and tapes.after.needs_values and not tapes.before.has_values:
        found = Mismatch("the code of the cut model reads values of tensors", excusable=True)
    if found is None and error is None:
        found = tapes.unmatched_end()
    if error is not None and (found is None or found.excusable):
        stopped = tapes.stop(f"the cut model does not run: {_first_line(error)}")
        return replace(stopped, ran=False, hint=found.op if found else None)
    return None if found is None else replace(found, ran=error is None)


def _modes_are_alike(graph: Graph) -> bool:
    """Return True if both modes perform the same operations, apart from those on scalars.

    Batch norm counts its batches in train mode only, with operations on scalars. Only in eval mode,
    the run continues with one more token and the cache.
    """
    names = [
        [op.name for op in tape.counted_ops if any(value.shape for value in op.tensors())]
        for tape in graph.tapes
    ]
    return len(names) == 2 and names[0] == names[1]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _perturb(model: nn.Module) -> None:
    """Add noise to all weights: those that start at zero would hide a wrong cut.

    The noise repeats after a prime number of elements, so that no two rows or columns get the same.
    Drawing it for all elements would take longer than everything else in a large model.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(_PRIME, generator=generator, dtype=torch.float64, device="cpu")
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                mine = noise.to(parameter).roll(-start)
                copies = -(-parameter.numel() // _PRIME)
                mine = mine.repeat(copies)[: parameter.numel()].view(parameter.shape)
                parameter.add_(mine, alpha=0.1 * (spread or 1.0))
                start += parameter.numel()


_PRIME = 99_991


# --- plans to try ---------------------------------------------------------------------------------


def trial_plan(graph: Graph, seed: int) -> Plan:
    """Return a plan that keeps random channels: half of every group for seed 0, else any share.

    The first plans cut every group. Later ones sometimes keep all channels of narrow groups, which
    distinguishes groups of the same width.
    """
    return plan_of(graph, _drawn(graph, seed))


def trial_units(graph: Graph, seed: int) -> Tensor:
    """Return the units that are left after a trial plan and `Graph.without_unread`."""
    return graph.without_unread(_drawn(graph, seed))


def _drawn(graph: Graph, seed: int) -> Tensor:
    """Return a mask of the units that a trial plan keeps."""
    generator = torch.Generator("cpu").manual_seed(seed)
    kept = torch.zeros(graph.units, dtype=torch.bool, device="cpu")
    for group in graph.prunable.values():
        order = torch.randperm(group.size, generator=generator, device="cpu")
        share = torch.rand(1, generator=generator, device="cpu").item() if seed else 0.5
        least = max(group.minimum, 2 if group.size > 2 else 1)
        count = int(group.size * share) if seed < 3 else round(group.size * share)
        kept[group.units][order[: max(least, count)]] = True
    return kept


def closing_plan(graph: Graph) -> Plan:
    """Return a plan that closes every group without a minimum and keeps half of the others."""
    half = trial_plan(graph, 0)
    return {name: half[name] if group.minimum else [] for name, group in graph.prunable.items()}
