"""Modules with a rewritten forward can be pickled, sent to other processes, and copied."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import polarprune as pp
from polarprune import PruneError
from polarprune.rewriting.installed_forward import ForwardClass
from polarprune.rewriting.stored_graphs import decode, encode
from polarprune.surgery.proof import difference
from polarprune.torch_internals.markers import class_origin
from tests.helpers.processes import environment


class Halves(nn.Module):
    """A module that selects channels by position, so its forward is rewritten for every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.fc(x)
        return self.other(hidden[:, :4].relu() + hidden[:, 8:]).tanh()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Halves(), Halves()
        self.lift = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.lift(self.one(x)))


def small() -> nn.Module:
    model = Twice()
    graph = pp.trace(model, torch.randn(2, 4))
    assert set(graph.rewritten) == {"one", "two"}
    return pp.shrink(model, graph, {name: [0] for name in graph.prunable})


def origin(module: nn.Module) -> ForwardClass:
    found = class_origin(type(module))
    assert isinstance(found, ForwardClass)
    return found


def test_a_new_process_reads_the_pickle(tmp_path: Path) -> None:
    model, x = small(), torch.randn(3, 4)
    torch.save({"model": model, "x": x, "y": model(x)}, tmp_path / "model.pt")
    code = (
        "import sys, torch; held = torch.load(sys.argv[1], weights_only=False)\n"
        "model = held['model'].train(); y = model(held['x']); y.sum().backward()\n"
        "assert torch.equal(y, held['y']) and model.one.fc.weight.grad is not None\n"
        "import polarprune as pp; pp.save(model, sys.argv[2])"
    )
    command = [sys.executable, "-c", code, tmp_path / "model.pt", tmp_path / "small.safetensors"]
    subprocess.run(command, check=True, env=environment(), timeout=120)
    again = pp.load(tmp_path / "small.safetensors", model=Twice())
    assert torch.equal(again(x), model(x))


def test_modules_of_one_class_share_it_after_unpickling() -> None:
    model = small()
    twin = copy.deepcopy(model.one)
    assert type(twin) is type(model.one)
    pair = pickle.loads(pickle.dumps([model.one, twin]))
    assert type(pair[0]) is type(pair[1]) and isinstance(pair[0], Halves)


def test_a_model_that_was_pruned_twice_is_pickled() -> None:
    first = small()
    graph = pp.trace(first, torch.randn(2, 4))
    second = pp.shrink(first, graph, {"lift": [0, 1]} if "lift" in graph.prunable else {})
    again = pickle.loads(pickle.dumps(second))
    x = torch.randn(3, 4)
    assert difference(second, again, (x,), training=False) == 0


def test_a_loaded_model_keeps_its_limits_in_a_pickle(tmp_path: Path) -> None:
    pp.save(small(), tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=Twice())
    again = pickle.loads(pickle.dumps(loaded))
    assert origin(loaded.one).from_file and origin(again.one).from_file
    assert not origin(small().one).from_file


def test_code_in_a_pickle_is_checked_before_it_becomes_a_class() -> None:
    made, (base, data, *flags) = origin(small().one).__reduce__()
    forged = copy.deepcopy(data)
    forged["train"][1][1:3] = ["call_function", "os.system"]
    with pytest.raises(PruneError, match=r"the function 'os\.system', which is not allowed"):
        made(base, forged, *flags)
    assert encode(decode(data)) == data and made(base, data, *flags).base is Halves


def test_a_fixed_number_stays_fixed_in_a_copy() -> None:
    model = small()
    model.one.__dict__["gain"] = 2.0
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(PruneError, match=r"Halves\.gain = 3\.0: the forward of this module"):
            other.one.gain = 3.0


def test_torch_still_refuses_the_pickle_of_a_parametrized_module() -> None:
    """Gates are parametrizations, so a gated model can only be stored as its `state_dict`."""
    module = small().one
    parametrize.register_parametrization(module.fc, "weight", nn.Identity())
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(module)
