"""Refuse code whose effects a graph cannot hold.

A graph holds what a forward returns. It cannot record that the forward switched off gradients,
changed the precision, called a `torch.autograd.Function`, drew a random number with Python, or
stored something on `self`. Code that does so must not be replaced by a graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import PruneError
from ..torch_internals.class_swaps import derived_class
from ..torch_internals.patches import switches_reported

Table = MutableMapping[str, object]


@contextmanager
def side_effects_refused(
    module: nn.Module, is_elsewhere: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Raise a PruneError if the module's code, run in this context, has side effects.

    One effect is allowed: a table that the code looks up on `self`, and computes only if it is
    missing. A graph computes it in every call. The module is restored afterwards.

    Args:
        module: The module whose forward runs in this context.
        is_elsewhere: Returns True while code runs that does not become part of the graph, such as
            the forward of a child. That code may have side effects.
    """

    def refuse(name: str) -> None:
        if not is_elsewhere():
            raise PruneError(f"its code uses {name}, which a graph cannot hold")

    saved = _Saved(module)
    try:
        with switches_reported(refuse), _reads_before_writes(module) as looked_up:
            yield
        saved.refuse_changes(looked_up)
    finally:
        saved.restore()


class _Saved:
    """What a module holds, and the state of Python's random numbers."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes: Table = vars(module)
        tables: list[Table] = [vars(module), _table(module, "_buffers")]
        self.tables = [(t, dict(t)) for t in (*tables, _table(module, "_parameters"))]
        own = [value for key, value in vars(module).items() if not key.startswith("_")]
        self.lists = [(value, value.copy()) for value in own if type(value) is list]
        self.dicts = [(value, value.copy()) for value in own if type(value) is dict]
        self.random = random.getstate()

    def refuse_changes(self, looked_up: set[str]) -> None:
        """Raise if the code changed anything but tables that it looked up before it set them."""
        names = [
            name
            for table, old in self.tables
            for name in {*table, *old}
            if not _is_same(table.get(name), old.get(name))
            and not (table is self.attributes and self._is_table(name, looked_up))
        ]
        if names:
            raise PruneError(f"its code sets self.{min(names)}, which a graph cannot hold")
        if any(len(value) != len(old) for value, old in self.lists):
            raise PruneError("its code appends to a list on self, which a graph cannot hold")
        if random.getstate() != self.random:
            raise PruneError("its code draws random numbers with Python's random module")

    def _is_table(self, name: str, looked_up: set[str]) -> bool:
        return name in looked_up and not _is_number(self.attributes.get(name))

    def restore(self) -> None:
        """Put everything back."""
        random.setstate(self.random)
        for table, old in (*self.tables, *self.dicts):
            table.clear()
            table.update(old)
        for value, items in self.lists:
            value[:] = items


def _table(module: nn.Module, name: str) -> Table:
    table: Table = vars(module)[name]
    return table


@contextmanager
def _reads_before_writes(module: nn.Module) -> Iterator[set[str]]:
    """Yield the set of attributes that code in this context reads before it sets them."""
    read, written, family = set[str](), set[str](), type(module)

    def get(self: nn.Module, name: str) -> object:
        if name not in written:
            read.add(name)
        return family.__getattribute__(self, name)

    def put(self: nn.Module, name: str, value: Any) -> None:
        written.add(name)
        family.__setattr__(self, name, value)

    with derived_class(module, {"__getattribute__": get, "__setattr__": put}):
        yield read


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float))


def _is_same(one: object, other: object) -> bool:
    return one is other or (_is_number(one) and _is_number(other) and one == other)
