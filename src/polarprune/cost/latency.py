"""Latency as a resource: measured, modelled, and measured again.

What a layer takes is not in proportion to its MACs: there are calls, memory, and kernels that work
on 8 or 16 channels at a time. So small models of many widths are built and timed, and for every
module a time

    t(n) = a + b · MACs(n) + c · bytes(n),    widths rounded up to the step that fits best,

is fitted to what was measured. Their sum is the shape of the latency; its scale is corrected
whenever a model of the present widths is timed beside the original.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..channels.graph import FROZEN, Graph, Plan
from ..errors import PruneError
from ..surgery.apply import shrink
from ..tracing.copying import copy_model
from ..tracing.model_state import Example, as_call
from ..tracing.tape import Op, Value
from .budget import Budget
from .timing import take_turns, wait

STEPS = (1, 4, 8, 16, 32, 64, 128)  # channels that a kernel may take at a time
TOLERANCE = 0.05
_SAMPLES = 12
_TRIES = 6
_HEAD_START = 100_000_000  # cycles of a GPU: it must not wait for Python while marks are set
_SECONDS = 2.5  # that the original runs in one comparison


class Terms:
    """MACs and bytes of every module as sums of products of widths."""

    def __init__(self, graph: Graph) -> None:
        groups = list(graph.prunable.values())
        self._owner = torch.tensor([i for i, g in enumerate(groups) for _ in range(g.size)])
        self._sizes = torch.tensor([g.size for g in groups], dtype=torch.float64)
        self._rows: dict[bytes, int] = {}
        self._u: list[Tensor] = []
        self._c: list[float] = []
        self._axis(torch.tensor([FROZEN]))  # the first axis: always one
        self.modules: list[str] = []
        found: list[tuple[int, int, float, list[int], list[int]]] = []
        contractions = {item.op: item for item in graph.contractions}
        for op in graph.tapes[0].relevant_ops:
            if not op.outs or any(value.base is not None for value in op.outs):
                continue  # a view: nothing is done
            module = self._module(op)
            item = contractions.get(op)
            needs = self._axes(item.factors) if item else self._size(graph, op.outs[0])[1]
            if item:
                size = math.prod(factor.numel() for factor in item.factors)
                found.append((module, 0, op.macs / size, self._axes(item.factors), needs))
            for value in op.tensors():
                amount, axes = self._size(graph, value)
                found.append((module, 1, amount, axes, needs))
        self.u, self.c = torch.stack(self._u), torch.tensor(self._c, dtype=torch.float64)
        self.place = torch.tensor([2 * module + kind for module, kind, *_ in found])
        self.coef = torch.tensor([row[2] for row in found], dtype=torch.float64)
        self.axes, self.needs = (
            _padded([row[3] for row in found]),
            _padded([row[4] for row in found]),
        )

    def _module(self, op: Op) -> int:
        if op.module not in self.modules:
            self.modules.append(op.module)
        return self.modules.index(op.module)

    def _axis(self, units: Tensor) -> int:
        """An axis of which u·n + c channels are left."""
        units = units.flatten()
        key = units.numpy().tobytes()
        if key not in self._rows:
            mine = units[units != FROZEN]
            counts = torch.bincount(self._owner[mine], minlength=len(self._sizes)).double()
            self._rows[key] = len(self._u)
            self._u.append(counts / self._sizes)
            self._c.append(float(units.numel() - mine.numel()))
        return self._rows[key]

    def _axes(self, layers: list[Tensor]) -> list[int]:
        return [self._axis(layer) for layer in layers]

    def _size(self, graph: Graph, value: Value) -> tuple[float, list[int]]:
        """Bytes for each combination of channels, and the axes on which these lie."""
        layers = graph.values.get(value) or list(graph.axes.get(value.name, {}).values())
        whole = math.prod(layer.numel() for layer in layers)
        return value.itemsize * math.prod(value.shape) / max(whole, 1), self._axes(layers)

    def __call__(self, live: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """MACs and bytes of every module for lengths of axes [..., axes], with steps of modules."""
        step = steps[self.place // 2].unsqueeze(-1)
        wide = live[..., self.axes]
        wide = torch.where(self.axes > 0, torch.ceil(wide / step - 1e-9) * step, wide)
        there = (live[..., self.needs] > 1e-9).all(-1)
        each = self.coef * wide.prod(-1) * there
        total = each.new_zeros(*each.shape[:-1], 2 * len(self.modules))
        total = total.index_add(-1, self.place, each)
        return total[..., 0::2], total[..., 1::2]

    def live(self, n: Tensor) -> Tensor:
        return n.double() @ self.u.T + self.c


def _padded(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows), default=1) or 1
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


_FITTED = ("whole", "steps", "coefs", "scale")


class Latency:
    """Nanoseconds as a function of the live widths: a part of the cost, beside MACs and params."""

    def __init__(self, terms: Terms, full: Tensor, milliseconds: float) -> None:
        self.terms, self.full = terms, full.double()
        self.whole = 1e6 * milliseconds  # of the original, as measured
        count = len(terms.modules)
        self.steps = torch.ones(count, dtype=torch.float64)
        self.coefs = torch.zeros(3, count, dtype=torch.float64)
        self.scale = torch.ones((), dtype=torch.float64)  # what modules do not account for

    def fit(self, widths: Tensor, times: Tensor) -> None:
        """Find step and coefficients of every module, from times [samples, modules]."""
        live = self.terms.live(widths)
        best = torch.full_like(self.steps, math.inf)
        for step in STEPS:
            macs, size = self.terms(live, torch.full_like(self.steps, float(step)))
            there = (size > 0).double()
            for k in range(len(best)):
                features = torch.stack([there[:, k], macs[:, k], size[:, k]])
                coefs, error = _least_squares(features, times[:, k])
                if error < best[k] * (0.95 if step > 1 else 1):  # a staircase has to earn it
                    best[k], self.steps[k], self.coefs[:, k] = error, step, coefs

    def modules(self, live: Tensor) -> Tensor:
        """What each module takes, in the unit of the times that were fitted."""
        macs, size = self.terms(live, self.steps)
        parts = torch.stack([(size > 0).double(), macs, size], -2)
        return (self.coefs * parts).sum(-2)

    def share(self, live: Tensor) -> Tensor:
        """Of the original's latency, for lengths of axes."""
        whole = self.modules(self.terms.live(self.full)).sum()
        return self.scale * self.modules(live).sum(-1) / whole

    def __call__(self, n: Tensor) -> Tensor:
        return self.whole * self.share(self.terms.live(n))

    def linear(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """The price of a channel: what its group saves over an eighth of its width, stairs and all.

        As Q and b of a price Qn + b, like that of other resources; here Q is 0.
        """
        n = n.double()
        window = torch.minimum(torch.ceil(self.full / 8).clamp_min(1), n.clamp_min(1))
        now = self.terms.live(n)
        fewer = (now - window.unsqueeze(1) * self.terms.u.T).clamp_min(0)
        saved = (self.share(now) - self.share(fewer)).clamp_min(0)
        return torch.zeros(len(n), len(n), dtype=torch.float64), self.whole * saved / window

    def correct(self, n: Tensor, measured: float) -> None:
        """Make the model agree with a measured share."""
        self.scale *= measured / float(self.share(self.terms.live(n)))

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({key: getattr(self, key) for key in _FITTED})

    def load(self, state: dict[str, Any]) -> None:
        vars(self).update(copy.deepcopy(state))


def _least_squares(features: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Coefficients that are not negative: the best of all choices of features."""
    best, error = torch.zeros(len(features), dtype=torch.float64), float(target.square().sum())
    for size in range(1, len(features) + 1):
        for chosen in itertools.combinations(range(len(features)), size):
            own = features[list(chosen)].T
            scale = own.abs().amax(0).clamp_min(1e-30)
            found = torch.linalg.lstsq(own / scale, target.unsqueeze(1), driver="gelsd").solution
            found = found.squeeze(1) / scale
            left = float((own @ found - target).square().sum())
            if bool((found >= 0).all()) and left < 0.98 * error:
                best, error = torch.zeros_like(best), left
                best[list(chosen)] = found
    return best, error


class Stopwatch:
    """Keeps a budget of latency: the original beside models of other widths, on the user's device.

    A model of the present widths is timed whenever a tenth of the latency has gone, and at the end.
    """

    def __init__(self, model: nn.Module, graph: Graph, example: Example, limit: float) -> None:
        self.model, self.graph = _in_working_order(copy_model(model), example), graph
        self.example, self.limit = example, limit
        self.milliseconds = _quarter(take_turns({"": self.model}, example, runs=9)[""])
        self.runs = max(12, min(300, round(1e3 * _SECONDS / self.milliseconds)))
        self.results: dict[str, Any] = {}  # of the last comparison
        self.last = 1.0  # share of latency when it was last timed

    def install(self, budget: Budget) -> None:
        """Fit the model, and make it a part of the cost; or refuse the budget."""
        self.budget = budget
        lowest = budget.lowest_widths()
        share = self.share(self.small(lowest))
        if share > self.limit:
            raise PruneError(
                f"budget out of reach: latency={self.limit} (the lowest, measured, is "
                f"{share:.2f}). What the rest takes cannot be removed from this model; set a "
                f"higher budget, a smaller multiple_of or fewer keep=[...]."
            )
        self.part = self._fitted(torch.maximum(lowest, budget.multiple.double()), budget.multiple)
        budget.add("latency", self.part)

    def small(self, n: Tensor) -> nn.Module:
        """A model of these widths; which channels it has makes no difference to the time."""
        plan: Plan = {
            name: list(range(int(width)))
            for name, width in zip(self.graph.prunable, n.tolist(), strict=True)
        }
        return shrink(self.model, self.graph, plan)

    def share(self, small: nn.Module, runs: int | None = None) -> float:
        """Latency as a share of the original's; they take turns."""
        both = {"before": self.model, "after": small}
        times = take_turns(both, self.example, runs=runs or self.runs)
        found = {name: _quarter(taken) for name, taken in times.items()}
        self.results = {**found, "runs": len(times["after"])}
        return float(_agreed(found["after"] / found["before"]))

    def _fitted(self, least: Tensor, multiple: Tensor) -> Latency:
        """Time models of many widths, and fit."""
        full = self.graph.cost.full
        found = Latency(Terms(self.graph), full, self.milliseconds)
        rows = torch.stack([full, *_sampled(full, least, multiple)])
        times, shares = [], []
        for n in rows:
            small = self.small(n)
            times.append(self._by_module(small, found.terms.modules))
            shares.append(self.share(small, max(8, self.runs // 4)))
        found.fit(rows, torch.stack(times))
        modelled = torch.stack([found(n) for n in rows]) / found.whole
        measured = torch.tensor(shares, dtype=torch.float64)
        found.scale.fill_(float((modelled * measured).sum() / modelled.square().sum()))
        found.load(_agreed(found.state()))
        return found

    def look(self, n: Tensor) -> None:
        """Time a model of these widths, if they have gone far enough since the last."""
        multiple = self.budget.multiple
        n = torch.minimum(torch.ceil(n / multiple) * multiple, self.part.full)  # as it will end
        modelled = self._modelled(n)
        if modelled < 0.9 * self.last:
            self._correct(n, self._timed(n))
            self.last = modelled

    def _timed(self, n: Tensor) -> float:
        """The share at these widths; what would surprise the model is timed three times."""
        small = self.small(n)
        found = [self.share(small)]
        if abs(found[0] / self._modelled(n) - 1) > 0.1:
            found += [self.share(small), self.share(small)]
        return statistics.median(found)

    def _modelled(self, n: Tensor) -> float:
        return float(self.part(n)) / self.part.whole

    def _correct(self, n: Tensor, measured: float) -> None:
        """Believe the clock; but the budget is within reach, that was measured at the beginning."""
        self.part.correct(n, measured)
        lowest = self._modelled(self.budget.lowest_widths())
        self.part.scale *= min(1.0, 0.99 * self.limit / lowest)

    def land(self, alpha: Tensor, effort: Tensor | None = None) -> Tensor:
        """Close what is needed; time it; again, until model and clock agree on what is left."""
        for _ in range(_TRIES):
            landed = self.budget.land(alpha, effort)
            n = self.budget.widths(landed)
            measured = self._timed(n)
            if abs(measured - self._modelled(n)) <= 0.015 * self.limit:
                break
            self._correct(n, measured)
        return landed

    def check(self, small: nn.Module) -> None:
        """Refuse to hand out what is too slow."""
        for _ in range(_TRIES):
            measured = self.share(small)
            if measured <= (1 + TOLERANCE) * self.limit:
                return
        raise PruneError(
            f"export: the latency is {measured:.3f} of the original's, the budget is {self.limit}. "
            f"If the machine is busy, export again when it is not; else set a lower budget."
        )

    def state(self) -> dict[str, Any]:
        return {"model": self.part.state(), "last": self.last}

    def load(self, state: dict[str, Any]) -> None:
        self.part.load(state["model"])
        self.last = state["last"]

    def _by_module(self, model: nn.Module, names: list[str]) -> Tensor:
        """Milliseconds that each module takes itself, without its children: the least of some."""
        args, kwargs = as_call(self.example)
        rows = []
        for _ in range(max(5, min(10, self.runs // 8))):
            with _marks(model) as marks, torch.inference_mode():
                if torch.cuda.is_available():
                    torch.cuda._sleep(_HEAD_START)
                model(*args, **kwargs)
                wait(model)
            spent = dict.fromkeys(names, 0.0)
            for name, milliseconds in marks():
                if name in spent:
                    spent[name] += milliseconds
            rows.append(list(spent.values()))
        return torch.tensor(rows, dtype=torch.float64).amin(0)


def _in_working_order(model: nn.Module, example: Example) -> nn.Module:
    """Batch norms that have seen nothing let numbers fade until a CPU slows down over them."""
    args, kwargs = as_call(example)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    fresh = [m for m in norms if m.track_running_stats and m.num_batches_tracked == 0]
    for norm in fresh:
        norm.momentum = None  # the mean of all that it sees
    if fresh:
        with torch.no_grad(), suppress(Exception):  # not every model runs in train mode
            model.train()
            model(*args, **kwargs)
    return model.eval()


def _quarter(times: list[float]) -> float:
    """The lower quartile: other work on the machine makes runs longer, never shorter."""
    return statistics.quantiles(times, n=4)[0]


def _sampled(full: Tensor, least: Tensor, multiple: Tensor) -> Iterator[Tensor]:
    """Widths of all sizes, each group by itself, on the grid that is allowed."""
    generator = torch.Generator().manual_seed(0)
    for k in range(_SAMPLES):
        centre = 0.15 + 0.8 * k / (_SAMPLES - 1)
        spread = 0.3 * torch.rand(len(full), generator=generator, dtype=torch.float64) - 0.15
        n = torch.round((centre + spread).clamp(0, 1) * full / multiple) * multiple
        yield torch.minimum(torch.maximum(n, least), full)


@contextmanager
def _marks(model: nn.Module) -> Iterator[Callable[[], list[tuple[str, float]]]]:
    """Note the time whenever a module is entered or left; afterwards, who took how long."""
    first = next(model.parameters(), None)
    gpu = first is not None and first.is_cuda
    stack: list[str] = []
    seen: list[tuple[str, Any]] = []

    def mark() -> None:
        now: Any = torch.cuda.Event(enable_timing=True) if gpu else time.perf_counter()
        if gpu:
            now.record()
        seen.append((stack[-1] if stack else "", now))

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            mark()
            stack.append(name)

        return hook

    def leave(*_: Any) -> None:
        mark()
        stack.pop()

    def taken() -> list[tuple[str, float]]:
        pairs = itertools.pairwise(seen)
        if gpu:
            return [(name, start.elapsed_time(end)) for (_, start), (name, end) in pairs]
        return [(name, 1e3 * (end - start)) for (_, start), (name, end) in pairs]

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def _agreed(value: Any) -> Any:
    """What the first process measured: all have to close the same gates."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        held = [value]
        torch.distributed.broadcast_object_list(held, src=0)
        return held[0]
    return value
