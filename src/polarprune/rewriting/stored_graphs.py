"""Graphs as plain data, and back: a closed set of nodes, calls and constants.

What `encode` writes `decode` reads, and both refuse everything else: names are ASCII identifiers,
functions, methods and attributes stand in `allowed_calls`, constants are numbers, short texts,
types, devices, and containers of these. Decoding builds a graph and runs nothing.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import fx

from ..errors import PruneError
from .allowed_calls import ATTRIBUTES, METHODS, function_named, name_of_function, takes
from .captured_forward import CapturedForward

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", re.ASCII)
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:[0-9]{1,3})?", re.ASCII)
# Other devices make torch import what is called so, and types of theirs as well.
_OTHER_DEVICE = re.compile(
    r"(privateuseone|hpu|xla|lazy|ipu|vulkan|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|mtia|meta)"
    r"(:.*)?|torch\.(?!(cuda\.|xpu\.|mps\.)?[A-Z][A-Za-z0-9]*Tensor$).*",
    re.DOTALL,
)
_NODES, _TEXT = 100_000, 4096  # as many nodes in a graph, as many characters in a text at most
_LEAF = '{"type": null, "context": null, "children_spec": []}'  # of a form, an argument
_DTYPES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32
complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
"""
_CONSTANTS: dict[str, dict[str, Any]] = {
    "dtype": {name: getattr(torch, name) for name in _DTYPES.split() if hasattr(torch, name)},
    "memory_format": {
        name: getattr(torch, name)
        for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
    },
    "layout": {"strided": torch.strided},
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}
_KINDS = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}


def refuse(what: str) -> PruneError:
    return PruneError(f"the file holds code that is not understood ({what[:200]}): not loaded.")


def is_identifier(name: Any) -> bool:
    return (
        isinstance(name, str)
        and len(name) <= 200
        and _IDENTIFIER.fullmatch(name) is not None
        and not name.startswith("__")
    )


def is_path(path: Any) -> bool:
    """Names of modules and of a tensor, with dots between them."""
    return (
        isinstance(path, str)
        and len(path) <= _TEXT
        and _PATH.fullmatch(path) is not None
        and not any(part.startswith("__") for part in path.split("."))
    )


def encode(captured: CapturedForward) -> dict[str, Any]:
    """As plain data."""
    graphs = {mode: encode_graph(graph) for mode, graph in captured.graphs.items()}
    fixed = {number: _encode(value) for number, value in captured.fixed.items()}
    return {"form": captured.form, "fixed": fixed, **graphs}


def decode(data: Any) -> CapturedForward:
    try:
        return _decode_forward(data)
    except PruneError:
        raise
    except Exception as error:  # whatever may be in a file
        raise refuse(repr(error)) from error


def encode_graph(graph: fx.Graph) -> list[Any]:
    data = [
        [node.name, node.op, _target(node), _encode(node.args), _encode(dict(node.kwargs))]
        for node in graph.nodes
    ]
    for name, kind, target, args, kwargs in data:
        _check_node(name, kind, target, args, kwargs)
    return data


def _target(node: fx.Node) -> str:
    return name_of_function(node.target) if node.op == "call_function" else str(node.target)


def _decode_forward(data: Any) -> CapturedForward:
    _check(type(data) is dict and data.keys() == {"form", "fixed", "train", "eval"}, "its parts")
    form, fixed = data["form"], data["fixed"]
    _check(form is None or (type(form) is str and len(form) < 2**16), "the form of a call")
    _check(type(fixed) is dict and (form is not None or not fixed), "fixed arguments")
    graphs = {mode: _decode_graph(data[mode]) for mode in ("train", "eval")}
    inputs = [[(n.target, n.args) for n in graph.nodes if n.op == "placeholder"]
              for graph in graphs.values()]  # fmt: skip
    count = len(inputs[0]) + len(fixed)
    fine = inputs[0] == inputs[1] and fixed.keys() <= {str(k) for k in range(count)}
    _check(fine and (form is None or form.count(_LEAF) == count), "arguments")
    return CapturedForward(form, {key: _decode(value, {}) for key, value in fixed.items()}, graphs)


def _decode_graph(data: Any) -> fx.Graph:
    _check(type(data) is list and 0 < len(data) <= _NODES, "a graph")
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    _check(all(type(item) is list and len(item) == 5 for item in data), "a node")
    kinds = [item[1] for item in data]
    inputs = kinds.count("placeholder")
    in_order = kinds[:inputs] == ["placeholder"] * inputs and kinds[-1] == "output"
    _check(in_order and kinds.count("output") == 1, "the order of nodes")
    for name, kind, target, args, kwargs in data:
        _check_node(name, kind, target, args, kwargs)
        _check(name not in nodes, f"two nodes {name}")
        function = function_named(target) if kind == "call_function" else target
        known = {} if kind == "placeholder" else nodes  # defaults are constants
        given = tuple(_decode(args, known)), _decode(kwargs, known)
        nodes[name] = graph.create_node(kind, function, *given, name)
    return graph


def _check(fine: bool, what: str) -> None:
    if not fine:
        raise refuse(what)


def _check_node(name: Any, kind: Any, target: Any, args: Any, kwargs: Any) -> None:
    """One node of a stored graph, before anything is made of it."""
    _check(is_identifier(name) and type(target) is str, f"node {name!r}")
    _check(type(args) is dict and type(args.get("tuple")) is list, f"arguments of {name}")
    _check(type(kwargs) is dict and type(kwargs.get("dict")) is dict, f"arguments of {name}")
    given, named = args["tuple"], kwargs["dict"]
    words = all(is_identifier(word) and word.lstrip("_") in (word, "stacklevel") for word in named)
    writes = kind != "call_module" and named.get("out") is not None
    _check(words and not writes, f"keywords of {name}")
    allowed = {
        "placeholder": is_identifier(target) and len(given) <= 1 and not named,
        "get_attr": is_path(target) and not given and not named,
        "call_module": is_path(target),
        "call_method": target in METHODS and bool(given) and _is_node(given[0]),
        "call_function": target != "builtins.getattr" or _reads_attribute(given, named),
        "output": target == "output" and len(given) == 1 and not named,
    }
    fine = type(kind) is str and allowed.get(kind, False)
    if fine and kind in ("call_method", "call_function"):
        _check(takes(kind, target, len(given), named), f"arguments of {name}: {kind} {target}")
    _check(fine, f"{name}: {kind} {target} {given[1:2] if target == 'builtins.getattr' else ''}")


def _is_node(data: Any) -> bool:
    return type(data) is dict and data.keys() == {"node"}


def _reads_attribute(given: list[Any], named: dict[str, Any]) -> bool:
    named_so = len(given) == 2 and type(given[1]) is str and given[1] in ATTRIBUTES
    return named_so and _is_node(given[0]) and not named


# --- constants ------------------------------------------------------------------------------------


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list) or type(value) in (tuple, torch.Size):
        return {"list" if isinstance(value, list) else "tuple": [_encode(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encode(item) for item in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.device) and _DEVICE.fullmatch(str(value)):
        return {"device": str(value)}
    for kind, family in _KINDS.items():
        if isinstance(value, family) and str(value).removeprefix("torch.") in _CONSTANTS[kind]:
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if _is_plain(value):
        return value
    raise PruneError(f"its code uses {value!r}, which a file cannot hold")


def _is_plain(value: Any) -> bool:
    """Numbers that fit into 64 bits, and short texts."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        fine = len(value) <= _TEXT and value.isascii()
        return fine and _OTHER_DEVICE.fullmatch(value) is None
    return value is None or type(value) is bool or (type(value) is float and math.isfinite(value))


def _decode(data: Any, nodes: dict[str, fx.Node]) -> Any:
    if type(data) is not dict:
        _check(_is_plain(data), f"constant {str(data)[:50]!r}")
        return data
    _check(len(data) == 1, "a constant")
    ((kind, held),) = data.items()
    if kind == "node":
        _check(type(held) is str and held in nodes, f"node {held!r} is used before it is made")
        return nodes[held]
    if kind == "ellipsis":
        return Ellipsis
    if kind == "dict":
        _check(type(held) is dict and all(len(key) <= _TEXT for key in held), "a dict")
        return {key: _decode(item, nodes) for key, item in held.items()}
    if kind in ("tuple", "list", "immutable_list", "slice"):
        _check(type(held) is list and (kind != "slice" or len(held) == 3), f"a {kind}")
        items = [_decode(item, nodes) for item in held]
        return slice(*items) if kind == "slice" else tuple(items) if kind == "tuple" else items
    _check(type(held) is str, f"a {kind}")
    if kind == "device":
        _check(_DEVICE.fullmatch(held) is not None, f"device {held!r}")
        return torch.device(held)
    _check(held in _CONSTANTS.get(kind, {}), f"{kind} {held!r}")
    return _CONSTANTS[kind][held]
