"""The parts of a pruning run, and how they work together.

`Stepper` moves the gates on the device, `Steering` counts the steps and decides on the host which
gates close next, `Compaction` removes closed channels during training, `Exporter` cuts the small
model. `PruningRun` builds and connects them; `Pruner` adds the methods that users call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..channels.graph import Graph
from ..cost.budget import Budget
from ..cost.stopwatch import Stopwatch
from ..errors import PruneError
from ..gates.gate import Gate
from ..gates.install import install
from ..gates.sharding import (
    expect_early_sharding,
    gathered_copy,
    install_in_sharded,
    shard_gates,
    unsharded_model,
)
from ..surgery.proof import example_for
from ..torch_internals.parallel import in_group, is_distributed, only_makes_state
from ..tracing.model_state import Example
from ..validation.optimizers import raw_optimizers
from ..validation.pruner_state import State, check_state
from ..validation.run import (
    check_finite,
    check_prunable,
    check_same_gates,
    warn_of_more_steps,
)
from .carried_state import carry_state
from .compaction import Compaction
from .export import Exporter
from .parameter_groups import ParameterGroup
from .processes import Processes
from .rebuild import gates_in
from .schedule import Schedule
from .state_bytes import size_of_header
from .steering import Progress, Row, Steering
from .step_check import StepCheck, note_step
from .stepper import Stepper


class PruningRun:
    """A model with gates, and everything that closes them.

    Args:
        model: gets gates, in place.
        example: what `model(...)` takes.
        trace: finds the groups of a model's channels.
        schedule: how ε and the cost decrease over the steps.
        limits: budgets, as fractions of the original; empty with `lam`.
        lam: λ of the paper's plain mode, or None.
        steps: the number of optimizer steps.
        multiple_of: every kept width is a multiple of this number; "auto" depends on the group.
        uniform: True, or patterns of groups that keep equally many channels (already given to
            `trace`).
        compacts: compact the model automatically.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        trace: Callable[[nn.Module, Example], Graph],
        schedule: Schedule,
        *,
        limits: dict[str, float],
        lam: float | None,
        steps: int,
        multiple_of: int | str,
        uniform: bool | tuple[str, ...],
        compacts: bool,
    ) -> None:
        self.model, self.example, self.schedule = model, example, schedule
        self.limits, self.lam, self.steps = limits, lam, steps
        self.multiple_of, self.uniform = multiple_of, uniform
        self._processes, self._trace = Processes(model), trace
        whole = unsharded_model(model)
        self.graph: Graph = trace(whole, example)
        check_prunable(self.graph)
        self._build_budget(whole)
        self.gates: dict[str, Gate] = {}
        self._compaction = Compaction(model, self.graph, self.gates, automatic=compacts)
        self.gates.update(install(whole, self.graph, example))
        if whole is model and in_group():
            expect_early_sharding(model, self.gates)
        if whole is not model:
            self.gates.update(install_in_sharded(model, self.graph))
            shard_gates(model, self.gates)
        self._build_steering()
        self._traced_dtype = self._weight().dtype
        self.proof: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self._optimizer: Optimizer | None = None
        self._others: tuple[Optimizer, ...] = ()
        self._lr: float | None = None
        self._step_check, self._warned = StepCheck(), False
        self._steering.check(0.0)
        carry_state(model, self)

    def _build_budget(self, model: nn.Module) -> None:
        """Set up the limits, and measure the latency if that is limited; refuse what is too low."""
        self.budget = Budget(self.graph, self.limits or {"macs": 0.0}, self.multiple_of)
        self._stopwatch: Stopwatch | None = None
        if "latency" in self.limits:
            limit = self.limits["latency"]
            self._stopwatch = Stopwatch(model, self.graph, self.example, limit)
            self._stopwatch.install(self.budget)
        if self.limits:
            self.budget.check_reachable()

    def _build_steering(self) -> None:
        self._stepper = Stepper(
            self.gates, self.budget.owner, self.schedule, self.steps, proximal=self.lam is not None
        )
        self._steering = Steering(
            self.graph,
            self.budget,
            self._stepper,
            self.schedule,
            self.steps,
            lam=self.lam,
            stopwatch=self._stopwatch,
        )

    # --- other processes --------------------------------------------------------------------------

    def _follow_sharding(self) -> None:
        """Spread the gates over the processes if `fully_shard` has spread the weights."""
        alphas = self._stepper.alphas
        if self._processes.sharded and not is_distributed(alphas[0]):
            shard_gates(self.model, self.gates)
            self._stepper.follow_gates()

    def _facts(self) -> dict[str, object]:
        """Return what must be equal in all processes that train the model."""
        groups = [(name, one.size, one.minimum) for name, one in self.graph.prunable.items()]
        return {
            "the arguments of the Pruner": (self._settings(), asdict(self.schedule)),
            "the groups of channels": groups,
            "the steps that were taken": self.step_count,
            "the gates": (self._flat().tolist(), self._compaction.present.tolist()),
            "the history": self.history,
        }

    # --- steps ------------------------------------------------------------------------------------

    def _check_gates_if_due(self) -> None:
        if self._steering.is_due:
            check_finite(self._named_alphas(), self._stepper.flat())

    def _hold_if_done(self) -> bool:
        """After the announced steps, leave the gates as they are, and warn once."""
        self._processes.join(self._stepper.alphas, self._facts)
        if self.step_count < self.steps:
            return False
        self._stepper.hold()
        self._compaction.copies.follow()
        if not self._warned:
            self._warned = True
            warn_of_more_steps(self.steps)
        return True

    def _finish_step(self, compact: Callable[[], None]) -> None:
        """Count the step, check the gates if that is due, and compact if that saves time."""
        due = self._steering.count_step(float(self._gate_lr()))
        self._note_step()
        if due:
            left, macs = self.steps - self.step_count, self.history[-1]["macs"]
            if self._compaction.pays(macs, left, self.steps, self.landed):
                self._compaction.try_to(compact)
        if self.step_count >= self.steps:
            self._stepper.keep()
        self._compaction.copies.follow()

    def _gate_lr(self) -> float | Tensor:
        """Return the gates' learning rate: a tensor if the optimizer's step is captured."""
        if self._optimizer is None:
            return self._lr or 0.0
        rate: float | Tensor = self._gate_group(self._optimizer)["lr"]
        return rate

    def _gate_group(self, optimizer: Optimizer) -> ParameterGroup:
        """Return the parameter group that holds the (first) gates."""
        first = id(self._stepper.alphas[0])
        for group in optimizer.param_groups:
            if any(id(p) == first for p in group["params"]):
                return group
        raise AssertionError("attach made sure that the optimizer holds the gates")

    def _before_step(self, optimizer: Optimizer | None = None) -> None:
        """Refuse a step if parts of different checkpoints were loaded, or if processes differ."""
        if optimizer is not None and only_makes_state(optimizer):
            return
        group = None if self._optimizer is None else self._gate_group(self._optimizer)
        self._step_check(self.step_count, group)
        self._hold_if_done()

    def _note_step(self) -> None:
        """Write the number of steps done where the state of the optimizer has it, too."""
        if self._optimizer is not None:
            note_step(self._gate_group(self._optimizer), self.step_count)

    # --- progress ---------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Optimizer steps done."""
        return self._steering.progress.step

    @property
    def landed(self) -> bool:
        """Whether the budget is met for good."""
        return self._steering.progress.landed

    @property
    def landing(self) -> dict[str, float]:
        """The gates and the share of the MACs that were closed at once at the deadline."""
        return self._steering.progress.landing

    @property
    def history(self) -> list[Row]:
        """One row for every check of the gates on the host."""
        return self._steering.progress.history

    @property
    def watchers(self) -> list[Callable[[Row], object]]:
        """Functions that are called with every new row of the history."""
        return self._steering.watchers

    @property
    def compactions(self) -> int:
        """How many times the model was compacted; each time its shapes changed."""
        return self._compaction.count

    @property
    def copies(self) -> list[nn.Module]:
        """Copies of the gated model that `compact` cuts besides those that it finds."""
        return self._compaction.copies.named

    @copies.setter
    def copies(self, given: list[nn.Module]) -> None:
        self._compaction.copies.named = given

    def _named_alphas(self) -> dict[str, nn.Parameter]:
        return {name: gate.alpha for name, gate in self.gates.items()}

    def _flat(self) -> Tensor:
        """Return α of all original gates as one vector."""
        return self._stepper.last()

    def _alive(self) -> Tensor:
        """Return a mask of the units whose gate is not closed."""
        return self._flat().cpu() != 0

    def _widths(self) -> Tensor:
        return self.budget.widths(self._flat().cpu())

    def _settings(self) -> dict[str, float | str]:
        goal: dict[str, float] = self.limits if self.lam is None else {"lam": self.lam}
        same = self.uniform if isinstance(self.uniform, bool) else ", ".join(self.uniform)
        uniform = {"uniform": same} if same else {}  # states of earlier versions lack it
        return {**goal, "steps": self.steps, "multiple_of": self.multiple_of, **uniform}

    def _here(self, model: nn.Module | None = None) -> Example:
        """Return the example on the device of the model (or of a copy), in its precision."""
        return example_for(self.example, self._weight(model), self._traced_dtype)

    def _weight(self, model: nn.Module | None = None) -> Tensor:
        """Return one of the model's weights, to read its device and precision from."""
        mine = {id(alpha) for alpha in self._stepper.alphas}
        weights = [p for p in (model or self.model).parameters() if p.is_floating_point()]
        return next((p for p in weights if id(p) not in mine), self._flat())

    # --- smaller models ---------------------------------------------------------------------------

    def _to_export(self, model: nn.Module | None) -> tuple[nn.Module, Exporter]:
        """Return the gated model to export and what cuts it; spread weights are gathered."""
        compaction = self._compaction
        if not self._processes.sharded:
            gated = self.model if model is None else compaction.copies.with_own_gates(model)
            return gated, Exporter(compaction, self._trace)
        if model is not None:
            raise PruneError(
                "export: the model is sharded by fully_shard, so no other weights can be given. "
                "Write them to a full state dict and load that into a plain model with a Pruner."
            )
        whole = gathered_copy(self.model)
        gates = gates_in(whole, self.model, self.gates)
        check_same_gates(self._flat(), torch.cat([gate.alpha for gate in gates.values()]))
        compaction = Compaction(whole, self.graph, gates, automatic=False)
        return whole, Exporter(compaction, self._trace)

    def _cut_model(
        self,
        optimizers: list[Optimizer],
        copies: list[nn.Module],
        example: Example | None,
    ) -> None:
        """Remove closed channels from the model, if all processes agree."""
        wrappers = self._processes.wrappers()
        cut = self._processes.agreed(
            lambda: self._compaction.prepare(self._alive(), optimizers, copies, example)
        )
        if cut is None:
            return
        self._compaction.apply(cut.rebuild, optimizers, cut.copies)
        self._stepper.keep_only(self._compaction.present)
        self._compaction.share = self.graph.cost.share(self._widths())["macs"]
        self._processes.renew(wrappers)

    def _optimizers(self, more: object = ()) -> list[Optimizer]:
        given = list(more) if isinstance(more, Iterable) else [more]
        found = [one for one in (self._optimizer, *self._others, *given) if one is not None]
        return list(dict.fromkeys(raw_optimizers(found, "compact")))

    # --- resuming ---------------------------------------------------------------------------------

    def current_state(self) -> State:
        """Return the state; its history is that of the pruner, not a copy."""
        sizes = [group.size for group in self.graph.prunable.values()]
        compaction = self._compaction
        return {
            "settings": self._settings(),
            "schedule": asdict(self.schedule),
            "step": self.step_count,
            "landed": self.landed,
            "landing": dict(self.landing),
            "alpha": dict(zip(self.gates, self._flat().split(sizes), strict=True)),
            "present": compaction.present.clone(),
            "compacted": compaction.share,
            "given_up": compaction.gave_up,
            "stepper": self._stepper.state(),
            "history": self.history,
            **({"latency": self._stopwatch.state()} if self._stopwatch else {}),
        }

    def entry_size(self) -> int:
        """Return the least size of the header of the stored state.

        `torch.distributed.checkpoint` loads into tensors of the size that was written, so the size
        must not depend on the step.
        """
        if not in_group():
            return 0
        return size_of_header(self.current_state(), self._steering.most_rows)

    def shared_entry(self, entry: object) -> object:
        """Return the stored state, from another process if only that one has read it."""
        return self._processes.shared(entry)

    def resume(self, state: object) -> None:
        """Check a state that came with the model's, and continue from it."""
        self._restore(check_state(state, self.current_state(), self.graph, self._steering.deadline))
        self._step_check.model_loaded()

    def check_loaded_gates(self) -> None:
        """Compare the gates with the state after a state dict was loaded into the model."""
        self._step_check.gates_loaded(own=self._stepper.has_own_gates())

    def add_copy(self, source: nn.Module, copy: nn.Module) -> None:
        """Register a deep copy of the gated model, or of a copy of it."""
        self._compaction.copies.add(source, copy)

    def _restore(self, state: State) -> None:
        """Continue from a state that was checked."""
        compaction, present = self._compaction, state["present"].cpu()
        if not torch.equal(present, compaction.present):
            wrappers = self._processes.wrappers()
            rebuild, optimizers = compaction.rebuild(present), self._optimizers()
            copies = compaction.copies.to_cut(snapshots=True)
            compaction.check(rebuild, optimizers, copies)
            compaction.apply(rebuild, optimizers, copies)
            self._stepper.keep_only(compaction.present)
            self._processes.renew(wrappers)
        compaction.share, compaction.gave_up = state["compacted"], state["given_up"]
        self._stepper.put(torch.cat([state["alpha"][name] for name in self.gates]))
        self._stepper.load(state["stepper"])
        self._stepper.set_step(state["step"])
        self._steering.progress = Progress(
            state["step"], state["landed"], dict(state["landing"]), copy.deepcopy(state["history"])
        )
        if self.step_count >= self.steps:
            self._stepper.keep()
        if self._stopwatch is not None:
            self._stopwatch.load(state["latency"])
