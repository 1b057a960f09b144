"""`Pruner`: gates in the model, a step of the gates after every optimizer step, and the export.

This module has the methods that users call. `run` has the parts of a run behind them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..analysis.trace import survey
from ..channels.graph import Plan, plan_of
from ..channels.propagation import Rule
from ..errors import PruneError
from ..report.groups import graph_facts
from ..report.loading import class_name
from ..report.report import Report
from ..surgery.apply import warn_of_hooks
from ..surgery.proof import own_copy
from ..torch_internals.parallel import only_makes_state
from ..tracing.model_state import Example
from ..validation.arguments import (
    check_keywords,
    check_schedule,
    check_settings,
    plain_multiple,
    plain_uniform,
)
from ..validation.optimizers import check_gates, check_known, check_rates, raw_optimizers
from ..validation.pruner_state import State, check_state
from ..validation.run import (
    check_done,
    check_finite,
    check_step_by_hand,
    check_weights,
    warn_of_early_export,
)
from .parameter_groups import NoDecay, ParameterGroup, weight_groups
from .rebuild import check_held
from .run import PruningRun
from .schedule import Schedule


class Pruner(PruningRun):
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
        proof, skipped: the differences that the last `export` found; what it skipped, and why.
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
        wanted = {"macs": macs, "params": params, "latency": latency}
        check_schedule(schedule, Schedule)
        limits = check_settings(wanted, lam, steps, multiple_of, compact, keep)
        same = plain_uniform(uniform, lam)
        trace = partial(survey, keep=keep, rules=rules, norms=norms, min_channels=min_channels)
        trace = partial(trace, compare_outputs=True, uniform=same, frozen=frozen)
        super().__init__(
            model,
            own_copy(example_inputs),  # the user may overwrite theirs
            trace,
            schedule,
            limits=limits,
            lam=None if lam is None else float(lam),  # a checkpoint cannot hold numpy's numbers
            steps=int(steps),
            multiple_of=plain_multiple(multiple_of, lam),
            uniform=same,
            compacts=compact == "auto",
        )

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
        self._follow_sharding()
        alphas = self._stepper.alphas
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        weights = weight_groups(self.model, alphas, {"lr": lr, **kw, **decay}, no_decay)
        gate_lr = self._lr = lr * self.schedule.gate_lr
        return [*weights, {**kw, "params": alphas, "lr": gate_lr, "weight_decay": 0.0}]

    def attach(self, optimizer: Optimizer, *others: Optimizer) -> None:
        """Move the gates after every step that this optimizer takes.

        Args:
            optimizer: holds the gates. A wrapper with a torch optimizer as `.optimizer`, such as
                accelerate's, works too.
            *others: optimizers of other parameters; `compact` cuts their state, too.

        Raises:
            PruneError: if the optimizer does not hold the gates, or decays them, or two hold gates.

        Example:
            >>> pruner.attach(optimizer)
        """
        optimizer, *rest = raw_optimizers((optimizer, *others))
        if self._optimizer is not None:
            raise PruneError("attach: this pruner is attached already; one optimizer is enough.")
        for one in (optimizer, *rest):
            self._compaction.drop_removed(one)
        check_gates(self._named_alphas(), self._stepper.alphas, optimizer, rest)
        if self._compaction.automatic:
            check_held(self.model, (optimizer, *rest), "attach(optimizer, other)")
        self._optimizer, self._others = optimizer, tuple(rest)
        self._step_check.attached(self._gate_group(optimizer), self.step_count)
        optimizer.register_step_pre_hook(lambda opt, args, kw: self._before_step(opt))
        optimizer.register_step_post_hook(lambda opt, args, kw: self._after_step(opt))

    def step(self) -> None:
        """Move the gates by one step, after an optimizer step. Not needed after `attach`.

        After the announced number of steps, it warns once and leaves the gates as they are.

        Raises:
            PruneError: if an optimizer is attached, gates are not finite, or checkpoints are mixed.

        Example:
            >>> optimizer.step()
            >>> pruner.step()  # only if the optimizer is not attached
        """
        check_step_by_hand(self._optimizer, rate_known=self.lam is None or self._lr is not None)
        self._move_gates()

    def _move_gates(self) -> None:
        self._step_check(self.step_count)  # where attached, the optimizer was compared before
        if self._hold_if_done():
            return
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not captured:
            self._check_gates_if_due()
        self._stepper.follow_device()
        if self.lam is not None:
            self._stepper.scale.fill_(self.lam * self._gate_lr())
        self._stepper()
        if not captured:
            self._finish_step(self.compact)

    def replayed(self) -> None:
        """Do the host's part of a step after a CUDA graph that holds the step was replayed.

        Raises:
            PruneError: as `step` does.

        Example:
            >>> cuda_graph.replay()  # doctest: +SKIP
            >>> pruner.replayed()  # doctest: +SKIP
        """
        self._before_step()
        if self.step_count >= self.steps:
            return
        self._check_gates_if_due()
        self._finish_step(self.compact)

    def _after_step(self, optimizer: Optimizer) -> None:
        skipped = bool(getattr(optimizer, "found_inf", None))  # by a fused optimizer itself
        if not skipped and not only_makes_state(optimizer):
            self._move_gates()

    # --- the state of the run ---------------------------------------------------------------------

    def cost(self) -> dict[str, int]:
        """Return the remaining MACs, parameters and memory in bytes: exact, without a forward pass.

        Example:
            >>> pruner.cost()["macs"]
            3072
        """
        return self.graph.cost.at(self._widths())

    def plan(self) -> Plan:
        """Return the indices of the channels to keep, by group name, as plain data.

        Example:
            >>> len(pruner.plan()["0"])
            16
        """
        return plan_of(self.graph, self._alive())

    def report(self) -> Report:
        """Return what happened so far as data, with views as text, Markdown, JSON and HTML.

        Example:
            >>> print(pruner.report())  # doctest: +SKIP
        """
        return Report(
            **graph_facts(self.graph, self.plan()),
            settings=self._settings(),
            history=copy.deepcopy(self.history),
            proof=dict(self.proof),
            skipped=dict(self.skipped),
            results={"latency_ms": self._stopwatch.results} if self._stopwatch else {},
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
        known = self._optimizers(optimizer)
        check_known(known, optimizer is None and self.step_count > 0)
        others = self._compaction.copies.to_cut(copies)
        self._cut_model(known, others, self._here() if verify else None)

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
        check_finite(self._named_alphas(), self._flat())
        gated, exporter = self._to_export(model)
        check_weights(gated)
        share = self.graph.cost.share(self._widths())
        deadline = 0 if self.landed else self.schedule.deadline(self.steps)
        check_done(self.limits, share, self.step_count, self.steps, deadline)
        warn_of_early_export(self.step_count, self.steps)
        warn_of_hooks(gated)
        alive, example = self._alive(), self._here(gated)
        small = exporter.exported(gated, alive, example)
        if verify:
            found = exporter.proved(gated, small, alive, example, self.cost()["macs"])
            self.proof, self.skipped = found
            if self._stopwatch is not None:
                self._stopwatch.check(small)
        return small

    # --- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the state of the run, which the state dict of the model has, too.

        Needed only where a checkpoint drops entries of the model's state that it does not know.

        Raises:
            PruneError: if gates are NaN or infinite: such a checkpoint must not replace a good one.

        Example:
            >>> state = pruner.state_dict()
        """
        flat = self._flat()
        check_finite(self._named_alphas(), torch.cat([flat, self._stepper.worth.to(flat)]))
        return {**self.current_state(), "history": copy.deepcopy(self.history)}

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
        own = self.current_state()
        self._restore(check_state(state, own, self.graph, self._steering.deadline))
        self._step_check.accept()
        self._note_step()
