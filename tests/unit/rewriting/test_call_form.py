"""The structure of a call is stored in our own notation, and compared as structure."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import polarprune as pp
from polarprune.rewriting import allowed_calls, capture, installed_forward, stored_graphs
from polarprune.rewriting.call_form import (
    count_leaves,
    decode_form,
    encode_form,
    flatten,
    positional,
    rebuild,
)
from polarprune.rewriting.captured_forward import CapturedForward, Refused


class Pair(NamedTuple):
    left: Any
    right: Any


class OtherPair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Output(OrderedDict[str, Any]):
    """Like `ModelOutput` of transformers: a dataclass that is a dict of its fields."""

    state: Any = None
    extra: Any = None

    def __post_init__(self) -> None:
        self.update({k: v for k in ("state", "extra") if (v := getattr(self, k)) is not None})


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "positions": ((1, 2.0), {}),
    "nothing": ((), {}),
    "keywords": ((1,), {"mask": None, "é": 2}),
    "nested": (([1, (2, [])], {"a": {}, 3: [4], None: 5}), {"more": ({"b": (6,)},)}),
    "an OrderedDict": ((OrderedDict(b=1, a=2),), {}),
    "a named tuple": ((Pair(1, [2]),), {"p": Pair(Pair(3, 4), 5)}),
    "a dataclass that is a dict": ((Output(1),), {"o": Output(2, [3])}),
    "objects": ((deque([1]), {1, 2}, object, torch.Size([3])), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_form_is_stored_and_its_call_rebuilt(name: str) -> None:
    call = CALLS[name]
    leaves, form = flatten(call)
    assert count_leaves(form) == len(leaves)
    assert decode_form(json.loads(json.dumps(encode_form(form)))) == form
    again = rebuild(call, leaves)
    assert again == call and flatten(again) == (leaves, form)
    assert flatten(rebuild(call, range(len(leaves)))) == ([*range(len(leaves))], form)


def test_the_form_of_tensors_by_position_is_known() -> None:
    assert flatten(((1, 2), {}))[1] == positional(2) != flatten(((1,), {"y": 2}))[1]


def test_containers_of_another_kind_have_another_form() -> None:
    one_each = [
        (1, 2),
        [1, 2],
        {"left": 1, "right": 2},
        {"right": 1, "left": 2},
        OrderedDict(left=1, right=2),
        Pair(1, 2),
        OtherPair(1, 2),
        Output(1, 2),
        Output(1),
        torch.Size([1, 2]),
    ]
    forms = [flatten(one)[1] for one in one_each]
    assert len(set(forms)) == len(forms)


def test_forms_in_the_notation_of_torch_are_read_as_our_own() -> None:
    """Files of version 2 hold what this version of torch writes."""
    for name in ("positions", "nothing", "keywords", "an OrderedDict", "nested"):
        _, spec = pytree.tree_flatten(CALLS[name])
        assert decode_form(pytree.treespec_dumps(spec)) == flatten(CALLS[name])[1]
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(2))
    _, spec = pytree.tree_flatten(((output,), {}))
    found = decode_form(pytree.treespec_dumps(spec))
    assert found == flatten(((output,), {}))[1]
    assert type(rebuild(output, [torch.zeros(2)])) is type(output)


def nested(depth: int) -> Any:
    return ["list", [], [nested(depth - 1)]] if depth else "*"


def form_with(one: Any) -> Any:
    return ["tuple", [], [["tuple", [], [one]], ["dict", [], []]]]


LEAF_OF_TORCH = '{"type": null, "context": null, "children_spec": []}'
FORGED: dict[str, Any] = {
    "a leaf": "*",
    "a number": 3,
    "no call": ["tuple", [], []],
    "keywords in a list": ["tuple", [], [["tuple", [], []], ["list", [], []]]],
    "a list as a call": ["list", [], [["tuple", [], []], ["dict", [], []]]],
    "a name that is a number": ["tuple", [], [["tuple", [], []], ["dict", [1], ["*"]]]],
    "another leaf": form_with("x"),
    "two parts": form_with(["tuple", []]),
    "four parts": form_with(["tuple", [], [], []]),
    "keys of a tuple": form_with(["tuple", ["a"], ["*"]]),
    "an unknown kind": form_with(["os.system", ["a"], ["*"]]),
    "an unknown family": form_with(["class:Pair", ["a"], ["*"]]),
    "a class by its path": form_with(["namedtuple:os.system", ["a"], ["*"]]),
    "no class": form_with(["namedtuple:", ["a"], ["*"]]),
    "a field that is a number": form_with(["namedtuple:Pair", [1], ["*"]]),
    "too few keys": form_with(["dict", [], ["*"]]),
    "a key twice": form_with(["dict", ["a", "a"], ["*", "*"]]),
    "a list as a key": form_with(["dict", [["a"]], ["*"]]),
    "a long key": form_with(["dict", ["a" * 5000], ["*"]]),
    "a huge key": form_with(["dict", [2**63], ["*"]]),
    "too deep": form_with(nested(30)),
    "too large": form_with(["list", [], ["*"] * 20_000]),
    "no JSON": "[1, ",
    "another protocol": f"[2, {LEAF_OF_TORCH}]",
    "a leaf of torch": f"[1, {LEAF_OF_TORCH}]",
    "a class of Python": '[1, {"type": "os.system", "context": "null", "children_spec": []}]',
    "a factory": (
        '[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "os", '
        '"default_factory_name": "system", "dict_context": []}, "children_spec": []}]'
    ),
    "deep JSON": "[1, " + '{"type": "builtins.list", "children_spec": [' * 1000,
    "long": " " * 2**16,
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_form_is_refused(name: str) -> None:
    graph = [
        ["x0", "placeholder", "x0", {"tuple": []}, {"dict": {}}],
        ["output", "output", "output", {"tuple": [{"node": "x0"}]}, {"dict": {}}],
    ]
    data = {"form": FORGED[name], "fixed": {}, "train": graph, "eval": graph}
    with pytest.raises(pp.PruneError):
        stored_graphs.decode(data)
    stored_graphs.decode({**data, "form": form_with("*")})


class Halves(nn.Module):
    """A module that selects channels by position, and takes them in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 12)

    def forward(self, pair: Pair, *, output: Output) -> Tensor:
        hidden: Tensor = self.fc(pair.left) + output["state"]
        return hidden[:, :4].relu() + hidden[:, 8:] + pair.right


def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (Pair(torch.randn(2, 4), torch.randn(4)),), {"output": Output(torch.randn(2, 12))}


def test_named_tuples_and_outputs_are_arguments_of_a_rewritten_forward() -> None:
    module = Halves()
    captured = capture.capture(module, *call())
    assert isinstance(captured, CapturedForward)
    stored = stored_graphs.decode(json.loads(json.dumps(stored_graphs.encode(captured))))
    again = installed_forward.with_forward(copy.deepcopy(module), stored)
    args, kwargs = call()
    assert torch.equal(again(*args, **kwargs), module(*args, **kwargs))
    for other in (tuple(args[0]), OtherPair(*args[0])):
        with pytest.raises(pp.PruneError, match="called with different arguments"):
            again(other, **kwargs)


def test_a_call_that_cannot_be_stored_is_refused_with_the_reason() -> None:
    class Looks(nn.Module):
        def forward(self, table: dict[Any, Tensor]) -> Tensor:
            return table[1, 2][:, :2]

    refused = capture.capture(Looks(), ({(1, 2): torch.ones(2, 4)},), {})
    assert isinstance(refused, Refused) and "keys that cannot be stored" in str(refused)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.halves, self.tail = nn.Linear(4, 8), Split(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.halves(self.stem(x), turned=True))


class Split(nn.Module):
    def forward(self, x: Tensor, turned: bool = False) -> Tensor:
        one, two = x.split([3, 5], 1)
        return torch.cat([two, one], 1) if turned else x


@pytest.mark.parametrize("spoiled", ["refused", "another protocol"])
def test_files_do_not_depend_on_how_torch_writes_structures(
    spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dumps(*args: object, **kwargs: object) -> str:
        if spoiled == "refused":
            raise RuntimeError("a version of torch that writes no structures")
        return f"[2, {args}]"

    monkeypatch.setattr(pytree, "treespec_dumps", dumps)
    monkeypatch.setattr(pytree, "treespec_loads", dumps)
    model, x = Net(), torch.randn(3, 4)
    graph = pp.trace(model, x)
    small = pp.shrink(model, graph, {"stem": [0, 2, 6]})
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=Net())
    assert "halves" in graph.rewritten and torch.equal(loaded(x), small(x))


def test_functions_are_stored_under_public_names() -> None:
    for name in ("gelu", "linear", "one_hot", "avg_pool2d", "softplus"):
        assert allowed_calls.name_of_function(getattr(F, name)) == f"F.{name}"
        assert allowed_calls.function_named(f"nn.{name}") is getattr(F, name)  # in older files
    assert allowed_calls.name_of_function(F.logsigmoid) == "F.logsigmoid"
    assert allowed_calls.function_named("nn.log_sigmoid") is F.logsigmoid
