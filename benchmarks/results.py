"""Writes docs/results.md, and the paper's rows in README.md, from the runs stored in results/.

A run is a folder with the card.json and log.jsonl that `polarprune train` left:

    cp runs/resnet56/{card.json,log.jsonl} results/resnet56-47-seed0/
    python benchmarks/results.py
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import figures
from beyond import NOT_YET, in_plain_mode, painting, segmentation
from experiments import COMPARED as EPOCHS
from experiments import SHORT
from figures import PAPER
from noise import far
from polarprune.experiments.methods import METHODS
from polarprune.experiments.recipes import RECIPES, Controls
from sayings import SAYINGS
from steering_page import section as steering

ROOT = Path(__file__).parent.parent
MARKS = ("<!-- results table -->", "<!-- end of results table -->")
NAMES = {"resnet56": "ResNet-56", "vgg16": "VGG-16", "mobilenetv2": "MobileNetV2"}
OTHERS = {  # networks that the paper does not have, and what they are
    "mobilenetv2_88m": "MobileNetV2 with one more stride, 88 M MACs; not the paper's network"
}
TITLES = NAMES | {name: f"`{name}` ({what})" for name, what in OTHERS.items()}
RECIPES_OF = {"mobilenetv2_88m": "mobilenetv2"}  # whose recipe of the paper they are compared with


class Claim(NamedTuple):
    """A row of the paper's table for CIFAR-10, in percent."""

    network: str
    baseline: float
    macs: float
    accuracy: float


CLAIMS = [
    Claim(network, row["baseline"], row["ratio"], row["accuracy"])
    for network in NAMES
    for row in sorted(PAPER["cifar10"][network], key=lambda row: -float(row["ratio"]))
    if row["method"] == "GDP"
]
COMPARED = CLAIMS[0]  # at which the controls run
TEST_SET = 10000  # images


class Stored(NamedTuple):
    """A run: its card, and the rows of its log."""

    card: dict[str, Any]
    log: list[dict[str, Any]]

    @property
    def method(self) -> str:
        return str(self.card.get("method", "gdp"))

    def answers(self, claim: Claim) -> bool:
        budget = {key: round(100 * share, 4) for key, share in self.card["budget"].items()}
        return self.card["network"] == claim.network and budget == {"macs": claim.macs}

    @property
    def apart(self) -> bool:
        """Of a network that the paper does not have."""
        return self.tabled and self.card["network"] in OTHERS

    @property
    def compared(self) -> bool:
        """With other methods, in a run of its own length."""
        tuned = self.score("after fine-tuning") is not None
        return tuned and self.card["recipe"]["epochs"] == EPOCHS

    @property
    def tabled(self) -> bool:
        """Ours for the paper's table."""
        return self.method == "gdp" and not self.compared

    def score(self, stage: str) -> float | None:
        """Percent."""
        rows = [row for row in self.card["table"] if row["stage"] == stage]
        return 100 * rows[0]["accuracy"] if rows else None

    def numbers(self, *without: str) -> dict[str, Any]:
        """The recipe, flat; runs that differ in the seed only are one experiment, and compiled
        steps are the same steps."""
        return {
            key: value
            for key, value in flat(self.card["recipe"]).items()
            if key not in ("seed", "compiled") and not any(key.startswith(name) for name in without)
        }

    def seconds(self) -> float:
        """Of training; a run that was resumed began to count anew."""
        last = {"stage": "", "seconds": 0.0}
        return sum(
            row["seconds"]
            for row, after in zip(self.log, [*self.log[1:], last], strict=False)
            if after["stage"] != row["stage"] or after["seconds"] < row["seconds"]
        )


def flat(numbers: dict[str, Any], stem: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in numbers.items():
        found |= flat(value, f"{stem}{key}.") if isinstance(value, dict) else {stem + key: value}
    return found


def read(folder: Path) -> list[Stored]:
    """All runs of the tables that were scored on the test set."""
    paths = sorted(
        p for p in folder.glob("*/card.json") if not p.parent.name.startswith(figures.ASIDE_RUNS)
    )
    runs = [Stored(json.loads(path.read_text()), _log(path)) for path in paths]
    return [run for run in runs if run.card["scored_on"] == TEST_SET]


def _log(card: Path) -> list[dict[str, Any]]:
    file = card.with_name("log.jsonl")
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def together(runs: Iterable[Stored], key: Callable[[Stored], Any]) -> list[list[Stored]]:
    """Runs of the same kind in one list each."""
    found: dict[str, list[Stored]] = {}
    for run in runs:
        found.setdefault(json.dumps(key(run), sort_keys=True), []).append(run)
    return list(found.values())


def spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    more = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.2f}{more}"


# --- the paper's table ----------------------------------------------------------------------------


def claims(runs: list[Stored]) -> list[str]:
    lines = [
        "| network | paper: baseline | FLOPs left | pruned | change | ours: baseline | MACs left | "
        "after removal | change | runs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        mine = [run for run in runs if run.tabled and run.answers(claim)]
        kinds = together(mine, lambda run: run.numbers("tune", "controls"))
        for kind in kinds or [[]]:
            lines.append(_claim(claim, kind, several=len(kinds) > 1))
    for kind in together([run for run in runs if run.apart], _experiment):
        lines.append(f"| {OTHERS[kind[0].card['network']]} | – | – | – | – | {_ours(kind)}")
    return lines


def _experiment(run: Stored) -> Any:
    return [run.card["budget"], run.numbers("tune", "controls")]


def _claim(claim: Claim, runs: list[Stored], several: bool) -> str:
    name = NAMES[claim.network]
    paper = (
        f"{claim.baseline:.2f} | {claim.macs:.2f} | {claim.accuracy:.2f} | "
        f"{claim.accuracy - claim.baseline:+.2f}"
    )
    if not runs:
        return f"| {name} | {paper} | {NOT_YET} | – | {NOT_YET} | – | 0 |"
    if several:
        name += f" ({recipe_name(runs[0])})"
    return f"| {name} | {paper} | {_ours(runs)}"


def _ours(runs: list[Stored]) -> str:
    """The cells of our runs."""
    shares = [100 * run.card["macs_share"] for run in runs]
    base, cut = (spread([run.score(at) for run in runs]) for at in ("baseline", "after removal"))
    change = _mean(runs, "after removal") - _mean(runs, "baseline")
    return f"{base} | {spread(list(shares))} | **{cut}** | {change:+.2f} | {len(runs)} |"


def _kept(runs: list[Stored]) -> str:
    """In how many rows, of those with runs of ours, the paper's network lost less than ours."""
    found = []
    for claim in CLAIMS:
        mine = [run for run in runs if run.answers(claim)]
        if mine:
            lost = _mean(mine, "baseline") - _mean(mine, "after removal")
            found.append(claim.baseline - claim.accuracy < lost)
    return f"{sum(found)} of {len(found)}"


def beside(runs: list[Stored]) -> str:
    """What the table does not say."""
    mine = [run for run in runs if run.tabled and any(run.answers(claim) for claim in CLAIMS)]
    if not mine:
        return "After removal there was no fine-tuning."
    every = [*mine, *(run for run in runs if run.apart)]
    same = sum(run.card.get("identical_predictions", False) for run in every)
    told = [
        "After removal there was no fine-tuning. FLOPs and MACs are counted alike as shares of the "
        "original.",
        f"Predictions before and after removal are the same on all {TEST_SET:,} images in {same} "
        f"of {len(every)} runs.",
        "Ours learn with cutout and from their baseline as a teacher, and baselines are better; "
        "the paper's recipe was not run, so what is due to the training and what to the pruning is "
        f"not told apart. Against its own baseline the paper's network keeps more in {_kept(mine)} "
        "rows with runs of ours.",
    ]
    for tuned in together([run for run in mine if run.score("after fine-tuning")],
                          lambda run: [run.card["network"], run.card["budget"]]):  # fmt: skip
        card = tuned[0].card
        told.append(
            f"{NAMES[card['network']]} at {100 * card['budget']['macs']:.2f} % was tuned after "
            f"that for {card['recipe']['tune_epochs']} epochs, without the teacher, and came to "
            f"{spread([run.score('after fine-tuning') for run in tuned])}."
        )
    return " ".join(told)


def recipe_name(run: Stored) -> str:
    mine = run.numbers("tune", "controls")
    for name, known in RECIPES.items():
        if Stored({"recipe": dataclasses.asdict(known)}, []).numbers("tune", "controls") == mine:
            return name
    return "changed: " + "; ".join(differences(run, RECIPES[run.card["network"]]))


# --- controls -------------------------------------------------------------------------------------


def controls(runs: list[Stored]) -> list[str]:
    lines = [
        "| method | baseline | before removal | right after removal | change | "
        "after fine-tuning | change | MACs left | epochs | runs | beats ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    mine = [run for run in runs if run.answers(COMPARED) and run.compared]
    for method in ("gdp", *METHODS):
        others = ("controls",) if method == "gdp" else ()  # their numbers are not ours
        kinds = together(
            [run for run in mine if run.method == method],
            lambda run, others=others: run.numbers(*others),  # type: ignore[misc]
        )
        kinds.sort(key=lambda kind: bool(_changed(kind[0])))
        lines += [_control(method, kind, mine) for kind in kinds]
        if not kinds:
            lines.append(f"| {method} | – | – | {NOT_YET} | – | {NOT_YET} | – | – | – | 0 | – |")
    return lines


def _control(method: str, runs: list[Stored], every: list[Stored]) -> str:
    name = "**gdp (ours)**" if method == "gdp" else method
    if changed := _changed(runs[0]):
        name += f" ({', '.join(changed)})"
    cells = [spread([run.score(stage) for run in runs]) for stage in ("baseline", "before removal")]
    for stage in ("after removal", "after fine-tuning"):
        cells.append(spread([run.score(stage) for run in runs]))
        cells.append(f"{_mean(runs, stage) - _mean(runs, 'baseline'):+.2f}")
    cells.append(spread([100 * run.card["macs_share"] for run in runs]))
    recipe = runs[0].card["recipe"]
    cells += [f"{recipe['epochs']} + {recipe['tune_epochs']}", str(len(runs))]
    return f"| {name} | {' | '.join(cells)} | {beats(runs, every)} |"


def _changed(run: Stored) -> list[str]:
    """Numbers of its method that are not the usual ones."""
    default = dataclasses.asdict(Controls())
    own = run.card["recipe"].get("controls", {})
    stem = run.method.replace("-", "_")
    return [f"{key} = {value:g}" for key, value in own.items()
            if key.startswith(stem) and value != default.get(key)]  # fmt: skip


def near(runs: list[Stored]) -> list[str]:
    """Which methods end so close to ours that one run each does not tell them apart."""
    here = [run for run in runs if run.answers(COMPARED)]
    seeds = [_mean([run], "after removal") for run in here if run.tabled]
    ours = [run for run in here if run.compared and run.method == "gdp"]
    if len(seeds) < 2 or not ours:
        return []
    told = []
    for stage in ("after removal", "after fine-tuning"):
        close = [run.method for run in here if run.compared and run.method != "gdp"
                 and abs(_mean([run], stage) - _mean(ours, stage)) < far(seeds)]  # fmt: skip
        told.append(f"{stage} {' and '.join(close) or 'none'}")
    return [
        f"Our own runs of the table above differ by ± {statistics.stdev(seeds):.2f} over "
        f"{len(seeds)} seeds. Closer to ours than 2 √2 of that, so that one run each "
        f"does not tell them apart: {', '.join(told)}."
    ]


def beats(runs: list[Stored], every: list[Stored]) -> str:
    """Where the mean is higher than ours, with the same recipe and the same seeds."""
    if runs[0].method == "gdp":
        return "–"
    seeds = {run.card["recipe"]["seed"] for run in runs}
    alike = runs[0].numbers("controls")
    ours = [
        run
        for run in every
        if run.method == "gdp"
        and run.numbers("controls") == alike
        and run.card["recipe"]["seed"] in seeds
    ]
    if not ours:
        return "ours: " + NOT_YET
    higher = [
        stage
        for stage in ("after removal", "after fine-tuning")
        if _mean(runs, stage) > _mean(ours, stage)
    ]
    started = [{run.score("baseline") for run in some} for some in (runs, ours)]
    doubt = "" if started[0] == started[1] else " (from another baseline)"
    return (" and ".join(higher) or "no") + doubt


def _mean(runs: list[Stored], stage: str) -> float:
    return statistics.mean(run.score(stage) or 0.0 for run in runs)


# --- held out -------------------------------------------------------------------------------------


def chosen(folder: Path) -> list[str]:
    """Baselines that were scored on training images held out: what differs, and how well."""
    found = []
    for file in sorted(folder.glob("held-out-*/run.json")):
        recipe = flat(json.loads(file.read_text(encoding="utf-8")))
        last = json.loads(file.with_name("log.jsonl").read_text().splitlines()[-1])
        found.append((recipe, 100 * last["accuracy"]))
    lines = []
    for network in dict.fromkeys(recipe["network"] for recipe, _ in found):
        mine = [(recipe, score) for recipe, score in found if recipe["network"] == network]
        varied = [key for key in mine[0][0] if len({str(recipe[key]) for recipe, _ in mine}) > 1]
        epochs, count = (mine[0][0][key] for key in ("baseline_epochs", "hold_out"))
        lines += [f"{TITLES[network]}, {epochs} epochs, {count:,} images held out:", ""]
        lines += [f"| {' | '.join(varied)} | accuracy |", "|---" * (len(varied) + 1) + "|"]
        for recipe, score in sorted(mine, key=lambda one: [one[0][key] for key in varied]):
            lines.append(f"| {' | '.join(str(recipe[key]) for key in varied)} | {score:.2f} |")
        lines.append("")
    return lines[:-1] or [NOT_YET]


# --- how ------------------------------------------------------------------------------------------


def differences(run: Stored, other: Any) -> list[str]:
    """Numbers of a run's recipe that differ from another recipe's: `epochs 200 (350)`."""
    theirs = flat(dataclasses.asdict(other))
    return [
        f"{key} {_short(value)} ({_short(theirs[key])})"
        for key, value in run.numbers("controls", "network").items()
        if key in theirs and value != theirs[key]
    ]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def how(runs: list[Stored]) -> list[str]:
    lines = [f"{len(runs)} runs of the tables, and shorter ones and others for figures, are stored "
             "in [results](../results). A run is not the same again with the same seed: sums are "
             "added in another order on a GPU, and what a stage draws was changed after some of "
             "these."] if runs else ["No runs."]  # fmt: skip
    where = together(runs, lambda run: [run.card["machine"], run.card["versions"]])
    for kind in where:
        versions = ", ".join(f"{name} {v}" for name, v in kind[0].card["versions"].items())
        hours = sum(run.seconds() for run in kind) / 3600
        lines += ["", f"- {len(kind)} on {kind[0].card['machine']} ({versions}): {hours:.1f} hours "
                  "of training, added up: several ran at once, some waited."]  # fmt: skip
    lines += ["", "Numbers of our runs that differ from the paper's recipe, in brackets (it speaks "
              "of epochs while pruning, ε, the gates' rate, crops and flips; rates, batch, decay "
              "and the baseline's length are the usual ones). Besides, λ is steered and 0 when the "
              "budget is met, ε decays at every step, and products are in bfloat16:",
              ""]  # fmt: skip
    ours = [run for run in runs if run.method == "gdp"]
    for kind in together(ours, lambda run: [run.card["network"], run.numbers("controls", "tune")]):
        network = kind[0].card["network"]
        paper = RECIPES.get(f"{RECIPES_OF.get(network, network)}-paper")
        if paper is not None:
            found = differences(kind[0], paper)
            count = f"{len(kind)} run{'s' * (len(kind) > 1)}"
            lines.append(f"- {TITLES[network]}, {count}: {', '.join(found) or 'none'}")
    return lines


# --- figures --------------------------------------------------------------------------------------


def shown() -> list[str]:
    """Every figure that was drawn, with a sentence."""
    parts, missing = [], []
    for name, say in SAYINGS.items():
        try:
            sentence = say()
        except figures.Missing:
            missing.append(name)
            continue
        if (figures.OUT / f"{name}.png").exists():
            parts.append(f"![{name}](figures/{name}.png)\n\n{sentence}")
    if missing:
        parts.append(f"Not drawn yet, as their runs are not stored: {', '.join(missing)}.")
    return parts


def page(runs: list[Stored], folder: Path) -> str:
    parts = [
        "# Results",
        "Accuracy on the test set of CIFAR-10 in percent, of the last epoch; mean ± standard "
        "deviation over runs. Generated by `benchmarks/results.py` from the cards "
        "and logs in `results/`.",
        "## The paper's table",
        "\n".join(claims(runs)),
        beside(runs),
        "## Other methods",
        f"{NAMES[COMPARED.network]} at {COMPARED.macs} % of its MACs: the same baseline, data, "
        "seeds, epochs, learning rates and distillation, by `polarprune train --method` "
        "([methods.py](../src/polarprune/experiments/methods.py) says what each does; magnitude "
        "and random add nothing to the training, so they cut the same network). A method beats "
        "ours where its mean over the same seeds is higher. Brackets: with another strength than "
        "the recipe's; that of Torch-Pruning's authors, as it is at our learning rates, closes "
        "most of the network while it trains, and leaves far less than the budget.",
        "\n".join(controls(runs)),
        *near(runs),
        "## Figures",
        "From `results/` and [paper.json](../benchmarks/paper.json), by `make figures`. Ablations "
        f"are runs of {SHORT} epochs on ResNet-56 and CIFAR-10, from the same baseline and without "
        "a teacher; the paper's are on ImageNet.",
        *shown(),
        "## Steering",
        *steering(),
        "## The paper's plain mode",
        *in_plain_mode(folder),
        "## Segmentation",
        *segmentation(folder),
        "## Style transfer",
        *painting(folder),
        "## Numbers chosen on held-out images",
        "Baselines that did not learn from a part of the training set, and were scored on it after "
        "the last epoch. How other numbers were chosen, some of them by scores of test images, is "
        "said in [experiments.md](experiments.md).",
        "\n".join(chosen(folder)),
        "## How",
        "\n".join(how(runs)),
    ]
    return "\n\n".join(parts) + "\n"


def readme(runs: list[Stored], text: str) -> str:
    """With the paper's rows between the marks, if there are results."""
    if not any(run.method == "gdp" and run.answers(c) for run in runs for c in CLAIMS):
        return text
    lines = [
        MARKS[0],
        "## The paper's numbers, anew",
        "",
        "CIFAR-10, accuracy in percent; ours right after removal, without fine-tuning, mean ± "
        "standard deviation. Ours learned with cutout and from their baselines as teachers, the "
        "paper's recipe was not run ([more, and other methods beside it](docs/results.md)):",
        "",
        *claims(runs),
        MARKS[1],
    ]
    before, rest = text.split(MARKS[0])
    return before + "\n".join(lines) + rest.split(MARKS[1])[1]


def write(root: Path) -> None:
    runs = read(root / "results")
    (root / "docs" / "results.md").write_text(page(runs, root / "results"), encoding="utf-8")
    file = root / "README.md"
    file.write_text(readme(runs, file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(ROOT)
