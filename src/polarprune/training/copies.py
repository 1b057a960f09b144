"""Copies of the gated model, such as averages of its weights.

A deep copy of a gated model registers itself with the pruner, by the hooks of its state dict
(`CarriedState`). A copy whose gates are changed from outside is a running average. An average of α
would be a half-open gate, and an average of ε would be wrong. So such copies get α and ε of the
model after every step, and their next update averages equal values. A copy that nothing changes is
a snapshot, and is left as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..gates.gate import Gate
from ..torch_internals.markers import attached_state
from ..tracing.copying import copy_model
from ..validation.compaction import check_copy
from ..validation.optimizers import checked_copies
from .rebuild import gates_in, same_shapes


def gated_part(model: nn.Module) -> nn.Module:
    """Return the copy of a gated model inside of a wrapper, such as `AveragedModel`."""
    return next((m for m in model.modules() if attached_state(m) is not None), model)


class Copy:
    """A deep copy of the gated model.

    Args:
        model: The copy, which may still be under construction.
        seen: α of its gates when it was copied.
    """

    def __init__(self, model: nn.Module, seen: Tensor) -> None:
        self.model = weakref.ref(model)
        self.seen = seen
        self.changed = torch.zeros((), dtype=torch.bool)  # since then; stays on the device
        self._gates: list[Gate] = []

    def gates(self, original: nn.Module, gates: Mapping[str, Gate]) -> list[Gate]:
        """Return its gates, in the order of the original's."""
        model = self.model()
        if not self._gates and model is not None:
            self._gates = list(gates_in(model, original, gates).values())
        return self._gates

    def follow(self, mine: list[Gate], theirs: list[Gate]) -> None:
        """Copy α and ε of the original if α was changed, without waiting for the device."""
        alpha = _joined(mine)
        seen = self.seen.to(alpha)
        if seen.shape == alpha.shape:  # else it was compacted in between
            self.changed = self.changed.to(alpha.device) | (seen != alpha).any()
        self.seen = torch.where(self.changed, _joined(theirs).to(alpha), alpha)
        parts = self.seen.split([gate.alpha.numel() for gate in mine])
        torch._foreach_copy_([gate.alpha for gate in mine], list(parts))
        for gate, other in zip(mine, theirs, strict=True):
            gate.eps.copy_(torch.where(self.changed, other.eps.to(gate.eps), gate.eps))


def _joined(gates: list[Gate]) -> Tensor:
    return torch.cat([gate.alpha.detach() for gate in gates])


class Copies:
    """All registered copies of the gated model of a pruner.

    Args:
        model: The gated model.
        gates: The gate of each group.

    Attributes:
        named: Copies that the user names in `pruner.copies`.
    """

    def __init__(self, model: nn.Module, gates: Mapping[str, Gate]) -> None:
        self.model, self.gates = model, gates
        self.named: list[nn.Module] = []
        self._found: list[Copy] = []

    def add(self, source: nn.Module, copy: nn.Module) -> None:
        """Register a deep copy of the gated model, or of a copy of it."""
        alpha = _joined(list(gates_in(source, self.model, self.gates).values()))
        self._found = [one for one in self._found if one.model() is not None]
        self._found.append(Copy(copy, alpha))

    def name(self, copies: list[nn.Module]) -> None:
        """Replace the list of copies that the user names."""
        self.named = copies

    @torch.no_grad()
    def follow(self) -> None:
        """Copy α and ε of the model into averages."""
        own = list(self.gates.values())
        for one in self._found:
            mine = one.gates(self.model, self.gates)
            if one.model() is not None and [*map(_size, mine)] == [*map(_size, own)]:
                one.follow(mine, own)

    def to_cut(self, given: object = None, *, snapshots: bool = False) -> list[nn.Module]:
        """Return the copies to cut with the model.

        Args:
            given: Copies that the user names; by default those in `named`.
            snapshots: Whether to cut copies that were never changed, too.
        """
        self.follow()  # finds averages that were updated since the last step
        told = [gated_part(one) for one in checked_copies(self.named if given is None else given)]
        found = [
            model
            for one in self._found
            if (model := one.model()) is not None and same_shapes(model, self.model)
            if snapshots or bool(one.changed)
        ]
        return list({id(one): one for one in [*told, *found]}.values())

    def with_own_gates(self, average: nn.Module) -> nn.Module:
        """Return a copy of an average, with α and ε of the model.

        Raises:
            PruneError: If it is not a copy of the gated model.
        """
        copy = gated_part(average) if isinstance(average, nn.Module) else average
        fits = isinstance(copy, nn.Module) and same_shapes(copy, self.model)
        check_copy("export", copy, fits=fits)
        copy = copy_model(copy)
        mine = gates_in(copy, self.model, self.gates)
        with torch.no_grad():
            for name, gate in self.gates.items():
                mine[name].alpha.copy_(gate.alpha)
                mine[name].eps.copy_(gate.eps)
        return copy


def _size(gate: Gate) -> int:
    return gate.alpha.numel()
