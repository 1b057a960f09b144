"""Name a node of a graph in messages as users know it: by its operation and the source line."""

from __future__ import annotations

import operator
import re

from torch import fx

from ..tracing.source_lines import SOURCE_LINE

# A file name without a folder, and a number; as `tracing.source_lines.line_of` writes it.
_LINE = re.compile(r"[A-Za-z0-9_.<>() -]{1,100}:[0-9]{1,7}", re.ASCII)
_SYMBOLS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"},
    **{"pow": "**", "matmul": "@", "neg": "-", "getitem": "[...]", "setitem": "[...] ="},
    **{"and_": "&", "or_": "|", "xor": "^", "invert": "~"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"iadd": "+=", "isub": "-=", "imul": "*=", "itruediv": "/="},
}
_CHECKS = ("expect", "expect_pieces")  # our own functions, which check a value of the user's code


def describe(node: fx.Node) -> str:
    """Return the source line and the operation of a node, such as `net.py:12, operation split`."""
    line = source_line(node)
    return f"{line}, {_operation(node)}" if line else _operation(node)


def source_line(node: fx.Node) -> str | None:
    """Return the user's source line of a node, or None if it is not known."""
    line = node.meta.get(SOURCE_LINE)
    return line if is_source_line(line) else None


def is_source_line(line: object) -> bool:
    """Return whether this is a short file name without a folder, and a line number."""
    return type(line) is str and _LINE.fullmatch(line) is not None


def _operation(node: fx.Node) -> str:
    """Return what a node does, in the words of the user's code."""
    name = str(getattr(node.target, "__name__", node.target))
    python = getattr(operator, name, None) is node.target
    if node.op == "call_module":
        return f"submodule {name}"
    if node.op == "placeholder":
        return f"argument {name}"
    if node.op == "output":
        return "return value"
    if node.op == "get_attr":
        return f"attribute {name}"
    if name == "getattr" and len(node.args) > 1:
        return f"attribute {node.args[1]}"
    checked = node.args[0] if node.args else None
    if name in _CHECKS and isinstance(checked, fx.Node):
        return _operation(checked)
    return f"operation {_SYMBOLS.get(name, name) if python else name}"
