"""Multiply gates into weights, so that a model without gates computes the same function.

W·(g ⊙ x) = (W ⊙ g)·x: the gate of a channel is a factor of all weights that read the channel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..channels.graph import Graph
from ..rewriting.forward_weights import expose
from ..rewriting.parametrizations import is_gated, make_plain, parametrized
from ..rewriting.weighted_norms import FixedWeights, open_encoders, unweigh, weigh, weight_of
from ..torch_internals.markers import attached_state, is_gate_part
from ..tracing.copying import copy_model
from ..tracing.model_state import named_tensors


def fold(model: nn.Module, graph: Graph, gates: Tensor) -> None:
    """Multiply gate values into the weights that read the gated channels, in place.

    Norms over gated channels get the values as fixed weights of their means.

    Args:
        model: A model without gates.
        graph: The graph of this model.
        gates: One value for each unit of the graph.
    """
    make_plain(expose(model, graph.forward_weights), graph.computed)
    tensors = dict(named_tensors(model))
    weigh(model, graph, lambda units: FixedWeights(weight_of(spread(gates, units, 0, 1))))
    open_encoders(model)
    with torch.no_grad():
        for name, axes in graph.sites.items():
            tensor = tensors[name]
            for axis, units in axes.items():
                tensor.mul_(spread(gates, units, axis, tensor.dim()).to(tensor))


def spread(gates: Tensor, units: Tensor, axis: int, dim: int) -> Tensor:
    """Return the gate of every index along one axis, shaped to broadcast with `dim` axes.

    Frozen channels get 1: their unit is -1, the last entry.
    """
    shape = [1] * dim
    shape[axis] = -1
    values = torch.cat([gates, gates.new_ones(1)])
    return values[units.to(gates.device)].reshape(shape)


def plain(model: nn.Module, *, copied: bool = True) -> nn.Module:
    """Return a copy of a gated model without gates; its weights are multiplied by them.

    With `copied=False` it is the model itself that loses its gates.
    """
    model = copy_model(model) if copied else model
    make_plain(model, [name for name, _, _, parts in parametrized(model) if is_gated(parts)])
    unweigh(model)
    drop_hooks(model)
    for module in model.modules():
        hooks = attached_state(module)
        if hooks is not None:
            hooks.leave(module)
    return model


def drop_hooks(model: nn.Module) -> None:
    """Remove the forward hooks that gates registered, in place."""
    for module in model.modules():
        _drop(module, is_gate_part)


def drop_hooks_of(model: nn.Module, kinds: tuple[type, ...]) -> None:
    """Remove the forward hooks of these kinds from a model itself, in place."""
    _drop(model, lambda hook: isinstance(hook, kinds))


def _drop(module: nn.Module, unwanted: Callable[[object], bool]) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if unwanted(hook)]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
