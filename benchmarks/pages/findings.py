"""The first section of docs/results.md: what the stored runs show, and what they leave open."""

from pathlib import Path

from benchmarks.measure.experiments import EXPERIMENTS
from benchmarks.measure.steering import broken, read
from benchmarks.pages import captions, compared_methods, paper_settings, steering
from benchmarks.pages.figures import Missing
from benchmarks.pages.paper_table import CLAIMS, Claim
from benchmarks.pages.stored_runs import TEST_SET, StoredRun, mean_score

QUESTIONS = {  # how the names of the runs start that answer it: the question, and its section
    "paper": ("Does the accuracy hold with the paper's own settings?", "the-papers-settings"),
    "plain": ("Do the ablations agree with the paper at a fixed λ?", "the-papers-settings"),
    "worth": ("Is pruning better than training a thin network?", "is-pruning-worth-it"),
    "tiny": ("How does it compare on a larger data set?", "tiny-imagenet"),
    "transfer": ("Does pruning help with few images?", "transfer"),
    "gpt": ("How accurate is a pruned GPT?", "transformers"),
    "deit": ("How accurate is a pruned vision transformer?", "transformers"),
}


def section(runs: list[StoredRun], folder: Path) -> list[str]:
    """Return the paragraphs of the section."""
    ours = [run for run in runs if run.method == "gdp"]
    found = [*_accuracy(ours), *_with_the_papers_settings(folder), *_removal(ours)]
    found += [*_others(runs), *_paper(), *_steered()]
    lines = [f"- {text}" for text in found] or ["No runs are stored."]
    return ["\n".join(lines), "## Open questions", *_open(ours, folder)]


def _current(claim: Claim, ours: list[StoredRun]) -> list[StoredRun]:
    """Return the runs for a row of the paper's table: of the earlier version only if all are."""
    own = [run for run in ours if run.is_tabled and claim.matches(run)]
    return [run for run in own if not run.is_earlier] or own


def _accuracy(ours: list[StoredRun]) -> list[str]:
    """Return how our accuracy compares with the paper's, over the rows of its table."""
    pairs = [(claim, own) for claim in CLAIMS if (own := _current(claim, ours))]
    if not pairs:
        return []
    higher = sum(mean_score(own, "after removal") > claim.accuracy for claim, own in pairs)
    started = sum(mean_score(own, "baseline") > claim.baseline for claim, own in pairs)
    kept = sum(
        mean_score(own, "after removal") - mean_score(own, "baseline")
        > claim.accuracy - claim.baseline
        for claim, own in pairs
    )
    return [
        f"**Accuracy.** {len(pairs)} of the paper's {len(CLAIMS)} results on CIFAR-10 were "
        f"repeated with our settings. Our pruned network is more accurate in {higher} of "
        f"{len(pairs)} cases, our baseline in {started}. Relative to its own baseline, ours loses "
        f"less accuracy than the paper's in {kept} of {len(pairs)} cases "
        f"([table](#the-papers-table))."
    ]


def _with_the_papers_settings(folder: Path) -> list[str]:
    """Return how the runs with the paper's settings ended."""
    parts = paper_settings.finished(folder)
    link = "[table](#the-papers-settings)"
    return [f"**With the paper's settings**, {'; '.join(parts)} ({link})."] if parts else []


def _removal(ours: list[StoredRun]) -> list[str]:
    """Return whether removal changed predictions, and whether budgets were met."""
    tabled = [run for run in ours if run.is_tabled]
    if not tabled:
        return []
    same = sum(run.card.get("identical_predictions", False) for run in tabled)
    left = [100 * (run.card["budget"]["macs"] - run.card["macs_share"]) for run in tabled]
    met = sum(points >= 0 for points in left)
    return [
        f"**Removal.** Taking the closed channels out changes none of the {TEST_SET:,} predictions "
        f"in {same} of {len(tabled)} runs.",
        f"**Budget.** {met} of {len(tabled)} runs end at or below their budget, at most "
        f"{max(left):.2f} points of the MACs below it.",
    ]


def _others(runs: list[StoredRun]) -> list[str]:
    """Return how many other methods are better than ours."""
    compared = [r for r in runs if compared_methods.COMPARED.matches(r) and r.is_comparison]
    others = [run for run in compared if run.method != "gdp"]
    if not others or len(others) == len(compared):
        return []
    verdicts = [compared_methods.better([run], compared) for run in others]
    better = sum(text.startswith("after") for text in verdicts)
    close = [name for names in compared_methods.close(runs).values() for name in names]
    chance = f"; {' and '.join(dict.fromkeys(close))} cannot be told apart from it by single runs"
    return [
        f"**Other methods.** With the same baseline and the same epochs, {better} of {len(others)} "
        f"runs of other methods are more accurate than ours, after removal or after fine-tuning"
        f"{chance if close else ''} ([table](#other-methods))."
    ]


def _paper() -> list[str]:
    """Return which of the paper's findings our runs confirm."""
    said = {}
    for name, caption in captions.CAPTIONS.items():
        try:
            said[name] = caption()
        except Missing:
            continue
    parts = []
    for verdict, words in ((captions.AGREES, "Confirmed"), (captions.DISAGREES, "Not confirmed")):
        names = [name for name, text in said.items() if verdict in text]
        links = [f"[{captions.TITLES[name].lower()}](#{captions.anchor(name)})" for name in names]
        if links:
            parts.append(f"{words} ({len(links)}): {', '.join(links)}.")
    return [f"**The paper's findings.** {' '.join(parts)}"] if parts else []


def _steered() -> list[str]:
    """Return how closely the cost follows its path."""
    rows = list(read().values())
    if not rows:
        return []
    kept = sum(not broken(row) for row in rows)
    text = (
        f"**Steering.** In {kept} of {len(rows)} short runs, the cost stays near its planned path "
        f"and the loss does not jump"
    )
    try:
        long = [steering.long_run(name) for name in (*steering.HEADLINES, *steering.EXTREMES)]
    except Missing:
        return [f"{text}."]
    kept = sum(one.keeps for one in long)
    return [f"{text}. The same is true in {kept} of {len(long)} long runs ([runs](#steering))."]


def _open(ours: list[StoredRun], folder: Path) -> list[str]:
    """Return the questions whose runs are not all stored, and how many rows have a single run."""
    lines = ["| question | runs stored |", "|---|---|"]
    for start, (question, place) in QUESTIONS.items():
        names = [name for name in EXPERIMENTS if name.startswith(f"{start}-")]
        known = sum((folder / name / "log.jsonl").exists() for name in names)
        if known < len(names):
            lines.append(f"| [{question}](#{place}) | {known} of {len(names)} |")
    parts = ["\n".join(lines)] if len(lines) > 2 else []
    pairs = [own for claim in CLAIMS if (own := _current(claim, ours))]
    single = sum(len(own) == 1 for own in pairs)
    if single:
        parts.append(
            f"{single} of {len(pairs)} rows of the paper's table have one run each, so their "
            "spread over seeds is not known."
        )
    return parts
