"""The stopwatch: keep a latency budget by timing real models on the user's device.

At the start, models of many widths are timed and the latency model is fitted to them. While gates
close, a model of the present widths is timed whenever a tenth of the latency is gone. At the end
the result itself is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import suppress
from typing import TypedDict, TypeVar

import torch
from torch import Tensor, nn

from ..channels.graph import Graph, Plan
from ..errors import PruneError
from ..surgery.apply import shrink
from ..tracing.copying import copy_model
from ..tracing.model_state import Example, as_call
from .budget import Budget
from .latency import Latency, Terms
from .timing import module_times, take_turns

TOLERANCE = 0.05  # by which an exported model may exceed the budget
_SAMPLES = 12  # sets of widths to which the latency model is fitted
_TRIES = 6  # repetitions until measurement and model agree
_SECONDS = 2.5  # that the original runs in one comparison
T = TypeVar("T")


class StopwatchState(TypedDict):
    """The state of a `Stopwatch` in a checkpoint."""

    model: dict[str, float | Tensor]
    last: float


class Stopwatch:
    """Times the original beside models of other widths, and corrects the latency model.

    Args:
        model: The original model, without gates.
        graph: The graph of this model.
        example: The input on which models are timed.
        limit: The latency budget, as a fraction of the original's latency.
    """

    budget: Budget
    part: Latency

    def __init__(self, model: nn.Module, graph: Graph, example: Example, limit: float) -> None:
        self.model = _with_batch_statistics(copy_model(model), example)
        self.graph, self.example, self.limit = graph, example, limit
        self.milliseconds = _lower_quartile(take_turns({"": self.model}, example, runs=9)[""])
        self.runs = max(12, min(300, round(1e3 * _SECONDS / self.milliseconds)))
        self.results: dict[str, float] = {}  # of the last comparison, for the report
        self.last = 1.0  # share of the latency at the last measurement

    def install(self, budget: Budget) -> None:
        """Fit the latency model and add it to the resources of `budget`.

        Raises:
            PruneError: If even the narrowest model takes longer than the limit.
        """
        self.budget = budget
        lowest = budget.lowest_widths()
        share = self.share(self.small(lowest))
        if share > self.limit:
            raise PruneError(
                f"budget out of reach: latency={self.limit} (the lowest, measured, is "
                f"{share:.2f}). The rest of this model cannot be removed; set a higher budget, a "
                f"smaller multiple_of or fewer keep=[...]."
            )
        least = torch.maximum(lowest, budget.multiple.double())
        self.part = self._fitted(least, budget.multiple)
        budget.add("latency", self.part)

    def small(self, n: Tensor) -> nn.Module:
        """Return a model of widths `n`. It keeps the first channels: time does not depend on it."""
        plan: Plan = {
            name: list(range(int(width)))
            for name, width in zip(self.graph.prunable, n.tolist(), strict=True)
        }
        return shrink(self.model, self.graph, plan)

    def share(self, small: nn.Module, runs: int | None = None) -> float:
        """Time `small` and the original in turns; return the ratio of their latencies."""
        both = {"before": self.model, "after": small}
        times = take_turns(both, self.example, runs=runs or self.runs)
        found = {name: _lower_quartile(taken) for name, taken in times.items()}
        self.results = {**found, "runs": len(times["after"])}
        return _from_first_process(found["after"] / found["before"])

    def _fitted(self, least: Tensor, multiple: Tensor) -> Latency:
        """Time models of many widths and return the latency model that fits them."""
        full = self.graph.cost.full
        found = Latency(Terms(self.graph), full, self.milliseconds)
        rows = torch.stack([full, *_sample_widths(full, least, multiple)])
        times, shares = [], []
        for n in rows:
            small = self.small(n)
            times.append(self._module_times(small, found.terms.modules))
            shares.append(self.share(small, max(8, self.runs // 4)))
        found.fit(rows, torch.stack(times))
        modelled = torch.stack([found(n) for n in rows]) / found.measured
        measured = torch.tensor(shares, dtype=torch.float64)
        found.scale.fill_(float((modelled * measured).sum() / modelled.square().sum()))
        found.load(_from_first_process(found.state()))
        return found

    def _module_times(self, model: nn.Module, names: list[str]) -> Tensor:
        """Return the milliseconds of each module without its children: the least of several."""
        runs = max(5, min(10, self.runs // 8))
        rows = [module_times(model, self.example, names) for _ in range(runs)]
        return torch.tensor(rows, dtype=torch.float64).amin(0)

    def time_if_changed(self, n: Tensor) -> None:
        """Time a model of widths `n` if the latency fell by a tenth since the last measurement."""
        multiple = self.budget.multiple  # the widths will end on a multiple
        n = torch.minimum(torch.ceil(n / multiple) * multiple, self.part.full)
        predicted = self._predicted(n)
        if predicted < 0.9 * self.last:
            self._correct(n, self._measured(n))
            self.last = predicted

    def land(self, alpha: Tensor, importance: Tensor | None = None) -> Tensor:
        """Close gates until the budget is met, as `Budget.land` does, and time the result.

        Repeat this until the latency model and the measurement agree.
        """
        for _ in range(_TRIES):
            landed = self.budget.land(alpha, importance)
            n = self.budget.widths(landed)
            measured = self._measured(n)
            if abs(measured - self._predicted(n)) <= 0.015 * self.limit:
                break
            self._correct(n, measured)
        return landed

    def check(self, small: nn.Module) -> None:
        """Raise if the exported model is too slow in every one of several measurements."""
        for _ in range(_TRIES):
            measured = self.share(small)
            if measured <= (1 + TOLERANCE) * self.limit:
                return
        raise PruneError(
            f"export: the latency is {measured:.3f} of the original's, the budget is {self.limit}. "
            f"If the machine is busy, export again when it is idle; otherwise set a lower budget."
        )

    def state(self) -> StopwatchState:
        """Return what a checkpoint stores."""
        return {"model": self.part.state(), "last": self.last}

    def load(self, state: StopwatchState) -> None:
        """Restore what `state` returned."""
        self.part.load(state["model"])
        self.last = state["last"]

    def _measured(self, n: Tensor) -> float:
        """Return the measured share at widths `n`; a surprising one is measured three times."""
        small = self.small(n)
        found = [self.share(small)]
        if abs(found[0] / self._predicted(n) - 1) > 0.1:
            found += [self.share(small), self.share(small)]
        return statistics.median(found)

    def _predicted(self, n: Tensor) -> float:
        """Return the share that the latency model gives at widths `n`."""
        return float(self.part(n)) / self.part.measured

    def _correct(self, n: Tensor, measured: float) -> None:
        """Scale the latency model to a measurement, but keep the budget within reach.

        The narrowest model met the budget at the start, so a scale at which it would not is wrong.
        """
        self.part.correct(n, measured)
        lowest = self._predicted(self.budget.lowest_widths())
        self.part.scale *= min(1.0, 0.99 * self.limit / lowest)


def _with_batch_statistics(model: nn.Module, example: Example) -> nn.Module:
    """Run batch norms without statistics once in train mode; return the model in eval mode.

    In an untrained model activations may shrink to denormal numbers, on which a CPU is slow.
    """
    args, kwargs = as_call(example)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    fresh = [m for m in norms if m.track_running_stats and m.num_batches_tracked == 0]
    for norm in fresh:
        norm.momentum = None  # the statistics become those of this batch
    if fresh:
        with torch.no_grad(), suppress(Exception):  # not every model runs in train mode
            model.train()
            model(*args, **kwargs)
    return model.eval()


def _lower_quartile(times: list[float]) -> float:
    """Return the lower quartile: other work on the machine makes runs longer, never shorter."""
    return statistics.quantiles(times, n=4)[0]


def _sample_widths(full: Tensor, least: Tensor, multiple: Tensor) -> Iterator[Tensor]:
    """Yield sets of allowed widths, from narrow to wide, at random in each group."""
    generator = torch.Generator().manual_seed(0)
    for k in range(_SAMPLES):
        centre = 0.15 + 0.8 * k / (_SAMPLES - 1)
        spread = 0.3 * torch.rand(len(full), generator=generator, dtype=torch.float64) - 0.15
        n = torch.round((centre + spread).clamp(0, 1) * full / multiple) * multiple
        yield torch.minimum(torch.maximum(n, least), full)


def _from_first_process(value: T) -> T:
    """Return what the first process measured, so that all processes close the same gates."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        held = [value]
        torch.distributed.broadcast_object_list(held, src=0)
        return held[0]
    return value
