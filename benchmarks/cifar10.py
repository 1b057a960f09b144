"""Runs the experiments of docs/results.md: the paper's table for CIFAR-10, and other methods.

Each is a call of `polarprune train` in a process of its own, which goes on from its last checkpoint
when it was cut off. Cards and logs land in results/, models that are shipped in zoo/. Several can
run at once: a small network does not fill a GPU (this takes NVIDIA's multi-process service).

    python benchmarks/cifar10.py --data DIR                        # all of them
    python benchmarks/cifar10.py --data DIR resnet56-47 --together 3
    python benchmarks/cifar10.py --data DIR --list
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from polarprune.checkpoint import read_card
from polarprune.experiments.methods import METHODS

ROOT = Path(__file__).parent.parent
KEPT = ("card.json", "log.jsonl")


class Experiment(NamedTuple):
    """A call of `polarprune train`; `after` names the one whose baseline it starts from."""

    recipe: str
    macs: float
    seed: int = 0
    method: str = "gdp"
    after: str = ""
    tune: int = 0  # epochs, after the model that is scored and shipped was written
    ships: str = ""  # the model's name in zoo/

    def arguments(self, data: str, runs: Path, name: str) -> list[str]:
        base = runs / (self.after or name) / "baseline.safetensors"
        return [
            "train", self.recipe, "--data", data, "--macs", str(self.macs),
            "--seed", str(self.seed), "--method", self.method, "--out", str(runs / name),
            "--baseline", str(base), "--set", f"tune_epochs={self.tune}",
        ]  # fmt: skip


TUNED = 40  # epochs, where methods are compared
EXPERIMENTS = {
    **{
        f"resnet56-47-seed{seed}": Experiment(
            "resnet56", 0.4665, seed, tune=TUNED, ships="" if seed else "resnet56-47"
        )
        for seed in range(3)
    },
    "resnet56-34": Experiment("resnet56", 0.3436, after="resnet56-47-seed0", ships="resnet56-34"),
    "vgg16-31": Experiment("vgg16", 0.3055, ships="vgg16-31"),
    "mobilenetv2-54": Experiment("mobilenetv2", 0.5378, ships="mobilenetv2-54"),
    **{
        f"resnet56-47-{method}": Experiment(
            "resnet56", 0.4665, method=method, after="resnet56-47-seed0", tune=TUNED
        )
        for method in METHODS
    },
}


def wanted(names: Iterable[str]) -> list[str]:
    """Experiments whose names begin like these; those that others start from come first."""
    found = [name for name in EXPERIMENTS if not names or name.startswith(tuple(names))]
    return sorted(found, key=lambda name: bool(EXPERIMENTS[name].after))


def ready(name: str, runs: Path) -> bool:
    after = EXPERIMENTS[name].after
    return not after or (runs / after / "baseline.safetensors").exists()


def start(name: str, given: argparse.Namespace) -> "subprocess.Popen[str]":
    folder = given.runs / name
    folder.mkdir(parents=True, exist_ok=True)
    arguments = EXPERIMENTS[name].arguments(f"cifar10:{given.data}", given.runs, name)
    changes = [part for change in given.set for part in ("--set", change)]
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "polarprune", *arguments, *changes],
            stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def keep(name: str, given: argparse.Namespace) -> None:
    """Into results/ and zoo/."""
    folder, kept = given.runs / name, given.results / name
    kept.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        shutil.copy(folder / file, kept / file)
    ships = EXPERIMENTS[name].ships
    if ships:
        given.zoo.mkdir(parents=True, exist_ok=True)
        file = given.zoo / f"{ships}.safetensors"
        shutil.copy(folder / "small.safetensors", file)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        card = {**read_card(file), "log": f"results/{name}/log.jsonl", "sha256": sha256}
        file.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n")


def run(given: argparse.Namespace) -> int:
    waiting, running, failed = wanted(given.names), {}, 0
    while waiting or running:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                if process.returncode == 0:
                    keep(name, given)
                failed += process.returncode != 0
                print(f"{name}: {'done' if process.returncode == 0 else 'failed'}", flush=True)
        able = [name for name in waiting if ready(name, given.runs)]
        if waiting and not able and not running:
            print(f"no baseline for {', '.join(waiting)}", flush=True)
            return 1
        for name in able[: given.together - len(running)]:
            waiting.remove(name)
            running[name] = start(name, given)
        time.sleep(1)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="how the names of experiments begin; all, if none")
    parser.add_argument("--data", help="the folder with CIFAR-10")
    parser.add_argument("--together", type=int, default=1, help="how many at once")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "cifar10")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--zoo", type=Path, default=ROOT / "zoo")
    parser.add_argument("--set", action="append", default=[], help="as in `polarprune train`")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(wanted(given.names)))
        return 0
    if not given.data:
        parser.error("--data is missing")
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
