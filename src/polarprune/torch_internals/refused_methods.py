"""Every method of a user's module that polarprune disables, so that calling it raises.

The refusal is an attribute of one module, under the name of the method, so that other instances of
the class are not affected. It holds only its message, so copies, pickles and other threads can
share it.
"""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from ..errors import PruneError


class Refusal:
    """Replaces a method, and raises when it is called."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise PruneError(self.message)


def refuse_method(module: nn.Module, name: str, message: str) -> None:
    """Make a method of this module raise a PruneError with this message."""
    vars(module)[name] = Refusal(message)


def allow_method(module: nn.Module, name: str) -> None:
    """Undo `refuse_method`."""
    if isinstance(vars(module).get(name), Refusal):
        del vars(module)[name]
