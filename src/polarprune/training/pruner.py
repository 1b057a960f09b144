"""`Pruner`: the methods that users call, with their documentation.

The work is done by others: `PruningRun` builds the parts of a run, `Steps` moves the gates,
`Compaction` and `Exporter` cut models, and `Resuming` stores and restores the state of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..analysis.trace import survey
from ..channels.graph import Graph, Plan
from ..channels.propagation import Rule
from ..gates.gate import Gate
from ..report.report import Report
from ..surgery.apply import warn_of_hooks
from ..surgery.proof import own_copy
from ..tracing.model_state import Example
from ..validation.arguments import check_compact, check_keywords
from ..validation.optimizers import check_rates, raw_optimizers
from ..validation.pruner_state import State
from .carried_state import carry_state
from .export import Exporter
from .parameter_groups import NoDecay, ParameterGroup
from .resuming import Resuming
from .run import PruningRun
from .schedule import Schedule
from .settings import checked_settings
from .steering import Row
from .steps import Steps


class Pruner:
    """Prune a model to a preset budget while you train it.

    Args:
        model: The model to prune. It gets gates, in place. It may be sharded by `fully_shard`.
        example_inputs: What `model(...)` takes: a tensor, or a tuple or dict of arguments.
        macs: The budget for the MACs, as a fraction of the original. The exported model meets it.
        params: The same for the parameters. Budgets can be combined.
        latency: The same for the time of a forward pass in eval mode, measured on the example
            and on its device. An export that takes over 5 % more is refused.
        lam: A fixed λ instead of a budget, as in the paper. No ratio is set in advance.
        steps: The number of optimizer steps of the training.
        keep: Patterns of module names whose channels are frozen.
        frozen: The names of frozen groups, each with the reason (from `folder_settings`).
        multiple_of: Every kept width is a multiple of this number. "auto" is 8 in groups of at
            least 64 channels, because odd widths are slow, and 1 in narrower groups and with `lam`.
        min_channels: The least channels that a group keeps; with 0, whole branches may be removed.
        uniform: With True, groups at the same position of repeated blocks keep the same number of
            channels or heads. With patterns of names, equally wide groups that match one stay so.
        schedule: How ε and the cost decrease over the steps.
        rules: Rules for unknown operations, `{torch.ops.…: rule}` (see `polarprune.rules`).
        norms: Make channels prunable that layer, RMS and group norms mix (see `trace`).
        compact: "auto" calls `compact()` whenever an eighth of the MACs has closed, if that pays.

    Attributes:
        model: The model, with its gates.
        example: A copy of the example inputs.
        schedule: The schedule.
        limits: The budgets that were given, by resource; empty with `lam`.
        steps: The number of optimizer steps of the training.
        budget: The limits, and the cost of any set of widths.
        gates: The gate of each prunable group, by group name.
        graph: What `trace` found.
        step_count: The number of optimizer steps done.
        history: One row for every check of the gates on the host (docs/trainers.md lists the keys).
        watchers: Functions that are called with every new row of `history`.
        landed: Whether the budget is met for good.
        landing: The gates and the share of the MACs that were closed at once at the deadline.
        compactions: The number of times that the model was compacted.
        copies: Copies of the gated model that `compact` cuts besides the averages that it finds.
        proof: The largest difference that the last `export` found, for every mode.
        skipped: What the last `export` did not compare, and why.

    Raises:
        PruneError: If an argument is wrong, the model cannot be traced, no channel is prunable, or
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
        self._steps, self._resuming = Steps(self._run), Resuming(self._run)
        carry_state(model, self._resuming)
        self.model, self.example, self.schedule = model, example, schedule
        self.limits, self.steps = settings.limits, settings.steps
        self.graph: Graph = self._run.graph
        self.budget = self._run.budget
        self.gates: dict[str, Gate] = self._run.gates
        self.proof: dict[str, float] = {}
        self.skipped: dict[str, str] = {}

    # --- in the training loop ---------------------------------------------------------------------

    def param_groups(
        self, lr: float, weight_decay: float | None = None, *, no_decay: NoDecay = False, **kw: Any
    ) -> list[ParameterGroup]:
        """Return parameter groups for an optimizer: the model's weights, and the gates.

        Args:
            lr: The learning rate of the weights. The gates get a tenth of it.
            weight_decay: The weight decay of the weights; by default that of the optimizer. The
                gates have none.
            no_decay: Parameters without weight decay: True for biases and the parameters of norms
                (all with fewer than two dimensions), or patterns of names, such as ["*.bias"].
            **kw: Other options of the groups.

        Returns:
            The group of the weights, then that of the weights without decay, if there are any, and
            the group of the gates last.

        Raises:
            PruneError: If a rate is negative or not finite, or a pattern matches nothing.

        Example:
            >>> optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1, weight_decay=5e-4))
        """
        check_rates(lr, weight_decay, kw)
        return self._steps.param_groups(lr, weight_decay, no_decay, kw)

    def attach(self, optimizer: Optimizer, *others: Optimizer) -> None:
        """Move the gates after every step that this optimizer takes.

        Args:
            optimizer: The optimizer of the gates. It may be a wrapper that has a torch optimizer as
                `.optimizer`, such as accelerate's.
            *others: Optimizers of other parameters, so that `compact` cuts their state, too.

        Raises:
            PruneError: If the optimizer does not hold the gates, or decays them, or another one
                holds gates, too.

        Example:
            >>> pruner.attach(optimizer)
        """
        self._steps.attach(*raw_optimizers((optimizer, *others)))

    def step(self) -> None:
        """Move the gates by one step, after a step of an optimizer that is not attached.

        After the announced number of steps, this warns once and leaves the gates as they are.

        Raises:
            PruneError: If an optimizer is attached, gates are not finite, or checkpoints are mixed.

        Example:
            >>> optimizer.step()
            >>> pruner.step()
        """
        self._steps.step_by_hand()

    def replayed(self) -> None:
        """Count a step that a replayed CUDA graph has taken, and check the gates on the host.

        Raises:
            PruneError: If gates are not finite, or checkpoints are mixed.

        Example:
            >>> cuda_graph.replay()  # doctest: +SKIP
            >>> pruner.replayed()  # doctest: +SKIP
        """
        self._steps.finish_replayed_step()

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
        """Return the cost of the model without its closed channels.

        Returns:
            The MACs ("macs"), the number of parameters ("params") and the memory in bytes
            ("memory"). They are exact and need no forward pass.

        Example:
            >>> pruner.cost()["macs"]
            3072
        """
        return self._run.cost()

    def plan(self) -> Plan:
        """Return which channels to keep.

        Returns:
            The indices of the kept channels, by group name, as plain data for `shrink`.

        Example:
            >>> len(pruner.plan()["0"])
            16
        """
        return self._run.plan()

    def report(self) -> Report:
        """Return a report of what happened so far.

        Returns:
            The report as data, with views as text, Markdown, JSON and HTML.

        Example:
            >>> print(pruner.report())  # doctest: +SKIP
        """
        return self._run.report(self.proof, self.skipped)

    # --- smaller models ---------------------------------------------------------------------------

    def compact(
        self,
        *,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        copies: Iterable[nn.Module] | None = None,
        verify: bool = True,
    ) -> None:
        """Remove closed channels from the model in place. Training then continues, but faster.

        Parameters stay the same objects, and the state of the optimizers is cut with them. Under
        DistributedDataParallel all processes must call this; the wrapper is renewed. A captured
        CUDA graph has to be captured again; compiled models are compiled again automatically.

        Args:
            optimizer: Optimizers besides the attached ones; `()` if there are none.
            copies: Copies of the gated model to cut; by default `pruner.copies`. Averages that were
                updated, such as `torch.optim.swa_utils.AveragedModel`, need not be named.
            verify: Whether to compact a copy first and compare it with the model.

        Raises:
            PruneError: If something cannot be cut, or the result differs. Nothing is changed.

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
            *wrong: Not accepted: give the arguments by name.
            model: A copy of the gated model with other weights, such as an average, to be cut by
                the same plan. It may be inside of a wrapper, such as
                `torch.optim.swa_utils.AveragedModel`.
            verify: Whether to compare the small model with the gated one, in train and in eval
                mode, on the example and on other inputs. `proof` has the largest differences.

        Returns:
            A module of the model's own class with smaller layers.

        Raises:
            PruneError: If the budget is not met yet, weights are NaN or infinite, the small model
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
            self.proof, self.skipped = exporter.prove(small)
            exporter.check_latency(small)
        return small

    # --- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the state of the run.

        The state dict of the model contains it already. Store it by itself only if a checkpoint
        drops entries of the model's state that it does not know.

        Returns:
            Tensors and plain data, which `torch.save` can store and `load_state_dict` takes.

        Raises:
            PruneError: If gates are NaN or infinite: such a checkpoint must not replace a good one.

        Example:
            >>> state = pruner.state_dict()
        """
        return self._resuming.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Resume from the state that `state_dict` returned.

        Loading the model's own state does the same. Otherwise load this state before those of the
        model and the optimizer: after a `compact()` it gives the model the widths that these have.

        Args:
            state: A state that `state_dict` returned in a run with the same model and settings.

        Raises:
            PruneError: If the state is damaged, or belongs to another run. Nothing is changed.

        Example:
            >>> pruner.load_state_dict(state)
        """
        self._resuming.load_state_dict(state)
