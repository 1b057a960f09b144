"""Draws a program: `generate(seed)`; the same seed gives the same network."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from . import attention, code_written, layers, movement
from .program import KINDS, LAYOUTS, Impossible, Program, Shape, Step, Value, begin, fits, take

KINDS_FROM = (layers, movement, attention, code_written)  # imported for what they register

# Kinds that `generate` leaves out by default, because the engine fails on them: with the reason.
FAILING: dict[str, str] = {}

_INPUTS: list[list[tuple[str, Shape]]] = [
    [("image", (3, 8, 8))],
    [("image", (3, 8, 8))],
    [("image", (3, 6, 6))],
    [("image", (2, 4, 8))],
    [("image", (3, 8, 8)), ("vec", (6,))],
    [("image", (3, 4, 4)), ("image", (3, 4, 4))],
    [("image", (3, 4, 4)), ("ints", (5,))],
    [("ints", (6,))],
    [("seq", (5, 8))],
    [("vec", (10,))],
    [("line", (3, 12))],
]
# Most inputs go into a layer first: what is done to them before concerns no channels.
_FIRST = {
    "image": "conv",
    "line": "conv1d",
    "seq": "linear_of_tokens",
    "vec": "linear",
    "ints": "embedded",
}


def generate(
    seed: int, *, most: int = 40, without: Collection[str] = tuple(FAILING), tries: int = 40
) -> Program:
    """Draw a random network of 3 to `most` operations with one to three outputs."""
    draw = random.Random(seed)
    wanted = 3 + int((most - 2) * draw.random() ** 2.5)
    program = Program(seed, draw.choice(_INPUTS), [], [], batch=draw.choice([2, 3, 4]))
    writer, values = begin(program)
    names = [name for name in KINDS if name not in without]
    weights = [KINDS[name].weight for name in names]

    def attempt(name: str, reads: list[int]) -> bool:
        step = Step(name, reads)
        try:
            values.append(take(writer, step, values, draw))
        except Impossible:
            return False
        program.steps.append(step)
        return True

    for number in range(len(values)):
        if draw.random() < 0.9:
            attempt(_FIRST[values[number].layout], [number])
    for _ in range(wanted):
        for _ in range(tries):
            name = draw.choices(names, weights)[0]
            reads = [_recent(draw, values, layout) for layout in KINDS[name].reads]
            if None not in reads and attempt(name, [r for r in reads if r is not None]):
                break
    _end(draw, program, values, attempt)
    return program


def _recent(draw: random.Random, values: Sequence[Value], layout: str) -> int | None:
    """Draw one of the values with this layout, most likely a late one."""
    options = [number for number, value in enumerate(values) if fits(value, layout)]
    if not options:
        return None
    return options[-1] if draw.random() < 0.6 else draw.choice(options)


def _end(draw: random.Random, program: Program, values: list[Value], attempt: object) -> None:
    """Add outputs: most networks end in classifiers, some return their values."""
    assert callable(attempt)
    read = {number for step in program.steps for number in step.reads}
    first = len(program.inputs)
    loose = [n for n in range(first, len(values)) if n not in read and n != len(values) - 1]
    ends = [len(values) - 1, *(n for n in loose if draw.random() < 0.6)][:3]
    for number in ends:
        if values[number].layout not in LAYOUTS:
            continue
        out = number
        if draw.random() < 0.85 and attempt("head", [number]):
            out = len(values) - 1
            if draw.random() < 0.08 and attempt("large_constants", [out]):
                out = len(values) - 1
        program.outputs.append(out)
    if len(program.outputs) > 1:
        program.form = draw.choice(["tuple", "dict", "nested"])
