"""A module's forward as a graph, traced by torch.fx without an example.

`capture` needs a run on the example and records the branch that was taken. Here fx runs the forward
on plain proxies, which fails for code that branches on values or sizes, but gives a graph that is
valid for all inputs. `remove_branches` reads and edits it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Target

from ..torch_internals.class_swaps import derive_class
from ..torch_internals.markers import source_graph
from ..torch_internals.patches import OneThreadTracer
from ..tracing.source_lines import SOURCE_LINE, user_line
from .capture import reason_of
from .captured_forward import Refused
from .side_effects import side_effects_refused

_cache: ContextVar[dict[nn.Module, fx.Graph | Refused] | None] = ContextVar("_cache", default=None)


class _LayerTracer(OneThreadTracer):
    """Records layers as single nodes with their source lines, and a chunk's pieces as a tuple."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Trace through containers only."""
        return type(m).forward is not nn.Sequential.forward

    def create_proxy(self, kind: str, target: Target, *args: Any, **kwargs: Any) -> Any:
        """Return a tuple for `x.chunk(2)`, so that `list(x.chunk(2))` works."""
        proxy: Any = super().create_proxy(kind, target, *args, **kwargs)
        if kind.startswith("call"):
            proxy.node.meta[SOURCE_LINE] = user_line()
        pieces = proxy.node.args[1] if target in ("chunk", torch.chunk) else None
        return tuple(proxy[i] for i in range(pieces)) if isinstance(pieces, int) else proxy


@contextmanager
def graphs_cached() -> Iterator[None]:
    """Let `readable_graph` trace each module once. No module may change in this context.

    A nested context has no effect.
    """
    token = _cache.set({} if (known := _cache.get()) is None else known)
    try:
        yield
    finally:
        _cache.reset(token)


def readable_graph(module: nn.Module) -> fx.Graph | Refused:
    """Return the module's forward as a graph that the caller must not change."""
    cache = _cache.get()
    if cache is None:
        return _graph(module)
    if module not in cache:
        cache[module] = _graph(module)
    return cache[module]


def editable_graph(module: nn.Module) -> fx.Graph | Refused:
    """Return a copy of the graph for the caller to edit, or why fx cannot trace the forward."""
    return copy.deepcopy(readable_graph(module))


def _graph(module: nn.Module) -> fx.Graph | Refused:
    """Return the module's forward as a graph, or the reason why fx cannot trace it."""
    if "forward" in vars(module):  # fx would trace the forward of the class
        return Refused("its forward was replaced on the instance")
    source = source_graph(type(module).forward)
    if source is not None:
        return source
    # fx records functions of `math` only on request, and tracing takes longer then.
    first = _traced(module, _LayerTracer())
    return _traced(module, _LayerTracer((math,))) if isinstance(first, Refused) else first


_MODES_DIFFER = Refused("its forward differs between train and eval mode")


def _traced(module: nn.Module, tracer: _LayerTracer) -> fx.Graph | Refused:
    """Trace a copy of the module; in both modes if the forward asks for the mode."""
    double = copy.copy(module)  # attributes that forward sets stay off the original
    asked = _note_reads_of_training(double)
    graphs = []
    try:
        for training in (True, False):
            vars(double)["training"] = training
            with side_effects_refused(double):
                graphs.append(tracer.trace(double))
            if not asked:
                return graphs[0]
    except Exception as error:  # the user's code may raise anything on a proxy
        return Refused(reason_of(error))
    return graphs[0] if str(graphs[0]) == str(graphs[1]) else _MODES_DIFFER


def _note_reads_of_training(module: nn.Module) -> list[bool]:
    """Return a list that is not empty once code has read `module.training`."""
    asked: list[bool] = []

    def training(self: nn.Module) -> bool:
        asked.append(True)
        return bool(vars(self)["training"])

    try:
        derive_class(module, {"training": property(training)})
    except Exception:  # the class does not accept subclasses: assume that the mode is read
        asked.append(True)
    return asked
