"""Norms over channels with gate-weighted statistics: Σ g x / Σ g instead of the mean.

If all weights are 0 or 1, this is the norm over the channels that are kept. So the channels of a
residual stream can close although a layer norm, RMS norm or group norm reads all of them. The
gated model computes the weighted norm; the exported model has the plain norm, only narrower. A gate
g has the weight min(1, 2g): 0 if closed and 1 from one half on, so that gates that are nearly 1 do
not disturb the statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx, nn

from ..channels.graph import Graph
from ..channels.labels import support
from ..torch_internals.class_swaps import leave_derived_class
from ..torch_internals.fused_encoders import set_packing
from ..torch_internals.markers import gate_part
from ..tracing.tape import Op, Tape
from .captured_forward import CapturedForward, Refused
from .installed_forward import with_forward
from .weighted_statistics import WEIGHTED

WEIGHTS = "polar_weights"  # the name of the child that returns the weights of the channels


def weighted(captured: CapturedForward, nodes: Mapping[str, Mapping[str, int]]) -> CapturedForward:
    """Replace statistics in the graphs by weighted ones, in place.

    Args:
        captured: The module's forward.
        nodes: For each mode, the names of the nodes and the axis of their channels.
    """
    for mode, axes in nodes.items():
        graph = captured.graphs[mode]
        for node in [node for node in graph.nodes if node.name in axes]:
            with graph.inserting_before(node):
                gates = graph.call_module(WEIGHTS)
                new = graph.call_function(
                    WEIGHTED[node.target],
                    (gates, axes[node.name], *node.args),
                    {k: v for k, v in node.kwargs.items() if k != "dtype"},
                )
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    return captured


def weights_in(
    graph: Graph, path: str, captured: CapturedForward
) -> tuple[Tensor, CapturedForward] | Refused:
    """Return the channels over which a module takes statistics, and its weighted forward."""
    mine = {item.op: item.layer for item in graph.statistics if item.op.module == path}
    first = next(iter(mine.values())).flatten()
    if not all(torch.equal(layer.flatten(), first) for layer in mine.values()):
        return Refused("it is called on several sets of channels")
    nodes: dict[str, dict[str, int]] = {}
    for mode, tape in zip(("eval", "train"), graph.tapes, strict=False):
        found = _statistic_nodes(path, tape, mine, captured.graphs[mode])
        if isinstance(found, Refused):
            return found
        nodes[mode] = found
    if len(graph.tapes) == 1:  # train mode did not run on the example
        nodes["train"] = nodes["eval"] if captured.only else {}
    return first, weighted(copy.deepcopy(captured), nodes)


def _statistic_nodes(
    path: str, tape: Tape, statistics: Mapping[Op, Tensor], graph: fx.Graph
) -> dict[str, int] | Refused:
    """Return the nodes of a graph that compute statistics, with the axis of their channels."""
    code = {node.name: node for node in graph.nodes}
    ends = [(end, name) for (where, name), end in tape.nodes.positions.items() if where == path]
    found: dict[str, int] = {}
    for number, op in enumerate(tape.ops):
        # The first node that ended after this operation computed it.
        name = (
            next((name for end, name in ends if end > number), None) if op in statistics else None
        )
        if name is None:
            continue  # another operation, or one of a later call of the module
        if code[name].target not in WEIGHTED:
            return Refused(f"its code computes {op.name} in a way that has no weighted form")
        found[name] = support(statistics[op])[0]
    return found or Refused("its statistics were not found in its code")


def weight_of(gates: Tensor) -> Tensor:
    """Return the weights of gates in a mean: min(1, 2g)."""
    return (2 * gates).clamp(max=1)


def weigh(model: nn.Module, graph: Graph, make: Callable[[Tensor], nn.Module]) -> None:
    """Let the norms over prunable channels use weights, in place.

    Args:
        model: The model.
        graph: What `trace` found, with `norms=True`.
        make: Returns a module that computes the weights of these units.
    """
    modules = dict(model.named_modules())
    for path, units in graph.weights.items():
        if path in modules:  # otherwise it was removed with its branch
            with_forward(modules[path], graph.weighted[path], path=path)
            modules[path].add_module(WEIGHTS, make(units))


def unweigh(model: nn.Module) -> None:
    """Undo `weigh`: let the norms compute plain statistics again."""
    for module in model.modules():
        if WEIGHTS in module._modules:
            del module._modules[WEIGHTS]
            leave_derived_class(module)


def open_encoders(model: nn.Module) -> None:
    """Turn off the fused kernels of torch's encoders, which would ignore weights in norms.

    A layer with hooks does not use the fused kernel. An encoder must not pack its inputs for it.
    """
    for module in model.modules():
        inside = any(WEIGHTS in inner._modules for inner in module.modules())
        if inside and isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_hook(_block_fused_kernel)
        elif inside and isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            module.register_forward_pre_hook(_disable_packing)
            module.register_forward_hook(_enable_packing, always_call=True)


@gate_part
def _block_fused_kernel(module: nn.Module, args: object, out: object) -> None:
    """Do nothing: a layer with any hook does not use the fused kernel."""


@gate_part
def _disable_packing(module: nn.TransformerEncoder, args: object) -> None:
    set_packing(module, False)


@gate_part
def _enable_packing(module: nn.TransformerEncoder, args: object, out: object) -> None:
    set_packing(module, True)


class FixedWeights(nn.Module):
    """Weights that do not change."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value, persistent=False)

    def forward(self) -> Tensor:
        """Return the weights."""
        return self.value
