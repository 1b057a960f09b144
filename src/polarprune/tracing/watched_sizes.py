"""Integers that remember which size they were read from.

While a model is recorded, `x.shape[1]`, `x.size(1)`, `x.numel()` and the integers that modules hold
(`self.conv.out_channels`) are instances of `WatchedInt`. Arithmetic on them builds an expression,
and a comparison is written into a `SizeLog`. The expressions reveal code that takes another branch
for another width. A trial cut would find such code only by chance.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .source_lines import line_of

if TYPE_CHECKING:
    from .tape import Value

_DEEPEST = 200  # nested operations; beyond this depth a number is no longer watched
# These packages compare sizes in checks only: they compute the same for any width.
_OTHER_PACKAGES = ("torch", "polarprune", "einops")


@dataclass(frozen=True)
class SizeOf:
    """The size of a tensor along an axis."""

    value: Value
    axis: int

    @property
    def number(self) -> int:
        """The size in the recorded run."""
        return self.value.shape[self.axis]


@dataclass(frozen=True)
class AttributeOf:
    """An integer attribute of a module."""

    module: str
    name: str
    number: int


Leaf = SizeOf | AttributeOf
Method = Callable[..., object]


@dataclass(eq=False)
class Expression:
    """How a number was computed from sizes."""

    function: Method | None  # None for a leaf or a constant
    inputs: tuple[Any, ...]  # expressions; or the leaf or the constant
    leaves: frozenset[Leaf] = frozenset()
    depth: int = 0

    @staticmethod
    def constant(number: object) -> Expression:
        """Return the expression of a plain number."""
        return Expression(None, (number,))

    @property
    def is_zero(self) -> bool:
        """True for the plain number 0."""
        return self.function is None and self.inputs == (0,)

    @property
    def is_product(self) -> bool:
        """True for a product of sizes and positive numbers: it is 0 only if one of the sizes is."""
        if self.function is operator.mul:
            return all(one.is_product for one in self.inputs)
        if self.function is not None:
            return False
        (given,) = self.inputs
        return isinstance(given, Leaf) or (isinstance(given, (int, float)) and given > 0)

    def value(self, read: Callable[[Leaf], int]) -> object:
        """Return the value for other sizes of the leaves, or None if it cannot be computed."""
        try:
            return self._value(read, {})
        except (ArithmeticError, ValueError, TypeError):
            return None

    def _value(self, read: Callable[[Leaf], int], known: dict[int, object]) -> object:
        if id(self) not in known:
            if self.function is None:
                (given,) = self.inputs
                known[id(self)] = read(given) if isinstance(given, Leaf) else given
            else:
                known[id(self)] = self.function(*(one._value(read, known) for one in self.inputs))
        return known[id(self)]


class Decision(NamedTuple):
    """A comparison of two numbers, at least one of which was computed from sizes."""

    module: str
    line: str
    left: Expression
    right: Expression

    @property
    def where(self) -> str:
        """The module and the source line, for messages."""
        return f"{self.module or 'model'} ({self.line})"

    @property
    def tells_emptiness(self) -> bool:
        """True if the result depends only on whether a size is 0, as in `x.numel() == 0`."""
        sides = (self.left, self.right), (self.right, self.left)
        return any(one.is_product and other.is_zero for one, other in sides)

    @property
    def leaves(self) -> frozenset[Leaf]:
        """The sizes that the comparison depends on."""
        return self.left.leaves | self.right.leaves


class SizeLog:
    """Notes what the model's code does with sizes in one run, until it is stopped.

    Args:
        module: Returns the path of the module that runs now.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        self.module = module
        self.active = True
        self._decisions: dict[tuple[object, ...], Decision] = {}
        self._rounded: dict[tuple[object, ...], Expression] = {}

    def stop(self) -> None:
        """Note nothing from here on."""
        self.active = False

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The comparisons in the model's code."""
        return tuple(self._decisions.values())

    @property
    def rounded(self) -> tuple[Expression, ...]:
        """Numbers that were rounded, or are no longer watched.

        Different sizes may give the same number.
        """
        return tuple(self._rounded.values())

    def compared(self, left: Expression, right: Expression, line: str | None = None) -> None:
        """Note a comparison in the user's code, at `line` or at the line that runs now."""
        line = line or _calling_line()
        if self.active and line is not None:
            found = Decision(self.module(), line, left, right)
            self._decisions.setdefault((found.module, line, left.leaves, right.leaves), found)

    def lost(self, one: Expression) -> None:
        """Note a number that is not watched from here on."""
        line = _calling_line() if self.active else None
        if line is not None:
            self._rounded.setdefault((self.module(), line, one.leaves), one)


def _calling_line() -> str | None:
    """Return file:line of the code that uses the number, or None if it is not the user's code."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").partition(".")[0] in _OTHER_PACKAGES:
        return None
    return line_of(frame)


def watched_size(value: Value, axis: int, log: SizeLog) -> WatchedInt:
    """Return the size of a tensor along an axis, as a watched integer."""
    return _leaf(SizeOf(value, axis), log)


def watched_sizes(value: Value, log: SizeLog) -> list[WatchedInt]:
    """Return the shape of a tensor, as watched integers."""
    return [watched_size(value, axis, log) for axis in range(len(value.shape))]


def watched_count(value: Value, log: SizeLog) -> int:
    """Return the number of elements of a tensor, as a watched integer."""
    return math.prod(watched_sizes(value, log))


def watch_attributes(modules: Iterable[tuple[str, object]], log: SizeLog) -> None:
    """Replace the integer attributes of modules with watched integers."""
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
    """What watched integers and floats have in common. A copy is a plain number."""

    source: Expression
    log: SizeLog

    def __reduce__(self) -> tuple[type[int] | type[float], tuple[int | float]]:
        return int if isinstance(self, int) else float, (plain(self),)

    def __deepcopy__(self, memo: object) -> object:
        return plain(self)

    def __copy__(self) -> object:
        return plain(self)


class WatchedInt(_Watched, int):
    """An integer that was read from a size, or computed from one."""


class WatchedFloat(_Watched, float):
    """A float that was computed from a size."""


def plain(number: object) -> Any:
    """Return the number as an int or float. (`int(number)` would be logged.)"""
    if isinstance(number, WatchedInt):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, WatchedFloat) else number


def _expression(number: object) -> Expression:
    return number.source if isinstance(number, _Watched) else Expression.constant(number)


def _computed(function: Callable[..., object], log: SizeLog, *given: object) -> object:
    """Apply a function to numbers, and return a watched number if the result is one."""
    result = function(*map(plain, given))
    inputs = tuple(map(_expression, given))
    depth = 1 + max(one.depth for one in inputs)
    if not log.active or depth > _DEEPEST:
        return result
    if type(result) is int:
        found: WatchedInt | WatchedFloat = WatchedInt(result)
    elif type(result) is float:
        found = WatchedFloat(result)
    else:
        return result
    leaves = frozenset[Leaf]().union(*(one.leaves for one in inputs))
    found.source, found.log = Expression(function, inputs, leaves, depth), log
    if function in _ROUNDING:
        log.lost(found.source)
    return found


# --- the methods of watched numbers ---------------------------------------------------------------

_BINARY: dict[str, Method] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv")},
    **{name: getattr(operator, name) for name in ("mod", "pow", "lshift", "rshift", "xor")},
    "and": operator.and_,
    "or": operator.or_,
}
_UNARY: dict[str, Method] = {
    **{name: getattr(operator, name) for name in ("neg", "abs", "pos", "invert")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "trunc")},
    "round": round,
}
_ROUNDING: set[Method] = {
    *(_BINARY[name] for name in ("floordiv", "mod", "rshift", "and", "or", "xor")),
    *(_UNARY[name] for name in ("floor", "ceil", "trunc", "round")),
}
_COMPARISONS: dict[str, Method] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_CONVERSIONS = ("int", "float", "str", "repr", "format", "hash")  # the result is not watched


def _binary(function: Method, reflected: bool) -> Method:
    def method(self: _Watched, other: object, *more: object) -> object:
        if more or not isinstance(other, (int, float)):
            return NotImplemented
        return _computed(function, self.log, *((other, self) if reflected else (self, other)))

    return method


def _unary(function: Method) -> Method:
    def method(self: _Watched, *digits: object) -> object:
        return _computed(function, self.log, self, *digits)

    return method


def _comparison(function: Method) -> Method:
    def method(self: _Watched, other: object) -> object:
        if not isinstance(other, (int, float)):
            return NotImplemented
        self.log.compared(self.source, _expression(other))
        return function(plain(self), plain(other))

    return method


def _conversion(name: str) -> Method:
    def method(self: _Watched, *given: object) -> object:
        self.log.lost(self.source)
        return getattr(plain(self), f"__{name}__")(*given)

    return method


def _truth(self: _Watched) -> bool:
    self.log.compared(self.source, _expression(0))
    return bool(plain(self))


def _add_methods(kind: type[_Watched]) -> None:
    """Let arithmetic, comparisons and conversions of a watched type go through the log."""
    for name, function in _BINARY.items():
        if hasattr(kind, f"__{name}__"):
            setattr(kind, f"__{name}__", _binary(function, reflected=False))
            setattr(kind, f"__r{name}__", _binary(function, reflected=True))
    for name, function in _UNARY.items():
        if hasattr(kind, f"__{name}__"):
            setattr(kind, f"__{name}__", _unary(function))
    for name, compare in _COMPARISONS.items():
        setattr(kind, f"__{name}__", _comparison(compare))
    for name in _CONVERSIONS:
        setattr(kind, f"__{name}__", _conversion(name))
    setattr(kind, "__bool__", _truth)  # noqa: B010


_add_methods(WatchedInt)
_add_methods(WatchedFloat)
