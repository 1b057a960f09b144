"""Blocks with nothing left to compute: the branch goes, its constant stays.

When a group closes entirely, the layer that read it puts out its bias, the norm after it a function
of that: the same vector at every place of every image. Where this vector is only added to something
(a residual block), the whole branch is taken out of the block's forward and the vector is computed
on two points instead of a feature map. Two, so that batch norm in train mode sees the same
statistics: the mean is the value, the variance is zero.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules import batchnorm

from ..channels.graph import Graph, module_of
from ..errors import PruneError
from ..tracing.model_state import named_tensors
from .captured_forward import CODE, CapturedForward, nothing_lost
from .interpreter import one_point
from .stored_graphs import encode_graph

Edit = dict[str, Any]

_ADD = (operator.add, operator.iadd, torch.add, "add", "add_")
_SAME_MODULES = (
    batchnorm._BatchNorm, nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish, nn.Hardsigmoid,
    nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.Mish, nn.Identity,
)  # fmt: skip
_SAME = (F.relu, F.relu6, F.silu, F.gelu, F.hardswish, F.leaky_relu, F.elu, F.mish, torch.relu,
         torch.sigmoid, torch.tanh, "relu", "relu_", "sigmoid", "tanh")  # fmt: skip


class _Shallow(fx.Tracer):
    """Layers are opaque, and a chunk gives its pieces, so that `list(x.chunk(2))` works."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = super().create_proxy(kind, target, *args, **kwargs)
        pieces = proxy.node.args[1] if target in ("chunk", torch.chunk) else None
        return tuple(proxy[i] for i in range(pieces)) if isinstance(pieces, int) else proxy


_remembered: dict[nn.Module, fx.Graph | None] | None = None


@contextmanager
def remembering() -> Iterator[None]:
    """No module changes inside: each is written down once."""
    global _remembered
    before, _remembered = _remembered, {}
    try:
        yield
    finally:
        _remembered = before


def as_graph(module: nn.Module) -> fx.Graph | None:
    """The module's forward as a graph to look at, or None if that takes an example."""
    if _remembered is None:
        return write_down(module)
    if module not in _remembered:
        _remembered[module] = write_down(module)
    return _remembered[module]


def write_down(module: nn.Module) -> fx.Graph | None:
    """The same anew, to be changed."""
    if "forward" in vars(module):
        return None  # replaced by the user; fx would read the one of the class
    ours = getattr(type(module).forward, CODE, None)
    if ours is not None:
        return copy.deepcopy(ours)  # type: ignore[no-any-return]
    double, family = copy.copy(module), type(module)  # what forward remembers must not stay
    asked: list[bool] = []

    def training(self: nn.Module) -> bool:
        asked.append(True)
        return bool(vars(self)["training"])

    try:
        double.__class__ = type(family.__name__, (family,), {"training": property(training)})
    except Exception:  # a class that minds being derived from
        asked.append(True)
    ways: tuple[Any, ...] = ((), (math,))  # to have functions of numbers written down takes longer
    for wrapped in ways:
        try:
            graphs = []
            for vars(double)["training"] in (True, False):
                with nothing_lost(double):
                    graphs.append(_Shallow(wrapped).trace(double))
                if not asked:
                    return graphs[0]
        except Exception:  # whatever the user's code does with a proxy
            continue
        # else train and eval mode take different ways
        return graphs[0] if str(graphs[0]) == str(graphs[1]) else None
    return None


def owner_of(path: str, modules: dict[str, nn.Module]) -> str:
    """The module in whose forward a layer is called: containers have none of their own."""
    parent = path.rpartition(".")[0]
    while parent and isinstance(modules[parent], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
    return parent


def vanishing(path: str, module: nn.Module, graph: Graph, silent: set[str]) -> list[Edit]:
    """Edits that take branches out of a module, given the layers in it that read no channel."""
    if not _adds_are_plain(path, graph):
        return []
    found = graph.rewritten[path].only if path in graph.rewritten else as_graph(module)
    if found is None or not _can_be_stored(found):
        return []
    constant: set[fx.Node] = set()
    sources = []
    for node in found.nodes:
        if node.op == "call_module" and _join(path, node.target) in silent:
            constant.add(node)
            sources.append(node)
        elif _keeps_constant(module, node) and set(node.all_input_nodes) <= constant:
            constant.add(node)
    ends = [node for node in constant if any(user not in constant for user in node.users)]
    if not all(_is_added(user, constant) for end in ends for user in end.users):
        return []
    return [{"node": node.name, "vector": True} for node in sources] + [
        {"node": node.name, "spread": True} for node in ends
    ]


def _can_be_stored(graph: fx.Graph) -> bool:
    try:
        encode_graph(graph)
    except PruneError:  # the layers stay, as constants
        return False
    return True


def _join(path: str, target: Any) -> str:
    return f"{path}.{target}" if path else str(target)


def _adds_are_plain(path: str, graph: Graph) -> bool:
    """True if all sums in the module are of tensors of one shape, so that a vector will do."""
    adding = (torch.ops.aten.add, torch.ops.aten.add_)
    sums = [op for op in graph.ops_in(path) if op.func._overloadpacket in adding]
    return bool(sums) and all(
        value.shape == op.outs[0].shape for op in sums for value in op.inputs()
    )


def _keeps_constant(module: nn.Module, node: fx.Node) -> bool:
    if not node.all_input_nodes:
        return False
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), _SAME_MODULES)
    return node.op in ("call_function", "call_method") and node.target in _SAME


def _is_added(node: fx.Node, constant: set[fx.Node]) -> bool:
    """True for constants further on, and for a sum of a constant and something that is none."""
    if node in constant:
        return True
    others = [other for other in node.all_input_nodes if other not in constant]
    return node.target in _ADD and len(node.args) == 2 and len(others) == 1 and not node.kwargs


def take_out(graph: fx.Graph, edits: list[Edit]) -> set[str]:
    """Carry out the edits of `vanishing`; gives the children that are not called any more."""
    nodes = {node.name: node for node in graph.nodes}
    idle = {node for node in nodes.values() if not node.users}
    before = {str(node.target) for node in nodes.values() if node.op == "call_module"}
    for edit in edits:
        node = nodes[edit["node"]]
        if "vector" in edit:
            node.args = ()
        else:
            with graph.inserting_after(node):
                vector = graph.call_function(one_point, (node,))
            for user in [user for user in node.users if user.target in _ADD]:
                user.op, user.target = "call_function", operator.add
                user.replace_input_with(node, vector)
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in idle and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    return before - {str(node.target) for node in graph.nodes if node.op == "call_module"}


def without_branches(
    module: nn.Module, code: CapturedForward | None, edits: list[Edit]
) -> tuple[CapturedForward, list[str]]:
    """The forward of a module without the branches, and the children that it no longer calls.

    `code`: its forward, if that was re-emitted; this one is changed.
    """
    if code is None:
        graph = write_down(module)
        assert graph is not None, "edits were made for it"
        return CapturedForward(None, {}, {"train": graph, "eval": graph}), sorted(
            take_out(graph, edits)
        )
    gone = set().union(*(take_out(graph, edits) for graph in code.graphs.values()))
    return code, sorted(gone)


def left_out(path: str, module: nn.Module, graph: Graph, edits: list[Edit]) -> set[str]:
    """The modules that go with the branches."""
    found = graph.rewritten[path].only if path in graph.rewritten else as_graph(module)
    assert found is not None, "edits were made for it"
    gone = take_out(copy.deepcopy(found), edits)
    return {
        _join(path, name)
        for name, _ in module.named_modules()
        if any(name == target or name.startswith(f"{target}.") for target in gone)
    }


def dropped_with(model: nn.Module, graph: Graph, groups: Iterable[str]) -> dict[str, set[str]]:
    """For each group the tensors that go when it closes entirely, though their channels stay."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors: dict[str, list[str]] = {}
    for name, _ in named_tensors(model):
        tensors.setdefault(module_of(name), []).append(name)
    outline, found = graph.outline(), {}
    for group in groups:
        emptied = outline.emptied(outline.settle(outline.alive({group: []})))
        wasted = {name for name, _ in emptied}
        silent = {
            module_of(name)
            for name, axis in emptied
            if axis in graph.sites.get(name, {})
            and all((name, k) not in emptied for k in graph.axes[name].keys() - graph.sites[name])
        }
        gone: set[str] = set()
        for path in dict.fromkeys(owner_of(layer, modules) for layer in sorted(silent)):
            edits = vanishing(path, modules[path], graph, silent)
            gone |= left_out(path, modules[path], graph, edits) if edits else set()
        found[group] = {name for path in gone for name in tensors.get(path, [])} - wasted
    return found
