"""Break trainings on purpose: each must end bit-equal to a training that nothing happened to.

    python -m tests.helpers.endurance --trials 50

Runs live in processes of their own, which are killed, find the disk full, or diverge; then they are
started again, as users do it, until they are done.

- killed: by SIGKILL at random moments.
- killed in a write: by SIGKILL within the bytes of a checkpoint, before it gets its name, or after.
- full disk: there is room for a part of what is written. One refusal, files as before, then room.
- diverged: a loss that is NaN or infinite, or rates that explode. A refusal that names the gate.
- many steps: 20,000 of them, in which memory and history must not grow.

A run is a user's training loop with the checkpoints of docs/usage.md, or `polarprune train`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Import here what runs import late, so that not every fork does it again.
import jinja2  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import pydantic  # noqa: F401
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import polarprune as pp
import polarprune.cli.experiments
from polarprune.cli import app
from polarprune.cli.demo import load_digits
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.runs import run
from tests.helpers.broken_runs import (
    EVERY,
    RECIPE,
    STEPS,
    Case,
    Doom,
    Loop,
    Net,
    Parts,
    Tiny,
    Violation,
    command,
    demand,
    disk,
    one_line,
    same,
    started,
    training,
    write_images,
)

MANY, WARM, GROWTH = 20_000, 2_000, 4 * 2**20  # steps, steps before memory counts, bytes
MOST_KILLS = 6


class Trials:
    """What is compared with, once made, and the trials themselves."""

    def __init__(self, folder: Path, many: int) -> None:
        self.folder, self.many, self.counts = folder, many, Counter[str]()
        self.data, self.images = load_digits(), folder / "images"
        write_images(self.images)
        self.wholes: dict[Any, tuple[Path, float]] = {}

    def place(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    # runs to which nothing happens

    def whole(self, case: Case) -> tuple[Path, float]:
        """Return the folder of an uninterrupted run, and how long it took."""
        if case not in self.wholes:
            place = self.place()
            ended = started(Loop(case, self.data, place), place / "log")
            demand(ended.code == 0, f"the whole run ends with {ended.code}: {ended.said[-600:]}")
            self.wholes[case] = place, ended.seconds
        return self.wholes[case]

    def whole_command(self, word: str) -> tuple[Path, float]:
        if word not in self.wholes:
            place = self.place()
            ended = started(training(self.images, place / "out", word), place / "log")
            demand(ended.code == 0, f"the whole run ends with {ended.code}: {ended.said[-600:]}")
            self.wholes[word] = place / "out", ended.seconds
        return self.wholes[word]

    def compare(self, case: Case, place: Path) -> None:
        """Compare state, plan, history, the optimizer's state, and the file byte for byte."""
        wanted, _ = self.whole(case)
        parts = ("the state", "the plan", "the history", "the optimizer's state")
        results = [torch.load(at / "result.pt", weights_only=True) for at in (wanted, place)]
        for part, one, other in zip(parts, *results, strict=True):
            demand(same(one, other), f"{part} differs ({case})")
        files = [(at / "small.safetensors").read_bytes() for at in (wanted, place)]
        demand(files[0] == files[1], f"small.safetensors differs ({case})")

    def compare_commands(self, word: str, out: Path) -> None:
        wanted, _ = self.whole_command(word)
        names = [
            "card.json",
            "small.safetensors",
            "tuned.safetensors",
            "report.json",
            "baseline.safetensors",
            "sweep.json",
            "sweep.png",
        ]
        found = {
            file.relative_to(wanted)
            for file in wanted.rglob("*")
            if file.name in names and file.is_file()
        }
        demand(len(found) >= 5, f"there is only {found}")
        for name in found:
            demand((out / name).exists(), f"{name} is missing")
            equal = without_times(out / name) == without_times(wanted / name)
            demand(equal, f"{name} differs")
        left = [file.name for file in out.rglob("*.new")]
        demand(not left, f"left behind: {left}")
        rows = [
            json.loads(row)
            for file in out.rglob("log.jsonl")
            for row in file.read_text().splitlines()
        ]
        demand(all("loss" in row for row in rows), "the log has torn lines")

    # kills

    def killed(self, dice: random.Random) -> None:
        case = Case.draw(dice)
        seconds, place = self.whole(case)[1], self.place()
        self._until_done(
            Loop(case, self.data, place), place, lambda: (dice.uniform(0.02, seconds), None), dice
        )
        self.compare(case, place)

    def killed_in_a_write(self, dice: random.Random) -> None:
        case, place = Case.draw(dice), self.place()
        self._until_done(
            Loop(case, self.data, place), place, lambda: (None, self._doom(dice)), dice
        )
        self.compare(case, place)

    def train_killed(self, dice: random.Random) -> None:
        seconds, place = self.whole_command("train")[1], self.place()
        task = training(self.images, place / "out")
        self._until_done(task, place, lambda: (dice.uniform(0.02, seconds), None), dice)
        self.compare_commands("train", place / "out")

    def train_killed_in_a_write(self, dice: random.Random) -> None:
        place = self.place()
        task = training(self.images, place / "out")
        self._until_done(task, place, lambda: (None, self._doom(dice)), dice)
        self.compare_commands("train", place / "out")

    def _doom(self, dice: random.Random) -> Doom:
        moment = dice.choice(("in the bytes", "before the name", "after the name"))
        return Doom(moment, dice.randint(1, 4 if moment == "in the bytes" else 9), dice.random())

    def _until_done(
        self,
        task: Callable[[], Any],
        place: Path,
        threat: Callable[[], tuple[float | None, Doom | None]],
        dice: random.Random,
    ) -> None:
        """Start a run again and again, and kill it at least once and at most a few times."""
        kills, most = 0, dice.randint(2, MOST_KILLS)
        while True:
            seconds, doom = threat() if kills < most else (None, None)

            def doomed(doom: Doom | None = doom) -> None:
                if doom is not None:
                    doom.install()
                task()

            ended = started(doomed, place / "log", seconds)
            if ended.code == 0 and not kills:  # it was quicker: all is to be done again
                shutil.rmtree(place)
                place.mkdir()
                continue
            if ended.code == 0:
                return
            demand(ended.code == -signal.SIGKILL, f"ends with {ended.code}: {ended.said[-600:]}")
            kills += 1
            self.counts["kills"] += 1
            for file in (*place.rglob("*.pt"), *place.rglob("*.checkpoint")):
                torch.load(file, weights_only=True)  # whole, or not there

    # full disks

    def full_disk_loop(self, dice: random.Random) -> None:
        """The loop's own checkpoint does not fit."""
        case, late = Case.draw(dice), dice.randint(1, STEPS // EVERY - 1)
        room = dice.choice((0, 4096, 30_000))
        with disk(self.place()) as full:

            def fill(loop: Loop, parts: Parts) -> None:
                if loop.writes == late and full.limit is None:
                    full.leave(room)

            task = Loop(case, self.data, full.folder, fill)
            ended = started(task, self.place() / "log")
            demand(ended.code == 70 and "Error" in ended.said, f"no error: {ended.said[-300:]}")
            self.counts["refusals"] += 1
            step = torch.load(task.checkpoint, weights_only=True)[0]["step"]
            demand(step == late * EVERY, f"the checkpoint is of step {step}, not {late * EVERY}")
            full.leave(None)
            task = Loop(case, self.data, full.folder)
            ended = started(task, self.place() / "log")
            demand(ended.code == 0, f"it does not go on: {ended.said[-600:]}")
            self.compare(case, full.folder)

    def full_disk_save(self, dice: random.Random) -> None:
        """Save over a file on a full disk: `save` raises and keeps it; with room, it succeeds."""

        def task() -> None:
            torch.manual_seed(0)
            model = Net()
            graph = pp.trace(model, self.data.train_x[:2])
            small = [
                pp.shrink(
                    model,
                    graph,
                    {
                        name: list(range(least, group.size))
                        for name, group in graph.prunable.items()
                    },
                )
                for least in (2, 0)
            ]
            file = full.folder / "small.safetensors"
            pp.save(small[0], file)
            before = file.read_bytes()
            full.leave(dice.choice((0, 4096, 8192)))
            try:
                pp.save(small[1], file)
            except pp.PruneError as error:
                wanted = rf"save: {file} cannot be written: .*(No space|too large).*free some space"
                demand(re.match(wanted, str(error)), f"it says {error}")
            else:
                raise Violation("it was saved on a full disk")
            full.leave(None)
            demand(file.read_bytes() == before, "the file before is another")
            for one, again in ((small[0], False), (small[1], True)):
                if again:
                    pp.save(one, file)
                loaded = pp.load(file, model=Net())
                demand(same(dict(loaded.state_dict()), dict(one.state_dict())), "other weights")
            demand({p.name for p in full.folder.iterdir()} == {file.name}, "something is left")

        with disk(self.place()) as full:
            ended = started(task, self.place() / "log")
            demand(ended.code == 0, ended.said[-600:])
            self.counts["refusals"] += 1

    def full_disk_train(self, dice: random.Random) -> None:
        self._with_more_and_more_room("train", dice)

    def full_disk_sweep(self, dice: random.Random) -> None:
        self._with_more_and_more_room("sweep", dice)

    def _with_more_and_more_room(self, word: str, dice: random.Random) -> None:
        """Try again with a little more free space each time, until there is enough."""
        with disk(self.place()) as full:
            out, room, refusals = full.folder / "out", 0, 0
            task = training(self.images, out, word)

            def cramped() -> None:
                full.leave(room)
                task()

            while True:
                ended = started(cramped, self.place() / "log")
                full.leave(None)
                if ended.code == 0:
                    break
                line = one_line(ended)
                wanted = r"PruneError: .*/out\S*:? (it )?cannot be written: .*space,? or give"
                demand(re.match(wanted, line) or "; give a folder." in line, line)
                refusals += 1
                for file in out.rglob("*.checkpoint"):
                    torch.load(file, weights_only=True)
                for file in out.rglob("*.json"):
                    json.loads(file.read_text())
                demand(not [*out.rglob("*.new")], "a part of a file is left")
                room += dice.choice((4096, 8192, 16_384, 32_768))
            demand(refusals, "the disk was never full")
            self.counts["refusals"] += refusals
            self.compare_commands(word, out)

    def full_disk_export(self, dice: random.Random) -> None:
        """`export`, and `report --html`."""
        place = self.whole_command("train")[0]
        suffix = dice.choice((".onnx", ".pt2"))
        with disk(self.place()) as full:
            file, page = full.folder / f"small{suffix}", full.folder / "page.html"
            file.write_bytes(b"before")
            page.write_text("before")
            task = command(
                "export", place / "small.safetensors", "--shape", "1,3,32,32", "--to", file
            )
            shown = command("report", place / "report.json", "--html", page)
            for one in (task, shown):

                def cramped(one: Callable[[], None] = one) -> None:
                    full.leave(4096)
                    one()

                line = one_line(started(cramped, self.place() / "log"))
                demand(str(full.folder) in line and "free some space" in line, line)
                full.leave(None)
                self.counts["refusals"] += 1
            demand(file.read_bytes() == b"before" == page.read_bytes(), "a file before is another")
            left = {path.name for path in full.folder.iterdir()} - {file.name, page.name}
            demand(not left, f"left behind: {left}")
            for one in (task, shown):
                ended = started(one, self.place() / "log")
                demand(ended.code == 0, f"it does not go on: {ended.said[-600:]}")
            demand(page.read_text() == (place / "report.html").read_text(), "another page")
            demand(file.stat().st_size > 1000, "nothing was written")

    def full_disk_demo(self, dice: random.Random) -> None:
        with disk(self.place()) as full:
            out = full.folder / "out"

            def task(room: int | None = dice.choice((0, 50_000, 150_000))) -> None:
                numbers = {"plain_epochs": 1, "epochs": 1, "tune_epochs": 1}
                kept = app.Settings
                app.Settings = lambda **given: kept(**{**given, **numbers})  # type: ignore
                full.leave(room)
                app.app(["demo", "--epochs", "1", "--out", str(out)])

            line = one_line(started(task, self.place() / "log"))
            demand("free some space" in line or "give a folder" in line, line)
            self.counts["refusals"] += 1
            ended = started(lambda: task(None), self.place() / "log")
            demand(ended.code == 0, f"it does not go on: {ended.said[-600:]}")
            names = {"small.safetensors", "report.json", "report.html", "gates.png"}
            demand({path.name for path in out.iterdir()} == names, "other files")

    # divergence

    def diverged(self, dice: random.Random) -> None:
        """The gate is named, nothing is counted, and the last checkpoint is good."""
        case = Case.draw(dice, steps=dice.choice((STEPS, 1600)), every=7)
        late = dice.randrange(case.every, case.steps // 2)
        how, place = dice.choice(("NaN", "infinite", "exploding")), self.place()
        if how == "exploding":  # right after a checkpoint: numbers are finite for a while
            late -= late % case.every

        held: list[Parts] = []

        def meddle(loop: Loop, parts: Parts) -> None:
            held[:] = [parts]
            if parts[0].step_count == late:
                loop.factor = {"NaN": math.nan, "infinite": math.inf, "exploding": 1e30}[how]
                for group in parts[2].param_groups if how == "exploding" else ():
                    group["lr"] = 1e30

        def task() -> None:
            try:
                Loop(case, self.data, place, meddle)()
            except pp.PruneError as error:
                last = late + max(1, case.steps // 400) - 1 + 2 * (how == "exploding")
                _check_refusal(error, held[0], range(late, last + 1))
                return
            raise Violation("the training did not end")

        ended = started(task, place / "log")
        demand(ended.code == 0, f"{how}: {ended.said[-600:]}")
        self.counts["refusals"] += 1
        ended = started(Loop(case, self.data, place), place / "log")
        demand(ended.code == 0, f"it does not go on: {ended.said[-600:]}")
        self.compare(case, place)

    # memory

    def many_steps(self, dice: random.Random) -> None:
        place = self.place()
        compact = dice.choice(("auto", None))

        def task() -> None:
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)
            )
            x, y = torch.randn(64, 6), torch.randint(3, (64,))
            pruner = pp.Pruner(model, x[:2], macs=0.5, steps=self.many, compact=compact)
            optimizer = torch.optim.Adam(pruner.param_groups(lr=0.01))
            pruner.attach(optimizer)
            seen = {}
            for step in range(self.many):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if step % 1000 == 0:
                    pruner.state_dict()
                if step + 1 in (min(WARM, self.many // 2), self.many):
                    gc.collect()
                    seen[step + 1] = _resident(), len(gc.get_objects())
            (memory, objects), (later, more) = seen.values()
            pruner.export()
            print(f"{(later - memory) / 2**20:.2f} MiB, {more - objects} objects more")
            demand(later - memory < GROWTH, f"memory grew by {(later - memory) / 2**20:.1f} MiB")
            rows = len(pruner.history)
            demand(rows <= 2 * 400 + 2, f"the history has {rows} rows")
            demand(more - objects < 40 * rows, f"{more - objects} objects more")

        ended = started(task, place / "log")
        demand(ended.code == 0, ended.said[-600:])


def _check_refusal(error: pp.PruneError, parts: Parts, steps: range) -> None:
    """By the step at which the pruner looks at its gates."""
    pruner = parts[0]
    said = (
        r"(\S+: its gate has become NaN or infinite \(\d+ groups\)|the gates: their steps have "
        r"become NaN or infinite)\. The training has diverged: "
        r"lower the learning rate or clip gradients, and start again from the last checkpoint\."
    )
    found = re.fullmatch(said, str(error))
    demand(found and found[1].partition(":")[0] in {*pruner.gates, "the gates"}, f"it says {error}")
    demand(pruner.step_count in steps, f"at step {pruner.step_count}, not in {steps}")
    try:
        pruner.export()
    except pp.PruneError as again:
        demand("NaN or infinite" in str(again), f"export says {again}")
    else:
        raise Violation("it was exported")


def _resident() -> int:
    """Return how many bytes of memory this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


PLAN = {  # how many of 50
    "killed": 15,
    "killed in a write": 10,
    "train killed": 5,
    "train killed in a write": 5,
    "full disk loop": 3,
    "full disk save": 2,
    "full disk train": 2,
    "full disk sweep": 1,
    "full disk export": 1,
    "full disk demo": 1,
    "diverged": 4,
    "many steps": 1,
}


def without_times(file: Path) -> bytes:
    """Return the content of a file; of a report, all but the measured speed."""
    if file.name != "report.json":
        return file.read_bytes()
    report = json.loads(file.read_text())
    del report["results"]["latency_ms"]
    return json.dumps(report).encode()


def drawn(count: int, only: list[str]) -> list[str]:
    """Return the kinds of trials in turn, each as often as planned."""
    kinds = {kind: number for kind, number in PLAN.items() if not only or kind in only}
    turns = [kind for turn in range(max(kinds.values())) for kind in kinds if kinds[kind] > turn]
    return [turns[number % len(turns)] for number in range(count)]


def endure(
    count: int, seed: int, folder: Path, only: list[str], many: int
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Run this many trials; return what came of them, and a line for each violation."""
    torch.set_num_threads(1)
    NETWORKS["endurance"], PRESETS["endurance"] = Tiny, RECIPE
    run.CHECKPOINT_PAUSE = 0.0  # a checkpoint after every epoch
    trials = Trials(folder, many)
    found: dict[str, Counter[str]] = {}
    wrong = []
    for number, kind in enumerate(drawn(count, only), seed):
        mine = found.setdefault(kind, Counter())
        before = Counter(trials.counts)
        try:
            getattr(trials, kind.replace(" ", "_"))(random.Random(f"{kind} {number}"))
            mine["bit-equal"] += 1
        except Exception as error:
            wrong.append(f"trial {number} ({kind}): {error!r}")
            print(wrong[-1], flush=True)
        mine["trials"] += 1
        mine.update(trials.counts - before)
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="break trainings, and let them go on")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], choices=PLAN)
    parser.add_argument("--steps", type=int, default=MANY, help="of the trial of many steps")
    given = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found, wrong = endure(given.trials, given.seed, Path(folder), given.only, given.steps)
    columns = ("trials", "bit-equal", "kills", "refusals")
    print(f"{'':24}" + "".join(f"{column:>10}" for column in columns))
    for kind in (kind for kind in PLAN if kind in found):
        print(f"{kind:24}" + "".join(f"{found[kind][column]:10}" for column in columns))
    total = sum(found.values(), Counter[str]())
    print(f"{'all':24}" + "".join(f"{total[column]:10}" for column in columns))
    print(f"{time.perf_counter() - start:.0f} s")
    print(*wrong[:20], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
