"""Trace a network once for all the tests of a process that prune it.

Tests that train a network again and again in different ways ask for the fixture `shared_traces`.
A trace takes half of their time, and what they state does not depend on it.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Hashable, Iterator
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polarprune.analysis import trace
from polarprune.channels.graph import Graph

SURVEY = trace.survey
GRAPHS: dict[Hashable, Graph] = {}


def content(tensor: Tensor) -> Hashable:
    """Return what two equal tensors have in common."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tensor.shape, tensor.stride(), hashlib.sha256(data).digest()


def value(given: object) -> Hashable:
    """Return a key for a value: its content, its code, or the object itself, which stays alive."""
    if isinstance(given, Tensor):
        return content(given)
    if isinstance(given, FunctionType):
        cells = [value(cell.cell_contents) for cell in given.__closure__ or ()]
        return given.__code__, *cells, repr(given.__defaults__), repr(given.__kwdefaults__)
    if isinstance(given, (list, tuple, set, dict)):
        return type(given), repr(given)
    return given if isinstance(given, Hashable) else repr(given)


def module_key(path: str, module: nn.Module) -> Hashable:
    """Return the class of a module and everything that it holds except its submodules."""
    held = {**vars(module), **module._parameters, **module._buffers}
    del held["_modules"], held["_parameters"], held["_buffers"]
    return path, type(module), *((name, value(one)) for name, one in held.items())


def key(model: nn.Module, example: Any, options: dict[str, Any]) -> Hashable:
    """Return the same key for models that cannot be told apart, called on equal inputs."""
    modules = [module_key(path, module) for path, module in model.named_modules()]
    inputs = [value(leaf) for leaf in tree_leaves(example)]
    names = tuple(example) if isinstance(example, dict) else type(example)
    return *modules, *inputs, names, repr(options)


def survey_once(model: nn.Module, example: Any, **options: Any) -> Graph:
    """Return the graph that this model had when it was traced before."""
    wanted = key(model, example, options)
    if wanted not in GRAPHS:
        GRAPHS[wanted] = SURVEY(model, example, **options)
    cost = copy.copy(GRAPHS[wanted].cost)
    cost.parts = dict(cost.parts)  # the rest of a graph is frozen; a budget may add a resource
    return replace(GRAPHS[wanted], resources=cost)


def users() -> Iterator[ModuleType]:
    """Yield the modules of the library that call `survey`, as `trace` does."""
    for name, module in list(sys.modules.items()):
        if name.startswith("polarprune.") and vars(module).get("survey") is SURVEY:
            yield module


@pytest.fixture
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every pruner of a test a trace that was made once."""
    found = list(users())
    assert found, "no module calls polarprune.analysis.trace.survey"
    for module in found:
        monkeypatch.setattr(module, "survey", survey_once)
