"""Runs the experiments of docs/results.md: the paper's tables, other methods, ablations, and
whether pruning is worth it.

Each is a call of `polarprune train` in its own process, which resumes from its last checkpoint if
it was interrupted. Cards and logs are stored in results/, published models in zoo/. Several can
run at once, because a small network does not fill a GPU (with NVIDIA's multi-process service).

    python -m benchmarks.measure.experiments --list
    python -m benchmarks.measure.experiments --data cifar10:DIR --data voc:DIR  # all with this data
    python -m benchmarks.measure.experiments --data cifar10:DIR resnet56-47 --together 3
    python -m benchmarks.measure.experiments --data cifar10:DIR search paper  # the paper's settings
    python -m benchmarks.measure.experiments --data cifar10:DIR worth  # against thin networks
    python -m benchmarks.measure.experiments --data tiny-imagenet:DIR tiny
    python -m benchmarks.measure.experiments --data tiny-imagenet:DIR --data cifar10:DIR transfer
    python -m benchmarks.measure.experiments --data text:FILE gpt  # transformers
    python -m benchmarks.measure.experiments --data tiny-imagenet:DIR deit
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure.lambda_search import lambda_for
from benchmarks.store import ROOT
from polarprune import Schedule
from polarprune.cli.run_options import parse_changes
from polarprune.experiments.data.table import open_data
from polarprune.experiments.methods.table import METHODS
from polarprune.experiments.presets import PRESETS, preset
from polarprune.experiments.runs.referee import Entry, epochs_of, macs_of_control
from polarprune.experiments.runs.run import Run
from polarprune.experiments.settings import Settings
from polarprune.files.model_file import read_card

KEPT = ("card.json", "log.jsonl")
KEPT_OF_BASELINE = ("run.json", "log.jsonl")
BASELINE = "baseline.safetensors"


class Experiment(NamedTuple):
    """A call of `polarprune train`; without a budget or λ, it trains a baseline only.

    `after` names the experiment whose baseline is pruned, `start` the one whose baseline has the
    initial weights of this one's baseline. `ours` names the run whose training cost or number of
    epochs this one has, as `equal` says, and the widths of `reinit`.
    """

    preset: str
    macs: float = 0.0
    seed: int = 0
    method: str = "gdp"
    after: str = ""
    tune: int = 0  # epochs of fine-tuning, after the model was scored and written
    ships: str = ""  # the model's name in zoo/
    lam: float = 0.0  # instead of a budget
    change: tuple[str, ...] = ()  # of the preset
    start: str = ""
    keeps: bool = False  # stores its baseline in results/, for others to start from
    hold_out: int = 0  # training images that are scored instead of the test set
    aim: float = 0.0  # remaining MACs; λ is estimated from the runs of `search`
    search: str = ""  # how the names of these runs start
    ours: str = ""
    equal: str = ""  # "cost" or "epochs"
    small: str = ""  # whose small network a `reinit` starts from, widths and weights
    params: float = 0.0  # a budget of parameters, instead of MACs

    @property
    def is_baseline(self) -> bool:
        """True if nothing is pruned."""
        return not (self.macs or self.params or self.lam or self.aim)

    @property
    def kind(self) -> str:
        """The kind of data, such as "cifar10"."""
        return PRESETS[self.preset].data

    def arguments(self, data: str, given: argparse.Namespace, name: str) -> list[str]:
        goal = [
            part
            for key in ("macs", "params", "lam")
            if getattr(self, key)
            for part in (f"--{key}", str(getattr(self, key)))
        ]
        if self.aim:
            goal += ["--lam", f"{self.found_lambda(given.results):.4g}"]
        if self.start:
            goal += ["--start", str(baseline(self.start, given))]
        if self.method == "reinit":
            goal += ["--shapes", str(given.results / (self.small or self.ours) / "card.json")]
        if self.small:
            goal += ["--start", str(given.runs / self.small / "small.safetensors")]
        if self.hold_out:
            goal += ["--hold-out", str(self.hold_out)]
        changes = [f"tune_epochs={self.tune}", *self.change]
        return [
            "train",
            self.preset,
            "--data",
            data,
            *goal,
            "--seed",
            str(self.seed),
            "--method",
            self.method,
            "--out",
            str(given.runs / name),
            "--baseline",
            str(baseline(self.after or name, given)),
            *(part for change in changes for part in ("--set", change)),
        ]

    def equal_changes(self, given: argparse.Namespace) -> list[str]:
        """Return the numbers of epochs that make this run equal to ours, as changes."""
        if not self.equal:
            return []
        card = json.loads((given.results / self.ours / "card.json").read_text(encoding="utf-8"))
        changes = parse_changes([*self.change, *given.set], None)
        settings = preset(self.preset, **changes)
        entry, macs = Entry(self.method, self.equal), self.macs_of_control(settings, given)
        found = epochs_of(entry, settings, changes, card, macs)
        return [f"{key}={json.dumps(value)}" for key, value in found.items()]

    def macs_of_control(self, settings: Settings, given: argparse.Namespace) -> int | None:
        """Return the MACs of the small network, if a budget of parameters sets them."""
        if not self.params:
            return None
        data = open_data(given.folders[self.kind], settings)
        run = Run(settings, data, given.runs / "none")  # nothing is written
        return macs_of_control(run, self.method, {"params": self.params})

    def found_lambda(self, folder: Path) -> float:
        """Return the λ that should leave `aim`, estimated from stored short runs."""
        files = folder.glob(f"{self.search}*/card.json")
        return lambda_for(
            self.aim,
            [json.loads(f.read_text(encoding="utf-8")) for f in files],
            PRESETS[self.preset].epochs,
        )


COMMON = "baseline-resnet56"
IMAGES = 50000  # of CIFAR-10, to learn from
COMPARED, TUNED = 100, 20  # epochs, where methods are compared: with them, and of fine-tuning
SHORT, TUNED_SHORT, PAPER = 20, 10, 140  # epochs: of an ablation, tuning it, and the paper's
LAMBDAS = (1, 2, 3, 4, 6, 8, 10)
DECAYS = (0.86, 0.88, 0.90, 0.92, 0.94, 0.96)  # of ε, an epoch
STARTS, DECAY = (0.02, 0.05, 0.2, 0.5), 0.92  # of ε; one of the decays starts at 0.1
ALPHAS = (1.0, 0.5, 0.25)
NORMS = (("l1", 4), ("l0", 4), ("l0", 200))  # of the proximal step, and λ
NAIVE = (1, 10, 30, 100)  # λ
STRONG = (("slimming", 1e-4), ("torch-pruning", 5e-4))  # authors' for VGG, and at their rates
VOC = (38, 23, 12, 5)  # percent, near the paper's
LAMBDA = 4  # of all ablations in plain mode
SEARCHED = {  # λ of the short runs from which that of a long one is read
    "resnet56": (0.5, 1, 2, 4, 8, 16, 32),
    "vgg16": (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256),
    "mobilenetv2": (1, 4, 16, 64, 256),
}
PAPER_DECAY, PAPER_EPOCHS = 0.96, 350  # of ε an epoch, on CIFAR-10
NETWORKS = ("resnet56", "vgg16", "mobilenetv2")
STEERED = (("resnet56", COMMON), ("vgg16", "vgg16-31"))  # networks, and whose baseline they have
CHEAPER = ("compact=auto",)  # closed channels cost nothing from the next compaction on
WORTH = ((0.4665, 3), (0.3436, 1), (0.2, 3), (0.1, 1))  # of the MACs, and seeds
TINY = {  # the paper's budgets on ImageNet, and seeds
    "mobilenet_v1": ((0.504, 1), (0.267, 1)),
    "mobilenet_v2": ((0.438, 3), (0.22, 1)),
    "resnet50": ((0.49, 1), (0.254, 1)),
}
TRANSFERRED = ("resnet50", "mobilenet_v2")
FEW = (50, 500)  # images of each class
TRANSFER_MACS, TRANSFER_SEEDS = (0.5, 0.25), 3
GPT_PARAMS = ((0.5, 3), (0.25, 1))  # of the parameters, and seeds
GPT_STREAMS = {"gpt-{}": "false", "gpt-{}-stream": "true"}  # whether the residual stream is open
DEIT_MACS = (0.5, 0.3)
CLAIMS = (("resnet56", 0.4665), ("resnet56", 0.3436), ("vgg16", 0.3055), ("mobilenetv2", 0.5378))


def short(*change: str, **options: Any) -> Experiment:
    """Return an ablation: a few epochs from the baseline of the table, without a teacher."""
    changes = (f"epochs={SHORT}", "distill=0", *change)
    usual = {"after": COMMON, "change": changes}
    return Experiment(
        "resnet56", **{"macs": 0.0 if "lam" in options else 0.4665, **usual, **options}
    )


def plain(*change: str, decay: float = DECAY, **options: Any) -> Experiment:
    """Return an ablation in the paper's plain mode: a fixed λ and the published proximal step.

    ε decays once an epoch, to the same final value as in the paper's longer runs.
    """
    schedule = as_published(decay ** (PAPER / SHORT), IMAGES // PRESETS["resnet56"].batch)
    return short(*schedule, *change, **{"lam": LAMBDA, **options})


def as_published(decay: float, every: int) -> tuple[str, ...]:
    """Return `Schedule.paper` as changes of a preset."""
    wanted = asdict(Schedule.paper(decay=decay, every=every))
    return tuple(
        f"schedule.{key}={json.dumps(value)}"
        for key, value in wanted.items()
        if value != getattr(Schedule(), key)
    )


def of_norms(name: str, make: Callable[..., Experiment]) -> dict[str, Experiment]:
    """Return ablations with either norm, a λ for it, and several starts of α."""
    return {
        f"{name}-{norm}-lam{lam}-alpha{alpha}": make(
            f"schedule.relaxed={json.dumps(norm == 'l1')}",
            f"schedule.alpha_start={alpha}",
            f"schedule.eps_start={0.1 * alpha**2}",
            lam=lam,
        )
        for norm, lam in NORMS
        for alpha in ALPHAS
    }


def compared(method: str, *change: str) -> Experiment:
    """Return a run of the comparison of methods."""
    changes = (f"epochs={COMPARED}", *change)
    return Experiment("resnet56", 0.4665, method=method, after=COMMON, tune=TUNED, change=changes)


EQUALS = ("cost", "epochs")


def percent(macs: float) -> str:
    return f"{100 * macs:.0f}"


def against(
    stem: str, usual: Experiment, equal: tuple[str, ...], alike: tuple[str, ...] = ()
) -> dict[str, Experiment]:
    """Return a run of ours, and those it is compared with.

    Args:
        stem: How their names start.
        usual: The run of ours.
        equal: Methods that are made equal to ours, once in cost and once in epochs.
        alike: Methods with the settings of ours, which has the same epochs and the same cost.
    """
    ours = f"{stem}-ours-seed{usual.seed}"
    found = {ours: usual}
    for method in alike:
        found[f"{stem}-{method}-seed{usual.seed}"] = usual._replace(method=method, ours=ours)
    for method in equal:
        start = usual.start if method in METHODS else ""  # small networks have new weights
        for what in EQUALS:
            name = f"{stem}-{method}-{what}-seed{usual.seed}"
            found[name] = usual._replace(method=method, ours=ours, equal=what, start=start)
    return found


def worth() -> dict[str, Experiment]:
    """Return the runs that say whether pruning ResNet-56 is worth it."""
    found = {}
    for macs, seeds in WORTH:
        for seed in range(seeds):
            usual = Experiment("resnet56", macs, seed, after=COMMON, change=CHEAPER)
            stem = f"worth-resnet56-{percent(macs)}"
            found |= against(stem, usual, ("thin", "reinit", "torch-pruning"), ("l0",))
    return found


def tiny() -> dict[str, Experiment]:
    """Return the runs on Tiny ImageNet."""
    found = {f"tiny-{network}": Experiment(f"{network}-tiny") for network in TINY}
    for network, budgets in TINY.items():
        for macs, seeds in budgets:
            for seed in range(seeds):
                usual = Experiment(
                    f"{network}-tiny", macs, seed, after=f"tiny-{network}", change=CHEAPER
                )
                stem = f"tiny-{network}-{percent(macs)}"
                found |= against(stem, usual, ("thin", "torch-pruning"))
    return found


def transfer() -> dict[str, Experiment]:
    """Return the runs that prune a network of Tiny ImageNet while it learns a few images."""
    found = {}
    for network in TRANSFERRED:
        first = f"tiny-{network}"
        for macs in TRANSFER_MACS:  # thin, as long as the network that is pruned
            epochs = PRESETS[f"{network}-tiny"].baseline_epochs
            found[f"transfer-{network}-{percent(macs)}-thin-first"] = Experiment(
                f"{network}-tiny",
                macs,
                method="thin",
                after=first,
                change=("distill=0", f"scratch_epochs={epochs}"),
            )
        for images in FEW:
            for seed in range(TRANSFER_SEEDS):
                found |= transfer_runs(network, images, seed)
    return found


def transfer_runs(network: str, images: int, seed: int) -> dict[str, Experiment]:
    """Return the runs on the same images: unpruned, and all methods at each budget."""
    stem, preset_name = f"transfer-{network}-{images}images", f"{network}-transfer"
    drawn = (f"per_class={images}", f"data_seed={seed}")
    tuned = Experiment(preset_name, seed=seed, start=f"tiny-{network}", change=drawn)
    found = {f"{stem}-unpruned-seed{seed}": tuned}
    pruned = tuned._replace(change=(*drawn, "baseline_epochs=0"))
    for macs in TRANSFER_MACS:
        own = f"{stem}-{percent(macs)}"
        usual = pruned._replace(macs=macs)
        found |= against(own, usual, ("magnitude", "torch-pruning", "thin"))
        found[f"{own}-thin-first-seed{seed}"] = usual._replace(
            method="reinit", small=f"transfer-{network}-{percent(macs)}-thin-first", start=""
        )
    return found


def uniform_or_free(
    stem: str, usual: Experiment, methods: tuple[str, ...]
) -> dict[str, Experiment]:
    """Return the runs of `against`, and one of ours with uniform widths."""
    found = against(stem, usual, methods)
    change = (*usual.change, "uniform=true")
    return {**found, f"{stem}-uniform-seed{usual.seed}": usual._replace(change=change)}


def gpt() -> dict[str, Experiment]:
    """Return the runs of the GPT, in the order in which they tell most."""
    found = {"gpt-baseline": Experiment("gpt")}
    for seed in range(max(seeds for _, seeds in GPT_PARAMS)):
        for params, seeds in GPT_PARAMS:
            for stem, norms in GPT_STREAMS.items():
                if seed < seeds:
                    usual = Experiment("gpt", seed=seed, params=params, after="gpt-baseline")
                    usual = usual._replace(change=(f"norms={norms}",))
                    name = stem.format(percent(params))
                    found |= uniform_or_free(name, usual, ("thin", "magnitude"))
    return found


def deit() -> dict[str, Experiment]:
    """Return the runs of DeiT-Tiny/8 on Tiny ImageNet."""
    found = {"deit-baseline": Experiment("deit_tiny")}
    for macs in DEIT_MACS:
        usual = Experiment("deit_tiny", macs, after="deit-baseline")
        found |= uniform_or_free(f"deit-{percent(macs)}", usual, ("thin", "torch-pruning"))
    return found


EXPERIMENTS = {
    COMMON: Experiment("resnet56", keeps=True),
    **{
        f"resnet56-47-seed{seed}": Experiment(
            "resnet56", 0.4665, seed, after=COMMON, ships="" if seed else "resnet56-47"
        )
        for seed in range(3)
    },
    "resnet56-34": Experiment("resnet56", 0.3436, after=COMMON, ships="resnet56-34"),
    "resnet56-20": Experiment("resnet56", 0.2, after=COMMON, change=(f"epochs={COMPARED}",)),
    "vgg16-31": Experiment("vgg16", 0.3055, ships="vgg16-31"),
    "baseline-mobilenetv2": Experiment("mobilenetv2", keeps=True),
    "mobilenetv2-54": Experiment(
        "mobilenetv2", 0.5378, after="baseline-mobilenetv2", ships="mobilenetv2-54"
    ),
    "mobilenetv2_88m-54": Experiment("mobilenetv2_88m", 0.5378, ships="mobilenetv2_88m-54"),
    **{f"resnet56-47-{method}": compared(method) for method in ("gdp", *METHODS)},
    **{
        f"resnet56-47-strong-{method}": compared(
            method, f"controls.{method.replace('-', '_')}={strength}"
        )
        for method, strength in STRONG
    },
    "voc-backbone": Experiment("deeplab_backbone"),
    **{
        f"voc-{percent}": Experiment(
            "deeplabv3plus-scratch",
            percent / 100,
            **({"start": "voc-backbone"} if percent == VOC[0] else {"after": f"voc-{VOC[0]}"}),
        )
        for percent in VOC
    },
    "style-48": Experiment("stylenet", 0.48),
    **{  # to choose numbers by
        f"held-out-mobilenetv2_88m-{decay}": Experiment(
            "mobilenetv2_88m",
            hold_out=5000,
            change=(f"baseline_epochs={2 * SHORT}", f"weight_decay={decay}"),
        )
        for decay in (0.0001, 0.0002, 0.0005)
    },
    "ablation-reference": short("scored=1"),
    **{f"ablation-again{seed}": short(seed=seed) for seed in (1, 2)},  # how far runs differ
    "ablation-scratch": short("baseline_epochs=0", after=""),
    "ablation-sweeps3": short("schedule.sweeps=3"),
    "ablation-kernel-gates": short(method="kernel-gates"),
    **{
        f"ablation-naive-sl0-{lam}": short(f"controls.naive_sl0={lam}", method="naive-sl0")
        for lam in NAIVE
    },
    **{f"ablation-lam{lam}": short(lam=lam, tune=TUNED_SHORT) for lam in LAMBDAS},
    **{  # ε ends where it did in the paper's longer runs
        f"ablation-decay{decay:.2f}": short(f"schedule.eps_end={0.1 * decay**PAPER}")
        for decay in DECAYS
    },
    **{
        f"ablation-eps{eps}": short(
            f"schedule.eps_start={eps}", f"schedule.eps_end={eps * DECAY**PAPER}"
        )
        for eps in STARTS
    },
    **of_norms("ablation", short),
    **{  # the steering of short runs, from the baselines of the table
        f"steering-{network}-{100 * macs:.0f}": Experiment(
            network, macs, after=after, change=(f"epochs={SHORT}", "scored=1")
        )
        for network, after in STEERED
        for macs in (0.7, 0.1)
    },
    **{  # the same training without pruning: `magnitude` only cuts at the end
        f"steering-{network}-unpruned": Experiment(
            network, 0.7, method="magnitude", after=after, change=(f"epochs={SHORT}", "scored=1")
        )
        for network, after in STEERED
    },
    # the same in the paper's plain mode
    "plain-reference": plain(tune=TUNED_SHORT),
    **{f"plain-again{seed}": plain(seed=seed) for seed in (1, 2)},
    "plain-scratch": plain("baseline_epochs=0", after=""),
    "plain-sweeps3": plain("schedule.sweeps=3"),
    "plain-kernel-gates": plain(
        f"controls.kernel_lam={LAMBDA}", method="kernel-gates", lam=0.0, macs=0.4665
    ),
    **{f"plain-lam{lam}": plain(lam=lam, tune=TUNED_SHORT) for lam in LAMBDAS},
    **{f"plain-decay{decay:.2f}": plain(decay=decay) for decay in DECAYS},
    **{f"plain-eps{eps}": plain(f"schedule.eps_start={eps}") for eps in STARTS},
    **of_norms("plain", plain),
    # the paper's full training: a baseline, short runs that find λ, plain mode, and a budget
    **{f"paper-{network}": Experiment(f"{network}-plain") for network in NETWORKS},
    **{
        f"search-{network}-lam{lam}": Experiment(
            f"{network}-plain",
            lam=lam,
            after=f"paper-{network}",
            change=(f"epochs={SHORT}", f"schedule.decay={PAPER_DECAY ** (PAPER_EPOCHS / SHORT)}"),
        )
        for network in NETWORKS
        for lam in SEARCHED[network]
    },
    **{
        f"paper-{network}-{100 * aim:.0f}-plain": Experiment(
            f"{network}-plain",
            aim=aim,
            search=f"search-{network}-lam",
            after=f"paper-{network}",
            tune=TUNED,
        )
        for network, aim in CLAIMS
    },
    **{
        f"paper-{network}-{100 * macs:.0f}-budget": Experiment(
            f"{network}-paper", macs, after=f"paper-{network}", tune=TUNED
        )
        for network, macs in CLAIMS
    },
    **worth(),
    **tiny(),
    **transfer(),
    **gpt(),
    **deit(),
}


def wanted(names: Iterable[str]) -> list[str]:
    """Return the experiments whose names start like these; those that others need come first."""
    found = [name for name in EXPERIMENTS if not names or name.startswith(tuple(names))]
    return sorted(found, key=lambda name: bool(needs(name)))


def needs(name: str) -> str:
    """Return the experiment whose baseline this one needs."""
    return EXPERIMENTS[name].after or EXPERIMENTS[name].start


def baseline(name: str, given: argparse.Namespace) -> Path:
    """Return where the baseline of an experiment is, or will be."""
    kept: Path = given.results / name / BASELINE
    return kept if kept.exists() else given.runs / name / BASELINE


def ready(name: str, given: argparse.Namespace) -> bool:
    """Return whether the baseline and the runs that an experiment needs exist."""
    wanted = EXPERIMENTS[name]
    runs = [other for other in EXPERIMENTS if wanted.search and other.startswith(wanted.search)]
    runs += filter(None, (wanted.ours, wanted.small))
    found = all((given.results / run / "card.json").exists() for run in runs)
    return found and (not needs(name) or baseline(needs(name), given).exists())


def start(name: str, given: argparse.Namespace) -> "subprocess.Popen[str]":
    folder = given.runs / name
    folder.mkdir(parents=True, exist_ok=True)
    experiment = EXPERIMENTS[name]
    arguments = experiment.arguments(given.folders[experiment.kind], given, name)
    changes = [*given.set, *experiment.equal_changes(given)]
    changes = [part for change in changes for part in ("--set", change)]
    # Threads of several runs that fight for the cores make a look at the gates 30 times slower.
    threads = max(1, (os.cpu_count() or 1) // (2 * given.together))
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "polarprune", *arguments, *changes],
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def keep(name: str, given: argparse.Namespace) -> None:
    """Copy the files of a finished run to results/ and zoo/."""
    folder, kept = given.runs / name, given.results / name
    kept.mkdir(parents=True, exist_ok=True)
    done = EXPERIMENTS[name]
    files = KEPT_OF_BASELINE if done.is_baseline else KEPT
    for file in (*files, BASELINE) if done.keeps else files:
        if (folder / file).exists():  # a baseline that is kept is not trained again
            shutil.copy(folder / file, kept / file)
    ships = done.ships
    if ships:
        given.zoo.mkdir(parents=True, exist_ok=True)
        file = given.zoo / f"{ships}.safetensors"
        shutil.copy(folder / "small.safetensors", file)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        card = {**read_card(file), "log": f"results/{name}/log.jsonl", "sha256": sha256}
        file.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n")


def run(given: argparse.Namespace) -> int:
    waiting, running, failed = given.wanted, {}, 0
    while waiting or running:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                if process.returncode == 0:
                    keep(name, given)
                failed += process.returncode != 0
                print(f"{name}: {'done' if process.returncode == 0 else 'failed'}", flush=True)
        able = [name for name in waiting if ready(name, given)]
        if waiting and not able and not running:
            print(f"no baseline, no λ, or no run of ours for {', '.join(waiting)}", flush=True)
            return 1
        for name in able[: given.together - len(running)]:
            waiting.remove(name)
            running[name] = start(name, given)
        time.sleep(1)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="how the names of experiments begin; all, if none")
    parser.add_argument("--data", action="append", default=[], help="cifar10:DIR; several times")
    parser.add_argument("--together", type=int, default=1, help="how many at once")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "experiments")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--zoo", type=Path, default=ROOT / "zoo")
    parser.add_argument("--set", action="append", default=[], help="as in `polarprune train`")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(wanted(given.names)))
        return 0
    given.folders = {name.partition(":")[0]: name for name in given.data}
    given.wanted = [n for n in wanted(given.names) if EXPERIMENTS[n].kind in given.folders]
    if not given.wanted:
        parser.error("no experiment has that name and these --data")
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
