"""Trace a network once for all the tests of a process that prune it.

Tests that train a network again and again in different ways ask for the fixture `shared_traces`.
A trace takes half of their time, and what they state does not depend on it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
from collections.abc import Hashable
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
    form = str(tensor.device), str(tensor.dtype), tensor.shape, tensor.stride()
    if tensor.is_meta:
        return form
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return *form, hashlib.sha256(data).digest()


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
    mode = torch.is_inference_mode_enabled(), torch.get_default_device(), torch.get_default_dtype()
    return *modules, *inputs, names, repr(options), mode


def survey_once(model: nn.Module, example: Any, **options: Any) -> Graph:
    """Return the graph that this model had when it was traced before."""
    try:
        wanted = key(model, example, options)
    except Exception:  # not a model, or one without values: the library says so
        return SURVEY(model, example, **options)
    if wanted not in GRAPHS:
        GRAPHS[wanted] = SURVEY(model, example, **options)
    cost = copy.copy(GRAPHS[wanted].cost)
    cost.parts = dict(cost.parts)  # the rest of a graph is frozen; a budget may add a resource
    return replace(GRAPHS[wanted], resources=cost)


@functools.cache
def users(imported: int) -> list[ModuleType]:
    """Return the modules of the library that call `survey`, as `trace` does.

    Args:
        imported: How many modules Python has imported: the search takes long, and nothing changes
            while their number stays the same.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("polarprune.")]
    found = [module for module in modules if vars(module).get("survey") is SURVEY]
    assert found, f"none of {imported} modules calls polarprune.analysis.trace.survey"
    return found


@pytest.fixture
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every pruner of a test a trace that was made once."""
    for module in users(len(sys.modules)):
        monkeypatch.setattr(module, "survey", survey_once)
