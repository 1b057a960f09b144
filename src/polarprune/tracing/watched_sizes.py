"""Sizes that remember which axis they were read from.

While a model is recorded, `x.shape[1]`, `x.size(1)`, `x.numel()` and the whole numbers that modules
hold (`self.conv.out_channels`) are instances of `WatchedInt`. Arithmetic with them is remembered as
an expression, and a comparison is written into a `SizeLog`. So code that takes another way when a
width changes is found by looking at the code's own expressions, not by the luck of a trial cut.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .tape import Value

_DEEPEST = 200  # operations in a row; after as many a number is taken as it is
_OTHERS = ("torch", "polarprune", "einops")  # their code checks sizes, and computes the same


@dataclass(frozen=True)
class SizeOf:
    """The size of a tensor along an axis."""

    value: Value
    axis: int

    @property
    def number(self) -> int:
        return self.value.shape[self.axis]


@dataclass(frozen=True)
class AttributeOf:
    """A whole number that a module holds."""

    module: str
    name: str
    number: int


Leaf = SizeOf | AttributeOf


@dataclass(eq=False)
class Expression:
    """How a number was computed from sizes."""

    function: Callable[..., Any] | None  # None: it is the leaf itself, or a constant
    inputs: tuple[Any, ...]
    leaves: frozenset[Leaf] = frozenset()
    depth: int = 0

    @staticmethod
    def constant(number: Any) -> Expression:
        return Expression(None, (number,))

    def value(self, read: Callable[[Leaf], int]) -> Any:
        """Its value if the leaves had other numbers; None if it has none."""
        try:
            return self._value(read, {})
        except (ArithmeticError, ValueError, TypeError):
            return None

    def _value(self, read: Callable[[Leaf], int], known: dict[int, Any]) -> Any:
        if id(self) not in known:
            if self.function is None:
                (given,) = self.inputs
                known[id(self)] = read(given) if isinstance(given, Leaf) else given
            else:
                known[id(self)] = self.function(*(one._value(read, known) for one in self.inputs))
        return known[id(self)]


class Decision(NamedTuple):
    """Two numbers that code compared, of which one at least was computed from sizes."""

    module: str
    line: str
    left: Expression
    right: Expression

    @property
    def where(self) -> str:
        return f"{self.module or 'model'} ({self.line})"

    @property
    def leaves(self) -> frozenset[Leaf]:
        return self.left.leaves | self.right.leaves


@dataclass
class SizeLog:
    """What the model's code did with sizes in one run."""

    module: Callable[[], str] = lambda: ""  # the one that runs now
    decisions: dict[Any, Decision] = field(default_factory=dict)
    rounded: dict[Any, Expression] = field(
        default_factory=dict
    )  # different sizes may give the same
    active: bool = True

    def compared(self, left: Expression, right: Expression, line: str | None = None) -> None:
        """Note a comparison in the user's code, at this line or at the one that is running."""
        line = line or user_line()
        if self.active and line is not None:
            found = Decision(self.module(), line, left, right)
            self.decisions.setdefault((found.module, line, left.leaves, right.leaves), found)

    def lost(self, one: Expression) -> None:
        """A number that is not followed from here on."""
        line = user_line() if self.active else None
        if line is not None:
            self.rounded.setdefault((self.module(), line, one.leaves), one)


def user_line() -> str | None:
    """file:line of the innermost frame; None if that is no code of the user's."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").partition(".")[0] in _OTHERS:
        return None
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def watched_size(value: Value, axis: int, log: SizeLog) -> WatchedInt:
    return _leaf(SizeOf(value, axis), log)


def watched_sizes(value: Value, log: SizeLog) -> list[WatchedInt]:
    return [watched_size(value, axis, log) for axis in range(len(value.shape))]


def watched_count(value: Value, log: SizeLog) -> int:
    """The number of elements."""
    return math.prod(watched_sizes(value, log))


def watch_attributes(modules: Iterable[tuple[str, Any]], log: SizeLog) -> None:
    """Put watched numbers in place of the whole numbers that modules hold."""
    for path, module in modules:
        held = vars(module)
        for name, number in list(held.items()):
            if type(number) is int and number > 1 and not name.startswith("_"):
                held[name] = _leaf(AttributeOf(path, name, number), log)


def _leaf(leaf: Leaf, log: SizeLog) -> WatchedInt:
    found = WatchedInt(leaf.number)
    found.source, found.log = Expression(None, (leaf,), frozenset([leaf])), log
    return found


# --- numbers --------------------------------------------------------------------------------------


class _Watched:
    """What whole and other numbers have in common."""

    source: Expression
    log: SizeLog

    def __reduce__(self) -> Any:
        return _plain_type(self), (plain(self),)

    def __deepcopy__(self, memo: Any) -> Any:
        return plain(self)

    def __copy__(self) -> Any:
        return plain(self)


class WatchedInt(_Watched, int):
    """A whole number that was read from a size, or computed from one."""


class WatchedFloat(_Watched, float):
    """The same for other numbers."""


def _plain_type(number: Any) -> Any:
    return int if isinstance(number, int) else float


def plain(number: Any) -> Any:
    """Without what is remembered. (`int(number)` would be noticed.)"""
    if isinstance(number, WatchedInt):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, WatchedFloat) else number


def _expression(number: Any) -> Expression:
    return number.source if isinstance(number, _Watched) else Expression.constant(number)


def _computed(function: Any, log: SizeLog, *given: Any) -> Any:
    result = function(*map(plain, given))
    inputs = tuple(map(_expression, given))
    depth = 1 + max(one.depth for one in inputs)
    kind = {int: WatchedInt, float: WatchedFloat}.get(type(result))
    if kind is None or not log.active or depth > _DEEPEST:
        return result
    found = kind(result)
    leaves = frozenset[Leaf]().union(*(one.leaves for one in inputs))
    found.source, found.log = Expression(function, inputs, leaves, depth), log
    if function in _ROUNDING:
        log.lost(found.source)
    return found


_BINARY = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
    "lshift": operator.lshift, "rshift": operator.rshift, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
_UNARY: dict[str, Any] = {
    "neg": operator.neg, "abs": abs, "pos": operator.pos, "invert": operator.invert,
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round,
}  # fmt: skip
_ROUNDING = {operator.floordiv, operator.mod, operator.rshift, operator.and_, operator.or_,
             operator.xor, math.floor, math.ceil, math.trunc, round}  # fmt: skip
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_LOSSES = ("int", "float", "str", "repr", "format", "hash")


def _binary(function: Any, reflected: bool) -> Any:
    def method(self: Any, other: Any, *more: Any) -> Any:
        if more or not isinstance(other, (int, float)):
            return NotImplemented
        return _computed(function, self.log, *((other, self) if reflected else (self, other)))

    return method


def _unary(function: Any) -> Any:
    def method(self: Any, *digits: Any) -> Any:
        return _computed(function, self.log, self, *digits)

    return method


def _comparison(function: Any) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        self.log.compared(self.source, _expression(other))
        return function(plain(self), plain(other))

    return method


def _loss(name: str) -> Any:
    def method(self: Any, *given: Any) -> Any:
        self.log.lost(self.source)
        return getattr(plain(self), f"__{name}__")(*given)

    return method


def _truth(self: Any) -> bool:
    self.log.compared(self.source, _expression(0))
    return bool(plain(self))


def _equip(kind: Any) -> None:
    for name, function in _BINARY.items():
        if hasattr(kind, f"__{name}__"):
            setattr(kind, f"__{name}__", _binary(function, reflected=False))
            setattr(kind, f"__r{name}__", _binary(function, reflected=True))
    for name, function in _UNARY.items():
        if hasattr(kind, f"__{name}__"):
            setattr(kind, f"__{name}__", _unary(function))
    for name, compare in _COMPARISONS.items():
        setattr(kind, f"__{name}__", _comparison(compare))
    for name in _LOSSES:
        setattr(kind, f"__{name}__", _loss(name))
    kind.__bool__ = _truth


_equip(WatchedInt)
_equip(WatchedFloat)
