"""The table of docs/results.md that compares polarprune with other pruning methods."""

import dataclasses
import statistics

from benchmarks.pages.paper_table import CLAIMS, EARLIER
from benchmarks.pages.segmentation_and_style import NOT_RUN
from benchmarks.pages.significance import smallest_difference
from benchmarks.pages.stored_runs import StoredRun, grouped, mean_and_deviation, mean_score
from polarprune.experiments.methods.table import METHODS
from polarprune.experiments.settings import MethodSettings

COMPARED = CLAIMS[0]  # network and budget of the comparison
_AFTER = ("after removal", "after fine-tuning")


def table(runs: list[StoredRun]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| method | baseline | before removal | after removal | change | "
        "after fine-tuning | change | MACs left | epochs | runs | better than gdp |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    compared = [run for run in runs if COMPARED.matches(run) and run.is_comparison]
    for method in ("gdp", *METHODS):
        own = [run for run in compared if run.method == method]
        # The numbers of other methods do not matter for runs of gdp.
        skipped = ("controls",) if method == "gdp" else ()
        kinds = grouped(own, lambda run, skipped=skipped: run.settings(*skipped))  # type: ignore[misc]
        kinds.sort(key=lambda kind: bool(_changed(kind[0])))
        lines += [_row(method, kind, compared) for kind in kinds]
        if not kinds:
            lines.append(f"| {method} | – | – | {NOT_RUN} | – | {NOT_RUN} | – | – | – | 0 | – |")
    return lines


def _row(method: str, runs: list[StoredRun], every: list[StoredRun]) -> str:
    ours = f"**gdp (ours{f', {EARLIER}' if runs[0].is_earlier else ''})**"
    name = ours if method == "gdp" else method
    if changed := _changed(runs[0]):
        name += f" ({', '.join(changed)})"
    stages = ("baseline", "before removal")
    cells = [mean_and_deviation([run.score(stage) for run in runs]) for stage in stages]
    for stage in _AFTER:
        cells.append(mean_and_deviation([run.score(stage) for run in runs]))
        cells.append(f"{mean_score(runs, stage) - mean_score(runs, 'baseline'):+.2f}")
    cells.append(mean_and_deviation([100 * run.card["macs_share"] for run in runs]))
    settings = runs[0].card["recipe"]
    cells += [f"{settings['epochs']} + {settings['tune_epochs']}", str(len(runs))]
    return f"| {name} | {' | '.join(cells)} | {better(runs, every)} |"


def _changed(run: StoredRun) -> list[str]:
    """Return the numbers of a method that are not its defaults."""
    default = dataclasses.asdict(MethodSettings())
    own = run.card["recipe"].get("controls", {})
    prefix = run.method.replace("-", "_")
    changed = {k: v for k, v in own.items() if k.startswith(prefix) and v != default.get(k)}
    return [f"{key} = {value:g}" for key, value in changed.items()]


def better(runs: list[StoredRun], every: list[StoredRun]) -> str:
    """Return the stages with a higher mean than gdp with the same settings and seeds."""
    if runs[0].method == "gdp":
        return "–"
    seeds = {run.card["recipe"]["seed"] for run in runs}
    settings = runs[0].settings("controls")
    ours = [run for run in every if run.method == "gdp" and run.settings("controls") == settings]
    ours = [run for run in ours if run.card["recipe"]["seed"] in seeds]
    if not ours:
        return "gdp: " + NOT_RUN
    higher = [stage for stage in _AFTER if mean_score(runs, stage) > mean_score(ours, stage)]
    started = [{run.score("baseline") for run in some} for some in (runs, ours)]
    doubt = "" if started[0] == started[1] else " (from another baseline)"
    return (" and ".join(higher) or "no") + doubt


def _seeds(runs: list[StoredRun]) -> list[float]:
    """Return the accuracies of our runs of the paper's table that are of the compared version."""
    here = [run for run in runs if COMPARED.matches(run)]
    ours = [run for run in here if run.is_comparison and run.method == "gdp"]
    same = [run for run in here if run.is_tabled and ours and run.is_earlier == ours[0].is_earlier]
    return [mean_score([run], "after removal") for run in same]


def close(runs: list[StoredRun]) -> dict[str, list[str]]:
    """Return, for each stage, the methods that one run each cannot tell apart from gdp."""
    compared = [run for run in runs if COMPARED.matches(run) and run.is_comparison]
    ours = [run for run in compared if run.method == "gdp"]
    seeds = _seeds(runs)
    if len(seeds) < 2:
        return {}
    limit, found = smallest_difference(seeds), {}
    for stage in _AFTER:
        mine = mean_score(ours, stage)
        others = [run for run in compared if run.method != "gdp"]
        near = [run for run in others if abs(mean_score([run], stage) - mine) < limit]
        found[stage] = [run.method for run in near]
    return found


def close_methods(runs: list[StoredRun]) -> list[str]:
    """Return a sentence about the methods that one run each cannot tell apart from gdp."""
    seeds = _seeds(runs)
    if len(seeds) < 2:
        return []
    parts = [f"{stage}: {' and '.join(found) or 'none'}" for stage, found in close(runs).items()]
    return [
        "Which differences are larger than chance? Our runs of the same version in "
        "[the paper's table](#the-papers-table) have a standard deviation of "
        f"{statistics.stdev(seeds):.2f} over {len(seeds)} seeds. With one run each, methods closer "
        "to gdp than 2 √2 times this value cannot be told apart from it "
        f"({'; '.join(parts)})."
    ]
