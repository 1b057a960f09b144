"""`Pruner`: gates in the model, a proximal step after every optimizer step, and the export."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ..analysis.trace import changed, survey
from ..channels.graph import Graph, Plan, plan_of
from ..channels.propagation import Rule
from ..cost.budget import Budget
from ..cost.latency import Stopwatch
from ..errors import PruneError
from ..gates.gate import Gate, gate_value
from ..gates.install import install
from ..report.report import Report
from ..rewriting.forward_weights import without_computed_weights
from ..surgery.apply import plain, shrink, warn_of_hooks
from ..surgery.proof import check_macs, example_for, own_copy, prove_cut
from ..tracing.copying import copy_model
from ..tracing.model_state import Example, clear_slots, empty_slots, slots_cleared
from ..validation.arguments import (
    check_done,
    check_finite,
    check_gates,
    check_known,
    check_optimizers,
    check_prunable,
    check_rates,
    check_schedule,
    check_settings,
    check_unchanged,
    check_weights,
    checked_copies,
)
from ..validation.pruner_state import check_state
from .compaction import Rebuild, check_held, gates_in, skeleton
from .controller import Controller
from .schedule import Schedule
from .stepper import Stepper

_CONTROLS = 400  # how often the host looks at the gates during a run, at most
_BINS = 20
_LANDING = 0.005  # of the MACs: more is not closed at once without a word
_FIFTH = 0.2  # of the MACs: compact="auto" waits until so much has gone since the last time
_LAST = 0.05  # the same once the budget is met, as no more will go
_WORTH = 0.02  # of all steps: what is left of the training has to become shorter by so much
_ROUTED = "what is computed depends on the data: MACs are those of the way that the example takes"


class Pruner:
    """Prunes a model to a preset budget while the user trains it.

    Args:
        model: gets gates, in place.
        example_inputs: what `model(...)` takes: a tensor, or a tuple or dict of arguments.
        macs, params: budgets, as fractions of the original; met at the end, never exceeded.
        latency: the same for the time of a forward pass in eval mode, measured on the example, here
            and now; an export more than 5 % above it is refused. Combines with the others.
        lam: instead of a budget, the paper's plain mode: a fixed λ, the ratio falls where it falls.
        steps: how many optimizer steps the training takes.
        keep: patterns of module names to leave whole.
        multiple_of: every kept width is a multiple of this.
        schedule: how ε and the cost go down.
        rules: rules for operations that are not known, `{torch.ops.…: rule}` (see `trace`).
        norms: open channels that layer, RMS and group norms mix (see `trace`).
        compact: "auto" calls `compact()` a few times: whenever a fifth of the MACs has gone, as
            long as enough steps are left. Steps and MACs decide, never a clock.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Example,
        *,
        macs: float | None = None,
        params: float | None = None,
        latency: float | None = None,
        lam: float | None = None,
        steps: int,
        keep: str | Iterable[str] = (),
        multiple_of: int = 1,
        schedule: Schedule = Schedule(),
        rules: Mapping[Any, Rule] | None = None,
        norms: bool = False,
        compact: str | None = None,
    ) -> None:
        keep = list(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else keep
        wanted = {"macs": macs, "params": params, "latency": latency}
        check_schedule(schedule, Schedule)
        limits = check_settings(wanted, lam, steps, multiple_of, compact, keep)
        steps, multiple_of = int(steps), int(multiple_of)
        lam = None if lam is None else float(lam)  # numpy's cannot be loaded from a checkpoint
        example = own_copy(example_inputs)  # the user may write into theirs
        self.model, self.example = model, example
        self.lam, self.steps, self.schedule = lam, steps, schedule
        self.multiple_of = multiple_of
        self._survey = partial(survey, keep=keep, rules=rules, norms=norms, compare_outputs=True)
        self.graph: Graph = self._survey(model, example)
        check_prunable(self.graph)
        self.budget = Budget(self.graph, limits or {"macs": 0.0}, multiple_of)
        self.limits = limits
        self._watch: Stopwatch | None = None
        if latency is not None:
            self._watch = Stopwatch(model, self.graph, example, latency)
            self._watch.install(self.budget)
        if limits:
            self.budget.check_reachable()
        self._bare = skeleton(without_computed_weights(model, self.graph.forward_weights))
        self._slots = empty_slots(model)
        self._present = torch.ones(self.graph.units, dtype=torch.bool, device="cpu")
        self.gates: dict[str, Gate] = install(model, self.graph, example)
        pulls = lam is not None
        self._stepper = Stepper(self.gates, self.budget.owner, schedule, steps, pulls=pulls)
        self._made_for = self._weight().dtype
        self.step_count = 0
        self.landed = False
        self.landing = {"gates": 0, "macs": 0.0}  # what was closed at once at the deadline
        self._controller = Controller(self.budget, schedule, steps)
        self.history: list[dict[str, Any]] = []
        self.proof: dict[str, float] = {}
        self._optimizer: Optimizer | None = None
        self._others: tuple[Optimizer, ...] = ()
        self._lr: float | None = None
        self._every = max(1, steps // _CONTROLS)
        self.copies: list[nn.Module] = []  # of the gated model (averages), cut when it is
        self._compacts = compact == "auto"
        self.compactions = 0  # so far; each changes shapes
        self._compacted = 1.0  # share of MACs at the last
        self._given_up = False  # compact="auto" failed once
        self._control()

    # --- in the training loop ---------------------------------------------------------------------

    def param_groups(
        self, lr: float, weight_decay: float | None = None, **kw: Any
    ) -> list[dict[str, Any]]:
        """The model's parameters, and the gates' with a tenth of the rate and no weight decay.

        Weight decay that is not given here is what the optimizer is given, or has by itself.
        """
        check_rates(lr, weight_decay, kw)
        alphas = self._alphas()
        mine = {id(alpha) for alpha in alphas}
        rest = [p for p in self.model.parameters() if id(p) not in mine]
        gate_lr = self._lr = lr * self.schedule.gate_lr
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        return [
            {"params": rest, "lr": lr, **kw, **decay},
            {**kw, "params": alphas, "lr": gate_lr, "weight_decay": 0.0},
        ]

    def attach(self, optimizer: Optimizer, *others: Optimizer) -> None:
        """Let the proximal step, ε and the budget follow every real step of this optimizer.

        It holds the gates. `others`, if there are any, hold other parameters: `compact` cuts their
        state as well.
        """
        check_optimizers((optimizer, *others))
        if self._optimizer is not None:
            raise PruneError("attach: this pruner is attached already; one optimizer is enough.")
        check_gates(dict(self._named_alphas()), self._alphas(), optimizer)
        if self._compacts:
            check_held(self.model, (optimizer, *others), "attach(optimizer, other)")
        self._optimizer, self._others = optimizer, others
        optimizer.register_step_pre_hook(lambda opt, args, kw: self._check_steps_left())
        optimizer.register_step_post_hook(lambda opt, args, kw: self._after_step(opt))

    def step(self) -> None:
        """One proximal step, by hand; `attach` calls it after every optimizer step."""
        self._check_steps_left()
        if self.lam is not None and self._optimizer is None and self._lr is None:
            raise PruneError(
                "step: with lam= the pruner has to know the gates' learning rate: build the "
                "optimizer with pruner.param_groups(lr=...), and attach it."
            )
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not captured and self._is_due():
            check_finite(dict(self._named_alphas()), self._flat())
        self._stepper.follow()
        if self.lam is not None:
            self._stepper.scale.fill_(self.lam * self._gate_lr())
        self._stepper()
        if not captured:
            self._count()

    def replayed(self) -> None:
        """The host's part, after a replay of a CUDA graph that holds the optimizer's step."""
        self._check_steps_left()
        if self._is_due():
            check_finite(dict(self._named_alphas()), self._flat())
        self._count()

    def _is_due(self) -> bool:
        """True if the host is to look at the gates after this step."""
        step = self.step_count + 1
        last = (self.schedule.deadline(self.steps), self.steps)
        return step in last or step % self._every == 0

    def _count(self) -> None:
        due = self._is_due()
        self.step_count += 1
        if due:
            self._control()

    def _after_step(self, optimizer: Optimizer) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # fused optimizers skip steps inside
        if found_inf is not None and bool(found_inf):
            return
        self.step()

    def _check_steps_left(self) -> None:
        if self.step_count >= self.steps:
            raise PruneError(
                f"steps: {self.steps} steps were announced and all are done. Set "
                f"steps = epochs * len(loader) (optimizer steps, not batches, if gradients are "
                f"accumulated); to train on, export first and train the small model."
            )

    def _gate_lr(self) -> Any:
        """A number, or a tensor where the optimizer is to be captured."""
        if self._optimizer is None:
            return self._lr or 0.0
        first = id(self._alphas()[0])
        for group in self._optimizer.param_groups:
            if any(id(p) == first for p in group["params"]):
                return group["lr"]
        raise AssertionError("attach made sure that the gates are there")

    # --- the budget, on the host ------------------------------------------------------------------

    @torch.no_grad()
    def _control(self) -> None:
        """Look at the gates: which are to close now, and is it time to land."""
        alpha = self._flat().double().cpu()
        if self.limits and self.step_count >= self.schedule.deadline(self.steps):
            alpha = alpha if self.landed else self._land(alpha)
        elif self.lam is not None and self.step_count == self.steps:
            self.budget.even_out(alpha)
            self._stepper.put(alpha)
        if not self.schedule.reopens:
            alpha = self._settle(alpha)
        n = self.budget.widths(alpha)
        if self._watch is not None and not self.landed:
            self._watch.look(n)
        self._steer(alpha, n)
        self._record(alpha, n)
        if self._compacts and not self._given_up and self._pays():
            try:
                self.compact()
            except PruneError as error:  # a training must not end for it
                self._given_up = True
                warnings.warn(f'compact="auto" is given up: {error}', stacklevel=2)

    def _steer(self, alpha: Tensor, n: Tensor) -> None:
        """Tell the stepper what to do with each gate."""
        stepper = self._stepper
        for own, new in zip((stepper.q, stepper.b), self.budget.combined(n), strict=True):
            own.copy_(new)
        if self.lam is None:
            worth, ramp = stepper.worth.cpu(), stepper.ramp.double().cpu()
            stepper.ramp.copy_(self._controller.ramps(self.step_count, alpha, worth, ramp))
        else:
            spared = self.budget.blocks(alpha).member < 0 if self.schedule.spares else alpha.isnan()
            stepper.pulled.copy_(~spared & (self.step_count >= self.schedule.begins(self.steps)))

    def _settle(self, alpha: Tensor) -> Tensor:
        """Close what is read only by layers of which nothing is left: it has lost its meaning."""
        settled = self.graph.settle(alpha != 0)
        if bool((settled != (alpha != 0)).any()):
            alpha = alpha * settled
            self._stepper.put(alpha)
        return alpha

    def _land(self, alpha: Tensor) -> Tensor:
        """Close what is still missing: next to nothing, or the user is told."""
        before = self.graph.cost.share(self.budget.widths(alpha))["macs"]
        landed = (self._watch or self.budget).land(alpha, self._stepper.worth.cpu())
        gone = before - self.graph.cost.share(self.budget.widths(landed))["macs"]
        self.landing = {"gates": int(((alpha != 0) & (landed == 0)).sum()), "macs": gone}
        if gone > _LANDING and self._watch is None:
            warnings.warn(
                f"{self.landing['gates']} gates with {gone:.1%} of the MACs were closed at once to "
                f"meet the budget at step {self.step_count}. Were gates changed from outside?",
                stacklevel=2,
            )
        self._stepper.put(landed)
        self.landed = True
        return landed

    def _record(self, alpha: Tensor, n: Tensor) -> None:
        values = gate_value(alpha, self.schedule.eps(self.step_count, self.steps))
        share = self.graph.cost.share(n)
        lr = float(self._gate_lr())
        pull = self._stepper.ramp.double().cpu() / self.budget.price(n)[self.budget.owner]
        lam = float(pull.max()) / lr if lr else 0.0
        self.history.append(
            {
                "step": self.step_count,
                **{key: value for key, value in share.items() if key != "memory"},
                "closed": int((alpha == 0).sum()),
                "between": int(((values > 0) & (values <= 0.5)).sum()),
                "eps": self.schedule.eps(self.step_count, self.steps),
                "lam": lam if self.lam is None else self.lam,
                "histogram": torch.histc(values, _BINS, 0, 1).int().tolist(),
            }
        )

    # --- looking ----------------------------------------------------------------------------------

    def _named_alphas(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, gate.alpha) for name, gate in self.gates.items()]

    def _alphas(self) -> list[nn.Parameter]:
        return self._stepper.alphas

    def _flat(self) -> Tensor:
        return self._stepper.flat()

    def _widths(self) -> Tensor:
        return self.budget.widths(self._flat().cpu())

    def cost(self) -> dict[str, int]:
        """Remaining MACs, params and memory (bytes) now, exact, without a forward pass."""
        return self.graph.cost.at(self._widths())

    def plan(self) -> Plan:
        """Group name -> indices of the channels that are alive; plain data."""
        return plan_of(self.graph, self._flat().cpu() != 0)

    def _settings(self) -> dict[str, Any]:
        goal = self.limits if self.lam is None else {"lam": self.lam}
        return {**goal, "steps": self.steps, "multiple_of": self.multiple_of}

    def report(self) -> Report:
        """What happened so far, as data; text, Markdown, JSON and HTML are views of it."""
        return Report(
            settings=self._settings(),
            before=self.graph.cost.original(),
            after=self.cost(),
            groups=[
                {
                    "name": name,
                    "before": group.size,
                    "after": len(self.plan().get(name, range(group.size))),
                    "reason": group.reason if group.frozen else "",
                }
                for name, group in self.graph.groups.items()
            ],
            history=copy.deepcopy(self.history),
            proof=dict(self.proof),
            notes=[*self.graph.notes, *([_ROUTED] if self.graph.tapes[0].depends_on_data else [])],
            results={"latency_ms": self._watch.results} if self._watch else {},
        )

    # --- smaller while it trains ------------------------------------------------------------------

    def compact(
        self,
        *,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        copies: Iterable[nn.Module] | None = None,
        verify: bool = True,
    ) -> None:
        """Take out what is closed, in place; training goes on as if nothing had happened, faster.

        Parameters stay the objects they are, cut, and so does the state of the optimizers: of those
        that are attached, and of those given (`()`: there are none). `copies` are other copies of
        the gated model that live beside it, such as `torch.optim.swa_utils.AveragedModel` (if not
        given, those in `pruner.copies`). What was built around the shapes of the model has to be
        built anew: DistributedDataParallel, a captured CUDA graph. Compiled models compile again by
        themselves.
        """
        known = self._optimizers(optimizer)
        check_known(known, optimizer is None and self.step_count > 0)
        rebuild = Rebuild(self._bare, self.graph, self._present, self._flat().cpu() != 0)
        if torch.equal(rebuild.after, rebuild.before):
            return
        check_unchanged(changed(self.graph, self.model))
        if known:
            check_held(self.model, known, "compact(optimizer=[...])")
        for one in known:
            rebuild.check(one)
        others = self._checked(rebuild, self.copies if copies is None else copies)
        if verify:

            def cut(gated: nn.Module) -> nn.Module:
                trial = copy_model(gated)
                rebuild.gated(trial, gates_in(trial, self.model, self.gates))
                return trial

            with slots_cleared(self._slots):
                prove_cut(self.model, cut(self.model), self._here(), cut, 1e-4)
        self._take_out(rebuild, known, others)

    def _optimizers(self, more: Any = ()) -> list[Optimizer]:
        given = list(more) if isinstance(more, Iterable) else [more]
        found = [one for one in (self._optimizer, *self._others, *given) if one is not None]
        check_optimizers(found, "compact")
        return list(dict.fromkeys(found))

    def _checked(self, rebuild: Rebuild, copies: Iterable[nn.Module]) -> list[nn.Module]:
        """The models inside wrappers that average them."""
        given = checked_copies(copies)
        found = [one.module if isinstance(one, AveragedModel) else one for one in given]
        for one in found:
            rebuild.check_copy(one, self.model)
        return found

    def _pays(self) -> bool:
        """A fifth of the MACs has gone; or less, but no more will. And enough steps are left.

        Decided by steps and MACs alone: by a clock, a resumed run would be another one.
        """
        gone = 1 - self.history[-1]["macs"] / self._compacted
        saved = gone * (self.steps - self.step_count)
        return bool(gone >= (_LAST if self.landed else _FIFTH) and saved >= _WORTH * self.steps)

    def _take_out(
        self, rebuild: Rebuild, optimizers: list[Optimizer], copies: list[nn.Module]
    ) -> None:
        if torch.equal(rebuild.after, rebuild.before):
            return
        for other in copies:
            rebuild.gated(other, gates_in(other, self.model, self.gates))
        rebuild.gated(self.model, self.gates, optimizers)
        torch.clear_autocast_cache()
        clear_slots(self._slots)
        self.compactions += 1
        self._present = rebuild.after
        self._stepper.take_out(rebuild.after)
        self._compacted = self.graph.cost.share(self._widths())["macs"]

    def _cut(self, gated: nn.Module) -> nn.Module:
        """What is left of a gated model, without gates."""
        small = plain(gated)
        if bool(self._present.all()):
            graph = self._survey(small, self._here()) if changed(self.graph, small) else self.graph
            return shrink(small, graph, self.plan())
        Rebuild(self._bare, self.graph, self._present, self._flat().cpu() != 0)(small)
        return small

    # --- out --------------------------------------------------------------------------------------

    def export(self, verify: bool = True) -> nn.Module:
        """A new, plain, small model, proved equal to the gated one, which stays as it is."""
        check_finite(dict(self._named_alphas()), self._flat())
        check_weights(self.model)
        share = self.graph.cost.share(self._widths())
        deadline = self.schedule.deadline(self.steps) if not self.landed else 0
        check_done(self.limits, share, self.step_count, self.steps, deadline)
        warn_of_hooks(self.model)
        with slots_cleared(self._slots):
            small = self._cut(self.model)
            if verify:
                self.proof = prove_cut(self.model, small, self._here(), self._cut)
        if verify:
            example = self._here()
            if not self.graph.tapes[0].depends_on_data:
                check_macs(small, example, self.cost()["macs"])
            if self._watch is not None:
                self._watch.check(small)
        return small

    def _here(self) -> Example:
        """The example where the model is, in its precision."""
        return example_for(self.example, self._weight(), self._made_for)

    def _weight(self) -> Tensor:
        """One of the model's, which knows device and precision."""
        mine = {id(alpha) for alpha in self._alphas()}
        weights = [p for p in self.model.parameters() if p.is_floating_point()]
        return next((p for p in weights if id(p) not in mine), self._flat())

    def state_dict(self) -> dict[str, Any]:
        """What is needed to resume exactly, beside the model's and the optimizer's own state.

        Gates that are not finite are refused: a checkpoint of these must not replace a good one.
        """
        flat = self._flat()
        check_finite(dict(self._named_alphas()), torch.cat([flat, self._stepper.worth.to(flat)]))
        return self._state()

    def _state(self) -> dict[str, Any]:
        sizes = [group.size for group in self.graph.prunable.values()]
        return {
            "settings": self._settings(),
            "schedule": asdict(self.schedule),
            "step": self.step_count,
            "landed": self.landed,
            "landing": dict(self.landing),
            "alpha": dict(zip(self.gates, self._flat().split(sizes), strict=True)),
            "present": self._present.clone(),
            "compacted": self._compacted,
            "given_up": self._given_up,
            "stepper": self._stepper.state(),
            "history": copy.deepcopy(self.history),
            **({"latency": self._watch.state()} if self._watch else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. After `compact()` this comes before the model's and the optimizer's.

        The model is brought to the widths that it had, which the other states then fit. All of the
        state is checked first: one that is damaged, or of another run, changes nothing.
        """
        deadline = self.schedule.deadline(self.steps) if self.limits else 0
        check_state(state, self._state(), self.graph, deadline)
        rebuild = Rebuild(self._bare, self.graph, self._present, state["present"].cpu())
        copies, optimizers = self._checked(rebuild, self.copies), self._optimizers()
        for one in optimizers:
            rebuild.check(one)
        self.step_count, self.landed = state["step"], state["landed"]
        self.landing = dict(state["landing"])
        self.history = copy.deepcopy(state["history"])
        self._take_out(rebuild, optimizers, copies)
        self._compacted, self._given_up = state["compacted"], state["given_up"]
        self._stepper.put(torch.cat([state["alpha"][name] for name in self.gates]))
        self._stepper.load(state["stepper"])
        if self._watch is not None:
            self._watch.load(state["latency"])
