"""`Resuming`: the whole state of a run as one dict, and a run that continues from it."""

from __future__ import annotations

import copy
from dataclasses import asdict

import torch
from torch import nn

from ..torch_internals.parallel import in_group
from ..validation.pruner_state import State, check_state
from .run import PruningRun
from .state_bytes import size_of_header


class Resuming:
    """Collects the state of a run, and restores it.

    The hooks of the model's state dict (`CarriedState`) use it through the protocol `Run`.

    Args:
        run: The run.
    """

    def __init__(self, run: PruningRun) -> None:
        self._run = run

    def current_state(self) -> State:
        """Return the state; its history is that of the run, not a copy."""
        run, progress = self._run, self._run.steering.progress
        sizes = [group.size for group in run.graph.prunable.values()]
        return {
            "settings": run.settings.as_data(),
            "schedule": asdict(run.settings.schedule),
            "step": progress.step,
            "landed": progress.landed,
            "landing": dict(progress.landing),
            "alpha": dict(zip(run.gates, run.stepper.last().split(sizes), strict=True)),
            "present": run.compaction.present.clone(),
            "compacted": run.compaction.share,
            "given_up": run.compaction.gave_up,
            "stepper": run.stepper.state(),
            "history": progress.history,
            **({"latency": run.stopwatch.state()} if run.stopwatch else {}),
        }

    def state_dict(self) -> State:
        """Return a copy of the state.

        Raises:
            PruneError: If gates are NaN or infinite.
        """
        stepper = self._run.stepper
        flat = stepper.last()
        self._run.check_finite(torch.cat([flat, stepper.worth.to(flat)]))
        state = self.current_state()
        return {**state, "history": copy.deepcopy(state["history"])}

    def load_state_dict(self, state: object) -> None:
        """Check a state that the user loads by itself, and continue from it as it is."""
        self._restore(state)
        self._run.attachment.check.accept()
        self._run.attachment.note_step(self._run.step_count)

    # --- used by the hooks of the model -----------------------------------------------------------

    def entry_size(self) -> int:
        """Return the least size of the header of the stored state.

        `torch.distributed.checkpoint` loads into tensors of the size that was written, so the size
        must not depend on the step.
        """
        if not in_group():
            return 0
        return size_of_header(self.current_state(), self._run.steering.most_rows)

    def shared_entry(self, entry: object) -> object:
        """Return the stored state, from another process if only that one has read it."""
        return self._run.processes.shared(entry)

    def resume(self, state: object) -> None:
        """Check a state that was loaded with the model's, and continue from it."""
        self._restore(state)
        self._run.attachment.check.model_loaded()

    def check_loaded_gates(self) -> None:
        """Compare the gates with the state after a state dict was loaded into the model."""
        self._run.attachment.check.gates_loaded(own=self._run.stepper.has_own_gates())

    def add_copy(self, source: nn.Module, copy: nn.Module) -> None:
        """Register a deep copy of the gated model, or of a copy of it."""
        self._run.copies.add(source, copy)

    def _restore(self, given: object) -> None:
        """Check a state, and hand its parts to the parts of the run."""
        run = self._run
        state = check_state(given, self.current_state(), run.graph, run.settings.deadline)
        optimizers = run.attachment.optimizers()
        run.compaction.restore(state["present"].cpu(), state["given_up"], optimizers)
        alpha = torch.cat([state["alpha"][name] for name in run.gates])
        run.stepper.restore(alpha, state["stepper"])
        run.steering.restore(state["step"], state["landed"], state["landing"], state["history"])
        if run.stopwatch is not None:
            run.stopwatch.load(state["latency"])
