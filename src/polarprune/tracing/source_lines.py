"""Find the line of the user's code that an operation comes from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SOURCE_LINE = "source_line"  # key in the `meta` of a captured node: the line it comes from
_INTERNAL = ("torch.", "polarprune.")
_ALSO_INTERNAL = ("torch", "contextlib")


def run_as_line(line: str | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, and let `user_line` report `line` for what it does.

    A forward that runs a captured graph executes no code of the user's. It names the line that each
    node was captured from. Children that run their own code report their own lines.
    """
    return function(*args, **kwargs)


def user_line() -> str:
    """Return file:line of the innermost frame that belongs to neither torch nor this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is run_as_line.__code__ and frame.f_locals["line"]:
            return str(frame.f_locals["line"])
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_INTERNAL) and name not in _ALSO_INTERNAL:
            return line_of(frame)
        frame = frame.f_back
    return "?"


def line_of(frame: FrameType) -> str:
    """Return file:line of a frame, without the folder."""
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
