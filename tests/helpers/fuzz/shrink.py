"""Makes a failing program smaller while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .program import Impossible, Program, write


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 400) -> Program:
    """Delete steps and outputs, then simplify choices, until nothing more can go."""
    tried: set[str] = set()
    left = most
    while left > 0:
        for smaller in _smaller(program):
            try:
                source = write(smaller)[0] + str(smaller.inputs) + str(smaller.batch)
            except Impossible:
                continue
            if source in tried:
                continue
            tried.add(source)
            left -= 1
            if fails(smaller):
                program = smaller
                break
            if left <= 0:
                break
        else:
            return program
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for size in (8, 4, 2, 1):
        if size < len(program.steps):
            for start in range(len(program.steps) - size, -1, -1):
                found = program
                for number in range(start + size - 1, start - 1, -1):
                    found = _without(found, number)
                yield found
    if len(program.outputs) > 1:
        for number in range(len(program.outputs)):
            new = program.copy()
            del new.outputs[number]
            new.form = program.form if len(new.outputs) > 1 else "tensor"
            yield new
    for number in range(len(program.inputs) - 1, 0, -1):
        if not any(number in step.reads for step in program.steps):
            yield _without_input(program, number)
    yield from _simpler(program)
    if program.batch > 2:
        new = program.copy()
        new.batch = 2
        yield new


def _without(program: Program, number: int) -> Program:
    """Delete a step; what read it then reads what the step read."""
    new = program.copy()
    gone = new.steps.pop(number)
    place = len(program.inputs) + number
    instead = gone.reads[0]

    def moved(read: int) -> int:
        read = instead if read == place else read
        return read - 1 if read > place else read

    for step in new.steps:
        step.reads = [moved(read) for read in step.reads]
    new.outputs = list(dict.fromkeys(moved(read) for read in new.outputs))
    if len(new.outputs) == 1:
        new.form = "tensor"
    return new


def _without_input(program: Program, number: int) -> Program:
    new = program.copy()
    del new.inputs[number]
    for step in new.steps:
        step.reads = [read - (read > number) for read in step.reads]
    new.outputs = [read - (read > number) for read in new.outputs]
    return new


def _simpler(program: Program) -> Iterator[Program]:
    """Yield simpler programs: with earlier options of choices, or with earlier values as inputs."""
    try:
        options = write(program)[1].options
    except Impossible:
        return
    for number, step in enumerate(program.steps):
        for name, offered in options[number].items():
            place = list(offered).index(step.choices[name])
            for other in dict.fromkeys((0, place // 2, place - 1)):
                if 0 <= other < place and offered[other] != step.choices[name]:
                    new = program.copy()
                    new.steps[number].choices[name] = offered[other]
                    yield new
