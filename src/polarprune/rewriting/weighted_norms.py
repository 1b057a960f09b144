"""Norms over channels with gate-weighted statistics: Σ g x / Σ g in place of the mean.

Where the weights are 0 or 1 this is the norm over the channels that stay, so the channels of a
residual stream can close although a layer norm, RMS norm or group norm reads all of them. The
gated model computes the weighted norm; what is exported has the plain norm again, only narrower.
A gate g weighs min(1, 2g): nothing when closed, in full from one half on, so that gates which are
nearly 1 do not leave statistics that are nearly right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..channels.graph import Graph
from ..channels.labels import support
from .captured_forward import CapturedForward, with_forward

WEIGHTS = "polar_weights"  # the child that knows the gates


def weighted_mean(g: Tensor, axis: int, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Σ g x / Σ g over `dim`, which includes `axis`."""
    return (x * _laid(g, axis, x)).mean(dim, keepdim) * (g.numel() / g.sum()).to(x.dtype)


def _laid(g: Tensor, axis: int, x: Tensor) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    return g.to(x.dtype).reshape(shape)


def _mean(g: Tensor, axis: int, x: Tensor, dim: Any, keepdim: bool = False, **kw: Any) -> Tensor:
    return weighted_mean(g, axis, x, dim, keepdim)


def _var_mean(
    g: Tensor,
    axis: int,
    x: Tensor,
    dim: Any,
    unbiased: bool | None = True,
    keepdim: bool = False,
    correction: int | None = None,
) -> tuple[Tensor, Tensor]:
    correction = int(unbiased is not False) if correction is None else correction
    mean = weighted_mean(g, axis, x, dim, True)
    var = weighted_mean(g, axis, (x - mean).square(), dim, True)
    count = x.numel() / mean.numel() * (g.sum() / g.numel()).to(x.dtype)
    var = var * count / (count - correction).clamp(min=1e-6)
    return (var, mean) if keepdim else (var.squeeze(dim), mean.squeeze(dim))


def _var(g: Tensor, axis: int, x: Tensor, *args: Any, **kw: Any) -> Tensor:
    return _var_mean(g, axis, x, *args, **kw)[0]


def _sum(g: Tensor, axis: int, x: Tensor, dim: Any, keepdim: bool = False, **kw: Any) -> Tensor:
    return (x * _laid(g, axis, x)).sum(dim, keepdim)


def _normalize(
    g: Tensor, axis: int, x: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, **kw: Any
) -> Tensor:
    """A closed channel adds nothing to the length of a vector."""
    powers = (x.abs() ** p * _laid(g, axis, x)).sum(dim, keepdim=True)
    return x / (powers ** (1 / p)).clamp(min=eps)


def _layer_norm(
    g: Tensor,
    axis: int,
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
    **kw: Any,
) -> Tensor:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    x = _normalised(g, axis, x, dims, eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _normalised(g: Tensor, axis: int, x: Tensor, dims: list[int], eps: float) -> Tensor:
    x = x - weighted_mean(g, axis, x, dims, True)
    return x * torch.rsqrt(weighted_mean(g, axis, x.square(), dims, True) + eps)


def _rms_norm(
    g: Tensor,
    axis: int,
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    x = x * torch.rsqrt(weighted_mean(g, axis, x.square(), dims, True) + eps)
    return x if weight is None else x * weight


def _group_norm(
    g: Tensor,
    axis: int,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Tensor:
    """Of one group: with more, whole groups go and no weights are needed."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    x = _normalised(g, axis, x, list(range(1, x.dim())), eps)
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


_WEIGHTED: dict[Any, Callable[..., Any]] = {
    "mean": _mean, torch.mean: _mean, "sum": _sum, torch.sum: _sum,
    "var": _var, torch.var: _var, torch.var_mean: _var_mean, F.normalize: _normalize,
    F.layer_norm: _layer_norm, torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm, torch.group_norm: _group_norm,
}  # fmt: skip


def can_be_weighted(node: fx.Node) -> bool:
    return node.target in _WEIGHTED


def weighted(captured: CapturedForward, nodes: Mapping[str, Mapping[str, int]]) -> CapturedForward:
    """The captured with these nodes (mode -> name -> axis of the channels) weighted."""
    for mode, places in nodes.items():
        graph = captured.graphs[mode]
        for node in [node for node in graph.nodes if node.name in places]:
            with graph.inserting_before(node):
                gates = graph.call_module(WEIGHTS)
                new = graph.call_function(
                    _WEIGHTED[node.target],
                    (gates, places[node.name], *node.args),
                    {k: v for k, v in node.kwargs.items() if k != "dtype"},
                )
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    return captured


def weights_in(
    graph: Graph, path: str, captured: CapturedForward
) -> tuple[Tensor, CapturedForward] | None:
    """The channels that a module takes means over, and what it computes with weights."""
    mine = {item.op: item.layer for item in graph.statistics if item.op.module == path}
    first = next(iter(mine.values())).flatten()
    if not all(torch.equal(layer.flatten(), first) for layer in mine.values()):
        return None  # called on several sets of channels
    nodes: dict[str, dict[str, int]] = {}
    for mode, tape in zip(("eval", "train"), graph.tapes, strict=False):
        code = {node.name: node for node in captured.graphs[mode].nodes}
        ends = [(end, name) for (where, name), end in tape.node_positions.items() if where == path]
        for number, op in enumerate(tape.ops):
            if op in mine:
                name = next((name for end, name in ends if end > number), None)
                if name is not None and not can_be_weighted(code[name]):
                    return None
                if name is not None:  # else it belongs to a later call of the module
                    nodes.setdefault(mode, {})[name] = support(mine[op])[0]
        if mode not in nodes:
            return None
    if len(graph.tapes) == 1:
        nodes["train"] = nodes["eval"] if captured.only else {}
    return first, weighted(copy.deepcopy(captured), nodes)


def weight_of(gates: Tensor) -> Tensor:
    """What a gate weighs in a mean."""
    return (2 * gates).clamp(max=1)


def weigh(model: nn.Module, graph: Graph, make: Callable[[Tensor], nn.Module]) -> None:
    """Let the norms over open channels take their weights from what `make(units)` gives."""
    modules = dict(model.named_modules())
    for path, units in graph.weights.items():
        if path in modules:  # else it went with its branch
            with_forward(modules[path], graph.weighted[path])
            modules[path].add_module(WEIGHTS, make(units))


def open_encoders(model: nn.Module) -> None:
    """Keep torch's encoders off their fused path, which knows nothing of weights in norms.

    A layer with hooks does not take it; and an encoder must not pack its inputs for it.
    """
    for module in model.modules():
        inside = any(WEIGHTS in inner._modules for inner in module.modules())
        if inside and isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_hook(_watching)
        elif inside and isinstance(module, nn.TransformerEncoder):
            packs = bool(getattr(module, "use_nested_tensor", False))
            if packs:
                module.register_forward_pre_hook(_unpacked)
                module.register_forward_hook(_packed, always_call=True)


def _watching(module: nn.Module, args: Any, out: Any) -> None:
    """Nothing: that it is there is enough."""


def _unpacked(module: Any, args: Any) -> None:
    module.use_nested_tensor = False


def _packed(module: Any, args: Any, out: Any) -> None:
    module.use_nested_tensor = True


_HOOKS: tuple[Any, ...] = (_watching, _unpacked, _packed)
for _hook in _HOOKS:
    _hook.is_gate = True


def unweigh(model: nn.Module) -> None:
    """Back to plain norms."""
    for module in model.modules():
        if WEIGHTS in module._modules:
            del module._modules[WEIGHTS]
            module.__class__ = type(module).__bases__[0]


class Fixed(nn.Module):
    """Weights that do not change."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value, persistent=False)

    def forward(self) -> Tensor:
        return self.value
