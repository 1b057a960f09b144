"""`Steps`: what a run does before and after every step of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch.optim import Optimizer

from ..gates.sharding import shard_gates
from ..torch_internals.parallel import is_distributed, only_makes_state
from ..validation.compaction import check_held
from ..validation.optimizers import check_gates, check_not_attached
from ..validation.run import check_step_by_hand, warn_of_more_steps
from .parameter_groups import NoDecay, ParameterGroup, weight_groups
from .run import PruningRun


class Steps:
    """Moves the gates after every step of the optimizer, and does what is due then.

    Args:
        run: The run whose gates are moved.
    """

    def __init__(self, run: PruningRun) -> None:
        self._run = run
        self._warned = False  # of steps after the announced ones

    def param_groups(
        self,
        lr: float,
        weight_decay: float | None,
        no_decay: NoDecay,
        options: Mapping[str, object],
    ) -> list[ParameterGroup]:
        """Return what `Pruner.param_groups` returns; `options` are those of all groups."""
        run = self._run
        self._follow_sharding()
        alphas = run.stepper.alphas
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        weights = weight_groups(run.model, alphas, {"lr": lr, **options, **decay}, no_decay)
        gate_lr = lr * run.settings.schedule.gate_lr
        run.attachment.expect_rate(gate_lr)
        return [*weights, {**options, "params": alphas, "lr": gate_lr, "weight_decay": 0.0}]

    def _follow_sharding(self) -> None:
        """Spread the gates over the processes if `fully_shard` has spread the weights."""
        run = self._run
        if run.processes.sharded and not is_distributed(run.stepper.alphas[0]):
            shard_gates(run.model, run.gates)
            run.stepper.follow_gates()

    def attach(self, optimizer: Optimizer, *others: Optimizer) -> None:
        """Move the gates after every step of an optimizer.

        Args:
            optimizer: The optimizer of the gates.
            *others: Optimizers of other parameters.

        Raises:
            PruneError: As `Pruner.attach` does. Nothing is changed.
        """
        run = self._run
        check_not_attached(run.attachment.optimizer)
        check_gates(run.named_alphas(), run.stepper.alphas, optimizer, others)
        if run.compaction.automatic:
            check_held(run.model, (optimizer, *others), "attach(optimizer, other)")
        for one in (optimizer, *others):
            run.compaction.drop_removed(one)
        run.attachment.attach(optimizer, others, run.step_count)
        optimizer.register_step_pre_hook(lambda opt, args, kw: self._before_step(opt))
        optimizer.register_step_post_hook(lambda opt, args, kw: self._after_step(opt))

    def _before_step(self, optimizer: Optimizer) -> None:
        if not only_makes_state(optimizer):
            self._check_step()

    def _after_step(self, optimizer: Optimizer) -> None:
        skipped = bool(getattr(optimizer, "found_inf", None))  # by a fused optimizer itself
        if not skipped and not only_makes_state(optimizer):
            self.move_gates()

    def step_by_hand(self) -> None:
        """Move the gates, where no optimizer is attached that does."""
        attachment = self._run.attachment
        knows_rate = self._run.settings.lam is None or attachment.knows_rate
        check_step_by_hand(attachment.optimizer, rate_known=knows_rate)
        self.move_gates()

    def move_gates(self) -> None:
        """Move the gates by one step, and count it."""
        run = self._run
        run.attachment.check(run.step_count)  # an optimizer was compared before its step
        if self._hold_if_done():
            return
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not captured:
            self._check_gates_if_due()
        run.stepper.follow_device()
        if run.settings.lam is not None:
            run.stepper.set_scale(run.settings.lam * run.attachment.gate_lr())
        run.stepper()
        if not captured:
            self._finish_step()

    def finish_replayed_step(self) -> None:
        """Do what `move_gates` does on the host, after a CUDA graph has moved the gates."""
        self._check_step()
        if not self._run.steering.is_done:
            self._check_gates_if_due()
            self._finish_step()

    def _check_step(self) -> None:
        """Refuse a step if parts of different checkpoints were loaded, or if processes differ."""
        self._run.attachment.check_step(self._run.step_count)
        self._hold_if_done()

    def _hold_if_done(self) -> bool:
        """After the announced steps, leave the gates as they are, and warn once."""
        run = self._run
        run.processes.join(run.stepper.alphas, self._facts)
        if not run.steering.is_done:
            return False
        run.stepper.hold()
        run.copies.follow()
        if not self._warned:
            self._warned = True
            warn_of_more_steps(run.settings.steps)
        return True

    def _check_gates_if_due(self) -> None:
        if self._run.steering.is_due:
            self._run.check_finite(self._run.stepper.flat())

    def _finish_step(self) -> None:
        """Count the step, check the gates if that is due, and compact if that saves time."""
        run, progress = self._run, self._run.steering.progress
        due = run.steering.count_step(float(run.attachment.gate_lr()))
        run.attachment.note_step(progress.step)
        if due:
            macs, steps = progress.history[-1]["macs"], run.settings.steps
            if run.compaction.pays(macs, steps - progress.step, steps, progress.landed):
                run.compaction.try_to(run.compact)
        run.copies.follow()

    def _facts(self) -> dict[str, object]:
        """Return what must be equal in all processes that train the model."""
        run, settings = self._run, self._run.settings
        groups = [(name, one.size, one.minimum) for name, one in run.graph.prunable.items()]
        return {
            "the arguments of the Pruner": (settings.as_data(), asdict(settings.schedule)),
            "the groups of channels": groups,
            "the steps that were taken": run.step_count,
            "the gates": (run.stepper.last().tolist(), run.compaction.present.tolist()),
            "the history": run.steering.progress.history,
        }
