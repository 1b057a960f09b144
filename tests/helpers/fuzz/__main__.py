"""Checks many random networks and counts what happened; failures are shrunk and printed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import IO, Any

import torch

from .check import Outcome, Settings, check
from .generate import FAILING, generate
from .program import KINDS, Program, write
from .shrink import shrink

_START, _DONE = "begin ", "done "


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--networks", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first network")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--most", type=int, default=40, help="operations in a network")
    parser.add_argument("--only", type=int, help="check this seed alone, and print its network")
    parser.add_argument("--shrink", action="store_true", help="make failing networks smaller")
    parser.add_argument("--all-kinds", action="store_true", help="also those known to fail")
    parser.add_argument("--log", type=Path, help="append one line of JSON per network")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = _arguments()
    torch.set_num_threads(1)
    without = () if given.all_kinds else tuple(FAILING)
    if given.only is not None:
        return _only(generate(given.only, most=given.most, without=without), given.shrink)
    seeds = range(given.seed, given.seed + given.networks)
    if given.worker:
        for seed in seeds:
            print(f"{_START}{seed}", flush=True)
            outcome = check(generate(seed, most=given.most, without=without))
            print(_DONE + json.dumps(vars(outcome)), flush=True)
        return 0
    outcomes = _in_processes(seeds, given)
    _summary(outcomes)
    failed = [outcome for outcome in outcomes if outcome.failed]
    if given.shrink:
        for outcome in {outcome.label: outcome for outcome in failed}.values():
            _only(generate(outcome.seed, most=given.most, without=without), True)
    return 1 if failed else 0


def _only(program: Program, smaller: bool) -> int:
    outcome = check(program)
    if outcome.failed and smaller:
        program = shrink(program, lambda other: check(other, 60).label == outcome.label)
        outcome = check(program)
    print(f"\nseed {program.seed}: {outcome.kind} {outcome.stage} {outcome.detail}")
    print(f"inputs {program.inputs}, batch {program.batch}, {Settings.of(program.seed)}")
    print(write(program)[0])
    return int(outcome.failed)


def _in_processes(seeds: range, given: argparse.Namespace) -> list[Outcome]:
    """Check networks in processes; if a network kills its process, a new one continues."""
    size = -(-len(seeds) // given.jobs)
    waiting = [list(seeds[k * size : (k + 1) * size]) for k in range(given.jobs)]
    running = [[mine, _worker(mine, given)] for mine in waiting if mine]
    outcomes: list[Outcome] = []
    while running:
        for job in list(running):
            mine, process = job
            line = process.stdout.readline()
            if line.startswith(_DONE):
                outcomes.append(_outcome(json.loads(line[len(_DONE) :]), given.log))
                mine.pop(0)
                if len(outcomes) % 50 == 0:
                    print(f"{len(outcomes)} networks: {_counted(outcomes)}", flush=True)
            elif not line:
                process.wait()
                if mine:
                    died = Outcome(
                        mine.pop(0), "crash", "process", f"ended with {process.returncode}"
                    )
                    outcomes.append(_outcome(vars(died), given.log))
                running.remove(job)
                if mine:
                    running.append([mine, _worker(mine, given)])
    return outcomes


def _worker(seeds: list[int], given: argparse.Namespace) -> Any:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        __package__ or "fuzz",
        "--worker",
        "--seed",
        str(seeds[0]),
        "--networks",
        str(len(seeds)),
        "--most",
        str(given.most),
    ]
    command += ["--all-kinds"] if given.all_kinds else []
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _outcome(data: dict[str, Any], log: Path | None) -> Outcome:
    outcome = Outcome(**{**data, "counts": Counter(data["counts"])})
    if log is not None:
        with log.open("a") as file:
            _write(file, data)
    if outcome.failed:
        print(
            f"seed {outcome.seed}: {outcome.kind} {outcome.stage}: {outcome.detail}"[:400],
            flush=True,
        )
    return outcome


def _write(file: IO[str], data: dict[str, Any]) -> None:
    file.write(json.dumps(data) + "\n")


def _counted(outcomes: list[Outcome]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in Counter(o.kind for o in outcomes).most_common())


def _summary(outcomes: list[Outcome]) -> None:
    total: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    print(f"\n{len(outcomes)} networks of {len(KINDS)} kinds of operations: {_counted(outcomes)}")
    print(", ".join(f"{key}: {n}" for key, n in total.items()))
    declined = [" ".join(o.detail.split()[:5]) for o in outcomes if o.kind == "declined"]
    for reason, n in Counter(declined).most_common(8):
        print(f"  declined {n}: {reason}")
    for label, n in Counter(o.label for o in outcomes if o.failed).most_common():
        seeds = [o.seed for o in outcomes if o.failed and o.label == label]
        print(f"  {n} x {label}: seeds {seeds[:8]}")


if __name__ == "__main__":
    sys.exit(main())
