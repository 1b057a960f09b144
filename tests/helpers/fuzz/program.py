"""A random network as plain data, and the Python source that is written from it.

A `Program` is a list of steps; each names a kind of operation, the earlier values it reads and the
choices that were made for it. `write` prints it as an ordinary `nn.Module`. Choices that are
missing or no longer possible fall back to their simplest option, so that a program stays valid when
steps are deleted or choices are simplified (`shrink`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
LAYOUTS = ("image", "line", "seq", "vec")  # (b, c, h, w), (b, c, t), (b, t, c), (b, c)


class Impossible(Exception):
    """A step does not fit the values it reads."""


@dataclass(frozen=True)
class Value:
    """A tensor in the printed forward; its shape is that of the example, without the batch."""

    name: str
    layout: str
    shape: Shape

    @property
    def channels(self) -> int:
        return self.shape[self.axis - 1]

    @property
    def axis(self) -> int:
        """Return the channel axis, counted with the batch."""
        return 2 if self.layout == "seq" else 1

    def wide(self, channels: int) -> Shape:
        """Return the same shape with another number of channels."""
        shape = list(self.shape)
        shape[self.axis - 1] = channels
        return tuple(shape)


@dataclass
class Step:
    kind: str
    reads: list[int]
    choices: dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    seed: int
    inputs: list[tuple[str, Shape]]
    steps: list[Step]
    outputs: list[int]
    form: str = "tensor"  # of what forward returns
    batch: int = 3

    def copy(self) -> Program:
        steps = [Step(s.kind, list(s.reads), dict(s.choices)) for s in self.steps]
        return Program(
            self.seed, list(self.inputs), steps, list(self.outputs), self.form, self.batch
        )


class Choices:
    """Draws what was not chosen before; without a generator it takes the simplest option."""

    def __init__(self, made: dict[str, Any], draw: random.Random | None) -> None:
        self.made, self.draw = made, draw
        self.options: dict[str, Sequence[Any]] = {}

    def pick(self, name: str, *options: Any) -> Any:
        """Choose one of the options, of which the first is the simplest."""
        if not options:
            raise Impossible(name)
        self.options[name] = options
        if self.made.get(name, self) not in options:
            self.made[name] = self.draw.choice(options) if self.draw else options[0]
        return self.made[name]

    def width(self, name: str = "width", low: int = 2, high: int = 12, by: int = 1) -> int:
        return int(self.pick(name, *range(-(-low // by) * by, high + 1, by)))

    def flag(self, name: str) -> bool:
        return bool(self.pick(name, False, True))


class Writer:
    """Collects the lines of a module."""

    def __init__(self) -> None:
        self.init: list[str] = []
        self.forward: list[str] = []
        self.count = 0
        self.inputs: list[Value] = []
        self.options: list[dict[str, Sequence[Any]]] = []
        self.tags: set[str] = set()

    def module(self, made_by: str) -> str:
        return self.hold(made_by)

    def hold(self, expression: str) -> str:
        """Add an attribute to the module: a layer, a parameter, a number, a cache."""
        name = f"m{len(self.init)}"
        self.init.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def buffer(self, expression: str) -> str:
        name = f"b{len(self.init)}"
        self.init.append(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"

    def parameter(self, expression: str) -> str:
        return self.hold(f"nn.Parameter({expression})")

    def run(self, *lines: str) -> None:
        self.forward += lines

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def put(self, layout: str, shape: Shape, expression: str) -> Value:
        if not all(size > 0 for size in shape):
            raise Impossible("nothing left")
        if len(shape) > 1 and (max(shape) > 64 or _elements(shape) > 4096):
            raise Impossible("too large")
        if len(shape) == 1 and shape[0] > 512:
            raise Impossible("too large")
        value = Value(self.name(), layout, shape)
        self.forward.append(f"{value.name} = {expression}")
        return value

    def like(self, x: Value, expression: str, channels: int | None = None) -> Value:
        return self.put(x.layout, x.shape if channels is None else x.wide(channels), expression)

    def ints(self) -> Value:
        for value in self.inputs:
            if value.layout == "ints":
                return value
        raise Impossible("no input of integers")


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


Write = Callable[..., Value]


@dataclass
class Kind:
    name: str
    reads: tuple[str, ...]  # layouts; "any" is one of LAYOUTS
    write: Write
    weight: float


KINDS: dict[str, Kind] = {}


def kind(*reads: str, weight: float = 1.0) -> Callable[[Write], Write]:
    """Register a function `(writer, values…, choices) -> value` as a kind of operation."""

    def register(write: Write) -> Write:
        name = write.__name__.rstrip("_")
        assert name not in KINDS, name
        KINDS[name] = Kind(name, reads, write, weight)
        return write

    return register


def fits(value: Value, layout: str) -> bool:
    return value.layout == layout or (
        layout in ("any", "wide")
        and value.layout in LAYOUTS
        and (layout == "any" or value.channels > 1)
    )


def begin(program: Program) -> tuple[Writer, list[Value]]:
    writer = Writer()
    values = [
        Value("xyz"[number], layout, shape) for number, (layout, shape) in enumerate(program.inputs)
    ]
    writer.inputs = list(values)
    return writer, values


def take(writer: Writer, step: Step, values: Sequence[Value], draw: random.Random | None) -> Value:
    """Write one step, or raise `Impossible` with the writer as it was."""
    one = KINDS[step.kind]
    if len(step.reads) != len(one.reads) or any(number >= len(values) for number in step.reads):
        raise Impossible("reads")
    mine = [values[number] for number in step.reads]
    if not all(fits(value, layout) for value, layout in zip(mine, one.reads, strict=True)):
        raise Impossible("layout")
    before = (len(writer.init), len(writer.forward), writer.count)
    choices = Choices(step.choices, draw)
    try:
        value = one.write(writer, *mine, choices)
    except Impossible:
        del writer.init[before[0] :], writer.forward[before[1] :]
        writer.count = before[2]
        raise
    writer.options.append(choices.options)
    return value


def write(program: Program) -> tuple[str, Writer]:
    """Return the source of a class `Net`, and the writer that knows the options of every choice."""
    writer, values = begin(program)
    for step in program.steps:
        values.append(take(writer, step, values, None))
    outs = [values[number].name for number in program.outputs]
    if not outs or any(values[number].layout == "ints" for number in program.outputs):
        raise Impossible("outputs")
    returned = {
        "tensor": outs[0],
        "tuple": f"({', '.join(outs)},)",
        "dict": "{" + ", ".join(f'"{name}": {name}' for name in outs) + "}",
        "nested": f"({outs[0]}, [" + ", ".join(outs[1:]) + "])",
    }[program.form]
    lines = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in writer.init),
        "",
        f"    def forward(self, {', '.join(value.name for value in writer.inputs)}):",
        *(f"        {line}" for line in writer.forward),
        f"        return {returned}",
    ]
    return "\n".join(lines) + "\n", writer
