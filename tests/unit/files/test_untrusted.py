"""Files from anywhere: `load` refuses what `save` would not write for this model."""

from __future__ import annotations

import ast
import copy
import gc
import json
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

import polarprune as pp
from polarprune.files import model_file
from polarprune.files.untrusted import metadata
from polarprune.files.untrusted.json_text import parse_json
from polarprune.rewriting import allowed_calls, interpreter, size_limits, stored_graphs
from tests.helpers import attack, forgeries
from tests.helpers.forgeries import NETWORKS, Victim, node, of_version_1, of_version_2, victim

SOURCES = Path(pp.__file__).parent


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Victim]:
    return {name: victim(name, tmp_path_factory.mktemp("files")) for name in NETWORKS}


def opened(one: Victim, data: bytes, folder: Path, model: nn.Module | None = None) -> nn.Module:
    file = folder / "some.safetensors"
    file.write_bytes(data)
    return pp.load(file, model=model or one.make()).eval()


def refused(one: Victim, data: bytes, folder: Path, wording: str = "") -> None:
    with pytest.raises(pp.PruneError) as error:
        opened(one, data, folder)
    assert wording in str(error.value)


def forged(one: Victim, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return the file with another recipe and the matching checksum."""
    content = copy.deepcopy(one.content)
    change(content["recipe"])
    return one.signed(json.dumps(content))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_as_it_was_written_is_the_same_model(
    name: str, victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = victims[name]
    for data in (one.data, one.signed(json.dumps(one.content))):
        assert torch.equal(opened(one, data, tmp_path)(one.x), one.wanted)


# --------------------------------------------------------------------------------------------------
# nothing in a file becomes code


def test_the_library_makes_no_code_of_text() -> None:
    for file in SOURCES.glob("*.py"):
        names = {n.id for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Name)}
        assert not names & {"exec", "eval", "compile", "__import__"}, file.name


def with_nodes(one: Victim, added: list[list[Any]]) -> bytes:
    """Return a file with more nodes before the output of its code; `x` stands for the input."""

    def change(recipe: dict[str, Any]) -> None:
        for code in recipe["rewired"].values():
            for mode in ("train", "eval"):
                source = {"node": code[mode][0][0]}
                text = json.dumps(added).replace('{"node": "x"}', json.dumps(source))
                code[mode][-1:-1] = json.loads(text)

    return forged(one, change)


X = {"node": "x"}
EXPLOITS = {
    "from numpy to the shell": [
        node("a", "call_method", "detach", [X]),
        node("b", "call_method", "numpy", [{"node": "a"}]),
        node("c", "call_function", "builtins.getattr", [{"node": "b"}, "ctypes"]),
        node("d", "call_function", "builtins.getattr", [{"node": "c"}, "_ctypes"]),
        node("e", "call_function", "builtins.getattr", [{"node": "d"}, "_os"]),
        node("f", "call_method", "system", [{"node": "e"}, "true"]),
    ],
    "a callable among the modules": [
        node("a", "get_attr", "_modules", []),
        node("b", "call_function", "operator.setitem", [{"node": "a"}, "evil", X]),
        node("c", "call_module", "evil", [X]),
    ],
    "underscores that Python normalises": [
        node("a", "get_attr", "_\uff3finit_\uff3f._\uff3fglobals_\uff3f", []),
    ],
}


@pytest.mark.parametrize("name", EXPLOITS)
def test_known_ways_to_a_shell_are_refused(
    name: str, victims: dict[str, Victim], tmp_path: Path
) -> None:
    refused(
        victims["rewritten code"], with_nodes(victims["rewritten code"], EXPLOITS[name]), tmp_path
    )


HOSTILE = [
    *(node("h", "call_method", name, [X]) for name in forgeries.METHODS.split()),
    *(node("h", "call_function", name, [X]) for name in forgeries.FUNCTIONS.split()),
    *(
        node("h", "call_function", "builtins.getattr", [X, name])
        for name in forgeries.ATTRIBUTES.split()
    ),
    *(
        node("h", kind, name, [])
        for kind in ("get_attr", "call_module")
        for name in forgeries.PATHS.split()
    ),
    *(node("h", kind, "x", []) for kind in ("root", "exec", "placeholder", "output", "", "call")),
    *(
        node(name, "call_method", "relu", [X])
        for name in ("", "1", "a b", "a\nb", "__a", "\uff41", "_\uff3fa", "a" * 300, "a.b")
    ),
    *(
        node("h", "call_method", "add", [X, 1], **{name: 1})
        for name in ("out", "__class__", "a b", "_x", "\uff41")
    ),
    *(
        node("h", "call_method", "to", [X, {"device": name}])
        for name in ("fpga", "cuda:", "cuda:9999", "meta\n", "\uff43pu", "privateuseone", "")
    ),
    *(
        node("h", "call_method", "to", [X, {kind: name}])
        for kind in ("dtype", "layout", "memory_format", "float", "lambda")
        for name in ("load", "__loader__", "float32 ", "1e999")
    ),
    *(
        node("h", "call_method", "add", [X, value])
        for value in (
            2**63,
            -(2**64),
            {"node": "h"},
            {"node": "y"},
            {"node": 3},
            {},
            [1],
            "\u00e4",
            "a" * 5000,
            {"slice": [1]},
            {"tuple": 1},
            {"a": 1, "b": 2},
        )
    ),
    node("h", "call_method", "relu", ["x"]),
    node("h", "call_method", "relu", []),
    node("h", "call_function", "builtins.getattr", [X]),
    node("h", "call_function", "builtins.getattr", [X, X]),
    node("h", "call_function", "builtins.getattr", ["x", "shape"]),
    node("h", "call_function", "builtins.getattr", [X, "shape", 1]),
    node("h", "call_function", "torch.zeros", [10**12]),
    node("h", "call_function", "torch.zeros", [2**20, 2**20]),
    node("h", "call_function", "torch.full", [{"tuple": [2**14, 2**14]}, 0]),
    node("h", "call_function", "torch.arange", [0, 1e12, 1]),
    node("h", "call_function", "torch.linspace", [0, 1, 2**40]),
    node("h", "call_function", "torch.eye", [2**20]),
    node("h", "call_method", "new_zeros", [X, 2**40]),
    node("h", "call_method", "expand", [X, 2**40, 2, 3, 6, 6]),
    node("h", "call_method", "repeat", [X, 2**40, 1, 1, 1]),
    node("h", "call_function", "F.pad", [X, {"tuple": [2**40, 0]}]),
    node("h", "call_function", "F.interpolate", [X, 2**40]),
    node("h", "call_function", "F.one_hot", [X, 2**40]),
    *(node("h", "call_method", "to", [X, name]) for name in ("hpu", "privateuseone:0", "meta")),
    node("h", "call_function", "torch.zeros", [3], device="hpu"),  # torch would import torch.hpu
    node("h", "call_method", "type", [X, "torch.hpu.FloatTensor"]),
    node("h", "call_function", "F.ctc_loss", [X, X, X, X]),  # reads beyond its tensors
    node("h", "call_function", "operator.add", [X]),
    node("h", "call_function", "operator.getitem", [X, 0, 0]),
    node("h", "call_function", "polarprune.one_point", []),
    node("h", "call_function", "F.relu", [X], inplac=True),
    node("h", "call_function", "F.pad", [X]),
    node("h", "call_function", "torch.conv2d", []),
    node("h", "call_function", "linalg.solve", [X]),
    node("h", "call_method", "softmax", [X]),
    node("h", "call_method", "view", [X]),
    node("h", "call_method", "sum", [X], dims=1),
    node("h", "call_module", "stem", []),
    node("h", "call_module", "stem", [X, X]),
    node("h", "call_module", "stem", [X], scale=1),
    *(
        [*node("h", "call_method", "relu", [X]), line]
        for line in (None, 12, "", "net.py", "net.py:", "net.py:x", "/net.py:1", "a\\b.py:1", [])
    ),
    *(
        [*node("h", "call_method", "relu", [X]), line]
        for line in ("a" * 200 + ":1", "net.py:123456789", "net.py:\u0661", "\x1b.py:1", "a\nb:1")
    ),
    [*node("h", "call_method", "relu", [X]), "net.py:1", "net.py:1"],
]


@pytest.mark.parametrize("one", HOSTILE, ids=lambda one: str(one).encode("unicode_escape")[:60])
def test_a_node_outside_the_closed_set_is_refused(
    one: Any, victims: dict[str, Victim], tmp_path: Path
) -> None:
    baked = victims["rewritten code"]
    refused(baked, with_nodes(baked, [one]), tmp_path)


def test_what_is_allowed_takes_no_functions_files_or_memory() -> None:
    hostile = {*forgeries.METHODS.split(), "data_ptr", "storage", "numpy", "set_", "eval", "exec"}
    assert not allowed_calls.METHODS & hostile
    assert not allowed_calls.ATTRIBUTES & {*forgeries.ATTRIBUTES.split(), "grad", "grad_fn"}
    assert not allowed_calls.FUNCTIONS.keys() & {*forgeries.FUNCTIONS.split()}
    assert all(hasattr(Tensor, name) for name in allowed_calls.METHODS)
    for name in (*allowed_calls.METHODS, *allowed_calls.FUNCTIONS):
        assert not name.split(".")[-1].startswith("_")


def run(*nodes: list[Any], x: Any = None) -> Any:
    """Run a graph with one input, built from plain data."""
    return runs_of(*nodes)(None, x)


def runs_of(*nodes: list[Any]) -> Callable[..., Any]:
    graph = [
        node("x", "placeholder", "x", []),
        *nodes,
        node("output", "output", "output", [{"node": nodes[-1][0]}]),
    ]
    code = stored_graphs.decode({"form": None, "fixed": {}, "train": graph, "eval": graph})
    return interpreter.runner(code.graphs["eval"], from_file=True)


def test_items_are_written_into_tensors_only() -> None:
    write = node("a", "call_function", "operator.setitem", [X, 0, 5.0])
    x = torch.zeros(3)
    run(write, x=x)
    assert x[0] == 5
    for other in ([0, 1], {0: 1}, nn.Module().__dict__):
        with pytest.raises(pp.PruneError, match="not a tensor"):
            run(write, x=other)


def test_attributes_are_read_from_tensors_and_are_no_methods() -> None:
    assert run(node("a", "call_function", "builtins.getattr", [X, "shape"]), x=torch.ones(2)) == (
        2,
    )
    for other in (nn.Linear(1, 1), print, object()):
        with pytest.raises(pp.PruneError, match="not a tensor"):
            run(node("a", "call_function", "builtins.getattr", [X, "shape"]), x=other)
        with pytest.raises(pp.PruneError, match="not a tensor"):
            run(node("a", "call_method", "to", [X, "cpu"]), x=other)
    with pytest.raises(pp.PruneError, match="is a method of"):
        run(node("a", "call_function", "builtins.getattr", [X, "type"]), x=torch.ones(2))


def sized(target: str, *args: Any, kind: str = "call_function") -> list[list[Any]]:
    """Return a call whose size is a number that the graph computes."""
    number = [
        node("n", "call_method", "numel", [X]),
        node("m", "call_function", "operator.mul", [{"node": "n"}, 2**38]),
    ]
    return [*number, node("h", kind, target, list(args))]


M = {"node": "m"}
GROWING = {
    "zeros": sized("torch.zeros", M),
    "ones in two axes": sized("torch.ones", 2**19, M),
    "full": sized("torch.full", {"tuple": [M]}, 1.0),
    "arange": sized("torch.arange", M),
    "eye": sized("torch.eye", M),
    "linspace": sized("torch.linspace", 0, 1, M),
    "randint": sized("torch.randint", 0, 9, {"tuple": [M]}),
    "tile": sized("torch.tile", X, {"tuple": [M]}),
    "new_zeros": sized("new_zeros", X, M, kind="call_method"),
    "expand": sized("expand", X, M, -1, kind="call_method"),
    "repeat": sized("repeat", X, M, 1, kind="call_method"),
    "repeat_interleave": sized("repeat_interleave", X, M, kind="call_method"),
    "pad": sized("F.pad", X, {"tuple": [M, 0]}),
}


def call(name: str, target: str, *args: Any, **kwargs: Any) -> list[Any]:
    return node(
        name, "call_function" if "." in target else "call_method", target, list(args), **kwargs
    )


def chain(count: int, start: Any, step: Callable[[str, Any], list[Any]]) -> list[list[Any]]:
    """Return a chain of calls, each on the result of the one before."""
    nodes: list[list[Any]] = []
    for k in range(count):
        nodes.append(step(f"c{k}", {"node": f"c{k - 1}"} if k else start))
    return nodes


def twice(value: Any) -> dict[str, Any]:
    return {"list": [value, value]}


def column(k: int) -> list[list[Any]]:
    """Return two vectors of this length, a column and a row."""
    return [
        call("n", "torch.ones", k),
        call("up", "unsqueeze", {"node": "n"}, 1),
        call("level", "unsqueeze", {"node": "n"}, 0),
    ]


NUMBERS, UP, LEVEL = {"node": "n"}, {"node": "up"}, {"node": "level"}
MANY = call("n", "torch.ones", 200_000)
GROWING |= {
    "cat": chain(40, X, lambda name, x: call(name, "torch.cat", twice(x))),
    "stack": chain(40, X, lambda name, x: call(name, "torch.stack", twice(x))),
    "pad, a little": chain(40, X, lambda name, x: call(name, "F.pad", x, {"tuple": [90_000, 0]})),
    "upsampled": [
        call("u", "reshape", X, 1, 1, -1),
        *chain(9, {"node": "u"}, lambda name, x: call(name, "F.interpolate", x, None, 8.0)),
    ],
    "outer": [*column(9000), call("h", "torch.outer", NUMBERS, NUMBERS)],
    "a sum": [*column(9000), call("h", "operator.add", UP, LEVEL)],
    "a comparison": [*column(9000), call("h", "torch.allclose", UP, LEVEL)],
    "a distance": [*column(9000), call("h", "torch.dist", UP, LEVEL)],
    "a loss": [*column(9000), call("h", "torch.binary_cross_entropy_with_logits", UP, LEVEL)],
    "distances": [*column(9000), call("h", "torch.cdist", UP, UP)],
    "matmul": [*column(9000), call("h", "operator.matmul", UP, LEVEL)],
    "einsum": [*column(9000), call("h", "torch.einsum", "a,b->ab", NUMBERS, NUMBERS)],
    "meshgrid": [*column(9000), call("h", "torch.meshgrid", NUMBERS, NUMBERS)],
    "attention": [*column(9000), call("h", "F.scaled_dot_product_attention", UP, UP, UP)],
    "a mask": [
        *column(9000),
        call("b", "bool", LEVEL),
        call("h", "torch.masked_select", UP, {"node": "b"}),
    ],
    "rows": [
        *column(9000),
        call("i", "long", NUMBERS),
        call("e", "expand", LEVEL, 2, 9000),
        call("h", "operator.getitem", {"node": "e"}, {"node": "i"}),
    ],
    "windows": [MANY, call("h", "unfold", {"node": "n"}, 0, 100_000, 1)],
    "convolution": [
        call("n", "torch.ones", 1, 1, 4),
        call("h", "F.conv1d", NUMBERS, NUMBERS, None, 1, 10**6),
    ],
    "what a convolution reads": [
        call("n", "torch.ones", 1, 1, 40_000),
        call("w", "torch.ones", 1, 1, 20_000),
        call("h", "F.conv1d", NUMBERS, {"node": "w"}),
    ],
    "bilinear": [
        call("n", "torch.ones", 1000, 250),
        call("w", "torch.ones", 1, 250, 250),
        call("h", "F.bilinear", NUMBERS, NUMBERS, {"node": "w"}),
    ],
    "fft": [call("h", "fft.fft", X, 10**8)],
    "a norm over many": [
        call("u", "reshape", X, 1, 1, -1),
        call("h", "F.local_response_norm", {"node": "u"}, 10**7),
    ],
    "mvlgamma": [call("h", "torch.mvlgamma", X, 10**7)],
    "repeats": [
        call("i", "torch.full", {"tuple": [1]}, 10**9),
        call("h", "torch.repeat_interleave", X, {"node": "i"}),
    ],
    "places": [
        MANY,
        call("v", "reshape", NUMBERS, *[1] * 60, -1),
        call("h", "nonzero", {"node": "v"}),
    ],
    "places to write": [
        MANY,
        call("v", "reshape", NUMBERS, *[1] * 60, -1),
        call("b", "bool", {"node": "v"}),
        call("h", "operator.setitem", {"node": "v"}, {"node": "b"}, 0.0),
    ],
    "masks and rows": [
        *column(9000),
        call("i", "long", UP),
        call("b", "bool", NUMBERS),
        call("z", "expand", LEVEL, 2, 9000),
        call("h", "operator.getitem", {"node": "z"}, {"tuple": [{"node": "i"}, {"node": "b"}]}),
    ],
    "unbind": [MANY, call("h", "unbind", NUMBERS)],
    "split": [MANY, call("h", "split", NUMBERS, 1)],
    "tensor_split": [MANY, call("h", "tensor_split", NUMBERS, 200_000)],
    "numbers": [MANY, call("h", "tolist", NUMBERS)],
    "a list of rows": [MANY, call("h", "operator.iadd", {"list": []}, NUMBERS)],
    "a power": [call("h", "operator.pow", 10, 10**9)],
    "squares": chain(40, 10, lambda name, x: call(name, "operator.mul", x, x)),
    "a text": [call("h", "operator.mul", "a", 10**12)],
    "a wide text": [call("h", "operator.mod", "%1000000000d", 5)],
    "texts": chain(40, "aa", lambda name, x: call(name, "operator.add", x, x)),
    "a list": [call("h", "operator.mul", {"list": [0]}, 10**12)],
    "lists": chain(40, twice(0), lambda name, x: call(name, "operator.add", x, x)),
    "lists in lists": chain(
        40, 0, lambda name, x: call(name, "operator.getitem", {"list": [twice(x)]}, 0)
    ),
    "a deep list": chain(
        90, 0, lambda name, x: call(name, "operator.getitem", {"list": [{"list": [x]}]}, 0)
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_size_out_of_proportion_is_refused_before_it_is_allocated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_limits, "_MAX_BYTES", 2**20)
    with pytest.raises(pp.PruneError, match=r"asks for .* out of proportion"):
        run(*GROWING[name], x=torch.ones(2))


def test_what_is_kept_is_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_limits, "_MAX_BYTES", 2**20)
    made = [call(f"z{k}", "torch.ones", 200_000) for k in range(9)]
    assert run(*made, x=torch.ones(2)).sum() == 200_000  # one after the other
    kept = {"list": [{"node": f"z{k}"} for k in range(9)]}
    with pytest.raises(pp.PruneError, match="out of proportion"):
        run(*made, call("h", "torch.cat", kept), x=torch.ones(2))
    views = [call(f"v{k}", "view", {"node": "z0"}, -1) for k in range(9)]
    all_views = {"list": [{"node": f"v{k}"} for k in range(9)]}
    run(made[0], *views, call("h", "operator.getitem", all_views, 0), x=torch.ones(2))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `Watch` was made for."""
    made: list[Any] = []

    class Noted(size_limits.Watch):
        def __init__(self, module: Any, inputs: Any) -> None:
            made.append(inputs)
            super().__init__(module, inputs)

    monkeypatch.setattr(interpreter, "Watch", Noted)
    return made


def test_inputs_are_watched_once_for_each_size(watched: list[Any]) -> None:
    double = runs_of(call("a", "operator.add", X, X), call("h", "F.dropout", {"node": "a"}, 0.5))
    for size, count in ((3, 1), (3, 1), (4, 2), (3, 2), (4, 2)):
        x = torch.randn(size)
        torch.manual_seed(0)
        found = double(None, x)
        torch.manual_seed(0)
        assert torch.equal(found, F.dropout(x + x, 0.5)) and len(watched) == count
    with FlopCounterMode(display=False):
        double(None, torch.ones(5))
    double(None, torch.ones(6, device="meta"))
    torch.func.vmap(double, (None, 0), randomness="different")(None, torch.ones(7, 8))
    assert len(watched) == 2


@pytest.mark.parametrize("how", ["item", "tolist", "nonzero", "a mask"])
def test_sizes_that_come_from_values_are_always_watched(
    how: str, watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_limits, "_MAX_BYTES", 2**20)
    ways = {
        "item": [
            call("s", "sum", X),
            call("i", "item", {"node": "s"}),
            call("n", "operator.mul", {"node": "i"}, 1.0),
            call("h", "torch.arange", {"node": "n"}),
        ],
        "tolist": [
            call("s", "long", X),
            call("i", "tolist", {"node": "s"}),
            call("h", "torch.zeros", {"node": "i"}),
        ],
        "nonzero": [
            call("i", "nonzero", X),
            call("j", "t", {"node": "i"}),
            call("h", "operator.mul", {"node": "i"}, {"node": "j"}),
        ],
        "a mask": [
            call("b", "bool", X),
            call("i", "operator.getitem", X, {"node": "b"}),
            call("h", "torch.outer", {"node": "i"}, {"node": "i"}),
        ],
    }
    grows = runs_of(*ways[how])
    few, many = torch.zeros(2), torch.full((2,), 1e6)
    if how in ("nonzero", "a mask"):
        few, many = torch.zeros(2000), torch.ones(2000)
    for _ in range(2):
        grows(None, few)
    assert len(watched) == 2
    with pytest.raises(pp.PruneError, match="out of proportion"):
        grows(None, many)


def test_what_children_give_counts_as_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_limits, "_MAX_BYTES", 2**10)
    model = nn.Module()
    model.wide = nn.Upsample(scale_factor=8)
    inside = runs_of(
        node("a", "call_module", "wide", [X]),
        call("h", "F.pad", {"node": "a"}, {"tuple": [90, 90]}),
    )
    assert inside(model, torch.ones(1, 1, 4)).shape == (1, 1, 212)
    again = runs_of(*chain(20, X, lambda name, x: node(name, "call_module", "wide", [x])))
    with pytest.raises(pp.PruneError, match=r"submodule wide: .*out of proportion"):
        again(model, torch.ones(1, 1, 4))


def test_what_fails_names_the_module_and_the_line(
    victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = victims["rewritten code"]
    wrong = [call("h", "torch.matmul", X, X)]
    small = opened(one, with_nodes(one, wrong), tmp_path)
    with pytest.raises(pp.PruneError) as error:
        small(torch.randn(2, 3, 6, 5))
    assert (
        "Baked, operation matmul: the stored code of this module failed: RuntimeError: Expected"
        in str(error.value)
    )
    assert isinstance(error.value.__cause__, RuntimeError)
    fine = opened(one, one.data, tmp_path)
    wanted = r"^Baked, forgeries\.py:\d+, submodule stem: .*to have 3 channels"
    with pytest.raises(pp.PruneError, match=wanted):
        fine(torch.randn(2, 4, 6, 6))


class Own(RuntimeError):
    pass


@pytest.mark.parametrize("kind", [Own, ValueError, KeyError, torch.OutOfMemoryError])
def test_what_a_child_raises_on_purpose_stays_what_it_is(
    kind: type[Exception], victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = victims["rewritten code"]
    small = opened(one, one.data, tmp_path)

    def stop(*_: Any) -> None:
        raise kind("enough")

    small.stem.register_forward_hook(stop)
    for _ in range(2):
        with pytest.raises(kind, match="enough"):
            small(one.x)


def test_sizes_in_proportion_pass() -> None:
    x = torch.randn(2, 3, 4, 4)
    calls = [
        node("h", "call_function", "F.pad", [X, {"tuple": [500, 500, 500, 500]}]),
        node("h", "call_function", "F.interpolate", [X, {"tuple": [64, 64]}]),
        node("h", "call_function", "F.interpolate", [X, None, 2.0]),
        node("h", "call_method", "expand", [X, -1, -1, -1, 4]),
        node("h", "call_method", "repeat", [X, 4, 1, 1, 1]),
        node("h", "call_function", "F.adaptive_avg_pool2d", [X, 1]),
        node("h", "call_function", "torch.zeros", [{"tuple": [3, 5]}]),
        node("h", "call_function", "torch.arange", [2, 9]),
        node("h", "call_method", "new_full", [X, {"tuple": [2, 2]}, 1.0]),
        node("h", "call_function", "torch.full", [{"tuple": [2]}, 10**12]),
        node("h", "call_method", "new_full", [X, {"tuple": [2]}, -(2**63)]),
        node("h", "call_function", "torch.randint", [0, 10**12, {"tuple": [2]}]),
        node("h", "call_function", "operator.getitem", [X, {"slice": [0, 2**62, 2**62]}]),
    ]
    assert all(run(call, x=x).numel() > 0 for call in calls)


def test_memory_that_was_never_written_is_not_shown() -> None:
    for call in (
        node("h", "call_function", "torch.empty", [1000]),
        node("h", "call_method", "new_empty", [X, 1000]),
        node("h", "call_function", "torch.empty_like", [X]),
    ):
        assert not run(call, x=torch.ones(1000)).any()


# --------------------------------------------------------------------------------------------------
# graphs are run as plain code would be


def test_a_value_is_freed_after_its_last_use() -> None:
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def step(x: Tensor) -> Tensor:
        found = x + 1
        made.append(weakref.ref(found))
        alive.append(sum(ref() is not None for ref in made))
        return found

    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(6):
        value = graph.call_function(step, (value,))
    graph.output(value)
    interpreter.runner(graph)(None, torch.zeros(2))
    assert max(alive) == 2  # what is read, and what is made


def test_containers_are_made_anew_in_every_run() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output({"pair": [x, (x, 1)], "part": graph.call_function(getitem, (x, slice(None, 1)))})
    run_once = interpreter.runner(graph)
    one, two = (run_once(None, torch.arange(3)) for _ in range(2))
    assert type(one["pair"]) is list and type(one["pair"][1]) is tuple
    one["pair"].append(0)
    assert len(two["pair"]) == 2 and two["part"].tolist() == [0]


def getitem(x: Tensor, index: Any) -> Tensor:
    return x[index]


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(6, 4, 1, bias=False), nn.Conv2d(4, 6, 1, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (x + self.two(self.one(x))) * scale + shift


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 6, 1), Optional()
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.block(self.stem(x), 2.0), shift=0.5)
        found: Tensor = self.head(self.block(x, scale=3.0, shift=1.0))
        return found


def test_a_block_without_its_branch_is_called_by_place_and_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Calls().eval(), torch.randn(2, 3, 4, 4)
    small = pp.shrink(model, pp.trace(model, x), {"block.one": []}).eval()
    assert not hasattr(small.block, "one")
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=Calls()).eval()
    with torch.no_grad():
        model.block.two.weight.zero_()
        assert torch.equal(loaded(x), small(x))
        torch.testing.assert_close(loaded(x), model(x))
    for wrong in ({"scales": 1.0}, {"x": x}):
        with pytest.raises(TypeError, match="takes the arguments x, scale, shift"):
            loaded.block(loaded.stem(x), **wrong)


# --------------------------------------------------------------------------------------------------
# text

TEXTS = {
    "a key twice": lambda text: text.replace('"card"', '"version": 3, "card"', 1),
    "NaN": lambda text: text.replace('"card": {', '"card": {"a": NaN, ', 1),
    "infinity": lambda text: text.replace('"card": {', '"card": {"a": -Infinity, ', 1),
    "a float too large": lambda text: text.replace('"card": {', '"card": {"a": 1e999, ', 1),
    "an integer too long": lambda text: text.replace('"card": {', f'"card": {{"a": {"9" * 9999}, '),
    "deep": lambda text: text.replace('"card": {', '"card": {"a": ' + "[" * 999 + "]" * 999 + ", "),
    "very deep": lambda text: '{"a": ' * 200_000 + "1" + "}" * 200_000,
    "very deep, not closed": lambda text: "[" * 10**6,
    "too long": lambda text: text + " " * 2**26,
    "a text that does not end": lambda text: '"' + '\\"' * 10**6,
    "many values": lambda text: text.replace('"card": {', f'"card": {{"a": [{"0," * 2**23}0], '),
    "no object": lambda text: "[1, 2]",
    "a text": lambda text: '"abc"',
    "a number": lambda text: "3",
    "nothing": lambda text: "",
    "cut off": lambda text: text[:-5],
    "a part too many": lambda text: text.replace('"card"', '"more": 1, "card"', 1),
    "a part missing": lambda text: text.replace('"aliases"', '"alias"', 1),
    "a card that is none": lambda text: text.replace('"card": {', '"card": 1, "x": {', 1),
    **{
        f"version {value}": lambda text, value=value: text.replace("2", value, 1)
        for value in ("true", "false", "0", "-1", "1.0", "2.0", '"2"', "null", "[]", "3", "99")
    },
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("limit", [None, 10**6], ids=["", "recursion allowed"])
def test_text_that_save_does_not_write_is_refused(
    name: str, limit: int | None, victims: dict[str, Victim], tmp_path: Path
) -> None:
    one, before = victims["an embedding, tied"], sys.getrecursionlimit()
    sys.setrecursionlimit(limit or before)
    try:
        refused(one, one.signed(TEXTS[name](json.dumps(one.content))), tmp_path)
        with pytest.raises(pp.PruneError):
            model_file.read_card(tmp_path / "some.safetensors") and pp.load(
                tmp_path / "some.safetensors", model=one.make()
            )
    finally:
        sys.setrecursionlimit(before)


def test_brackets_in_texts_do_not_count_as_depth() -> None:
    text = json.dumps({"a": "[" * 500 + '\\" {' * 100})
    assert parse_json(text) == json.loads(text)


def test_a_card_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), torch.randn(3, 4)
    small = pp.shrink(model, pp.trace(model, x), {"0": [1, 2]})
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    for card in ({"loss": float("nan")}, {"loss": float("inf")}, {"deep": deep}):
        with pytest.raises(pp.PruneError, match="cannot be written"):
            pp.save(small, tmp_path / "small.safetensors", card=card)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NETWORKS)
def test_a_flipped_bit_is_noticed(name: str, victims: dict[str, Victim], tmp_path: Path) -> None:
    one = victims[name]
    for place in range(0, len(one.data), max(1, len(one.data) // 60)):
        data = bytearray(one.data)
        data[place] ^= 1 << place % 8
        refused(one, bytes(data), tmp_path)


def test_a_file_without_its_checksum_is_refused(victims: dict[str, Victim], tmp_path: Path) -> None:
    one = victims["fewer heads"]
    for digest in ("", "0" * 64, "f" * 64, 1, None, [], {}):
        text = json.dumps({**one.content, "sha256": digest})
        refused(one, save(one.tensors, {"polarprune": text}), tmp_path, "checksum")
    content = {key: value for key, value in one.content.items() if key != "sha256"}
    refused(one, save(one.tensors, {"polarprune": json.dumps(content)}), tmp_path, "parts")


# --------------------------------------------------------------------------------------------------
# the recipe


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(recipe: dict[str, Any]) -> None:
        held: Any = recipe
        for key in keys[:-1]:
            held = held[key]
        held[keys[-1]] = value

    return change


W = "stem.weight"
RECIPES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    **{
        f"{field} is {value!r}": ("rewritten code", put(field, value=value))
        for field in (
            "shapes",
            "slices",
            "attributes",
            "constants",
            "heads",
            "rewired",
            "removed",
            "computed",
            "unread",
            "hollow",
            "identities",
        )
        for value in (
            None,
            1,
            "a",
            [1],
            [[]],
            {"a": None},
            {"nowhere": []},
            ["nowhere"],
            {"nowhere": {"0": [0]}},
            ["stem", "stem"],
        )
    },
    **{
        f"a field {name}": ("rewritten code", put(name, value={}))
        for name in ("vanished", "new", "")
    },
    "a field missing": ("rewritten code", lambda recipe: recipe.pop("unread")),
    **{
        f"indices {kept}": ("rewritten code", put("slices", W, "0", value=kept))
        for kept in (
            [0, 0, 1, 1],
            [1, 0, 2, 3],
            [-1, 0, 1, 2],
            [0, 1, 2, 8],
            [0, 1, 2, True],
            [0, 1, 2.0],
            ["0"],
            "0123",
            None,
            [0] * 4,
            [0, 1, 2, 10**30],
        )
    },
    **{
        f"axis {axis}": ("rewritten code", put("slices", W, axis, value=[0]))
        for axis in ("4", "-1", "00", "a", "", "\u0662", "1e0", "99999999999999999999")
    },
    "slices of no tensor": ("rewritten code", put("slices", "nowhere", value={"0": [0]})),
    "another shape": ("rewritten code", put("shapes", W, value=[8, 3, 3, 4])),
    "a shape of no tensor": ("rewritten code", put("shapes", "nowhere", value=[1])),
    **{
        f"stem.{name} = {value!r}": ("rewritten code", put("attributes", "stem", name, value=value))
        for name, value in (
            ("out_channels", 3),
            ("out_channels", 8),
            ("out_channels", True),
            ("in_channels", 4),
            ("groups", 4),
            ("stride", 1),
            ("kernel_size", [3]),
            ("training", 0),
            ("forward", 0),
            ("_modules", 0),
            ("__class__", 0),
            ("padding_mode", "zeros"),
            ("new", 1),
            ("weight", 0),
            ("bias", 0),
            ("_\uff3fclass_\uff3f", 1),
            ("_is_full_backward_hook", 0),
        )
    },
    **{
        f"{path}.{name} = {value}": (which, put("attributes", path, value={name: value}))
        for which, path, name, value in (
            ("fewer heads", "tail", "out_features", 2),
            ("fewer heads", "norm", "eps", 0),
            ("fewer heads", "norm", "normalized_shape", [7]),
            ("a computed weight", "3", "out_channels", 1),
            ("a block without its branch", "4", "out_features", 1),
            ("a block without its branch", "0", "groups", 0),
        )
    },
    "an attribute missing": ("rewritten code", lambda r: r["attributes"]["stem"].pop("groups")),
    "a constant with channels": ("rewritten code", put("constants", value=["stem"])),
    "an identity with channels": ("fewer heads", put("identities", value=["norm"])),
    "a pool that is none": ("rewritten code", put("hollow", value=["stem"])),
    **{
        f"heads {heads}": ("fewer heads", put("heads", "attention", value=heads))
        for heads in ([], [0], [0, 1], [2, 0], [0, 9], [0, 0], ["0"], [True, 2])
    },
    "heads of no attention": ("fewer heads", put("heads", "norm", value=[0])),
    "half a head": ("fewer heads", lambda r: r["slices"]["attention.in_proj_bias"]["0"].pop()),
    "a weight computed that is none": ("rewritten code", put("computed", value=["stem"])),
    "a tensor unread that is read": ("rewritten code", put("unread", value=[W])),
    "a child removed that is called": (
        "a block without its branch",
        put("removed", "1", value=["last", "one", "norm", "two"]),
    ),
    "a child removed that is not there": (
        "a block without its branch",
        put("removed", "1", value=["no"]),
    ),
    "a child removed inside another": (
        "a block without its branch",
        put("removed", "", value=["1", "1.one"]),
    ),
    "removed with no code": ("a block without its branch", put("removed", "0", value=[])),
    "a path removed": ("a block without its branch", put("removed", "1", value=["_\uff3fa"])),
    "code for no module": ("rewritten code", lambda r: r["rewired"].update(no=r["rewired"][""])),
    "an alias of nothing": ("an embedding, tied", lambda r: None),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_does_not_follow_from_the_model_is_refused(
    name: str, victims: dict[str, Victim], tmp_path: Path
) -> None:
    which, change = RECIPES[name]
    one = victims[which]
    if name == "an alias of nothing":
        for aliases in (
            {"out.weight": "nowhere"},
            {"embed.weight": "embed.weight"},
            [],
            {"a": 1},
            {"nowhere": "embed.weight"},
            {},
        ):
            content = {**one.content, "aliases": aliases}
            refused(one, one.signed(json.dumps(content)), tmp_path)
        return
    data = forged(one, change)
    if data == one.signed(json.dumps(one.content)):
        pytest.skip("as it was")
    refused(one, data, tmp_path)


def test_slices_that_repeat_an_index_take_no_memory(
    victims: dict[str, Victim], tmp_path: Path
) -> None:
    """179 KB of indices made 6.9 GB."""
    one = victims["rewritten code"]
    many = {"0": [0] * 30_000, "1": [0] * 30_000}
    refused(one, forged(one, put("slices", W, value=many)), tmp_path, "out of order or range")


def test_code_is_not_endless(
    victims: dict[str, Victim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = victims["rewritten code"]
    small = opened(one, one.data, tmp_path)
    monkeypatch.setattr(metadata, "_MOST_CODE_VALUES", 2000)
    opened(one, one.data, tmp_path)
    for added in (
        chain(200, X, lambda name, x: call(name, "abs", x)),
        [call("h", "torch.cat", {"list": [1] * 2000})],
    ):
        refused(one, with_nodes(one, added), tmp_path, "too much code")
    monkeypatch.setattr(metadata, "_MOST_CODE_VALUES", 10)
    with pytest.raises(pp.PruneError, match="could not be loaded again: it holds too much code"):
        pp.save(small, tmp_path / "again.safetensors")


def test_a_file_far_larger_than_the_model_is_not_read(
    victims: dict[str, Victim], tmp_path: Path
) -> None:
    one, file = victims["rewritten code"], tmp_path / "some.safetensors"
    many = {**one.tensors, **{f"t{k}": torch.zeros(0) for k in range(200)}}
    refused(one, replace(one, tensors=many).signed(json.dumps(one.content)), tmp_path, "too large")
    header = {
        "__metadata__": {"polarprune": json.dumps(one.content)},
        "x": {"dtype": "U8", "shape": [2**31], "data_offsets": [0, 2**31]},
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + 2**31)  # all of it a hole
    with pytest.raises(pp.PruneError, match="far too large"):
        pp.load(file, model=one.make())
    file.unlink()


def test_messages_hold_nothing_that_a_terminal_acts_on(
    victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = victims["rewritten code"]
    for name in ("\x1b]0;title\x07", "\ud800", "\u202e", "a" * 4000):
        with pytest.raises(pp.PruneError) as error:
            opened(one, forged(one, put("unread", value=[name])), tmp_path)
        assert str(error.value).isprintable() and len(str(error.value)) < 1500


def arguments(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    def apply(recipe: dict[str, Any]) -> None:
        for code in recipe["rewired"].values():
            change(code)

    return apply


def add_input(code: dict[str, Any], *default: Any) -> None:
    for mode in ("train", "eval"):
        code[mode].insert(1, node("more", "placeholder", "more", list(default)))


@pytest.mark.parametrize("name", ["rewritten code", "a block without its branch"])
def test_arguments_that_the_class_does_not_take_are_refused(
    name: str, victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = victims[name]

    def rename(code: dict[str, Any]) -> None:
        for mode in ("train", "eval"):
            code[mode][0][2] = "other"

    for change in (
        add_input,
        lambda code: add_input(code, 1),
        lambda code: add_input(code, {"node": code["train"][0][0]}),
        *([rename] if "block" in name else []),
    ):
        refused(one, forged(one, arguments(change)), tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool, torch.uint8])
def test_tensors_of_another_kind_are_refused(
    dtype: torch.dtype, victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = victims["rewritten code"]
    tensors = {**one.tensors, W: one.tensors[W].to(dtype)}
    data = replace(one, tensors=tensors).signed(json.dumps(one.content))
    refused(one, data, tmp_path, "does not fit")


def test_a_model_on_the_meta_device_is_refused(victims: dict[str, Victim], tmp_path: Path) -> None:
    one = victims["rewritten code"]
    with torch.device("meta"):
        model = one.make()
    with pytest.raises(pp.PruneError, match="meta device"):
        opened(one, one.data, tmp_path, model)


def test_references_outside_the_parameters_are_kept(
    victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = victims["an embedding, tied"]
    model = one.make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = opened(one, one.data, tmp_path, model)
    assert small.tied[0] is small.hidden.weight and small.out.weight is small.embed.weight
    assert small.hidden.weight.shape == (6, 4) and model.tied[0] is model.hidden.weight
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --------------------------------------------------------------------------------------------------
# files of older versions


def test_a_file_of_version_2_is_the_same_model(victims: dict[str, Victim], tmp_path: Path) -> None:
    one = of_version_2(victims["rewritten code"])
    loaded = opened(one, one.data, tmp_path)
    assert torch.equal(loaded(one.x), one.wanted)
    pp.save(loaded, tmp_path / "again.safetensors")
    text = (tmp_path / "again.safetensors").read_bytes()
    assert b"builtins.tuple" not in text and rb"\"version\": 3" in text
    again = pp.load(tmp_path / "again.safetensors", model=one.make()).eval()
    assert torch.equal(again(one.x), one.wanted)


@pytest.mark.parametrize(
    "form",
    [
        *(forgeries.ONE_ARGUMENT[:end] for end in (0, 1, 40, -1)),
        forgeries.ONE_ARGUMENT.replace("[1,", "[2,", 1),
        forgeries.ONE_ARGUMENT.replace("builtins.dict", "os.system"),
        forgeries.ONE_ARGUMENT.replace(forgeries.LEAF, f"{forgeries.LEAF}, {forgeries.LEAF}"),
        forgeries.ONE_ARGUMENT.replace('"[]"', '"[1]"'),
        forgeries.ONE_ARGUMENT.replace('"[]"', '"[[]]"'),
        forgeries.ONE_ARGUMENT.replace('"null"', "null"),
        "[" * 50_000,
        3,
        {},
    ],
    ids=lambda form: str(form)[:20],
)
def test_a_damaged_form_of_version_2_is_refused(
    form: Any, victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = of_version_2(victims["rewritten code"])
    content = copy.deepcopy(one.content)
    content["recipe"]["rewired"][""]["form"] = form
    refused(one, one.signed(json.dumps(content)), tmp_path)


def test_a_file_of_version_1_is_the_same_model(victims: dict[str, Victim], tmp_path: Path) -> None:
    one = of_version_1(victims["a block without its branch"])
    loaded = opened(one, one.data, tmp_path)
    assert torch.equal(loaded(one.x), one.wanted) and not hasattr(loaded[1], "one")
    pp.save(loaded, tmp_path / "again.safetensors", card=one.content["card"])
    assert (tmp_path / "again.safetensors").read_bytes() == victims[
        "a block without its branch"
    ].data


VANISHED: dict[str, Any] = {
    "no nodes": {"1": [{"node": "nowhere", "vector": True}]},
    "no module": {"nowhere": []},
    "not a list": {"1": {}},
    "another edit": {"1": [{"node": "two", "delete": True}]},
    "two edits in one": {"1": [{"node": "two", "vector": True, "spread": True}]},
    "no flag": {"1": [{"node": "two", "vector": 0}]},
    "no edit": {"1": [1]},
    "a node that is no name": {"1": [{"node": ["two"], "vector": True}]},
    "of a layer": {"0": [{"node": "x", "vector": True}]},
    "not a table": [],
    "nothing": None,
}


@pytest.mark.parametrize("name", VANISHED)
def test_a_damaged_file_of_version_1_is_refused(
    name: str, victims: dict[str, Victim], tmp_path: Path
) -> None:
    one = of_version_1(victims["a block without its branch"])
    content = copy.deepcopy(one.content)
    content["recipe"]["vanished"] = VANISHED[name]
    refused(one, save(one.tensors, {"polarprune": json.dumps(content)}), tmp_path)


# --------------------------------------------------------------------------------------------------
# all of it at random


def test_the_watch_sees_what_runs() -> None:
    sys.addaudithook(attack._watch)
    with attack.armed():
        compile("1", "", "eval")
        list(Path().glob("nothing*"))
    assert any(event.startswith("compile") for event in attack._events)
    with attack.armed():
        torch.ones(3).sum()
    assert not attack._events


def test_no_attack_gets_through(tmp_path: Path) -> None:
    gc.collect()
    found, wrong = attack.attack(250, 10**6, tmp_path)
    assert not wrong and sum(found.values()) == 250
    assert {way for way, _ in found} == {"damaged", "forged", "hostile", "mangled"}
    assert found["hostile", "refused"] > 30 and found["damaged", "refused"] > 30
