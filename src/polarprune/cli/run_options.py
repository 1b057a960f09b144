"""Options and progress that `train`, `sweep` and `referee` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..errors import PruneError
from ..experiments.data.table import FORMS as DATA_FORMS
from ..experiments.methods.table import NAMES
from ..experiments.presets import PRESETS
from ..experiments.processes import process_group, rank_and_count
from ..integrations.factories import FORMS
from ..plain_data import JsonObject
from .console import bar, console, device_of, line, say

Network = Annotated[str, typer.Argument(help=f"a preset ({', '.join(PRESETS)}), or {FORMS}")]
DataName = Annotated[str, typer.Option(help=", ".join(DATA_FORMS))]
MethodName = Annotated[str, typer.Option(help="gdp is ours; to compare: " + ", ".join(NAMES[1:]))]
Baseline = Annotated[
    Path | None, typer.Option(help="weights of the original network; trained and written if absent")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="change a setting of the preset: epochs=100")
]
Uniform = Annotated[
    bool, typer.Option("--uniform", help="keep the same widths in repeated blocks (gdp only)")
]
Seed = Annotated[int | None, typer.Option(help="seed of all random numbers")]
HoldOut = Annotated[
    int, typer.Option(help="score on this many training images instead of the test set")
]
Device = Annotated[str, typer.Option(help="cpu or cuda; by default cuda if torch finds a GPU")]


def parse_changes(given: list[str] | None, seed: int | None, uniform: bool = False) -> JsonObject:
    """Parse `--set key=value` (`schedule.done=0.4` changes the schedule); add the other options."""
    found: JsonObject = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise PruneError(f"--set {text}: give name=value, such as --set epochs=100.")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    more = {"seed": seed} if seed is not None else {}
    return {**found, **more, **({"uniform": True} if uniform else {})}


@contextmanager
def shown_progress(device: str) -> Iterator[tuple[str, Callable[[JsonObject], None]]]:
    """Yield the device of this process, and a function that shows a row of the log."""
    with process_group(device_of(device)) as here, bar() as shown:
        console.quiet = rank_and_count()[0] > 0
        task = shown.add_task("starting", total=None, info="", visible=False)

        def show(row: JsonObject) -> None:
            done, total, text = row["epoch"], row["epochs"], line(row)
            shown.update(task, completed=done, total=total, visible=True)
            shown.update(task, description=row["stage"], info=text)
            if not console.is_terminal:  # a log file shows no bar
                say(f"{row['stage']} {done}/{total}  {text}")

        yield here, show
