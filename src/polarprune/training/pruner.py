"""`Pruner`: the methods that users call.

They check what the user passes and hand it to the parts: `PruningRun` takes the steps of the gates
and compacts the model, `Exporter` cuts the small model, `Resuming` stores and restores the state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..analysis.trace import survey
from ..channels.graph import Graph, Plan, plan_of
from ..channels.propagation import Rule
from ..gates.gate import Gate
from ..report.groups import graph_facts
from ..report.loading import class_name
from ..report.report import Report
from ..surgery.apply import warn_of_hooks
from ..surgery.proof import own_copy
from ..tracing.model_state import Example
from ..validation.arguments import check_compact, check_keywords
from ..validation.optimizers import check_rates, raw_optimizers
from ..validation.pruner_state import State
from .carried_state import carry_state
from .export import Exporter
from .parameter_groups import NoDecay, ParameterGroup, weight_groups
from .resuming import Resuming
from .run import PruningRun
from .schedule import Schedule
from .settings import checked_settings
from .steering import Row


class Pruner:
    """Prune a model to a preset budget while you train it.

    Args:
        model: the model to prune. It gets gates, in place. It may be sharded by `fully_shard`.
        example_inputs: what `model(...)` takes: a tensor, or a tuple or dict of arguments.
        macs: budget for the MACs, as a fraction of the original, met at the end, never exceeded.
        params: the same for the parameters. Budgets can be combined.
        latency: the same for the time of a forward pass in eval mode, measured on the example
            and on its device. An export that takes over 5 % more is refused.
        lam: the paper's plain mode instead of a budget: a fixed λ, with no ratio set in advance.
        steps: the number of optimizer steps of the training.
        keep: patterns of module names whose channels are frozen.
        frozen: names of groups that are frozen, each with the reason (`folder_settings` gives it).
        multiple_of: every kept width is a multiple of this number. "auto": 8 in groups of at least
            64 channels, because odd widths are slow; 1 in narrower groups, and with `lam`.
        min_channels: the least channels that a group keeps; with 0, whole branches may be removed.
        uniform: True: groups at the same position of repeated blocks keep the same number of
            channels or heads. Or patterns of names: equally wide groups that match one stay so.
        schedule: how ε and the cost decrease over the steps.
        rules: rules for unknown operations, `{torch.ops.…: rule}` (see `polarprune.rules`).
        norms: make channels prunable that layer, RMS and group norms mix (see `trace`).
        compact: "auto" calls `compact()` whenever an eighth of the MACs has closed, if that pays.

    Attributes:
        gates: the gate of each prunable group, by group name.
        graph: what `trace` found.
        history: one row for every check of the gates on the host (docs/trainers.md lists the keys).
        watchers: functions that are called with every new row of `history`.
        landing: the gates and the share of the MACs that were closed at once at the deadline.
        proof: the largest difference that the last `export` found, for every mode.
        copies: copies of the gated model that `compact` cuts besides the averages that it finds.

    Raises:
        PruneError: if an argument is wrong, the model cannot be traced, no channel is prunable, or
            the budget cannot be reached. The model is not changed.

    Example:
        >>> import torch
        >>> import polarprune as pp
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        >>> x = torch.randn(16, 8)
        >>> pruner = pp.Pruner(model, x, macs=0.5, steps=50)
        >>> optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1), momentum=0.9)
        >>> pruner.attach(optimizer)
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        >>> pruner.export()[0]
        Linear(in_features=8, out_features=16, bias=True)
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
        frozen: Mapping[str, str] | None = None,
        multiple_of: int | str = "auto",
        min_channels: int = 0,
        uniform: bool | str | Iterable[str] = False,
        schedule: Schedule = Schedule(),
        rules: Mapping[Any, Rule] | None = None,
        norms: bool = False,
        compact: str | None = None,
    ) -> None:
        keep = list(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else keep
        check_compact(compact)
        budgets = {"macs": macs, "params": params, "latency": latency}
        settings = checked_settings(budgets, lam, steps, multiple_of, uniform, schedule)
        trace = partial(survey, keep=keep, rules=rules, norms=norms, min_channels=min_channels)
        trace = partial(trace, compare_outputs=True, uniform=settings.uniform, frozen=frozen)
        example = own_copy(example_inputs)  # the user may overwrite theirs
        self._run = PruningRun(model, example, trace, settings, compacts=compact == "auto")
        self._resuming = Resuming(self._run)
        carry_state(model, self._resuming)
        self.model, self.example, self.schedule = model, example, schedule
        self.limits, self.steps = settings.limits, settings.steps
        self.graph: Graph = self._run.graph
        self.budget = self._run.budget
        self.gates: dict[str, Gate] = self._run.gates
        self.proof: dict[str, float] = {}

    # --- in the training loop ---------------------------------------------------------------------

    def param_groups(
        self, lr: float, weight_decay: float | None = None, *, no_decay: NoDecay = False, **kw: Any
    ) -> list[ParameterGroup]:
        """Return parameter groups for an optimizer: the model's weights, and the gates.

        Args:
            lr: the learning rate of the weights. Gates learn with a tenth of it.
            weight_decay: of the weights; by default what the optimizer uses. Gates have none.
            no_decay: parameters without weight decay: True for biases and the parameters of norms
                (all with fewer than two dimensions), or patterns of names, such as ["*.bias"].
            **kw: other options of the groups.

        Returns:
            Two groups, weights first and gates last; between them the weights without decay.

        Raises:
            PruneError: if a rate is negative or not finite, or a pattern matches nothing.

        Example:
            >>> optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1, weight_decay=5e-4))
        """
        check_rates(lr, weight_decay, kw)
        self._run.follow_sharding()
        alphas = self._run.stepper.alphas
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        weights = weight_groups(self.model, alphas, {"lr": lr, **kw, **decay}, no_decay)
        gate_lr = lr * self.schedule.gate_lr
        self._run.attachment.expect_rate(gate_lr)
        return [*weights, {**kw, "params": alphas, "lr": gate_lr, "weight_decay": 0.0}]

    def attach(self, optimizer: Optimizer, *others: Optimizer) -> None:
        """Move the gates after every step that this optimizer takes.

        Args:
            optimizer: holds the gates. A wrapper with a torch optimizer as `.optimizer`, such as
                accelerate's, works too.
            *others: optimizers of other parameters; `compact` cuts their state, too.

        Raises:
            PruneError: if the optimizer does not hold the gates, or decays them, or another one
                holds gates, too.

        Example:
            >>> pruner.attach(optimizer)
        """
        self._run.attach(*raw_optimizers((optimizer, *others)))

    def step(self) -> None:
        """Move the gates by one step, after an optimizer step. Not needed after `attach`.

        After the announced number of steps, it warns once and leaves the gates as they are.

        Raises:
            PruneError: if an optimizer is attached, gates are not finite, or checkpoints are mixed.

        Example:
            >>> optimizer.step()
            >>> pruner.step()  # only if the optimizer is not attached
        """
        self._run.check_step_by_hand()
        self._run.move_gates()

    def replayed(self) -> None:
        """Do the host's part of a step after a CUDA graph that holds the step was replayed.

        Raises:
            PruneError: as `step` does.

        Example:
            >>> cuda_graph.replay()  # doctest: +SKIP
            >>> pruner.replayed()  # doctest: +SKIP
        """
        self._run.finish_replayed_step()

    # --- the state of the run ---------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """The number of optimizer steps done."""
        return self._run.step_count

    @property
    def landed(self) -> bool:
        """Whether the budget is met for good."""
        return self._run.steering.progress.landed

    @property
    def landing(self) -> dict[str, float]:
        """The gates and the share of the MACs that were closed at once at the deadline."""
        return self._run.steering.progress.landing

    @property
    def history(self) -> list[Row]:
        """One row for every check of the gates on the host."""
        return self._run.steering.progress.history

    @property
    def watchers(self) -> list[Callable[[Row], object]]:
        """Functions that are called with every new row of the history."""
        return self._run.steering.watchers

    @property
    def compactions(self) -> int:
        """The number of times that the model was compacted; each time its shapes changed."""
        return self._run.compaction.count

    @property
    def copies(self) -> list[nn.Module]:
        """Copies of the gated model that `compact` cuts besides those that it finds."""
        return self._run.copies.named

    @copies.setter
    def copies(self, copies: list[nn.Module]) -> None:
        self._run.copies.name(copies)

    def cost(self) -> dict[str, int]:
        """Return the remaining MACs, parameters and memory in bytes: exact, without a forward pass.

        Example:
            >>> pruner.cost()["macs"]
            3072
        """
        return self._run.cost()

    def plan(self) -> Plan:
        """Return the indices of the channels to keep, by group name, as plain data.

        Example:
            >>> len(pruner.plan()["0"])
            16
        """
        return plan_of(self.graph, self._run.kept())

    def report(self) -> Report:
        """Return what happened so far as data, with views as text, Markdown, JSON and HTML.

        Example:
            >>> print(pruner.report())  # doctest: +SKIP
        """
        stopwatch = self._run.stopwatch
        return Report(
            **graph_facts(self.graph, self.plan()),
            settings=self._run.settings.as_data(),
            history=copy.deepcopy(self.history),
            proof=dict(self.proof),
            results={"latency_ms": stopwatch.results} if stopwatch else {},
            model=class_name(self.model),
        )

    # --- smaller models ---------------------------------------------------------------------------

    def compact(
        self,
        *,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        copies: Iterable[nn.Module] | None = None,
        verify: bool = True,
    ) -> None:
        """Remove closed channels from the model in place; training continues as before, faster.

        Parameters stay the same objects, and the state of the optimizers is cut with them. Under
        DistributedDataParallel all processes must call this; the wrapper is renewed. A captured
        CUDA graph has to be captured again; compiled models are compiled again automatically.

        Args:
            optimizer: optimizers besides those attached; `()` if there are none.
            copies: copies of the gated model to cut; by default `pruner.copies`. Averages that were
                updated, such as `torch.optim.swa_utils.AveragedModel`, need not be named.
            verify: compact a copy first and compare it with the model.

        Raises:
            PruneError: if something cannot be cut, or the result differs. Nothing is changed.

        Example:
            >>> pruner.compact()
        """
        self._run.compact(optimizer, copies, verify=verify)

    def export(
        self, *wrong: object, model: nn.Module | None = None, verify: bool = True
    ) -> nn.Module:
        """Return a new, plain, small model that computes the same function as the gated one.

        The gated model is not changed. If `fully_shard` spread it over processes, all of them must
        call this.

        Args:
            *wrong: there are no positional arguments.
            model: a copy of the gated model with other weights, such as an average, to be cut by
                the same plan; it may be inside of a wrapper, such as
                `torch.optim.swa_utils.AveragedModel`.
            verify: compare the small model with the gated one, in train and in eval mode, on the
                example and on other inputs. `pruner.proof` has the largest differences.

        Returns:
            A module of the model's own class with smaller layers.

        Raises:
            PruneError: if the budget is not met yet, weights are NaN or infinite, the small model
                differs, or `model` is not a copy of the gated one.

        Example:
            >>> small = pruner.export()
            >>> small = pruner.export(model=average)  # doctest: +SKIP
        """
        check_keywords("export", wrong)
        exporter = Exporter(self._run, model)
        exporter.check_ready()
        warn_of_hooks(exporter.gated)
        small = exporter.small()
        if verify:
            self.proof = exporter.prove(small)
            exporter.check_latency(small)
        return small

    # --- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the state of the run, which the state dict of the model has, too.

        It is needed only where a checkpoint drops entries of the model's state that it does not
        know.

        Raises:
            PruneError: if gates are NaN or infinite: such a checkpoint must not replace a good one.

        Example:
            >>> state = pruner.state_dict()
        """
        return self._resuming.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Resume from the state that `state_dict` returned.

        Loading the model's own state does the same. Otherwise load this state before those of the
        model and the optimizer: after a `compact()` it gives the model the widths that these have.

        Args:
            state: what `state_dict` returned in a run with the same model and settings.

        Raises:
            PruneError: if the state is damaged, or belongs to another run. Nothing is changed.

        Example:
            >>> pruner.load_state_dict(state)
        """
        self._resuming.load_state_dict(state)
