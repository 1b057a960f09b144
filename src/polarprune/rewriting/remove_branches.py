"""Remove branches of residual blocks that closed entirely.

When all channels of a group are closed, the layer that reads them returns its bias, and a norm
after it a function of that: the same vector at every position of every image. If this vector is
only added to something, as in a residual block, the branch is removed from the block's forward.
The vector is then computed from two points instead of a feature map. Two points give batch norm in
train mode the same statistics: the mean is the value, the variance is zero.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules import batchnorm

from ..channels.graph import Graph, module_of
from ..channels.notes import Note
from ..errors import PruneError
from ..tracing.model_state import named_tensors
from .captured_forward import CapturedForward, Refused, notes_of
from .node_functions import one_point
from .node_names import describe
from .stored_graphs import encode_graph
from .symbolic_graphs import editable_graph, readable_graph

# {"node": name, "vector": True}: the layer returns its bias at two points, without an input.
# {"node": name, "spread": True}: one point of the node's result is added to the other operand.
Edit = dict[str, object]

_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
# Modules and functions that map a constant feature map to a constant feature map.
_POINTWISE_MODULES = (
    batchnorm._BatchNorm,
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Sigmoid,
    nn.Tanh,
    nn.LeakyReLU,
    nn.ELU,
    nn.PReLU,
    nn.Mish,
    nn.Identity,
)
_POINTWISE = (
    F.relu,
    F.relu6,
    F.silu,
    F.gelu,
    F.hardswish,
    F.leaky_relu,
    F.elu,
    F.mish,
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    "relu",
    "relu_",
    "sigmoid",
    "tanh",
)


def owner_of(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the module whose forward calls a layer: containers have no forward of their own."""
    parent = path.rpartition(".")[0]
    while parent and isinstance(modules[parent], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
    return parent


def removable_branches(
    path: str, module: nn.Module, graph: Graph, constant_layers: set[str]
) -> list[Edit] | Refused:
    """Find the branches of a module that can be removed.

    Args:
        path: The name of the module.
        module: The module.
        graph: What `trace` found.
        constant_layers: Names of layers that read no channel any more: they return their bias.

    Returns:
        Edits for `remove`; empty if the module adds no branch. `Refused` if it adds a branch that
        is constant now, but the branch cannot be removed.
    """
    if not _adds_equal_shapes(path, graph):
        return []
    found = _readable(path, module, graph)
    if isinstance(found, Refused):
        return found
    sources, constant = _constant_nodes(path, module, found, constant_layers)
    ends = [node for node in constant if any(user not in constant for user in node.users)]
    users = [user for end in ends for user in end.users if user not in constant]
    others = [user for user in users if not _is_added(user, constant)]
    if others:
        added = len(others) < len(users)
        return Refused(f"{describe(others[0])} also reads its result") if added else []
    return [{"node": node.name, "vector": True} for node in sources] + [
        {"node": node.name, "spread": True} for node in ends
    ]


def _readable(path: str, module: nn.Module, graph: Graph) -> fx.Graph | Refused:
    """Return the module's graph, if it can be stored in a file."""
    if path in graph.rewritten:
        only = graph.rewritten[path].only
        found = only or Refused("its forward differs between train and eval mode")
    else:
        found = readable_graph(module)
    if isinstance(found, Refused):
        return found
    try:
        encode_graph(found)
    except PruneError as error:
        return Refused(str(error))
    return found


def _constant_nodes(
    path: str, module: nn.Module, graph: fx.Graph, constant_layers: set[str]
) -> tuple[list[fx.Node], dict[fx.Node, None]]:
    """Return the nodes of these layers, and all nodes whose result is a constant."""
    sources: list[fx.Node] = []
    constant: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_module" and _join(path, node.target) in constant_layers:
            constant[node] = None
            sources.append(node)
        elif _keeps_constant(module, node) and constant.keys() >= set(node.all_input_nodes):
            constant[node] = None
    return sources, constant


def _join(path: str, target: object) -> str:
    return f"{path}.{target}" if path else str(target)


def _adds_equal_shapes(path: str, graph: Graph) -> bool:
    """Return whether the module adds tensors, all of one shape: a vector can replace those."""
    adding = (torch.ops.aten.add, torch.ops.aten.add_)
    sums = [op for op in graph.ops_in(path) if op.func._overloadpacket in adding]
    return bool(sums) and all(
        value.shape == op.outs[0].shape for op in sums for value in op.inputs()
    )


def _keeps_constant(module: nn.Module, node: fx.Node) -> bool:
    """Return whether a node maps constants to a constant."""
    if not node.all_input_nodes:
        return False
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), _POINTWISE_MODULES)
    return node.op in ("call_function", "call_method") and node.target in _POINTWISE


def _is_added(node: fx.Node, constant: Mapping[fx.Node, None]) -> bool:
    """Return whether a node adds a constant to something that is not constant."""
    others = [other for other in node.all_input_nodes if other not in constant]
    return (
        node.target in _ADDITIONS and len(node.args) == 2 and len(others) == 1 and not node.kwargs
    )


def remove(graph: fx.Graph, edits: list[Edit]) -> set[str]:
    """Apply the edits of `removable_branches` to a graph, in place.

    Returns:
        The children that the graph does not call any more.
    """
    nodes = {node.name: node for node in graph.nodes}
    idle = {node for node in nodes.values() if not node.users}
    before = _called(graph)
    for edit in edits:
        node = nodes[str(edit["node"])]
        if "vector" in edit:
            node.args = ()
        else:
            _add_one_point(graph, node)
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in idle and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    return before - _called(graph)


def _add_one_point(graph: fx.Graph, node: fx.Node) -> None:
    """Let additions use one point of a constant, which broadcasting spreads."""
    with graph.inserting_after(node):
        vector = graph.call_function(one_point, (node,))
    for user in [user for user in node.users if user.target in _ADDITIONS]:
        user.op, user.target = "call_function", operator.add
        user.replace_input_with(node, vector)


def _called(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_module"}


def without_branches(
    module: nn.Module, code: CapturedForward | None, edits: list[Edit]
) -> tuple[CapturedForward, list[str]]:
    """Return the forward of a module without branches, and the children it no longer calls.

    Args:
        module: The module.
        code: Its forward if that was rewritten for other reasons; changed in place.
        edits: What `removable_branches` returned.
    """
    if code is None:
        graph = editable_graph(module)
        assert isinstance(graph, fx.Graph), "edits were made for it"
        gone = remove(graph, edits)
        return CapturedForward(None, {}, {"train": graph, "eval": graph}), sorted(gone)
    gone = set().union(*(remove(graph, edits) for graph in code.graphs.values()))
    return code, sorted(gone)


def removed_modules(path: str, module: nn.Module, graph: Graph, edits: list[Edit]) -> set[str]:
    """Return the names of the modules that are removed with the branches."""
    found = _readable(path, module, graph)
    assert isinstance(found, fx.Graph), "edits were made for it"
    gone = remove(copy.deepcopy(found), edits)
    return {
        _join(path, name)
        for name, _ in module.named_modules()
        if any(name == target or name.startswith(f"{target}.") for target in gone)
    }


def removed_with_groups(
    model: nn.Module, graph: Graph, groups: Iterable[str]
) -> tuple[dict[str, set[str]], list[Note]]:
    """Find what is removed, besides its channels, when a group closes entirely.

    Returns:
        The tensors of removed branches for each group, and a note for each module whose branch
        cannot be removed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors: dict[str, list[str]] = {}
    for name, _ in named_tensors(model):
        tensors.setdefault(module_of(name), []).append(name)
    outline, found, refused = graph.outline(), {}, dict[str, Refused]()
    for group in groups:
        emptied = outline.emptied(outline.without_unread(outline.kept_units({group: []})))
        constant_layers, gone = _constant_layers(graph, emptied), set[str]()
        for path in dict.fromkeys(owner_of(layer, modules) for layer in sorted(constant_layers)):
            edits = removable_branches(path, modules[path], graph, constant_layers)
            if isinstance(edits, Refused):
                refused[path] = edits
            elif edits:
                gone |= removed_modules(path, modules[path], graph, edits)
        wasted = {name for name, _ in emptied}
        found[group] = {name for path in gone for name in tensors.get(path, [])} - wasted
    return found, notes_of(refused, "a branch that closes stays as a constant")


def _constant_layers(graph: Graph, emptied: set[tuple[str, int]]) -> set[str]:
    """Return the layers that still have outputs but read no channel."""
    return {
        module_of(name)
        for name, axis in emptied
        if axis in graph.sites.get(name, {})
        and all((name, k) not in emptied for k in graph.axes[name].keys() - graph.sites[name])
    }
