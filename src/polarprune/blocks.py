"""Blocks with nothing left to compute: the branch goes, its constant stays.

When a group closes entirely, the layer that read it puts out its bias, the norm after it a function
of that: the same vector at every place of every image. Where this vector is only added to something
(a residual block), the whole branch is taken out of the block's forward and the vector is computed
on two points instead of a feature map. Two, so that batch norm in train mode sees the same
statistics: the mean is the value, the variance is zero.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules import batchnorm

from .groups import Graph
from .rewire import Edit, as_graph

_ADD = (operator.add, operator.iadd, torch.add, "add", "add_")
_SAME_MODULES = (
    batchnorm._BatchNorm, nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish, nn.Hardsigmoid,
    nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.Mish, nn.Identity,
)  # fmt: skip
_SAME = (F.relu, F.relu6, F.silu, F.gelu, F.hardswish, F.leaky_relu, F.elu, F.mish, torch.relu,
         torch.sigmoid, torch.tanh, "relu", "relu_", "sigmoid", "tanh")  # fmt: skip


def owner_of(path: str, modules: dict[str, nn.Module]) -> str:
    """The module in whose forward a layer is called: containers have none of their own."""
    parent = path.rpartition(".")[0]
    while parent and isinstance(modules[parent], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
    return parent


def vanishing(path: str, module: nn.Module, graph: Graph, silent: set[str]) -> list[Edit]:
    """Edits that take branches out of a module, given the layers in it that read no channel."""
    found = as_graph(module)
    if found is None or not _adds_are_plain(path, graph):
        return []
    constant: set[fx.Node] = set()
    sources = []
    for node in found.graph.nodes:
        if node.op == "call_module" and _join(path, node.target) in silent:
            constant.add(node)
            sources.append(node)
        elif _keeps_constant(found, node) and set(node.all_input_nodes) <= constant:
            constant.add(node)
    ends = [node for node in constant if any(user not in constant for user in node.users)]
    if not all(_is_added(user, constant) for end in ends for user in end.users):
        return []
    return [{"node": node.name, "vector": True} for node in sources] + [
        {"node": node.name, "spread": True} for node in ends
    ]


def _join(path: str, target: Any) -> str:
    return f"{path}.{target}" if path else str(target)


def _adds_are_plain(path: str, graph: Graph) -> bool:
    """True if all sums in the module are of tensors of one shape, so that a vector will do."""
    sums = [
        op
        for tape in graph.tapes
        for op in tape.ops
        if op.module == path
        and op.func._overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
    ]
    return bool(sums) and all(
        value.shape == op.outs[0].shape for op in sums for value in op.inputs()
    )


def _keeps_constant(graph: fx.GraphModule, node: fx.Node) -> bool:
    if not node.all_input_nodes:
        return False
    if node.op == "call_module":
        return isinstance(graph.get_submodule(str(node.target)), _SAME_MODULES)
    return node.op in ("call_function", "call_method") and node.target in _SAME


def _is_added(node: fx.Node, constant: set[fx.Node]) -> bool:
    """True for constants further on, and for a sum of a constant and something that is none."""
    if node in constant:
        return True
    others = [other for other in node.all_input_nodes if other not in constant]
    return node.target in _ADD and len(node.args) == 2 and len(others) == 1 and not node.kwargs


def take_out(graph: fx.GraphModule, edits: list[Edit]) -> None:
    """Carry out the edits of `vanishing`; what only fed the branch goes with it."""
    nodes = {node.name: node for node in graph.graph.nodes}
    idle = {node for node in nodes.values() if not node.users}
    for edit in edits:
        node = nodes[edit["node"]]
        if "vector" in edit:
            node.args = ()
        else:
            with graph.graph.inserting_after(node):
                vector = graph.graph.call_function(one_point, (node,))
            for user in [user for user in node.users if user.target in _ADD]:
                user.op, user.target = "call_function", operator.add
                user.replace_input_with(node, vector)
    for node in reversed(list(graph.graph.nodes)):
        if not node.users and node not in idle and node.op not in ("placeholder", "output"):
            graph.graph.erase_node(node)
    called = {node.target for node in graph.graph.nodes if node.op == "call_module"}
    for target in {n.target for n in nodes.values() if n.op == "call_module"} - called:
        graph.delete_submodule(str(target))


def left_out(path: str, module: nn.Module, edits: list[Edit]) -> set[str]:
    """The modules that go with the branches."""
    graph = as_graph(module)
    assert graph is not None, "edits were made for it"
    before = {name for name, _ in graph.named_modules()}
    take_out(graph, edits)
    return {_join(path, name) for name in before - {name for name, _ in graph.named_modules()}}


def one_point(x: torch.Tensor) -> torch.Tensor:
    return x[:1]
