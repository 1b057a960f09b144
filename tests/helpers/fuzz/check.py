"""What every network must pass: equal outputs, no crash, no refusal after training, on budget."""

from __future__ import annotations

import random
import re
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import polarprune as pp
from polarprune.channels.graph import Graph, Plan

from .builder import build, inputs
from .compare import gap, masked, run
from .program import Program

CLOSE = 1e-6  # in float64, where rounding makes 1e-12 and mistakes make 1e-2
COARSE = 2e-2  # in float32
LIMIT = 60  # seconds of computing


@dataclass
class Settings:
    """Settings that are drawn from the network's seed, so that the seed determines everything."""

    norms: bool
    dtype: torch.dtype
    budget: float
    by: str
    steps: int
    compact: bool
    multiple_of: int
    plans: int

    @classmethod
    def of(cls, seed: int) -> Settings:
        draw = random.Random(f"settings {seed}")
        return cls(
            norms=draw.random() < 0.3,
            dtype=torch.float32 if draw.random() < 0.2 else torch.float64,
            budget=round(draw.uniform(0.3, 0.8), 2),
            by=draw.choice(["macs", "macs", "params"]),
            steps=draw.randint(8, 20),
            compact=draw.random() < 0.5,
            multiple_of=draw.choice([1, 1, 1, 1, 2, 4]),
            plans=2,
        )


class Failure(Exception):
    def __init__(self, kind: str, stage: str, detail: str) -> None:
        super().__init__(f"{kind} ({stage}): {detail}")
        self.kind, self.stage, self.detail = kind, stage, detail


class Declined(Exception):
    """A refusal before training, with a reason, which is no failure."""


@dataclass
class Outcome:
    seed: int
    kind: str  # exact, declined, invalid; wrong, crash, refused, budget, slow
    stage: str = ""
    detail: str = ""
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> bool:
        return self.kind not in ("exact", "declined", "invalid")

    @property
    def label(self) -> str:
        """Return what a smaller failing network must have in common with this one."""
        return f"{self.kind} ({self.stage}) {self.detail.partition('(')[0][:40]}"


def check(program: Program, limit: int = LIMIT, quick: bool = False) -> Outcome:
    """Check everything for one network."""
    start, counts = time.process_time(), Counter[str]()
    outcome = Outcome(program.seed, "exact", counts=counts)
    settings = Settings.of(program.seed)
    if quick:
        settings.plans, settings.steps = 1, 8
    try:
        with _at_most(limit):
            _check(program, settings, counts)
    except Failure as failure:
        outcome.kind, outcome.stage, outcome.detail = failure.kind, failure.stage, failure.detail
    except Declined as said:
        outcome.kind, outcome.detail = "declined", str(said)
    except _Invalid as why:
        outcome.kind, outcome.detail = "invalid", str(why)
    except _Slow:
        outcome.kind, outcome.detail = "slow", f"more than {limit} s"
    outcome.seconds = time.process_time() - start
    return outcome


def _check(program: Program, settings: Settings, counts: Counter[str]) -> None:
    torch.manual_seed(program.seed)
    example = inputs(program, 1)
    _runs(program, example)
    graph = _traced(program, example, settings)
    counts["prunable"] += bool(graph.prunable)
    if graph.prunable:
        _plans(program, graph, settings, counts)
    _training(program, example, settings, counts)


# --- the network itself ---------------------------------------------------------------------------


class _Invalid(Exception):
    pass


class _Slow(BaseException):
    pass


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _Slow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of its own: others may keep the machine busy
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _runs(program: Program, example: tuple[Tensor, ...]) -> None:
    """Raise `_Invalid` if a program fails, explodes, or gives other numbers when repeated."""
    try:
        model = build(program)
        outs = run(model, example)
        loss = _loss(model.train()(*example))
        loss.backward()  # type: ignore[no-untyped-call]
    except _Slow:
        raise
    except Exception as error:
        raise _Invalid(repr(error)) from error
    if not loss.isfinite() or float(loss.detach()) > 1e8:
        raise _Invalid("explodes")
    if gap(outs, run(build(program), example)) > 0:
        raise _Invalid("gives other numbers when built again")


def _loss(out: Any) -> Tensor:
    """Return a loss of all outputs that are floating-point numbers, without very large ones."""
    leaves = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum((torch.tanh(x[x.abs() < 1e6]) - 0.5).square().mean() for x in leaves if x.numel())  # type: ignore[return-value]


@contextmanager
def _stage(stage: str, *, may_decline: bool = False) -> Iterator[None]:
    try:
        yield
    except (Failure, Declined, _Invalid):
        raise
    except pp.PruneError as error:
        if may_decline:
            raise Declined(f"{stage}: {error}") from error
        raise Failure("refused", stage, str(error)) from error
    except Exception as error:
        raise Failure("crash", stage, f"{type(error).__name__}({error}) {_where(error)}") from error


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "polarprune" in frame.filename] or frames
    return f"at {Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}"


# --- trace and shrink -----------------------------------------------------------------------------


def _traced(program: Program, example: tuple[Tensor, ...], settings: Settings) -> Graph:
    model = build(program)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = _plain(model)
    with _stage("trace", may_decline=True):
        graph = pp.trace(model, example, norms=settings.norms)
    with _stage("table"):
        str(graph)
    after = model.state_dict()
    if list(before) != list(after) or any(
        not torch.equal(before[name].nan_to_num(7.0), after[name].nan_to_num(7.0))
        for name in before
    ):
        raise Failure("wrong", "trace", "it changed the model's state")
    if _plain(model) != held:
        raise Failure("wrong", "trace", f"it changed what the model holds: {held} {_plain(model)}")
    with _stage("trace"):
        if gap(run(model, example), run(build(program), example)) > 0:
            raise Failure("wrong", "trace", "the model computes something else afterwards")
    return graph


def _plain(model: nn.Module) -> dict[str, Any]:
    """Return the lists, dicts and numbers that modules hold."""
    return {
        f"{path}.{key}": len(value) if isinstance(value, (list, dict)) else value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, (list, dict, int, float, str))
    }


def _plan(graph: Graph, draw: random.Random) -> Plan:
    plan = {}
    for name, group in graph.prunable.items():
        least = group.minimum if draw.random() < 0.15 else max(1, group.minimum)
        most = group.size if draw.random() < 0.7 else least
        kept = draw.randint(least, max(least, most))
        plan[name] = sorted(draw.sample(range(group.size), min(kept, group.size)))
    return plan


def _plans(program: Program, graph: Graph, settings: Settings, counts: Counter[str]) -> None:
    draw = random.Random(f"plans {program.seed}")
    for _ in range(settings.plans):
        plan = _plan(graph, draw)
        with _stage("shrink"):
            small = pp.shrink(build(program), graph, plan)
        reference = masked(build(program), graph, plan)
        if reference is None:
            counts["no mask from outside"] += 1
            continue
        counts["plans compared"] += 1
        _compare("shrink", program, reference, small, CLOSE, counts, f" plan {plan}")


# --- comparisons ----------------------------------------------------------------------------------


def _compare(
    stage: str,
    program: Program,
    reference: nn.Module,
    small: nn.Module,
    close: float,
    counts: Counter[str],
    more: str = "",
) -> None:
    """Compare at the example's size, at other batch and image sizes, and in train mode."""
    dtype = next(p.dtype for p in reference.parameters() if p.is_floating_point())
    sizes = [
        (0, 0, False),
        (program.batch + 1, 0, False),
        (0, 4, False),
        (1, 0, False),
        (0, 2, False),
        (0, 0, True),
    ]
    for batch, larger, training in sizes:
        given = inputs(program, 17 + batch + larger, batch, larger)
        given = tuple(x.to(dtype) if x.is_floating_point() else x for x in given)
        where = f"{stage}, train mode" if training else stage
        where += f", {'batch' if batch else 'size'} other" if batch or larger else ""
        try:
            wanted = run(reference, given, training=training)
        except pp.PruneError:
            counts["gated model refuses a size"] += 1
            continue
        except _Slow:
            raise
        except Exception:
            if not (batch or larger):
                raise
            continue  # the original does not run on this size
        if larger and any(x.dim() and x.shape[0] != program.batch for x in tree_leaves(wanted)):
            counts["rows made of pixels"] += 1  # `reshape(-1, 8, 4, 4)` of larger pictures
            continue
        counts["sizes compared"] += 1
        try:
            got = run(small, given, training=training)
        except pp.PruneError as error:
            if batch or larger:
                counts["export refuses a size"] += 1
                continue
            raise Failure("refused", where, str(error)) from error
        except Exception as error:
            raise Failure("crash", where, f"{error!r}{more}") from error
        found = gap(wanted, got)
        if not found <= close and not found <= 1e3 * _rounding(reference, given, training):
            raise Failure("wrong", where, f"differs (by {found:.2g}){more}")


def _rounding(model: nn.Module, given: tuple[Tensor, ...], training: bool) -> float:
    """Return the effect of the input's last digits on the output: large if norms divide by 0."""
    eps = 4 * torch.finfo(next(p.dtype for p in model.parameters())).eps
    other = tuple(x * (1 + eps) if x.is_floating_point() else x for x in given)
    runs = [run(model, inputs, training=training) for inputs in (given, other)]
    return min(gap(*runs), 1e-5)


# --- training -------------------------------------------------------------------------------------


def _training(
    program: Program, example: tuple[Tensor, ...], settings: Settings, counts: Counter[str]
) -> None:
    model = build(program).to(settings.dtype)
    example = tuple(x.to(settings.dtype) if x.is_floating_point() else x for x in example)
    with _stage("Pruner", may_decline=True):
        pruner = _pruner(model, example, settings)
    _train(program, pruner, model, settings, counts)
    with _stage("export"):
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            raise _Invalid("training diverged")
        small = pruner.export()
        share = pruner.cost()[settings.by] / pruner.graph.cost.original()[settings.by]
    if share > settings.budget + 1e-9:
        raise Failure("budget", "export", f"{share:.4f} for {settings.budget}")
    if sum(p.numel() for p in small.parameters()) > pruner.cost()["params"]:
        raise Failure("budget", "export", "more parameters than claimed")
    counts["exported"] += 1
    with tempfile.TemporaryDirectory() as folder:
        with _stage("save and load"):
            path = Path(folder) / "small.safetensors"
            pp.save(small, path)
            loaded = pp.load(path, model=build(program).to(settings.dtype))
        given = inputs(program, 5)
        given = tuple(x.to(settings.dtype) if x.is_floating_point() else x for x in given)
        with _stage("save and load"):
            found = gap(run(small, given), run(loaded, given))
        if found > 1e-6:
            raise Failure("wrong", "save and load", f"differs (by {found:.2g})")
    close = CLOSE if settings.dtype == torch.float64 else COARSE
    _compare("export", program, model, small, close, counts, f" plan {pruner.plan()}")


def _pruner(model: nn.Module, example: tuple[Tensor, ...], settings: Settings) -> pp.Pruner:
    """Build a pruner with the drawn budget, or with another one if that is out of reach."""
    limits: dict[str, Any] = {settings.by: settings.budget}
    more = {"steps": settings.steps, "norms": settings.norms, "multiple_of": settings.multiple_of}
    try:
        return pp.Pruner(model, example, **limits, **more)
    except pp.PruneError as error:
        found = re.search(r"the lowest is ([\d.]+)", str(error))
        if found is None or float(found[1]) > 0.98:
            raise
    lowest = float(found[1])
    settings.budget = limits[settings.by] = round(lowest + 0.4 * (1 - lowest), 3)
    return pp.Pruner(model, example, **limits, **more)


def _compact(pruner: pp.Pruner, counts: Counter[str]) -> None:
    try:
        pruner.compact()
    except pp.PruneError as error:  # a documented limit, said before anything is changed
        limits = ("computed from other parameters", "a norm with weighted statistics in code")
        if not any(limit in str(error) for limit in limits):
            raise
        counts["compact declined"] += 1


def _train(
    program: Program,
    pruner: pp.Pruner,
    model: nn.Module,
    settings: Settings,
    counts: Counter[str],
) -> None:
    with _stage("training"):
        groups = pruner.param_groups(lr=0.01)
        optimizer = torch.optim.SGD(groups, momentum=0.5)
        pruner.attach(optimizer)
    for step in range(settings.steps):
        given = inputs(program, 100 + step)
        given = tuple(x.to(settings.dtype) if x.is_floating_point() else x for x in given)
        with _stage("training"):
            model.train()
            optimizer.zero_grad()
            _loss(model(*given)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if settings.compact and step in (settings.steps // 2, settings.steps - 2):
            with _stage("compact"):
                _compact(pruner, counts)
