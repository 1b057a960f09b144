"""Separate a layer's graph into the part that computes its weight and the part that uses it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from .captured_forward import CapturedForward, Refused
from .interpreter import runner
from .stored_graphs import decode, encode

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_GROUPS_POSITION = 6  # of the argument `groups` in these
# Operations that contract the channels of an input with those of a weight.
_CONTRACTIONS = (
    *_CONVOLUTIONS,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.linear,
    torch.matmul,
    torch.mm,
    torch.addmm,
    torch.einsum,
    operator.matmul,
    "matmul",
    "mm",
)
# Operations that move a weight or change its type: channels can be followed through them.
_MOVEMENTS = frozenset(
    {"t", "transpose", "permute", "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand"}
    | {"contiguous", "to", "type", "float", "double", "half", "bfloat16", "type_as", "view_as"}
    | {"reshape_as", "size"}
)
_RANDOM = ("rand", "dropout", "bernoulli", "normal_", "multinomial", "uniform")


@dataclass
class ForwardWeight:
    """How a layer computes its weight, and what it does with it.

    Attributes:
        leaf: The parameter that has the shape of the weight. The computed weight replaces it.
        names: The tensors of the layer that the weight is computed from.
        graph: The computation, as a function of these.
        captured: The layer's forward, which reads the computed weight as `leaf`.
        unread: The tensors of the layer that only this computation reads.
    """

    leaf: str
    names: list[str]
    graph: fx.Graph
    captured: CapturedForward
    unread: list[str]


@dataclass
class _Computed:
    """A node whose value can replace a parameter."""

    node: fx.Node
    leaf: str
    names: list[str]
    graph: fx.Graph


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters and buffers of a module itself, not of its children."""
    return {**module._parameters, **module._buffers}


def separate_weight(layer: nn.Module, code: CapturedForward) -> ForwardWeight | Refused | None:
    """Separate the code that computes the weight from the rest of the forward.

    Returns:
        Both parts; or the reason why they cannot be separated; or None if the forward computes no
        weight, but uses one as it is or only moves it, through which channels can be followed.
    """
    graph = code.only
    if graph is None:
        return Refused("its forward differs between train and eval mode")
    constant = _input_independent(graph)
    contractions = [node for node in graph.nodes if node.target in _CONTRACTIONS]
    used = {n: None for merge in contractions for n in merge.all_input_nodes if n in constant}
    if contractions and not used:
        return Refused("its weight depends on its input")
    candidates = [_replaceable(layer, node) for node in used]
    weights = [found for found in candidates if isinstance(found, _Computed)]
    if len(weights) > 1:
        return Refused("its forward computes several weights")
    if not weights:
        return next((found for found in candidates if isinstance(found, Refused)), None)
    return _with_rest(layer, code, weights[0])


def _with_rest(
    layer: nn.Module, code: CapturedForward, weight: _Computed
) -> ForwardWeight | Refused:
    """Return the computed weight together with a forward that reads it."""
    rest = decode(encode(code))
    for one in rest.graphs.values():
        _read_weight(one, weight.node.name, weight.leaf, layer)
        if [node.target for node in one.nodes].count(weight.leaf) != 1:
            return Refused(f"its forward also reads {weight.leaf} directly")
    read = {str(n.target) for one in rest.graphs.values() for n in one.nodes if n.op == "get_attr"}
    unread = [name for name in weight.names if name not in read]
    return ForwardWeight(weight.leaf, weight.names, weight.graph, rest, unread)


def _replaceable(layer: nn.Module, node: fx.Node) -> _Computed | Refused | None:
    """Return a computed weight: this node, or the node that was moved to make it."""
    parts = _sources(node)
    if _is_only_moved(parts):
        return None
    if any(_is_impure(part) for part in parts):
        return Refused("its weight is random, or computed in place or by a child module")
    names = list(dict.fromkeys(str(part.target) for part in parts if part.op == "get_attr"))
    graph = _function(parts, names, node)
    leaf = _matching_parameter(layer, names, graph)
    if leaf is not None:
        return _Computed(node, leaf, names, graph)
    before = node.all_input_nodes[:1] if node.target in _MOVEMENTS else []
    found = _replaceable(layer, before[0]) if before else None
    return found or Refused("no parameter has the shape and type of the weight that it computes")


def _input_independent(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that do not depend on the inputs of the graph."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the node and all nodes that it depends on, in the order of the graph."""
    found, rest = {node}, [node]
    while rest:
        new = [n for n in rest.pop().all_input_nodes if n not in found]
        found.update(new)
        rest += new
    return [n for n in node.graph.nodes if n in found]


def _is_only_moved(parts: list[fx.Node]) -> bool:
    return all(node.op == "get_attr" or node.target in {*_MOVEMENTS, getattr} for node in parts)


def _is_impure(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    return node.op == "call_module" or name.endswith("_") or any(x in name for x in _RANDOM)


def _function(parts: list[fx.Node], names: list[str], weight: fx.Node) -> fx.Graph:
    """Return a graph that computes the weight from these tensors."""
    graph = fx.Graph()
    given = {name: graph.placeholder(f"given_{k}") for k, name in enumerate(names)}
    new: dict[fx.Node, fx.Node] = {}
    for node in parts:
        read = node.op == "get_attr"
        new[node] = given[str(node.target)] if read else graph.node_copy(node, new.__getitem__)
    graph.output(new[weight])
    return graph


def _matching_parameter(layer: nn.Module, names: list[str], graph: fx.Graph) -> str | None:
    """Return a parameter that has the shape and type of the computed weight.

    None if there is none, or if two computations give different weights.
    """
    tensors = own_tensors(layer)
    with torch.no_grad():
        one, two = (runner(graph)(None, *(tensors[name] for name in names)) for _ in range(2))
    if not isinstance(one, Tensor) or one.dim() < 2 or not torch.equal(one, two):
        return None
    fits = [
        name
        for name, held in ((name, tensors[name]) for name in names)
        if isinstance(held, nn.Parameter) and (held.shape, held.dtype) == (one.shape, one.dtype)
    ]
    return "weight" if "weight" in fits else next(iter(fits), None)


def _read_weight(graph: fx.Graph, weight: str, leaf: str, layer: nn.Module) -> None:
    """Let the graph read the weight from `leaf`, and remove the nodes that computed it.

    It also reads the number of groups of a convolution, which pruning may reduce.
    """
    old = next(node for node in graph.nodes if node.name == weight)
    with graph.inserting_before(old):
        new = graph.get_attr(leaf)
    old.replace_all_uses_with(new)
    if isinstance(layer, _ConvNd):
        _read_groups(graph)
    for node in reversed(_sources(old)):
        if not node.users:
            graph.erase_node(node)


def _read_groups(graph: fx.Graph) -> None:
    """Let convolutions read their number of groups from the layer."""
    for node in graph.nodes:
        if node.target in _CONVOLUTIONS:
            with graph.inserting_before(node):
                if "groups" in node.kwargs:
                    node.update_kwarg("groups", graph.get_attr("groups"))
                elif len(node.args) > _GROUPS_POSITION:
                    node.update_arg(_GROUPS_POSITION, graph.get_attr("groups"))
