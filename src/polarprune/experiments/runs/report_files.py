"""The report of a run: what the pruner says, with scores, measured speed and the machine."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from torch import Tensor, nn

from ...cost.timing import compare_speed, environment
from ...errors import PruneError
from ...files.writing import write_text
from ...plain_data import JsonObject
from ...report.report import Report
from ..networks.table import code_of

_BATCH = 16  # at most this many examples are timed together
_RUNS = 20


def write_report(
    folder: Path,
    report: Report,
    card: JsonObject,
    original: nn.Module,
    small: nn.Module,
    example: Tensor,
) -> None:
    """Write `report.json` and `report.html`.

    Args:
        folder: The folder of the run.
        report: The pruner's report.
        card: The card of the run.
        original: The network before pruning; it is timed beside the small one.
        small: The small network.
        example: Inputs, which are repeated until they are a batch.
    """
    batch = example.repeat(-(-_BATCH // len(example)), *[1] * (example.dim() - 1))
    results = {key: card[key] for key in ("table", "identical_predictions")}
    results |= {
        "test_images": card["scored_on"],
        "latency_ms": compare_speed(original, small, batch, runs=_RUNS),
        "network": card["network"],
        "file": "small.safetensors",
        "make": code_of(card["network"], card.get("classes")),
        **environment(),
    }
    report = dataclasses.replace(report, results=results)
    write_text(folder / "report.json", report.to_json())
    try:
        write_text(folder / "report.html", report.to_html())
    except PruneError as error:  # a package for the page is missing: keep the rest
        warnings.warn(f"{error} report.json was written.", stacklevel=2)
