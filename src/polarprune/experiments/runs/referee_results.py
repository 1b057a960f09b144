"""The results of a referee: a row for each method, the verdict, a table and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path

from ...files.writing import replacing, write_text
from ...plain_data import JsonObject
from ...report.plots import save_comparison
from ..data.task import Task
from .files import read_json, write_json
from .intervals import Difference, difference
from .referee import OURS, Entry
from .sweep_results import pipe_table

EQUAL = {"cost": "equal training cost", "epochs": "equal epochs"}
HEAD = ("method", "equal", "MACs", "params", "epochs", "cost", "score", "ours - this")
NOTES = (
    "Epochs: baseline + pruning + fine-tuning, or from scratch. Cost: MACs of all training steps "
    "that the result needs, with teacher and baseline, relative to ours. After ±: the standard "
    "deviation over seeds; of a difference, half of its 95 % interval (Student's t)."
)


def row_of(entry: Entry, cards: list[JsonObject], ours: list[float], task: Task) -> JsonObject:
    """Return the row of a method.

    Args:
        entry: The method.
        cards: Its cards, one for each seed.
        ours: The scores of our method.
        task: The data, which says whether a higher score is better.
    """
    scores = [card["table"][-1][card["measure"]] for card in cards]
    apart = difference(ours, scores) if task.higher_is_better else difference(scores, ours)
    mean = {key: statistics.fmean(card[key] for card in cards) for key in _SHARES}
    return {
        **entry._asdict(),
        "seeds": [card["recipe"]["seed"] for card in cards],
        "scores": scores,
        "score": statistics.fmean(scores),
        "deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        **mean,
        "epochs": _epochs(cards[0]),
        "training_macs": statistics.fmean(card["training_macs"]["total"] for card in cards),
        "ours_is_better_by": None if entry.method == OURS else apart.mean,
        "half_interval": None if entry.method == OURS else apart.half,
    }


_SHARES = ("macs_share", "params_share")


def _epochs(card: JsonObject) -> list[int]:
    """Return the epochs of the stages of a run."""
    settings, stages = card["recipe"], card["training_macs"]
    together = settings["baseline_epochs"] + settings["epochs"] + settings["tune_epochs"]
    if "scratch" in stages:
        return [settings["scratch_epochs"] or together]
    return [settings[key] for key in ("baseline_epochs", "epochs", "tune_epochs")]


def read_cards(
    folder: Path, compared: list[Entry], seeds: list[int]
) -> dict[Entry, list[JsonObject]]:
    """Return the cards of a finished comparison.

    Args:
        folder: The folder of the comparison.
        compared: The methods, ours first.
        seeds: The seeds of each.
    """
    return {
        entry: [read_json(folder / f"{entry.folder}-seed-{seed}" / "card.json") for seed in seeds]
        for entry in compared
    }


def collect(cards: dict[Entry, list[JsonObject]], task: Task) -> list[JsonObject]:
    """Return a row for each method, ours first.

    Args:
        cards: The cards of each method, ours first.
        task: The data.
    """
    own = next(iter(cards.values()))
    ours = [card["table"][-1][card["measure"]] for card in own]
    rows = [row_of(entry, found, ours, task) for entry, found in cards.items()]
    first = own[0]["table"][0]
    for row in rows:
        row["relative_cost"] = row["training_macs"] / max(rows[0]["training_macs"], 1)
        row["baseline"] = first[task.measure]
    return rows


# --- the verdict ----------------------------------------------------------------------------------


def verdict(rows: list[JsonObject], task: Task) -> JsonObject:
    """Return whether pruning was worth it, and a sentence about each comparison.

    `worth` is True or False if the interval of the difference to a thin network does not contain
    zero, else None. A thin network that costs as much counts more than one of as many epochs.

    Args:
        rows: What `collect` returned.
        task: The data, which knows how to print a score.
    """
    thin = {row["equal"]: row for row in rows if row["method"] == "thin"}
    first = thin.get("cost") or thin.get("epochs")
    sign = 0 if first is None else _difference(first).sign
    worth = {1: True, -1: False}.get(sign)
    sentences = [] if first is None else [_headline(first, len(first["seeds"]))]
    sentences += [_sentence(row, task) for row in rows[1:]]
    return {"worth": worth, "sentences": sentences}


def _headline(thin: JsonObject, seeds: int) -> str:
    sign, at = _difference(thin).sign, EQUAL[thin["equal"]]
    if sign > 0:
        return f"Pruning was worth it: at {at} it is better than a thin network from scratch."
    if sign < 0:
        return (
            f"Pruning was not worth it: at {at} a thin network from scratch is better. Train that "
            f"instead."
        )
    if seeds == 1:
        return "Whether pruning was worth it cannot be said with one seed. Give --seeds 3."
    return (
        f"Whether pruning was worth it cannot be said: at {at}, pruning and a thin network from "
        f"scratch cannot be told apart with {seeds} seeds."
    )


def _sentence(row: JsonObject, task: Task) -> str:
    """Return what the comparison with one method says."""
    found, name = _difference(row), name_of(row)
    if found.half is None:
        more = "ahead of" if found.mean > 0 else "behind"
        size = _amount(found._replace(mean=abs(found.mean)), task)
        return f"With one seed, pruning is {size} {more} {name}, which may be chance."
    if not found.sign:
        return f"Pruning and {name} cannot be told apart ({_signed(found, task)})."
    size = _amount(found._replace(mean=abs(found.mean)), task)
    if found.sign > 0:
        return f"Pruning is better than {name} by {size}."
    return f"{name[0].upper()}{name[1:]} is better than pruning by {size}: use that instead."


def _difference(row: JsonObject) -> Difference:
    return Difference(row["ours_is_better_by"], row["half_interval"])


def name_of(row: JsonObject) -> str:
    """Return the name of a method, for sentences and pictures."""
    names = {"thin": "a thin network", "reinit": "a network of our widths with new weights"}
    name = names.get(row["method"]) or short_name(row)
    return f"{name} ({EQUAL.get(row['equal'], row['equal'])})" if row["equal"] else name


def short_name(row: JsonObject) -> str:
    """Return the name of a method, for tables."""
    return "ours (gdp)" if row["method"] == OURS else str(row["method"])


def _amount(found: Difference, task: Task) -> str:
    """Return a difference with its interval, in points if a score is a percentage."""
    shown, unit = task.shown, ""
    if task.shown(0.5).endswith("%"):
        shown, unit = _points, " points"
    half = "" if found.half is None else f" ± {shown(found.half)}"
    return f"{shown(found.mean)}{half}{unit}"


def _points(score: float) -> str:
    return f"{100 * score:.2f}"


def _signed(found: Difference, task: Task) -> str:
    sign = "+" if found.mean >= 0 else "-"
    return sign + _amount(found._replace(mean=abs(found.mean)), task)


# --- files ----------------------------------------------------------------------------------------


def write_results(folder: Path, results: JsonObject, task: Task) -> None:
    """Write `referee.json`, `referee.md` and `referee.png`.

    Args:
        folder: The folder of the comparison.
        results: The rows, the verdict, and what was skipped.
        task: The data, which knows how to print a score.
    """
    rows = results["rows"]
    write_json(folder / "referee.json", results)
    write_text(folder / "referee.md", _markdown(results, task))
    shown = [{**row, "name": _label(row)} for row in rows]
    with replacing(folder / "referee.png") as new:
        save_comparison(shown, task.measure, task.shown, new)


def _label(row: JsonObject) -> str:
    return f"{short_name(row)}, equal {row['equal']}" if row["equal"] else short_name(row)


def _markdown(results: JsonObject, task: Task) -> str:
    rows = [cells(row, task) for row in [original(results["rows"]), *results["rows"]]]
    first, *others = results["verdict"]["sentences"]
    parts = [first, "\n".join(f"- {text}" for text in others), pipe_table(HEAD, rows), NOTES]
    parts += [f"Not compared: {name} ({why})." for name, why in results["skipped"].items()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def original(rows: list[JsonObject]) -> JsonObject:
    """Return a row for the network before pruning, from which all started."""
    ours = rows[0]
    return {
        "method": "original network",
        "equal": "",
        "macs_share": 1.0,
        "params_share": 1.0,
        "epochs": ours["epochs"][:1],
        "relative_cost": None,
        "score": ours["baseline"],
        "deviation": None,
        "ours_is_better_by": None,
        "half_interval": None,
    }


def cells(row: JsonObject, task: Task) -> tuple[str, ...]:
    """Return the cells of a row of the table, under `HEAD`."""
    score, apart = task.shown(row["score"]), ""
    if row["deviation"] is not None:
        score += f" ± {task.shown(row['deviation'])}"
    if row["ours_is_better_by"] is not None:
        apart = _signed(_difference(row), task)
    shares = (f"{row[key]:.2%}" for key in _SHARES)
    epochs = " + ".join(str(count) for count in row["epochs"])
    cost = "" if row["relative_cost"] is None else f"{row['relative_cost']:.2f}"
    return short_name(row), row["equal"], *shares, epochs, cost, score, apart
