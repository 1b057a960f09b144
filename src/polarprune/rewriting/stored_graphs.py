"""Convert graphs to plain data and back, with a closed set of nodes, calls and constants.

`encode` writes what `decode` reads, and both refuse everything else. Names are ASCII identifiers.
Functions, methods and attributes are listed in `allowed_calls`. Constants are numbers, short
strings, dtypes, devices, and containers of these. Decoding builds a graph and runs nothing. A node
is stored as its name, kind, target, arguments, keyword arguments and, where it is known, the user's
source line; `y * 2.0` becomes

    ["mul", "call_function", "operator.mul", {"tuple": [{"node": "y"}, 2.0]}, {"dict": {}},
     "net.py:12"]

The source line appears in messages and is not used for anything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import fx

from ..errors import PruneError
from ..tracing.source_lines import SOURCE_LINE
from .allowed_calls import ATTRIBUTES, METHODS, function_named, name_of_function, takes
from .call_form import count_leaves, decode_form, encode_form
from .captured_forward import CapturedForward
from .node_names import is_source_line, source_line

Json: TypeAlias = object  # the result of `json.loads`, whose types are not known yet
StoredForward: TypeAlias = dict[str, Json]
Nodes: TypeAlias = Mapping[str, fx.Node]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", re.ASCII)
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:[0-9]{1,3})?", re.ASCII)
# For other devices, and for tensor types of theirs, torch imports a module with the device's name.
_OTHER_DEVICE = re.compile(
    r"(privateuseone|hpu|xla|lazy|ipu|vulkan|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|mtia|meta)"
    r"(:.*)?|torch\.(?!(cuda\.|xpu\.|mps\.)?[A-Z][A-Za-z0-9]*Tensor$).*",
    re.DOTALL,
)
_MAX_NODES = 100_000  # in a graph
_MAX_LENGTH = 4096  # of a string
_DTYPES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32
complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
"""
_CONSTANTS: dict[str, dict[str, object]] = {
    "dtype": {name: getattr(torch, name) for name in _DTYPES.split() if hasattr(torch, name)},
    "memory_format": {
        name: getattr(torch, name)
        for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
    },
    "layout": {"strided": torch.strided},
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}
_TYPES = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}


def refuse(what: str) -> PruneError:
    """Return the error for a file whose stored code is refused."""
    return PruneError(f"not loaded: the file holds code that is not allowed ({what[:200]}).")


def is_identifier(name: object) -> TypeGuard[str]:
    """Return whether this is a short ASCII identifier that does not start with `__`."""
    return (
        isinstance(name, str)
        and len(name) <= 200
        and _IDENTIFIER.fullmatch(name) is not None
        and not name.startswith("__")
    )


def is_path(path: object) -> TypeGuard[str]:
    """Return whether this is a path of a module or tensor: names joined by dots."""
    return (
        isinstance(path, str)
        and len(path) <= _MAX_LENGTH
        and _PATH.fullmatch(path) is not None
        and not any(part.startswith("__") for part in path.split("."))
    )


def encode(captured: CapturedForward) -> StoredForward:
    """Return a captured forward as plain data that JSON can hold.

    Raises:
        PruneError: The graph contains a call or a constant that cannot be stored.
    """
    graphs = {mode: encode_graph(graph) for mode, graph in captured.graphs.items()}
    fixed = {number: _encode(value) for number, value in captured.fixed.items()}
    form = None if captured.form is None else encode_form(captured.form)
    return {"form": form, "fixed": fixed, **graphs}


def decode(data: Json) -> CapturedForward:
    """Return the captured forward that `encode` turned into plain data.

    Raises:
        PruneError: The data contains anything that `encode` does not write.
    """
    try:
        return _decode_forward(data)
    except PruneError:
        raise
    except Exception as error:  # a forged file can hold anything
        raise refuse(repr(error)) from error


def encode_graph(graph: fx.Graph) -> list[list[Json]]:
    """Return a graph as a list of nodes: name, kind, target, arguments, keywords, source line."""
    data = [_encode_node(node) for node in graph.nodes]
    for item in data:
        _check_node(item)
    return data


def _encode_node(node: fx.Node) -> list[Json]:
    """Return a node as a list."""
    args, kwargs = _encode(node.args), _encode(dict(node.kwargs))
    line = source_line(node)
    found: list[Json] = [node.name, node.op, _encode_target(node), args, kwargs]
    return found if line is None else [*found, line]


def _encode_target(node: fx.Node) -> str:
    """Return the stored name of what a node calls or reads."""
    return name_of_function(node.target) if node.op == "call_function" else str(node.target)


def _decode_forward(data: Json) -> CapturedForward:
    """Return the captured forward, and refuse data of any other form."""
    parts = _as_dict(data, "parts of a forward")
    _check(parts.keys() == {"form", "fixed", "train", "eval"}, "parts of a forward")
    form = None if parts["form"] is None else decode_form(parts["form"])
    fixed = _as_dict(parts["fixed"], "fixed arguments")
    _check(form is not None or not fixed, "fixed arguments")
    graphs = {mode: _decode_graph(parts[mode]) for mode in ("train", "eval")}
    inputs = _placeholders(graphs["train"])
    count = len(inputs) + len(fixed)
    same_inputs = inputs == _placeholders(graphs["eval"])
    _check(same_inputs and fixed.keys() <= {str(k) for k in range(count)}, "arguments")
    _check(form is None or count_leaves(form) == count, "arguments")
    return CapturedForward(form, {key: _decode(value, {}) for key, value in fixed.items()}, graphs)


def _placeholders(graph: fx.Graph) -> list[tuple[object, object]]:
    """Return the name and the default value of each input."""
    return [(node.target, node.args) for node in graph.nodes if node.op == "placeholder"]


def _decode_graph(data: Json) -> fx.Graph:
    """Return the graph of a list of nodes."""
    data = _as_list(data, "graph")
    _check(0 < len(data) <= _MAX_NODES, "number of nodes")
    items = [_as_list(item, "node") for item in data]
    _check(all(len(item) in (5, 6) for item in items), "node")
    kinds = [item[1] for item in items]
    inputs = kinds.count("placeholder")
    in_order = kinds[:inputs] == ["placeholder"] * inputs and kinds[-1] == "output"
    _check(in_order and kinds.count("output") == 1, "order of nodes")
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for item in items:
        name, kind, target = _check_node(item)
        _check(name not in nodes, f"two nodes named {name}")
        function = function_named(target) if kind == "call_function" else target
        known = {} if kind == "placeholder" else nodes  # default values are constants
        args, kwargs = tuple(_decode(item[3], known)), _decode(item[4], known)
        nodes[name] = graph.create_node(kind, function, args, kwargs, name)
        if len(item) > 5:
            nodes[name].meta[SOURCE_LINE] = item[5]
    return graph


def _check(fine: bool, what: str) -> None:
    """Refuse the file unless the condition holds."""
    if not fine:
        raise refuse(what)


def _as_dict(data: Json, what: str) -> dict[str, Json]:
    """Return data that is a dict, and refuse any other."""
    if type(data) is not dict:
        raise refuse(what)
    return data


def _as_list(data: Json, what: str) -> list[Json]:
    """Return data that is a list, and refuse any other."""
    if type(data) is not list:
        raise refuse(what)
    return data


def _check_node(item: Sequence[Json]) -> tuple[str, str, str]:
    """Check one stored node before it is used, and return its name, kind and target."""
    name, kind, target, args, kwargs, *line = item
    if not is_identifier(name) or type(target) is not str:
        raise refuse(f"node {name!r}")
    _check(all(map(is_source_line, line)), f"source line of {name}")
    what = f"arguments of {name}"
    given = _as_list(_as_dict(args, what).get("tuple"), what)
    named = _as_dict(_as_dict(kwargs, what).get("dict"), what)
    words = all(is_identifier(word) and word.lstrip("_") in (word, "stacklevel") for word in named)
    writes = kind != "call_module" and named.get("out") is not None
    _check(words and not writes, f"keywords of {name}")
    if type(kind) is not str or not _is_allowed(kind, target, given, named):
        attribute = given[1:2] if target == "builtins.getattr" else ""
        raise refuse(f"{name}: {kind} {target} {attribute}")
    if kind in ("call_method", "call_function"):
        _check(takes(kind, target, len(given), named), f"{what}: {kind} {target}")
    return name, kind, target


def _is_allowed(kind: str, target: str, given: list[Json], named: dict[str, Json]) -> bool:
    """Return whether a node of this kind may have this target and these arguments.

    `function_named` checks the names of functions.
    """
    allowed = {
        "placeholder": is_identifier(target) and len(given) <= 1 and not named,
        "get_attr": is_path(target) and not given and not named,
        "call_module": is_path(target),
        "call_method": target in METHODS and bool(given) and _is_node(given[0]),
        "call_function": target != "builtins.getattr" or _reads_attribute(given, named),
        "output": target == "output" and len(given) == 1 and not named,
    }
    return allowed.get(kind, False)


def _is_node(data: Json) -> bool:
    """Return whether the data refers to a node."""
    return type(data) is dict and data.keys() == {"node"}


def _reads_attribute(given: list[Json], named: dict[str, Json]) -> bool:
    """Return whether the arguments of `getattr` are a node and an allowed attribute."""
    attribute = given[1] if len(given) == 2 else None
    allowed = type(attribute) is str and attribute in ATTRIBUTES
    return allowed and _is_node(given[0]) and not named


# --- constants ------------------------------------------------------------------------------------


def _encode(value: object) -> Json:
    """Return an argument of a node as plain data."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return {"list": [_encode(item) for item in value]}
    if type(value) is tuple or type(value) is torch.Size:
        return {"tuple": [_encode(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encode(item) for item in (value.start, value.stop, value.step)]}
    return _encode_constant(value)


def _encode_constant(value: object) -> Json:
    """Return a value that contains no other values as plain data."""
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.device) and _DEVICE.fullmatch(str(value)):
        return {"device": str(value)}
    for kind, class_ in _TYPES.items():
        if isinstance(value, class_) and str(value).removeprefix("torch.") in _CONSTANTS[kind]:
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if _is_plain(value):
        return value
    raise PruneError(f"its code uses {value!r}, which cannot be stored in a file")


def _is_plain(value: object) -> bool:
    """Return whether this is None, a bool, a finite 64-bit number, or a short ASCII string."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        fine = len(value) <= _MAX_LENGTH and value.isascii()
        return fine and _OTHER_DEVICE.fullmatch(value) is None
    return value is None or type(value) is bool or (type(value) is float and math.isfinite(value))


def _decode(data: Json, nodes: Nodes) -> Any:
    """Return an argument of a node from plain data, which may refer to these nodes."""
    if type(data) is not dict:
        _check(_is_plain(data), f"constant {str(data)[:50]!r}")
        return data
    _check(len(data) == 1, "constant")
    ((kind, held),) = data.items()
    if kind == "node":
        _check(type(held) is str and held in nodes, f"node {held!r} is used before it is defined")
        return nodes[held]
    if kind == "ellipsis":
        return Ellipsis
    if kind == "dict":
        _check(type(held) is dict and all(len(key) <= _MAX_LENGTH for key in held), "dict")
        return {key: _decode(item, nodes) for key, item in held.items()}
    if kind in ("tuple", "list", "immutable_list", "slice"):
        _check(type(held) is list and (kind != "slice" or len(held) == 3), kind)
        items = [_decode(item, nodes) for item in held]
        return slice(*items) if kind == "slice" else tuple(items) if kind == "tuple" else items
    return _decode_constant(kind, held)


def _decode_constant(kind: str, name: Json) -> object:
    """Return the device, dtype, memory format, layout or special float with this name."""
    if type(name) is not str:
        raise refuse(kind)
    if kind == "device":
        _check(_DEVICE.fullmatch(name) is not None, f"device {name!r}")
        return torch.device(name)
    _check(name in _CONSTANTS.get(kind, {}), f"{kind} {name!r}")
    return _CONSTANTS[kind][name]
