"""The processes that train one model together, with DistributedDataParallel or `fully_shard`.

Every process has its own pruner. All of them make the same decisions, because these depend only on
values that are equal in all processes: the gates, their averaged gradients, and the number of
steps. This is checked before the first step. Where results may differ, as in a proof on an example,
the processes exchange them and act alike.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import PruneError
from ..gates.sharding import check_gates_follow
from ..torch_internals.parallel import (
    rewrap,
    several_processes,
    sharded_modules,
    why_not_rewrapped,
    wrappers_of,
)
from ..validation.models import check_not_tensor_parallel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


class Processes:
    """The other processes that train the model, if there are any.

    Args:
        model: The model of the pruner.

    Attributes:
        joined: Whether the first step was taken, so that the wrapper of the model is known.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.joined = model, False
        self._together = False
        self._group: torch.distributed.ProcessGroup | None = None

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` was applied to the model."""
        return bool(sharded_modules(self.model))

    def join(self, alphas: list[nn.Parameter], facts: Callable[[], Mapping[str, object]]) -> None:
        """Find the other processes before the first step, and compare these facts with theirs.

        Raises:
            PruneError: If the model was parallelized in a way that cannot be pruned, or if the
                facts differ.
        """
        if self.joined:
            return
        check_not_tensor_parallel(self.model)
        wrappers = wrappers_of(self.model)
        if self.sharded:
            check_gates_follow(self.model, alphas[0])
            mesh = cast("DTensor", alphas[0]).device_mesh
            self._together = mesh.ndim == 1 and several_processes()
            self._group = mesh.get_group() if mesh.ndim == 1 else None
        elif wrappers:
            self._together, self._group = True, wrappers[0].process_group
        self.joined = True
        if self._together:
            self._compare(facts())

    def _compare(self, facts: Mapping[str, object]) -> None:
        """Raise in all processes if a fact differs in one of them."""
        mine = {key: hashlib.sha256(repr(v).encode()).hexdigest() for key, v in facts.items()}
        every: list[dict[str, str]] = [{}] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(every, mine, self._group)
        differing = [key for key in mine if len({one.get(key) for one in every}) > 1]
        if differing:
            raise PruneError(
                f"the processes that train this model differ in {' and in '.join(differing)}. "
                f"Build the model and the Pruner with the same arguments in every process, and "
                f"load the same checkpoint."
            )

    def agreed(self, decide: Callable[[], T]) -> T:
        """Return what `decide` returns, unless it raises in one of the processes."""
        error: PruneError | None = None
        result: list[T] = []
        try:
            result.append(decide())
        except PruneError as refusal:
            error = refusal
        if self._together:
            every = [""] * torch.distributed.get_world_size(self._group)
            torch.distributed.all_gather_object(every, str(error or ""), self._group)
            others = [text for text in every if text]
            error = error or (PruneError(f"{others[0]} (in another process)") if others else None)
        if error is not None:
            raise error
        return result[0]

    def shared(self, entry: object) -> object:
        """Return what all processes load into a sharded model, even if only one of them has it.

        `broadcast_from_rank0` of `torch.distributed.checkpoint` passes on parameters and buffers.
        """
        if not (self.sharded and several_processes()):
            return entry
        every: list[object] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, entry is not None)
        if all(every) or not any(every):
            return entry
        held = [entry.cpu() if isinstance(entry, Tensor) else entry]
        torch.distributed.broadcast_object_list(held, src=every.index(True))
        return held[0]

    def wrappers(self) -> list[DistributedDataParallel]:
        """Return the DDP modules that a compaction has to renew.

        Raises:
            PruneError: If that is impossible.
        """
        if self.sharded:
            raise PruneError(
                "compact: the weights are spread over several processes by fully_shard, where they "
                "cannot be cut. Nothing was changed; continue training without compact(), and "
                "export at the end."
            )
        found = wrappers_of(self.model)
        if any(map(why_not_rewrapped, found)):
            gc.collect()  # a wrapper that the user has deleted may still be there
            found = wrappers_of(self.model)
        for wrapper in found:
            why = why_not_rewrapped(wrapper)
            if why:
                raise PruneError(
                    f"compact: DistributedDataParallel cannot be renewed, because {why}. Nothing "
                    f"was changed. Remove the wrapper, call pruner.compact(), and wrap the model "
                    f"again: model = ddp.module; del ddp; pruner.compact(); "
                    f"ddp = DistributedDataParallel(model)."
                )
        return found

    def renew(self, wrappers: list[DistributedDataParallel]) -> None:
        """Update these wrappers for the new shapes."""
        for wrapper in wrappers:
            rewrap(wrapper)
