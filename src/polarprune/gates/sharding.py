"""Gates in a model whose parameters are spread over several processes by `fully_shard` (FSDP2).

A gate is read by many layers, and layers are sharded one by one. So all gates of a model are one
group of their own: it is gathered before the model's forward and stays gathered until the end of
the backward pass, where FSDP2 averages its gradients and spreads them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..channels.graph import Graph
from ..errors import PruneError
from ..rewriting.forward_weights import expose
from ..torch_internals.markers import attached_state, gate_part
from ..torch_internals.parallel import (
    follow_parametrizations,
    has_root,
    in_group,
    is_distributed,
    shard_together,
    sharded_modules,
    without_fully_shard,
)
from ..tracing.copying import copy_model
from ..tracing.model_state import Example, named_tensors
from ..validation.models import check_is_model, check_not_tensor_parallel
from .folding import drop_hooks_of
from .fused import unfuse_gates
from .gate import Gate
from .install import insert_gates, install, make_gates, undone_on_error

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def gathered_copy(model: nn.Module) -> nn.Module:
    """Return a plain copy of a sharded model with unsharded weights, equal in all processes.

    All of them must call this. Buffers, such as the statistics of batch norms, are those of the
    first one: `fully_shard` does not keep them equal.
    """
    for module in sharded_modules(model):
        module.reshard()
    memo: dict[int, object] = {}
    for _, tensor in named_tensors(model):
        if is_distributed(tensor):
            values = cast("DTensor", tensor.detach()).full_tensor().clone()
            memo[id(tensor)] = nn.Parameter(values, tensor.requires_grad)
    states = [attached_state(module) for module in model.modules()]
    memo |= {id(one): one.inert() for one in states if one is not None}
    with without_fully_shard(model):
        full = copy_model(model, memo)
    drop_hooks_of(full, (_Gather, _Spread))
    mesh = _weight(model).device_mesh
    for buffer in full.buffers():
        for axis in reversed(range(mesh.ndim)):
            torch.distributed.broadcast(buffer, group=mesh.get_group(axis), group_src=0)
    return full


def _weight(model: nn.Module) -> DTensor:
    """Return a weight that is spread over processes."""
    return next(parameter for parameter in model.parameters() if is_distributed(parameter))


def unsharded_model(model: nn.Module) -> nn.Module:
    """Return the model, or a gathered copy if `fully_shard` spread it over processes."""
    check_is_model(model)
    if not sharded_modules(model):
        return model
    check_not_tensor_parallel(model)
    return gathered_copy(model)


def install_gates(
    model: nn.Module, unsharded: nn.Module, graph: Graph, example: Example
) -> dict[str, Gate]:
    """Install gates in a model that may be sharded already, or may be sharded later.

    Args:
        model: The model to change.
        unsharded: What `unsharded_model` returned for it. The gates are checked there.
        graph: The graph of the unsharded model.
        example: Inputs on which the gates are checked.

    Returns:
        The gate of each prunable group, by the name of the group.

    Raises:
        PruneError: If gates cannot be installed or have no effect. The model is unchanged then.
    """
    gates = install(unsharded, graph, example)
    if unsharded is not model:
        gates = _install_in_sharded(model, graph)
        shard_gates(model, gates)
    elif in_group():
        model.register_forward_pre_hook(_Expectation(next(iter(gates.values()))))
    return gates


def _install_in_sharded(model: nn.Module, graph: Graph) -> dict[str, Gate]:
    """Install gates in a model to which `fully_shard` was applied before.

    They were checked in a gathered copy, for which `graph` was made.
    """
    gates = make_gates(model, graph)
    with undone_on_error(model):
        expose(model, graph.forward_weights)
        insert_gates(model, graph, gates, torch.ones(graph.units, dtype=torch.bool, device="cpu"))
        follow_parametrizations(model)
    return gates


def shard_gates(model: nn.Module, gates: Mapping[str, Gate]) -> None:
    """Spread the gates of a sharded model like its weights, in place; `alpha` is replaced."""
    unfuse_gates(model)
    shard_together(list(gates.values()), _weight(model).device_mesh)
    for gate in gates.values():
        gate.register_load_state_dict_pre_hook(_spread_loaded)  # type: ignore[no-untyped-call]
    first = cast("FSDPModule", next(iter(gates.values())))
    model.register_forward_pre_hook(_Gather(first))
    model.register_forward_hook(_Spread(first), always_call=True)


@gate_part
class _Expectation:
    """A forward pre-hook that raises, once, if `fully_shard` was applied too late for the gates."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.looked = gate, False

    def __call__(self, model: nn.Module, args: object) -> None:
        if not self.looked and not torch.compiler.is_compiling():
            self.looked = True
            check_gates_follow(model, self.gate.alpha)


def check_gates_follow(model: nn.Module, alpha: Tensor) -> None:
    """Refuse a sharded model whose gates are not spread."""
    if sharded_modules(model) and not is_distributed(alpha):
        raise PruneError(
            "fully_shard was applied after the optimizer was built, so the gates of the processes "
            "would differ. Call fully_shard first, then build the optimizer with "
            "pruner.param_groups(...)."
        )


@gate_part
class _Gather:
    """A forward pre-hook of the model that gathers all gates."""

    def __init__(self, first: FSDPModule) -> None:
        self.first = first  # the group is the same for all gates

    def __call__(self, model: nn.Module, args: object) -> None:
        if not has_root(self.first):
            raise PruneError(
                "fully_shard was applied to parts of the model only: as the last call, apply it to "
                "the model that the Pruner has, or to one that contains it."
            )
        self.first.unshard()


@gate_part
class _Spread:
    """A forward hook of the model that spreads the gates again if there will be no backward."""

    def __init__(self, first: FSDPModule) -> None:
        self.first = first

    def __call__(self, model: nn.Module, args: object, out: object) -> None:
        if not torch.is_grad_enabled():
            self.first.reshard()


def _spread_loaded(gate: nn.Module, state: dict[str, Tensor], prefix: str, *more: object) -> None:
    """Take this process's part of an unsharded α that is being loaded.

    A gate is in a state dict under several names; `torch.distributed.checkpoint` spreads one.
    """
    alpha, value = cast(Gate, gate).alpha, state.get(f"{prefix}alpha")
    if isinstance(value, Tensor) and is_distributed(alpha) and not is_distributed(value):
        part = alpha.detach().clone()
        if value.shape == part.shape:
            write_pieces([part], [value])
            state[f"{prefix}alpha"] = part


# --- one vector of all gates ----------------------------------------------------------------------


def unsharded_vector(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors; those that are spread over processes are gathered in one collective."""
    if not is_distributed(tensors[0]):
        return torch.cat(list(tensors))
    spread = cast("list[DTensor]", tensors)
    local = spread[0].to_local()
    found = local.new_zeros(sum(tensor.numel() for tensor in spread))
    for tensor, piece in zip(spread, found.split([t.numel() for t in spread]), strict=True):
        piece[_held(tensor)] = tensor.to_local()
    mesh = spread[0].device_mesh
    torch.distributed.all_reduce(found, group=mesh.get_group(mesh.ndim - 1))
    return found


def write_pieces(tensors: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Overwrite vectors; of those that are spread over processes, the part held here."""
    torch._foreach_copy_(*_held_here(tensors, pieces))


def have_pieces(tensors: Sequence[Tensor], pieces: Sequence[Tensor]) -> bool:
    """Return whether vectors, or the part of them held here, have these values."""
    both = zip(*_held_here(tensors, pieces), strict=True)
    return all(torch.equal(one.to(other.dtype), other) for one, other in both)


def _held_here(
    tensors: Sequence[Tensor], pieces: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the local parts of vectors, and those parts of the pieces."""
    if not is_distributed(tensors[0]):
        return list(tensors), list(pieces)
    spread = cast("list[DTensor]", tensors)
    parts = [piece[_held(one)] for one, piece in zip(spread, pieces, strict=True)]
    return [one.to_local() for one in spread], parts


def _held(tensor: DTensor) -> slice:
    """Return which part of a vector this process holds: `torch.chunk` of the last mesh axis."""
    mesh = tensor.device_mesh
    size = -(-tensor.numel() // mesh.size(mesh.ndim - 1))
    start = min(mesh.get_local_rank(mesh.ndim - 1) * size, tensor.numel())
    return slice(start, start + tensor.to_local().numel())
