"""Errors of a rewritten forward name the module, the user's source line and the operation."""

from __future__ import annotations

import inspect
import operator
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import polarprune as pp
from polarprune.rewriting.node_functions import OtherSizes
from polarprune.rewriting.node_names import describe
from polarprune.rewriting.remove_branches import removable_branches
from polarprune.rewriting.symbolic_graphs import editable_graph
from polarprune.tracing.source_lines import SOURCE_LINE


class Rows(nn.Module):
    """A module whose code contains a width, and a number that is valid for one size only."""

    def forward(self, x: Tensor) -> Tensor:
        count = int(x.shape[2] * 2)
        one, two = x.split([3, 5], 1)
        return torch.cat([two, one], 1) / count


LINE = inspect.getsourcelines(Rows.forward)[1] + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 1), nn.ModuleList([Rows()])
        self.tail = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.blocks[0](self.stem(x)))


@pytest.fixture(scope="module")
def small() -> nn.Module:
    model = Net()
    graph = pp.trace(model, torch.randn(2, 3, 6, 6))
    assert list(graph.rewritten) == ["blocks.0"]
    return pp.shrink(model, graph, {"stem": [0, 2, 6]})


def saved_and_loaded(model: nn.Module, folder: Path) -> nn.Module:
    pp.save(model, folder / "small.safetensors")
    text = (folder / "small.safetensors").read_bytes()
    assert f"test_messages.py:{LINE}".encode() in text and str(Path.cwd()).encode() not in text
    return pp.load(folder / "small.safetensors", model=Net())


WAYS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "as it was exported": lambda model, folder: model,
    "saved and loaded": saved_and_loaded,
    "pickled": lambda model, folder: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("way", WAYS)
def test_another_size_is_refused_with_the_module_and_the_line(
    way: str, small: nn.Module, tmp_path: Path
) -> None:
    model = WAYS[way](small, tmp_path)
    wanted = (
        rf"blocks\.0 \(Rows\), test_messages\.py:{LINE}, operation \*: the forward of this module "
        r"was rewritten for the sizes of the example: it expects 12 but got 10\. Trace with "
    )
    with pytest.raises(OtherSizes, match=f"^{wanted}"):
        model(torch.randn(2, 3, 5, 5))


def test_another_call_is_refused_with_the_module(small: nn.Module) -> None:
    with pytest.raises(pp.PruneError, match=r"^blocks\.0 \(Rows\): called with different arg"):
        small.get_submodule("blocks.0")(torch.randn(2, 3, 6, 6), more=1)


def test_operations_are_named_as_in_the_code_of_the_user() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    named = {
        "operation +": graph.call_function(operator.add, (x, 1)),
        "operation [...]": graph.call_function(operator.getitem, (x, 0)),
        "operation matmul": graph.call_function(torch.matmul, (x, x)),
        "operation pad": graph.call_function(F.pad, (x, (1, 1))),
        "operation split": graph.call_method("split", (x, 1)),
        "attribute shape": graph.call_function(getattr, (x, "shape")),
        "attribute gain": graph.get_attr("gain"),
        "submodule layers.0": graph.call_module("layers.0", (x,)),
        "argument x": x,
        "return value": graph.output(x),
    }
    assert {describe(node): node for node in named.values()} == named
    for node in named.values():
        node.meta[SOURCE_LINE] = "/home/me/net.py:7"  # a folder is never shown
        assert "/home" not in describe(node)
        node.meta[SOURCE_LINE] = "net.py:7"
        assert describe(node).startswith("net.py:7, ")


class Reads(nn.Module):
    """A block whose branch has two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.two(self.one(x).relu())
        return (x + branch) * branch


def test_a_branch_with_another_reader_is_refused_by_the_name_of_its_operation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Reads(), nn.Conv2d(4, 2, 1))
    graph = pp.trace(model, torch.randn(1, 3, 4, 4))
    refused = removable_branches("1", model[1], graph, {"1.two"})
    assert re.fullmatch(r"(.*, )?operation \* also reads its result", str(refused))


def test_a_graph_whose_branches_can_be_removed_knows_the_lines_of_its_calls() -> None:
    graph = editable_graph(Reads())
    assert isinstance(graph, fx.Graph)
    first = inspect.getsourcelines(Reads.forward)[1] + 1
    lines = {str(n.target): n.meta[SOURCE_LINE] for n in graph.nodes if n.op == "call_module"}
    assert lines == dict.fromkeys(["one", "two"], f"test_messages.py:{first}")
    assert [n.meta[SOURCE_LINE] for n in graph.nodes if n.target is operator.mul] == [
        f"test_messages.py:{first + 1}"
    ]
