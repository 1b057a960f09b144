"""Weights that a layer computes in its own forward: standardized, scaled, masked, of low rank.

    weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) * self.gain
    return F.conv2d(x, weight, self.bias, self.stride)

What computes such a weight is moved out of the forward into a parametrization, where `computed`
deals with it as with any other: gates are multiplied into what was computed, and in a model that is
cut the weight is a plain one. The layer computes what it did before.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from ..tracing.copying import copy_model
from ..tracing.model_state import Example
from .capture import capture_all
from .captured_forward import CapturedForward, forward_of, with_method
from .interpreter import runner
from .parametrizations import computed, make_plain, plain_copy
from .stored_graphs import decode, encode

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_GROUPS_ARE = 6  # which argument of these is the number of groups
_MERGES = (
    *_CONVOLUTIONS, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear,
    torch.matmul, torch.mm, torch.addmm, torch.einsum, operator.matmul, "matmul", "mm",
)  # fmt: skip
_MOVES = (
    "t", "transpose", "permute", "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand",
    "contiguous", "to", "type", "float", "double", "half", "bfloat16", "type_as", "view_as",
    "reshape_as", "size",
)  # fmt: skip
_DICE = ("rand", "dropout", "bernoulli", "normal_", "multinomial", "uniform")


@dataclass
class ForwardWeight:
    """A layer whose weight is computed: how, and what it does with it."""

    leaf: str  # the parameter that has the shape of the weight, and takes its place
    names: list[str]  # tensors of the layer that it is computed from
    graph: fx.Graph  # how, as a function of these
    captured: CapturedForward  # the forward, where the weight is read
    unread: list[str]  # tensors of the layer that are needed for the weight only


class Computes(nn.Module):
    """The parametrization."""

    def __init__(self, layer: nn.Module, how: ForwardWeight) -> None:
        super().__init__()
        vars(self)["layer"] = layer  # which holds this one: no child of it
        self.leaf, self.names, self.function = how.leaf, how.names, runner(how.graph)
        self.unread = how.unread

    def forward(self, weight: Tensor) -> Tensor:
        given = [weight if n == self.leaf else getattr(self.layer, n) for n in self.names]
        found: Tensor = self.function(None, *given)
        return found

    def learns(self) -> bool:
        """Does something besides the weight?"""
        return any(getattr(self.layer, n).requires_grad for n in self.names if n != self.leaf)


def find(model: nn.Module, example: Example) -> dict[str, ForwardWeight]:
    """All such layers, by name."""
    paths = [path for path, module in model.named_modules() if _may_compute(module)]
    try:
        codes = capture_all(model, example, paths) if paths else {}
    except Exception:  # a model that does not run so: the look at it will say why
        return {}
    found = {path: _apart(model.get_submodule(path), code) for path, code in codes.items()}
    holders = Counter(id(held) for module in model.modules() for held in _own(module).values())
    return {
        path: one
        for path, one in found.items()
        if one and all(holders[id(_own(model.get_submodule(path))[n])] == 1 for n in one.names)
    }


def _own(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers."""
    return {**module._parameters, **module._buffers}


def _may_compute(module: nn.Module) -> bool:
    """A layer without parts whose code is not torch's own."""
    own = not (getattr(type(module).forward, "__module__", None) or "").startswith("torch.")
    plain = not module._modules and "forward" not in vars(module)
    return own and plain and any(p is not None and p.dim() > 1 for p in module._parameters.values())


def expose(model: nn.Module, found: dict[str, ForwardWeight]) -> nn.Module:
    """Move what computes these weights into parametrizations, in place."""
    for path, one in found.items():
        layer = model.get_submodule(path)
        if not getattr(layer, "polarprune_exposed", False):
            with_method(layer, forward_of(one.captured), widths_change=True)
            type(layer).polarprune_exposed = True  # type: ignore[attr-defined]
            part = Computes(layer, one)
            parametrize.register_parametrization(layer, one.leaf, part, unsafe=True)
    return model


def without_computed_weights(model: nn.Module, found: dict[str, ForwardWeight]) -> nn.Module:
    """The model, or, if it computes weights in one way or the other, a copy that does not."""
    if not found:
        return plain_copy(model)
    model = expose(copy_model(model), found)
    return make_plain(model, computed(model))


# --- the two halves of a forward ------------------------------------------------------------------


def _apart(layer: nn.Module, code: CapturedForward) -> ForwardWeight | None:
    """What computes the weight, and the rest; None if they cannot be told apart, or if there is
    nothing but a weight that was moved about, which can be followed."""
    graph = code.only
    if graph is None:
        return None
    fixed = _from_tensors(graph)
    used = {node for merge in graph.nodes if merge.target in _MERGES
            for node in merge.all_input_nodes if node in fixed}  # fmt: skip
    weights = [found for node in used if (found := _computed(layer, node)) is not None]
    if len(weights) != 1:
        return None
    weight, leaf, names, how = weights[0]
    rest = decode(encode(code))
    for one in rest.graphs.values():
        _read_instead(one, weight.name, leaf, layer)
        if [node.target for node in one.nodes].count(leaf) != 1:
            return None  # it is read as it is, too
    read = {str(n.target) for one in rest.graphs.values() for n in one.nodes if n.op == "get_attr"}
    return ForwardWeight(leaf, names, how, rest, [name for name in names if name not in read])


def _computed(layer: nn.Module, node: fx.Node) -> tuple[fx.Node, str, list[str], fx.Graph] | None:
    """The node, or the one that was moved about to make it, if it takes the place of a weight."""
    parts = _sources(node)
    if _only_moved(parts) or any(_is_impure(part) for part in parts):
        return None
    names = list(dict.fromkeys(str(part.target) for part in parts if part.op == "get_attr"))
    how = _function(parts, names, node)
    leaf = _place(layer, names, how)
    if leaf is not None:
        return node, leaf, names, how
    before = node.all_input_nodes[:1] if node.target in _MOVES else []
    return _computed(layer, before[0]) if before else None


def _from_tensors(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that do not depend on the arguments."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _sources(node: fx.Node) -> list[fx.Node]:
    """The node and all that it depends on, in order."""
    found, rest = {node}, [node]
    while rest:
        new = [n for n in rest.pop().all_input_nodes if n not in found]
        found.update(new)
        rest += new
    return [n for n in node.graph.nodes if n in found]


def _only_moved(parts: list[fx.Node]) -> bool:
    return all(node.op == "get_attr" or node.target in (*_MOVES, getattr) for node in parts)


def _is_impure(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    return node.op == "call_module" or name.endswith("_") or any(x in name for x in _DICE)


def _function(parts: list[fx.Node], names: list[str], weight: fx.Node) -> fx.Graph:
    graph = fx.Graph()
    given = {name: graph.placeholder(f"given_{k}") for k, name in enumerate(names)}
    new: dict[fx.Node, fx.Node] = {}
    for node in parts:
        read = node.op == "get_attr"
        new[node] = given[str(node.target)] if read else graph.node_copy(node, new.__getitem__)
    graph.output(new[weight])
    return graph


def _place(layer: nn.Module, names: list[str], how: fx.Graph) -> str | None:
    """A parameter that has the shape of the weight; the same numbers must come out twice."""
    tensors = _own(layer)
    with torch.no_grad():
        one, two = (runner(how)(None, *(tensors[name] for name in names)) for _ in range(2))
    if not isinstance(one, Tensor) or one.dim() < 2 or not torch.equal(one, two):
        return None
    fits = [
        name
        for name in names
        if isinstance(tensors[name], nn.Parameter)
        and (tensors[name].shape, tensors[name].dtype) == (one.shape, one.dtype)
    ]
    return "weight" if "weight" in fits else next(iter(fits), None)


def _read_instead(graph: fx.Graph, weight: str, leaf: str, layer: nn.Module) -> None:
    """The weight is read, and the groups of a convolution, which may become fewer, too."""
    old = next(node for node in graph.nodes if node.name == weight)
    with graph.inserting_before(old):
        new = graph.get_attr(leaf)
    old.replace_all_uses_with(new)
    for node in graph.nodes:
        if node.target in _CONVOLUTIONS and isinstance(layer, _ConvNd):
            with graph.inserting_before(node):
                if "groups" in node.kwargs:
                    node.update_kwarg("groups", graph.get_attr("groups"))
                elif len(node.args) > _GROUPS_ARE:
                    node.update_arg(_GROUPS_ARE, graph.get_attr("groups"))
    for node in reversed(_sources(old)):
        if not node.users:
            graph.erase_node(node)
