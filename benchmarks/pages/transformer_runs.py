"""The section of docs/results.md on transformers: the GPT of nanoGPT, and DeiT-Tiny/8."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.measure.experiments import (
    DEIT_MACS,
    EXPERIMENTS,
    GPT_PARAMS,
    GPT_STREAMS,
    percent,
)
from benchmarks.pages.segmentation_and_style import NOT_RUN
from benchmarks.pages.worth import ACCURACY
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.runs.referee import Entry
from polarprune.experiments.runs.referee_results import HEAD, cells, collect, original, verdict
from polarprune.experiments.runs.sweep_results import pipe_table

PUBLISHED, NEAR = 1.4697, 0.02  # nanoGPT's best validation loss, and how close a baseline is to be
LOSS = SimpleNamespace(
    measure="validation loss", higher_is_better=False, shown=lambda score: f"{score:.4f}"
)
FREE, UNIFORM = Entry("gdp"), Entry("ours, uniform widths")
ROWS = {
    FREE: "ours",
    UNIFORM: "uniform",
    **{
        Entry(method, equal): f"{method}-{equal}"
        for method in ("thin", "magnitude", "torch-pruning")
        for equal in ("cost", "epochs")
    },
}
Cards = dict[Entry, list[dict[str, Any]]]


def gpt(folder: Path) -> list[str]:
    """Return the paragraphs on the GPT."""
    usual = PRESETS["gpt"]
    steps = usual.baseline_epochs * usual.epoch_steps, usual.epochs * usual.epoch_steps
    text = (
        "**GPT.** The character-level GPT of nanoGPT (6 layers, 6 heads, width 384, context 256, "
        "dropout 0.2; 10.65 M parameters and 0.1 M for positions) learns tinyshakespeare with "
        f"[nanoGPT's settings](experiments.md#text): {steps[0]:,} steps for the baseline and "
        f"{steps[1]:,} steps while pruning. The baseline is the teacher of all methods. The score "
        "is the cross entropy per character over the whole validation split.\n\n"
        f"As in nanoGPT, the network is scored every {usual.epoch_steps} steps, and every stage of "
        "every method ends with its best weights on this split. While ours prunes, only weights "
        "that meet the budget count. This choice makes the losses of all methods a little too low."
    )
    parts = [text, _baseline(folder)]
    for params, _ in GPT_PARAMS:
        for stem, norms in GPT_STREAMS.items():
            stream = "prunable" if norms == "true" else "frozen"
            title = f"At {percent(params)} % of the parameters, residual stream {stream}"
            parts += _comparison(folder, stem.format(percent(params)), title, LOSS)
    return parts


def _baseline(folder: Path) -> str:
    """Return how the unpruned GPT compares with nanoGPT's."""
    file = folder / "gpt-baseline" / "log.jsonl"
    if not file.exists():
        return f"The unpruned GPT: {NOT_RUN}. nanoGPT's best validation loss is {PUBLISHED}."
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    best = min(row[LOSS.measure] for row in rows if LOSS.measure in row)
    apart = abs(best - PUBLISHED)
    near = "within" if apart <= NEAR else "not within"
    return (
        f"The unpruned GPT reaches {best:.4f}; nanoGPT publishes {PUBLISHED}. The difference of "
        f"{apart:.4f} is {near} {NEAR}."
    )


def deit(folder: Path) -> list[str]:
    """Return the paragraphs on DeiT-Tiny/8."""
    usual = PRESETS["deit_tiny"]
    text = (
        "**DeiT-Tiny/8** (width 192, 12 layers, 3 heads, patches of 8 × 8 pixels) learns Tiny "
        f"ImageNet: {usual.baseline_epochs} epochs for the baseline and {usual.epochs} while "
        "pruning ([settings](experiments.md#tiny-imagenet)). The baseline is the teacher of all "
        "methods, and the residual stream is prunable. Accuracy on the 10,000 validation images "
        "after the last epoch."
    )
    parts = [text]
    for macs in DEIT_MACS:
        title = f"At {percent(macs)} % of the MACs"
        parts += _comparison(folder, f"deit-{percent(macs)}", title, ACCURACY)
    return parts


# --- a comparison ---------------------------------------------------------------------------------


def read(folder: Path, stem: str) -> tuple[Cards, list[str]]:
    """Return the stored cards of a comparison, and the names of runs that are not stored."""
    found: Cards = {}
    missing = []
    for entry, name in ROWS.items():
        for run in (run for run in EXPERIMENTS if run.startswith(f"{stem}-{name}-seed")):
            file = folder / run / "card.json"
            if file.exists():
                found.setdefault(entry, []).append(json.loads(file.read_text()))
            else:
                missing.append(run)
    return found, missing


def _comparison(folder: Path, stem: str, title: str, task: Any) -> list[str]:
    """Return a table of a comparison and what follows from it, or that it was not run."""
    cards, missing = read(folder, stem)
    left = [f"{NOT_RUN.capitalize()}: {', '.join(missing)}."] if missing else []
    if not cards:
        return [f"{title}: {NOT_RUN}."]
    if FREE not in cards:
        return [f"{title}.", *left]
    rows = collect(cards, task)
    lines = [(*cells(row, task), str(len(row["seeds"]))) for row in rows]
    head = (*HEAD[:-1], "ours is better by", "runs")
    table = pipe_table(head, [(*cells(original(rows), task), ""), *lines])
    said = [judged(cards, own, what, task) for own, what in _OURS.items() if own in cards]
    return [f"{title}:", table.strip(), "\n".join(f"- {text}" for text in said), *left]


_OURS = {FREE: "Free widths", UNIFORM: "Uniform widths"}


def judged(cards: Cards, own: Entry, title: str, task: Any) -> str:
    """Return, for one of ours, whether it is better than each of the others.

    Args:
        cards: The cards of each method.
        own: `FREE` or `UNIFORM`.
        title: What it is called.
        task: What the score is.
    """
    others = {entry: found for entry, found in cards.items() if entry not in _OURS}
    if not others:
        return f"{title}: nothing to compare with."
    rows = collect({FREE: cards[own], **others}, task)
    sentences = verdict(rows, task)["sentences"][-len(others) :]  # without the headline
    return f"{title}: {' '.join(sentences)}"
